"""Log-mel features as Kaldi defines them, computed from waveforms on the fly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from starling.configuration import Config
from starling.errors import ConfigError, DataError
from starling.speech.levels import SCALE, loud_frames, normalised, without_long_pauses

if TYPE_CHECKING:
    import torch

    from starling.speech.store import SpeechSet, SpeechSets

_Result = TypeVar("_Result")

_SMALLEST_DEVIATION = 1e-5  # prevents division by zero for constant features (digital silence)
WHOLE = ("active", "utterance", "speech")
"""The values of `normalise` that need whole recordings."""
_FITTED_AT_ONCE = 32  # number of utterances that are read together
_PRE_EMPHASIS = 0.97
_BLOCK = 256  # number of frames computed at a time, so that intermediate results stay in the CPU cache
_MULTIPLE = 16  # frame counts are padded to a multiple: with few rows, libraries' results may differ in the last bits
_HIGHEST_WARPED = 4800.0  # Hz: above the formants; a warped frequency axis bends back here (Jaitly & Hinton 2013)
_BANKS_KEPT = 128


def attempt(function: Callable[..., _Result], *arguments: object) -> _Result | DataError:
    """The result of a call, or the DataError that it raises. This is needed because single utterances of a batch may be
    unusable."""
    try:
        return function(*arguments)
    except DataError as error:
        return error


def attempts(function: Callable[..., _Result], *columns: Iterable[object]) -> list[_Result | DataError]:
    """The result or the DataError of each call; the columns hold the calls' arguments and have the same length."""
    return [attempt(function, *arguments) for arguments in zip(*columns, strict=True)]


class FeatureConfig(Config):
    """The parameters of log-mel features; the `features:` section of a recipe."""

    kind: Literal["log-mel", "raw"] = "log-mel"
    """The kind of features: Kaldi's log-mel energies, or, for model.name: wav2vec2 and whisper, `raw` samples. Of the
    other keys, only normalise applies to `raw`."""
    num_mels: int | None = Field(default=None, ge=4)
    """Number of mel bands. The default is 80, or 40 at sampling rates up to 8 kHz."""
    frame_length: float = Field(default=0.025, gt=0)
    """Seconds of audio in one window."""
    frame_shift: float = Field(default=0.010, gt=0)
    """Seconds from one frame to the next."""
    low_freq: float = Field(default=20.0, ge=0)
    """Lower edge of the lowest band, in Hz."""
    high_freq: float = -400.0
    """Upper edge of the highest band, in Hz. A value <= 0 is an offset from the Nyquist frequency."""
    normalise: Literal["active", "utterance", "speech", "global", "none"] = "utterance"
    """The data whose mean and deviation normalise each band; a streaming model needs global or none. With `active`, the
    features depend neither on the level of a recording nor on silence in it: a floor is set 30 dB below the level of
    speech (ITU-T P.56), the mean of the frames with speech is subtracted, and the result is divided by 3, about the
    deviation of speech. `speech` sets no floor, and subtracts the mean of the frames that are loud compared with the
    others."""
    pauses: float | None = Field(default=None, ge=0.1)
    """Seconds to which longer pauses, of silence or even noise, are shortened. Pauses at the ends of a recording are
    shortened to one frame. null keeps all pauses whole."""
    splice: int = Field(default=0, ge=0, le=50)
    """Number of frames on either side that are joined to each frame, for loss: frames."""

    def mels_at(self, sampling_rate: int) -> int:
        """The number of mel bands at a sampling rate in Hz; 1 for raw samples."""
        if self.kind == "raw":
            return 1
        if self.num_mels is not None:
            return self.num_mels
        return 40 if sampling_rate <= 8000 else 80


@dataclass(frozen=True)
class Warp:
    """A perturbation of an utterance that is applied, at no extra cost, while its features are computed. The utterance
    sounds `tempo` times as fast at the same pitch, and energy at frequency f appears at `frequency` * f, as if the
    vocal tract were shorter (`frequency` above 1) or longer (below 1)."""

    tempo: float = 1.0
    frequency: float = 1.0


class LogMel:
    """Computes log-mel features `[frames, F]`, as Kaldi defines them, from a waveform `[T]` in [-1, 1].

    Frames are centred (`snip_edges=False`): their number is the length of the waveform divided by the frame shift,
    rounded. An utterance's features do not depend on the other utterances of its batch.

    The energies are those of lhotse's `Wav2LogFilterBank`, with the same window and mel bank. For each frame, lhotse
    subtracts the mean `m`, applies pre-emphasis, multiplies by the window `w`, and computes |FFT|^2, the mel bank's
    outputs and their logarithms. Because pre-emphasis is linear and the window begins with 0, we apply pre-emphasis to
    the whole waveform before cutting it into frames: `w * (x[t] - 0.97 x[t-1] - 0.03 m)`. The result is equal up to
    rounding, and is computed more than twice as fast. All waveforms of a batch share the FFTs. With `kind: raw`, the
    samples `[T, 1]` replace the energies.
    """

    def __init__(self, config: FeatureConfig, sampling_rate: int) -> None:
        import torch

        self.config = config
        self.sampling_rate = sampling_rate
        self.num_bands = config.mels_at(sampling_rate)
        self.num_features = self.num_bands * (2 * config.splice + 1)
        self.statistics: dict[str, torch.Tensor] = {}
        """The `mean` and `deviation` `[F]` of each band for `normalise: global`; empty before `fit`."""
        self.length = math.floor(config.frame_length * sampling_rate)
        """Number of samples in a window."""
        self.shift = math.floor(config.frame_shift * sampling_rate)
        """Number of samples from one frame to the next."""
        if config.kind == "raw":
            return
        self._fft_length = 2 ** (self.length - 1).bit_length()
        self.window = torch.hann_window(self.length, periodic=False).pow(0.85)  # Povey's
        """The window function `[length]`."""
        self.bank = self._bank()
        """The mel filter bank `[fft_length / 2 + 1, F]`."""
        self.floor = 1e-14 if config.normalise == "active" else float(torch.finfo(torch.float32).eps)
        """Lower bound on an energy."""

    @property
    def frame_seconds(self) -> float:
        """Seconds from one frame to the next."""
        return 1.0 / self.sampling_rate if self.config.kind == "raw" else self.config.frame_shift

    @property
    def left(self) -> int:
        """Number of samples of the first window that lie before the waveform and are filled by mirroring it."""
        return (self.length - self.shift) // 2

    @property
    def longest_pause(self) -> int | None:
        """Number of frames to which a longer pause is shortened; None if pauses are not shortened."""
        return None if self.config.pauses is None else round(self.config.pauses / self.config.frame_shift)

    def num_frames(self, num_samples: int, tempo: float = 1.0) -> int:
        """The number of frames of a waveform of `num_samples` samples."""
        if self.config.kind == "raw":
            return num_samples
        shift = self._shifted(tempo)
        return (num_samples + shift // 2) // shift

    def __call__(self, waveform: torch.Tensor, utterance: str = "") -> torch.Tensor:
        """The float32 features `[frames, F]` of one waveform `[T]`, normalised as configured.

        Raises DataError, naming `utterance`, for audio that is shorter than one window or not finite.
        """
        return self.batch([self.checked(waveform, utterance)])[0]

    def batch(
        self,
        waveforms: Sequence[torch.Tensor],
        warps: Sequence[Warp] | None = None,
        least: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        """The features of several waveforms that passed `checked`. The result is the same as for one waveform at a
        time, but is computed faster.

        `warps` changes the tempo and the frequency axis of each waveform. An utterance keeps all of its pauses if it
        would otherwise have fewer than `least` frames. Raises DataError if `normalise: global` has no statistics.
        """
        energies = self.energies(waveforms, warps)
        if self.config.pauses is not None:
            energies = [each[kept] for each, kept in zip(energies, self.kept(energies, least), strict=True)]
        return self.of_energies(energies)

    def of_energies(self, energies: list[torch.Tensor]) -> list[torch.Tensor]:
        """The features `[frames, F]` of each utterance, computed from its log-mel energies `[frames, num_bands]`."""
        bands = self.normalised(energies)
        return [spliced(each, self.config.splice) for each in bands] if self.config.splice else bands

    def tried(
        self,
        waveforms: Sequence[torch.Tensor | DataError],
        utterances: Sequence[str],
        warps: Sequence[Warp] | None = None,
        least: Sequence[int] | None = None,
    ) -> list[torch.Tensor | DataError]:
        """The features of several waveforms, computed as `batch` does. An element may be an error, or a waveform that
        fails `checked`; the result then has the error in its place."""
        found = attempts(self.checked, waveforms, utterances)
        usable = {place: each for place, each in enumerate(found) if not isinstance(each, DataError)}
        if usable:
            matrices = self.batch(
                list(usable.values()),
                warps and [warps[place] for place in usable],
                least and [least[place] for place in usable],
            )
            usable = dict(zip(usable, matrices, strict=True))
        return [usable.get(place, each) for place, each in enumerate(found)]

    def bands(self, waveforms: Sequence[torch.Tensor], warps: Sequence[Warp] | None = None) -> list[torch.Tensor]:
        """The log-mel energies `[frames, num_bands]` of each waveform, normalised but not spliced, with all pauses."""
        return self.normalised(self.energies(waveforms, warps))

    def kept(self, energies: Sequence[torch.Tensor], least: Sequence[int] | None = None) -> list[NDArray[np.int64]]:
        """For each utterance's log-mel energies `[frames, num_bands]`, the indices of the frames that remain when
        pauses are shortened; all frames if fewer than `least` would remain."""
        whole = [np.arange(len(each)) for each in energies]
        if self.longest_pause is None:
            return whole
        shortened = without_long_pauses([each.exp().numpy() for each in energies], self.longest_pause)
        columns = zip(shortened, whole, least or [0] * len(whole), strict=True)
        return [some if len(some) >= number else every for some, every, number in columns]

    def normalised(self, energies: list[torch.Tensor]) -> list[torch.Tensor]:
        """Normalise the log-mel energies `[frames, num_bands]` of each utterance as configured."""
        import torch

        if self.config.normalise == "none":
            return energies
        if self.config.normalise == "active":
            return [torch.from_numpy(each) for each in normalised([each.numpy() for each in energies])]
        if self.config.normalise == "utterance":
            return [_normalised(each) for each in energies]
        if self.config.normalise == "speech":
            return [_normalised_by_speech(each) for each in energies]
        if not self.statistics:
            raise DataError(
                "features.normalise is `global`, but there are no statistics: call LogMel.fit with the training set "
                "first"
            )
        mean, deviation = self.statistics["mean"], self.statistics["deviation"]
        return [(each - mean) / deviation for each in energies]

    def fit(
        self, source: SpeechSet | SpeechSets, max_utterances: int = 1000, on_bad: Literal["fail", "skip"] = "fail"
    ) -> None:
        """Estimate the mean and deviation of `normalise: global` from evenly spaced utterances of a set.

        Raises DataError, naming the utterance, for unusable audio. If `on_bad` is "skip", unusable audio is skipped,
        and DataError is raised only if all audio is unusable.
        """
        import torch

        chosen = np.unique(np.linspace(0, len(source) - 1, min(max_utterances, len(source))).astype(int)).tolist()
        count, total, squares = 0, torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        bad: DataError | None = None
        for place in range(0, len(chosen), _FITTED_AT_ONCE):
            for utterance in source.read(chosen[place : place + _FITTED_AT_ONCE]):
                waveform = attempt(self.checked, utterance.samples, utterance.id)
                if isinstance(waveform, DataError):
                    if on_bad == "fail":
                        raise waveform
                    bad = bad or waveform
                    continue
                features = self.energies([waveform])[0].double()
                count += len(features)
                total = total + features.sum(0)
                squares = squares + features.square().sum(0)
        if bad is not None and not count:
            raise DataError(f"none of {len(chosen)} utterances has usable audio for feature statistics: {bad}")
        mean = total / count
        deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
        self.statistics = {"mean": mean.float(), "deviation": deviation.float().clamp(min=_SMALLEST_DEVIATION)}

    def checked(self, audio: NDArray[np.float32] | torch.Tensor | DataError, utterance: str = "") -> torch.Tensor:
        """The audio of an utterance as a waveform `[T]`. Raises `audio` if it is an error. Raises DataError, naming
        `utterance`, if the audio does not have the shape `[T]`, is shorter than one window, or is not finite."""
        if isinstance(audio, DataError):
            raise audio
        import torch

        waveform = torch.from_numpy(audio) if isinstance(audio, np.ndarray) else audio
        name = f"utterance {utterance!r}" if utterance else "the audio"
        if waveform.ndim != 1:
            raise DataError(f"{name} has shape {list(waveform.shape)}; features need one channel, [T]")
        if len(waveform) < self.length:
            raise DataError(
                f"{name} has {len(waveform)} samples ({len(waveform) / self.sampling_rate:.3f} s); one window "
                f"needs {self.length} ({self.config.frame_length} s): remove it or record it again"
            )
        finite = math.isfinite(float(waveform.sum()))  # ten times as fast as checking each sample
        if not finite and not bool(waveform.isfinite().all()):
            raise DataError(f"{name} contains samples that are not finite (NaN or infinity): decode it again")
        return waveform

    def energies(self, waveforms: Sequence[torch.Tensor], warps: Sequence[Warp] | None = None) -> list[torch.Tensor]:
        """The energies `[frames, num_bands]` of each waveform, which do not depend on the other waveforms.

        For a warped waveform, windows keep their length, but a higher tempo moves them further apart (by a whole number
        of samples), and the mel bank uses a warped frequency axis.
        """
        if self.config.kind == "raw":
            return [waveform[:, None] for waveform in waveforms]
        if warps is None:
            return self._of_waveforms(waveforms, self.shift, self.bank)
        return [
            self._of_waveforms([waveform], self._shifted(warp.tempo), self._bank(warp.frequency))[0]
            for waveform, warp in zip(waveforms, warps, strict=True)
        ]

    def _bank(self, warp: float = 1.0) -> torch.Tensor:
        edges = self.config.low_freq, self.config.high_freq
        return mel_bank(self.num_bands, self._fft_length, self.sampling_rate, *edges, warp)

    def _of_waveforms(self, waveforms: Sequence[torch.Tensor], shift: int, bank: torch.Tensor) -> list[torch.Tensor]:
        import torch

        counts = [(len(waveform) + shift // 2) // shift for waveform in waveforms]
        between = -(-self.length // shift) - 1  # unused frames, which overlap two utterances
        first = np.cumsum([0, *(count + between for count in counts)]).tolist()
        rows = -(-first[-1] // _MULTIPLE) * _MULTIPLE
        samples = np.zeros((rows - 1) * shift + self.length, np.float32)
        for waveform, count, row in zip(waveforms, counts, first[:-1], strict=True):
            self._lay(waveform.numpy(), count, samples[row * shift :], shift)
        energies = self._energies(torch.from_numpy(samples), rows, shift, bank)
        return [energies[row : row + count] for row, count in zip(first[:-1], counts, strict=True)]

    def of_samples(self, samples: torch.Tensor, count: int) -> torch.Tensor:
        """The energies `[count, F]` of the first `count` windows. The first window begins at the first sample; the
        samples are not mirrored."""
        return self._energies(samples.contiguous(), count, self.shift, self.bank)

    def _shifted(self, tempo: float) -> int:
        """Number of samples from one frame to the next at the given tempo."""
        return self.shift if tempo == 1.0 else max(1, min(self.length, round(self.shift * tempo)))

    def _lay(self, waveform: NDArray[np.float32], count: int, into: NDArray[np.float32], shift: int) -> None:
        """Copy a waveform to the beginning of `into`, mirrored at its ends to fill `count` frames."""
        left, whole = (self.length - shift) // 2, (count - 1) * shift + self.length
        into[:left] = waveform[:left][::-1]
        middle = waveform[: whole - left]
        end = left + len(middle)
        into[left:end] = middle
        if end < whole:
            into[end:whole] = waveform[end - whole :][::-1]

    def _energies(self, samples: torch.Tensor, rows: int, shift: int, bank: torch.Tensor) -> torch.Tensor:
        """The log-mel energies `[rows, F]` of the frames of `samples`."""
        import torch

        emphasised = torch.empty_like(samples)
        emphasised[0] = 0.0  # the window is 0 here
        torch.sub(samples[1:], samples[:-1], alpha=_PRE_EMPHASIS, out=emphasised[1:])
        size, stride = (rows, self.length), (shift, 1)
        raw, frames = samples.as_strided(size, stride), emphasised.as_strided(size, stride)
        padded = torch.zeros(min(rows, _BLOCK), self._fft_length)
        energies = torch.empty(rows, bank.shape[1])
        for begin in range(0, rows, _BLOCK):
            end = min(rows, begin + _BLOCK)
            block = padded[: end - begin]
            windowed = block[:, : self.length]
            mean = raw[begin:end].mean(1, keepdim=True)
            torch.sub(frames[begin:end], mean, alpha=1.0 - _PRE_EMPHASIS, out=windowed).mul_(self.window)
            spectrum = torch.view_as_real(torch.fft.rfft(block))
            real, imaginary = spectrum[..., 0], spectrum[..., 1]
            power = real.square().addcmul_(imaginary, imaginary)
            torch.matmul(power, bank, out=energies[begin:end])
        return energies.clamp_(min=self.floor).log_()


def spliced(features: torch.Tensor, width: int) -> torch.Tensor:
    """Join each frame of `[T, F]` with its `width` neighbours on either side, which gives `[T, (2 * width + 1) * F]`.
    The first and the last frame are repeated beyond the ends."""
    import torch

    place = torch.arange(len(features))[:, None] + torch.arange(-width, width + 1)
    return features[place.clamp(0, len(features) - 1)].flatten(1)


def _normalised(features: torch.Tensor) -> torch.Tensor:
    centred = features - features[0]  # so that constant features become exactly 0
    centred -= centred.mean(0)
    deviation = centred.square().mean(0).sqrt_()  # three times as fast as torch.std_mean
    return centred.div_(deviation.clamp_(min=_SMALLEST_DEVIATION))


def _normalised_by_speech(features: torch.Tensor) -> torch.Tensor:
    import torch

    is_speech = torch.from_numpy(loud_frames(features.mean(1).numpy()))
    centred = features - features[0]  # so that constant features become exactly 0
    return (centred - centred[is_speech].mean(0)) / SCALE


def _mel(hertz: NDArray[np.floating]) -> NDArray[np.floating]:
    """The mel scale of Kaldi."""
    return 1127.0 * np.log(1 + hertz / 700)


@lru_cache(maxsize=_BANKS_KEPT)
def mel_bank(
    num_bands: int, fft_length: int, sampling_rate: int, low: float, high: float, warp: float = 1.0
) -> torch.Tensor:
    """Kaldi's triangular filters `[fft_length / 2 + 1, num_bands]`, optionally on a warped frequency axis. Without
    warping, they are bit-identical to lhotse's.

    The warped axis maps f to warp * f up to a boundary. From the boundary, it is a line to the Nyquist frequency, which
    stays fixed (Jaitly & Hinton 2013, "Vocal tract length perturbation improves speech recognition"). `low` and `high`
    are the edges of the bands in Hz; a `high` <= 0 is an offset from the Nyquist frequency. Raises ConfigError for
    impossible edges.
    """
    import torch

    nyquist = sampling_rate / 2
    lowest, highest, most = _mel(np.array([low, high if high > 0 else nyquist + high, nyquist])).tolist()
    if not 0.0 <= low < nyquist or not lowest < highest <= most:
        raise ConfigError(
            f"features: bands from {low:g} to {high:g} Hz do not fit a sampling rate of {sampling_rate} Hz: choose "
            "features.low_freq and features.high_freq below half of it"
        )
    if warp == 1.0:  # single precision, as in Kaldi and lhotse
        bins = np.arange(fft_length // 2, dtype=np.float32) * (sampling_rate / fft_length)
        edges = np.arange(num_bands + 2, dtype=np.float32) * ((highest - lowest) / (num_bands + 1)) + lowest
    else:
        bins = np.arange(fft_length // 2) * (sampling_rate / fft_length)
        bent = min(_HIGHEST_WARPED, 0.8 * nyquist) * min(warp, 1.0)  # Hz, after warping
        rest = nyquist - (nyquist - bent) / (nyquist - bent / warp) * (nyquist - bins)
        bins = np.where(bins <= bent / warp, warp * bins, rest)
        edges = np.linspace(lowest, highest, num_bands + 2)
    mels = _mel(bins)[:, None]
    rising = (mels - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - mels) / (edges[2:] - edges[1:-1])
    bank = np.pad(np.clip(np.minimum(rising, falling), 0.0, None), ((0, 1), (0, 0)))
    return torch.from_numpy(bank.astype(np.float32))
