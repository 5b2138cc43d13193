"""Encoders of blocks with attention, and of them a Transformer with CTC outputs."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from starling.speech.models.network import ConvSubsampling, Layers, distances, frame_mask, phases, rotate, sinusoids
from starling.speech.models.shape import AttentionShape, Chunks, TransformerShape
from starling.speech.models.streaming import Caches, StreamingNetwork, chunk_mask, chunk_visible


class Sight(NamedTuple):
    """What the frames of a pass, or of a chunk, see of each other."""

    inside: torch.Tensor  # [B, T, 1], true inside the utterance
    visible: torch.Tensor  # which frames are attended to, as `SelfAttention` takes it
    places: torch.Tensor | None  # of frames, as the attention takes them
    chunk: int | None = None  # frames of a chunk, in a pass over whole utterances; None: full context


class SelfAttention(nn.Module):
    """softmax(Q K' / sqrt(D)) V in each head, of D = width / heads units; `[B, T, width]` -> `[B, T, width]`.

    The attention's own weights are not dropped: with that, torch's attention would keep `[B, heads, T, T]`
    for the backward pass, at two to four times the time on a CPU; without, memory grows with T alone.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)  # queries, keys and values, each the heads one after the other
        self.outputs = nn.Linear(width, width)

    def forward(
        self,
        frames: torch.Tensor,
        visible: torch.Tensor,
        angles: torch.Tensor | None,
        past: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The outputs, and the past of the next chunk.

        Args:
            frames: Of whole utterances, or of a chunk of C frames.
            visible: Which frames are attended to, `[B, 1, 1, T]`, or `[B, 1, T, T]` for each frame; for a chunk,
                `[B, 1, C, L + C]`.
            angles: How far each frame is rotated, `[T, D / 2]`; for a chunk, `[L + C, D / 2]`: they count from the
                first frame of the past, so that they stay small in a long stream.
            past: The keys before rotation, and the values, of the L frames before a chunk, `[B, L, 2, heads, D]`.
        """
        queries, *known = self.inputs(frames).unflatten(2, (3, self.heads, -1)).unbind(2)
        before = 0
        if past is not None:
            before = past.shape[1]
            past = torch.cat([past, torch.stack(known, dim=2)], dim=1)
            known = list(past.unbind(2))
            past = past[:, -before:]
        keys, values = known
        if angles is not None:
            queries, keys = rotate(queries, angles[before:]), rotate(keys, angles)
        attended = F.scaled_dot_product_attention(
            queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), visible
        )
        return self.outputs(attended.transpose(1, 2).flatten(2)), past


class Block(nn.Module):
    """One pre-norm block, `[B, T, width]` -> `[B, T, width]`.

        x <- x + Attention(LayerNorm(x))
        x <- x + W2 relu(W1 LayerNorm(x) + b1) + b2

    Source: Vaswani et al. 2017 (arXiv 1706.03762), with the norms where Xiong et al. 2020, "On layer normalization in
    the Transformer architecture" (arXiv 2002.04745), figure 1b, put them: it trains without a long warm-up.
    """

    def __init__(self, width: int, heads: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.widening = nn.Linear(width, feed_forward)
        self.narrowing = nn.Linear(feed_forward, width)
        self.wide_dropout = nn.Dropout(dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, frames: torch.Tensor, sight: Sight, past: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The outputs, and the past of the next chunk; the `past` is that of `SelfAttention`."""
        attended, past = self.attention(self.attention_norm(frames), sight.visible, sight.places, past)
        frames = frames + self.dropout(attended)
        wide = torch.relu(self.widening(self.feed_forward_norm(frames)))
        return frames + self.dropout(self.narrowing(self.wide_dropout(wide))), past


class AttentionNetwork(StreamingNetwork):
    """Convolutional subsampling, a projection to the width, positions, blocks with attention, `norm`, CTC outputs.

    A block takes frames and a `Sight`, and for a chunk what it returned for the chunk before; it returns frames and
    what the next chunk needs.
    """

    def __init__(
        self,
        shape: AttentionShape,
        num_features: int,
        vocab_size: int,
        make_block: Callable[[], nn.Module],
        norm: nn.Module,
        span: int = 0,
    ) -> None:
        super().__init__()
        self.positions, self.span = shape.positions, span
        self.heads, self.head_size = shape.heads, shape.width // shape.heads
        self.subsampling = ConvSubsampling(num_features, shape.channels, shape.subsampling)
        self.projection = nn.Linear(shape.channels, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(make_block() for _ in range(shape.layers))
        self.stacked = Layers(self.blocks, shape.width)
        self.norm = norm
        self.output = nn.Linear(shape.width, vocab_size)

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Frames `[B, T', output.in_features]` and lengths `[B]` of features `[B, T, F]` and lengths `[B]`."""
        frames, lengths = self.subsampling(features, lengths)
        frames = self.projection(frames)
        num_frames, width = frames.shape[1:]
        places: torch.Tensor | None = None
        if self.positions == "sinusoidal":
            frames = frames + sinusoids(num_frames, width, frames.device).to(frames.dtype)
        elif self.positions == "rotary":
            places = phases(num_frames, self.head_size, frames.device)
        else:
            places = distances(num_frames, width, frames.device)
        frames = self.dropout(frames)
        inside = frame_mask(lengths, num_frames)
        visible = inside[:, None, None, :, 0]
        if self.span:
            place = torch.arange(num_frames, device=frames.device)
            visible = visible & ((place[:, None] - place).abs() <= self.span) | ~visible.transpose(2, 3)
        if (chunks := self.pass_chunks()) is not None:
            visible = chunk_mask(inside, chunks)
        sight = Sight(inside, visible, places, None if chunks is None else chunks.frames)
        for block in self.blocks:
            frames, *_ = block(frames, sight)
        return self.norm(frames), lengths

    def caches(self, batch_size: int, chunks: Chunks) -> Caches:
        """Keys and values `[B, layers, L, 2, heads, D]` of the L frames before, and which of them exist `[B, L]`."""
        before = chunks.left * chunks.frames
        past = self.output.weight.new_zeros(batch_size, len(self.blocks), before, 2, self.heads, self.head_size)
        return past, torch.zeros(batch_size, before, dtype=torch.bool, device=past.device)

    def encode_chunk(self, window: torch.Tensor, inside: torch.Tensor, caches: Caches) -> tuple[torch.Tensor, Caches]:
        """As for `StreamingNetwork`; the last of `caches` says which frames exist, the others are the blocks' pasts."""
        *pasts, remembered = caches
        before = remembered.shape[1]
        frames, inside = self.subsampling.of_window(window, inside)
        frames = self.projection(frames)
        angles = phases(before + frames.shape[1], self.head_size, frames.device)
        sight = Sight(inside[:, :, None], chunk_visible(remembered, inside), angles)
        following = []
        for number, block in enumerate(self.blocks):
            frames, *known = block(frames, sight, *(each[:, number] for each in pasts))
            following.append(known)
        stacked = [torch.stack(each, dim=1) for each in zip(*following, strict=True)]
        return self.norm(frames), (*stacked, torch.cat([remembered, inside], dim=1)[:, -before:])


class TransformerCtc(AttentionNetwork):
    """Convolutional subsampling, a projection to the width, positions, pre-norm blocks, LayerNorm, CTC outputs."""

    cache_names = ("attention", "remembered")

    def __init__(self, shape: TransformerShape, num_features: int, vocab_size: int) -> None:
        make = partial(Block, shape.width, shape.heads, shape.feed_forward, shape.dropout)
        super().__init__(shape, num_features, vocab_size, make, nn.LayerNorm(shape.width), shape.span)
