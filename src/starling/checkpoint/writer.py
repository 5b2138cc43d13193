"""Writes a checkpoint of several learners. Each learner adds its files to a partial folder, and the last one publishes
the folder.

    checkpoints/step-00001234/learner-0.safetensors    weights, buffers and optimizer tensors of each learner
    checkpoints/step-00001234/learner-0.json           its position, minutes, and the optimizer's other values; in an
                                                       island, also which part of the model it holds
    checkpoints/step-00001234/model/                   the consensus model, ready for use
    checkpoints/step-00001234/manifest.json            the SHA-256 of every other file

The number in the name counts the mini-batches of all learners, so that names give the order. Learners of an
asynchronous strategy reach a checkpoint barrier at different times, so that several checkpoints may be unfinished at
once, each in its own partial folder. They are completed in order, because the slowest learner reaches them in order.
"""

import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from starling.checkpoint import files
from starling.checkpoint.reader import Checkpoint, load, surplus
from starling.checkpoint.state import LearnerState, all_finite, buffers_in
from starling.consensus import are_one_model, consensus, consensus_distance, rank_ordered_mean
from starling.errors import CheckpointError, ProtocolError

WriteModel = Callable[[Path, Tensor, dict[str, Tensor]], None]
"""Function that writes a model into a folder: `write_model(folder, weights, buffers)`, with weights `[P]`."""


@dataclass(frozen=True)
class CheckpointWriter:
    """Writes one learner's part of each checkpoint of a run. All learners must share one file system."""

    folder: Path
    arrive: Callable[[str], int]
    """Function that returns the number of learners, including this one, that have written their part of the checkpoint
    with the given name. The last of these learners completes the checkpoint and removes older checkpoints."""
    write_model: WriteModel
    fingerprints: dict[str, str]
    keep: int = 2
    """Number of checkpoints to keep, which are the newest ones; see `surplus`."""
    sync_group_size: int | None = None
    """Number of learners that claim mini-batches together; None means all."""
    has_one_model: bool = False
    """Whether the strategy keeps one model. If so, it is an error if learners' weights differ by more than rounding,
    and no checkpoint is written."""

    def save(self, state: LearnerState) -> Checkpoint | None:
        """Write this learner's part of a checkpoint. Return the checkpoint if this part completed it, else None.

        The method does nothing if the checkpoint exists, for example if a resumed run ends without a new mini-batch.
        """
        final = self.folder / files.checkpoint_name(state.position)
        if final.exists():
            return None
        partial = files.partial_folder(final)
        num_parts = state.shard_of_island.cut.size if state.shard_of_island else 1
        model_bytes = num_parts * state.weights.nbytes + sum(buffer.nbytes for buffer in state.buffers.values())
        scalars, tensors = state.encode()
        needed = model_bytes + sum(tensor.nbytes for tensor in tensors.values())
        with files.writing(final, needed, lambda: files.remove_part(partial, state.rank)):
            partial.mkdir(parents=True, exist_ok=True)
            files.write_tensors(partial / f"learner-{state.rank}.safetensors", tensors)
            files.write_json(partial / f"learner-{state.rank}.json", scalars)
        if self.arrive(final.name) < state.world:
            return None
        with files.writing(final, model_bytes, lambda: shutil.rmtree(partial, ignore_errors=True)):
            paths = [partial / f"learner-{rank}.safetensors" for rank in range(state.world)]
            missing = [path.name for path in paths if not path.is_file()]
            if missing:
                raise CheckpointError(
                    f"{final}: {', '.join(missing)} missing from {partial}; "
                    "the experiment folder must be on a file system that all learners share"
                )
            return self._complete(final, list(map(_Saved, paths)), state, num_saved=state.world)

    def save_consensus(self, states: Sequence[LearnerState]) -> Checkpoint:
        """Write a checkpoint that contains only the consensus model of `states`. Such a checkpoint cannot be
        resumed."""
        final = self.folder / files.checkpoint_name(states[0].position)
        if final.exists():
            return load(final)
        partial = files.partial_folder(final)
        with files.writing(final, states[0].weights.nbytes, lambda: shutil.rmtree(partial, ignore_errors=True)):
            partial.mkdir(parents=True, exist_ok=True)
            return self._complete(final, states, states[0], num_saved=0)

    def _complete(
        self, final: Path, states: Sequence["LearnerState | _Saved"], own: LearnerState, num_saved: int
    ) -> Checkpoint:
        """Add the consensus model and the manifest, and publish the checkpoint, which contains the states of
        `num_saved` learners. `own` is one of the states."""
        partial, shard = files.partial_folder(final), own.shard_of_island
        size = 1 if shard is None else shard.cut.size
        parts, distance = [], 0.0
        for member in range(size):
            island = states[member::size]
            if self.has_one_model:
                _check_one_model(final, (each.weights for each in island), size, member)
            part = consensus((each.weights for each in island), [each.kept for each in island])
            distance += consensus_distance((each.weights for each in island if each.is_worker), part)
            parts.append(part)
        weights = parts[0] if shard is None else shard.cut.whole(parts)
        buffers = mean_of_buffers([each.buffers for each in states if each.is_worker]) if own.buffers else {}
        self.write_model(partial / files.MODEL, weights, buffers)
        manifest = files.Manifest(
            starling=version("starling-asr"),
            fingerprints=self.fingerprints,
            world=own.world,
            learners=num_saved,
            sync_group_size=self.sync_group_size,
            next_ticket=own.position.next_ticket,
            outstanding=own.position.outstanding,
            epochs_ended=own.epochs_ended,
            minutes=max(each.minutes for each in states),
            consensus_distance=distance if math.isfinite(distance) else None,
            is_finite=math.isfinite(distance)
            and all_finite([weights, *buffers.values()])
            and all(each.is_finite for each in states if isinstance(each, _Saved)),
            files=files.listing(partial),
        ).with_digest()
        files.write_json(partial / files.MANIFEST, manifest.model_dump(mode="json"))
        files.publish(partial, final)
        for old in surplus(self.folder, self.keep, final):
            files.remove(old)
        return Checkpoint(final, manifest)


class BackgroundWriter:
    """Runs `CheckpointWriter.save` in a thread.

    Because there is only one thread, checkpoints are completed in order, and there is at most one copy of the state.
    The next call of `check`, `save` or `close` raises an error of the thread unchanged. The process does not exit
    before the last checkpoint is written. The writer's `arrive` must not use a connection on which the learner itself
    may wait.
    """

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer = writer
        self._thread = ThreadPoolExecutor(1, "starling-checkpoint")
        self._last: Future[None] | None = None

    def save(
        self, state: LearnerState, completed: Callable[[Checkpoint], None], writer: CheckpointWriter | None = None
    ) -> None:
        """Wait for the previous save, copy `state`, and start writing the copy.

        If this learner's part completes the checkpoint, the thread calls `completed` with it. `writer` replaces the
        usual writer for this save.
        """
        self.close()
        chosen, copy = writer or self._writer, [state.copy()]

        def write() -> None:
            checkpoint = chosen.save(copy.pop())
            if checkpoint is not None:
                completed(checkpoint)

        self._last = self._thread.submit(write)

    def check(self) -> None:
        """Raise the error of the last save if that save has failed, without waiting for it."""
        if self._last is not None and self._last.done():
            self.close()

    def close(self) -> None:
        """Wait for the last save, and raise its error if it failed."""
        last, self._last = self._last, None
        if last is not None:
            last.result()


class _Saved:
    """The state of a learner as stored in its files. Only the requested tensors are read."""

    def __init__(self, path: Path) -> None:
        scalars = files.read_json(path.with_suffix(".json"))
        self._path = path
        self.minutes = float(scalars["minutes"])
        self.is_worker, self.is_finite = bool(scalars["is_worker"]), bool(scalars["is_finite"])
        self.kept: list[tuple[int, int]] = [(shard["start"], shard["stop"]) for shard in scalars["shards"]]

    @property
    def weights(self) -> Tensor:
        with safe_open(self._path, framework="pt") as file:
            weights: Tensor = file.get_tensor("weights")
        return weights

    @property
    def buffers(self) -> dict[str, Tensor]:
        return buffers_in(files.read_tensors(self._path))


def _check_one_model(final: Path, weights: Iterable[Tensor], size: int = 1, member: int = 0) -> None:
    """Raise ProtocolError unless rank `member` of each island of `size` has the same weights, up to rounding."""
    all_weights = iter(weights)
    first = next(all_weights)
    for number, other in enumerate(all_weights, 1):
        if not are_one_model(first, other):
            distance = float((other - first).norm())
            raise ProtocolError(
                f"{final}: learner {number * size + member}'s weights are {distance:.3g} away from learner {member}'s "
                f"(norm {float(first.norm()):.3g}), but their strategy keeps one model on all learners; the "
                "checkpoint was not saved. Change weights alike on all learners, or not at all, and resume from the "
                "last checkpoint"
            )


def mean_of_buffers(buffers: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of each floating-point buffer. Other buffers come from the first learner."""
    return {
        name: rank_ordered_mean(each[name] for each in buffers) if first.is_floating_point() else first
        for name, first in buffers[0].items()
    }
