"""What all acoustic models share: an encoder, a layer behind it for CTC, and perhaps a decoder beside that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


class Decoder(nn.Module):
    """A decoder that stands behind an encoder, beside CTC."""

    def forward(
        self, frames: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, token_lengths: torch.Tensor
    ) -> torch.Tensor:
        """The loss of all utterances together, in nats.

        Args:
            frames: Of the encoder, `[B, T', W]`.
            lengths: In frames, `[B]`.
            tokens: Those of all utterances, one after another, `[sum of token_lengths]`.
            token_lengths: `[B]`.
        """
        raise NotImplementedError


class Network(nn.Module):
    """An acoustic model: `encode` makes frames, `output` turns each into log-probabilities of the tokens."""

    output: nn.Linear
    decoder: Decoder | None

    def __init__(self) -> None:
        super().__init__()
        self.decoder = None

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features `[B, T, F]` and lengths `[B]` -> frames `[B, T', output.in_features]` and lengths `[B]`."""
        raise NotImplementedError

    def log_probs(self, frames: torch.Tensor) -> torch.Tensor:
        """Log-probabilities `[B, T', V]` (float32) of CTC, of the encoder's frames."""
        log_probs: torch.Tensor = self.output(frames).float().log_softmax(dim=2)
        return log_probs

    def tensor_plan(self) -> dict[str, ParallelStyle]:
        """Which layers are cut in `island: {tensor: n}`, by the name of the module."""
        from starling.speech.models.tensor_plan import plan_of

        return plan_of(self)

    def forward(
        self,
        features: torch.Tensor,
        lengths: torch.Tensor,
        tokens: torch.Tensor | None = None,
        token_lengths: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Features `[B, T, F]` and lengths `[B]` -> log-probabilities `[B, T', V]` (float32) and lengths `[B]`.

        With tokens, as `Decoder` takes them, the decoder's loss is added as a third one.
        """
        frames, lengths = self.encode(features, lengths)
        log_probs = self.log_probs(frames)
        if self.decoder is None or tokens is None or token_lengths is None:
            return log_probs, lengths
        return log_probs, lengths, self.decoder(frames, lengths, tokens, token_lengths)


def padded(tokens: torch.Tensor, token_lengths: torch.Tensor) -> torch.Tensor:
    """Tokens `[sum of token_lengths]` -> `[B, U]`, 0 in the padding."""
    return nn.utils.rnn.pad_sequence(list(torch.split(tokens, token_lengths.tolist())), batch_first=True)
