"""A small unidirectional LSTM with CTC outputs: it never looks further ahead than its convolutions."""

import torch
from torch import nn

from starling.speech.models.network import Layers
from starling.speech.models.sections import Chunks
from starling.speech.models.shape import RecurrentShape
from starling.speech.models.streaming import Caches, StreamingNetwork
from starling.speech.models.subsampling import ConvSubsampling


class LstmCtc(StreamingNetwork):
    """Convolutional subsampling, LSTM layers in the direction of time, an optional bottleneck, CTC outputs."""

    cache_names = ("recurrent",)

    def __init__(self, shape: RecurrentShape, num_features: int, vocab_size: int) -> None:
        super().__init__()
        self.subsampling = ConvSubsampling(num_features, shape.channels, shape.subsampling)
        widths = [shape.channels] + [shape.hidden] * shape.layers
        self.layers = nn.ModuleList(nn.LSTM(width, shape.hidden, batch_first=True) for width in widths[:-1])
        self.stacked = Layers(self.layers, shape.hidden)
        self.hidden = shape.hidden
        self.dropout = nn.Dropout(shape.dropout)
        self.bottleneck = nn.Linear(widths[-1], shape.bottleneck) if shape.bottleneck else nn.Identity()
        self.output = nn.Linear(shape.bottleneck or widths[-1], vocab_size)

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Frames `[B, T', output.in_features]` and lengths `[B]` of features `[B, T, F]` and lengths `[B]`."""
        frames, lengths = self.subsampling(features, lengths)
        for index, layer in enumerate(self.layers):
            frames, _ = layer(self.dropout(frames) if index else frames)
        return self.bottleneck(self.dropout(frames)), lengths

    def caches(self, batch_size: int, chunks: Chunks) -> Caches:
        """Outputs and cells `[B, layers, 2, hidden]` of the last frame."""
        return (self.output.weight.new_zeros(batch_size, len(self.layers), 2, self.hidden),)

    def encode_chunk(self, window: torch.Tensor, inside: torch.Tensor, caches: Caches) -> tuple[torch.Tensor, Caches]:
        """As for `StreamingNetwork`."""
        frames, _ = self.subsampling.of_window(window, inside)
        past = caches[0].permute(1, 2, 0, 3)[:, :, None]  # [layers, 2, 1, B, hidden]
        pasts = []
        for layer, (outputs, cells) in zip(self.layers, past.unbind(0), strict=True):
            frames, last = layer(frames, (outputs.contiguous(), cells.contiguous()))
            pasts.append(torch.cat(last))  # [2, B, hidden]
        return self.bottleneck(frames), (torch.stack(pasts).permute(2, 0, 1, 3),)
