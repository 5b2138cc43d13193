"""Checkpoints that several learners write together: aside, checked, and then renamed in one step.

    checkpoints/step-00001234/learner-0.safetensors    weights, buffers and optimizer tensors of each learner
    checkpoints/step-00001234/learner-0.json           what all had done, its minutes and the optimizer's other values
    checkpoints/step-00001234/model/                   the consensus model, ready for use
    checkpoints/step-00001234/manifest.json            the SHA-256 of every file

Steps are those done by all learners together, so that names tell the age. Learners of an asynchronous strategy come to
the end of an epoch at different times: several checkpoints may then be under way at once, each in a folder of its own.
The last learner to arrive completes one before the next, so that they are completed in their order.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from starling.averaging import rank_ordered_mean
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
from starling.consensus import consensus, consensus_distance
from starling.errors import CheckpointError

WriteModel = Callable[[Path, Tensor, dict[str, Tensor]], None]
"""Writes the model with the weights `[P]` and buffers given into a folder."""


class CheckpointWriter:
    """One learner's part in writing the checkpoints of a run; all learners share one file system.

    `arrive(name)` counts the learners that have written their part of checkpoint `name`, this one included; the last
    of them completes the checkpoint, and removes the older ones that `keep` does not spare. `sync_group_size` learners
    (None: all) claim their mini-batches together.
    """

    def __init__(
        self,
        folder: Path,
        arrive: Callable[[str], int],
        write_model: WriteModel,
        fingerprints: dict[str, str],
        keep: int = 2,
        sync_group_size: int | None = None,
    ) -> None:
        self.folder = folder
        self._arrive = arrive
        self._write_model = write_model
        self._fingerprints = fingerprints
        self._keep = keep
        self._sync_group_size = sync_group_size

    def save(self, state: LearnerState) -> Checkpoint | None:
        """Write this learner's part; the checkpoint if that completed it, None otherwise.

        A checkpoint that is already there, because a resumed run had nothing to add, is left as it is.
        """
        final = self.folder / checkpoint_name(state.position)
        if final.exists():
            return None
        partial = partial_folder(final)
        model_bytes = state.weights.nbytes + sum(buffer.nbytes for buffer in state.buffers.values())
        needed = model_bytes + sum(tensor.nbytes for tensor in state.tensors())
        with writing(final, needed, lambda: remove_part(partial, state.rank)):
            partial.mkdir(parents=True, exist_ok=True)
            write_learner(partial, state)
        if self._arrive(final.name) < state.world:
            return None
        with writing(final, model_bytes, lambda: shutil.rmtree(partial, ignore_errors=True)):
            return self._complete(partial, final, state)

    def save_consensus(self, states: Sequence[LearnerState]) -> Checkpoint:
        """Write the consensus model of `states` alone, for use but not for resuming."""
        final = self.folder / checkpoint_name(states[0].position)
        if final.exists():
            return load(final)
        partial = partial_folder(final)
        with writing(final, states[0].weights.nbytes, lambda: shutil.rmtree(partial, ignore_errors=True)):
            partial.mkdir(parents=True, exist_ok=True)
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
                f"{final}: {', '.join(missing)} did not appear in {partial}; "
                "all learners need one shared file system for the experiment folder"
            )
        scalars = [read_json(path.with_suffix(".json")) for path in paths]
        kept = [[(shard["start"], shard["stop"]) for shard in each["shards"]] for each in scalars]
        weights = consensus((_weights(path) for path in paths), kept)
        workers = [path for path, each in zip(paths, scalars, strict=True) if each["is_worker"]]
        buffers = mean_of_buffers([_buffers(read_tensors(path)) for path in workers]) if state.buffers else {}
        self._write_model(partial / MODEL, weights, buffers)
        distance = consensus_distance((_weights(path) for path in workers), weights)
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
        ).signed()
        write_json(partial / MANIFEST, manifest.model_dump(mode="json"))
        publish(partial, final)
        for old in surplus(self.folder, self._keep, final):
            remove(old)
        return Checkpoint(final, manifest)


def write_learner(folder: Path, state: LearnerState) -> None:
    """Write one learner's state as `learner-<rank>.safetensors` and `learner-<rank>.json`."""
    tensors = {"weights": state.weights} | {f"buffer.{name}": buffer for name, buffer in state.buffers.items()}
    position = state.position
    scalars = {
        "rank": state.rank,
        "world": state.world,
        "next_ticket": TicketRecord.of(position.next_ticket).model_dump(),
        "outstanding": [TicketRecord.of(ticket).model_dump() for ticket in position.outstanding],
        "minutes": state.minutes,
        "optimizer": encode_state(state.optimizer, "optimizer", tensors),
        "is_worker": state.is_worker,
        "shards": [_encode_shard(shard, tensors) for shard in state.shards],
        "is_finite": all_finite(state.tensors()),
    }
    write_tensors(folder / f"learner-{state.rank}.safetensors", tensors)
    write_json(folder / f"learner-{state.rank}.json", scalars)


def _encode_shard(shard: ShardState, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Its place and its optimizer's values; its weights are in those of its learner."""
    optimizer = encode_state(shard.optimizer, f"shard.{shard.start}", tensors)
    return {"start": shard.start, "stop": shard.stop, "optimizer": optimizer}


def _weights(path: Path) -> Tensor:
    """A learner's weights `[P]`, without reading what its optimizer remembers."""
    with safe_open(path, framework="pt") as file:
        weights: Tensor = file.get_tensor("weights")
    return weights


def _buffers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = "buffer."
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def mean_of_buffers(buffers: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Floating-point buffers of those that compute are averaged; the others are the first one's."""
    return {
        name: rank_ordered_mean(each[name] for each in buffers) if first.is_floating_point() else first
        for name, first in buffers[0].items()
    }
