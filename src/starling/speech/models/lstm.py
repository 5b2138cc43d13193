"""A small unidirectional LSTM with CTC outputs: it never looks further ahead than its convolutions."""

import torch
from torch import nn

from starling.speech.models.network import Network
from starling.speech.models.shape import RecurrentShape
from starling.speech.models.subsampling import ConvSubsampling


class LstmCtc(Network):
    """Convolutional subsampling, LSTM layers in the direction of time, an optional bottleneck, CTC outputs."""

    def __init__(self, shape: RecurrentShape, num_features: int, vocab_size: int) -> None:
        super().__init__()
        self.subsampling = ConvSubsampling(num_features, shape.channels, shape.subsampling)
        widths = [shape.channels] + [shape.hidden] * shape.layers
        self.layers = nn.ModuleList(nn.LSTM(width, shape.hidden, batch_first=True) for width in widths[:-1])
        self.dropout = nn.Dropout(shape.dropout)
        self.bottleneck = nn.Linear(widths[-1], shape.bottleneck) if shape.bottleneck else nn.Identity()
        self.output = nn.Linear(shape.bottleneck or widths[-1], vocab_size)

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Frames `[B, T', output.in_features]` and lengths `[B]` of features `[B, T, F]` and lengths `[B]`."""
        frames, lengths = self.subsampling(features, lengths)
        for index, layer in enumerate(self.layers):
            frames, _ = layer(self.dropout(frames) if index else frames)
        return self.bottleneck(self.dropout(frames)), lengths
