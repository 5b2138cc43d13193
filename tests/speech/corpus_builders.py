"""Small corpora made of tones and noise, built where a test needs them."""

from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

RATE = 8000


def sound(seconds: float, seed: int = 0, rate: int = RATE) -> NDArray[np.int16]:
    """Noise, [T], 16-bit, identical for equal seeds."""
    return (np.random.default_rng(seed).standard_normal(round(seconds * rate)) * 3000).clip(-32768, 32767).astype("i2")


def write_wav(path: Path, seconds: float = 0.5, seed: int = 0, rate: int = RATE) -> NDArray[np.int16]:
    """Write a WAV file of noise, and return its samples."""
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = sound(seconds, seed, rate)
    soundfile.write(path, samples, rate)
    return samples


def write_table(folder: Path, count: int = 12, speakers: int = 2, seconds: float = 0.4) -> Path:
    """Write a TSV corpus: utterances u0, u1, ... of speakers s0, s1, ..., every third in the set `test`."""
    rows = ["id\tspeaker\tsplit\taudio\ttext"]
    for i in range(count):
        write_wav(folder / "audio" / f"u{i}.wav", seconds + 0.01 * i, seed=i)
        rows.append(f"u{i}\ts{i % speakers}\t{'test' if i % 3 == 2 else 'train'}\taudio/u{i}.wav\tword{i}")
    table = folder / "corpus.tsv"
    table.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return table


def replace_row(table: Path, utterance: str, **changes: str) -> None:
    """Change columns of one row of a table."""
    header, *rows = [line.split("\t") for line in table.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if row[0] == utterance:
            for column, value in changes.items():
                row[header.index(column)] = value
    table.write_text("".join("\t".join(row) + "\n" for row in [header, *rows]), encoding="utf-8")
