"""Speech recognition as a training problem: prepared audio, the epoch's plan, the model and its loss."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from starling.chance import derive_seed
from starling.experiment.recipe import Recipe
from starling.speech.batches import Batch, load_batch
from starling.speech.features import LogMel
from starling.speech.losses import ctc_loss
from starling.speech.planning import Planner
from starling.speech.recogniser import Recogniser
from starling.speech.tokens import Tokenizer
from starling.speech.union import SpeechSets
from starling.workload import Ticket, Workload


class SpeechWorkload(Workload[Batch]):
    """The training set of a recipe. Everything random is a pure function of the recipe's seed and the ticket.

    `utterances` are the indices in `speech_set` to train on, `initial` the folder of the recogniser to begin with.
    """

    def __init__(
        self,
        recipe: Recipe,
        speech_set: SpeechSets,
        features: LogMel,
        tokenizer: Tokenizer,
        utterances: NDArray[np.int64],
        initial: Path,
    ) -> None:
        self.recipe = recipe
        self.speech_set = speech_set
        self.features = features
        self.tokenizer = tokenizer
        self.utterances = utterances
        self.initial = initial

    def make_model(self) -> nn.Module:
        return Recogniser.load(self.initial).model

    def num_batches(self, epoch: int) -> int:
        return self._planner.epoch(epoch).num_batches

    def load(self, ticket: Ticket) -> Sequence[Batch]:
        mini_batch = self._planner.epoch(ticket.epoch)[ticket.index]
        return [
            load_batch(
                self.speech_set,
                self.utterances[indices],
                self.features,
                self.recipe.augment,
                self.tokenizer,
                derive_seed(self.recipe.seed, "augment", ticket.epoch, ticket.index, place),
            )
            for place, indices in enumerate(mini_batch)
        ]

    def loss(self, model: nn.Module, examples: Batch) -> Tensor:
        return ctc_loss(model, examples)

    @cached_property
    def _planner(self) -> Planner:
        durations, shards = self.speech_set.durations, self.speech_set.shards
        if len(self.utterances) < len(self.speech_set):  # otherwise they stay on the disk
            durations, shards = durations[self.utterances], shards[self.utterances]
        return Planner(durations, shards, self.recipe.batches, derive_seed(self.recipe.seed, "plan"))
