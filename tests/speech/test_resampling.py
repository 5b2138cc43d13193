"""Resampling equals lhotse's, and audio in pieces gives the same as the whole."""

import numpy as np
import pytest
import torch
from lhotse.augmentation.torchaudio import get_or_create_resampler

from starling.speech.resampling import Resampler, resampled

RATES = [(16000, 8000), (8000, 16000), (22050, 16000), (44100, 8000), (11025, 16000), (48000, 16000)]


@pytest.mark.parametrize(("rate", "wanted"), RATES)
def test_resampling_has_the_bits_of_lhotse(rate: int, wanted: int) -> None:
    """This includes audio of several channels."""
    waveform = torch.randn(2, 4321, generator=torch.Generator().manual_seed(1))
    assert torch.equal(resampled(waveform, rate, wanted), get_or_create_resampler(rate, wanted)(waveform))


@pytest.mark.parametrize(("rate", "wanted"), [*RATES, (8000, 8000), (44099, 8000)])
def test_pieces_of_any_lengths_give_what_the_whole_gives(rate: int, wanted: int) -> None:
    """They agree to rounding, and to the sample."""
    generator = np.random.default_rng(1)
    waveform = generator.standard_normal(20_000).astype(np.float32)
    resampler, parts, place = Resampler(rate, wanted), [], 0
    for size in generator.integers(0, 900, 15):
        parts.append(resampler.feed(waveform[place : place + size]))
        place += size
    parts += [resampler.feed(waveform[place:]), resampler.end()]
    whole = resampled(torch.from_numpy(waveform), rate, wanted).numpy() if rate != wanted else waveform
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=2e-6)


@pytest.mark.parametrize(
    ("rate", "wanted", "ratio"), [(44099, 8000, 404 / 2227), (192_001, 16000, 1 / 12), (8001, 48_000, 6)]
)
def test_rates_without_a_common_divisor_are_resampled_by_a_nearby_ratio(rate: int, wanted: int, ratio: float) -> None:
    """The exact kernel would take gigabytes. A tone stays the same tone."""
    assert ratio == pytest.approx(wanted / rate, rel=1.3e-4)
    tone = np.sin(2 * np.pi * 440 * np.arange(2 * rate) / rate).astype(np.float32)
    found = resampled(torch.from_numpy(tone), rate, wanted).numpy()
    expected = np.sin(2 * np.pi * 440 * np.arange(len(found)) / ratio / rate)
    np.testing.assert_allclose(found[100:-100], expected[100:-100], atol=1e-3)
