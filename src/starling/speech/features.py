"""Log-mel features, computed from waveforms on the fly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from starling.configuration import Config
from starling.errors import DataError

if TYPE_CHECKING:
    import torch

    from starling.speech.mel import Warp


_SMOOTHED = 5  # frames
_QUIET, _LOUD = 0.10, 0.95
_SPEECH = 0.4


def loud_frames(levels: NDArray[np.floating[Any]], least_range: float = 0.0) -> NDArray[np.bool_]:
    """Which frames are loud `[n]`, by their levels `[n]` on a logarithmic scale.

    Levels are averaged over five frames. A frame is loud if its level is at least 40 % of the way from the 10 %
    quantile of all levels to the 95 % quantile. All frames are loud if these are less than `least_range` apart.
    """
    sums, counts = (np.convolve(each, np.ones(_SMOOTHED))[2:-2] for each in (levels, np.ones(len(levels))))
    level = sums / counts
    quiet, loud = np.quantile(level, [_QUIET, _LOUD])
    is_loud: NDArray[np.bool_] = (level >= quiet + _SPEECH * (loud - quiet)) | (loud - quiet < least_range)
    return is_loud


_SMALLEST_DEVIATION = 1e-5  # so that constant features (digital silence) are not divided by zero
_SCALE = 3.0  # roughly the standard deviation of log-mel energies in speech, in nats
WHOLE = ("utterance", "speech")
"""Normalisations that need whole recordings."""
_FITTED_AT_ONCE = 32  # utterances that are read together


class FeatureConfig(Config):
    """The parameters of log-mel features; the `features:` section of a recipe."""

    kind: Literal["log-mel", "raw"] = "log-mel"
    """raw: the samples themselves, for model.name: wav2vec2 and whisper; of the other keys, it has normalise alone."""
    num_mels: int | None = Field(default=None, ge=4)
    """Mel bands; 80, or 40 up to 8 kHz, when not given."""
    frame_length: float = Field(default=0.025, gt=0)
    """Seconds of one window."""
    frame_shift: float = Field(default=0.010, gt=0)
    """Seconds from one frame to the next."""
    low_freq: float = Field(default=20.0, ge=0)
    """Lower edge of the lowest band, Hz."""
    high_freq: float = -400.0
    """Upper edge of the highest band, Hz; <= 0: from Nyquist down."""
    normalise: Literal["utterance", "speech", "global", "none"] = "utterance"
    """Data whose mean and deviation normalise each band; a streaming model needs global, or none. speech: the mean of
    the utterance's loud frames is subtracted, so that pauses do not count, and the result is divided by 3, about the
    deviation of speech."""
    splice: int = Field(default=0, ge=0, le=50)
    """Frames on either side that are joined to each, for loss: frames."""

    def mels_at(self, sampling_rate: int) -> int:
        """The number of mel bands at a sampling rate in Hz; 1 for samples."""
        if self.kind == "raw":
            return 1
        if self.num_mels is not None:
            return self.num_mels
        return 40 if sampling_rate <= 8000 else 80


class UtteranceSource(Protocol):
    """The part of a prepared set that features and batches use; `SpeechSet` implements it."""

    @property
    def sampling_rate(self) -> int: ...

    @property
    def durations(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def id(self, index: int) -> str: ...

    def text(self, index: int) -> str: ...

    def audios(self, indices: Sequence[int]) -> Sequence[np.ndarray | DataError]: ...


class LogMel:
    """Waveform `[T]` in [-1, 1] -> log-mel features `[frames, F]`, as defined by Kaldi.

    Frames are centred (`snip_edges=False`): their number is the length divided by the frame shift, rounded.
    An utterance's features do not depend on the other utterances of its batch.
    """

    def __init__(self, config: FeatureConfig, sampling_rate: int) -> None:
        from starling.speech.mel import LogMelLayer, Samples

        self.config = config
        self.sampling_rate = sampling_rate
        self.num_bands = config.mels_at(sampling_rate)
        self.num_features = self.num_bands * (2 * config.splice + 1)
        self.mean: torch.Tensor | None = None  # [F], set by `fit` for normalise: global
        self.deviation: torch.Tensor | None = None  # [F]
        self._window = math.floor(config.frame_length * sampling_rate)
        if config.kind == "raw":
            self.layer: LogMelLayer = Samples()
            return
        self.layer = LogMelLayer(
            sampling_rate,
            self.num_bands,
            config.frame_length,
            config.frame_shift,
            config.low_freq,
            config.high_freq,
        )

    @property
    def frame_seconds(self) -> float:
        """Seconds from one frame to the next."""
        return 1.0 / self.sampling_rate if self.config.kind == "raw" else self.config.frame_shift

    def num_frames(self, num_samples: int, tempo: float = 1.0) -> int:
        """The number of frames of a waveform of `num_samples` samples."""
        return self.layer.num_frames(num_samples, tempo)

    def __call__(self, waveform: torch.Tensor, utterance: str = "") -> torch.Tensor:
        """The features `[frames, F]`, float32, of one waveform `[T]`, normalised as configured.

        Raises DataError, naming `utterance`, for audio that is shorter than one window or not finite.
        """
        self.check(waveform, utterance)
        return self.batch([waveform])[0]

    def batch(self, waveforms: Sequence[torch.Tensor], warps: Sequence[Warp] | None = None) -> list[torch.Tensor]:
        """The features of several waveforms that passed `check`; faster than one by one, with the same result.

        `warps` changes the tempo and the frequency axis of each. Raises DataError if `normalise: global` has no
        statistics.
        """
        bands = self.bands(waveforms, warps)
        return [spliced(each, self.config.splice) for each in bands] if self.config.splice else bands

    def bands(self, waveforms: Sequence[torch.Tensor], warps: Sequence[Warp] | None = None) -> list[torch.Tensor]:
        """The same without splicing, `[frames, num_bands]`."""
        if warps is None:
            energies = self.layer(waveforms)
        else:
            energies = [self.layer.warped(*each) for each in zip(waveforms, warps, strict=True)]
        return self.normalised(energies)

    def normalised(self, energies: list[torch.Tensor]) -> list[torch.Tensor]:
        """Log-mel energies `[frames, num_bands]` of each utterance, normalised as configured."""
        if self.config.normalise == "none":
            return energies
        if self.config.normalise == "utterance":
            return [_normalised(each) for each in energies]
        if self.config.normalise == "speech":
            return [_normalised_by_speech(each) for each in energies]
        if self.mean is None or self.deviation is None:
            raise DataError(
                "features.normalise is `global`, but there are no statistics: call LogMel.fit with the training set "
                "first"
            )
        return [(each - self.mean) / self.deviation for each in energies]

    def fit(
        self, source: UtteranceSource, max_utterances: int = 1000, on_bad: Literal["fail", "skip"] = "fail"
    ) -> None:
        """Estimate the mean and deviation of `normalise: global` from evenly spaced utterances of a set.

        Raises DataError, naming the utterance, for unusable audio; with `on_bad` "skip", if all audio is unusable.
        """
        import torch

        chosen = np.unique(np.linspace(0, len(source) - 1, min(max_utterances, len(source))).astype(int)).tolist()
        count, total, squares = 0, torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        bad: DataError | None = None
        for place in range(0, len(chosen), _FITTED_AT_ONCE):
            indices = chosen[place : place + _FITTED_AT_ONCE]
            for index, audio in zip(indices, source.audios(indices), strict=True):
                try:
                    waveform = self.checked(audio, source.id(index))
                except DataError as error:
                    if on_bad == "fail":
                        raise
                    bad = bad or error
                    continue
                features = self.layer([waveform])[0].double()
                count += len(features)
                total = total + features.sum(0)
                squares = squares + features.square().sum(0)
        if bad is not None and not count:
            raise DataError(f"none of {len(chosen)} utterances has usable audio for feature statistics: {bad}")
        mean = total / count
        deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
        self.mean, self.deviation = mean.float(), deviation.float().clamp(min=_SMALLEST_DEVIATION)

    def statistics(self) -> dict[str, torch.Tensor]:
        """The tensors estimated by `fit`, by name; empty before `fit`."""
        if self.mean is None or self.deviation is None:
            return {}
        return {"mean": self.mean, "deviation": self.deviation}

    def load_statistics(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors returned by `statistics`."""
        self.mean, self.deviation = tensors.get("mean"), tensors.get("deviation")

    def checked(self, audio: np.ndarray | DataError, utterance: str = "") -> torch.Tensor:
        """The audio of an utterance as a waveform `[T]`. Raises `audio` if it is an error, and the errors of
        `check`."""
        if isinstance(audio, DataError):
            raise audio
        import torch

        waveform = torch.from_numpy(audio)
        self.check(waveform, utterance)
        return waveform

    def check(self, waveform: torch.Tensor, utterance: str = "") -> None:
        """Raise DataError, naming `utterance`, for audio that is not `[T]`, shorter than one window or not finite."""
        name = f"utterance {utterance!r}" if utterance else "the audio"
        if waveform.ndim != 1:
            raise DataError(f"{name} has shape {list(waveform.shape)}; features need one channel, [T]")
        if len(waveform) < self._window:
            raise DataError(
                f"{name} has {len(waveform)} samples ({len(waveform) / self.sampling_rate:.3f} s); one window "
                f"needs {self._window} ({self.config.frame_length} s): remove it or record it again"
            )
        finite = math.isfinite(float(waveform.sum()))  # ten times as fast as checking each sample
        if not finite and not bool(waveform.isfinite().all()):
            raise DataError(f"{name} contains samples that are not finite (NaN or infinity): decode it again")


def spliced(features: torch.Tensor, width: int) -> torch.Tensor:
    """Each frame of `[T, F]` joined with `width` neighbours on either side, `[T, (2 * width + 1) * F]`; at the ends the
    outermost frame is repeated."""
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
    return (centred - centred[is_speech].mean(0)) / _SCALE
