"""What all acoustic models share: an encoder, and a layer behind it that gives a log-probability to each token."""

import torch
from torch import nn


class Network(nn.Module):
    """An acoustic model: `encode` makes frames, `output` turns each into log-probabilities of the tokens."""

    output: nn.Linear

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features `[B, T, F]` and lengths `[B]` -> frames `[B, T', output.in_features]` and lengths `[B]`."""
        raise NotImplementedError

    def forward(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features `[B, T, F]` and lengths `[B]` -> log-probabilities `[B, T', V]` (float32) and lengths `[B]`."""
        frames, lengths = self.encode(features, lengths)
        return self.output(frames).float().log_softmax(dim=2), lengths
