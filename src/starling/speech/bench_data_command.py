"""`starling bench-data`: measures storage layouts and audio formats on your data and disk, and recommends one."""

import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from starling.errors import ConfigError, DataError
from starling.reporting.progress import Bars, Say
from starling.speech.bench_data import ROOM, Audio, Pace, Row, Sample, advice, bench, take_sample
from starling.speech.recipe import load_recipe
from starling.speech.store import SpeechSet


def bench_data(data: Path, overrides: Sequence[str], tell: Say, output: Console, console: Console) -> None:
    """Measure layouts and formats with a sample of a recipe's corpus or of a prepared folder, and recommend one.

    Temporary files are written next to the data and removed at the end. Raises ConfigError for wrong keys, DataError
    for a corpus that cannot be read or a full disk.
    """
    name, readers, rate, place = _prepared(data, overrides) if data.is_dir() else _recipe(data, overrides)
    with Bars(console) as bars:
        sample = take_sample(readers, rate, bars)
        _check_room(sample, place)
        try:
            with tempfile.TemporaryDirectory(prefix=".bench-data-", dir=place) as folder:
                rows, skipped = bench(sample, Path(folder), bars)
        except OSError as error:
            raise DataError(f"{place}: cannot be written: {error}; make room, or set data.folder elsewhere") from error
    output.print(_table(rows, f"{len(sample.audios)} utterances of {name}, {sample.seconds / 60:.1f} min, {rate} Hz"))
    tell(_about_the_cache(rows))
    for line in skipped:
        tell(line)
    tell(advice(rows))


def _recipe(path: Path, overrides: Sequence[str]) -> tuple[str, list[Audio], int, Path]:
    data = load_recipe(path, overrides).data
    readers: list[Audio] = [each.read for each in data.utterances(data.train)]
    place = next(folder for folder in (data.folder.absolute(), *data.folder.absolute().parents) if folder.is_dir())
    return data.train, readers, data.sampling_rate, place


def _prepared(folder: Path, overrides: Sequence[str]) -> tuple[str, list[Audio], int, Path]:
    if overrides:
        raise ConfigError(f"prepared folder {folder}: keys are allowed only with a recipe, got {' '.join(overrides)}")
    found = [folder / "summary.json", *sorted(folder.glob("*/summary.json"))]
    paths = [path.parent for path in found if path.is_file()]
    if not paths:
        raise ConfigError(f"{folder}: contains no prepared set; give a recipe, or a folder that was prepared from one")
    speech = max((SpeechSet.open(path) for path in paths), key=len)
    readers: list[Audio] = [partial(_read, speech, index) for index in range(len(speech))]
    return speech.name, readers, speech.sampling_rate, folder


def _read(speech: SpeechSet, index: int) -> tuple[NDArray[np.float32], int]:
    return speech.audio(index), speech.sampling_rate


def _check_room(sample: Sample, place: Path) -> None:
    needed, free = ROOM * sample.num_bytes, shutil.disk_usage(place).free
    if free < needed:
        raise DataError(
            f"{place}: temporary files need {needed / 1e6:.0f} MB, but {free / 1e6:.0f} MB are free; make room"
        )


def _table(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("stored as")
    table.add_column("format")
    for name in (
        "MB per hour\nof audio",
        "decoding, × real\ntime on one core",
        "in order, × real\ntime: first, again",
        "random 60 s mini-\nbatches/s: first, again",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.layout,
            row.format,
            f"{row.bytes_per_hour / 1e6:.1f}",
            f"{row.decoding:.0f}",
            _pace(row.in_order, 0),
            _pace(row.random, 1) if row.random is not None else "none",
        )
    return table


def _pace(pace: Pace, digits: int) -> str:
    return f"{pace.first:.{digits}f}, {pace.again:.{digits}f}"


def _about_the_cache(rows: Sequence[Row]) -> str:
    """A line that says whether the first reading of each file came from the disk."""
    paces = [pace for row in rows for pace in (row.in_order, row.random) if pace is not None]
    if any(pace.cold is None for pace in paces):
        return (
            "first: after asking the system to drop the files from its cache, which cannot be verified here. again: "
            "from memory (warm)"
        )
    cold = sum(bool(pace.cold) for pace in paces)
    if cold == len(paces):
        return "first: read from the disk (cold). again: from memory (warm)"
    if cold == 0:
        return (
            "first and again: both from memory (warm), because this system kept the files in its cache; the disk was "
            "not measured"
        )
    return (
        f"first: {cold} of {len(paces)} readings came from the disk (cold), the others from memory. again: from memory"
    )
