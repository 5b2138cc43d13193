"""Speech recognition as a training problem: prepared audio, the epoch's plan, the model and its loss."""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from starling.chance import derive_seed
from starling.experiment.recipe import Recipe
from starling.speech.batches import Batch, MiniBatch, load_batch, plan_epoch
from starling.speech.features import LogMel
from starling.speech.losses import ctc_loss
from starling.speech.recogniser import Recogniser
from starling.speech.store import SpeechSet
from starling.speech.tokens import Tokenizer
from starling.workload import Ticket, Workload

_PLANS_KEPT = 2  # the epoch that is being trained on, and the one that is loaded ahead


class SpeechWorkload(Workload[Batch]):
    """The training set of a recipe. Everything random is a pure function of the recipe's seed and the ticket.

    `utterances` are the indices in `speech_set` to train on, `initial` the folder of the recogniser to begin with.
    """

    def __init__(
        self,
        recipe: Recipe,
        speech_set: SpeechSet,
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
        self._plans: OrderedDict[int, list[MiniBatch]] = OrderedDict()

    def make_model(self) -> nn.Module:
        return Recogniser.load(self.initial).model

    def num_batches(self, epoch: int) -> int:
        return len(self._plan(epoch))

    def load(self, ticket: Ticket) -> Sequence[Batch]:
        mini_batch = self._plan(ticket.epoch)[ticket.index]
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

    def _plan(self, epoch: int) -> list[MiniBatch]:
        if epoch not in self._plans:
            seed = derive_seed(self.recipe.seed, "plan")
            durations = self.speech_set.durations[self.utterances]
            self._plans[epoch] = plan_epoch(durations, self.recipe.batches, seed, epoch)
            while len(self._plans) > _PLANS_KEPT:
                self._plans.popitem(last=False)
        return self._plans[epoch]
