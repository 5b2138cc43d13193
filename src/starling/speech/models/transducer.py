"""A transducer's predictor and joiner."""

import torch
from torch import nn

from starling.speech.models.decoders import TransducerConfig
from starling.speech.models.network import Decoder, padded
from starling.speech.tokens import BLANK
from starling.speech.transducer_loss import transducer_loss


class Transducer(Decoder):
    """Joins what was heard in a frame with what was said before it.

        f(t) = A frame(t),   g(u) = B relu(C (e(u - context + 1), ..., e(u))),   logits(t, u) = D tanh(f(t) + g(u))

    with learned embeddings e of tokens and a convolution C over the last `context` of them: the predictor has no state.

    Sources: Graves 2012 (arXiv 1211.3711); Ghodsi et al. 2020, "RNN-transducer with stateless prediction network", with
    more than one token as in icefall.
    """

    def __init__(self, config: TransducerConfig, encoder_width: int, vocab_size: int) -> None:
        super().__init__()
        width = config.width
        self.context = config.context
        self.vocab_size = vocab_size
        self.frames = nn.Linear(encoder_width, width)
        self.embedding = nn.Embedding(vocab_size, width, padding_idx=BLANK)
        self.history = nn.Conv1d(width, width, config.context)
        self.prediction = nn.Linear(width, width)
        self.output = nn.Linear(width, vocab_size)

    def predict(self, tokens: torch.Tensor) -> torch.Tensor:
        """g of the beginning and after each of the tokens `[B, U]`: `[B, U + 1, width]`."""
        return self.after(nn.functional.pad(tokens, (self.context, 0), value=BLANK))

    def after(self, tokens: torch.Tensor) -> torch.Tensor:
        """g behind each token but the first `context - 1` ones; tokens `[B, N]` -> `[B, N - context + 1, width]`.

        Blanks stand for what is before the beginning.
        """
        mixed = self.history(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        predicted: torch.Tensor = self.prediction(mixed.relu())
        return predicted

    def join(self, frames: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        """Logits `[..., V]` of f and g, `[..., width]` each; they broadcast."""
        logits: torch.Tensor = self.output(torch.tanh(frames + predicted))
        return logits

    def forward(
        self, frames: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, token_lengths: torch.Tensor
    ) -> torch.Tensor:
        """The loss of all utterances together, in nats; the arguments are those of `Decoder`."""
        rows = padded(tokens, token_lengths)
        encoded, predicted = self.frames(frames), self.predict(rows)
        losses = transducer_loss(self.join, encoded, predicted, rows, lengths, token_lengths, self.vocab_size)
        return losses.sum().float()
