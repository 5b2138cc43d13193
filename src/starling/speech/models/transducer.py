"""A transducer: its predictor, its joiner, and its loss, which sums over all alignments of frames and tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from starling.speech.models.architectures import TransducerConfig
from starling.speech.models.network import Decoder, padded
from starling.speech.tokens import BLANK

MOST_NUMBERS = 2**24
"""Maximum number of values in a tensor over `[B, T, U + 1, V]` that is in memory at once."""

Join = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function from encoded frames `[B, T, 1, W]` and predictions `[B, 1, U + 1, W]` to logits `[B, T, U + 1, V]`."""


def transducer_loss(
    join: Join,
    encoded: torch.Tensor,
    predicted: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    token_lengths: torch.Tensor,
    vocab_size: int,
    most_numbers: int = MOST_NUMBERS,
) -> torch.Tensor:
    """The loss -log p(tokens | frames) of each utterance, `[B]` float64.

    Frames are joined in chunks, so that no tensor exceeds `most_numbers` values (or the number that one frame needs).
    The logits of a chunk are discarded and recomputed for the gradient.

    Args:
        join: The function that computes logits.
        encoded: Frames `[B, T, W]`.
        predicted: The predictor's outputs before the first token and after each token, `[B, U + 1, W]`.
        tokens: Tokens `[B, U]`, with any valid token in the padding.
        lengths: The number of frames of each utterance, `[B]`.
        token_lengths: The number of tokens of each utterance, `[B]`.
        vocab_size: The number of outputs V.
        most_numbers: The maximum number of values in a tensor; see above.
    """
    num_utterances, num_frames, width = encoded.shape
    chunk = max(1, most_numbers // (num_utterances * predicted.shape[1] * max(width, vocab_size)))

    def steps(frames: torch.Tensor, predicted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-probabilities of the blank `[B, t, U + 1]` and of the next token `[B, t, U]`."""
        logits = join(frames[:, :, None], predicted[:, None]).float()
        totals = logits.logsumexp(3)
        index = tokens[:, None, :, None].expand(-1, frames.shape[1], -1, -1)
        return logits[..., BLANK] - totals, logits[:, :, :-1].gather(3, index)[..., 0] - totals[:, :, :-1]

    if chunk >= num_frames:
        blank, emit = steps(encoded, predicted)
    else:
        parts = [
            checkpoint(steps, frames, predicted, use_reentrant=False, preserve_rng_state=False)
            for frames in torch.split(encoded, chunk, dim=1)
        ]
        blank, emit = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
    return lattice_loss(blank, emit, lengths, token_lengths)


def lattice_loss(
    blank: torch.Tensor, emit: torch.Tensor, lengths: torch.Tensor, token_lengths: torch.Tensor
) -> torch.Tensor:
    """The negative log of the sum of the probabilities of all alignments, `[B]` float64.

    The arguments are log-probabilities of the blank, `[B, T, U + 1]`, and of the next token, `[B, T, U]`. Values
    outside an utterance's `lengths` `[B]` and `token_lengths` `[B]` are not used, and have gradient 0.
    """
    losses: torch.Tensor = _Lattice.apply(blank.double(), emit.double(), lengths, token_lengths)  # type: ignore[no-untyped-call]
    return losses


class _Lattice(torch.autograd.Function):
    """Computes the forward sums alpha and the backward sums beta, one anti-diagonal after another.

    alpha(t, u) = log(exp(alpha(t - 1, u) + blank(t - 1, u)) + exp(alpha(t, u - 1) + emit(t, u - 1)))
    beta(t, u)  = log(exp(beta(t + 1, u) + blank(t, u)) + exp(beta(t, u + 1) + emit(t, u)))

    The gradient of log p with respect to a step's log-probability is the step's probability given the tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, blank: torch.Tensor, emit: torch.Tensor, lengths: torch.Tensor, token_lengths: torch.Tensor
    ) -> torch.Tensor:
        num_utterances, num_frames, places = blank.shape
        frame = torch.arange(num_frames, device=blank.device)[:, None]
        place = torch.arange(places, device=blank.device)
        inside = (frame < lengths[:, None, None]) & (place <= token_lengths[:, None, None])
        can_emit = inside & (place < token_lengths[:, None, None])
        never = float("-inf")
        emit = torch.nn.functional.pad(emit, (0, 1), value=never).masked_fill(~can_emit, never)
        blank = blank.masked_fill(~inside, never)

        diagonal = torch.arange(num_frames + places - 1, device=blank.device)[:, None]
        frame_of = diagonal - place
        outside = (frame_of < 0) | (frame_of >= num_frames)
        # [diagonals, B, U + 1]
        blanks, emits = (
            each[:, frame_of.clamp(0, num_frames - 1), place].masked_fill(outside, never).transpose(0, 1)
            for each in (blank, emit)
        )
        num_diagonals = len(blanks)
        alpha = blank.new_full((num_diagonals, num_utterances, places), never)
        alpha[0, :, 0] = 0.0
        for number in range(1, num_diagonals):
            alpha[number] = alpha[number - 1] + blanks[number - 1]
            emitted = alpha[number - 1, :, :-1] + emits[number - 1, :, :-1]
            alpha[number, :, 1:] = torch.logaddexp(alpha[number, :, 1:], emitted)
        beta = blank.new_full((num_diagonals + 1, num_utterances, places + 1), never)
        row = torch.arange(num_utterances, device=blank.device)
        ends = lengths + token_lengths
        is_end = torch.zeros(num_diagonals + 1, num_utterances, places + 1, dtype=torch.bool, device=blank.device)
        is_end[ends, row, token_lengths] = True
        beta.masked_fill_(is_end, 0.0)
        for number in reversed(range(num_diagonals)):
            later = beta[number + 1]
            found = torch.logaddexp(later[:, :-1] + blanks[number], later[:, 1:] + emits[number])
            beta[number, :, :-1] = torch.where(is_end[number, :, :-1], 0.0, found)
        total = beta[0, :, 0]
        by_blank = (alpha + blanks + beta[1:, :, :-1] - total[:, None]).exp()
        by_token = (alpha + emits + beta[1:, :, 1:] - total[:, None]).exp()
        shares = [each[frame + place, :, place].permute(2, 0, 1) for each in (by_blank, by_token)]
        ctx.save_for_backward(shares[0], shares[1][..., :-1])
        return -total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        blank, emit = ctx.saved_tensors
        factor = -gradient[:, None, None]
        return factor * blank, factor * emit, None, None


class Transducer(Decoder):
    """Joins each frame of the encoder with the tokens emitted before it.

        f(t) = A frame(t),   g(u) = B relu(C (e(u - context + 1), ..., e(u))),   logits(t, u) = D tanh(f(t) + g(u))

    with learned embeddings e of tokens and a convolution C over the last `context` embeddings. The predictor has no
    state.

    Sources: Graves 2012 (arXiv 1211.3711); Ghodsi et al. 2020, "RNN-transducer with stateless prediction network". As
    in icefall, the predictor uses more than one token.
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
        """The predictions g `[B, U + 1, width]` at the beginning and after each of the tokens `[B, U]`."""
        return self.after(nn.functional.pad(tokens, (self.context, 0), value=BLANK))

    def after(self, tokens: torch.Tensor) -> torch.Tensor:
        """The predictions g `[B, N - context + 1, width]` after each of the tokens `[B, N]`, except the first
        `context - 1`.

        Blanks represent the tokens before the beginning.
        """
        mixed = self.history(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        predicted: torch.Tensor = self.prediction(mixed.relu())
        return predicted

    def join(self, frames: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        """The logits `[..., V]` for f and g, each `[..., width]`, which are broadcast."""
        logits: torch.Tensor = self.output(torch.tanh(frames + predicted))
        return logits

    def forward(
        self, frames: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, token_lengths: torch.Tensor
    ) -> torch.Tensor:
        """The loss summed over all utterances, in nats. The arguments are those of `Decoder`."""
        rows = padded(tokens, token_lengths)
        encoded, predicted = self.frames(frames), self.predict(rows)
        losses = transducer_loss(self.join, encoded, predicted, rows, lengths, token_lengths, self.vocab_size)
        return losses.sum().float()
