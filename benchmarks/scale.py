"""The effect of a set's size: a learner's memory at 10 thousand and at a million utterances, and a resume in the larger
set."""

import json
import random
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.large_set import forget, write_large_set
from benchmarks.measuring import Bar
from benchmarks.starting import Program, run_side_by_side

SMALL, LARGE = 10_000, 1_000_000
MOST_MEBIBYTES, MOST_SECONDS = 200.0, 1.0
ROUNDS = 3
GONE_THROUGH = 50_000
"""Number of utterances of the plan: five windows of the large set, and five times the small set."""


def measure(folder: Path) -> list[Bar]:
    """Memory that a million utterances cost beyond ten thousand, and seconds to a random place in 1,000 shards."""
    with TemporaryDirectory(dir=folder) as name:
        small, large = Path(name) / "small", Path(name) / "large"
        write_large_set(small, SMALL)
        write_large_set(large, LARGE)
        few = [read(small) for _ in range(ROUNDS)]
        many = [read(large) for _ in range(ROUNDS)]
    grown = {kind: median(each[kind] for each in many) for kind in ("anon", "file")}
    small_grown = {kind: median(each[kind] for each in few) for kind in ("anon", "file")}
    seconds = [each["seconds"] for each in many]
    return [
        Bar.at_most(
            f"memory of a learner, {LARGE:,} utterances beyond {SMALL:,} / {MOST_MEBIBYTES:g} MiB",
            (sum(grown.values()) - sum(small_grown.values())) / MOST_MEBIBYTES,
            1.0,
            f"{grown['anon']:.0f} MiB own and {grown['file']:.0f} of the index; "
            f"at {SMALL:,}: {small_grown['anon']:.0f} and {small_grown['file']:.0f}",
        ),
        Bar.at_most(
            f"first mini-batch at a random place of {LARGE // 1000:,} shards / {MOST_SECONDS:g} s",
            median(seconds) / MOST_SECONDS,
            1.0,
            f"{median(seconds):.2f} s from opening the set, {min(seconds):.2f} to {max(seconds):.2f}",
        ),
    ]


def read(folder: Path) -> dict[str, float]:
    """The notes of a fresh process about itself, started at its own place; the system's caches are empty if
    possible."""
    forget(folder)
    chance = random.Random()
    with TemporaryDirectory(dir=folder.parent) as name:
        note = Path(name) / "note.json"
        arguments = [folder, chance.randrange(5), chance.random(), GONE_THROUGH, note]
        command = [sys.executable, "-m", "benchmarks.scale_reader", *map(str, arguments)]
        run_side_by_side([Program(command, {})], Path(name))
        return dict(json.loads(note.read_text()))
