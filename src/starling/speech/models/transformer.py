"""Encoders made of blocks with attention, encodings of frame positions, a Transformer encoder with CTC outputs, and a
Transformer decoder, which attends to the encoder's frames and emits one token after another."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from starling.speech.models.architectures import AttentionConfig, BlocksConfig, Chunks, TransformerConfig
from starling.speech.models.network import (
    Caches,
    ConvSubsampling,
    Decoder,
    Layers,
    StreamingNetwork,
    chunk_mask,
    chunk_visible,
    frame_mask,
    padded,
)
from starling.speech.tokens import BLANK

_LONGEST_PERIOD = 10_000.0  # in frames, divided by 2 pi


def phases(num_frames: int, size: int, device: torch.device | None = None) -> torch.Tensor:
    """Angles `[num_frames, size / 2]` in radians: p * 10000^(-2i / size) for frame p and the i-th pair of units."""
    pair = torch.arange(0, size, 2, device=device, dtype=torch.float32)
    frame = torch.arange(num_frames, device=device, dtype=torch.float32)
    return torch.outer(frame, _LONGEST_PERIOD ** (-pair / size))


def sinusoids(num_frames: int, width: int, device: torch.device | None = None) -> torch.Tensor:
    """Encodings `[num_frames, width]` of absolute positions, to be added to the frames.

        PE(p, 2i) = sin(p / 10000^(2i / width)),    PE(p, 2i + 1) = cos(p / 10000^(2i / width))

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.5 (arXiv 1706.03762).
    """
    angles = phases(num_frames, width, device)
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)


def distances(num_frames: int, width: int, device: torch.device | None = None) -> torch.Tensor:
    """Sinusoidal encodings `[2 * num_frames - 1, width]` of the distances from 1 - num_frames to num_frames - 1 frames.

    Source: Dai et al. 2019, "Transformer-XL", section 3.3 (arXiv 1901.02860).
    """
    angles = phases(num_frames, width, device)
    angles = torch.cat([-angles.flip(0)[:-1], angles])
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)


def rotate(vectors: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions: rotate the queries or keys `[B, T, ..., D]` of each frame by the frame's `phases(T, D)`.

        <R_p q, R_s k> = <q, R_(s - p) k>

    Attention then depends only on the distance between frames, not on their positions. Nothing is learned. Source: Su
    et al. 2021, "RoFormer: enhanced Transformer with rotary position embedding", section 3.2 (arXiv 2104.09864). We
    depart from the paper in the order of the units: unit i is paired with unit i + D / 2, not with its neighbour.
    """
    angles = angles.view(angles.shape[0], *[1] * (vectors.ndim - 3), -1)
    cosines, sines = angles.cos(), angles.sin()
    first, second = vectors.chunk(2, dim=-1)
    turned = torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1)
    return turned.to(vectors.dtype)


class Sight(NamedTuple):
    """The masks and positions that determine how the frames of a pass, or of a chunk, attend to each other."""

    inside: torch.Tensor  # [B, T, 1]: true inside the utterance
    visible: torch.Tensor  # mask of the frames attended to, in the form that `SelfAttention` expects
    places: torch.Tensor | None  # positions of the frames, in the form that the attention expects
    chunk: int | None = None  # frames of a chunk in a pass over whole utterances; None means full context


class SelfAttention(nn.Module):
    """Computes softmax(Q K' / sqrt(D)) V in each head of D = width / heads units, from `[B, T, width]` to
    `[B, T, width]`.

    Dropout is not applied to the attention weights. With such dropout, torch's attention would keep `[B, heads, T, T]`
    for the backward pass and take several times as long on a CPU; without it, memory grows linearly with T.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)  # queries, keys and values, each with its heads concatenated
        self.outputs = nn.Linear(width, width)

    def forward(
        self,
        frames: torch.Tensor,
        visible: torch.Tensor,
        angles: torch.Tensor | None,
        past: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The outputs, and the past for the next chunk.

        Args:
            frames: The frames of whole utterances, or of a chunk of C frames.
            visible: A mask of the frames that are attended to: `[B, 1, 1, T]`, the same for all frames, or
                `[B, 1, T, T]`, one for each frame. For a chunk, it is `[B, 1, C, L + C]`.
            angles: The rotation of each frame, `[T, D / 2]`. For a chunk, it is `[L + C, D / 2]`, counted from the
                first frame of the past so that angles stay small in a long stream.
            past: The keys before rotation, and the values, of the L frames before a chunk, `[B, L, 2, heads, D]`.
        """
        parts = self.inputs(frames).unflatten(2, (3, self.heads, -1))
        queries, keys, values = parts.unbind(2)
        if past is not None:
            before = past.shape[1]
            past = torch.cat([past, parts[:, :, 1:]], dim=1)
            keys, values = past.unbind(2)
            past = past[:, -before:]
            if angles is not None:
                queries, keys = rotate(queries, angles[before:]), rotate(keys, angles)
        elif angles is not None:
            queries, keys = rotate(parts[:, :, :2], angles).unbind(2)
        attended = F.scaled_dot_product_attention(
            queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), visible
        )
        return self.outputs(attended.transpose(1, 2).flatten(2)), past


class Block(nn.Module):
    """One pre-norm block, which maps `[B, T, width]` to `[B, T, width]`.

        x <- x + Attention(LayerNorm(x))
        x <- x + W2 relu(W1 LayerNorm(x) + b1) + b2

    Source: Vaswani et al. 2017 (arXiv 1706.03762). The norms are placed as in figure 1b of Xiong et al. 2020, "On layer
    normalization in the Transformer architecture" (arXiv 2002.04745), so that training needs no long warm-up.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width, feed_forward = config.width, config.feed_forward
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, config.heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.widening = nn.Linear(width, feed_forward)
        self.narrowing = nn.Linear(feed_forward, width)
        self.wide_dropout = nn.Dropout(config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, frames: torch.Tensor, sight: Sight, past: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The outputs, and the past for the next chunk. `past` is the past of `SelfAttention`."""
        attended, past = self.attention(self.attention_norm(frames), sight.visible, sight.places, past)
        frames = frames + self.dropout(attended)
        wide = torch.relu(self.widening(self.feed_forward_norm(frames)))
        return frames + self.dropout(self.narrowing(self.wide_dropout(wide))), past


class AttentionNetwork(StreamingNetwork):
    """Convolutional subsampling, a projection to the width, positions, blocks with attention, `norm`, and CTC outputs.

    The inputs of a block are frames, a `Sight` and, for a chunk, the past that the block returned for the previous
    chunk. It returns frames and the past for the next chunk.
    """

    def __init__(
        self,
        config: BlocksConfig,
        num_features: int,
        vocab_size: int,
        block: Callable[[Any], nn.Module],
        norm: nn.Module,
        span: int = 0,
    ) -> None:
        super().__init__()
        self.positions, self.span = config.positions, span
        self.heads, self.head_size = config.heads, config.width // config.heads
        self.subsampling = ConvSubsampling(num_features, config.channels, config.subsampling)
        self.projection = nn.Linear(config.channels, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(block(config) for _ in range(config.layers))
        self.stacked = Layers(self.blocks, config.width)
        self.norm = norm
        self.output = nn.Linear(config.width, vocab_size)

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map features `[B, T, F]` and lengths `[B]` to frames `[B, T', output.in_features]` and lengths `[B]`."""
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
        """The caches before the first chunk: zeros as the keys and values `[B, layers, L, 2, heads, D]` of L frames,
        for heads of D units, and a mask `[B, L]` of the frames that exist, which are none."""
        before = chunks.left * chunks.frames
        past = self.output.weight.new_zeros(batch_size, len(self.blocks), before, 2, self.heads, self.head_size)
        return past, torch.zeros(batch_size, before, dtype=torch.bool, device=past.device)

    def encode_chunk(self, window: torch.Tensor, inside: torch.Tensor, caches: Caches) -> tuple[torch.Tensor, Caches]:
        """The encoder frames of one chunk, and the caches for the next chunk. The last element of `caches` is a mask of
        the frames that exist; the other elements are the pasts of the blocks."""
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
    """Convolutional subsampling, a projection to the width, positions, pre-norm blocks, LayerNorm, and CTC outputs."""

    cache_names = ("attention", "remembered")

    def __init__(self, config: TransformerConfig, num_features: int, vocab_size: int) -> None:
        super().__init__(config, num_features, vocab_size, Block, nn.LayerNorm(config.width), config.span)


END = BLANK
"""The token that begins and ends a text. The decoder uses CTC's blank for this purpose only."""
_IGNORED = -100


@dataclass(frozen=True)
class Memory:
    """The encoded utterances for a decoder: keys and values `[2, B, heads, T', D]` for each block, and a mask of the
    frames that exist."""

    blocks: list[torch.Tensor]
    visible: torch.Tensor  # [B, 1, 1, T']: false in the padding

    def times(self, count: int) -> "Memory":
        """The memory of one utterance, repeated for `count` texts."""
        return Memory([each.expand(-1, count, -1, -1, -1) for each in self.blocks], self.visible)


Past = list[torch.Tensor]
"""Keys and values `[2, B, heads, U, D]` of the preceding tokens, one tensor for each block."""


class DecoderBlock(nn.Module):
    """One pre-norm block of the decoder, which maps `[B, U, width]` to `[B, U, width]`.

        x <- x + SelfAttention(LayerNorm(x)), from each token to itself and the tokens before it
        x <- x + Attention(LayerNorm(x), frames)
        x <- x + W2 relu(W1 LayerNorm(x) + b1) + b2

    Source: Vaswani et al. 2017 (arXiv 1706.03762), with the norms placed as in the encoder. The block is equivalent to
    `nn.TransformerDecoderLayer`, which cannot keep keys and values from one token to the next.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.self_norm = nn.LayerNorm(width)
        self.self_inputs = nn.Linear(width, 3 * width)
        self.self_outputs = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.queries = nn.Linear(width, width)
        self.memory = nn.Linear(width, 2 * width)
        self.outputs = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.widening = nn.Linear(width, 4 * width)
        self.narrowing = nn.Linear(4 * width, width)
        self.wide_dropout = nn.Dropout(dropout)
        self.dropout = nn.Dropout(dropout)

    def split(self, values: torch.Tensor, parts: int) -> torch.Tensor:
        """Split the units `[B, U, parts * width]` into `[parts, B, heads, U, D]`."""
        return values.reshape(*values.shape[:2], parts, self.heads, -1).permute(2, 0, 3, 1, 4)

    def forward(
        self, inputs: torch.Tensor, memory: torch.Tensor, visible: torch.Tensor, past: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs, and the keys and values of all tokens so far. If `past` is given, `inputs` has one token."""
        queries, keys, values = self.split(self.self_inputs(self.self_norm(inputs)), 3)
        known = torch.stack([keys, values])
        if past is not None:
            known = torch.cat([past, known], dim=3)
        attended = F.scaled_dot_product_attention(queries, known[0], known[1], is_causal=past is None)
        outputs = inputs + self.dropout(self.self_outputs(attended.transpose(1, 2).flatten(2)))
        (queries,) = self.split(self.queries(self.norm(outputs)), 1)
        attended = F.scaled_dot_product_attention(queries, memory[0], memory[1], visible)
        outputs = outputs + self.dropout(self.outputs(attended.transpose(1, 2).flatten(2)))
        wide = self.wide_dropout(self.widening(self.feed_forward_norm(outputs)).relu())
        return outputs + self.dropout(self.narrowing(wide)), known


class AttentionDecoder(Decoder):
    """Embeddings with sinusoidal positions, blocks, LayerNorm, and logits of the next token.

    It is trained with cross-entropy and label smoothing e: the target has 1 - e + e / V, any other token e / V
    (Szegedy et al. 2016, arXiv 1512.00567). Beside CTC: Watanabe et al. 2017, "Hybrid CTC/attention architecture".
    """

    def __init__(self, config: AttentionConfig, encoder_width: int, vocab_size: int) -> None:
        super().__init__()
        self.label_smoothing = config.label_smoothing
        self.frames = nn.Linear(encoder_width, config.width)
        self.embedding = nn.Embedding(vocab_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            DecoderBlock(config.width, config.heads, config.dropout) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, vocab_size)

    def hear(self, frames: torch.Tensor, lengths: torch.Tensor) -> Memory:
        """The memory that the blocks attend to, from the encoder's frames `[B, T', W]` and lengths `[B]`."""
        heard = self.frames(frames)
        blocks = [cast(DecoderBlock, block) for block in self.blocks]
        return Memory(
            [each.split(each.memory(heard), 2) for each in blocks],
            frame_mask(lengths, frames.shape[1])[:, None, None, :, 0],
        )

    def log_probs(self, tokens: torch.Tensor, memory: Memory, past: Past | None = None) -> tuple[torch.Tensor, Past]:
        """Log-probabilities `[B, U, V]` of the token after each of `tokens` `[B, U]`, the first of which is `END`.

        If the `past` that an earlier call returned is given, `tokens` `[B, 1]` are the tokens that follow it.
        """
        before = 0 if past is None else past[0].shape[3]
        places = sinusoids(before + tokens.shape[1], self.embedding.embedding_dim, tokens.device)[before:]
        states = self.dropout(self.embedding(tokens) + places)
        pasts = []
        for number, (block, heard) in enumerate(zip(self.blocks, memory.blocks, strict=True)):
            states, known = block(states, heard, memory.visible, None if past is None else past[number])
            pasts.append(known)
        return self.output(self.norm(states)).float().log_softmax(dim=2), pasts

    def forward(
        self, frames: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, token_lengths: torch.Tensor
    ) -> torch.Tensor:
        """The smoothed cross-entropy summed over all utterances, in nats. The arguments are those of `Decoder`."""
        log_probs, targets = self._follow(self.hear(frames, lengths), padded(tokens, token_lengths), token_lengths)
        return F.cross_entropy(
            log_probs.flatten(0, 1),
            targets.flatten(),
            ignore_index=_IGNORED,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )

    def score(self, memory: Memory, tokens: torch.Tensor, token_lengths: torch.Tensor) -> torch.Tensor:
        """The values `[B]` of log p(tokens, END | frames), one for each text in `[B, U]`."""
        log_probs, targets = self._follow(memory, tokens, token_lengths)
        return -F.nll_loss(log_probs.transpose(1, 2), targets, ignore_index=_IGNORED, reduction="none").sum(1)

    def _follow(
        self, memory: Memory, tokens: torch.Tensor, token_lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities `[B, U + 1, V]` along given texts, and the targets `[B, U + 1]`."""
        place = torch.arange(tokens.shape[1] + 1, device=tokens.device)
        targets = F.pad(tokens, (0, 1), value=END)
        targets = targets.masked_fill(place == token_lengths[:, None], END)
        targets = targets.masked_fill(place > token_lengths[:, None], _IGNORED)
        return self.log_probs(F.pad(tokens, (1, 0), value=END), memory)[0], targets
