"""The level of speech and its pauses: features that depend neither on silence nor on the level."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tones import RATE, performance

from starling.speech.features import FeatureConfig, LogMel
from starling.speech.levels import active, normalised, without_long_pauses
from starling.speech.models import model_config
from starling.speech.recogniser import Heard, Recogniser
from starling.speech.tokens import CharacterTokenizer
from starling.speech.transcribing.transcriber import Transcriber

Samples = NDArray[np.float32]
ROBUST = FeatureConfig(normalise="active", pauses=0.3)
PAD = 4000  # samples, 50 frames
LOUDEST, HIGHEST = 0.001, 2.0


def spoken(seed: int = 0, noise: float = 0.0) -> Samples:
    """Four words with short gaps, which begin and end with the recording."""
    words, gaps = ["DO", "RE", "MI", "FA"], [0.0, 0.05, 0.1, 0.05, 0.0]
    return performance(words, gaps, np.random.default_rng(seed), noise=noise)[0]


def padded(samples: Samples, noise: float, length: int = PAD, seed: int = 1) -> Samples:
    generator = np.random.default_rng(seed)
    before, after = (noise * generator.standard_normal(length) for _ in range(2))
    return np.concatenate([before, samples, after]).astype(np.float32)


def kept(samples: Samples) -> NDArray[np.int64]:
    layer = LogMel(ROBUST, RATE)
    return layer.kept(layer.energies([torch.from_numpy(samples)]))[0]


@given(st.floats(1e-3, 1.0), st.integers(1, 50), st.integers(0, 500), st.sampled_from([0.0, 15.0, 17.0, 60.0]))
def test_active_frames_are_at_most_15_9_db_below_their_own_level(
    power: float, loud: int, silent: int, below: float
) -> None:
    """As ITU-T P.56 defines it, whatever share of the recording is silent; faint active frames lower the level."""
    faint = power * 10 ** (-below / 10)
    powers = np.array([power] * loud + [faint] * 20 + [0.0] * silent)
    found = active(powers)
    assert found[:loud].all()
    assert not found[loud + 20 :].any()
    level = (power * loud + faint * 20) / (loud + 20)
    assert found[loud : loud + 20].all() == (faint * 10**1.59 >= level)


def test_silence_alone_is_active() -> None:
    """There is nothing else to be active."""
    assert active(np.zeros(7)).all()
    assert np.array_equal(without_long_pauses([np.full((100, 8), 1e-14)], 30)[0], np.arange(100))
    features = LogMel(ROBUST, RATE)(torch.zeros(RATE))
    torch.testing.assert_close(features, torch.zeros_like(features), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("decibels", [-30.0, -6.0, 6.0])
def test_the_level_changes_no_feature(decibels: float) -> None:
    samples = torch.from_numpy(spoken(noise=0.0005))
    layer = LogMel(ROBUST, RATE)
    torch.testing.assert_close(layer(samples * 10 ** (decibels / 20)), layer(samples), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("noise", [0.0, 0.001])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), length=st.integers(PAD, 40 * PAD))
def test_silence_around_speech_is_not_heard(noise: float, seed: int, length: int) -> None:
    """All frames of the speech are heard, and at most a few around it, however long the silence is."""
    samples = spoken(seed)
    frames = round(len(samples) / 80)
    found = kept(padded(samples, noise, length // 80 * 80)) - length // 80
    assert set(range(3, frames - 3)) <= set(found.tolist())
    assert found.min() >= -5
    assert found.max() <= frames + 5


def test_a_long_pause_is_heard_for_the_configured_time() -> None:
    """Silence between words is kept half at its beginning and half at its end; a shorter pause is kept whole."""
    first, second = spoken(0), spoken(1)
    for seconds, heard in ((0.2, 0.2), (1.0, 0.3), (5.0, 0.3)):
        silence = np.zeros(round(seconds * RATE), np.float32)
        found = kept(np.concatenate([first, silence, second]))
        left_out = (len(first) + len(silence) + len(second)) / RATE - len(found) * 0.01
        assert left_out == pytest.approx(seconds - heard, abs=0.08)
        assert [each for each in np.diff(found) if each > 1] == (
            [] if seconds == heard else [pytest.approx(left_out * 100 + 1, abs=8)]
        )


def test_a_fricative_at_an_end_is_no_noise_floor() -> None:
    """A faint even sound of 0.25 s is speech, even though it is the quietest of the recording; one of a second is
    noise."""
    generator = np.random.default_rng(0)
    samples = spoken()
    fricative = (0.004 * generator.standard_normal(RATE)).astype(np.float32)
    frames = round(len(samples) / 80)
    assert kept(np.concatenate([samples, fricative[:2000]])).max() >= frames + 22
    assert kept(np.concatenate([samples, fricative])).max() <= frames + 5


def test_in_loud_noise_nothing_is_left_out() -> None:
    """Loud noise cannot be told from speech."""
    samples = padded(spoken(), 0.0)
    noisy = samples + 0.05 * np.random.default_rng(3).standard_normal(len(samples)).astype(np.float32)
    assert len(kept(noisy)) == round(len(samples) / 80)


def test_an_utterance_that_ctc_could_not_align_keeps_its_pauses() -> None:
    samples = torch.from_numpy(padded(spoken(), 0.0))
    layer = LogMel(ROBUST, RATE)
    few, all_frames = len(layer(samples)), layer.num_frames(len(samples))
    assert few < all_frames - 80
    assert [len(layer.batch([samples], least=[least])[0]) for least in (few, few + 1)] == [few, all_frames]


def test_normalised_features_have_a_floor() -> None:
    """30 dB below the level of speech, digital silence and faint noise are nearly the same, and loud frames are nearly
    unchanged."""
    energies = np.log(np.array([[1.0, 1.0]] * 10 + [[1e-12, 1e-12]] * 90, np.float32))
    (found,) = normalised([energies])
    np.testing.assert_allclose(found[:10], 0.0, atol=1e-6)
    np.testing.assert_allclose(found[10:], (np.log(1e-3) - np.log(1.001)) / 3, atol=1e-4)


def test_unheard_frames_are_blank_and_split_no_token() -> None:
    """Rows move to their places in time; a token that continues after a pause is heard once."""
    rows = torch.full((1, 5, 3), -9.0)
    for row, token in enumerate([1, 0, 2, 2, 1]):
        rows[0, row, token] = -0.1
    heard = Heard(rows, torch.tensor([5]), None, torch.tensor([5]))
    found = heard.in_time([np.array([1, 2, 3, 6, 9])], [12])
    assert found.lengths.tolist() == [12]
    assert found.log_probs[0].argmax(1).tolist() == [0, 1, 0, 2, 2, 2, 2, 0, 0, 1, 0, 0]
    assert torch.equal(found.log_probs[0, [1, 2, 3, 6, 9]], rows[0])


@pytest.mark.parametrize("subsampling", [1, 2, 4])
def test_words_have_their_times_after_silence(subsampling: int) -> None:
    """A transcript of a padded recording is the same, later by the padding, with the same words and scores."""
    config = model_config(name="blstm", preset="tiny", subsampling=subsampling)
    recogniser = Recogniser.create(config, LogMel(ROBUST, RATE), CharacterTokenizer(" AB"), seed=4)
    samples = spoken()
    with torch.no_grad():
        output = recogniser.model.get_submodule("output")
        output.weight.mul_(30.0)
        output.bias.sub_(recogniser.listen([torch.from_numpy(samples)]).log_probs.mean((0, 1)))
    alone = recogniser.listen([torch.from_numpy(samples)])
    behind = recogniser.listen([torch.from_numpy(padded(samples, 0.0, 16 * PAD))])
    shift = 16 * 50 // subsampling
    assert behind.lengths.tolist() == [config.encoder_frames(round(len(samples) / 80) + 2 * 16 * 50)]
    inside = slice(8, int(alone.lengths[0]) - 8)
    differing = alone.log_probs[0, inside].argmax(1) != behind.log_probs[0, shift:][inside].argmax(1)
    assert float(differing.float().mean()) < 0.3
    assert not behind.log_probs[0, : shift - 8].argmax(1).any()
    words = [
        word for segment in Transcriber(recogniser).transcribe(samples, RATE).segments for word in segment.words or ()
    ]
    assert words
    assert all(first.end <= second.start + 1e-9 for first, second in pairwise(words))
