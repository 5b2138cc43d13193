"""A small corpus of tones on disk, and a recipe for it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from tests.speech.tones import RATE, WORDS, sing

Tree = dict[str, Any]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Limit torch to one thread, because tests share the machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def songs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TSV of songs of tones: 24 for training, 6 for testing."""
    folder = tmp_path_factory.mktemp("songs")
    generator = np.random.default_rng(1)
    lines = ["id\tspeaker\tsplit\taudio\ttext"]
    for number in range(30):
        words = generator.choice(list(WORDS), generator.integers(2, 4)).tolist()
        soundfile.write(folder / f"{number}.flac", sing(words, generator), RATE)
        split = "train" if number < 24 else "test"
        lines.append(f"song-{number}\tsinger\t{split}\t{number}.flac\t{' '.join(words)}")
    (folder / "songs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "songs.tsv"


def data_of(songs: Path) -> dict[str, Any]:
    """The `data:` section of a recipe that trains on the songs."""
    return {
        "folder": str(songs.parent / "prepared"),
        "corpus": {"kind": "tsv", "path": str(songs), "sets": {"train": {"split": "train"}, "test": {"split": "test"}}},
        "sampling_rate": RATE,
        "valid": None,
    }


@pytest.fixture
def tree(songs: Path, tmp_path: Path) -> Tree:
    """A recipe that trains on the songs in a second, as a tree."""
    return {
        "name": "songs",
        "exp": str(tmp_path / "exp"),
        "learners": 2,
        "budget": {"epochs": 1},
        "data": data_of(songs),
        "batches": {"max_duration": 5},
        "model": {"preset": "tiny", "subsampling": 4},
        "optimizer": {"lr": 0.01},
        "engine": {"threads": 1},
    }
