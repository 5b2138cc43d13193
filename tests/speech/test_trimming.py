"""Pauses before and after speech are trimmed, and nothing else."""

import numpy as np
import pytest

from starling.speech.corpora import Utterance
from starling.speech.usable import Checker, Checking, FilterConfig, trimmed

RATE = 8000


def recording(before: float, speech: float, behind: float, noise: float = 1e-3) -> np.ndarray:
    """Tones that begin and end suddenly, in faint noise."""
    generator = np.random.default_rng(1)
    samples = noise * generator.standard_normal(round((before + speech + behind) * RATE))
    begin, end = round(before * RATE), round((before + speech) * RATE)
    samples[begin:end] += 0.3 * np.sin(2 * np.pi * 900 * np.arange(end - begin) / RATE)
    return samples.astype(np.float32)


@pytest.mark.parametrize("margin", [0.0, 0.1, 0.25])
@pytest.mark.parametrize(("before", "behind"), [(1.0, 0.7), (0.0, 1.0), (0.6, 0.0)])
def test_the_margin_is_kept_on_either_side_of_speech(margin: float, before: float, behind: float) -> None:
    """It is kept to 30 ms, the reach of the levels' mean; no sample of the speech is lost."""
    samples = recording(before, 1.5, behind)
    kept = trimmed(samples, RATE, margin)
    place = next(start for start in range(len(samples)) if np.array_equal(samples[start : start + len(kept)], kept))
    begin, end = place / RATE, (place + len(kept)) / RATE
    assert max(0.0, before - margin - 0.03) <= begin <= before
    assert before + 1.5 <= end <= min(before + 1.5 + margin + 0.03, before + 1.5 + behind) + 1e-9


def test_speech_up_to_the_last_sample_is_kept() -> None:
    """This includes speech in an incomplete last frame."""
    samples = recording(1.0, 1.505, 0.0)
    assert len(samples) % (RATE // 100)
    kept = trimmed(samples, RATE, 0.0)
    assert len(kept) < len(samples)
    np.testing.assert_array_equal(kept, samples[-len(kept) :])


@pytest.mark.parametrize("samples", [recording(0, 0, 2), recording(0, 2, 0), np.zeros(16000, np.float32)])
def test_a_recording_without_pauses_stays_as_it_is(samples: np.ndarray) -> None:
    """Noise, a tone from end to end, and silence have no pauses."""
    np.testing.assert_array_equal(trimmed(samples, RATE, 0.1), samples)


@pytest.mark.parametrize("length", [0, 1, 79, 400])
def test_very_short_recordings_are_not_an_error(length: int) -> None:
    """An empty recording is not, either."""
    assert len(trimmed(np.ones(length, np.float32), RATE, 0.0)) == length


def test_preparation_trims_recordings_when_asked_to() -> None:
    """They are trimmed after the length limits are checked, also if recordings are read again to be joined into
    strings."""
    samples = recording(1.0, 1.5, 1.0)
    utterance = Utterance("a", "s", "A", "a.wav", lambda: (samples, RATE))
    checker = Checker(Checking("set", RATE, "upper", FilterConfig(trim=0.1, min_seconds=3.0)))
    ((_, _, audio, _),) = checker.usable([utterance])
    assert 1.7 <= len(audio) / RATE <= 1.77
    again, rate = checker.reread(utterance).read()
    assert rate == RATE
    np.testing.assert_array_equal(again, audio)
