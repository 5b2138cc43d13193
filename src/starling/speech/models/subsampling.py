"""Convolutions in front of the other layers: fewer frames, wider ones."""

from typing import cast

import torch
from torch import nn

_KERNEL = 5


def frame_mask(lengths: torch.Tensor, num_frames: int) -> torch.Tensor:
    """`[B, num_frames, 1]`: true inside an utterance, false in its padding."""
    return (torch.arange(num_frames, device=lengths.device) < lengths[:, None])[:, :, None]


def _strides(subsampling: int) -> list[int]:
    """The strides over time of the two convolutions."""
    return [2 if subsampling >= 2 else 1, 2 if subsampling >= 4 else 1]


class ConvSubsampling(nn.Module):
    """Two convolutions over time, LayerNorm and ReLU behind each; `[B, T, F]` -> `[B, T', channels]`.

    The mel bands are the input channels: on a CPU this costs a fraction of convolutions over time and
    frequency. `subsampling` 2 puts stride 2 on the first layer, 4 on both. Padding is set to zero before
    each convolution, so that it never reaches an utterance's frames.
    """

    def __init__(self, num_features: int, channels: int, subsampling: int) -> None:
        super().__init__()
        strides = _strides(subsampling)
        inputs = [num_features, channels]
        self.convolutions = nn.ModuleList(
            nn.Conv1d(size, channels, _KERNEL, stride, padding=_KERNEL // 2)
            for size, stride in zip(inputs, strides, strict=True)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in strides)
        self.strides = strides
        self.num_features = num_features

    @property
    def rate(self) -> int:
        """Feature frames per encoder frame."""
        return self.strides[0] * self.strides[1]

    @property
    def reach(self) -> int:
        """Feature frames on either side of its own that an encoder frame hears."""
        return (1 + self.strides[0]) * (_KERNEL // 2)

    def window(self, frames: int) -> int:
        """Feature frames that so many successive encoder frames hear."""
        return self.rate * (frames - 1) + 2 * self.reach + 1

    def of_window(self, features: torch.Tensor, inside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The encoder inputs `[B, C, channels]` of a window `[B, window(C), F]`, and which are of the utterance
        `[B, C]`, as `inside` `[B, window(C)]` says of the window's."""
        edge = _KERNEL // 2
        for layer, norm, stride in zip(self.convolutions, self.norms, self.strides, strict=True):
            convolution = cast(nn.Conv1d, layer)
            features = features.masked_fill(~inside[:, :, None], 0.0).transpose(1, 2)
            features = nn.functional.conv1d(features, convolution.weight, convolution.bias, stride).transpose(1, 2)
            features = torch.relu(norm(features))
            inside = inside[:, edge:-edge:stride]
        return features, inside

    def forward(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encoder inputs `[B, T', channels]` and their lengths `[B]`."""
        for convolution, norm, stride in zip(self.convolutions, self.norms, self.strides, strict=True):
            features = features.masked_fill(~frame_mask(lengths, features.shape[1]), 0.0)
            features = convolution(features.transpose(1, 2)).transpose(1, 2)
            features = torch.relu(norm(features))
            lengths = (lengths + stride - 1) // stride
        return features, lengths


class Conv2dSubsampling(nn.Module):
    """Two convolutions over time and frequency with ReLU behind each, a projection, LayerNorm and ReLU; `[B, T, F]` ->
    `[B, T', channels]`.

    A pattern is recognised wherever it lies on the frequency axis, which differs between voices. The first convolution
    has `conv2d_channels` channels, the second twice as many, and each halves the number of bands. The number of frames
    is that of `ConvSubsampling`, and padding never reaches an utterance's frames.
    """

    def __init__(self, num_features: int, conv2d_channels: int, channels: int, subsampling: int) -> None:
        super().__init__()
        self.strides = _strides(subsampling)
        sizes = [1, conv2d_channels, 2 * conv2d_channels]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(inputs, outputs, 3, (stride, 2), padding=1)
            for inputs, outputs, stride in zip(sizes[:-1], sizes[1:], self.strides, strict=True)
        )
        self.projection = nn.Linear(2 * conv2d_channels * -(-num_features // 4), channels)
        self.norm = nn.LayerNorm(channels)

    def forward(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encoder inputs `[B, T', channels]` and their lengths `[B]`."""
        maps = features[:, None]  # [B, C, T, F]
        for convolution, stride in zip(self.convolutions, self.strides, strict=True):
            maps = maps.masked_fill(~frame_mask(lengths, maps.shape[2])[:, None], 0.0)
            maps = torch.relu(convolution(maps))
            lengths = (lengths + stride - 1) // stride
        frames: torch.Tensor = torch.relu(self.norm(self.projection(maps.transpose(1, 2).flatten(2))))
        return frames, lengths
