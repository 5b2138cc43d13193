"""A language of tones for tests: each word is a chord of its own, so that a tiny network learns it in seconds."""

from pathlib import Path

import numpy as np

from starling.speech.shard_writer import SpeechWriter
from starling.speech.store import SpeechSet

WORDS = {"DO": (400, 900), "RE": (600, 1500), "MI": (800, 2100), "FA": (1100, 2700)}
RATE = 8000


def sing(words: list[str], generator: np.random.Generator, rate: int = RATE) -> np.ndarray:
    """Waveform `[T]` of `words`: 0.25 s a word, gaps of 0.08 s, a little noise."""
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
