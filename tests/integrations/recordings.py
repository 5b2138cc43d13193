"""Real recordings of spoken digits where the corpus is there, otherwise tones."""

import csv
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
TABLES = (ROOT / "data" / "fsdd.tsv", ROOT.parent / "shared" / "data" / "fsdd.tsv")
"""Where the recipe `fsdd` looks for the corpus."""
WORDS = ("ZERO", "ONE", "TWO", "SIX")
LENGTH = 2400
"""Samples; 0.3 s of the corpus."""


def waveforms(num: int) -> list[tuple[Tensor, int]]:
    """Recordings `[LENGTH]`, each with its class of four."""
    table = next((path for path in TABLES if path.exists()), None)
    return tones(num) if table is None else digits(num, table)


def tones(num: int) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    times = torch.arange(LENGTH) / 8000
    found = []
    for number in range(num):
        label = (number // 2) % 4  # so that two processes that take turns see all of them
        noise = 0.1 * torch.randn(LENGTH, generator=generator)
        found.append((torch.sin(2 * torch.pi * 200 * 2**label * times) + noise, label))
    return found


def digits(num: int, table: Path) -> list[tuple[Tensor, int]]:
    import soundfile

    with table.open(encoding="utf-8") as rows:
        chosen = [row for row in csv.DictReader(rows, delimiter="\t") if row["text"] in WORDS]
    kinds = [[row for row in chosen if row["text"] == word] for word in WORDS]
    found = []
    for number in range(num):
        label = (number // 2) % 4
        row = kinds[label][number // 8 * 2 + number % 2]
        samples, _ = soundfile.read(table.parent / row["audio"], dtype="float32")
        wave = torch.zeros(LENGTH)
        wave[: len(samples)] = torch.from_numpy(samples[:LENGTH])
        found.append((wave / wave.abs().max(), label))
    return found


DIGIT_LENGTH = 4000
"""Samples of a spoken digit; 0.5 s of the corpus."""


def corpus() -> Path | None:
    """The table of the corpus, where that is there."""
    return next((path for path in TABLES if path.exists()), None)


def spoken_digits(part: str, words: tuple[str, ...], num: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """`num` recordings of one part of the official split, from number `first` on, all words and speakers alike:
    waveforms `[N, DIGIT_LENGTH]` of mean 0 and deviation 1, and classes `[N]`."""
    import soundfile

    table = corpus()
    assert table is not None
    with table.open(encoding="utf-8") as rows:
        every = [row for row in csv.DictReader(rows, delimiter="\t") if row["official_split"] == part]
    kinds = [[row for row in every if row["text"] == word] for word in words]
    waves, classes = torch.zeros(num, DIGIT_LENGTH), torch.arange(num) % len(words)
    for number in range(num):
        same = kinds[number % len(words)]
        row = same[(first + number) // len(words) * 7919 % len(same)]
        samples, _ = soundfile.read(table.parent / row["audio"], dtype="float32")
        wave = torch.from_numpy(samples[:DIGIT_LENGTH])
        waves[number, : len(wave)] = (wave - wave.mean()) / wave.std()
    return waves, classes


def spectra(waves: Tensor) -> Tensor:
    """Logarithms of 20 bands every 12.5 ms: `[N, 20, frames]`."""
    powers = torch.fft.rfft(waves.unfold(1, 200, 100) * torch.hann_window(200)).abs()[..., 1:101]
    return (powers.square().unflatten(2, (20, 5)).mean(3) + 1e-3).log().transpose(1, 2) / 4


def make_classifier(num_classes: int) -> nn.Module:
    """Of spectra."""
    return nn.Sequential(
        nn.Conv1d(20, 32, 5, 2),
        nn.ReLU(),
        nn.Conv1d(32, 32, 5, 2),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(3),
        nn.Flatten(),
        nn.Linear(96, num_classes),
    )


DIGITS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")
