"""A Conformer encoder with CTC outputs: attention for the whole utterance, convolution for what is near."""

import torch
import torch.nn.functional as F
from torch import nn

from starling.speech.models.network import ConvSubsampling, Layers, distances, frame_mask, phases
from starling.speech.models.shape import Chunks, ConformerShape
from starling.speech.models.streaming import (
    Caches,
    StreamingNetwork,
    chunk_convolution,
    chunk_mask,
    chunk_visible,
    convolve_once,
)
from starling.speech.models.transformer import SelfAttention


class RelativeAttention(SelfAttention):
    """Self-attention whose scores also depend on the distance between frames; `[B, T, width]` -> `[B, T, width]`.

        score(i, j) = ((q_i + u)' k_j + (q_i + v)' W r(i - j)) / sqrt(D)

    in each head, with sinusoids r, and learned u, v and W. It needs `[B, heads, T, T]` scores in memory, which rotary
    positions don't. Source: Dai et al. 2019, "Transformer-XL", section 3.3 (arXiv 1901.02860).
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
        """As for `SelfAttention`, of whole utterances only; `places` is `distances(T, width)`."""
        if places is None or past is not None:
            raise ValueError("relative attention needs the sinusoids of distances, of whole utterances")
        queries, keys, values = self.inputs(frames).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        steps = self.distances(places.to(frames.dtype)).unflatten(1, (self.heads, -1))  # [2T - 1, heads, D]
        num_frames, size = frames.shape[1], queries.shape[3]
        scores = torch.einsum("bhid,phd->bhip", queries + self.distance_bias[:, None], steps) * size**-0.5
        place = torch.arange(num_frames, device=frames.device)
        apart = place[:, None] - place + num_frames - 1  # i - j, from 0
        apart = apart.expand(frames.shape[0], self.heads, num_frames, num_frames)
        bias = scores.gather(3, apart).masked_fill(~visible, float("-inf"))
        attended = F.scaled_dot_product_attention(queries + self.content_bias[:, None], keys, values, bias)
        return self.outputs(attended.transpose(1, 2).flatten(2)), None


class FeedForward(nn.Module):
    """W2 swish(W1 LayerNorm(x) + b1) + b2, swish(x) = x sigmoid(x), with dropout behind either layer."""

    def __init__(self, width: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widening = nn.Linear(width, feed_forward)
        self.narrowing = nn.Linear(feed_forward, width)
        self.wide_dropout = nn.Dropout(dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """`[B, T, width]` -> `[B, T, width]`."""
        wide = self.wide_dropout(F.silu(self.widening(self.norm(frames))))
        added: torch.Tensor = self.dropout(self.narrowing(wide))
        return added


class Convolution(nn.Module):
    """W2 swish(LayerNorm(c * GLU(W1 LayerNorm(x)))): a convolution c over time, one for each unit.

    Frames outside the utterance are set to zero in front of the convolution, as if there were none.
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
        """`[B, T, width]` -> `[B, T, width]`, and the past of the next chunk; `inside` `[B, T, 1]` is true inside the
        utterance. A frame hears none behind its `chunk`, if that is given, in frames. Alternatively, `frames` are a
        chunk, and the `past` `[B, width, kernel // 2]` is before it."""
        gated = F.glu(self.gates(self.norm(frames)), dim=2).masked_fill(~inside, 0.0).transpose(1, 2)
        if past is not None:
            window = torch.cat([past, gated], dim=2)
            mixed, past = convolve_once(self.convolution, window), window[..., window.shape[2] - past.shape[2] :]
        else:
            mixed = self.convolution(gated) if chunk is None else chunk_convolution(self.convolution, gated, chunk)
        return self.dropout(self.outputs(F.silu(self.inner_norm(mixed.transpose(1, 2))))), past


class Block(nn.Module):
    """One block of a Conformer, `[B, T, width]` -> `[B, T, width]`.

    x <- x + FeedForward(x) / 2
    x <- x + Attention(LayerNorm(x))
    x <- x + Convolution(x)
    x <- LayerNorm(x + FeedForward'(x) / 2)
    """

    def __init__(self, shape: ConformerShape) -> None:
        super().__init__()
        width = shape.width
        self.first = FeedForward(width, shape.feed_forward, shape.dropout)
        self.attention_norm = nn.LayerNorm(width)
        attention = RelativeAttention if shape.positions == "relative" else SelfAttention
        self.attention = attention(width, shape.heads)
        self.convolution = Convolution(width, shape.kernel, shape.dropout)
        self.second = FeedForward(width, shape.feed_forward, shape.dropout)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(
        self,
        frames: torch.Tensor,
        inside: torch.Tensor,
        places: torch.Tensor,
        visible: torch.Tensor,
        chunk: int | None = None,
        past: tuple[torch.Tensor, torch.Tensor] | tuple[None, None] = (None, None),
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The outputs, and the pasts of attention and convolution for the next chunk.

        `inside` `[B, T, 1]` is true inside the utterance; `visible` and `places` are those of the attention, `chunk`
        that of the convolution; `past` is that of either, if the frames are a chunk.
        """
        frames = frames + 0.5 * self.first(frames)
        attended, attention = self.attention(self.attention_norm(frames), visible, places, past[0])
        frames = frames + self.dropout(attended)
        mixed, convolution = self.convolution(frames, inside, chunk, past[1])
        frames = frames + mixed
        return self.norm(frames + 0.5 * self.second(frames)), attention, convolution


class ConformerCtc(StreamingNetwork):
    """Convolutional subsampling, a projection to the width, Conformer blocks, CTC outputs.

    Source: Gulati et al. 2020, "Conformer: convolution-augmented Transformer for speech recognition" (arXiv
    2005.08100). It departs in three places: subsampling is `ConvSubsampling`; inside the convolution is a LayerNorm
    instead of a BatchNorm, whose running statistics are no weights, so that learners could not average them as such;
    and positions are rotary unless `positions: relative` asks for those of the paper.
    """

    cache_names = ("attention", "convolution", "remembered")

    def __init__(self, shape: ConformerShape, num_features: int, vocab_size: int) -> None:
        super().__init__()
        self.rotary = shape.positions == "rotary"
        self.heads, self.width, self.reach = shape.heads, shape.width, shape.kernel // 2
        self.head_size = shape.width // shape.heads
        self.subsampling = ConvSubsampling(num_features, shape.channels, shape.subsampling)
        self.projection = nn.Linear(shape.channels, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.stacked = Layers(self.blocks, shape.width)
        self.output = nn.Linear(shape.width, vocab_size)

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Frames `[B, T', output.in_features]` and lengths `[B]` of features `[B, T, F]` and lengths `[B]`."""
        frames, lengths = self.subsampling(features, lengths)
        frames = self.dropout(self.projection(frames))
        num_frames, width = frames.shape[1:]
        device = frames.device
        places = phases(num_frames, self.head_size, device) if self.rotary else distances(num_frames, width, device)
        inside = frame_mask(lengths, num_frames)
        chunks = self.pass_chunks()
        visible = inside[:, None, None, :, 0] if chunks is None else chunk_mask(inside, chunks)
        for block in self.blocks:
            frames, *_ = block(frames, inside, places, visible, None if chunks is None else chunks.frames)
        return frames, lengths

    def caches(self, batch_size: int, chunks: Chunks) -> Caches:
        """Keys and values `[B, layers, L, 2, heads, D]` of the L frames before, what the convolutions hear of them
        `[B, layers, width, kernel // 2]`, and which of them exist `[B, L]`."""
        before, layers = chunks.left * chunks.frames, len(self.blocks)
        past = self.output.weight.new_zeros(batch_size, layers, before, 2, self.heads, self.head_size)
        convolved = past.new_zeros(batch_size, layers, self.width, self.reach)
        return past, convolved, torch.zeros(batch_size, before, dtype=torch.bool, device=past.device)

    def encode_chunk(self, window: torch.Tensor, inside: torch.Tensor, caches: Caches) -> tuple[torch.Tensor, Caches]:
        """As for `StreamingNetwork`."""
        past, convolved, remembered = caches
        before = past.shape[2]
        frames, inside = self.subsampling.of_window(window, inside)
        frames = self.projection(frames)
        angles = phases(before + frames.shape[1], self.head_size, frames.device)
        visible = chunk_visible(remembered, inside)
        pasts, heard = [], []
        for number, block in enumerate(self.blocks):
            pair = past[:, number], convolved[:, number]
            frames, known, mixed = block(frames, inside[:, :, None], angles, visible, None, pair)
            pasts.append(known)
            heard.append(mixed)
        remembered = torch.cat([remembered, inside], dim=1)[:, -before:]
        return frames, (torch.stack(pasts, dim=1), torch.stack(heard, dim=1), remembered)
