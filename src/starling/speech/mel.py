"""Log-mel energies of many waveforms at once, as defined by Kaldi."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from starling.errors import ConfigError

_Numbers = TypeVar("_Numbers", float, NDArray[np.floating])

_PRE_EMPHASIS = 0.97
_BLOCK = 256  # frames computed at a time, so that intermediate results stay in the processor's cache
_MULTIPLE = (
    16  # the number of frames is rounded up to this: with few rows, libraries' results may differ in the last bits
)
_HIGHEST_WARPED = 4800.0  # Hz: above the formants, where a warped frequency axis bends back (Jaitly & Hinton 2013)
_BANKS_KEPT = 128


@dataclass(frozen=True)
class Warp:
    """How an utterance is changed while its features are computed, at no cost: it sounds `tempo` times as fast at the
    same pitch, and what it has at frequency f appears at `frequency` * f, as with a shorter vocal tract."""

    tempo: float = 1.0
    frequency: float = 1.0


class LogMelLayer:
    """Waveforms `[T]` -> log-mel energies `[frames, F]`, float32; at least one window long each.

    It computes the same as lhotse's `Wav2LogFilterBank`, with the same window and mel bank: for each frame, subtract
    the mean `m`, apply pre-emphasis, multiply by the window `w`, |FFT|^2, mel bank, log. Because pre-emphasis is linear
    and the window begins with 0, the frames are cut from a waveform with pre-emphasis:
    `w * (x[t] - 0.97 x[t-1] - 0.03 m)`.
    The result is equal up to rounding, and three times as fast; all waveforms share the FFTs.
    """

    def __init__(
        self, sampling_rate: int, num_bands: int, frame_length: float, frame_shift: float, low: float, high: float
    ) -> None:
        self.length = math.floor(frame_length * sampling_rate)
        """Samples of a window."""
        self.shift = math.floor(frame_shift * sampling_rate)
        """Samples from one frame to the next."""
        self._fft_length = 2 ** (self.length - 1).bit_length()
        self.window = torch.hann_window(self.length, periodic=False).pow(0.85)  # Povey's
        """`[length]`"""
        self.bank = _kaldi_bank(num_bands, self._fft_length, sampling_rate, low, high)
        """`[fft_length / 2 + 1, F]`"""
        self._rate, self._edges = sampling_rate, (low, high)
        self.floor = float(torch.finfo(torch.float32).eps)
        """The smallest energy."""

    @property
    def left(self) -> int:
        """Samples of the first window in front of a waveform, where it is mirrored."""
        return (self.length - self.shift) // 2

    def num_frames(self, num_samples: int, tempo: float = 1.0) -> int:
        """The number of frames of a waveform of `num_samples` samples."""
        shift = self._shifted(tempo)
        return (num_samples + shift // 2) // shift

    def __call__(self, waveforms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The energies `[frames, F]` of each waveform; they do not depend on the other waveforms."""
        return self._of_waveforms(waveforms, self.shift, self.bank)

    def warped(self, waveform: torch.Tensor, warp: Warp) -> torch.Tensor:
        """The energies `[frames, F]` of one waveform `[T]`, warped: windows of the same length are further apart for a
        higher tempo, rounded to samples, and the mel bank sees a warped frequency axis."""
        bank = self.bank
        if warp.frequency != 1.0:
            bank = mel_bank(self.bank.shape[1], self._fft_length, self._rate, *self._edges, warp.frequency)
        return self._of_waveforms([waveform], self._shifted(warp.tempo), bank)[0]

    @torch.no_grad()
    def _of_waveforms(self, waveforms: Sequence[torch.Tensor], shift: int, bank: torch.Tensor) -> list[torch.Tensor]:
        counts = [(len(waveform) + shift // 2) // shift for waveform in waveforms]
        between = -(-self.length // shift) - 1  # frames that overlap two utterances and are not used
        first = np.cumsum([0, *(count + between for count in counts)]).tolist()
        rows = -(-first[-1] // _MULTIPLE) * _MULTIPLE
        samples = np.zeros((rows - 1) * shift + self.length, np.float32)
        for waveform, count, row in zip(waveforms, counts, first[:-1], strict=True):
            self._lay(waveform.numpy(), count, samples[row * shift :], shift)
        energies = self._energies(torch.from_numpy(samples), rows, shift, bank)
        return [energies[row : row + count] for row, count in zip(first[:-1], counts, strict=True)]

    @torch.no_grad()
    def of_samples(self, samples: torch.Tensor, count: int) -> torch.Tensor:
        """The energies `[count, F]` of windows that begin at the first sample, without mirroring."""
        return self._energies(samples.contiguous(), count, self.shift, self.bank)

    def _shifted(self, tempo: float) -> int:
        """Samples from one frame to the next."""
        return self.shift if tempo == 1.0 else max(1, min(self.length, round(self.shift * tempo)))

    def _lay(self, waveform: NDArray[np.float32], count: int, into: NDArray[np.float32], shift: int) -> None:
        """Copy a waveform, mirrored at its ends to fill `count` frames, to the beginning of an array."""
        left, whole = (self.length - shift) // 2, (count - 1) * shift + self.length
        into[:left] = waveform[:left][::-1]
        middle = waveform[: whole - left]
        end = left + len(middle)
        into[left:end] = middle
        if end < whole:
            into[end:whole] = waveform[end - whole :][::-1]

    def _energies(self, samples: torch.Tensor, rows: int, shift: int, bank: torch.Tensor) -> torch.Tensor:
        """The log-mel energies `[rows, F]` of the frames of `samples`."""
        emphasised = torch.empty_like(samples)
        emphasised[0] = 0.0  # the window hides it
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


def _kaldi_bank(num_bands: int, fft_length: int, sampling_rate: int, low: float, high: float) -> torch.Tensor:
    """Kaldi's triangular filters `[fft_length / 2 + 1, num_bands]`, with the same bits as those of lhotse."""
    nyquist = sampling_rate / 2
    lowest, highest = _mel(low), _mel(high if high > 0 else nyquist + high)
    if not 0.0 <= low < nyquist or not lowest < highest <= _mel(nyquist):
        raise ConfigError(
            f"features: bands from {low:g} to {high:g} Hz do not fit a sampling rate of {sampling_rate} Hz: choose "
            "features.low_freq and features.high_freq below half of it"
        )
    step = (highest - lowest) / (num_bands + 1)
    band = torch.arange(num_bands)[:, None]
    left, centre, right = (lowest + (band + each) * step for each in (0, 1.0, 2.0))
    bins = sampling_rate / fft_length * torch.arange(fft_length / 2)
    mels = torch.from_numpy(_mel(cast(NDArray[np.floating], bins.numpy())))[None]
    rising, falling = (mels - left) / (centre - left), (right - mels) / (right - centre)
    bank = torch.max(torch.zeros(1), torch.min(rising, falling))
    return torch.nn.functional.pad(bank, (0, 1)).T


def _mel(hertz: _Numbers) -> _Numbers:
    """The mel scale of Kaldi."""
    mels: _Numbers = 1127.0 * np.log(1 + hertz / 700)
    return mels


class Samples(LogMelLayer):
    """Waveforms `[T]` -> their samples `[T, 1]`, in the place of log-mel energies."""

    def __init__(self) -> None:
        pass

    def num_frames(self, num_samples: int, tempo: float = 1.0) -> int:
        """The number of samples."""
        return num_samples

    def __call__(self, waveforms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The samples `[T, 1]` of each waveform."""
        return [waveform[:, None] for waveform in waveforms]

    def warped(self, waveform: torch.Tensor, warp: Warp) -> torch.Tensor:
        """Not for samples."""
        raise ValueError(
            "samples have no windows or bands to warp: augment.tempo and vocal_tract need log-mel features"
        )


@lru_cache(maxsize=_BANKS_KEPT)
def mel_bank(
    num_bands: int, fft_length: int, sampling_rate: int, low: float, high: float, warp: float = 1.0
) -> torch.Tensor:
    """Kaldi's triangular filters `[fft_length / 2 + 1, num_bands]` on a warped frequency axis.

    The axis is f -> warp * f up to a boundary, and from there a line to the Nyquist frequency, which stays where it is
    (Jaitly & Hinton 2013, "Vocal tract length perturbation improves speech recognition"). `low` and `high` are the
    edges of the bands in Hz; `high` <= 0 counts from the Nyquist frequency down.
    """
    nyquist = sampling_rate / 2
    bins = np.arange(fft_length // 2) * (sampling_rate / fft_length)
    bent = min(_HIGHEST_WARPED, 0.8 * nyquist) * min(warp, 1.0)  # Hz, after warping
    rest = nyquist - (nyquist - bent) / (nyquist - bent / warp) * (nyquist - bins)
    mels = _mel(np.where(bins <= bent / warp, warp * bins, rest))[:, None]
    edges = np.linspace(_mel(low), _mel(high if high > 0 else nyquist + high), num_bands + 2)
    rising = (mels - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - mels) / (edges[2:] - edges[1:-1])
    bank = np.pad(np.clip(np.minimum(rising, falling), 0.0, None), ((0, 1), (0, 0)))
    return torch.from_numpy(bank.astype(np.float32))
