"""What acoustic models share: outputs, decoder, phones, convolutions in front of the layers, positions of frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

_KERNEL = 5  # frames, of the convolutions in front
_LONGEST_PERIOD = 10_000.0  # in frames, divided by 2 pi


class Decoder(nn.Module):
    """A decoder that stands behind an encoder, beside CTC."""

    def forward(
        self, frames: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, token_lengths: torch.Tensor
    ) -> torch.Tensor:
        """The loss of all utterances together, in nats.

        Args:
            frames: Of the encoder, `[B, T', W]`.
            lengths: In frames, `[B]`.
            tokens: Those of all utterances, one after another, `[sum of token_lengths]`.
            token_lengths: `[B]`.
        """
        raise NotImplementedError


class Layers(NamedTuple):
    """The stacked layers of an encoder, each fed by the one before, all at the rate of the encoder's frames."""

    modules: nn.ModuleList  # each returns `[B, T', width]`, alone or first in a tuple
    width: int


class PhoneOutput(nn.Module):
    """Log-probabilities of phones, predicted from the outputs of a lower layer.

    The lower layers learn the sounds, those above them the spelling: Sanabria and Metze 2018, "Hierarchical multitask
    learning with CTC" (arXiv 1807.07104).
    """

    def __init__(self, width: int, layer: int, dropout: float, num_phones: int) -> None:
        super().__init__()
        self.layer = layer
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(width, num_phones)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """The outputs of the layer `[B, T', width]` -> log-probabilities `[B, T', P]` (float32)."""
        log_probs: torch.Tensor = self.output(self.dropout(frames)).float().log_softmax(dim=2)
        return log_probs


class Network(nn.Module):
    """An acoustic model: `encode` makes frames, `output` turns each into log-probabilities of the tokens."""

    output: nn.Linear
    decoder: Decoder | None
    phones: PhoneOutput | None
    stacked: Layers | None
    """The layers from which phones can be predicted; None: there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = None
        self.phones = None
        self.stacked = None

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features `[B, T, F]` and lengths `[B]` -> frames `[B, T', output.in_features]` and lengths `[B]`."""
        raise NotImplementedError

    def log_probs(self, frames: torch.Tensor) -> torch.Tensor:
        """Log-probabilities `[B, T', V]` (float32) of CTC, of the encoder's frames."""
        log_probs: torch.Tensor = self.output(frames).float().log_softmax(dim=2)
        return log_probs

    def tensor_plan(self) -> dict[str, ParallelStyle]:
        """Which layers are cut in `island: {tensor: n}`, by the name of the module."""
        from starling.speech.models.tensor_plan import plan_of

        return plan_of(self)

    def forward(
        self,
        features: torch.Tensor,
        lengths: torch.Tensor,
        tokens: torch.Tensor | None = None,
        token_lengths: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Features `[B, T, F]` and lengths `[B]` -> log-probabilities `[B, T', V]` (float32) and lengths `[B]`.

        Given tokens, as `Decoder` takes them, it also returns the decoder's loss, if there is a decoder, and then the
        log-probabilities `[B, T', P]` of phones, if there are phones.
        """
        if tokens is None or token_lengths is None:
            frames, lengths = self.encode(features, lengths)
            return self.log_probs(frames), lengths
        frames, lengths, phones = self._encode_with_phones(features, lengths)
        outputs = [self.log_probs(frames), lengths]
        if self.decoder is not None:
            outputs.append(self.decoder(frames, lengths, tokens, token_lengths))
        if phones is not None:
            outputs.append(phones)
        return tuple(outputs)

    def _encode_with_phones(
        self, features: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What `encode` makes, and the log-probabilities of phones, if there are any."""
        if self.phones is None or self.stacked is None:
            return *self.encode(features, lengths), None
        heard: list[torch.Tensor] = []

        def keep(_: nn.Module, __: object, outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
            heard.append(outputs[0] if isinstance(outputs, tuple) else outputs)

        with self.stacked.modules[self.phones.layer - 1].register_forward_hook(keep):
            frames, lengths = self.encode(features, lengths)
        return frames, lengths, self.phones(heard[0])


def padded(tokens: torch.Tensor, token_lengths: torch.Tensor) -> torch.Tensor:
    """Tokens `[sum of token_lengths]` -> `[B, U]`, 0 in the padding."""
    return nn.utils.rnn.pad_sequence(list(torch.split(tokens, token_lengths.tolist())), batch_first=True)


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


def phases(num_frames: int, size: int, device: torch.device | None = None) -> torch.Tensor:
    """`[num_frames, size / 2]` angles in radians: frame p, pair i of units -> p * 10000^(-2i / size)."""
    pair = torch.arange(0, size, 2, device=device, dtype=torch.float32)
    frame = torch.arange(num_frames, device=device, dtype=torch.float32)
    return torch.outer(frame, _LONGEST_PERIOD ** (-pair / size))


def sinusoids(num_frames: int, width: int, device: torch.device | None = None) -> torch.Tensor:
    """Absolute positions `[num_frames, width]`, to be added to the frames.

        PE(p, 2i) = sin(p / 10000^(2i / width)),    PE(p, 2i + 1) = cos(p / 10000^(2i / width))

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.5 (arXiv 1706.03762).
    """
    angles = phases(num_frames, width, device)
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)


def distances(num_frames: int, width: int, device: torch.device | None = None) -> torch.Tensor:
    """Sinusoids `[2 * num_frames - 1, width]` of the distances from 1 - num_frames to num_frames - 1 frames.

    Source: Dai et al. 2019, "Transformer-XL", section 3.3 (arXiv 1901.02860).
    """
    angles = phases(num_frames, width, device)
    angles = torch.cat([-angles.flip(0)[:-1], angles])
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)


def rotate(vectors: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Queries or keys `[B, T, ..., D]`, each frame's turned by its `phases(T, D)`: rotary positions.

        <R_p q, R_s k> = <q, R_(s - p) k>

    Attention then sees only how far frames are apart, not where they stand; nothing is learned.
    Source: Su et al. 2021, "RoFormer: enhanced Transformer with rotary position embedding", section 3.2
    (arXiv 2104.09864). Unit i is paired with unit i + D / 2 here, not with its neighbour as there: another order of the
    units, with no interleaving.
    """
    angles = angles.view(angles.shape[0], *[1] * (vectors.ndim - 3), -1)
    cosines, sines = angles.cos(), angles.sin()
    first, second = vectors.chunk(2, dim=-1)
    turned = torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1)
    return turned.to(vectors.dtype)
