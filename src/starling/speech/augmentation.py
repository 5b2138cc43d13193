"""Augmentation of training audio: speed, tempo, vocal tract, noise, babble, reverberation, level, codecs, SpecAugment.

Audio is augmented when it is loaded, and all randomness comes from explicit seeds. The codecs are real, not simulated:
libsndfile encodes the audio in memory and decodes it again.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from starling.chance import borrowed_generators, derive_seeds
from starling.configuration import Config
from starling.errors import DataError
from starling.speech.features import Warp

if TYPE_CHECKING:
    import torch


_NAME = re.compile(r"(rate|mp3|opus)-([1-9][0-9]{0,5})")
_LIMITS = {"rate": (1000, 192_000), "mp3": (8, 64), "opus": (6, 256)}
"""The lowest and highest sampling rates in Hz and bit rates in kbit/s. MP3 allows its range at every sampling rate up
to 24 kHz; Opus has the range of libsndfile."""
_MP3_KBITS = {8000: (8, 64), 16000: (8, 160), 24000: (8, 160), 48000: (32, 320)}
"""The lowest and the highest bit rate at some of MP3's sampling rates, between which libsndfile interpolates."""
_MP3_DELAY = 1105
"""Number of samples by which LAME and mpg123 together delay audio."""
_HIGHEST_LEVEL = 0.99
"""Highest compression level: libsndfile 1.2.2 cannot encode MP3 at a level of 1."""
_RATES = {"opus": (8000, 12000, 16000, 24000, 48000), "mp3": tuple(_MP3_KBITS)}
"""Sampling rates of the codecs in Hz, ascending; other codecs use the sampling rate of the telephone."""
TELEPHONE_RATE = 8000
"""Sampling rate of the telephone, in Hz."""
TELEPHONE_BAND = (300.0, 3400.0)
"""Frequency band of the telephone, in Hz."""
KINDS = "telephone, gsm, rate-HZ, opus-KBITS (6 to 256) and mp3-KBITS (8 to 64)"


def check_codec(name: str) -> str:
    """Return the name of a known codec or sampling rate. Raises ValueError for any other name."""
    _kind_of(name)
    return name


def _kind_of(name: str) -> tuple[str, int]:
    """The kind of a codec, and its number, such as kbit/s. Raises ValueError for an unknown one."""
    if name in ("telephone", "gsm"):
        return name, 0
    if (found := _NAME.fullmatch(name)) is None:
        raise ValueError(f"{name!r} is not a codec; known are {KINDS}, such as opus-8")
    low, high = _LIMITS[found[1]]
    if not low <= int(found[2]) <= high:
        raise ValueError(f"{name!r}: {found[1]} has {low} to {high} {'Hz' if found[1] == 'rate' else 'kbit/s'}")
    return found[1], int(found[2])


Codec = Annotated[str, AfterValidator(check_codec)]
"""The name of a codec. `telephone` is the band from 300 to 3400 Hz at 8 kHz in µ-law; `gsm` is the same band in
GSM 06.10 at 13 kbit/s; `rate-6000` converts to 6 kHz and back; `opus-8` and `mp3-16` are Opus at 8 kbit/s and MP3 at
16 kbit/s."""


def transmitted(samples: NDArray[np.float32], rate: int, codec: str) -> NDArray[np.float32]:
    """`samples` `[T]`, in -1..1 at `rate` Hz, after a codec, with the same length, rate and timing.

    A pure function of its arguments. Samples beyond -1..1 are clipped.
    """
    import torch

    from starling.speech.resampling import resampled

    kind, value = _kind_of(codec)
    rates = _RATES.get(kind, (TELEPHONE_RATE,))
    own = min(value, rate) if kind == "rate" else next((each for each in rates if each >= rate), rates[-1])
    sent = resampled(torch.from_numpy(np.clip(samples, -1.0, 1.0)), rate, own).clamp(-1.0, 1.0).numpy()
    if kind == "rate":
        received = sent
    elif kind == "opus":
        received = _coded(sent, own, "OGG", "OPUS", 1 - (value - 6) / 250)  # libsndfile's scale: 256 to 6 kbit/s
    elif kind == "mp3":
        low, high = _MP3_KBITS[own]
        received = _coded(sent, own, "MP3", "MPEG_LAYER_III", 1 - (max(value, low) - low) / (high - low))
        if len(received) > len(sent):  # at low bit rates, the file does not say how much padding to remove
            received = received[_MP3_DELAY:]
    else:
        received = _coded(_telephone_band(sent), own, "WAV", "ULAW" if kind == "telephone" else "GSM610")
    back = resampled(torch.from_numpy(received), own, rate).numpy()[: len(samples)]
    return np.pad(back, (0, len(samples) - len(back)))


def label_of(set_name: str, codec: str | None) -> str:
    """The name under which a set is scored, such as `test@telephone`."""
    return set_name if codec is None else f"{set_name}@{codec}"


def set_of(label: str) -> str:
    """The set that a label names."""
    name, _, codec = label.rpartition("@")
    try:
        check_codec(codec)
    except ValueError:
        return label
    return name


def _coded(
    samples: NDArray[np.float32], rate: int, kind: str, subtype: str, level: float | None = None
) -> NDArray[np.float32]:
    """Samples encoded by libsndfile and decoded again; `level` is its compression level, from 0 to 1."""
    import soundfile

    options: dict[str, Any] = {}
    if level is not None:
        options["compression_level"] = min(level, _HIGHEST_LEVEL)
    if kind == "MP3":
        options["bitrate_mode"] = "CONSTANT"
    file = io.BytesIO()
    try:
        soundfile.write(file, samples, rate, format=kind, subtype=subtype, **options)
        file.seek(0)
        decoded, _ = soundfile.read(file, dtype="float32")
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError) as error:
        raise DataError(
            f"libsndfile cannot encode {subtype} ({kind}): {error}; install soundfile 0.13 or later"
        ) from error
    return np.asarray(decoded, np.float32)


def _telephone_band(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """The part between 300 and 3400 Hz of audio at 8 kHz: a Butterworth filter of the eighth order."""
    from scipy.signal import sosfilt

    return np.asarray(sosfilt(_band_filter(), samples), np.float32)


@cache
def _band_filter() -> NDArray[np.float64]:
    from scipy.signal import butter

    return np.asarray(butter(4, TELEPHONE_BAND, "bandpass", fs=TELEPHONE_RATE, output="sos"))


_DIGITAL = 0.15  # share of digital silence among silences
_STEP = 0.01  # factors are rounded to it, so that few mel banks are made
_MIN_FRAMES_TO_MASK = 20  # below this, masks would hide whole phones or be empty


class SpecAugmentConfig(Config):
    """Masks over time and frequency (Park et al. 2019), with lhotse's parameters."""

    probability: float = Field(default=0.9, ge=0, le=1)
    """Share of utterances that are masked."""
    time_warp: int = Field(default=0, ge=0)
    """Maximum number of frames by which time warping moves a frame; 0 turns warping off."""
    num_frequency_masks: int = Field(default=2, ge=0)
    """Number of masks over bands per utterance."""
    frequency_mask_size: int = Field(default=8, ge=1)
    """Exclusive upper limit on the number of bands that a frequency mask covers."""
    num_time_masks: int = Field(default=5, ge=0)
    """Number of masks over frames per utterance."""
    time_mask_size: int = Field(default=20, ge=1)
    """Exclusive upper limit on the number of frames that a time mask covers."""
    max_time_masked: float = Field(default=0.15, ge=0, le=1)
    """Maximum share of the frames that the masks cover."""


Share = Annotated[float, Field(ge=0, le=1)]
Range = tuple[float, float]


def _within(lowest: float, highest: float) -> AfterValidator:
    def check(found: Range) -> Range:
        if not lowest <= found[0] <= found[1] <= highest:
            limits = f", from {lowest} to {highest}" if math.isfinite(highest) else " in dB"
            raise ValueError(f"must be [lowest, highest]{limits}; got {list(found)}")
        return found

    return AfterValidator(check)


Decibels = Annotated[Range, _within(-math.inf, math.inf)]


class AugmentConfig(Config):
    """The augmentation of training audio; the `augment:` section of a recipe.

    A range has the form [lowest, highest]. A value is drawn from the range uniformly for each utterance.
    """

    speed: tuple[Annotated[float, Field(ge=0.5, le=2.0)], ...] = Field(default=(0.9, 1.0, 1.1), min_length=1)
    """Speed factors; one is drawn for each utterance."""
    tempo: Annotated[Range, _within(0.5, 2.0)] | None = None
    """Range of tempo factors, which do not change the pitch."""
    vocal_tract: Annotated[Range, _within(0.75, 1.3)] | None = None
    """Range of factors for the frequency axis (vocal tract length perturbation)."""
    silence: Annotated[Range, _within(0.0, 5.0)] | None = None
    """Seconds of silence before and after an utterance, drawn separately for each end: digital silence, or noise 15 to
    45 dB below the speech."""
    silence_probability: Share = 0.5
    """Share of utterances with silence around them."""
    reverberation: Annotated[Range, _within(0.01, 2.0)] | None = None
    """Seconds in which the echo of a synthetic room decays by 60 dB."""
    reverberation_probability: Share = 0.3
    """Share of utterances with reverberation."""
    babble_snr: Decibels | None = None
    """Range of signal-to-noise ratios, in dB, of added speech from the same mini-batch."""
    babble_probability: Share = 0.3
    """Share of utterances with added speech."""
    noise_snr: Decibels | None = None
    """Range of signal-to-noise ratios, in dB, of added noise."""
    noise_probability: Share = 0.5
    """Share of utterances with added noise."""
    noise_colour: Literal["white", "random"] = "white"
    """Colour of the noise. With `random`, its power falls with frequency by a random amount from 0 (white) to 6 dB per
    octave."""
    gain_db: Decibels | None = None
    """Range of level changes, in dB."""
    codecs: tuple[Codec, ...] = ()
    """Codecs to draw from, such as `telephone`, `gsm`, `rate-6000` and `opus-8`."""
    codec_probability: Share = 0.5
    """Share of utterances that go through a codec."""
    spec_augment: SpecAugmentConfig | None = SpecAugmentConfig()
    """Masks over the features; null turns them off."""
    clean_start: Annotated[int, Field(ge=0)] = 0
    """Number of mini-batches at the start of a run without noise, babble, reverberation and codecs."""

    @classmethod
    def none(cls) -> AugmentConfig:
        """A configuration that leaves all audio unchanged."""
        return cls(speed=(1.0,), spec_augment=None)

    def at(self, step: int) -> AugmentConfig:
        """The augmentation of mini-batch number `step` of a run, counted from 0."""
        if step >= self.clean_start:
            return self
        return self.model_copy(update={"reverberation": None, "babble_snr": None, "noise_snr": None, "codecs": ()})

    @property
    def fastest(self) -> tuple[float, float]:
        """The highest speed and tempo factors."""
        return max(self.speed), 1.0 if self.tempo is None else self.tempo[1]


def augmented(
    waveforms: Sequence[torch.Tensor | DataError], sampling_rate: int, config: AugmentConfig, seed: int
) -> list[torch.Tensor | DataError]:
    """Augment the waveforms of a micro-batch; errors among `waveforms` stay in their places.

    The randomness of a waveform depends only on `seed` and its place. An error therefore does not affect the other
    waveforms, unless speech of the batch is mixed into them (`babble_snr`).
    """
    found = list(waveforms)
    for place, each in enumerate(derive_seeds(seed, "waveform", len(waveforms))):
        if isinstance(waveform := waveforms[place], DataError):
            continue
        others = [] if config.babble_snr is None else [*waveforms[:place], *waveforms[place + 1 :]]
        usable = [other for other in others if not isinstance(other, DataError)]
        try:
            found[place] = augment_waveform(waveform, sampling_rate, config, np.random.default_rng(each), usable)
        except DataError as error:
            found[place] = error
    return found


def augment_waveform(
    waveform: torch.Tensor,
    sampling_rate: int,
    config: AugmentConfig,
    generator: np.random.Generator,
    others: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Change the speed of `waveform` `[T]` (its length is divided by the factor and rounded up). Then add
    reverberation, babble from `others` and noise, change the level, and apply a codec."""
    import torch

    from starling.speech.resampling import resampled

    factor = float(generator.choice(np.asarray(config.speed)))
    if factor != 1.0:
        waveform = resampled(waveform, round(sampling_rate * factor), sampling_rate)
    if config.silence is not None and generator.random() < config.silence_probability:
        waveform = _surrounded(waveform, sampling_rate, config.silence, generator)
    if config.reverberation is not None and generator.random() < config.reverberation_probability:
        waveform = _convolved(waveform, impulse_response(sampling_rate, config.reverberation, generator))
    if config.babble_snr is not None and others and generator.random() < config.babble_probability:
        snr = generator.uniform(*config.babble_snr)
        babble = _babble(len(waveform), others, generator)
        power, level = float(waveform.square().mean()), float(babble.square().mean())
        if level > 0.0:
            waveform = waveform + babble * math.sqrt(power / level / 10 ** (snr / 10))
    if config.noise_snr is not None and generator.random() < config.noise_probability:
        snr = generator.uniform(*config.noise_snr)
        power = float(waveform.square().mean())
        if config.noise_colour == "white":
            noise = torch.from_numpy(generator.standard_normal(len(waveform), dtype=np.float32))
        else:
            noise = _coloured_noise(len(waveform), generator)
        waveform = waveform + noise * math.sqrt(power / 10 ** (snr / 10))
    if config.gain_db is not None:
        waveform = waveform * 10 ** (generator.uniform(*config.gain_db) / 20)
    if config.codecs and generator.random() < config.codec_probability:  # last: the codec also encodes the noise
        sent = transmitted(waveform.numpy(), sampling_rate, str(generator.choice(config.codecs)))
        waveform = torch.from_numpy(sent)
    return waveform


def draw_warps(config: AugmentConfig, seed: int, count: int) -> list[Warp]:
    """The tempo and the warping of the frequency axis of each utterance of a micro-batch, rounded to 0.01."""
    warps = []
    for each in derive_seeds(seed, "warp", count):
        generator = np.random.default_rng(each)
        drawn = [1.0 if each is None else generator.uniform(*each) for each in (config.tempo, config.vocal_tract)]
        warps.append(Warp(*(round(round(each / _STEP) * _STEP, 2) for each in drawn)))
    return warps


def impulse_response(sampling_rate: int, decay: Range, generator: np.random.Generator) -> torch.Tensor:
    """A room's impulse response `[T]`: a direct sound of 1, and noise whose power decays by 60 dB in the drawn time.
    The power of the noise is 0 to 10 dB below that of the direct sound."""
    import torch

    seconds = generator.uniform(*decay)
    below = generator.uniform(0.0, 10.0)
    tail = generator.standard_normal(max(2, round(seconds * sampling_rate)))
    tail *= 10.0 ** (-3.0 * np.arange(len(tail)) / len(tail))
    tail[0] = 0.0
    tail *= 10 ** (-below / 20) / np.sqrt(np.sum(tail**2))
    tail[0] = 1.0
    return torch.from_numpy(tail.astype(np.float32))


def _surrounded(
    waveform: torch.Tensor, sampling_rate: int, seconds: Range, generator: np.random.Generator
) -> torch.Tensor:
    """The waveform `[T]` with silence or faint noise before and after it."""
    import torch

    before, after = (round(generator.uniform(*seconds) * sampling_rate) for _ in range(2))
    if generator.random() < _DIGITAL:
        level = 0.0
    else:
        level = float(waveform.square().mean().sqrt()) * 10 ** (generator.uniform(-45.0, -15.0) / 20)
    noise = torch.from_numpy(generator.standard_normal(before + after, dtype=np.float32)) * level
    return torch.cat([noise[:before], waveform, noise[before:]])


def _convolved(waveform: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """The waveform `[T]` convolved with an impulse response, and cut to the waveform's length."""
    import torch

    size = 1 << (len(waveform) + len(response) - 1).bit_length()
    product = torch.fft.rfft(waveform, size) * torch.fft.rfft(response, size)
    heard: torch.Tensor = torch.fft.irfft(product, size)[: len(waveform)]
    return heard


def _babble(num_samples: int, others: Sequence[torch.Tensor], generator: np.random.Generator) -> torch.Tensor:
    """The sum `[num_samples]` of one to three of `others`, each repeated from a random position."""
    import torch

    chosen = generator.choice(len(others), min(len(others), int(generator.integers(1, 4))), replace=False)
    mixed = torch.zeros(num_samples)
    for place in chosen.tolist():
        other = others[place]
        start = int(generator.integers(len(other)))
        mixed += other[(start + torch.arange(num_samples)) % len(other)]
    return mixed


def _coloured_noise(num_samples: int, generator: np.random.Generator) -> torch.Tensor:
    """Noise `[num_samples]` with a mean power of 1 and a power spectrum proportional to 1 / f^a; a is drawn from 0 to
    2.

    The noise repeats after 16,384 samples, because a longer FFT, or one whose size is not a power of 2, would take
    longer than the rest of the augmentation.
    """
    import torch

    size = min(1 << 14, 1 << (num_samples - 1).bit_length())
    spectrum = torch.fft.rfft(torch.from_numpy(generator.standard_normal(size, dtype=np.float32)))
    spectrum *= torch.arange(len(spectrum)).clamp(min=1) ** (-generator.uniform(0.0, 2.0) / 2)
    noise: torch.Tensor = torch.fft.irfft(spectrum, size).repeat(-(-num_samples // size))[:num_samples]
    noise /= noise.square().mean().sqrt()
    return noise


def spec_augment(
    features: Sequence[torch.Tensor | DataError], config: SpecAugmentConfig, seed: int
) -> list[torch.Tensor | DataError]:
    """Masked copies of `features` (`[frames, F]` each), with errors left in place; a pure function of its arguments.

    lhotse draws masks from the global generators of torch and NumPy, which are seeded for each utterance and then
    restored. Masked values are replaced by the utterance's mean. Utterances with fewer than 20 frames are not changed.
    """
    import torch

    found = list(features)
    with borrowed_generators(seed):
        for place, each in enumerate(derive_seeds(seed, "SpecAugment", len(features))):
            if not isinstance(matrix := features[place], DataError):
                torch.default_generator.manual_seed(each)
                np.random.seed(each & 0xFFFFFFFF)
                found[place] = _masked(matrix, config)
    return found


def _masked(features: torch.Tensor, config: SpecAugmentConfig) -> torch.Tensor:
    import torch
    from lhotse.dataset.signal_transforms import mask_along_axis_optimized, time_warp

    if len(features) < _MIN_FRAMES_TO_MASK or torch.rand(()) >= config.probability:
        return features
    mean = float(features.mean())
    features = time_warp(features, config.time_warp) if config.time_warp else features.clone()
    if config.num_frequency_masks:
        width = min(config.frequency_mask_size, features.shape[1])
        features = mask_along_axis_optimized(features, width, config.num_frequency_masks, mean, axis=2)
    budget = int(config.max_time_masked * len(features))
    masks = min(config.num_time_masks, budget)
    if masks:
        width = min(config.time_mask_size, budget // masks)
        features = mask_along_axis_optimized(features, width, masks, mean, axis=1)
    return features
