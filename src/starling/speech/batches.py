"""Loading a batch: audio from the store, augmentation, features and tokens, from one explicit seed."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.utils.data import Dataset

from starling.speech.augmentation import AugmentConfig, augment_waveform, spec_augment
from starling.speech.chance import derive_seed, one_thread
from starling.speech.features import LogMel, UtteranceSource
from starling.speech.planning import BatchConfig, MiniBatch, plan_epoch
from starling.speech.tokens import Tokenizer

__all__ = ["Batch", "BatchConfig", "BatchDataset", "MiniBatch", "load_batch", "plan_epoch"]


@dataclass(frozen=True)
class Batch:
    """One micro-batch, ready for a model."""

    features: torch.Tensor  # [B, T, F] float32, zero in the padding
    feature_lengths: torch.Tensor  # [B] int64, frames
    tokens: torch.Tensor  # [sum of token_lengths] int64, utterance after utterance
    token_lengths: torch.Tensor  # [B] int64
    seconds: float  # audio as stored, before speed perturbation, without padding
    seed: int  # of everything random about this batch, dropout included
    ids: tuple[str, ...]  # utterances, in the order of B

    @property
    def num_examples(self) -> int:
        """Utterances."""
        return len(self.ids)

    @property
    def num_frames(self) -> int:
        """Feature frames, without padding."""
        return int(self.feature_lengths.sum())

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch with its tensors on `device`."""
        return replace(
            self,
            features=self.features.to(device, non_blocking=True),
            feature_lengths=self.feature_lengths.to(device, non_blocking=True),
            tokens=self.tokens.to(device, non_blocking=True),
            token_lengths=self.token_lengths.to(device, non_blocking=True),
        )


def load_batch(
    speech_set: UtteranceSource,
    indices: np.ndarray,
    features: LogMel,
    augment: AugmentConfig | None,
    tokenizer: Tokenizer,
    seed: int,
) -> Batch:
    """Load utterances `indices` of a set; the same arguments give the same bits in every process.

    `augment` None leaves the audio as it is. No global random generator is moved.
    Raises DataError for audio or a transcript that cannot be used, naming the utterance.
    """
    augment = augment or AugmentConfig.none()
    generator = np.random.default_rng(seed)
    ids = tuple(speech_set.id(int(index)) for index in indices)
    matrices, tokens = [], []
    with one_thread():
        for index, name in zip(indices.tolist(), ids, strict=True):
            tokens.append(tokenizer.encode(speech_set.text(index), name))
            waveform = torch.from_numpy(speech_set.audio(index))
            waveform = augment_waveform(waveform, speech_set.sampling_rate, augment, generator)
            matrices.append(features(waveform, name))
        if augment.spec_augment is not None:
            matrices = spec_augment(matrices, augment.spec_augment, derive_seed(seed, 1))
    return Batch(
        features=torch.nn.utils.rnn.pad_sequence(matrices, batch_first=True),
        feature_lengths=torch.tensor([len(matrix) for matrix in matrices]),
        tokens=torch.tensor([token for sequence in tokens for token in sequence]),
        token_lengths=torch.tensor([len(sequence) for sequence in tokens]),
        seconds=float(speech_set.durations[indices].sum(dtype=np.float64)),
        seed=seed,
        ids=ids,
    )


class BatchDataset(Dataset[Batch]):
    """Batches on request, for worker processes that load ahead.

    A request is `(indices, seed)`, so that a `DataLoader` whose sampler yields requests as they are claimed
    (`DataLoader(dataset, sampler=requests, batch_size=None, num_workers=n)`) gives the batches in that order.
    """

    def __init__(
        self, speech_set: UtteranceSource, features: LogMel, augment: AugmentConfig | None, tokenizer: Tokenizer
    ) -> None:
        self._arguments = (speech_set, features, augment, tokenizer)

    def __getitem__(self, request: tuple[np.ndarray, int]) -> Batch:
        speech_set, features, augment, tokenizer = self._arguments
        return load_batch(speech_set, request[0], features, augment, tokenizer, request[1])
