"""Reads checkpoints after verifying every file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starling.checkpoint.files import read_json, read_tensors
from starling.checkpoint.manifest import MANIFEST, MODEL, Manifest, TicketRecord, read_manifest, sort_key, verify
from starling.checkpoint.state import LearnerState, ShardState, beyond_membership
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
            return LearnerState(
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
                shard_of_island=_decode_island(scalars["island"], tensors) if "island" in scalars else None,
                shards=tuple(_decode_shard(shard, tensors) for shard in scalars["shards"]),
            )
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

    def start(self, rank: int, world: int, island: int = 1, is_tensor: bool = False) -> LearnerState:
        """The state from which learner `rank` of `world` resumes, with islands of `island` ranks, which divide the
        model by rows or, if `is_tensor`, by its plan of tensor parallelism.

        With as many learners in islands of the same size and kind as before, each resumes from its own state. Otherwise
        all resume from the consensus weights, and learner r takes the optimizer state of former learner r modulo their
        number; or the ranks of island i take that of former island i modulo their number. With islands the state is
        then that of a whole model. In all cases the state includes all saved model shards, so that any learner can keep
        any of them, and the longest training time of all learners. Raises CheckpointError if the checkpoint has no
        learner states.
        """
        before = self.manifest.learners
        if before == 0:
            return self.learner(rank)
        of_before = self.learner(0).shard_of_island
        size = 1 if of_before is None else of_before.cut.size
        was_tensor = of_before is not None and bool(of_before.cut.dims)
        if (world, island, is_tensor) == (before, size, was_tensor) and size > 1:
            return replace(self.learner(rank), minutes=self.manifest.minutes)
        if before % size:
            raise CheckpointError(
                f"{self.folder}: its {before} learners are not islands of {size}; use another checkpoint"
            )
        if of_before is not None or island > 1:
            return self._whole(rank, world, rank // island % (before // size) * size, size)
        former = self.learner(rank % before)
        shards = self._shards() | {(shard.start, shard.stop): shard for shard in former.shards}
        start = replace(former, minutes=self.manifest.minutes, shards=tuple(shards.values()))
        if world == before:
            return start
        # a server's buffers are still those of the start of the run
        buffers = former.buffers if former.is_worker else self.learner(0).buffers
        strategy = beyond_membership(start.strategy)
        return replace(start, rank=rank, world=world, weights=self.consensus(), buffers=buffers, strategy=strategy)

    def _whole(self, rank: int, world: int, first: int, size: int) -> LearnerState:
        """The state of a whole model for learner `rank`, with the optimizer state of the former island of `size` whose
        ranks begin with `first`."""
        formers = [self.learner(former) for former in range(first, first + size)]
        own, optimizer = formers[rank % size], formers[0].optimizer
        shard, strategy = own.shard_of_island, beyond_membership(own.strategy)
        if shard is not None:
            optimizer = shard.cut.whole_of_optimizer([former.optimizer for former in formers], shard.order)
        for name, each in strategy.items():
            if each.numel() == own.weights.numel() and shard is not None:
                strategy[name] = shard.cut.whole([former.strategy[name] for former in formers])
            elif each.numel() not in (1, own.weights.numel()):
                raise CheckpointError(
                    f"{self.folder}: the strategy's {name} cannot be divided in another way; resume with islands of "
                    f"{size} and {self.manifest.learners} learners"
                )
        return replace(
            own,
            rank=rank,
            world=world,
            minutes=self.manifest.minutes,
            weights=self.consensus(),
            optimizer=optimizer,
            strategy=strategy,
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
