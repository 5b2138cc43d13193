"""A language of tones for tests: each word is a different chord, so that a tiny network learns it in seconds."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.speech_writer import SpeechWriter
from starling.speech.store import SpeechSet

WORDS = {"DO": (400, 900), "RE": (600, 1500), "MI": (800, 2100), "FA": (1100, 2700)}
RATE = 8000


def sing(words: list[str], generator: np.random.Generator, rate: int = RATE) -> np.ndarray:
    """Waveform `[T]` of `words`: 0.25 s per word, gaps of 0.08 s, and a little noise."""
    time = np.arange(int(0.25 * rate)) / rate
    envelope = np.sin(np.pi * np.arange(len(time)) / len(time))
    pieces = [np.zeros(int(0.08 * rate))]
    for word in words:
        tones = sum(np.sin(2 * np.pi * frequency * time) for frequency in WORDS[word])
        pieces += [0.2 * envelope * tones, np.zeros(int(0.08 * rate))]
    waveform = np.concatenate(pieces)
    return (waveform + 0.002 * generator.standard_normal(len(waveform))).astype(np.float32)


def song_set(folder: Path, count: int, seed: int = 0) -> SpeechSet:
    """A prepared set of `count` utterances of one to four words."""
    generator = np.random.default_rng(seed)
    with SpeechWriter(folder, "songs", RATE) as writer:
        for number in range(count):
            words = generator.choice(list(WORDS), generator.integers(1, 5)).tolist()
            writer.write(f"song-{number}", "singer", " ".join(words), sing(words, generator))
        writer.finish(digest="songs")
    return SpeechSet.open(folder)


def performance(
    words: Sequence[str], gaps: Sequence[float], generator: np.random.Generator, rate: int = RATE, noise: float = 0.002
) -> tuple[np.ndarray, list[tuple[str, float, float]]]:
    """Waveform `[T]` of `words` of different lengths, with gaps in seconds before each word and after the last, and
    each word with the seconds at which it begins and ends."""
    pieces, spans, place = [], [], 0
    for word, gap in zip([*words, None], gaps, strict=True):
        pieces.append(np.zeros(int(gap * rate)))
        place += len(pieces[-1])
        if word is not None:
            time = np.arange(int(generator.uniform(0.2, 0.4) * rate)) / rate
            envelope = np.minimum(1.0, np.minimum(time, time[-1] - time) / 0.02)
            pieces.append(0.1 * envelope * sum(np.sin(2 * np.pi * each * time) for each in WORDS[word]))
            spans.append((word, place / rate, (place + len(time)) / rate))
            place += len(time)
    waveform = np.concatenate(pieces)
    return (waveform + noise * generator.standard_normal(len(waveform))).astype(np.float32), spans
