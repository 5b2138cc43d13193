"""The losses of CTC, a decoder and phones, and a check that each utterance has enough frames for CTC."""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from starling.errors import DataError
from starling.speech.augmentation import AugmentConfig
from starling.speech.batches import Batch
from starling.speech.features import LogMel, UtteranceSource
from starling.speech.models import ModelConfig
from starling.speech.tokens import BLANK, Tokenizer


class TooShort(NamedTuple):
    """An utterance with fewer encoder frames than CTC needs."""

    id: str
    frames: int  # encoder frames at the highest speed factor
    needed: int  # one per token, and one blank between equal neighbours


def speech_loss(model: nn.Module, batch: Batch, config: ModelConfig) -> torch.Tensor:
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
        nothing: torch.Tensor = sum((each.sum() * 0.0 for each in others), (log_probs * 0.0).sum())
        return nothing
    total = _ctc(log_probs, lengths, batch)
    if config.decoder is not None:
        share = config.decoder.ctc_weight
        total = share * total + (1.0 - share) * others[0] / len(batch.tokens)
    if config.phones is not None:
        share = config.phones.weight
        total = (1.0 - share) * total + share * _phone_ctc(others[-1], lengths, batch)
    return total


def _phone_ctc(log_probs: torch.Tensor, lengths: torch.Tensor, batch: Batch) -> torch.Tensor:
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


def ctc_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean negative log-likelihood per token: the sum over the batch, divided by its number of tokens.

    Scalar, float32. An utterance with too few frames gives infinity; `check_ctc_fits` finds these before training. A
    void batch gives 0 and gradients of 0 for all parameters that take part, as DDP requires.
    """
    log_probs, lengths = model(batch.features, batch.feature_lengths)
    if not batch.ids:
        nothing: torch.Tensor = (log_probs * 0.0).sum()
        return nothing
    return _ctc(log_probs, lengths, batch)


def _ctc(log_probs: torch.Tensor, lengths: torch.Tensor, batch: Batch) -> torch.Tensor:
    total = F.ctc_loss(
        log_probs.transpose(0, 1), batch.tokens, lengths, batch.token_lengths, blank=BLANK, reduction="sum"
    )
    return total / len(batch.tokens)


def transcripts(speech_set: UtteranceSource) -> Iterator[tuple[str, str, float]]:
    """The id, the text and the seconds of each utterance of a set."""
    return (
        (speech_set.id(index), speech_set.text(index), seconds)
        for index, seconds in enumerate(speech_set.durations.tolist())
    )


def frames_needed(tokens: list[int]) -> int:
    """The encoder frames that CTC needs for `tokens`: one per token, and one blank between equal neighbours."""
    return len(tokens) + sum(first == second for first, second in pairwise(tokens))


def check_ctc_fits(
    utterances: Iterable[tuple[str, str, float]],
    tokenizer: Tokenizer,
    model: ModelConfig,
    features: LogMel,
    augment: AugmentConfig | None = None,
    on_too_short: Literal["fail", "list"] = "fail",
) -> list[TooShort]:
    """The utterances that would have too few encoder frames at the highest factors of speed and tempo of `augment`.

    `utterances` are ids, texts and seconds, as `transcripts` gives them. It encodes all texts, so it also finds
    characters outside the alphabet. Raises DataError for these, and for utterances that are too short unless
    `on_too_short` is "list".
    """
    fastest, tempo = augment.fastest if augment is not None else (1.0, 1.0)
    shape, found, total = model.shape, [], 0
    for total, (name, text, seconds) in enumerate(utterances, 1):  # noqa: B007 - for the message below
        samples = math.ceil(round(seconds * features.sampling_rate) / fastest)
        frames = shape.encoder_frames(features.num_frames(samples, tempo))
        needed = frames_needed(tokenizer.encode(text, name))
        if frames < needed:
            found.append(TooShort(name, frames, needed))
    if found and on_too_short == "fail":
        shown = ", ".join(f"{each.id} ({each.frames} frames, {each.needed} needed)" for each in found[:5])
        raise DataError(
            f"{len(found)} of {total} utterances have too few encoder frames for CTC at speed "
            f"{fastest * tempo:g}: {shown}{', ...' if len(found) > 5 else ''}. Raise data.filter.min_seconds, lower "
            f"model.subsampling (now {shape.subsampling}), use longer tokens, or leave them out with "
            "data.filter.on_bad=skip"
        )
    return found
