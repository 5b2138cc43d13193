"""The parts that acoustic models share: outputs, decoder, phones, subsampling convolutions, and streaming."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn

from starling.speech.models.architectures import Chunks, frames_after

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

_KERNEL = 5  # kernel size, in frames, of the subsampling convolutions
_WHOLE = 0.5  # fraction of training passes with full context, as in WeNet

Caches = tuple[torch.Tensor, ...]


class Decoder(nn.Module):
    """A decoder that follows an encoder, in addition to CTC."""

    def forward(
        self, frames: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, token_lengths: torch.Tensor
    ) -> torch.Tensor:
        """The loss summed over all utterances, in nats.

        Args:
            frames: The encoder's frames, `[B, T', W]`.
            lengths: The number of frames of each utterance, `[B]`.
            tokens: The concatenated tokens of all utterances, `[sum of token_lengths]`.
            token_lengths: The number of tokens of each utterance, `[B]`.
        """
        raise NotImplementedError


class Layers(NamedTuple):
    """The stacked layers of an encoder. Each layer's input is the previous layer's output, and all layers run at the
    encoder's frame rate."""

    modules: nn.ModuleList  # each returns `[B, T', width]`, alone or as the first element of a tuple
    width: int


class PhoneOutput(nn.Module):
    """Log-probabilities of phones, predicted from the outputs of a lower layer.

    The lower layers thus learn sounds, and the layers above them learn the spelling. Source: Sanabria and Metze 2018,
    "Hierarchical multitask learning with CTC" (arXiv 1807.07104).
    """

    def __init__(self, width: int, layer: int, dropout: float, num_phones: int) -> None:
        super().__init__()
        self.layer = layer
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(width, num_phones)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Map the layer's outputs `[B, T', width]` to log-probabilities `[B, T', P]` (float32)."""
        log_probs: torch.Tensor = self.output(self.dropout(frames)).float().log_softmax(dim=2)
        return log_probs


class Network(nn.Module):
    """An acoustic model: `encode` computes the encoder's frames, and `output` maps each frame to the tokens' scores."""

    output: nn.Linear
    stacked: Layers | None = None
    """The layers from which phones can be predicted; None if there are no such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder: Decoder | None = None
        self.phones: PhoneOutput | None = None

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map features `[B, T, F]` and lengths `[B]` to frames `[B, T', output.in_features]` and lengths `[B]`."""
        raise NotImplementedError

    def log_probs(self, frames: torch.Tensor) -> torch.Tensor:
        """CTC's log-probabilities `[B, T', V]` (float32) for the encoder's frames."""
        log_probs: torch.Tensor = self.output(frames).float().log_softmax(dim=2)
        return log_probs

    def tensor_plan(self) -> dict[str, ParallelStyle]:
        """The layers that `island: {tensor: n}` divides among ranks, by the name of the module.

        The output layer is divided by outputs, and all ranks receive all results. Feed-forward parts (modules with
        `widening`, `wide_dropout` and `narrowing`) are divided by their inner units. Everything else is replicated on
        all ranks."""
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        from starling.engines.processes.tensor import CutDropout

        plan: dict[str, ParallelStyle] = {"output": ColwiseParallel(output_layouts=Replicate())}
        for name, module in self.named_modules():
            if hasattr(module, "narrowing"):
                plan[f"{name}.widening"] = ColwiseParallel()
                plan[f"{name}.wide_dropout"] = CutDropout()
                plan[f"{name}.narrowing"] = RowwiseParallel()
        return plan

    def forward(
        self,
        features: torch.Tensor,
        lengths: torch.Tensor,
        tokens: torch.Tensor | None = None,
        token_lengths: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Map features `[B, T, F]` and lengths `[B]` to log-probabilities `[B, T', V]` (float32) and lengths `[B]`.

        If tokens are given, in the form that `Decoder` expects, `forward` also returns the decoder's loss (if there is
        a decoder), followed by the log-probabilities `[B, T', P]` of phones (if there are phones).
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
        """The results of `encode`, and the log-probabilities of phones, if there are phones."""
        if self.phones is None or self.stacked is None:
            return *self.encode(features, lengths), None
        heard: list[torch.Tensor] = []

        def keep(_: nn.Module, __: object, outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
            heard.append(outputs[0] if isinstance(outputs, tuple) else outputs)

        with self.stacked.modules[self.phones.layer - 1].register_forward_hook(keep):
            frames, lengths = self.encode(features, lengths)
        return frames, lengths, self.phones(heard[0])


def padded(tokens: torch.Tensor, token_lengths: torch.Tensor) -> torch.Tensor:
    """Pad concatenated tokens `[sum of token_lengths]` to `[B, U]`, with 0 in the padding."""
    return nn.utils.rnn.pad_sequence(list(torch.split(tokens, token_lengths.tolist())), batch_first=True)


def frame_mask(lengths: torch.Tensor, num_frames: int) -> torch.Tensor:
    """A mask `[B, num_frames, 1]` that is true inside an utterance and false in its padding."""
    return (torch.arange(num_frames, device=lengths.device) < lengths[:, None])[:, :, None]


def _strides(subsampling: int) -> list[int]:
    """The strides over time of the two convolutions."""
    return [2 if subsampling >= 2 else 1, 2 if subsampling >= 4 else 1]


class ConvSubsampling(nn.Module):
    """Two convolutions over time, each followed by LayerNorm and ReLU, that map `[B, T, F]` to `[B, T', channels]`.

    The mel bands are the input channels. On a CPU, this costs a fraction of the time of convolutions over time and
    frequency. With `subsampling` 2, the first convolution has stride 2; with 4, both have. Padding is set to zero
    before each convolution, so that it never affects an utterance's frames.
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
        """Number of feature frames per encoder frame."""
        return self.strides[0] * self.strides[1]

    @property
    def reach(self) -> int:
        """Number of feature frames on either side of its own that an encoder frame depends on."""
        return (1 + self.strides[0]) * (_KERNEL // 2)

    def window(self, frames: int) -> int:
        """Number of feature frames on which `frames` successive encoder frames depend."""
        return self.rate * (frames - 1) + 2 * self.reach + 1

    def of_window(self, features: torch.Tensor, inside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The encoder inputs `[B, C, channels]` for a window `[B, window(C), F]`, and a mask `[B, C]` of the inputs
        that belong to the utterance. `inside`, `[B, window(C)]`, is the corresponding mask of the window's frames."""
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
    """Two convolutions over time and frequency, each followed by ReLU, then a projection, LayerNorm and ReLU. They map
    `[B, T, F]` to `[B, T', channels]`.

    A pattern is recognised wherever it lies on the frequency axis; its place differs between voices. The first
    convolution has `conv2d_channels` channels, and the second has twice as many. Each halves the number of bands. The
    number of frames is the same as with `ConvSubsampling`, and padding never affects an utterance's frames.
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


@dataclass(frozen=True)
class StreamState:
    """The state of a network for B streams that advance together."""

    pending: torch.Tensor  # [B, n, F]: feature frames that later chunks need
    inside: torch.Tensor  # [B, n]: false for the padding before the first frame
    caches: Caches
    heard: int = 0  # number of feature frames so far
    emitted: int = 0  # number of encoder frames so far
    is_over: bool = False


class StreamingNetwork(Network):
    """A network that can process audio chunk by chunk once `chunks` is set. Its outputs are then the same as those for
    the whole utterance with a chunk mask.

    Frames attend to their own chunk and to some chunks before it. In a Conformer, the convolution over a chunk uses
    frames before the chunk but none after it, as in Li et al. 2023, "Dynamic chunk convolution for unified streaming
    and non-streaming Conformer ASR" (arXiv 2304.09325). The subsampling convolutions use a few feature frames of the
    next chunk, for which a stream waits.

    In training, a pass has full context with probability 1/2; otherwise, it has chunks of a random length, up to twice
    the configured length. In evaluation, a pass has the configured chunks, unless `full_context` disables them.
    """

    subsampling: ConvSubsampling
    cache_names: tuple[str, ...]
    """The names of `caches`, in order."""
    chunks: Chunks | None = None
    full_context = False

    def pass_chunks(self) -> Chunks | None:
        """The chunks for one pass over whole utterances; None means full context."""
        if self.chunks is None or not self.training:
            return None if self.full_context else self.chunks
        draw = torch.rand(2)  # from dropout's generator, which learners seed for each mini-batch
        if float(draw[0]) < _WHOLE:
            return None
        frames = 1 + int(float(draw[1]) * 2 * self.chunks.frames)
        return Chunks(frames, -(-self.chunks.left * self.chunks.frames // frames))

    def caches(self, batch_size: int, chunks: Chunks) -> Caches:
        """The caches of the layers before the first chunk."""
        raise NotImplementedError

    def encode_chunk(self, window: torch.Tensor, inside: torch.Tensor, caches: Caches) -> tuple[torch.Tensor, Caches]:
        """The encoder frames `[B, C, W]` of one chunk, and the caches for the next chunk.

        Args:
            window: The feature frames `[B, N, F]` of the chunk and those around it that the subsampling convolutions
                use; see `ConvSubsampling.window`. The next chunk's window begins `C * subsampling` frames later.
            inside: A mask `[B, N]` of the window's frames that belong to the utterance.
            caches: The caches of the previous chunk.
        """
        raise NotImplementedError

    def window(self) -> tuple[int, int]:
        """The number N of feature frames in the window of `encode_chunk`, and the number of frames from the beginning
        of a window to the beginning of the next."""
        frames = self._streamed().frames
        return self.subsampling.window(frames), frames * self.subsampling.rate

    def initial_state(self, batch_size: int = 1) -> StreamState:
        """The state at the beginning of streams. Raises ValueError if `chunks` is not set."""
        reference = self.output.weight
        pending = reference.new_zeros(batch_size, self.subsampling.reach, self.subsampling.num_features)
        inside = torch.zeros(pending.shape[:2], dtype=torch.bool, device=reference.device)
        return StreamState(pending, inside, self.caches(batch_size, self._streamed()))

    def step(
        self, features: torch.Tensor, state: StreamState, is_last: bool = False
    ) -> tuple[torch.Tensor, StreamState]:
        """Add features `[B, T, F]` of any length, and return the log-probabilities `[B, T', V]` (float32) of the chunks
        that they complete. With `is_last`, return those of all remaining frames.

        The outputs of all steps together equal the network's outputs for the whole utterance in evaluation, up to
        rounding. Raises ValueError for a stream that has ended.
        """
        if state.is_over:
            raise ValueError("the stream has ended: begin a new one with initial_state()")
        size, hop = self.window()
        pending = torch.cat([state.pending, features], dim=1)
        inside = torch.cat([state.inside, state.inside.new_ones(features.shape[:2])], dim=1)
        state = replace(state, heard=state.heard + features.shape[1], is_over=is_last)
        total = frames_after(state.heard, self.subsampling.rate)
        caches, emitted = state.caches, state.emitted
        outputs = [features.new_zeros(len(features), 0, self.output.out_features)]
        while pending.shape[1] >= size or (is_last and emitted < total):
            missing = max(0, size - pending.shape[1])
            window = nn.functional.pad(pending[:, :size], (0, 0, 0, missing))
            frames, caches = self.encode_chunk(window, nn.functional.pad(inside[:, :size], (0, missing)), caches)
            frames = frames[:, : total - emitted]
            outputs.append(self.log_probs(frames))
            emitted += frames.shape[1]
            pending, inside = pending[:, hop:], inside[:, hop:]
        state = replace(state, pending=pending, inside=inside, caches=caches, emitted=emitted)
        return torch.cat(outputs, dim=1), state

    def _streamed(self) -> Chunks:
        if self.chunks is None:
            raise ValueError("the model has no chunks to stream in: set model.chunk, and train with it")
        return self.chunks


def chunk_mask(inside: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    """The attention mask `[B, 1, T, T]`, computed from the mask `inside` `[B, T, 1]`. Frames in the padding attend to
    all frames."""
    number = torch.arange(inside.shape[1], device=inside.device) // chunks.frames
    apart = number[:, None] - number
    return inside[:, None, None, :, 0] & (apart >= 0) & (apart <= chunks.left) | ~inside[:, None]


def chunk_visible(remembered: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """The attention mask `[B, 1, C, L + C]` of one chunk of C frames, with L frames before the chunk. Both arguments
    are masks `[B, frames]`."""
    return torch.cat([remembered, inside], dim=1)[:, None, None] | ~inside[:, None, :, None]


def chunk_convolution(convolution: nn.Conv1d, frames: torch.Tensor, size: int) -> torch.Tensor:
    """Apply a convolution over `[B, W, T]` in which no frame depends on frames after its own chunk of `size` frames."""
    reach, num_frames = convolution.kernel_size[0] // 2, frames.shape[2]
    padded = nn.functional.pad(frames, (reach, -num_frames % size))
    count = (padded.shape[2] - reach) // size
    places = torch.arange(count, device=frames.device)[:, None] * size
    windows = padded[:, :, places + torch.arange(reach + size, device=frames.device)]  # [B, W, count, reach + size]
    batch, width = frames.shape[:2]
    flat = windows.permute(0, 2, 1, 3).reshape(batch * count, width, reach + size)
    mixed = convolve_once(convolution, flat).reshape(batch, count, width, size)
    return mixed.permute(0, 2, 1, 3).reshape(batch, width, count * size)[..., :num_frames]


def convolve_once(convolution: nn.Conv1d, window: torch.Tensor) -> torch.Tensor:
    """Apply a convolution to a chunk. The window `[B, W, reach + size]` includes the `reach` frames before the chunk;
    the result is `[B, W, size]`."""
    padded = nn.functional.pad(window, (0, convolution.kernel_size[0] // 2))
    return nn.functional.conv1d(padded, convolution.weight, convolution.bias, groups=convolution.groups)
