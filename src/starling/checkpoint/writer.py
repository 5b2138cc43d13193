"""Writes a checkpoint from several learners: each adds its files to a partial folder, and the last one publishes it.

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
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from starling.checkpoint.cut import ShardOfIsland
from starling.checkpoint.encoding import all_finite, encode_state
from starling.checkpoint.files import (
    partial_folder,
    publish,
    read_json,
    read_tensors,
    remove,
    remove_part,
    write_json,
    write_tensors,
    writing,
)
from starling.checkpoint.manifest import MANIFEST, MODEL, Listing, Manifest, TicketRecord, checkpoint_name
from starling.checkpoint.reader import Checkpoint, load
from starling.checkpoint.retention import surplus
from starling.checkpoint.state import LearnerState, ShardState
from starling.consensus import are_one_model, consensus, consensus_distance, rank_ordered_mean
from starling.errors import CheckpointError, ProtocolError

WriteModel = Callable[[Path, Tensor, dict[str, Tensor]], None]
"""Writes a model into a folder: `write_model(folder, weights, buffers)`, with weights `[P]`."""


class CheckpointWriter:
    """Writes one learner's part of each checkpoint of a run; all learners share one file system.

    `arrive(name)` returns how many learners, including this one, have written their part of checkpoint `name`. The last
    of them completes the checkpoint, and removes older ones beyond the newest `keep`; see `surplus`. `sync_group_size`
    learners (None: all) claim mini-batches together. With `has_one_model` learners whose weights differ by more than
    rounding are an error, and no checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        arrive: Callable[[str], int],
        write_model: WriteModel,
        fingerprints: dict[str, str],
        keep: int = 2,
        sync_group_size: int | None = None,
        has_one_model: bool = False,
    ) -> None:
        self.folder = folder
        self._arrive = arrive
        self._write_model = write_model
        self._fingerprints = fingerprints
        self._keep = keep
        self._sync_group_size = sync_group_size
        self._has_one_model = has_one_model

    def save(self, state: LearnerState) -> Checkpoint | None:
        """Write this learner's part; return the checkpoint if that completed it, else None.

        Does nothing if the checkpoint exists, as when a resumed run ends without a new mini-batch.
        """
        final = self.folder / checkpoint_name(state.position)
        if final.exists():
            return None
        partial = partial_folder(final)
        num_parts = state.shard_of_island.cut.size if state.shard_of_island else 1
        model_bytes = num_parts * state.weights.nbytes + sum(buffer.nbytes for buffer in state.buffers.values())
        needed = model_bytes + sum(tensor.nbytes for tensor in state.tensors())
        with writing(final, needed, lambda: remove_part(partial, state.rank)):
            partial.mkdir(parents=True, exist_ok=True)
            write_learner(partial, state)
        if self._arrive(final.name) < state.world:
            return None
        with writing(final, model_bytes, lambda: shutil.rmtree(partial, ignore_errors=True)):
            return self._complete(partial, final, state)

    def save_consensus(self, states: Sequence[LearnerState]) -> Checkpoint:
        """Write a checkpoint with only the consensus model of `states`; it cannot be resumed."""
        final = self.folder / checkpoint_name(states[0].position)
        if final.exists():
            return load(final)
        partial = partial_folder(final)
        with writing(final, states[0].weights.nbytes, lambda: shutil.rmtree(partial, ignore_errors=True)):
            partial.mkdir(parents=True, exist_ok=True)
            if self._has_one_model:
                _check_one_model(final, (state.weights for state in states))
            weights = consensus((state.weights for state in states), [state.kept for state in states])
            buffers = mean_of_buffers([state.buffers for state in states if state.is_worker])
            self._write_model(partial / MODEL, weights, buffers)
            distance = consensus_distance((state.weights for state in states if state.is_worker), weights)
            minutes = max(state.minutes for state in states)
            is_finite = math.isfinite(distance) and all_finite([weights, *buffers.values()])
            return self._finish(partial, final, states[0], 0, minutes, distance, is_finite)

    def _complete(self, partial: Path, final: Path, state: LearnerState) -> Checkpoint:
        paths = [partial / f"learner-{rank}.safetensors" for rank in range(state.world)]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise CheckpointError(
                f"{final}: {', '.join(missing)} missing from {partial}; "
                "the experiment folder must be on a file system that all learners share"
            )
        scalars = [read_json(path.with_suffix(".json")) for path in paths]
        kept = [[(shard["start"], shard["stop"]) for shard in each["shards"]] for each in scalars]
        shard = state.shard_of_island
        size = 1 if shard is None else shard.cut.size
        parts = [consensus(map(_weights, paths[member::size]), kept[member::size]) for member in range(size)]
        if self._has_one_model:
            for member in range(size):
                _check_one_model(final, map(_weights, paths[member::size]), size, member)
        weights = parts[0] if shard is None else shard.cut.whole(parts)
        workers = [path for path, each in zip(paths, scalars, strict=True) if each["is_worker"]]
        buffers = mean_of_buffers([_buffers(read_tensors(path)) for path in workers]) if state.buffers else {}
        self._write_model(partial / MODEL, weights, buffers)
        distance = sum(consensus_distance(map(_weights, workers[m::size]), parts[m]) for m in range(size))
        minutes = max(float(each["minutes"]) for each in scalars)
        is_finite = all(each["is_finite"] for each in scalars) and all_finite([weights, *buffers.values()])
        return self._finish(partial, final, state, state.world, minutes, distance, is_finite)

    def _finish(
        self,
        partial: Path,
        final: Path,
        state: LearnerState,
        num_learners: int,
        minutes: float,
        distance: float,
        is_finite: bool,
    ) -> Checkpoint:
        position = state.position
        manifest = Manifest(
            starling=version("starling-asr"),
            fingerprints=self._fingerprints,
            world=state.world,
            learners=num_learners,
            sync_group_size=self._sync_group_size,
            next_ticket=TicketRecord.of(position.next_ticket),
            outstanding=tuple(TicketRecord.of(ticket) for ticket in position.outstanding),
            epochs_ended=state.epochs_ended,
            minutes=minutes,
            consensus_distance=distance if math.isfinite(distance) else None,
            is_finite=is_finite,
            files=Listing.of(partial).entries,
        ).with_digest()
        write_json(partial / MANIFEST, manifest.model_dump(mode="json"))
        publish(partial, final)
        for old in surplus(self.folder, self._keep, final):
            remove(old)
        return Checkpoint(final, manifest)


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


def write_learner(folder: Path, state: LearnerState) -> None:
    """Write one learner's state as `learner-<rank>.safetensors` and `learner-<rank>.json`."""
    tensors = {"weights": state.weights} | {f"buffer.{name}": buffer for name, buffer in state.buffers.items()}
    if state.under_shards is not None:
        tensors["under_shards"] = state.under_shards
    position = state.position
    scalars = {
        "rank": state.rank,
        "world": state.world,
        "next_ticket": TicketRecord.of(position.next_ticket).model_dump(),
        "outstanding": [TicketRecord.of(ticket).model_dump() for ticket in position.outstanding],
        "minutes": state.minutes,
        "optimizer": encode_state(state.optimizer, "optimizer", tensors),
        "strategy": encode_state(state.strategy, "strategy", tensors),
        "is_worker": state.is_worker,
        "of_strategy": state.of_strategy,
        **({"island": _encode_island(state.shard_of_island)} if state.shard_of_island else {}),
        "shards": [_encode_shard(shard, tensors) for shard in state.shards],
        "is_finite": all_finite(state.tensors()),
    }
    write_tensors(folder / f"learner-{state.rank}.safetensors", tensors)
    write_json(folder / f"learner-{state.rank}.json", scalars)


def _encode_island(shard: ShardOfIsland) -> dict[str, Any]:
    """The index of an island's files: which part of the model each of its ranks has saved."""
    cut = shard.cut
    dims = {"dims": cut.dims} if cut.dims else {}
    return {"size": cut.size, "shapes": cut.shapes, **dims, "member": shard.member, "order": shard.order}


def _encode_shard(shard: ShardState, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A shard's place and optimizer values as JSON; its weights are saved with the learner's."""
    optimizer = encode_state(shard.optimizer, f"shard.{shard.start}", tensors)
    return {"start": shard.start, "stop": shard.stop, "optimizer": optimizer}


def _weights(path: Path) -> Tensor:
    """A learner's weights `[P]`, read without its optimizer state."""
    with safe_open(path, framework="pt") as file:
        weights: Tensor = file.get_tensor("weights")
    return weights


def _buffers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = "buffer."
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def mean_of_buffers(buffers: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each floating-point buffer; other buffers are those of the first learner."""
    return {
        name: rank_ordered_mean(each[name] for each in buffers) if first.is_floating_point() else first
        for name, first in buffers[0].items()
    }
