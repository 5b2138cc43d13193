"""Reads checkpoints after verifying every file, and tells which of them may be removed: never the newest good one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starling.checkpoint import files
from starling.checkpoint.state import LearnerState, ShardState
from starling.errors import CheckpointError
from starling.strategies.islands import NO_ISLANDS, Island

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose files were verified when it was loaded."""

    folder: Path
    manifest: files.Manifest

    @property
    def model_folder(self) -> Path:
        """The folder of the consensus model."""
        return self.folder / files.MODEL

    def learner(self, rank: int) -> LearnerState:
        """The saved state of learner `rank`. Raises CheckpointError if the checkpoint does not contain it."""
        if rank >= self.manifest.learners:
            raise CheckpointError(
                f"{self.folder} has the states of {self.manifest.learners} learners, but not of learner {rank}; "
                "resume from a checkpoint of training: one of a simulation has no learner states"
            )
        for name in (f"learner-{rank}.safetensors", f"learner-{rank}.json"):
            if name not in self.manifest.files:
                raise CheckpointError(f"{self.folder / files.MANIFEST} does not list {name}; use another checkpoint")
        tensors = files.read_tensors(self.folder / f"learner-{rank}.safetensors")
        path = self.folder / f"learner-{rank}.json"
        scalars: dict[str, Any] = files.read_json(path)
        try:
            return LearnerState.decode(scalars, tensors)
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
        size = 1 if shard is None else shard.cut.size
        parts = [
            consensus((self.learner(rank).weights for rank in island), [self.learner(rank).kept for rank in island])
            for island in (ranks[member::size] for member in range(size))
        ]
        return parts[0] if shard is None else shard.cut.whole(parts)

    def start(self, rank: int, world: int, strategy: str, island: Island = NO_ISLANDS) -> LearnerState:
        """The state from which learner `rank` of `world` resumes under a `strategy`, in the form of
        `Strategy.described`, with islands like `island`.

        If none of these has changed, each learner resumes from its own state. Otherwise (`what_changed`) all resume
        from the consensus weights, without the strategy's state, and with the optimizer state of former learner 0, or
        of the first island: learners with different momentum would not keep one model. Learner r takes the buffers of
        former learner r modulo their number. With islands the state is then that of a whole model. Under the same
        strategy the state includes all saved model shards, so that any learner can keep any of them. In all cases it
        has the longest training time of all learners. Raises CheckpointError if the checkpoint has no learner states.
        """
        before, changed = self.manifest.learners, self.what_changed(world, strategy, island)
        if before == 0:
            return self.learner(rank)
        first = self.learner(0)
        shard, minutes, shards = first.shard_of_island, self.manifest.minutes, dict[tuple[int, int], ShardState]()
        size = 1 if shard is None else shard.cut.size
        if before % size:
            raise CheckpointError(
                f"{self.folder}: its {before} learners are not islands of {size}; use another checkpoint"
            )
        if not changed and size > 1:
            return replace(self.learner(rank), minutes=minutes)
        is_whole = size > 1 or island.size > 1
        former, optimizer = self.learner(rank % (size if is_whole else before)), first.optimizer
        if shard is not None:
            optimizers = [self.learner(member).optimizer for member in range(size)]
            optimizer = shard.cut.whole_of_optimizer(optimizers, shard.order)
        if not is_whole and first.of_strategy == strategy:  # what is kept for a shard means nothing under another one
            shards = self._shards() | {(each.start, each.stop): each for each in former.shards}
        start = replace(former.for_computing(), minutes=minutes, shards=tuple(shards.values()))
        if not changed:
            return start
        return replace(
            start,
            rank=rank,
            world=world,
            weights=self.consensus(),
            # a server's buffers are still those of the start of the run
            buffers=former.buffers if former.is_worker else first.buffers,
            optimizer=optimizer,
            strategy={},
            under_shards=None,
            shard_of_island=None,
        )

    def what_changed(self, world: int, strategy: str, island: Island = NO_ISLANDS) -> str:
        """Why learners cannot each resume from their own state, as the end of a sentence; empty if they can."""
        if self.manifest.learners == 0:
            return ""
        first = self.learner(0)
        if first.of_strategy != strategy:
            return _other_strategy(first.of_strategy, strategy)
        if world != self.manifest.learners:
            return f"{self.manifest.learners} learners saved it, and this run has {world}"
        cut = None if first.shard_of_island is None else first.shard_of_island.cut
        if (island.size, island.tensor > 1) != (1 if cut is None else cut.size, cut is not None and bool(cut.dims)):
            return "this run has other islands"
        return ""

    def _shards(self) -> dict[tuple[int, int], ShardState]:
        """All saved model shards by their place in the weights; of a shard that several learners saved, the first
        learner's copy."""
        found: dict[tuple[int, int], ShardState] = {}
        for rank in reversed(range(self.manifest.learners)):
            scalars = files.read_json(self.folder / f"learner-{rank}.json")
            if isinstance(scalars, dict) and scalars.get("shards"):
                found |= {(shard.start, shard.stop): shard for shard in self.learner(rank).shards}
        return found


@dataclass(frozen=True)
class CheckpointInMemory(Checkpoint):
    """A checkpoint that was not written."""

    states: Sequence[LearnerState]
    """The state of each learner, by rank."""

    @classmethod
    def of(cls, states: Sequence[LearnerState]) -> CheckpointInMemory:
        """The checkpoint of all learners' states."""
        minutes = max(state.minutes for state in states)
        return cls(Path(), files.Manifest.model_construct(learners=len(states), minutes=minutes), states)

    def learner(self, rank: int) -> LearnerState:
        return self.states[rank].copy()  # several learners may resume from it, and each changes its own

    def _shards(self) -> dict[tuple[int, int], ShardState]:
        return {(shard.start, shard.stop): shard for state in reversed(self.states) for shard in state.copy().shards}


def _other_strategy(before: str, now: str) -> str:
    """Differences between the strategy that saved a checkpoint and the strategy of a run, both in the form of
    `Strategy.described`."""
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


def checkpoints_in(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first; other folders are ignored."""
    found = [path for path in folder.glob("step-*") if files.sort_key(path.name) and (path / files.MANIFEST).is_file()]
    return sorted(found, key=lambda path: (files.sort_key(path.name), path))


def load(folder: Path) -> Checkpoint:
    """Load a checkpoint after verifying the SHA-256 of every file.

    Raises a CheckpointError that names the file that is missing, damaged or in another format, and the newest intact
    older checkpoint in the same folder. Starling does not switch to that checkpoint: the user decides.
    """
    try:
        return _load(folder)
    except CheckpointError as error:
        own = files.sort_key(folder.name)
        older = [path for path in checkpoints_in(folder.parent) if files.sort_key(path.name) < own]
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
    manifest = files.read_manifest(folder)
    files.verify(folder, manifest)
    return Checkpoint(folder, manifest)


def latest(experiment: Path) -> Path:
    """The newest complete checkpoint of an experiment folder, or `experiment` itself if it is a checkpoint.

    Raises CheckpointError if there is none.
    """
    if (experiment / files.MANIFEST).is_file():
        return experiment
    if not experiment.is_dir():
        raise CheckpointError(f"{experiment}: no such folder; give an experiment that `starling train` has written")
    found = checkpoints_in(experiment / "checkpoints")
    if not found:
        raise CheckpointError(f"{experiment}/checkpoints: no complete checkpoint; train the experiment first")
    return found[-1]


def surplus(folder: Path, keep: int, written: Path | None = None) -> list[Path]:
    """The checkpoints that may be removed, oldest first: all except the newest `keep` and the newest intact and finite
    one.

    `written` was just written and is known to be intact. Older ones are verified only if it is not finite.
    """
    best = newest_good(folder, written)
    return [path for path in checkpoints_in(folder)[:-keep] if path != best]


def newest_good(folder: Path, written: Path | None = None) -> Path | None:
    """The newest checkpoint in a folder that is intact and finite; `written` is known to be intact."""
    found = reversed(checkpoints_in(folder))
    return next((path for path in found if is_finite(path) and (path == written or is_intact(path))), None)


def is_finite(folder: Path) -> bool:
    """Whether every number in a checkpoint is finite; False if its manifest cannot be read."""
    try:
        return files.read_manifest(folder).is_finite
    except CheckpointError:
        return False
