"""A Zipformer-like encoder with CTC outputs: successive stacks of blocks that run at different frame rates."""

import torch
import torch.nn.functional as F
from torch import nn

from starling.speech.models.architectures import ZipformerConfig
from starling.speech.models.network import ConvSubsampling, Network, frame_mask
from starling.speech.models.transformer import phases, rotate

_QUERY_SIZE = 32  # units of a head's queries and keys
_VALUE_SIZE = 12  # units of a head's values
_WIDENING = 3  # units inside the second feed-forward part, for each unit of a frame


def swoosh_l(values: torch.Tensor) -> torch.Tensor:
    """The activation log(1 + exp(x - 4)) - 0.08 x - 0.035, for units of feed-forward parts that are normally "off"."""
    return F.softplus(values - 4.0) - 0.08 * values - 0.035


def swoosh_r(values: torch.Tensor) -> torch.Tensor:
    """The activation log(1 + exp(x - 1)) - 0.08 x - 0.313261687, which is 0 at x = 0."""
    return F.softplus(values - 1.0) - 0.08 * values - 0.313261687


class BiasNorm(nn.Module):
    """Computes x / RMS(x - b) * exp(g) over the units of a frame, with a learned vector b `[width]` and scalar g.

    LayerNorm removes the length of a frame's vector; BiasNorm retains some information about the length through b.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Map `[..., width]` to `[..., width]`."""
        power = (frames - self.bias).square().mean(dim=-1, keepdim=True)
        return frames * (power + 1e-8).rsqrt() * self.log_scale.exp()


class Bypass(nn.Module):
    """Computes (1 - c) x + c y, with a learned c for each unit, whose initial value is 1/2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """Map x (`before`) and y (`after`), each `[B, T, width]`, to `[B, T, width]`."""
        return before + (after - before) * self.scale


class AttentionWeights(nn.Module):
    """Computes softmax(Q K' / sqrt(D)) in each head, from `[B, T, width]` to `[B, heads, T, T]`. All attention modules
    of a block share these weights."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 2 * heads * _QUERY_SIZE)

    def forward(self, frames: torch.Tensor, inside: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """The weights `[B, heads, T, T]`. `inside` `[B, T, 1]` is true inside the utterance, and `angles` is
        `phases(T, D)`."""
        parts = rotate(self.inputs(frames).unflatten(2, (2, self.heads, _QUERY_SIZE)), angles)
        queries, keys = parts.permute(2, 0, 3, 1, 4).unbind(0)
        scores = queries @ keys.transpose(2, 3) * _QUERY_SIZE**-0.5
        weights: torch.Tensor = scores.masked_fill(~inside[:, None, None, :, 0], float("-inf")).softmax(dim=3)
        return weights


class Attention(nn.Module):
    """Sums the values of all frames with given weights, from `[B, T, width]` to `[B, T, width]`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.values = nn.Linear(width, heads * _VALUE_SIZE)
        self.outputs = nn.Linear(heads * _VALUE_SIZE, width)

    def forward(self, frames: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sums `[B, T, width]`; `weights` are `[B, heads, T, T]`."""
        values = self.values(frames).unflatten(2, (self.heads, _VALUE_SIZE)).transpose(1, 2)
        outputs: torch.Tensor = self.outputs((weights @ values).transpose(1, 2).flatten(2))
        return outputs


class NonLinearAttention(nn.Module):
    """Computes W (A (tanh(s) * x) * y), where s, x and y have 3/4 of the width, and A are the first head's weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, 3 * (3 * width // 4))
        self.outputs = nn.Linear(3 * width // 4, width)

    def forward(self, frames: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The outputs `[B, T, width]`; `weights` are `[B, heads, T, T]`."""
        gates, values, factors = self.inputs(frames).chunk(3, dim=2)
        outputs: torch.Tensor = self.outputs(weights[:, 0] @ (gates.tanh() * values) * factors)
        return outputs


class FeedForward(nn.Module):
    """Computes W2 SwooshL(W1 x + b1) + b2."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.widening = nn.Linear(width, inner)
        self.narrowing = nn.Linear(inner, width)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Map `[B, T, width]` to `[B, T, width]`."""
        outputs: torch.Tensor = self.narrowing(swoosh_l(self.widening(frames)))
        return outputs


class Convolution(nn.Module):
    """Computes W2 SwooshR(c * GLU(W1 x)), where c is a depthwise convolution over time. Padding does not affect the
    outputs."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.gates = nn.Linear(width, 2 * width)
        self.convolution = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.outputs = nn.Linear(width, width)

    def forward(self, frames: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        """Map `[B, T, width]` to `[B, T, width]`. `inside` `[B, T, 1]` is true inside the utterance."""
        gated = F.glu(self.gates(frames), dim=2).masked_fill(~inside, 0.0)
        outputs: torch.Tensor = self.outputs(swoosh_r(self.convolution(gated.transpose(1, 2)).transpose(1, 2)))
        return outputs


class Block(nn.Module):
    """One block, from `[B, T, width]` to `[B, T, width]`. The attention weights A are computed once, from the input x0.

    x <- x0 + FF1(x0),  x <- x + NonLinear(A, x),  x <- x + Att1(A, x),  x <- x + Conv1(x),  x <- x + FF2(x)
    x <- Bypass(x0, x)
    x <- x + Att2(A, x),  x <- x + Conv2(x),  x <- x + FF3(x)
    x <- Bypass'(x0, BiasNorm(x))
    """

    def __init__(self, width: int, heads: int, kernel: int, dropout: float) -> None:
        super().__init__()
        inner = _WIDENING * width
        self.weights = AttentionWeights(width, heads)
        self.feed_forward = nn.ModuleList(FeedForward(width, size) for size in (3 * inner // 4, inner, 5 * inner // 4))
        self.non_linear = NonLinearAttention(width)
        self.attention = nn.ModuleList(Attention(width, heads) for _ in range(2))
        self.convolution = nn.ModuleList(Convolution(width, kernel) for _ in range(2))
        self.middle = Bypass(width)
        self.norm = BiasNorm(width)
        self.end = Bypass(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, before: torch.Tensor, inside: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """The outputs `[B, T, width]`. `before` is x0; `inside` and `angles` are passed to `AttentionWeights`."""
        weights = self.weights(before, inside, angles)
        frames = before + self.dropout(self.feed_forward[0](before))
        frames = frames + self.dropout(self.non_linear(frames, weights))
        frames = frames + self.dropout(self.attention[0](frames, weights))
        frames = frames + self.dropout(self.convolution[0](frames, inside))
        frames = frames + self.dropout(self.feed_forward[1](frames))
        frames = self.middle(before, frames)
        frames = frames + self.dropout(self.attention[1](frames, weights))
        frames = frames + self.dropout(self.convolution[1](frames, inside))
        frames = frames + self.dropout(self.feed_forward[2](frames))
        ended: torch.Tensor = self.end(before, self.norm(frames))
        return ended


class Downsample(nn.Module):
    """Replaces every `rate` successive frames by their mean with learned weights, from `[B, T, W]` to `[B, T', W]`.

    The last group of an utterance may have fewer frames: the frames in the padding have no weight.
    """

    def __init__(self, rate: int) -> None:
        super().__init__()
        self.rate = rate
        self.weights = nn.Parameter(torch.zeros(rate))

    def forward(self, frames: torch.Tensor, inside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The means `[B, T', W]`, and `inside` `[B, T', 1]` at their rate. `inside` is true inside the utterance."""
        extra = -frames.shape[1] % self.rate
        groups = F.pad(frames, (0, 0, 0, extra)).reshape(frames.shape[0], -1, self.rate, frames.shape[2])
        parts = F.pad(inside, (0, 0, 0, extra)).reshape(frames.shape[0], -1, self.rate, 1)
        shares = parts * self.weights.softmax(0)[:, None]
        # the padding may contain infinities or NaN, which a product with 0 would not remove
        total = (groups.masked_fill(~parts, 0.0) * shares).sum(2)
        return total / shares.sum(2).clamp(min=1e-5), parts.any(2)


class Stack(nn.Module):
    """Blocks that run at a lower frame rate. Frames are downsampled before the first block and repeated after the last.
    A bypass combines the results with the frames at the original rate.

    The input frames have the width of the previous stack. Units beyond this stack's width are dropped, and missing
    units are zero.
    """

    def __init__(self, width: int, layers: int, rate: int, heads: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.width = width
        self.rate = rate
        self.blocks = nn.ModuleList(Block(width, heads, kernel, dropout) for _ in range(layers))
        if rate > 1:
            self.downsample = Downsample(rate)
            self.bypass = Bypass(width)

    def forward(self, frames: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        """Map `[B, T, any width]` to `[B, T, width]`. `inside` `[B, T, 1]` is true inside the utterance."""
        frames = F.pad(frames, (0, self.width - frames.shape[2]))
        before = frames
        if self.rate > 1:
            frames, inside = self.downsample(frames, inside)
        angles = phases(frames.shape[1], _QUERY_SIZE, frames.device)
        for block in self.blocks:
            frames = block(frames, inside, angles)
        if self.rate == 1:
            return frames
        fine: torch.Tensor = self.bypass(before, frames.repeat_interleave(self.rate, dim=1)[:, : before.shape[1]])
        return fine


class ZipformerCtc(Network):
    """Convolutional subsampling, stacks of blocks like a U-Net over time, and CTC outputs.

    The stacks run at half the rate of the features; with `subsampling: 4`, pairs of frames are averaged after the last
    stack. Each unit of an encoder frame comes from the last stack that is wide enough to have it.

    Source: Yao et al. 2023, "Zipformer: a faster and better encoder for automatic speech recognition" (arXiv
    2310.11230). We implement the stacks, the block and its shared attention weights, BiasNorm, Swoosh and the bypass.
    We leave out the parts that act only in training: Balancer and Whiten, random skips of parts, limits for the bypass,
    and ScaledAdam. We depart from the paper in three places: subsampling is `ConvSubsampling`, positions are rotary,
    and all stacks have the same number of heads and the same kernel size.
    """

    def __init__(self, config: ZipformerConfig, num_features: int, vocab_size: int) -> None:
        super().__init__()
        self.subsampling = ConvSubsampling(num_features, config.channels, min(config.subsampling, 2))
        self.projection = nn.Linear(config.channels, config.stack_widths[0])
        self.norm = BiasNorm(config.stack_widths[0])
        self.stacks = nn.ModuleList(
            Stack(width, layers, rate, config.heads, config.kernel, config.dropout)
            for width, layers, rate in zip(config.stack_widths, config.stack_layers, config.stack_rates, strict=True)
        )
        self.downsample = Downsample(2) if config.subsampling == 4 else None
        self.output = nn.Linear(max(config.stack_widths), vocab_size)

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map features `[B, T, F]` and lengths `[B]` to frames `[B, T', output.in_features]` and lengths `[B]`."""
        frames, lengths = self.subsampling(features, lengths)
        frames = self.norm(self.projection(frames))
        inside = frame_mask(lengths, frames.shape[1])
        outputs = []
        for stack in self.stacks:
            frames = stack(frames, inside)
            outputs.append(frames)
        frames = widest(outputs)
        if self.downsample is not None:
            frames, _ = self.downsample(frames, inside)
            lengths = (lengths + 1) // 2
        return frames, lengths


def widest(outputs: list[torch.Tensor]) -> torch.Tensor:
    """Combine the outputs `[B, T, W_i]` of several stacks. Each unit comes from the last output that has the unit."""
    parts = [outputs[-1]]
    width = outputs[-1].shape[2]
    for each in reversed(outputs[:-1]):
        if each.shape[2] > width:
            parts.append(each[..., width:])
            width = each.shape[2]
    return torch.cat(parts, dim=2)
