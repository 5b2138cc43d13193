"""The workloads of speech recognition: prepared audio, the plan of its mini-batches, the model and its losses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from starling.chance import derive_seed, one_thread
from starling.errors import DataError
from starling.speech.augmentation import AugmentConfig, augmented, draw_warps, spec_augment
from starling.speech.features import LogMel
from starling.speech.models import ModelConfig
from starling.speech.phones import Phones
from starling.speech.recogniser import Recogniser
from starling.speech.store import SpeechSet, SpeechSets
from starling.speech.tokens import BLANK, Tokenizer, encode_all
from starling.speech.training.plan import FramePlan, UtterancePlan
from starling.training.freezing import freeze
from starling.workload import Ticket, Unit, Workload

PADDING = -100
"""In the place of a state, behind the end of a sub-sequence."""
_VOID_SECONDS = 0.64  # of a batch without utterances, so that the model has an input

PlanT = TypeVar("PlanT", UtterancePlan, FramePlan)
ExamplesT = TypeVar("ExamplesT", "Batch", "FrameBatch")


@dataclass(frozen=True)
class Batch:
    """One micro-batch, ready for a model.

    A batch is void if all its utterances were skipped: one row of zeros without tokens, whose `ctc_loss` and gradients
    are 0.
    """

    features: Tensor  # [B, T, F] float32, zero in the padding
    feature_lengths: Tensor  # [B] int64, frames
    tokens: Tensor  # [sum of token_lengths] int64, utterance after utterance
    token_lengths: Tensor  # [B] int64
    seconds: float  # audio as stored, before speed perturbation, without padding
    ids: tuple[str, ...]  # utterance ids, in the order of B; empty if void
    skipped: tuple[tuple[str, str], ...] = ()  # id and reason of skipped utterances
    phones: Tensor | None = None  # [sum of phone_lengths] int64; None: the model has none
    phone_lengths: Tensor | None = None  # [B] int64; 0: not all words have known phones

    @property
    def num_examples(self) -> int:
        """The number of utterances."""
        return len(self.ids)

    @property
    def num_frames(self) -> int:
        """The number of feature frames without padding; 0 if void."""
        return int(self.feature_lengths.sum()) if self.ids else 0

    def to(self, device: torch.device | str) -> "Batch":
        """A copy with all tensors on `device`."""
        return replace(self, **_moved(vars(self), device))


def load_batch(
    speech_set: SpeechSet | SpeechSets,
    indices: np.ndarray,
    features: LogMel,
    augment: AugmentConfig | None,
    tokenizer: Tokenizer,
    seed: int,
    on_bad: Literal["fail", "skip"] = "fail",
    phones: Phones | None = None,
) -> Batch:
    """Load the utterances `indices` of a set. The same arguments give the same bits in every process.

    With `augment` None the audio is not changed. With `phones` the batch has the phones of its transcripts. Global
    random generators keep their states. The randomness of an utterance depends only on `seed` and its place in the
    batch, so a skipped utterance does not affect others, unless speech of the batch is mixed into them
    (`augment.babble_snr`).
    Raises DataError, naming the utterance, for an unusable audio or transcript; with `on_bad` "skip" the utterance is
    listed in `skipped` instead. A shard that cannot be read is always an error.
    """
    augment = augment or AugmentConfig.none()
    stored = speech_set.read(indices.tolist())
    names, texts = [each.id for each in stored], [each.text for each in stored]
    with one_thread():
        encoded = encode_all(tokenizer, texts, names)
        waveforms = features.waveforms([each.samples for each in stored], names)
        waveforms = augmented(waveforms, speech_set.sampling_rate, augment, seed)
        warps = draw_warps(augment, seed, len(stored)) if augment.tempo or augment.vocal_tract else None
        matrices = features.tried(waveforms, names, warps)
        if augment.spec_augment is not None:
            matrices = spec_augment(matrices, augment.spec_augment, seed)
    kept: list[tuple[int, list[int], Tensor]] = []
    skipped = []
    for place, (tokens, matrix) in enumerate(zip(encoded, matrices, strict=True)):
        if not isinstance(tokens, DataError) and not isinstance(matrix, DataError):
            kept.append((place, tokens, matrix))
            continue
        error = tokens if isinstance(tokens, DataError) else matrix
        if on_bad == "fail" and isinstance(error, DataError):
            raise error
        skipped.append((names[place], str(error)))
    if not kept:
        return _void(features, skipped)
    places = [place for place, _, _ in kept]
    spoken = None if phones is None else [phones.encode(texts[place]) for place in places]
    return Batch(
        features=pad_sequence([matrix for _, _, matrix in kept], batch_first=True),
        feature_lengths=torch.tensor([len(matrix) for _, _, matrix in kept]),
        tokens=torch.tensor([token for _, tokens, _ in kept for token in tokens]),
        token_lengths=torch.tensor([len(tokens) for _, tokens, _ in kept]),
        seconds=float(speech_set.durations[indices[places]].sum(dtype=np.float64)),
        ids=tuple(names[place] for place in places),
        skipped=tuple(skipped),
        phones=None if spoken is None else torch.tensor([phone for each in spoken for phone in each]).long(),
        phone_lengths=None if spoken is None else torch.tensor([len(each) for each in spoken]),
    )


def _void(features: LogMel, skipped: Sequence[tuple[str, str]]) -> Batch:
    num_frames = round(_VOID_SECONDS / features.frame_seconds)
    return Batch(
        features=torch.zeros(1, num_frames, features.num_features),
        feature_lengths=torch.tensor([num_frames]),
        tokens=torch.zeros(0, dtype=torch.int64),
        token_lengths=torch.zeros(1, dtype=torch.int64),
        seconds=0.0,
        ids=(),
        skipped=tuple(skipped),
    )


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
        return replace(self, **_moved(vars(self), device))


def _moved(fields: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    """Those fields that are tensors, on `device`."""
    tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
    return {name: value.to(device, non_blocking=True) for name, value in tensors.items()}


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


def speech_loss(model: nn.Module, batch: Batch, config: ModelConfig) -> Tensor:
    """The CTC loss, or with a decoder

        ctc_weight * CTC + (1 - ctc_weight) * decoder,

    each summed over the batch, in nats, and divided by the batch's number of tokens. With phones,

        (1 - weight) * (the above) + weight * CTC of phones,

    divided likewise, which keeps the loss a mean over tokens. Scalar, float32; of a void batch as `ctc_loss`. `model`
    is built from `config`.
    """
    if config.decoder is None and config.phones is None:
        return ctc_loss(model, batch)
    log_probs, lengths, *others = model(batch.features, batch.feature_lengths, batch.tokens, batch.token_lengths)
    if not batch.ids:
        nothing: Tensor = sum((each.sum() * 0.0 for each in others), (log_probs * 0.0).sum())
        return nothing
    total = _ctc(log_probs, lengths, batch)
    if config.decoder is not None:
        share = config.decoder.ctc_weight
        total = share * total + (1.0 - share) * others[0] / len(batch.tokens)
    if config.phones is not None:
        share = config.phones.weight
        total = (1.0 - share) * total + share * _phone_ctc(others[-1], lengths, batch)
    return total


def _phone_ctc(log_probs: Tensor, lengths: Tensor, batch: Batch) -> Tensor:
    """The CTC loss of phones, divided by the number of the batch's tokens. An utterance without phones, or with more of
    them than fit into its frames, adds nothing."""
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


def ctc_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean negative log-likelihood per token: the sum over the batch, divided by its number of tokens.

    Scalar, float32. An utterance with too few frames gives infinity; `check_ctc_fits` finds these before training. A
    void batch gives 0 and gradients of 0 for all parameters that take part, as DDP requires.
    """
    log_probs, lengths = model(batch.features, batch.feature_lengths)
    if not batch.ids:
        nothing: Tensor = (log_probs * 0.0).sum()
        return nothing
    return _ctc(log_probs, lengths, batch)


def _ctc(log_probs: Tensor, lengths: Tensor, batch: Batch) -> Tensor:
    total = F.ctc_loss(
        log_probs.transpose(0, 1), batch.tokens, lengths, batch.token_lengths, blank=BLANK, reduction="sum"
    )
    return total / len(batch.tokens)


def frame_loss(model: nn.Module, batch: FrameBatch) -> Tensor:
    """Mean cross-entropy per frame: the negative log posterior of its state. Scalar, float32."""
    log_posteriors, _ = model(batch.features, batch.lengths)
    return F.nll_loss(log_posteriors.flatten(0, 1), batch.states.flatten(), ignore_index=PADDING)
