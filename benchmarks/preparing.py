"""How much faster two processes prepare a corpus than one."""

import shutil
import time
from pathlib import Path

import soundfile

from benchmarks.measuring import Bar, Seconds, median_speed_up
from starling.speech.corpora import SyntheticCorpus
from starling.speech.data import DataConfig
from starling.speech.prepare import prepare
from starling.speech.prepare_stages import Executor, Processes

ROUNDS, FILES, USES, SHARD_SIZE = 2, 200, 50, 500
"""Parameters of the measurement; the corpus lists each file several times, so that it is long but quickly made."""


def measure(folder: Path) -> list[Bar]:
    """Seconds with one process / with two, including their start; files are read, resampled and encoded."""
    table = write_corpus(folder / "corpus")
    pairs = []
    for number in range(ROUNDS):
        executors: list[Executor] = [Processes(2), Executor()]
        if number % 2:
            executors.reverse()
        took = [seconds(table, folder / "prepared", executor) for executor in executors]
        pairs.append((took[number % 2], took[1 - number % 2]))
    two, one = (min(pair[place] for pair in pairs) for place in (0, 1))
    return [
        Bar.at_least(
            f"preparing {FILES * USES} utterances, two processes / one, speed",
            median_speed_up(pairs),
            1.3,
            f"at best {FILES * USES / two:.0f} and {FILES * USES / one:.0f} utterances/s",
        )
    ]


def write_corpus(folder: Path) -> Path:
    """Write a table of synthetic speech in files at their own rate, 22.05 kHz."""
    folder.mkdir()
    rows = ["id\tspeaker\taudio\ttext"]
    spoken = SyntheticCorpus(kind="synthetic", sets={"train": FILES}).utterances("train")
    for each in spoken:
        soundfile.write(folder / f"{each.id}.wav", *each.read())
        rows += [f"{each.id}-{use}\t{each.speaker}\t{each.id}.wav\t{each.text}" for use in range(USES)]
    table = folder / "corpus.tsv"
    table.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return table


def seconds(table: Path, folder: Path, executor: Executor) -> Seconds:
    """Seconds that preparing the corpus takes."""
    config = DataConfig.model_validate(
        {
            "folder": folder,
            "corpus": {"kind": "tsv", "path": table, "sets": {"train": {}}},
            "shard_size": SHARD_SIZE,
            "valid": None,
            "test": [],
        }
    )
    begin = time.monotonic()
    with executor:
        prepare(config, executor=executor)
    took = time.monotonic() - begin
    shutil.rmtree(folder)
    return took
