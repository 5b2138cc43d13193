"""The workloads of speech recognition: prepared audio, the plan of its mini-batches, the model and its loss."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from starling.chance import derive_seed
from starling.speech.batches import Batch, load_batch
from starling.speech.features import LogMel
from starling.speech.losses import speech_loss
from starling.speech.phones import Phones
from starling.speech.recogniser import Recogniser
from starling.speech.tokens import Tokenizer
from starling.speech.training.plan import FramePlan, UtterancePlan
from starling.training.freezing import freeze
from starling.workload import Ticket, Unit, Workload

PADDING = -100
"""In the place of a state, behind the end of a sub-sequence."""


PlanT = TypeVar("PlanT", UtterancePlan, FramePlan)
ExamplesT = TypeVar("ExamplesT", Batch, "FrameBatch")


@dataclass(frozen=True)
class FrameBatch:
    """One micro-batch of sub-sequences, ready for a model."""

    features: Tensor  # [B, T, F] float32, zero in the padding
    lengths: Tensor  # [B] int64, frames
    states: Tensor  # [B, T] int64, PADDING in the padding
    seconds: float  # of audio, without padding
    ids: tuple[str, ...]  # utterance[first:end], in the order of B

    @property
    def num_examples(self) -> int:
        """Sub-sequences."""
        return len(self.ids)

    @property
    def num_frames(self) -> int:
        """Without padding."""
        return int(self.lengths.sum())

    def to(self, device: torch.device | str) -> "FrameBatch":
        """The same batch with its tensors on `device`."""
        return replace(
            self,
            features=self.features.to(device, non_blocking=True),
            lengths=self.lengths.to(device, non_blocking=True),
            states=self.states.to(device, non_blocking=True),
        )


class RecipeWorkload(Workload[ExamplesT], Generic[PlanT, ExamplesT]):
    """The workload of a recipe. All random choices are pure functions of the recipe's seed and the ticket.

    `initial` is the folder of the recogniser to begin with.
    """

    def __init__(self, plan: PlanT, initial: Path) -> None:
        self.plan: PlanT = plan
        self.initial = initial
        self.num_parts = plan.num_parts

    def make_model(self) -> nn.Module:
        model = Recogniser.load(self.initial).model
        freeze(model, self.plan.recipe.freeze)
        return model

    def num_batches(self, epoch: int) -> int:
        return self.plan.num_batches(epoch)


class SpeechWorkload(RecipeWorkload[UtterancePlan, Batch]):
    """Whole utterances, with the loss of CTC and perhaps of a decoder; `phones` are those of the recogniser."""

    def __init__(
        self, plan: UtterancePlan, features: LogMel, tokenizer: Tokenizer, initial: Path, phones: Phones | None = None
    ) -> None:
        super().__init__(plan, initial)
        self.features = features
        self.tokenizer = tokenizer
        self.phones = phones

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


class FrameWorkload(RecipeWorkload[FramePlan, FrameBatch]):
    """Sub-sequences of aligned frames, with the cross-entropy of each frame's state."""

    def load(self, ticket: Ticket) -> Sequence[FrameBatch]:
        config, frames = self.plan.recipe.features, self.plan.frames
        batches = []
        for pieces in self.plan.of(ticket):
            lengths = pieces[:, 2] - pieces[:, 1]
            batches.append(
                FrameBatch(
                    features=torch.from_numpy(frames.cut(pieces, config.splice)),
                    lengths=torch.from_numpy(lengths),
                    states=torch.from_numpy(frames.states(pieces, PADDING)),
                    seconds=float(lengths.sum()) * config.frame_shift,
                    ids=self.plan.names(pieces),
                )
            )
        return batches

    def loss(self, model: nn.Module, examples: FrameBatch) -> Tensor:
        return frame_loss(model, examples)

    def weight(self, examples: FrameBatch) -> float:
        """Frames: `frame_loss` is a mean over them."""
        return float(examples.num_frames)

    def planned_size(self, ticket: Ticket, unit: Unit) -> float:
        """Its sub-sequences, or their frames."""
        pieces = np.concatenate(self.plan.of(ticket))
        return float(len(pieces) if unit == "utterances" else (pieces[:, 2] - pieces[:, 1]).sum())


def frame_loss(model: nn.Module, batch: FrameBatch) -> Tensor:
    """Mean cross-entropy per frame: the negative log posterior of its state. Scalar, float32."""
    log_posteriors, _ = model(batch.features, batch.lengths)
    return F.nll_loss(log_posteriors.flatten(0, 1), batch.states.flatten(), ignore_index=PADDING)
