"""Which sub-sequences are in which mini-batch of a recipe whose loss is `frames`; read without loading torch."""

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from starling.chance import derive_seed
from starling.speech.hybrid.config import SequencesConfig
from starling.speech.hybrid.sequences import Pieces, SequencePlanner
from starling.speech.hybrid.store import AlignedFrames
from starling.speech.recipe import Recipe
from starling.speech.training.plan import divide_utterances, open_training_set
from starling.speech.union import SpeechSets
from starling.workload import Ticket


class FramePlan:
    """The mini-batches of a recipe: a pure function of its seed and the ticket.

    `frames` are the aligned utterances of `speech_set`. Where the recipe divides the data, a mini-batch is drawn from
    the ticket's part, and an epoch only counts mini-batches.
    """

    examples = "sub-sequences"

    def __init__(self, recipe: Recipe, speech_set: SpeechSets, frames: AlignedFrames) -> None:
        self.recipe = recipe
        self.speech_set = speech_set
        self.frames = frames
        self.utterances = frames.utterances
        self.num_parts = 1 if recipe.partition == "identical" else recipe.num_workers
        seed = derive_seed(recipe.seed, "plan")
        config = recipe.sequences or SequencesConfig()
        self._planner = SequencePlanner(frames.lengths, config, recipe.batches.accumulate, seed)

    @property
    def num_examples(self) -> int:
        """Sub-sequences of an epoch."""
        return self._planner.num_sequences

    def num_batches(self, epoch: int) -> int:
        """Mini-batches of an epoch; all epochs have as many."""
        return self._planner.num_batches

    def passes(self, times: Counter[str]) -> None:
        """Each sub-sequence should be seen once in each epoch."""

    def of(self, ticket: Ticket) -> list[Pieces]:
        """The micro-batches of a ticket's mini-batch."""
        if self._parts is not None:
            return self._planner.draw(ticket.part, ticket.step, self._parts)
        return self._planner.batch(ticket.epoch, ticket.index)

    def ids(self, ticket: Ticket) -> Iterator[str]:
        """The names of a mini-batch's sub-sequences."""
        for pieces in self.of(ticket):
            yield from self.names(pieces)

    def names(self, pieces: Pieces) -> tuple[str, ...]:
        """`utterance[first:end]` of each sub-sequence; `utterance@speed[first:end]` at another speed."""
        return tuple(f"{self._name(utterance)}[{first}:{end}]" for utterance, first, end in pieces.tolist())

    def _name(self, utterance: int) -> str:
        name, speed = self.speech_set.id(int(self.utterances[utterance])), float(self.frames.speeds[utterance])
        return name if speed == 1.0 else f"{name}@{speed:g}"

    @cached_property
    def _parts(self) -> NDArray[np.int32] | None:
        return divide_utterances(self.recipe, self.speech_set, self.utterances)


def load_frame_plan(recipe: Recipe, frames: Path) -> FramePlan:
    """The plan of a recipe whose training set is prepared and aligned. DataError where it is not."""
    train = open_training_set(recipe)
    return FramePlan(recipe, train, AlignedFrames(frames, recipe.features.mels_at(recipe.data.sampling_rate)))
