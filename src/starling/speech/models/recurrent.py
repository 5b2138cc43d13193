"""Unidirectional and bidirectional LSTMs, Deep Speech, and hybrid networks, which predict the state of each frame."""

from itertools import pairwise

import torch
from torch import nn

from starling.speech.models.architectures import BlstmConfig, Chunks, DeepSpeechConfig, RecurrentConfig, StackConfig
from starling.speech.models.network import (
    Caches,
    Conv2dSubsampling,
    ConvSubsampling,
    Layers,
    Network,
    StreamingNetwork,
    frame_mask,
)

_CLIP = 20.0


def reversal(lengths: torch.Tensor, num_frames: int) -> torch.Tensor:
    """Indices `[B, num_frames, 1]` that reverse each utterance within its length and leave its padding in place."""
    position = torch.arange(num_frames, device=lengths.device)[None]
    mirrored = lengths[:, None] - 1 - position
    return torch.where(mirrored >= 0, mirrored, position)[:, :, None]


class BidirectionalLayer(nn.Module):
    """One LSTM in each direction, which map `[B, T, I]` to `[B, T, 2 * hidden]`.

    The layer consists of two plain LSTMs. The second one processes utterances that are reversed within their lengths,
    so that padding never affects a frame of an utterance. This is as fast as a padded `nn.LSTM`; packed sequences are
    several times slower on a CPU. With `normed`, LayerNorm follows (Ba et al. 2016, arXiv 1607.06450).
    """

    def __init__(self, inputs: int, hidden: int, normed: bool = False) -> None:
        super().__init__()
        self.onward = nn.LSTM(inputs, hidden, batch_first=True)
        self.backward_in_time = nn.LSTM(inputs, hidden, batch_first=True)
        self.norm = nn.LayerNorm(2 * hidden) if normed else nn.Identity()

    def forward(self, frames: torch.Tensor, reverse: torch.Tensor) -> torch.Tensor:
        """The outputs `[B, T, 2 * hidden]`. `reverse` must be `reversal(lengths, T)`."""
        onward, _ = self.onward(frames)
        mirrored, _ = self.backward_in_time(frames.gather(1, reverse.expand(-1, -1, frames.shape[2])))
        backward = mirrored.gather(1, reverse.expand(-1, -1, mirrored.shape[2]))
        joined: torch.Tensor = self.norm(torch.cat([onward, backward], dim=2))
        return joined


class Blstm(Network):
    """Bidirectional LSTM layers, an optional bottleneck, and outputs. The outputs are CTC's, after convolutional
    subsampling, or, for a hybrid network without convolutions, the log posteriors of states."""

    def __init__(self, config: StackConfig, num_features: int, num_outputs: int) -> None:
        super().__init__()
        widths = [num_features] + [2 * config.hidden] * config.layers
        self.subsampling: nn.Module | None = None
        normed = False
        if isinstance(config, BlstmConfig):
            normed = config.layer_norm
            widths[0], sizes = config.channels, (config.channels, config.subsampling)
            self.subsampling = (
                Conv2dSubsampling(num_features, config.conv2d_channels, *sizes)
                if config.conv2d_channels
                else ConvSubsampling(num_features, *sizes)
            )
        self.layers = nn.ModuleList(BidirectionalLayer(width, config.hidden, normed) for width in widths[:-1])
        self.stacked = Layers(self.layers, 2 * config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.bottleneck = nn.Linear(widths[-1], config.bottleneck) if config.bottleneck else nn.Identity()
        self.output = nn.Linear(config.bottleneck or widths[-1], num_outputs)

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map features `[B, T, F]` and lengths `[B]` to frames `[B, T', output.in_features]` and lengths `[B]`."""
        frames = features
        if self.subsampling is not None:
            frames, lengths = self.subsampling(features, lengths)
        reverse = reversal(lengths, frames.shape[1])
        for index, layer in enumerate(self.layers):
            frames = layer(self.dropout(frames) if index else frames, reverse)
        return self.bottleneck(self.dropout(frames)), lengths


class DnnHybrid(Network):
    """Dense layers with rectified linear units, an optional bottleneck, and the outputs' log posteriors.

        h_1 = max(W_1 x + b_1, 0),  h_i = max(W_i h_(i-1) + b_i, 0),  outputs = softmax(V h_n + c)

    Each frame x is processed separately; its neighbours are included only through spliced features (`features.splice`).
    Layers are initialised with the normal weights of He et al. 2015 (arXiv 1502.01852) and zero biases. Without
    dropout, the network draws no random numbers and has no buffers, so that the virtual engine can compute the
    gradients of many learners in one call.

    Source: Seide et al. 2011, "Conversational speech transcription using context-dependent deep neural networks", here
    with rectified linear units (Zeiler et al. 2013, "On rectified linear units for speech processing") in place of
    sigmoids and pre-training.
    """

    def __init__(self, config: StackConfig, num_features: int, num_outputs: int) -> None:
        super().__init__()
        widths = [num_features] + [config.hidden] * config.layers
        dense = [nn.Linear(width, after) for width, after in pairwise(widths)]
        for layer in dense:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        self.layers = nn.ModuleList(dense)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.bottleneck = nn.Linear(config.hidden, config.bottleneck) if config.bottleneck else nn.Identity()
        self.output = nn.Linear(config.bottleneck or config.hidden, num_outputs)

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map features `[B, T, F]` and lengths `[B]` to frames `[B, T', output.in_features]` and lengths `[B]`."""
        for layer in self.layers:
            features = self.dropout(layer(features).relu())
        return self.bottleneck(features), lengths


class LstmCtc(StreamingNetwork):
    """Convolutional subsampling, forward LSTM layers, an optional bottleneck, and CTC outputs."""

    cache_names = ("recurrent",)

    def __init__(self, config: RecurrentConfig, num_features: int, vocab_size: int) -> None:
        super().__init__()
        self.subsampling = ConvSubsampling(num_features, config.channels, config.subsampling)
        widths = [config.channels] + [config.hidden] * config.layers
        self.layers = nn.ModuleList(nn.LSTM(width, config.hidden, batch_first=True) for width in widths[:-1])
        self.stacked = Layers(self.layers, config.hidden)
        self.hidden = config.hidden
        self.dropout = nn.Dropout(config.dropout)
        self.bottleneck = nn.Linear(widths[-1], config.bottleneck) if config.bottleneck else nn.Identity()
        self.output = nn.Linear(config.bottleneck or widths[-1], vocab_size)

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map features `[B, T, F]` and lengths `[B]` to frames `[B, T', output.in_features]` and lengths `[B]`."""
        frames, lengths = self.subsampling(features, lengths)
        for index, layer in enumerate(self.layers):
            frames, _ = layer(self.dropout(frames) if index else frames)
        return self.bottleneck(self.dropout(frames)), lengths

    def caches(self, batch_size: int, chunks: Chunks) -> Caches:
        """The cache: outputs and cell states `[B, layers, 2, hidden]` of the LSTM layers in the last frame."""
        return (self.output.weight.new_zeros(batch_size, len(self.layers), 2, self.hidden),)

    def encode_chunk(self, window: torch.Tensor, inside: torch.Tensor, caches: Caches) -> tuple[torch.Tensor, Caches]:
        """The encoder frames of one chunk, and the caches for the next chunk. The arguments are those of
        `StreamingNetwork.encode_chunk`."""
        frames, _ = self.subsampling.of_window(window, inside)
        past = caches[0].permute(1, 2, 0, 3)[:, :, None]  # [layers, 2, 1, B, hidden]
        pasts = []
        for layer, (outputs, cells) in zip(self.layers, past.unbind(0), strict=True):
            frames, last = layer(frames, (outputs.contiguous(), cells.contiguous()))
            pasts.append(torch.cat(last))  # [2, B, hidden]
        return self.bottleneck(frames), (torch.stack(pasts).permute(2, 0, 1, 3),)


def clipped_relu(values: torch.Tensor) -> torch.Tensor:
    """The clipped rectifier min(max(x, 0), 20)."""
    return values.clamp(0.0, _CLIP)


class DeepSpeechCtc(Network):
    """A context window, three dense layers, one forward LSTM layer, a dense layer, and CTC outputs.

        h1 = g(W1 x[t - 9 .. t + 9] + b1),   h2 = g(W2 h1 + b2),   h3 = g(W3 h2 + b3)
        h4 = LSTM(h3),   h5 = g(W5 h4 + b5),   outputs = W6 h5 + b6,   g(x) = min(max(x, 0), 20)

    The network uses no frames beyond the context window. The usual optimizer is Adam.

    Source: Hannun et al. 2014, "Deep Speech: scaling up end-to-end speech recognition" (arXiv 1412.5567), as
    implemented in DeepSpeech 0.9 and Coqui STT 1.x. These use one LSTM in place of the paper's bidirectional plain
    recurrence, and initialise the dense layers with Glorot's uniform weights and zero biases. We compute the window and
    the first layer as one convolution over time, which gives the same sums without stacked copies of the frames. The
    stride of this convolution is `subsampling` (section 3.3 of the paper strides the input by 2). Coqui computes
    features every 20 ms and has no stride, so its 9 frames are 180 ms, whereas ours are 90 ms with features every
    10 ms. The preset `original` has the paper's stride, and therefore Coqui's 20 ms per encoder frame.
    """

    def __init__(self, config: DeepSpeechConfig, num_features: int, vocab_size: int) -> None:
        super().__init__()
        hidden, window = config.hidden, 2 * config.context + 1
        self.subsampling = config.subsampling
        self.window = nn.Conv1d(num_features, hidden, window, config.subsampling, padding=config.context)
        self.dense = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.recurrent = nn.LSTM(hidden, hidden, batch_first=True)
        self.last_dense = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, vocab_size)
        self.dropout = nn.Dropout(config.dropout)
        for layer in (self.window, *self.dense, self.last_dense, self.output):
            nn.init.xavier_uniform_(layer.weight.flatten(1))  # the window acts as a dense layer over all its frames
            nn.init.zeros_(layer.bias)

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map features `[B, T, F]` and lengths `[B]` to frames `[B, T', output.in_features]` and lengths `[B]`."""
        features = features.masked_fill(~frame_mask(lengths, features.shape[1]), 0.0)
        frames = self.dropout(clipped_relu(self.window(features.transpose(1, 2)).transpose(1, 2)))
        for layer in self.dense:
            frames = self.dropout(clipped_relu(layer(frames)))
        frames, _ = self.recurrent(frames)
        frames = self.dropout(clipped_relu(self.last_dense(frames)))
        return frames, (lengths + self.subsampling - 1) // self.subsampling
