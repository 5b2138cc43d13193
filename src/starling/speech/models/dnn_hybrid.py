"""The feed-forward acoustic model of hybrid recognisers: dense layers on spliced frames, a state for each frame."""

from itertools import pairwise

import torch
from torch import nn

from starling.speech.models.network import Network
from starling.speech.models.shape import DnnHybridShape


class DnnHybrid(Network):
    """Dense layers with rectified linear units, an optional bottleneck, and log posteriors of the outputs.

        h_1 = max(W_1 x + b_1, 0),  h_i = max(W_i h_(i-1) + b_i, 0),  outputs = softmax(V h_n + c)

    for each frame x alone: what it knows of its neighbours is in the spliced features (`features.splice`). Layers begin
    with the normal weights of He et al. 2015 (arXiv 1502.01852) and zero biases. Without dropout it draws no random
    numbers and holds no buffers, so that the virtual engine can compute the gradients of many learners in one call.

    Source: Seide et al. 2011, "Conversational speech transcription using context-dependent deep neural networks", here
    with rectified linear units (Zeiler et al. 2013, "On rectified linear units for speech processing") in place of
    sigmoids and pre-training.
    """

    def __init__(self, shape: DnnHybridShape, num_features: int, num_outputs: int) -> None:
        super().__init__()
        widths = [num_features] + [shape.hidden] * shape.layers
        dense = [nn.Linear(width, after) for width, after in pairwise(widths)]
        for layer in dense:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        self.layers = nn.ModuleList(dense)
        self.dropout = nn.Dropout(shape.dropout) if shape.dropout else nn.Identity()
        self.bottleneck = nn.Linear(shape.hidden, shape.bottleneck) if shape.bottleneck else nn.Identity()
        self.output = nn.Linear(shape.bottleneck or shape.hidden, num_outputs)

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Frames `[B, T', output.in_features]` and lengths `[B]` of features `[B, T, F]` and lengths `[B]`."""
        for layer in self.layers:
            features = self.dropout(layer(features).relu())
        return self.bottleneck(features), lengths
