"""The workload of speech recognition: prepared audio, the plan of its mini-batches, the model and its loss."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from starling.chance import derive_seed
from starling.speech.batches import Batch, load_batch
from starling.speech.features import LogMel
from starling.speech.losses import speech_loss
from starling.speech.phones import Phones
from starling.speech.recogniser import Recogniser
from starling.speech.tokens import Tokenizer
from starling.speech.training.plan import TrainingPlan
from starling.training.freezing import freeze
from starling.workload import Ticket, Unit, Workload


class SpeechWorkload(Workload[Batch]):
    """The workload of a recipe. All random choices are pure functions of the recipe's seed and the ticket.

    `initial` is the folder of the untrained recogniser; `phones` are those of that recogniser.
    """

    def __init__(
        self, plan: TrainingPlan, features: LogMel, tokenizer: Tokenizer, initial: Path, phones: Phones | None = None
    ) -> None:
        self.plan = plan
        self.features = features
        self.tokenizer = tokenizer
        self.initial = initial
        self.phones = phones
        self.num_parts = plan.num_parts

    def make_model(self) -> nn.Module:
        model = Recogniser.load(self.initial).model
        freeze(model, self.plan.recipe.freeze)
        return model

    def num_batches(self, epoch: int) -> int:
        return self.plan.num_batches(epoch)

    def load(self, ticket: Ticket) -> Sequence[Batch]:
        recipe = self.plan.recipe
        return [
            load_batch(
                self.plan.speech_set,
                self.plan.utterances[indices],
                self.features,
                recipe.augment,
                self.tokenizer,
                derive_seed(recipe.seed, "augment", ticket.epoch, ticket.index, place),
                recipe.data.filter.on_bad,
                self.phones,
            )
            for place, indices in enumerate(self.plan.of(ticket))
        ]

    def loss(self, model: nn.Module, examples: Batch) -> Tensor:
        return speech_loss(model, examples, self.plan.recipe.model)

    def weight(self, examples: Batch) -> float:
        """The number of tokens, because `speech_loss` is a mean over them."""
        return float(len(examples.tokens))

    def planned_size(self, ticket: Ticket, unit: Unit) -> float:
        """The number of utterances, or of their frames without padding and speed changes; includes utterances that
        will be skipped."""
        indices = np.concatenate(self.plan.of(ticket))
        if unit == "utterances":
            return float(len(indices))
        durations = self.plan.speech_set.durations[self.plan.utterances[indices]]
        return float(durations.sum(dtype=np.float64)) / self.plan.recipe.features.frame_shift
