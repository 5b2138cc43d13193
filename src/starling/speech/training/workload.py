"""The workloads of speech recognition, which consist of prepared audio, the plan of its mini-batches, the model and its
losses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from starling.chance import derive_seed, one_thread
from starling.errors import DataError
from starling.speech.augmentation import AugmentConfig, augmented, draw_warps, spec_augment
from starling.speech.features import LogMel, attempts
from starling.speech.models import Architecture
from starling.speech.recogniser import Recogniser
from starling.speech.store import SpeechSet, SpeechSets
from starling.speech.tokens import BLANK, Phones, Tokenizer
from starling.speech.training.plan import FramePlan, UtterancePlan
from starling.speech.usable import frames_needed
from starling.training.freezing import freeze
from starling.workload import Ticket, Unit, Workload

PADDING = -100
"""The value that pads the states at the end of a sub-sequence."""
_VOID_SECONDS = 0.64  # length of a batch without utterances, so that the model has an input

PlanT = TypeVar("PlanT", UtterancePlan, FramePlan)
ExamplesT = TypeVar("ExamplesT", "Batch", "FrameBatch")


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of whole utterances, or of sub-sequences of utterances, in the form that a model expects."""

    features: Tensor  # [B, T, F] float32, zero in the padding
    lengths: Tensor  # [B] int64, in frames
    seconds: float  # length of the stored audio, before speed perturbation, without padding
    ids: tuple[str, ...]  # in the order of B; a sub-sequence's id is utterance[first:end]; empty if void

    @property
    def num_examples(self) -> int:
        """The number of utterances or sub-sequences."""
        return len(self.ids)

    @property
    def num_frames(self) -> int:
        """The number of feature frames, without padding; 0 if the batch is void."""
        return int(self.lengths.sum()) if self.ids else 0

    def to(self, device: torch.device | str) -> Self:
        """A copy of the micro-batch with all tensors on `device`."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved: dict[str, Any] = {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
        return replace(self, **moved)


@dataclass(frozen=True)
class Batch(MicroBatch):
    """A micro-batch of utterances.

    A batch is void if all its utterances were skipped. It then has one row of zeros and no tokens, and its loss and
    gradients are 0.
    """

    tokens: Tensor  # [sum of token_lengths] int64, concatenated
    token_lengths: Tensor  # [B] int64
    skipped: tuple[tuple[str, str], ...] = ()  # id and reason of each skipped utterance
    phones: Tensor | None = None  # [sum of phone_lengths] int64; None if the model has no phones
    phone_lengths: Tensor | None = None  # [B] int64; 0 if not all words have known phones


def load_batch(
    speech_set: SpeechSet | SpeechSets,
    indices: np.ndarray,
    features: LogMel,
    augment: AugmentConfig | None,
    tokenizer: Tokenizer,
    seed: int,
    on_bad: Literal["fail", "skip"] = "fail",
    phones: Phones | None = None,
    subsampling: int = 1,
) -> Batch:
    """Load the utterances `indices` of a set. The same arguments produce a bit-identical batch in every process.

    If `augment` is None, the audio is not changed. With `phones`, the batch has the phones of its transcripts. With
    `subsampling` feature frames per encoder frame, an utterance keeps its pauses if it would otherwise have too few
    frames for CTC. The states of global random generators are preserved. The randomness of an utterance depends only on
    `seed` and its place in the batch, so a skipped utterance does not affect others unless `augment.babble_snr` mixes
    speech of the batch into them. Raises DataError, naming the utterance, for unusable audio or an unusable transcript;
    if `on_bad` is "skip", the utterance is listed in `skipped` instead. A shard that cannot be read is always an error.
    """
    augment = augment or AugmentConfig.none()
    stored = speech_set.read(indices.tolist())
    names, texts = [each.id for each in stored], [each.text for each in stored]
    with one_thread():
        encoded = attempts(tokenizer.encode, texts, names)
        waveforms = attempts(features.checked, [each.samples for each in stored], names)
        waveforms = augmented(waveforms, speech_set.sampling_rate, augment, seed)
        warps = draw_warps(augment, seed, len(stored)) if augment.tempo or augment.vocal_tract else None
        needed = [0 if isinstance(each, DataError) else subsampling * frames_needed(each) for each in encoded]
        matrices = features.tried(waveforms, names, warps, needed)
        if augment.spec_augment is not None:
            matrices = spec_augment(matrices, augment.spec_augment, seed)
    places: list[int] = []
    kept: list[tuple[list[int], Tensor]] = []
    skipped = []
    for place, (tokens, matrix) in enumerate(zip(encoded, matrices, strict=True)):
        if not isinstance(tokens, DataError) and not isinstance(matrix, DataError):
            places.append(place)
            kept.append((tokens, matrix))
            continue
        error = tokens if isinstance(tokens, DataError) else matrix
        if on_bad == "fail" and isinstance(error, DataError):
            raise error
        skipped.append((names[place], str(error)))
    if not kept:  # void
        kept = [([], torch.zeros(round(_VOID_SECONDS / features.frame_seconds), features.num_features))]
    spoken = None if phones is None else [phones.encode(texts[place]) for place in places]
    return Batch(
        features=pad_sequence([matrix for _, matrix in kept], batch_first=True),
        lengths=torch.tensor([len(matrix) for _, matrix in kept]),
        tokens=torch.tensor([token for tokens, _ in kept for token in tokens], dtype=torch.int64),
        token_lengths=torch.tensor([len(tokens) for tokens, _ in kept]),
        seconds=float(speech_set.durations[indices[places]].sum(dtype=np.float64)),
        ids=tuple(names[place] for place in places),
        skipped=tuple(skipped),
        phones=None if spoken is None else torch.tensor([phone for each in spoken for phone in each]).long(),
        phone_lengths=None if spoken is None else torch.tensor([len(each) for each in spoken]),
    )


@dataclass(frozen=True)
class FrameBatch(MicroBatch):
    """A micro-batch of sub-sequences."""

    states: Tensor  # [B, T] int64, PADDING in the padding


class RecipeWorkload(Workload[ExamplesT], Generic[PlanT, ExamplesT]):
    """The workload of a recipe. Every random choice is a pure function of the recipe's seed and the ticket.

    `initial` is the folder of the initial recogniser.
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
    """A workload of whole utterances, with the features, tokens and phones of the initial recogniser. Its loss is the
    CTC loss, combined with the loss of the decoder if there is one."""

    def __init__(self, plan: UtterancePlan, initial: Path) -> None:
        super().__init__(plan, initial)
        recogniser = Recogniser.load(initial)
        self.features, self.tokenizer, self.phones = recogniser.features, recogniser.tokenizer, recogniser.phones

    def load(self, ticket: Ticket) -> Sequence[Batch]:
        recipe = self.plan.recipe
        return [
            load_batch(
                self.plan.utterances,
                indices,
                self.features,
                recipe.augment.at(ticket.step),
                self.tokenizer,
                derive_seed(recipe.seed, "augment", ticket.epoch, ticket.index, place),
                recipe.data.filter.on_bad,
                self.phones,
                recipe.model.subsampling,
            )
            for place, indices in enumerate(self.plan.of(ticket))
        ]

    def loss(self, model: nn.Module, examples: Batch) -> Tensor:
        return speech_loss(model, examples, self.plan.recipe.model)

    def weight(self, examples: Batch) -> float:
        """The number of tokens, because `speech_loss` is a mean over them."""
        return float(len(examples.tokens))

    def planned_size(self, ticket: Ticket, unit: Unit) -> float:
        """The number of utterances in a mini-batch, or of their frames before padding and speed changes. Utterances
        that will be skipped are included."""
        indices = np.concatenate(self.plan.of(ticket))
        if unit == "utterances":
            return float(len(indices))
        seconds = float(self.plan.utterances.durations[indices].sum(dtype=np.float64))
        return seconds / self.plan.recipe.features.frame_shift


class FrameWorkload(RecipeWorkload[FramePlan, FrameBatch]):
    """A workload of sub-sequences of aligned frames. Its loss is the cross-entropy of each frame's state."""

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
        """The number of frames, because `frame_loss` is a mean over them."""
        return float(examples.num_frames)

    def planned_size(self, ticket: Ticket, unit: Unit) -> float:
        """The number of sub-sequences in a mini-batch, or of their frames."""
        pieces = np.concatenate(self.plan.of(ticket))
        return float(len(pieces) if unit == "utterances" else (pieces[:, 2] - pieces[:, 1]).sum())


def speech_loss(model: nn.Module, batch: Batch, config: Architecture) -> Tensor:
    """The CTC loss or, with a decoder,

        ctc_weight * CTC + (1 - ctc_weight) * decoder,

    each summed over the batch, in nats, and divided by the batch's number of tokens. With phones,

        (1 - weight) * (the above) + weight * CTC of phones,

    where the loss of phones is also divided by the number of tokens, so that the total remains a mean over tokens. The
    loss is a float32 scalar. `model` must be built from `config`.

    For an utterance with too few frames, the loss is infinite; `too_short_for_ctc` finds such utterances before
    training. For a void batch, the loss is 0, and so are the gradients of all parameters that take part, as DDP
    requires.
    """
    inputs = [batch.features, batch.lengths]
    if config.decoder is not None or config.phones is not None:
        inputs += [batch.tokens, batch.token_lengths]
    log_probs, lengths, *others = model(*inputs)
    if not batch.ids:
        nothing: Tensor = sum((each.sum() * 0.0 for each in others), (log_probs * 0.0).sum())
        return nothing
    log_probs = log_probs.transpose(0, 1)
    total = F.ctc_loss(log_probs, batch.tokens, lengths, batch.token_lengths, blank=BLANK, reduction="sum")
    total = total / len(batch.tokens)
    if config.decoder is not None:
        share = config.decoder.ctc_weight
        total = share * total + (1.0 - share) * others[0] / len(batch.tokens)
    if config.phones is not None:
        share = config.phones.weight
        total = (1.0 - share) * total + share * _phone_ctc(others[-1], lengths, batch)
    return total


def _phone_ctc(log_probs: Tensor, lengths: Tensor, batch: Batch) -> Tensor:
    """The CTC loss of phones, divided by the number of tokens in the batch. An utterance without phones, or with more
    phones than fit into its frames, contributes nothing."""
    if batch.phones is None or batch.phone_lengths is None:
        raise ValueError("a model with phones needs batches with phones")
    losses = F.ctc_loss(
        log_probs.transpose(0, 1),
        batch.phones,
        lengths,
        batch.phone_lengths,
        blank=BLANK,
        reduction="none",
        zero_infinity=True,
    )
    return losses[batch.phone_lengths > 0].sum() / len(batch.tokens)


def frame_loss(model: nn.Module, batch: FrameBatch) -> Tensor:
    """The mean over frames of the cross-entropy, which is the negative log posterior of a frame's state, as a float32
    scalar."""
    log_posteriors, _ = model(batch.features, batch.lengths)
    return F.nll_loss(log_posteriors.flatten(0, 1), batch.states.flatten(), ignore_index=PADDING)
