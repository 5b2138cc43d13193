"""The deep bidirectional LSTMs of the IBM line: with CTC outputs, and with a state for each frame."""

import torch
from torch import nn

from starling.speech.models.network import Layers, Network
from starling.speech.models.shape import BlstmShape, HybridShape, StackShape
from starling.speech.models.subsampling import Conv2dSubsampling, ConvSubsampling


def reversal(lengths: torch.Tensor, num_frames: int) -> torch.Tensor:
    """`[B, num_frames, 1]` indices that reverse each utterance inside its own length; padding stays put."""
    position = torch.arange(num_frames, device=lengths.device)[None]
    mirrored = lengths[:, None] - 1 - position
    return torch.where(mirrored >= 0, mirrored, position)[:, :, None]


class BidirectionalLayer(nn.Module):
    """One LSTM in each direction, `[B, T, I]` -> `[B, T, 2 * hidden]`.

    Two plain LSTMs, the second over utterances reversed within their lengths: padding then never reaches a
    frame of an utterance, at the speed of a padded `nn.LSTM`; packed sequences are 2 to 5 times slower on a CPU.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.onward = nn.LSTM(inputs, hidden, batch_first=True)
        self.backward_in_time = nn.LSTM(inputs, hidden, batch_first=True)

    def forward(self, frames: torch.Tensor, reverse: torch.Tensor) -> torch.Tensor:
        """`reverse` is `reversal(lengths, T)`."""
        onward, _ = self.onward(frames)
        mirrored, _ = self.backward_in_time(frames.gather(1, reverse.expand(-1, -1, frames.shape[2])))
        backward = mirrored.gather(1, reverse.expand(-1, -1, mirrored.shape[2]))
        return torch.cat([onward, backward], dim=2)


class _Blstm(Network):
    """Bidirectional LSTM layers, an optional bottleneck, outputs; in front of them there may be `subsampling`."""

    def __init__(self, subsampling: nn.Module | None, inputs: int, shape: StackShape, num_outputs: int) -> None:
        super().__init__()
        self.subsampling = subsampling
        widths = [inputs] + [2 * shape.hidden] * shape.layers
        self.layers = nn.ModuleList(BidirectionalLayer(width, shape.hidden) for width in widths[:-1])
        self.stacked = Layers(self.layers, 2 * shape.hidden)
        self.dropout = nn.Dropout(shape.dropout)
        self.bottleneck = nn.Linear(widths[-1], shape.bottleneck) if shape.bottleneck else nn.Identity()
        self.output = nn.Linear(shape.bottleneck or widths[-1], num_outputs)

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Frames `[B, T', output.in_features]` and lengths `[B]` of features `[B, T, F]` and lengths `[B]`."""
        frames = features
        if self.subsampling is not None:
            frames, lengths = self.subsampling(features, lengths)
        reverse = reversal(lengths, frames.shape[1])
        for index, layer in enumerate(self.layers):
            frames = layer(self.dropout(frames) if index else frames, reverse)
        return self.bottleneck(self.dropout(frames)), lengths


class BlstmCtc(_Blstm):
    """Convolutional subsampling, bidirectional LSTM layers, an optional bottleneck, CTC outputs."""

    def __init__(self, shape: BlstmShape, num_features: int, vocab_size: int) -> None:
        subsampling = (
            Conv2dSubsampling(num_features, shape.conv2d_channels, shape.channels, shape.subsampling)
            if shape.conv2d_channels
            else ConvSubsampling(num_features, shape.channels, shape.subsampling)
        )
        super().__init__(subsampling, shape.channels, shape, vocab_size)


class BlstmHybrid(_Blstm):
    """Bidirectional LSTM layers, an optional bottleneck, and log posteriors of the outputs; no convolution."""

    def __init__(self, shape: HybridShape, num_features: int, num_outputs: int) -> None:
        super().__init__(None, num_features, shape, num_outputs)
