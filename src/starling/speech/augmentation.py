"""Augmentation of training audio: speed, noise, codecs, SpecAugment. All randomness comes from explicit seeds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field, field_validator, model_validator

from starling.configuration import Config
from starling.speech.codecs import Codec, transmitted_tensor

if TYPE_CHECKING:
    import torch

_MIN_FRAMES_TO_MASK = 20  # below this, masks would hide whole phones or be empty


class SpecAugmentConfig(Config):
    """Masks over time and frequency (Park et al. 2019), with lhotse's parameters."""

    probability: float = Field(default=0.9, ge=0, le=1, description="share of utterances that are masked")
    time_warp: int = Field(default=0, ge=0, description="frames by which a point may be moved; 0: no warping")
    num_frequency_masks: int = Field(default=2, ge=0, description="masks over bands, per utterance")
    frequency_mask_size: int = Field(default=8, ge=1, description="a mask covers fewer bands than this")
    num_time_masks: int = Field(default=5, ge=0, description="masks over frames, per utterance")
    time_mask_size: int = Field(default=20, ge=1, description="a mask covers fewer frames than this")
    max_time_masked: float = Field(default=0.15, ge=0, le=1, description="share of the frames that masks may cover")


class AugmentConfig(Config):
    """How training audio is augmented; the `augment:` section of a recipe."""

    speed: tuple[float, ...] = Field(default=(0.9, 1.0, 1.1), description="factors drawn from, one per utterance")
    noise_snr: tuple[float, float] | None = Field(default=None, description="dB range of added white noise")
    noise_probability: float = Field(default=0.5, ge=0, le=1, description="share of utterances with added noise")
    codecs: tuple[Codec, ...] = Field(
        default=(), description="codecs drawn from: telephone, gsm, rate-HZ, opus-KBITS …"
    )
    codec_probability: float = Field(default=0.5, ge=0, le=1, description="share of utterances that go through a codec")
    spec_augment: SpecAugmentConfig | None = SpecAugmentConfig()
    """Masks over the features; null: none."""

    @field_validator("speed")
    @classmethod
    def _speeds_are_possible(cls, speed: tuple[float, ...]) -> tuple[float, ...]:
        if not speed or any(not 0.5 <= factor <= 2.0 for factor in speed):
            raise ValueError(f"speed must list factors from 0.5 to 2.0, such as [0.9, 1.0, 1.1]; got {list(speed)}")
        return speed

    @model_validator(mode="after")
    def _snr_is_a_range(self) -> AugmentConfig:
        if self.noise_snr is not None and self.noise_snr[0] > self.noise_snr[1]:
            raise ValueError(f"noise_snr must be [lowest, highest] in dB; got {list(self.noise_snr)}")
        return self

    @classmethod
    def none(cls) -> AugmentConfig:
        """No augmentation at all."""
        return cls(speed=(1.0,), spec_augment=None)


def augment_waveform(
    waveform: torch.Tensor, sampling_rate: int, config: AugmentConfig, generator: np.random.Generator
) -> torch.Tensor:
    """`waveform` `[T]` with its speed changed (length divided by the factor, rounded up), white noise added,
    and sent through a codec."""
    import torch

    from starling.speech.features import resample

    factor = float(generator.choice(np.asarray(config.speed)))
    if factor != 1.0:
        waveform = resample(waveform[None], round(sampling_rate * factor), sampling_rate)[0]
    if config.noise_snr is not None and generator.random() < config.noise_probability:
        snr = generator.uniform(*config.noise_snr)
        power = float(waveform.square().mean())
        noise = generator.standard_normal(len(waveform), dtype=np.float32)
        waveform = waveform + torch.from_numpy(noise) * math.sqrt(power / 10 ** (snr / 10))
    if config.codecs and generator.random() < config.codec_probability:  # last: a codec hears the noise, too
        waveform = transmitted_tensor(waveform, sampling_rate, str(generator.choice(config.codecs)))
    return waveform


def spec_augment(features: list[torch.Tensor], config: SpecAugmentConfig, seed: int) -> list[torch.Tensor]:
    """Masked copies of `features` (`[frames, F]` each); a pure function of its arguments.

    lhotse draws masks from the global generators, which are seeded for it and then restored. Masked values are replaced
    by the utterance's mean. Utterances with fewer than 20 frames are not changed.
    """
    from starling.speech.chance import borrowed_generators

    with borrowed_generators(seed):
        return [_masked(each, config) for each in features]


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
