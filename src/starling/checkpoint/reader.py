"""Reads checkpoints after verifying every file."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starling.checkpoint.files import read_json, read_tensors
from starling.checkpoint.manifest import MANIFEST, MODEL, Manifest, TicketRecord, read_manifest, sort_key, verify
from starling.checkpoint.state import LearnerState, ShardState
from starling.errors import CheckpointError
from starling.workload import Position

if TYPE_CHECKING:
    from torch import Tensor

    from starling.checkpoint.cut import ShardOfIsland


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose files were verified when it was loaded."""

    folder: Path
    manifest: Manifest

    @property
    def model_folder(self) -> Path:
        """The folder of the consensus model."""
        return self.folder / MODEL

    def learner(self, rank: int) -> LearnerState:
        """The saved state of learner `rank`. Raises CheckpointError if the checkpoint does not contain it."""
        from starling.checkpoint.encoding import decode_state

        if rank >= self.manifest.learners:
            raise CheckpointError(
                f"{self.folder} has the states of {self.manifest.learners} learners, but not of learner {rank}; "
                "resume from a checkpoint of training: one of a simulation has no learner states"
            )
        for name in (f"learner-{rank}.safetensors", f"learner-{rank}.json"):
            if name not in self.manifest.files:
                raise CheckpointError(f"{self.folder / MANIFEST} does not list {name}; use another checkpoint")
        tensors = read_tensors(self.folder / f"learner-{rank}.safetensors")
        path = self.folder / f"learner-{rank}.json"
        scalars: dict[str, Any] = read_json(path)
        prefix = "buffer."
        try:
            state = LearnerState(
                rank=scalars["rank"],
                world=scalars["world"],
                position=Position(
                    TicketRecord.model_validate(scalars["next_ticket"]).ticket,
                    tuple(TicketRecord.model_validate(each).ticket for each in scalars["outstanding"]),
                ),
                minutes=float(scalars["minutes"]),
                weights=_flat(tensors["weights"]),
                buffers={
                    name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)
                },
                optimizer=decode_state(scalars["optimizer"], tensors),
                strategy=decode_state(scalars.get("strategy", {}), tensors),  # version 0.2 wrote none
                is_worker=scalars["is_worker"],
                of_strategy=str(scalars.get("of_strategy", "")),  # version 0.2 wrote none
                under_shards=tensors.get("under_shards"),
                shard_of_island=_decode_island(scalars["island"], tensors) if "island" in scalars else None,
                shards=tuple(_decode_shard(shard, tensors) for shard in scalars["shards"]),
            )
            _check_under_shards(state)
            return state
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} does not contain a learner's state ({error!r})") from error

    def consensus(self) -> Tensor:
        """The consensus weights `[P]`. Raises CheckpointError if the learners' weights differ in shape."""
        from starling.consensus import consensus

        ranks = range(self.manifest.learners)
        shard = self.learner(0).shard_of_island
        shapes = {tuple(self.learner(rank).weights.shape) for rank in ranks}
        if len(shapes) > 1:
            raise CheckpointError(
                f"{self.folder}: its learners' weights have different shapes, {sorted(shapes)}; use another checkpoint"
            )
        if shard is None:
            return consensus(
                (self.learner(rank).weights for rank in ranks), [self.learner(rank).kept for rank in ranks]
            )
        size = shard.cut.size
        return shard.cut.whole(
            [consensus((self.learner(rank).weights for rank in ranks[member::size]), ()) for member in range(size)]
        )

    def start(self, rank: int, world: int, strategy: str, island: int = 1, is_tensor: bool = False) -> LearnerState:
        """The state from which learner `rank` of `world` resumes under a `strategy`, as `Strategy.described` has it,
        with islands of `island` ranks, which divide the model by rows or, if `is_tensor`, by its plan of tensor
        parallelism.

        If nothing of this has changed, each learner resumes from its own state. Otherwise (`what_changed`) all resume
        from the consensus weights, without the strategy's state, and with the optimizer state of former learner 0, or
        of the first island: learners with different momentum would not keep one model. Learner r takes the buffers of
        former learner r modulo their number. With islands the state is then that of a whole model. Under the same
        strategy the state includes all saved model shards, so that any learner can keep any of them. In all cases it
        has the longest training time of all learners. Raises CheckpointError if the checkpoint has no learner states.
        """
        before, changed = self.manifest.learners, self.what_changed(world, strategy, island, is_tensor)
        if before == 0:
            return self.learner(rank)
        first = self.learner(0)
        size = 1 if first.shard_of_island is None else first.shard_of_island.cut.size
        if before % size:
            raise CheckpointError(
                f"{self.folder}: its {before} learners are not islands of {size}; use another checkpoint"
            )
        if not changed and size > 1:
            return replace(self.learner(rank), minutes=self.manifest.minutes)
        if size > 1 or island > 1:
            return self._whole(rank, world, size)
        former = self.learner(rank % before)
        shards: dict[tuple[int, int], ShardState] = {}
        if first.of_strategy == strategy:  # what an optimizer keeps for a shard means something under no other one
            shards = self._shards() | {(shard.start, shard.stop): shard for shard in former.shards}
        start = replace(former.for_computing(), minutes=self.manifest.minutes, shards=tuple(shards.values()))
        if not changed:
            return start
        # a server's buffers are still those of the start of the run
        buffers = former.buffers if former.is_worker else first.buffers
        return replace(
            start,
            rank=rank,
            world=world,
            weights=self.consensus(),
            buffers=buffers,
            optimizer=first.optimizer,
            strategy={},
        )

    def what_changed(self, world: int, strategy: str, island: int = 1, is_tensor: bool = False) -> str:
        """Why learners cannot each resume from their own state, as the end of a sentence; empty: they can."""
        if self.manifest.learners == 0:
            return ""
        first = self.learner(0)
        if first.of_strategy != strategy:
            return _other_strategy(first.of_strategy, strategy)
        if world != self.manifest.learners:
            return f"{self.manifest.learners} learners saved it, and this run has {world}"
        cut = None if first.shard_of_island is None else first.shard_of_island.cut
        if (island, is_tensor) != (1 if cut is None else cut.size, cut is not None and bool(cut.dims)):
            return "this run has other islands"
        return ""

    def _whole(self, rank: int, world: int, size: int) -> LearnerState:
        """The state of a whole model for learner `rank`, with the optimizer state of the first former island of
        `size`."""
        formers = [self.learner(former) for former in range(size)]
        own, optimizer = formers[rank % size], formers[0].optimizer
        shard = own.shard_of_island
        if shard is not None:
            optimizer = shard.cut.whole_of_optimizer([former.optimizer for former in formers], shard.order)
        return replace(
            own,
            rank=rank,
            world=world,
            minutes=self.manifest.minutes,
            weights=self.consensus(),
            optimizer=optimizer,
            strategy={},
            shards=(),
            under_shards=None,
            shard_of_island=None,
        )

    def _shards(self) -> dict[tuple[int, int], ShardState]:
        """All saved model shards by their place in the weights; if several learners saved one, the first learner's."""
        found: dict[tuple[int, int], ShardState] = {}
        for rank in reversed(range(self.manifest.learners)):
            scalars = read_json(self.folder / f"learner-{rank}.json")
            if isinstance(scalars, dict) and scalars.get("shards"):
                found |= {(shard.start, shard.stop): shard for shard in self.learner(rank).shards}
        return found


def _flat(weights: Tensor) -> Tensor:
    """Return `weights` unchanged; raise ValueError unless they are a floating-point vector `[P]`."""
    if weights.ndim != 1 or not weights.is_floating_point():
        raise ValueError(f"weights of shape {list(weights.shape)} and dtype {weights.dtype}")
    return weights


def _check_under_shards(state: LearnerState) -> None:
    """Raise ValueError if a worker's own weights are not of the size of its shards."""
    size = sum(stop - start for start, stop in state.kept)
    if state.under_shards is not None and state.under_shards.shape != (size,):
        raise ValueError(f"under_shards of shape {list(state.under_shards.shape)} for {size} weights in shards")


def _other_strategy(before: str, now: str) -> str:
    """How the strategy that saved a checkpoint differs from that of a run; both as `Strategy.described` has them."""
    if not before:
        return "it does not say under which strategy it was saved"
    try:
        saved, resuming = json.loads(before), json.loads(now)
        name, other, its, options = saved["name"], resuming["name"], saved["options"], resuming["options"]
        keys = sorted(key for key in its.keys() | options.keys() if its.get(key) != options.get(key))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "it was saved under another strategy"
    if name != other:
        return f"{name} saved it, and this run trains with {other}"
    pairs = (f"{key}={json.dumps(its.get(key))}, now {json.dumps(options.get(key))}" for key in keys)
    return f"{name} saved it with other options ({'; '.join(pairs)})"


def _decode_island(scalars: dict[str, Any], tensors: dict[str, Tensor]) -> ShardOfIsland:
    from starling.checkpoint.cut import Cut, ShardOfIsland

    shapes = tuple(tuple(map(int, shape)) for shape in scalars["shapes"])
    dims = tuple(map(int, scalars.get("dims", ())))
    cut, member = Cut(int(scalars["size"]), shapes, dims), int(scalars["member"])
    order = tuple(map(int, scalars["order"]))
    is_valid = 0 <= member < cut.size and sorted(order) == list(range(len(shapes))) and all(shapes)
    is_valid = is_valid and all(0 <= dim < len(shape) for dim, shape in zip(dims, shapes, strict=bool(dims)))
    if not is_valid or cut.local_numbers != tensors["weights"].numel():
        raise ValueError(f"part {member} of an island of {cut.size}")
    return ShardOfIsland(cut, member, order)


def _decode_shard(scalars: dict[str, Any], tensors: dict[str, Tensor]) -> ShardState:
    from starling.checkpoint.encoding import decode_state

    start, stop = int(scalars["start"]), int(scalars["stop"])
    return ShardState(start, stop, tensors["weights"][start:stop], decode_state(scalars["optimizer"], tensors))


def checkpoints_in(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first; other folders are ignored."""
    found = [(sort_key(path.name), path) for path in folder.glob("step-*") if (path / MANIFEST).is_file()]
    return [path for _, path in sorted((order, path) for order, path in found if order is not None)]


def load(folder: Path) -> Checkpoint:
    """Load a checkpoint after verifying the SHA-256 of every file.

    Raises a CheckpointError that names the file which is missing, damaged or of another format, and the newest older
    checkpoint in the same folder that is intact. Starling does not switch to that one: the user decides.
    """
    try:
        return _load(folder)
    except CheckpointError as error:
        older = _older(folder)
        if not older:
            raise
        intact = next((path for path in reversed(older) if is_intact(path)), None)
        hint = f"none of the {len(older)} older checkpoints in {folder.parent} is intact"
        if intact is not None:
            hint = f"the older {intact} is intact: to continue from it, move {folder} away first"
        raise CheckpointError(f"{error}; {hint}") from error


def is_intact(folder: Path) -> bool:
    """Whether a checkpoint is complete and every file is as it was written."""
    try:
        _load(folder)
    except CheckpointError:
        return False
    return True


def _load(folder: Path) -> Checkpoint:
    manifest = read_manifest(folder)
    verify(folder, manifest)
    return Checkpoint(folder, manifest)


def _older(folder: Path) -> list[Path]:
    own = sort_key(folder.name)
    return [path for path in checkpoints_in(folder.parent) if own is not None and (sort_key(path.name) or own) < own]


def latest(experiment: Path) -> Path:
    """The newest complete checkpoint of an experiment folder; if `experiment` is a checkpoint, itself.

    Raises CheckpointError if there is none.
    """
    if (experiment / MANIFEST).is_file():
        return experiment
    if not experiment.is_dir():
        raise CheckpointError(f"{experiment}: no such folder; give an experiment that `starling train` has written")
    found = checkpoints_in(experiment / "checkpoints")
    if not found:
        raise CheckpointError(f"{experiment}/checkpoints: no complete checkpoint; train the experiment first")
    return found[-1]
