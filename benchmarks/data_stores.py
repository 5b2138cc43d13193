"""Measures how fast a sample of your audio is read from disk, in several layouts and formats, and recommends one.

Run it as `python -m benchmarks.data_stores RECIPE [KEY=VALUE…]`, or with a prepared folder instead of the recipe.
"""

import io
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import soundfile
import torch
from lhotse import CutSet
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.speech_writer import SpeechWriter
from starling.chance import one_thread
from starling.commands import Commands, Overrides, RecipeArgument, progress_console
from starling.errors import ConfigError, DataError
from starling.reporting.progress import Bars
from starling.speech.recipe import load_recipe
from starling.speech.resampling import resampled
from starling.speech.store import SpeechSet

MAX_UTTERANCES, MAX_SECONDS, MAX_READING = 1000, 600.0, 30.0
"""Limits of a sample: utterances, seconds of audio, and seconds spent reading it."""
FILES, STREAMED, SHAR, INDEXED = "files one by one", "tar, streamed", "lhotse Shar", "indexed tar (Starling)"
BATCH_SECONDS = 60.0
"""Seconds of audio per mini-batch."""
ROOM = 6
"""Maximum disk space of all layouts together, as a multiple of the sample's size as 16-bit samples."""
_FROM_DISK = 0.5  # fraction of the bytes that must be read from the disk for a run to count as cold
_SHARD = 200
_PIECE = 4096  # samples encoded per call; libsndfile fails for long arrays
_OPTIONS = {"WAV": ("WAV", "PCM_16"), "FLAC": ("FLAC", "PCM_16"), "Opus": ("OGG", "OPUS")}

Progress = Callable[[str, int, int], None]
Audio = Callable[[], tuple[NDArray[np.float32], int]]


@dataclass(frozen=True)
class Sample:
    """Utterances for the measurement, all at the same sampling rate."""

    audios: tuple[NDArray[np.float32], ...]
    sampling_rate: int

    @property
    def seconds(self) -> float:
        return sum(len(audio) for audio in self.audios) / self.sampling_rate

    @property
    def num_bytes(self) -> int:
        """The size in bytes as 16-bit samples."""
        return 2 * sum(len(audio) for audio in self.audios)


@dataclass(frozen=True)
class Pace:
    """Reading rates: first after dropping the files from the system's cache, if possible, and then from memory."""

    first: float
    again: float
    cold: bool | None
    """Whether the first run read from the disk; None if the system does not report it."""


@dataclass(frozen=True)
class Row:
    """The measurements of one layout and format."""

    layout: str
    format: str
    bytes_per_hour: float
    decoding: float
    """Seconds of audio decoded per second of one core, from memory."""
    in_order: Pace
    """Seconds of audio per second, decoding included."""
    random: Pace | None
    """Mini-batches of 60 s of random utterances per second; None if the layout has no random access."""


@dataclass(frozen=True)
class _Layout:
    name: str
    format: str
    files: Callable[[], Iterable[Path]]
    read_all: Callable[[], None]
    read: Callable[[Sequence[int]], object] | None


def take_sample(readers: Sequence[Audio], sampling_rate: int, report: Progress) -> Sample:
    """Evenly spaced utterances of a set, at `sampling_rate` Hz, as many as the limits above allow.

    Raises DataError if none can be read.
    """
    chosen = np.unique(np.linspace(0, len(readers) - 1, min(len(readers), MAX_UTTERANCES)).astype(int))
    chosen = np.random.default_rng(0).permutation(chosen)  # so that a limit does not exclude a part of the set
    audios: list[NDArray[np.float32]] = []
    seconds, begin, failure = 0.0, time.monotonic(), None
    with one_thread():
        for number, index in enumerate(chosen.tolist()):
            report("reading a sample", number, len(chosen))
            try:
                audio, rate = readers[index]()
            except DataError as error:
                failure = error
                continue
            audios.append(resampled(torch.from_numpy(audio)[None], rate, sampling_rate)[0].numpy())
            seconds += len(audios[-1]) / sampling_rate
            if seconds > MAX_SECONDS or time.monotonic() - begin > MAX_READING:
                break
    report("reading a sample", len(chosen), len(chosen))
    if not seconds:
        raise DataError(f"none of {len(chosen)} utterances can be read: {failure or 'the set is empty'}")
    return Sample(tuple(audios), sampling_rate)


def bench(sample: Sample, folder: Path, report: Progress) -> tuple[list[Row], list[str]]:
    """Measure all layouts and formats in an empty folder. Returns the rows, and messages about skipped formats."""
    encoded: dict[str, list[bytes]] = {}
    skipped = []
    for number, name in enumerate(_OPTIONS):
        report("encoding", number, len(_OPTIONS))
        try:
            encoded[name] = [encode(audio, sample.sampling_rate, name) for audio in sample.audios]
        except (soundfile.LibsndfileError, ValueError) as error:
            skipped.append(f"{name} is skipped: this libsndfile cannot write it at {sample.sampling_rate} Hz ({error})")
    report("encoding", len(_OPTIONS), len(_OPTIONS))
    layouts = list(_layouts(sample, encoded, folder))
    rows = []
    for number, layout in enumerate(layouts):
        report("measuring", number, len(layouts))
        rows.append(_measured(layout, sample, encoded[layout.format]))
    report("measuring", len(layouts), len(layouts))
    return rows, skipped


def advice(rows: Sequence[Row], enough: float = 1000.0) -> str:
    """A recommendation with its reason. `enough` is the rate of computing features on the fly, in seconds per
    second."""
    tars = {row.format: row for row in rows if row.layout == INDEXED}
    flac, wav, opus = tars["FLAC"], tars["WAV"], tars.get("Opus")
    files = next(row for row in rows if row.layout == FILES)
    size = {name: f"{row.bytes_per_hour / 1e6:.0f} MB" for name, row in tars.items()}
    if opus is not None and flac.in_order.first < enough and opus.in_order.first > 1.2 * flac.in_order.first:
        return (
            f"Choose Opus in indexed tars: from this disk FLAC is read at only {flac.in_order.first:.0f} times real "
            f"time, and Opus, which is lossy, at {opus.in_order.first:.0f}. It needs {size['Opus']} per hour instead "
            f"of {size['FLAC']}."
        )
    if flac.decoding < enough < wav.in_order.first:
        return (
            f"Choose WAV in indexed tars: a core of this machine decodes FLAC at {flac.decoding:.0f} times real time, "
            f"and WAV is read at {wav.in_order.first:.0f}. It needs {size['WAV']} per hour instead of {size['FLAC']}."
        )
    gain = flac.random.first / files.random.first if flac.random and files.random else 1.0
    return (
        f"Choose FLAC in indexed tars, as `starling prepare` writes them: lossless, {size['FLAC']} per hour instead of "
        f"{size['WAV']} for WAV, decoded at {flac.decoding:.0f} times real time on a core; random mini-batches are "
        f"read at {gain:.2g} times the rate of single files."
    )


def encode(audio: NDArray[np.float32], sampling_rate: int, name: str) -> bytes:
    """The bytes of an audio file; raises soundfile's errors."""
    container, subtype = _OPTIONS[name]
    buffer = io.BytesIO()
    with soundfile.SoundFile(buffer, "w", sampling_rate, 1, subtype, format=container) as file:
        for begin in range(0, len(audio), _PIECE):
            file.write(audio[begin : begin + _PIECE])
    return buffer.getvalue()


def _decode(encoded: bytes) -> None:
    soundfile.read(io.BytesIO(encoded), dtype="float32")


def _layouts(sample: Sample, encoded: dict[str, list[bytes]], folder: Path) -> Iterator[_Layout]:
    yield _single_files(encoded["FLAC"], folder / "files")
    tar = folder / "stream.tar"
    _write_tar(encoded["FLAC"], tar)
    yield _Layout(STREAMED, "FLAC", lambda: [tar], lambda: _stream(tar), None)
    shards = folder / "set"
    with SpeechWriter(shards, "sample", sample.sampling_rate, _SHARD) as writer:
        for number, audio in enumerate(sample.audios):
            writer.write(f"u{number:06}", "s", "A", audio)
        writer.finish("sample")
    yield _Layout(
        SHAR, "FLAC", lambda: (shards / "shar").iterdir(), lambda: _each(CutSet.from_shar(in_dir=shards / "shar")), None
    )
    speech = SpeechSet.open(shards)
    batches = _batches(np.arange(len(speech)), sample)
    tars = list((shards / "shar").glob("*.tar"))
    yield _Layout(
        INDEXED, "FLAC", lambda: [*tars, *(shards / "index").iterdir()], lambda: _for_each(speech.read, batches),
        speech.read,
    )  # fmt: skip
    for name in [name for name in encoded if name != "FLAC"]:
        yield _indexed_tar(name, encoded[name], folder / f"{name}.tar")


def _single_files(encoded: Sequence[bytes], folder: Path) -> _Layout:
    folder.mkdir()
    paths = [folder / f"u{number:06}.flac" for number in range(len(encoded))]
    for path, content in zip(paths, encoded, strict=True):
        path.write_bytes(content)

    def read(indices: Sequence[int]) -> None:
        for index in indices:
            soundfile.read(paths[index], dtype="float32")

    return _Layout(FILES, "FLAC", lambda: paths, lambda: read(range(len(paths))), read)


def _indexed_tar(name: str, encoded: Sequence[bytes], path: Path) -> _Layout:
    places = _write_tar(encoded, path)

    def read(indices: Sequence[int]) -> None:
        with path.open("rb") as file:
            for index in indices:
                offset, size = places[index]
                _decode(os.pread(file.fileno(), size, offset))

    return _Layout(INDEXED, name, lambda: [path], lambda: read(range(len(places))), read)


def _write_tar(encoded: Sequence[bytes], path: Path) -> list[tuple[int, int]]:
    """Offset and size of each file in the tar."""
    with tarfile.open(path, "w") as tar:
        for number, content in enumerate(encoded):
            info = tarfile.TarInfo(f"u{number:06}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    with tarfile.open(path) as tar:
        return [(member.offset_data, member.size) for member in tar]


def _stream(path: Path) -> None:
    with tarfile.open(path, "r|") as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None:
                _decode(file.read())


def _each(cuts: Iterable[object]) -> None:
    for cut in cuts:
        cut.load_audio()  # type: ignore[attr-defined]


def _measured(layout: _Layout, sample: Sample, encoded: Sequence[bytes]) -> Row:
    files = list(layout.files())
    size = sum(path.stat().st_size for path in files)
    begin = time.thread_time()
    for content in encoded:
        _decode(content)
    decoding = sample.seconds / max(time.thread_time() - begin, 1e-9)
    in_order = _paced(layout.read_all, files, size, sample.seconds)
    random = None
    if layout.read is not None:
        read = layout.read
        batches = _batches(np.random.default_rng(1).permutation(len(sample.audios)), sample)
        random = _paced(lambda: _for_each(read, batches), files, size, sample.seconds / BATCH_SECONDS)
    return Row(layout.name, layout.format, 3600 * size / sample.seconds, decoding, in_order, random)


def _batches(order: NDArray[np.int64], sample: Sample) -> list[list[int]]:
    count = max(1, round(sample.seconds / BATCH_SECONDS))
    return [each.tolist() for each in np.array_split(order, min(count, len(order)))]


def _for_each(read: Callable[[Sequence[int]], object], batches: Sequence[Sequence[int]]) -> None:
    for batch in batches:
        read(batch)


def _paced(action: Callable[[], None], files: Sequence[Path], size: int, amount: float) -> Pace:
    """Rates in units of `amount` per second, first after dropping the files from the system's cache, then from
    memory."""
    _forget(files)
    before = _bytes_from_disk()
    first = _seconds(action)
    after = _bytes_from_disk()
    cold = None if before is None or after is None else after - before >= _FROM_DISK * size
    return Pace(amount / first, amount / _seconds(action), cold)


def _seconds(action: Callable[[], None]) -> float:
    begin = time.perf_counter()
    action()
    return max(time.perf_counter() - begin, 1e-9)


def _forget(files: Iterable[Path]) -> None:
    """Ask the system to drop files from its cache, which not all file systems do."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _bytes_from_disk() -> int | None:
    """The bytes that this process has read from disk so far; None if the system does not report them."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def measure(data: Path, overrides: Sequence[str]) -> None:
    """Measure layouts and formats with a sample of a recipe's corpus or of a prepared folder, and recommend one.

    Temporary files are written next to the data and removed at the end. Raises ConfigError for wrong keys, DataError
    for a corpus that cannot be read or a full disk.
    """
    name, readers, rate, place = _prepared(data, overrides) if data.is_dir() else _recipe(data, overrides)
    with Bars(progress_console()) as bars:
        sample = take_sample(readers, rate, bars)
        _check_room(sample, place)
        try:
            with tempfile.TemporaryDirectory(prefix=".bench-data-", dir=place) as folder:
                rows, skipped = bench(sample, Path(folder), bars)
        except OSError as error:
            raise DataError(f"{place}: cannot be written: {error}; make room, or set data.folder elsewhere") from error
    Console().print(
        _table(rows, f"{len(sample.audios)} utterances of {name}, {sample.seconds / 60:.1f} min, {rate} Hz")
    )
    print(_about_the_cache(rows))
    for line in skipped:
        print(line)
    print(advice(rows))


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


app = Commands()


@app.command()
def main(data: RecipeArgument, overrides: Overrides = None) -> None:
    """Measure layouts and formats with a sample of a recipe's corpus, or of a prepared folder, and recommend one."""
    measure(data, overrides or [])


if __name__ == "__main__":
    app()
