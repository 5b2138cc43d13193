"""The Deep Speech network of the Mozilla and Coqui line, with CTC outputs."""

import torch
from torch import nn

from starling.speech.models.network import Network
from starling.speech.models.shape import DeepSpeechShape
from starling.speech.models.subsampling import frame_mask

_CLIP = 20.0


def clipped_relu(values: torch.Tensor) -> torch.Tensor:
    """min(max(x, 0), 20)."""
    return values.clamp(0.0, _CLIP)


class DeepSpeechCtc(Network):
    """A context window, three dense layers, one LSTM layer in the direction of time, a dense layer, CTC outputs.

        h1 = g(W1 x[t - 9 .. t + 9] + b1),   h2 = g(W2 h1 + b2),   h3 = g(W3 h2 + b3)
        h4 = LSTM(h3),   h5 = g(W5 h4 + b5),   outputs = W6 h5 + b6,   g(x) = min(max(x, 0), 20)

    It never hears further ahead than the window. The usual optimizer is Adam.

    Source: Hannun et al. 2014, "Deep Speech: scaling up end-to-end speech recognition" (arXiv 1412.5567), as DeepSpeech
    0.9 and Coqui STT 1.x build it: their one LSTM takes the place of the paper's bidirectional plain recurrence, and
    their dense layers begin at Glorot's uniform weights and zero biases. The window and the first layer are here one
    convolution over time, the same sums without stacked copies of the frames, and `subsampling` is its stride: the
    paper's section 3.3 strides the input by 2. Coqui computes features every 20 ms and has no stride, so that 9 frames
    are 180 ms to it and 90 ms at our 10 ms; `original` has the paper's stride, hence Coqui's 20 ms per encoder frame.
    """

    def __init__(self, shape: DeepSpeechShape, num_features: int, vocab_size: int) -> None:
        super().__init__()
        hidden, window = shape.hidden, 2 * shape.context + 1
        self.subsampling = shape.subsampling
        self.window = nn.Conv1d(num_features, hidden, window, shape.subsampling, padding=shape.context)
        self.dense = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.recurrent = nn.LSTM(hidden, hidden, batch_first=True)
        self.last_dense = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, vocab_size)
        self.dropout = nn.Dropout(shape.dropout)
        for layer in (self.window, *self.dense, self.last_dense, self.output):
            nn.init.xavier_uniform_(layer.weight.flatten(1))  # a window is a dense layer over all its frames
            nn.init.zeros_(layer.bias)

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Frames `[B, T', output.in_features]` and lengths `[B]` of features `[B, T, F]` and lengths `[B]`."""
        features = features.masked_fill(~frame_mask(lengths, features.shape[1]), 0.0)
        frames = self.dropout(clipped_relu(self.window(features.transpose(1, 2)).transpose(1, 2)))
        for layer in self.dense:
            frames = self.dropout(clipped_relu(layer(frames)))
        frames, _ = self.recurrent(frames)
        frames = self.dropout(clipped_relu(self.last_dense(frames)))
        return frames, (lengths + self.subsampling - 1) // self.subsampling
