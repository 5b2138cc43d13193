"""Augmentation: what it does to audio, and that its chance is ours alone."""

import random

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from starling.speech.augmentation import AugmentConfig, SpecAugmentConfig, augment_waveform, spec_augment
from starling.speech.chance import borrowed_generators


def tone(frequency: float, num_samples: int = 8000) -> torch.Tensor:
    return torch.sin(2 * torch.pi * frequency * torch.arange(num_samples) / 8000)


def loudest_frequency(waveform: torch.Tensor) -> float:
    return float(torch.fft.rfft(waveform).abs().argmax()) * 8000 / len(waveform)


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_speed_changes_length_and_pitch_by_its_factor(factor):
    """Speed 1.1 is 1.1 times as high and 1/1.1 times as long, as `sox speed` does it."""
    faster = augment_waveform(tone(1000), 8000, AugmentConfig(speed=(factor,)), np.random.default_rng(0))
    assert len(faster) == np.ceil(8000 / factor)
    assert loudest_frequency(faster) == pytest.approx(1000 * factor, abs=2)


def test_noise_has_the_power_that_was_asked_for():
    """Noise of 10 dB below the speech has a tenth of its power."""
    config = AugmentConfig(speed=(1.0,), noise_snr=(10, 10), noise_probability=1)
    noise = augment_waveform(tone(1000), 8000, config, np.random.default_rng(0)) - tone(1000)
    assert float(noise.square().mean()) == pytest.approx(0.5 / 10, rel=0.05)


def test_masks_stay_within_their_limits():
    """Masked bands and frames never exceed what the options allow, and some places are masked."""
    config = SpecAugmentConfig(probability=1, num_frequency_masks=2, frequency_mask_size=6, max_time_masked=0.2)
    features = [torch.randn(150, 40, generator=torch.Generator().manual_seed(seed)) for seed in range(50)]
    masked_anything = 0
    for before, after in zip(features, spec_augment(features, config, seed=3), strict=True):
        changed = before != after
        bands, frames = changed.all(0).sum(), changed.all(1).sum()
        assert bands <= 2 * 5
        assert frames <= 0.2 * 150
        masked_anything += int(changed.any())
    assert masked_anything >= 45


@pytest.mark.parametrize("num_frames", [1, 5, 19, 20, 21, 60])
@pytest.mark.parametrize("options", [{}, {"num_time_masks": 0}, {"num_frequency_masks": 0}, {"time_warp": 5}])
def test_any_length_can_be_masked(num_frames, options):
    """Short utterances and switched-off masks are no special case for the caller."""
    config = SpecAugmentConfig(probability=1, **options)
    (masked,) = spec_augment([torch.ones(num_frames, 40)], config, seed=0)
    assert masked.shape == (num_frames, 40)
    assert torch.isfinite(masked).all()


def test_masking_leaves_its_input_alone():
    """The features given are not written to."""
    features = torch.randn(100, 40)
    before = features.clone()
    spec_augment([features], SpecAugmentConfig(probability=1), seed=0)
    assert torch.equal(features, before)


def test_borrowed_generators_are_given_back():
    """Draws before and after a loan continue one sequence, for Python, NumPy and torch."""

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    with borrowed_generators(7):
        expected = [draw(), draw()]
        inside = draw()
    with borrowed_generators(7):
        first = draw()
        with borrowed_generators(99):
            draw()
        assert [first, draw()] == expected
        assert draw() == inside


@pytest.mark.parametrize("wrong", [{"speed": []}, {"speed": [0.1]}, {"noise_snr": [20, 10]}, {"sped": [1.0]}])
def test_impossible_augmentation_is_refused(wrong):
    """Empty or absurd speeds, reversed ranges and unknown keys never start a run."""
    with pytest.raises(ValidationError):
        AugmentConfig.model_validate(wrong)
