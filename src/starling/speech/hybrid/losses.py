"""Mini-batches of aligned sub-sequences, and their cross-entropy."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PADDING = -100
"""In the place of a state, behind the end of a sub-sequence."""


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


def frame_loss(model: nn.Module, batch: FrameBatch) -> Tensor:
    """Mean cross-entropy per frame: the negative log posterior of its state. Scalar, float32."""
    log_posteriors, _ = model(batch.features, batch.lengths)
    return F.nll_loss(log_posteriors.flatten(0, 1), batch.states.flatten(), ignore_index=PADDING)
