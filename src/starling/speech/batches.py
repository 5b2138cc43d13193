"""Loading a batch: audio from the store, augmentation, features and tokens, from one explicit seed."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from starling.chance import derive_seed
from starling.speech.augmentation import AugmentConfig, augment_waveform, spec_augment
from starling.speech.chance import one_thread
from starling.speech.features import LogMel, UtteranceSource
from starling.speech.planning import BatchConfig, MiniBatch
from starling.speech.tokens import Tokenizer

__all__ = ["Batch", "BatchConfig", "MiniBatch", "load_batch"]


@dataclass(frozen=True)
class Batch:
    """One micro-batch, ready for a model."""

    features: torch.Tensor  # [B, T, F] float32, zero in the padding
    feature_lengths: torch.Tensor  # [B] int64, frames
    tokens: torch.Tensor  # [sum of token_lengths] int64, utterance after utterance
    token_lengths: torch.Tensor  # [B] int64
    seconds: float  # audio as stored, before speed perturbation, without padding
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
            matrices = spec_augment(matrices, augment.spec_augment, derive_seed(seed, "SpecAugment"))
    return Batch(
        features=torch.nn.utils.rnn.pad_sequence(matrices, batch_first=True),
        feature_lengths=torch.tensor([len(matrix) for matrix in matrices]),
        tokens=torch.tensor([token for sequence in tokens for token in sequence]),
        token_lengths=torch.tensor([len(sequence) for sequence in tokens]),
        seconds=float(speech_set.durations[indices].sum(dtype=np.float64)),
        ids=ids,
    )
