"""Augmentation: its effects on audio, and that only its own seeds determine them."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from starling.chance import borrowed_generators
from starling.speech.augmentation import (
    AugmentConfig,
    SpecAugmentConfig,
    augment_waveform,
    draw_warps,
    impulse_response,
    spec_augment,
)
from starling.speech.features import Warp


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


def added(
    config: AugmentConfig, speech: torch.Tensor, seed: int = 0, others: Sequence[torch.Tensor] = ()
) -> np.ndarray:
    """The signal that augmentation adds to speech."""
    return (augment_waveform(speech, 8000, config, np.random.default_rng(seed), others) - speech).double().numpy()


@pytest.mark.parametrize("seed", range(6))
def test_silence_surrounds_the_speech(seed: int) -> None:
    """Digital silence or faint noise of random length is added at each end; the speech inside is unchanged."""
    speech = tone(1000) / 4
    config = AugmentConfig(speed=(1.0,), silence=(0.1, 0.3), silence_probability=1.0)
    found = augment_waveform(speech, 8000, config, np.random.default_rng(seed))
    (before,) = [place for place in range(800, 2401) if torch.equal(found[place : place + 8000], speech)]
    after = len(found) - before - 8000
    assert 800 <= after <= 2400
    level = torch.cat([found[:before], found[before + 8000 :]]).square().mean().sqrt() / speech.square().mean().sqrt()
    assert level == 0.0 or -60.5 <= 20 * np.log10(level) <= -19.5
    without = config.model_copy(update={"silence_probability": 0.0})
    assert torch.equal(augment_waveform(speech, 8000, without, np.random.default_rng(seed)), speech)


def test_coloured_noise_has_the_power_that_was_asked_for_and_falls_with_frequency():
    """Its power is that of white noise; its spectrum is 1/f^a with an a from 0 to 2, drawn for each utterance."""
    config = AugmentConfig(speed=(1.0,), noise_snr=(10, 10), noise_probability=1, noise_colour="random")
    slopes = []
    for seed in range(20):
        noise = added(config, tone(1000, 32000), seed)
        assert np.mean(noise**2) == pytest.approx(0.5 / 10, rel=1e-3)
        power = np.abs(np.fft.rfft(noise)) ** 2
        octaves = np.log2([power[500:1000].mean(), power[8000:16000].mean()])
        slopes.append((octaves[0] - octaves[1]) / 4)
    assert -0.1 < min(slopes) < 0.5
    assert 1.5 < max(slopes) < 2.1


def test_babble_is_speech_of_the_others_at_the_level_that_was_asked_for():
    """One to three other utterances are added, each from a random position on, and nothing else."""
    config = AugmentConfig(speed=(1.0,), babble_snr=(20, 20), babble_probability=1)
    others = [tone(frequency, 2000) for frequency in (500, 1500, 2500)]
    numbers = set()
    for seed in range(20):
        babble = added(config, tone(1000), seed, others)
        assert np.mean(babble**2) == pytest.approx(0.5 / 100, rel=1e-3)
        power = np.abs(np.fft.rfft(babble)) ** 2
        heard = [power[frequency - 2 : frequency + 3].sum() for frequency in (500, 1500, 2500)]
        assert sum(heard) / power.sum() > 0.99
        numbers.add(sum(each > 0.05 * max(heard) for each in heard))
    assert numbers == {1, 2, 3}
    assert not added(config, tone(1000)).any()


def test_a_rooms_echo_decays_by_60_db_in_the_time_that_was_drawn():
    """The direct sound comes first and is 1; the echo's power falls on a straight line in dB."""
    response = impulse_response(8000, (0.5, 0.5), np.random.default_rng(0)).double().numpy()
    assert len(response) == 4000
    assert response[0] == 1.0
    early, late = (10 * np.log10(np.mean(response[part] ** 2)) for part in (slice(400, 800), slice(3200, 3600)))
    assert early - late == pytest.approx(60 * 2800 / 4000, abs=1.5)
    assert 0.1 <= np.sum(response[1:] ** 2) <= 1.0001


def test_reverberation_is_a_convolution_with_a_room():
    """The result equals NumPy's convolution, cut to the utterance's length."""
    config = AugmentConfig(speed=(1.0,), reverberation=(0.1, 0.3), reverberation_probability=1)
    generator = np.random.default_rng(5)
    generator.choice([1.0])
    generator.random()
    room = impulse_response(8000, (0.1, 0.3), generator).double().numpy()
    speech = tone(440, 3001)
    heard = augment_waveform(speech, 8000, config, np.random.default_rng(5)).double().numpy()
    np.testing.assert_allclose(heard, np.convolve(speech.double().numpy(), room)[:3001], atol=1e-5)


def test_the_level_changes_by_as_much_as_was_asked_for():
    """The change of level is measured in dB."""
    config = AugmentConfig(speed=(1.0,), gain_db=(-6, -6))
    louder = augment_waveform(tone(1000), 8000, config, np.random.default_rng(0))
    torch.testing.assert_close(louder, tone(1000) * 10 ** (-6 / 20))


def test_warps_are_drawn_from_their_ranges_in_steps_of_a_hundredth():
    """This keeps mel banks few; nothing is drawn where nothing is to be changed."""
    config = AugmentConfig(tempo=(0.8, 1.25), vocal_tract=(0.9, 1.1))
    drawn = draw_warps(config, 1, 300)
    tempos, frequencies = {each.tempo for each in drawn}, {each.frequency for each in drawn}
    assert (min(tempos), max(tempos), min(frequencies), max(frequencies)) == (0.8, 1.25, 0.9, 1.1)
    assert frequencies <= {hundredths / 100 for hundredths in range(90, 111)}
    assert draw_warps(AugmentConfig(), 1, 2) == [Warp(1.0, 1.0)] * 2


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
    """Short utterances and switched-off masks are not special cases for the caller."""
    config = SpecAugmentConfig(probability=1, **options)
    (masked,) = spec_augment([torch.ones(num_frames, 40)], config, seed=0)
    assert masked.shape == (num_frames, 40)
    assert torch.isfinite(masked).all()


def test_masking_leaves_its_input_alone():
    """The given features are not changed."""
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"speed": []},
        {"speed": [0.1]},
        {"noise_snr": [20, 10]},
        {"sped": [1.0]},
        {"tempo": [0.1, 1.0]},
        {"vocal_tract": [1.1, 0.9]},
        {"vocal_tract": [1.0, 1.5]},
        {"reverberation": [0.0, 0.3]},
        {"babble_snr": [float("nan"), 10]},
    ],
)
def test_impossible_augmentation_is_refused(wrong):
    """Empty or absurd speeds, reversed ranges and unknown keys never start a run."""
    with pytest.raises(ValidationError):
        AugmentConfig.model_validate(wrong)


def test_a_clean_start_leaves_masking_sounds_out_of_the_first_mini_batches() -> None:
    """Speed, silence, level and SpecAugment are active from the first mini-batch."""
    whole = AugmentConfig(
        silence=(0.0, 0.5),
        noise_snr=(5, 30),
        babble_snr=(5, 25),
        reverberation=(0.05, 0.4),
        codecs=("gsm",),
        gain_db=(-6, 6),
        clean_start=3,
    )
    assert whole.at(3) is whole
    clean = whole.at(2)
    assert {name for name, value in clean if value != getattr(whole, name)} == {
        "noise_snr",
        "babble_snr",
        "reverberation",
        "codecs",
    }
    assert AugmentConfig().at(0) == AugmentConfig()
