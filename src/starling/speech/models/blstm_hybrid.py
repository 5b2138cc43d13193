"""The acoustic model of the IBM papers: bidirectional LSTM layers over spliced features, a state for each frame."""

import torch
from torch import nn

from starling.speech.models.blstm import BidirectionalLayer, reversal
from starling.speech.models.network import Network
from starling.speech.models.shape import HybridShape


class BlstmHybrid(Network):
    """Bidirectional LSTM layers, an optional bottleneck, and log posteriors of the outputs; no convolution."""

    def __init__(self, shape: HybridShape, num_features: int, num_outputs: int) -> None:
        super().__init__()
        widths = [num_features] + [2 * shape.hidden] * shape.layers
        self.layers = nn.ModuleList(BidirectionalLayer(width, shape.hidden) for width in widths[:-1])
        self.dropout = nn.Dropout(shape.dropout)
        self.bottleneck = nn.Linear(widths[-1], shape.bottleneck) if shape.bottleneck else nn.Identity()
        self.output = nn.Linear(shape.bottleneck or widths[-1], num_outputs)

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Frames `[B, T', output.in_features]` and lengths `[B]` of features `[B, T, F]` and lengths `[B]`."""
        reverse = reversal(lengths, features.shape[1])
        for index, layer in enumerate(self.layers):
            features = layer(self.dropout(features) if index else features, reverse)
        return self.bottleneck(self.dropout(features)), lengths
