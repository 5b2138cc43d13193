"""Speech recognition as a training problem: prepared audio, the epoch's plan, the model and its loss."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from starling.chance import derive_seed
from starling.runs.recipe.recipe import Recipe
from starling.runs.training_set import divide_utterances, make_mixture
from starling.speech.batches import Batch, load_batch
from starling.speech.features import LogMel
from starling.speech.losses import ctc_loss
from starling.speech.partition import PartDraws
from starling.speech.planning import EpochPlan, MiniBatch, Planner
from starling.speech.recogniser import Recogniser
from starling.speech.tokens import Tokenizer
from starling.speech.union import SpeechSets
from starling.workload import Ticket, Unit, Workload


class SpeechWorkload(Workload[Batch]):
    """The training set of a recipe. Everything random is a pure function of the recipe's seed and the ticket.

    `utterances` are the indices in `speech_set` to train on, ascending, `initial` the folder of the recogniser to begin
    with. Where the recipe divides the data, a mini-batch is drawn from the ticket's part and an epoch is only a number.
    """

    def __init__(
        self,
        recipe: Recipe,
        speech_set: SpeechSets,
        features: LogMel,
        tokenizer: Tokenizer,
        utterances: NDArray[np.int32],
        initial: Path,
    ) -> None:
        self.recipe = recipe
        self.speech_set = speech_set
        self.features = features
        self.tokenizer = tokenizer
        self.utterances = utterances
        self.initial = initial
        self.num_parts = 1 if recipe.partition == "identical" else recipe.num_workers

    def make_model(self) -> nn.Module:
        return Recogniser.load(self.initial).model

    def num_batches(self, epoch: int) -> int:
        return self.plan(epoch).num_batches

    def plan(self, epoch: int) -> EpochPlan:
        """Which of `utterances` are in which mini-batch, where all learners see the same."""
        return self._planner.epoch(epoch)

    def load(self, ticket: Ticket) -> Sequence[Batch]:
        return [
            load_batch(
                self.speech_set,
                self.utterances[indices],
                self.features,
                self.recipe.augment,
                self.tokenizer,
                derive_seed(self.recipe.seed, "augment", ticket.epoch, ticket.index, place),
                self.recipe.data.filter.on_bad,
            )
            for place, indices in enumerate(self._planned(ticket))
        ]

    def loss(self, model: nn.Module, examples: Batch) -> Tensor:
        return ctc_loss(model, examples)

    def weight(self, examples: Batch) -> float:
        """Tokens: `ctc_loss` is a mean over them."""
        return float(len(examples.tokens))

    def planned_size(self, ticket: Ticket, unit: Unit) -> float:
        """Its utterances, or the frames of their audio as stored, without padding; with those that will be skipped."""
        indices = np.concatenate(self._planned(ticket))
        if unit == "utterances":
            return float(len(indices))
        seconds = float(self.speech_set.durations[self.utterances[indices]].sum(dtype=np.float64))
        return seconds / self.recipe.features.frame_shift

    def _planned(self, ticket: Ticket) -> MiniBatch:
        """The places in `utterances` of what is in a ticket's mini-batch."""
        if self._draws is not None:
            return self._draws.draw(ticket.part, ticket.step)
        return self.plan(ticket.epoch)[ticket.index]

    @cached_property
    def _planner(self) -> Planner:
        mixture = make_mixture(self.recipe, self.speech_set, self.utterances)
        seed = derive_seed(self.recipe.seed, "plan")
        return Planner(self._durations, self._of_kept(self.speech_set.shards), self.recipe.batches, seed, mixture)

    @cached_property
    def _draws(self) -> PartDraws | None:
        parts = divide_utterances(self.recipe, self.speech_set, self.utterances)
        if parts is None:
            return None
        return PartDraws(self._durations, parts, self.recipe.batches, derive_seed(self.recipe.seed, "draws"))

    @property
    def _durations(self) -> NDArray[np.float32]:
        return self._of_kept(self.speech_set.durations)

    def _of_kept(self, values: NDArray[Any]) -> NDArray[Any]:
        """A value for each utterance that is trained on; nothing is copied where that is all of them."""
        return values if len(self.utterances) == len(values) else values[self.utterances]
