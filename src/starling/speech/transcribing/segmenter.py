"""Cuts audio at pauses, which are detected from its energy or by a voice activity model.

Audio may arrive in blocks. Only the current segment is kept in memory.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from starling.errors import ConfigError, require
from starling.speech.resampling import Resampler

Seconds = float

FRAME: Seconds = 0.01
_LOOK_EVERY = 10
"""Number of frames between two searches for pauses. The interval is fixed so that segments do not depend on the blocks
in which audio arrives."""
_SMOOTHED = 5
"""Number of frames whose mean energy determines a level."""
_LOWEST = -70.0
"""Lowest noise floor, in dB relative to full scale. Digital silence counts as noise of this level."""
_LOUD, _ABOVE = 10.0, 6.0
"""Speech stays more than `_ABOVE` dB above the noise floor, and exceeds the floor by `_LOUD` dB at least once."""
_SHORTEST = 3
"""Length, in frames, of the shortest sound that counts as speech. A click is shorter."""
_FLOOR = 1000
"""Number of frames (10 s) whose lowest level is the noise floor if there was no even noise."""
_EVEN = 45
"""Number of frames for which a sound must stay within `_ABOVE` dB, also at high frequencies, to count as noise even if
a quieter sound preceded it."""
_FAINT = 12.0
"""Minimum difference in dB between noise and the loudest sound."""
_PATIENCE = 200
"""Number of frames (2 s) after which an even level counts as noise. Speech always varies by 10 dB within that time."""

_VAD_RATE, _VAD_CHUNK, _VAD_CONTEXT = 16_000, 512, 64
"""Sampling rate in Hz, number of new samples in each input of the network, and number of earlier samples that the input
repeats."""
_VAD_BEGINS, _VAD_ENDS = 0.5, 0.35
"""Probability above which speech begins and probability below which speech ends, as in silero-vad's examples."""
_VAD_PAD: Seconds = 0.15


@dataclass(frozen=True)
class Segmentation:
    """Parameters that determine where audio is cut."""

    pause: Seconds = 0.5
    """The shortest pause at which a segment ends."""
    pad: Seconds = 0.05
    """Length of silence that a segment keeps before and after its speech, at most half of `pause`. It should be about
    as long as in the utterances that the model was trained on. At the ends of a recording, silence that is shorter than
    a pause is kept whole."""
    longest: Seconds = 20.0
    """Maximum length of a segment; a longer one is cut at the quietest place in its second half."""
    overlap: Seconds = 1.0
    """Length by which both segments next to such a cut extend beyond the cut, at most a quarter of `longest`."""
    voice_activity: bool = False
    """Whether silero-vad detects speech, rather than the level above the noise. With silero-vad, `pad` is at least
    0.15 s."""


@dataclass(frozen=True)
class Piece:
    """A segment of audio."""

    start: int
    """Number of samples before the segment."""
    samples: NDArray[np.float32]
    recording: int = 0
    """Index of the segment's recording, if there are several."""
    lead: int = 0
    """Number of samples at the beginning that belong to the previous segment, which was cut without a pause."""
    trail: int = 0
    """Number of samples at the end that belong to the next segment."""

    @property
    def own(self) -> "Piece":
        """The segment without the samples that belong to its neighbours."""
        inside = slice(self.lead, len(self.samples) - self.trail)
        return Piece(self.start + self.lead, self.samples[inside], self.recording)


def powers(samples: NDArray[np.float32], hop: int, high: bool = False) -> NDArray[np.float64]:
    """The variance of each whole frame of `hop` samples or, with `high`, of the differences between its samples, which
    emphasise high frequencies."""
    count = len(samples) // hop
    frames = samples[: count * hop].reshape(count, hop)
    return np.asarray((np.diff(frames, axis=1) if high else frames).var(axis=1, dtype=np.float64))


def levels(power: NDArray[np.float64], width: int = _SMOOTHED) -> NDArray[np.float64]:
    """The level of each frame in dB below full scale, smoothed over `width` frames."""
    sums = np.concatenate([[0.0], np.cumsum(power)])
    places = np.arange(len(power))
    first, last = np.maximum(places - width // 2, 0), np.minimum(places + width // 2 + 1, len(power))
    mean = (sums[last] - sums[first]) / (last - first)
    return np.asarray(10.0 * np.log10(np.maximum(mean, 1e-12)))


def floor_of(level: NDArray[np.float64]) -> float:
    """The noise floor in dB."""
    return max(_LOWEST, float(level.min(initial=0.0)))


def runs(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The half-open ranges `[N, 2]` (first, last + 1) in which `mask` is true."""
    return np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)


def quiet_stretches(samples: NDArray[np.float32], rate: int) -> tuple[NDArray[np.int64], Seconds]:
    """The half-open ranges of frames `[N, 2]` (first, last + 1) without sound, and the length of a frame."""
    hop = max(1, round(rate * FRAME))
    level = levels(powers(samples, hop), 3)
    return runs(level <= floor_of(level) + _ABOVE), hop / rate


def gathered(pieces: Iterable[Piece], num_samples: float) -> Iterator[list[Piece]]:
    """Collect pieces in groups. A group is yielded when it has at least `num_samples` samples or the pieces end."""
    group: list[Piece] = []
    for piece in pieces:
        group.append(piece)
        if sum(len(each.samples) for each in group) >= num_samples:
            yield group
            group = []
    if group:
        yield group


class Segmenter:
    """Finds the segments of audio that arrives in blocks.

    Speech is detected with hysteresis: speech rises 10 dB above the noise floor, and a segment ends when the level
    stays within 6 dB of the floor for the length of a pause. The floor is the level of the last 0.45 s of even noise.
    If there was no even noise in the last ten seconds, the floor is the lowest level in that time.

    Args:
        rate: The sampling rate of the segments.
        segmentation: The parameters that determine where to cut.
        given_rate: The sampling rate of the audio, which is resampled to `rate`; None means `rate`.

    Raises:
        MissingExtraError: The voice activity model is requested but not installed.
    """

    def __init__(self, rate: int, segmentation: Segmentation | None = None, given_rate: int | None = None) -> None:
        chosen = segmentation or Segmentation()
        self._resampler = Resampler(given_rate or rate, rate)
        self._hop = max(1, round(rate * FRAME))
        self._voice = VoiceActivity(rate, self._hop) if chosen.voice_activity else None
        pad = chosen.pad if self._voice is None else max(chosen.pad, _VAD_PAD)
        pad, overlap = min(pad, chosen.pause / 2), min(chosen.overlap, chosen.longest / 4)
        self._pause, self._pad, self._longest, self._overlap = (
            round(each / FRAME) for each in (chosen.pause, pad, chosen.longest, overlap)
        )
        self._cut_at = 0  # number of samples before the last cut without a pause
        self._start = 0  # position of the first pending sample
        self._samples = np.zeros(0, np.float32)
        self._power = np.zeros(0)
        self._high = np.zeros(0)  # power of the differences between samples, for the same frames
        self._spoken = np.zeros(0, np.bool_)  # pending frames that the voice activity model has classified
        self._noise: tuple[float, int] | None = None  # level of the last even noise in dB; frames since then
        self._loudest = -math.inf  # highest level in dB of all frames searched so far
        self._before = np.zeros(0)  # levels of the frames before the pending ones
        self._seen = 0  # number of pending frames searched so far
        self._found = 0

    def feed(self, samples: NDArray[np.float32]) -> list[Piece]:
        """Add the next samples `[T]`, and return the segments that end in them."""
        return self._cut(self._resampler.feed(samples))

    def end(self) -> list[Piece]:
        """End the audio, and return the last segments."""
        pieces = self._cut(self._resampler.end())
        if len(self._power) * self._hop < len(self._samples):
            self._power = np.append(self._power, self._samples[-self._hop :].var(dtype=np.float64))
            self._high = np.append(self._high, self._power[-1])
        if self._voice is not None:
            self._spoken = np.append(self._spoken, self._voice.end(max(0, len(self._power) - len(self._spoken))))
        self._seen = len(self._power)
        pieces += iter(partial(self._look, is_end=True), None)
        is_silent = not len(self._power) or float(levels(self._power).max()) < _LOWEST + _LOUD
        if not self._found and not self._start and not is_silent and self._voice is None:
            pieces.append(self._taken(self._seen))  # keep everything: the audio is too short to tell speech from noise
        return pieces

    def _cut(self, samples: NDArray[np.float32]) -> list[Piece]:
        self._samples = np.concatenate([self._samples, samples])
        known = len(self._power) * self._hop
        self._power = np.concatenate([self._power, powers(self._samples[known:], self._hop)])
        high = powers(self._samples[known:], self._hop, high=True)
        self._high = np.concatenate([self._high, high])
        if self._voice is not None:
            self._spoken = np.append(self._spoken, self._voice.feed(samples))
        pieces: list[Piece] = []
        while self._seen + _LOOK_EVERY <= self._known:
            self._seen += _LOOK_EVERY
            self._listen_for_noise()
            pieces += iter(self._look, None)
        return pieces

    @property
    def _known(self) -> int:
        """Number of pending frames in which speech can be distinguished from noise."""
        return len(self._power) if self._voice is None else min(len(self._power), len(self._spoken))

    @property
    def taken(self) -> int:
        """The number of samples received so far."""
        return self._start + len(self._samples)

    @property
    def pending(self) -> Piece | None:
        """The part received so far of the current segment, which has not ended yet; None if there is no speech."""
        level = levels(self._power)
        if not len(found := self._speech(level)):
            return None
        return self._piece(self._begin(found), len(self._power) + 1)

    def _speech(self, level: NDArray[np.float64]) -> NDArray[np.int64]:
        """The stretches of speech `[N, 2]`, in frames, in the pending levels, except those of an earlier segment."""
        if self._voice is not None:
            return self._lasting(runs(self._spoken[: len(level)]))
        quietest = min(floor_of(level), floor_of(self._before))
        floor = max(_LOWEST, quietest if self._noise is None else self._noise[0])
        found = runs(level > floor + _ABOVE)
        if not len(found):
            return found
        is_loud = np.maximum.reduceat(level, found[:, 0]) > floor + _LOUD
        return self._lasting(found[is_loud])

    def _lasting(self, found: NDArray[np.int64]) -> NDArray[np.int64]:
        """The stretches `[N, 2]`, except clicks and stretches that an earlier segment already contains."""
        is_new = self._start + found[:, 1] * self._hop > self._cut_at
        return found[is_new & (found[:, 1] - found[:, 0] >= _SHORTEST)]

    def _listen_for_noise(self) -> None:
        """Update the noise floor if the newest frames are noise."""
        newest = slice(max(0, self._seen - _EVEN), self._seen)
        level = levels(self._power[newest])
        self._loudest = max(self._loudest, float(level[-_LOOK_EVERY:].max()))
        is_even = len(level) == _EVEN and np.ptp(level) < _ABOVE and np.ptp(levels(self._high[newest])) < _ABOVE
        if is_even and level.max() < max(self._loudest - _FAINT, _LOWEST):
            self._noise = float(level.min()), 0
        elif self._noise is not None:
            age = self._noise[1] + _LOOK_EVERY
            self._noise = (self._noise[0], age) if age < _FLOOR else None

    def _look(self, is_end: bool = False) -> Piece | None:
        """Remove the first segment that has ended from the pending samples, and return it; None if none has ended."""
        level = levels(self._power[: self._seen])
        found = self._speech(level)
        if not len(found):
            if self._seen > _PATIENCE:
                self._taken(self._seen - _PATIENCE)
            return None
        gaps = np.flatnonzero(found[1:, 0] - found[:-1, 1] >= self._pause)
        begin = self._begin(found)
        last = int(found[gaps[0] if len(gaps) else -1, 1])
        if last - begin > self._longest or (not len(gaps) and self._seen - begin >= self._longest):
            half = begin + self._longest // 2
            quietest = levels(self._power[half : begin + self._longest - self._overlap], 4 * _SMOOTHED)
            return self._kept(begin, half + int(quietest.argmin()), self._overlap)
        if len(gaps) or is_end or self._seen - last >= self._pause:
            is_whole = is_end and not len(gaps) and self._seen - last < self._pause
            return self._kept(begin, self._seen if is_whole else min(last + self._pad, self._seen))
        return None

    def _begin(self, found: NDArray[np.int64]) -> int:
        """The frame in which the first segment begins."""
        first = int(found[0, 0])
        return 0 if self._start == 0 and first < self._pause else max(0, first - self._pad)

    def _kept(self, begin: int, end: int, overlap: int = 0) -> Piece:
        """Remove the segment of these pending frames, and return it. The last `overlap` frames before a cut remain
        pending."""
        piece = self._piece(begin, end + overlap, overlap)
        self._found += 1
        self._cut_at = self._start + end * self._hop if overlap else 0
        self._taken(end - overlap)
        return piece

    def _piece(self, begin: int, end: int, overlap: int = 0) -> Piece:
        """The segment of these pending frames; the last `overlap` frames belong to the next segment."""
        start = self._start + begin * self._hop
        samples = self._samples[begin * self._hop : end * self._hop]
        return Piece(start, samples, lead=max(0, self._cut_at - start), trail=overlap * self._hop)

    def _taken(self, end: int) -> Piece:
        """Remove the pending frames up to `end`, and return them as a piece."""
        self._before = np.concatenate([self._before, levels(self._power[:end])])[-_FLOOR:]
        cut = end * self._hop
        piece = Piece(self._start, self._samples[:cut])
        self._start += len(piece.samples)
        self._samples, self._power, self._high = self._samples[cut:], self._power[end:], self._high[end:]
        self._spoken = self._spoken[end:]
        self._seen -= end
        return piece


class VoiceActivity:
    """Detects speech, in frames of `hop` samples, in audio at `rate` Hz that arrives in blocks.

    Raises:
        MissingExtraError: silero-vad is not installed.
    """

    def __init__(self, rate: int, hop: int) -> None:
        require("vad", "voice activity detection")
        self._resampler = Resampler(rate, _VAD_RATE)
        self._frame = hop / rate * _VAD_RATE / _VAD_CHUNK  # chunks
        self._network = _Network()
        self._rest = np.zeros(0, np.float32)
        self._chunks = self._frames = 0
        self._is_speech = False
        self._known = np.zeros(0, np.bool_)  # chunks of which some frames have not been classified yet

    def feed(self, samples: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Add the next samples `[T]`, and return, for each further frame that can be classified, whether it is
        speech."""
        return self._told(self._resampler.feed(samples))

    def end(self, count: int) -> NDArray[np.bool_]:
        """End the audio, and return whether each of the last `count` frames is speech."""
        rest = self._resampler.end()
        found = self._told(np.concatenate([rest, np.zeros(2 * _VAD_CHUNK, np.float32)]))[:count]
        return np.pad(found, (0, count - len(found)))

    def _told(self, samples: NDArray[np.float32]) -> NDArray[np.bool_]:
        self._rest = np.concatenate([self._rest, samples])
        count = len(self._rest) // _VAD_CHUNK
        chunks = self._rest[: count * _VAD_CHUNK].reshape(count, _VAD_CHUNK)
        self._rest = self._rest[count * _VAD_CHUNK :]
        found = []
        for chunk in chunks:
            self._is_speech = self._network(chunk) >= (_VAD_ENDS if self._is_speech else _VAD_BEGINS)
            found.append(self._is_speech)
        self._known = np.append(self._known, np.asarray(found, np.bool_))
        places = np.arange(self._frames, self._frames + int(len(self._known) / self._frame) + 2)
        at = ((places + 0.5) * self._frame).astype(np.int64) - self._chunks
        told = self._known[at[at < len(self._known)]]
        self._frames += len(told)
        done = min(int((self._frames + 0.5) * self._frame) - self._chunks, len(self._known))
        self._known, self._chunks = self._known[done:], self._chunks + done
        return told


class _Network:
    """The network of silero-vad. The silero-vad package is not imported, because importing it limits torch to one
    thread."""

    def __init__(self) -> None:
        import onnxruntime

        spec = find_spec("silero_vad")
        path = Path(str(spec and spec.origin)).parent / "data" / "silero_vad.onnx"
        if not path.is_file():
            raise ConfigError(f"voice activity detection: silero-vad has no {path.name}; install silero-vad 6")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        self._state = np.zeros((2, 1, 128), np.float32)
        self._before = np.zeros((1, _VAD_CONTEXT), np.float32)

    def __call__(self, chunk: NDArray[np.float32]) -> float:
        """The probability of speech in the next samples `[_VAD_CHUNK]`."""
        heard = np.concatenate([self._before, chunk[None]], axis=1)
        self._before = heard[:, -_VAD_CONTEXT:]
        inputs = {"input": heard, "state": self._state, "sr": np.asarray(_VAD_RATE)}
        probability, self._state = self._session.run(None, inputs)
        return float(probability[0, 0])
