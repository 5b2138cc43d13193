"""Loads batches: audio from a prepared set, augmentation, features and tokens, with an explicit seed."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from starling.chance import derive_seed
from starling.errors import DataError
from starling.speech.augmentation import AugmentConfig, augment_waveform, draw_warp, spec_augment
from starling.speech.batch_plan import BatchConfig, MiniBatch
from starling.speech.chance import one_thread
from starling.speech.features import LogMel, UtteranceSource
from starling.speech.phones import Phones
from starling.speech.tokens import Tokenizer

__all__ = ["Batch", "BatchConfig", "MiniBatch", "OnBad", "load_batch"]

OnBad = Literal["fail", "skip"]
"""Whether an unusable utterance is an error or is skipped."""
_VOID_SECONDS = 0.64  # of a batch without utterances, so that the model has an input


@dataclass(frozen=True)
class Batch:
    """One micro-batch, ready for a model.

    A batch is void if all its utterances were skipped: one row of zeros without tokens, whose `ctc_loss` and gradients
    are 0.
    """

    features: torch.Tensor  # [B, T, F] float32, zero in the padding
    feature_lengths: torch.Tensor  # [B] int64, frames
    tokens: torch.Tensor  # [sum of token_lengths] int64, utterance after utterance
    token_lengths: torch.Tensor  # [B] int64
    seconds: float  # audio as stored, before speed perturbation, without padding
    ids: tuple[str, ...]  # utterance ids, in the order of B; empty if void
    skipped: tuple[tuple[str, str], ...] = ()  # id and reason of skipped utterances
    phones: torch.Tensor | None = None  # [sum of phone_lengths] int64; None: the model has none
    phone_lengths: torch.Tensor | None = None  # [B] int64; 0: not all words have known phones

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
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        moved: dict[str, Any] = {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
        return replace(self, **moved)


def load_batch(
    speech_set: UtteranceSource,
    indices: np.ndarray,
    features: LogMel,
    augment: AugmentConfig | None,
    tokenizer: Tokenizer,
    seed: int,
    on_bad: OnBad = "fail",
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
    places = indices.tolist()
    kept: list[_Loaded] = []
    skipped: list[tuple[str, str]] = []
    with one_thread():
        audios = speech_set.audios(places)
        for place, (index, audio) in enumerate(zip(places, audios, strict=True)):
            name = speech_set.id(index)
            try:
                tokens = tokenizer.encode(speech_set.text(index), name)
                waveform = features.checked(audio, name)
                generator = np.random.default_rng(derive_seed(seed, "waveform", place))
                others = _others(audios, place, features) if augment.babble_snr is not None else ()
                augmented = augment_waveform(waveform, speech_set.sampling_rate, augment, generator, others)
                if augmented is not waveform:
                    features.check(augmented, name)
            except DataError as error:
                if on_bad == "fail":
                    raise
                skipped.append((name, str(error)))
            else:
                kept.append(_Loaded(place, index, name, tokens, augmented))
        warps = [draw_warp(augment, np.random.default_rng(derive_seed(seed, "warp", each.place))) for each in kept]
        drawn = [each for each in warps if each is not None]
        matrices = features.batch([each.waveform for each in kept], drawn or None) if kept else []
        if augment.spec_augment is not None:
            for number, each in enumerate(kept):
                mask_seed = derive_seed(seed, "SpecAugment", each.place)
                (matrices[number],) = spec_augment([matrices[number]], augment.spec_augment, mask_seed)
    if not kept:
        return _void(features, skipped)
    spoken = None if phones is None else [phones.encode(speech_set.text(each.index)) for each in kept]
    return Batch(
        features=torch.nn.utils.rnn.pad_sequence(matrices, batch_first=True),
        feature_lengths=torch.tensor([len(matrix) for matrix in matrices]),
        tokens=torch.tensor([token for each in kept for token in each.tokens]),
        token_lengths=torch.tensor([len(each.tokens) for each in kept]),
        seconds=float(speech_set.durations[[each.index for each in kept]].sum(dtype=np.float64)),
        ids=tuple(each.name for each in kept),
        skipped=tuple(skipped),
        phones=None if spoken is None else torch.tensor([phone for each in spoken for phone in each]).long(),
        phone_lengths=None if spoken is None else torch.tensor([len(each) for each in spoken]),
    )


def _others(audios: Sequence[np.ndarray | DataError], place: int, features: LogMel) -> list[torch.Tensor]:
    """The usable audio of a batch, except that at `place`."""
    found = []
    for other, audio in enumerate(audios):
        if other != place:
            with suppress(DataError):
                found.append(features.checked(audio))
    return found


@dataclass(frozen=True)
class _Loaded:
    """A usable utterance, after augmentation."""

    place: int  # in its batch, counting skipped utterances
    index: int
    name: str
    tokens: list[int]
    waveform: torch.Tensor


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
