"""The benchmark of loading reads the same audio on both sides; `make bench` makes the measurement itself."""

from pathlib import Path

import numpy as np

from benchmarks import loading
from tests.speech.tones import song_set


def test_both_sides_read_every_utterance_once(tmp_path: Path, monkeypatch) -> None:
    """Our epoch has all utterances in a different order, and the joined set has the same samples."""
    songs = song_set(tmp_path / "songs", 30)
    seen = np.concatenate(list(loading.epoch_of(songs)))
    assert sorted(seen.tolist()) == list(range(30)) and seen.tolist() != list(range(30))
    monkeypatch.setattr(loading, "READ_SECONDS", 3.0)
    joined = loading._joined(songs, tmp_path / "joined")
    assert 1 < len(joined) < 30
    audio = np.concatenate([joined.audio(index) for index in range(len(joined))])
    assert np.array_equal(audio, np.concatenate([songs.audio(index) for index in range(30)]))


def test_speed_and_ratios_are_reported_for_a_set(tmp_path: Path, monkeypatch) -> None:
    """One speed and three ratios are reported, each with its bar and its subject."""
    monkeypatch.setattr(loading, "ROUNDS", 2)
    speed, *ratios = loading.compared("songs", song_set(tmp_path / "songs", 6))
    assert (speed.bar, [each.bar for each in ratios]) == (loading.LEAST_SPEED, [loading.LEAST_RATIO] * 3)
    assert speed.ratio > 0 and all(each.ratio > 0 for each in ratios)
    assert all(each.name.startswith("loading songs (8 kHz, ") for each in (speed, *ratios))
