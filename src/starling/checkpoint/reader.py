"""Reads checkpoints after verifying every file."""

from __future__ import annotations

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
                shards=tuple(_decode_shard(shard, tensors) for shard in scalars["shards"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} does not contain a learner's state ({error!r})") from error

    def consensus(self) -> Tensor:
        """The consensus weights `[P]`. Raises CheckpointError if the learners' weights differ in shape."""
        from starling.consensus import consensus

        ranks = range(self.manifest.learners)
        shapes = {tuple(self.learner(rank).weights.shape) for rank in ranks}
        if len(shapes) > 1:
            raise CheckpointError(
                f"{self.folder}: its learners' weights have different shapes, {sorted(shapes)}; use another checkpoint"
            )
        return consensus((self.learner(rank).weights for rank in ranks), [self.learner(rank).kept for rank in ranks])

    def start(self, rank: int, world: int) -> LearnerState:
        """The state from which learner `rank` of `world` resumes.

        With as many learners as before, each resumes from its own state. With a different number, all resume from the
        consensus weights, and learner r takes the optimizer state of former learner r modulo their number. In both
        cases the state includes all saved model shards, so that any learner can keep any of them, and the longest
        training time of all learners. Raises CheckpointError if the checkpoint has no learner states.
        """
        before = self.manifest.learners
        if before == 0:
            return self.learner(rank)
        former = self.learner(rank % before)
        shards = self._shards() | {(shard.start, shard.stop): shard for shard in former.shards}
        start = replace(former, minutes=self.manifest.minutes, shards=tuple(shards.values()))
        if world == before:
            return start
        # a server's buffers are still those of the start of the run
        buffers = former.buffers if former.is_worker else self.learner(0).buffers
        return replace(start, rank=rank, world=world, weights=self.consensus(), buffers=buffers)

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
