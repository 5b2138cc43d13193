"""Networks that hear an utterance chunk by chunk, and give the same as if they had heard it whole with a chunk mask.

Frames attend to their chunk and to some before it. A convolution of a Conformer hears the frames before its chunk, but
none behind it, as in Li et al. 2023, "Dynamic chunk convolution for unified streaming and non-streaming Conformer ASR"
(arXiv 2304.09325). The convolutions in front of all layers hear a few feature frames of the next chunk, for which a
stream waits.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn

from starling.speech.models.network import ConvSubsampling, Network
from starling.speech.models.shape import Chunks, frames_after

_WHOLE = 0.5
"""The share of training passes in full context, as in WeNet."""

Caches = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class StreamState:
    """What a network remembers of B streams that advance together."""

    pending: torch.Tensor  # [B, n, F], feature frames that later chunks need
    inside: torch.Tensor  # [B, n]: false for what stands in front of the first frame
    caches: Caches
    heard: int = 0  # feature frames so far
    emitted: int = 0  # encoder frames so far
    is_over: bool = False


class StreamingNetwork(Network):
    """A network that can hear chunk by chunk once `chunks` is set.

    In training, a pass has chunks of a random length, up to twice the one set, or with probability 1/2 full context. In
    evaluation it has the chunks that are set, unless `full_context` asks for none.
    """

    subsampling: ConvSubsampling
    cache_names: tuple[str, ...]
    """The name of each of `caches`."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: Chunks | None = None
        self.full_context = False

    def pass_chunks(self) -> Chunks | None:
        """The chunks of one pass over whole utterances; None: full context."""
        if self.chunks is None or not self.training:
            return None if self.full_context else self.chunks
        draw = torch.rand(2)  # of dropout's generator, which learners seed for each mini-batch
        if float(draw[0]) < _WHOLE:
            return None
        frames = 1 + int(float(draw[1]) * 2 * self.chunks.frames)
        return Chunks(frames, -(-self.chunks.left * self.chunks.frames // frames))

    def caches(self, batch_size: int, chunks: Chunks) -> Caches:
        """What the layers remember before the first chunk."""
        raise NotImplementedError

    def encode_chunk(self, window: torch.Tensor, inside: torch.Tensor, caches: Caches) -> tuple[torch.Tensor, Caches]:
        """The encoder frames `[B, C, W]` of one chunk, and what to remember.

        Args:
            window: Feature frames of the chunk, and those that the first convolutions hear around it, `[B, N, F]`; see
                `ConvSubsampling.window`. The next chunk's begins `C * subsampling` frames later.
            inside: Which of them are of the utterance, `[B, N]`.
            caches: Of the chunk before.
        """
        raise NotImplementedError

    def window(self) -> tuple[int, int]:
        """The feature frames N of `encode_chunk`'s window, and by how many the next one is later."""
        frames = self._streamed().frames
        return self.subsampling.window(frames), frames * self.subsampling.rate

    def initial_state(self, batch_size: int = 1) -> StreamState:
        """The state at the beginning of streams. Raises ValueError without chunks."""
        reference = self.output.weight
        pending = reference.new_zeros(batch_size, self.subsampling.reach, self.subsampling.num_features)
        inside = torch.zeros(pending.shape[:2], dtype=torch.bool, device=reference.device)
        return StreamState(pending, inside, self.caches(batch_size, self._streamed()))

    def step(
        self, features: torch.Tensor, state: StreamState, is_last: bool = False
    ) -> tuple[torch.Tensor, StreamState]:
        """Log-probabilities `[B, T', V]` (float32) of the chunks that are complete with features `[B, T, F]`, which
        may be of any length; with `is_last`, of all that remains.

        Together they are what the network gives for the whole utterance in evaluation, to rounding. Raises ValueError
        for a stream that is over.
        """
        if state.is_over:
            raise ValueError("the stream is over: begin a new one with initial_state()")
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
    """Which frames attend to which, `[B, 1, T, T]`, of `inside` `[B, T, 1]`; frames in the padding attend to all."""
    number = torch.arange(inside.shape[1], device=inside.device) // chunks.frames
    apart = number[:, None] - number
    return inside[:, None, None, :, 0] & (apart >= 0) & (apart <= chunks.left) | ~inside[:, None]


def chunk_visible(remembered: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """The same for one chunk, `[B, 1, C, L + C]`, with `L` frames before it; both arguments are masks `[B, frames]`."""
    return torch.cat([remembered, inside], dim=1)[:, None, None] | ~inside[:, None, :, None]


def chunk_convolution(convolution: nn.Conv1d, frames: torch.Tensor, size: int) -> torch.Tensor:
    """A convolution over `[B, W, T]` that hears no frame behind the chunk of `size` frames that it stands in."""
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
    """The convolution of a chunk, `[B, W, reach + size]` with the `reach` frames before it, as `[B, W, size]`."""
    padded = nn.functional.pad(window, (0, convolution.kernel_size[0] // 2))
    return nn.functional.conv1d(padded, convolution.weight, convolution.bias, groups=convolution.groups)
