"""A Transformer decoder: it attends to the encoder's frames, and emits one token after another."""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from starling.speech.models.config import AttentionConfig
from starling.speech.models.network import Decoder, frame_mask, padded
from starling.speech.models.transformer import sinusoids
from starling.speech.tokens import BLANK

END = BLANK
"""The token that begins and ends a text; the decoder has no other use for CTC's blank."""
_IGNORED = -100


@dataclass(frozen=True)
class Memory:
    """The encoded utterances for a decoder: keys and values `[2, B, heads, T', D]` for each block, and which frames
    exist."""

    blocks: list[torch.Tensor]
    visible: torch.Tensor  # [B, 1, 1, T'], false in the padding

    def times(self, count: int) -> "Memory":
        """The memory of one utterance, repeated for `count` texts."""
        return Memory([each.expand(-1, count, -1, -1, -1) for each in self.blocks], self.visible)


Past = list[torch.Tensor]
"""Keys and values `[2, B, heads, U, D]` of the preceding tokens, one tensor for each block."""


class DecoderBlock(nn.Module):
    """One pre-norm block, `[B, U, width]` -> `[B, U, width]`.

        x <- x + SelfAttention(LayerNorm(x)), of a token to itself and those before it
        x <- x + Attention(LayerNorm(x), frames)
        x <- x + W2 relu(W1 LayerNorm(x) + b1) + b2

    Source: Vaswani et al. 2017 (arXiv 1706.03762), norms as in the encoder. It equals `nn.TransformerDecoderLayer`,
    which cannot keep keys and values from one token to the next.
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
        """The outputs, and the keys and values of all tokens so far. With a `past`, `inputs` is one token."""
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

        With the `past` that an earlier call returned, `tokens` `[B, 1]` are the tokens that follow it.
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
        """The smoothed cross-entropy summed over all utterances, in nats; the arguments are those of `Decoder`."""
        log_probs, targets = self._follow(self.hear(frames, lengths), padded(tokens, token_lengths), token_lengths)
        return F.cross_entropy(
            log_probs.flatten(0, 1),
            targets.flatten(),
            ignore_index=_IGNORED,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )

    def score(self, memory: Memory, tokens: torch.Tensor, token_lengths: torch.Tensor) -> torch.Tensor:
        """log p(tokens, END | frames) of each text `[B, U]`: `[B]`."""
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
