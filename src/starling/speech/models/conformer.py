"""A Conformer encoder with CTC outputs. It combines attention over the whole utterance with convolution over nearby
frames."""

import torch
import torch.nn.functional as F
from torch import nn

from starling.speech.models.architectures import Chunks, ConformerConfig
from starling.speech.models.network import Caches, chunk_convolution, convolve_once
from starling.speech.models.transformer import AttentionNetwork, SelfAttention, Sight


class RelativeAttention(SelfAttention):
    """Self-attention, from `[B, T, width]` to `[B, T, width]`, whose scores also depend on the distance between frames.

        score(i, j) = ((q_i + u)' k_j + (q_i + v)' W r(i - j)) / sqrt(D)

    in each head, with sinusoids r, and learned u, v and W. Unlike attention with rotary positions, it needs the scores
    `[B, heads, T, T]` in memory. Source: Dai et al. 2019, "Transformer-XL", section 3.3 (arXiv 1901.02860).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.distances = nn.Linear(width, width, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads, width // heads))  # u
        self.distance_bias = nn.Parameter(torch.zeros(heads, width // heads))  # v

    def forward(
        self,
        frames: torch.Tensor,
        visible: torch.Tensor,
        places: torch.Tensor | None,
        past: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """The outputs for whole utterances. The arguments are those of `SelfAttention`; `places` is `distances(T,
        width)`."""
        if places is None or past is not None:
            raise ValueError("relative attention needs whole utterances, and the sinusoids of distances")
        queries, keys, values = self.inputs(frames).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        steps = self.distances(places.to(frames.dtype)).unflatten(1, (self.heads, -1))  # [2T - 1, heads, D]
        num_frames, size = frames.shape[1], queries.shape[3]
        scores = torch.einsum("bhid,phd->bhip", queries + self.distance_bias[:, None], steps) * size**-0.5
        place = torch.arange(num_frames, device=frames.device)
        apart = place[:, None] - place + num_frames - 1  # i - j, shifted so that the smallest is 0
        apart = apart.expand(frames.shape[0], self.heads, num_frames, num_frames)
        bias = scores.gather(3, apart).masked_fill(~visible, float("-inf"))
        attended = F.scaled_dot_product_attention(queries + self.content_bias[:, None], keys, values, bias)
        return self.outputs(attended.transpose(1, 2).flatten(2)), None


class FeedForward(nn.Module):
    """Computes W2 swish(W1 LayerNorm(x) + b1) + b2 with swish(x) = x sigmoid(x), and dropout after both layers."""

    def __init__(self, width: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widening = nn.Linear(width, feed_forward)
        self.narrowing = nn.Linear(feed_forward, width)
        self.wide_dropout = nn.Dropout(dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Map `[B, T, width]` to `[B, T, width]`."""
        wide = self.wide_dropout(F.silu(self.widening(self.norm(frames))))
        added: torch.Tensor = self.dropout(self.narrowing(wide))
        return added


class Convolution(nn.Module):
    """Computes W2 swish(LayerNorm(c * GLU(W1 LayerNorm(x)))), where c is a depthwise convolution over time.

    Frames outside the utterance are set to zero before the convolution, as if they did not exist.
    """

    def __init__(self, width: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gates = nn.Linear(width, 2 * width)
        self.convolution = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.inner_norm = nn.LayerNorm(width)
        self.outputs = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, frames: torch.Tensor, inside: torch.Tensor, chunk: int | None = None, past: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The outputs `[B, T, width]`, and the past for the next chunk. `inside` `[B, T, 1]` is true inside the
        utterance. If `chunk`, a number of frames, is given, no frame depends on frames after its own chunk.
        Alternatively, `frames` are one chunk, preceded by `past` `[B, width, kernel // 2]`."""
        gated = F.glu(self.gates(self.norm(frames)), dim=2).masked_fill(~inside, 0.0).transpose(1, 2)
        if past is not None:
            window = torch.cat([past, gated], dim=2)
            mixed, past = convolve_once(self.convolution, window), window[..., window.shape[2] - past.shape[2] :]
        else:
            mixed = self.convolution(gated) if chunk is None else chunk_convolution(self.convolution, gated, chunk)
        return self.dropout(self.outputs(F.silu(self.inner_norm(mixed.transpose(1, 2))))), past


class Block(nn.Module):
    """One block of a Conformer, which maps `[B, T, width]` to `[B, T, width]`.

    x <- x + FeedForward(x) / 2
    x <- x + Attention(LayerNorm(x))
    x <- x + Convolution(x)
    x <- LayerNorm(x + FeedForward'(x) / 2)
    """

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        width = config.width
        self.first = FeedForward(width, config.feed_forward, config.dropout)
        self.attention_norm = nn.LayerNorm(width)
        attention = RelativeAttention if config.positions == "relative" else SelfAttention
        self.attention = attention(width, config.heads)
        self.convolution = Convolution(width, config.kernel, config.dropout)
        self.second = FeedForward(width, config.feed_forward, config.dropout)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        frames: torch.Tensor,
        sight: Sight,
        past: torch.Tensor | None = None,
        convolved: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The outputs, and the pasts of attention and convolution for the next chunk."""
        frames = frames + 0.5 * self.first(frames)
        attended, past = self.attention(self.attention_norm(frames), sight.visible, sight.places, past)
        frames = frames + self.dropout(attended)
        mixed, convolved = self.convolution(frames, sight.inside, sight.chunk, convolved)
        frames = frames + mixed
        return self.norm(frames + 0.5 * self.second(frames)), past, convolved


class ConformerCtc(AttentionNetwork):
    """Convolutional subsampling, a projection to the width, Conformer blocks, and CTC outputs.

    Source: Gulati et al. 2020, "Conformer: convolution-augmented Transformer for speech recognition" (arXiv
    2005.08100). We depart from the paper in three places. Subsampling is `ConvSubsampling`. The convolution contains a
    LayerNorm instead of a BatchNorm, because the running statistics of a BatchNorm are not weights, and learners could
    not average them like weights. Positions are rotary, unless `positions: relative` selects those of the paper.
    """

    cache_names = ("attention", "convolution", "remembered")

    def __init__(self, config: ConformerConfig, num_features: int, vocab_size: int) -> None:
        super().__init__(config, num_features, vocab_size, Block, nn.Identity())
        self.convolved = config.width, config.kernel // 2

    def caches(self, batch_size: int, chunks: Chunks) -> Caches:
        """The caches of attention, and between them a cache of the frames before the chunk that the convolutions use,
        `[B, layers, width, kernel // 2]`."""
        past, remembered = super().caches(batch_size, chunks)
        return past, past.new_zeros(batch_size, len(self.blocks), *self.convolved), remembered
