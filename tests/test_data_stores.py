"""`python -m benchmarks.data_stores` measures each layout and format on the user's audio, and leaves nothing behind."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import yaml
from typer.testing import CliRunner, Result

from benchmarks import data_stores
from benchmarks.data_stores import FILES, INDEXED, SHAR, STREAMED, Pace, Row, advice, app, bench, take_sample
from starling.errors import DataError
from tests.speech.corpus_builders import RATE, write_table
from tests.speech.tones import song_set

EVERYTHING = [
    (FILES, "FLAC"), (STREAMED, "FLAC"), (SHAR, "FLAC"), (INDEXED, "FLAC"), (INDEXED, "WAV"), (INDEXED, "Opus")
]  # fmt: skip


def silent(name: str, done: int, total: int) -> None:
    """A progress callback that shows nothing."""


def _measured(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})


def readers(folder: Path, count: int = 12) -> Sequence[data_stores.Audio]:
    songs = song_set(folder, count)
    return [lambda index=index: (songs.audio(index), songs.sampling_rate) for index in range(count)]


def test_every_layout_and_format_is_measured(tmp_path: Path) -> None:
    """All figures are positive, WAV takes its 16 bits, FLAC less, Opus least, and random access is measured where
    possible."""
    sample = take_sample(readers(tmp_path / "songs"), 8000, silent)
    (tmp_path / "bench").mkdir()
    rows, skipped = bench(sample, tmp_path / "bench", silent)
    assert [(row.layout, row.format) for row in rows] == EVERYTHING and not skipped
    for row in rows:
        assert (row.random is None) == (row.layout in (STREAMED, SHAR))
        paces = [pace for pace in (row.in_order, row.random) if pace is not None]
        assert (
            min(row.bytes_per_hour, row.decoding, *(each.first for each in paces), *(each.again for each in paces)) > 0
        )
    wav, opus = (next(row for row in rows if row.format == name) for name in ("WAV", "Opus"))
    assert wav.bytes_per_hour >= 2 * 8000 * 3600
    assert opus.bytes_per_hour < rows[0].bytes_per_hour < wav.bytes_per_hour


def test_formats_that_cannot_be_written_are_left_out_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Opus in libsndfile, the other rows are complete, and the reason is given."""
    encode = data_stores.encode

    def without_opus(audio: np.ndarray, rate: int, name: str) -> bytes:
        if name == "Opus":
            raise soundfile.LibsndfileError(21)
        return encode(audio, rate, name)

    monkeypatch.setattr(data_stores, "encode", without_opus)
    sample = take_sample(readers(tmp_path / "songs", 3), 8000, silent)
    (tmp_path / "bench").mkdir()
    rows, skipped = bench(sample, tmp_path / "bench", silent)
    assert [(row.layout, row.format) for row in rows] == EVERYTHING[:-1]
    assert len(skipped) == 1 and "Opus is skipped" in skipped[0]
    assert advice(rows).startswith("Choose ")


def test_a_sample_is_bounded_and_resampled_and_skips_unreadable_audio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit in seconds ends it; a bad file is skipped; if nothing is readable, an error says why."""

    def broken() -> tuple[np.ndarray, int]:
        raise DataError("u7 is damaged")

    def tone() -> tuple[np.ndarray, int]:
        return np.zeros(16000, np.float32), 16000

    monkeypatch.setattr(data_stores, "MAX_SECONDS", 2.5)
    sample = take_sample([tone, broken] * 50, 8000, silent)
    assert sample.seconds == 3.0 and {len(audio) for audio in sample.audios} == {8000}
    with pytest.raises(DataError, match=r"none of 2 utterances can be read: u7 is damaged"):
        take_sample([broken, broken], 8000, silent)


def test_a_prepared_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    """The command prints every row, the state of the cache, and one sentence of advice."""
    song_set(tmp_path / "data" / "train", 12)
    before = sorted((tmp_path / "data").rglob("*"))
    result = _measured(tmp_path / "data")
    assert result.exit_code == 0, result.output
    for layout, form in EVERYTHING:
        assert any(layout in line and form in line for line in result.stdout.splitlines())
    *_, cache, sentence = result.stdout.splitlines()
    assert cache.startswith("first") and sentence.startswith("Choose ")
    assert sorted((tmp_path / "data").rglob("*")) == before


def test_a_recipe_is_measured_before_anything_is_prepared(tmp_path: Path) -> None:
    """The corpus itself is sampled; the folder of prepared sets is not even created."""
    corpus = {"kind": "tsv", "path": str(write_table(tmp_path / "corpus"))}
    corpus["sets"] = {"train": {"split": "train"}, "test": {"split": "test"}}
    data = {"folder": str(tmp_path / "data"), "corpus": corpus, "sampling_rate": RATE, "valid": None}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"name": "tried", "data": data, "budget": {"epochs": 1}}), encoding="utf-8")
    result = _measured(recipe)
    assert result.exit_code == 0, result.output
    assert "8 utterances of train" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "recipe.yaml"]


def test_nothing_is_left_behind_when_it_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while measuring removes what was written."""
    song_set(tmp_path / "data" / "train", 3)
    before = sorted((tmp_path / "data").rglob("*"))
    fired: list[Path] = []

    def interrupted(layout: object, *rest: object) -> Row:
        fired.extend((tmp_path / "data").glob(".bench-data-*"))
        raise KeyboardInterrupt

    monkeypatch.setattr(data_stores, "_measured", interrupted)
    result = _measured(tmp_path / "data")
    assert result.exit_code != 0 and fired
    assert sorted((tmp_path / "data").rglob("*")) == before


def test_a_folder_without_sets_is_named(tmp_path: Path) -> None:
    """The exit code is 2, and the message says what to give instead."""
    result = _measured(tmp_path)
    assert result.exit_code == 2 and f"{tmp_path}: contains no prepared set" in result.stderr


def test_the_advice_follows_the_figures() -> None:
    """It recommends FLAC; Opus if the disk is too slow for FLAC; WAV if the processor is."""

    def row(layout: str, form: str, size: float, decoding: float, first: float) -> Row:
        return Row(layout, form, size, decoding, Pace(first, first, True), Pace(first / 60, first / 60, True))

    rows = [
        row(FILES, "FLAC", 60e6, 3000, 1000), row(INDEXED, "FLAC", 60e6, 3000, 2000),
        row(INDEXED, "WAV", 115e6, 12000, 6000), row(INDEXED, "Opus", 15e6, 400, 300),
    ]  # fmt: skip
    assert advice(rows).startswith("Choose FLAC") and "2 times the rate of single files" in advice(rows)
    slow_disk = [replace(each, in_order=Pace(6e9 / each.bytes_per_hour, 1, True)) for each in rows]
    assert advice(slow_disk).startswith("Choose Opus")
    slow_core = [replace(each, decoding=each.decoding / 10) for each in rows]
    assert advice(slow_core).startswith("Choose WAV")
