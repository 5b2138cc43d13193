"""Reading checkpoints back, with every file checked first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starling.checkpoint.files import read_json, read_tensors
from starling.checkpoint.manifest import MANIFEST, MODEL, Manifest, TicketRecord, age, read_manifest, verify
from starling.checkpoint.state import LearnerState, ShardState
from starling.errors import CheckpointError
from starling.workload import Position

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose files are as they were written."""

    folder: Path
    manifest: Manifest

    @property
    def model_folder(self) -> Path:
        """The consensus model."""
        return self.folder / MODEL

    def learner(self, rank: int) -> LearnerState:
        """The state of one of the learners that wrote this checkpoint. Raises CheckpointError if there is none."""
        from starling.checkpoint.encoding import decode_state

        if rank >= self.manifest.learners:
            raise CheckpointError(
                f"{self.folder} holds the states of {self.manifest.learners} learners, not of learner {rank}; "
                "a run can be resumed from a checkpoint of training, not of a simulation"
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
                is_worker=scalars["is_worker"],
                shards=tuple(_decode_shard(shard, tensors) for shard in scalars["shards"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} does not hold a learner's state ({error!r})") from error

    def consensus(self) -> Tensor:
        """The model that all learners agree on `[P]`. Raises CheckpointError if theirs are of different sizes."""
        from starling.consensus import consensus

        ranks = range(self.manifest.learners)
        shapes = {tuple(self.learner(rank).weights.shape) for rank in ranks}
        if len(shapes) > 1:
            raise CheckpointError(f"{self.folder}: its learners' weights have shapes {sorted(shapes)}; use another one")
        return consensus((self.learner(rank).weights for rank in ranks), [self.learner(rank).kept for rank in ranks])

    def start(self, rank: int, world: int) -> LearnerState:
        """The state that learner `rank` of `world` continues from.

        With as many learners as before, each continues from its own state. With another number, all begin with
        the consensus weights, and learner r with the optimizer state of the former learner r modulo their
        number. The learner that keeps a model shard now continues from what its keeper saved. The time spent is that of
        the last learner to arrive, the same for all. Any number may continue in mid-epoch: what a mini-batch
        holds does not depend on it. Raises CheckpointError if the checkpoint holds no learner's state.
        """
        before = self.manifest.learners
        if before == 0:
            return self.learner(rank)
        former = self.learner(rank % before)
        shards = self._shards() | {(shard.start, shard.stop): shard for shard in former.shards}
        start = replace(former, minutes=self.manifest.minutes, shards=tuple(shards.values()))
        if world == before:
            return start
        buffers = former.buffers if former.is_worker else self.learner(0).buffers  # a server's are those of the start
        return replace(start, rank=rank, world=world, weights=self.consensus(), buffers=buffers)

    def _shards(self) -> dict[tuple[int, int], ShardState]:
        """What all learners together kept, by place; of what several kept, the first one's."""
        found: dict[tuple[int, int], ShardState] = {}
        for rank in reversed(range(self.manifest.learners)):
            scalars = read_json(self.folder / f"learner-{rank}.json")
            if isinstance(scalars, dict) and scalars.get("shards"):
                found |= {(shard.start, shard.stop): shard for shard in self.learner(rank).shards}
        return found


def _flat(weights: Tensor) -> Tensor:
    """Weights `[P]` as they are; ValueError if they are none."""
    if weights.ndim != 1 or not weights.is_floating_point():
        raise ValueError(f"weights of shape {list(weights.shape)} and dtype {weights.dtype}")
    return weights


def _decode_shard(scalars: dict[str, Any], tensors: dict[str, Tensor]) -> ShardState:
    from starling.checkpoint.encoding import decode_state

    start, stop = int(scalars["start"]), int(scalars["stop"])
    return ShardState(start, stop, tensors["weights"][start:stop], decode_state(scalars["optimizer"], tensors))


def checkpoints_in(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first; folders of other names are none of ours."""
    found = [(age(path.name), path) for path in folder.glob("step-*") if (path / MANIFEST).is_file()]
    return [path for _, path in sorted((order, path) for order, path in found if order is not None)]


def load(folder: Path) -> Checkpoint:
    """A checkpoint, after every file was compared with its SHA-256.

    Raises CheckpointError naming the file that is missing, damaged or newer than this version, and the newest of the
    older checkpoints beside it that is whole: to take that one instead is for people to decide.
    """
    try:
        return _load(folder)
    except CheckpointError as error:
        older = _older(folder)
        if not older:
            raise
        whole = next((path for path in reversed(older) if is_whole(path)), None)
        hint = f"of {len(older)} older ones beside it none is whole"
        if whole is not None:
            hint = f"{whole} is older and whole: to continue from it, move {folder} away first"
        raise CheckpointError(f"{error}; {hint}") from error


def is_whole(folder: Path) -> bool:
    """Whether every file of a checkpoint is as it was written."""
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
    own = age(folder.name)
    return [path for path in checkpoints_in(folder.parent) if own is not None and (age(path.name) or own) < own]


def latest(experiment: Path) -> Path:
    """The newest complete checkpoint of an experiment folder; a checkpoint's own folder is taken as it is.

    Raises CheckpointError when there is none.
    """
    if (experiment / MANIFEST).is_file():
        return experiment
    if not experiment.is_dir():
        raise CheckpointError(f"{experiment}: no such folder; give an experiment that `starling train` has written")
    found = checkpoints_in(experiment / "checkpoints")
    if not found:
        raise CheckpointError(f"{experiment}/checkpoints holds no complete checkpoint; train it first")
    return found[-1]
