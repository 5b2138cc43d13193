"""What all acoustic models share: an encoder, an output layer for CTC, and optionally a decoder and phones."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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


class Layers(NamedTuple):
    """The stacked layers of an encoder, each fed by the one before, all at the rate of the encoder's frames."""

    modules: nn.ModuleList  # each returns `[B, T', width]`, alone or first in a tuple
    width: int


class PhoneOutput(nn.Module):
    """Log-probabilities of phones, predicted from the outputs of a lower layer.

    The lower layers learn the sounds, those above them the spelling: Sanabria and Metze 2018, "Hierarchical multitask
    learning with CTC" (arXiv 1807.07104).
    """

    def __init__(self, width: int, layer: int, dropout: float, num_phones: int) -> None:
        super().__init__()
        self.layer = layer
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(width, num_phones)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """The outputs of the layer `[B, T', width]` -> log-probabilities `[B, T', P]` (float32)."""
        log_probs: torch.Tensor = self.output(self.dropout(frames)).float().log_softmax(dim=2)
        return log_probs


class Network(nn.Module):
    """An acoustic model: `encode` makes frames, `output` turns each into log-probabilities of the tokens."""

    output: nn.Linear
    decoder: Decoder | None
    phones: PhoneOutput | None
    stacked: Layers | None
    """The layers from which phones can be predicted; None: there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = None
        self.phones = None
        self.stacked = None

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

        Given tokens, as `Decoder` takes them, it also returns the decoder's loss, if there is a decoder, and then the
        log-probabilities `[B, T', P]` of phones, if there are phones.
        """
        if tokens is None or token_lengths is None:
            frames, lengths = self.encode(features, lengths)
            return self.log_probs(frames), lengths
        frames, lengths, phones = self._encode_with_phones(features, lengths)
        outputs = [self.log_probs(frames), lengths]
        if self.decoder is not None:
            outputs.append(self.decoder(frames, lengths, tokens, token_lengths))
        if phones is not None:
            outputs.append(phones)
        return tuple(outputs)

    def _encode_with_phones(
        self, features: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What `encode` makes, and the log-probabilities of phones, if there are any."""
        if self.phones is None or self.stacked is None:
            return *self.encode(features, lengths), None
        heard: list[torch.Tensor] = []

        def keep(_: nn.Module, __: object, outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
            heard.append(outputs[0] if isinstance(outputs, tuple) else outputs)

        hook = self.stacked.modules[self.phones.layer - 1].register_forward_hook(keep)
        try:
            frames, lengths = self.encode(features, lengths)
        finally:
            hook.remove()
        return frames, lengths, self.phones(heard[0])


def padded(tokens: torch.Tensor, token_lengths: torch.Tensor) -> torch.Tensor:
    """Tokens `[sum of token_lengths]` -> `[B, U]`, 0 in the padding."""
    return nn.utils.rnn.pad_sequence(list(torch.split(tokens, token_lengths.tolist())), batch_first=True)
