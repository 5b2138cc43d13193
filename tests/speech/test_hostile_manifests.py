"""Damaged or malicious manifests of corpora raise nothing but DataError."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_builders import write_table, write_wav
from lhotse import MonoCut, Recording, SupervisionSegment
from pydantic import TypeAdapter

from starling.errors import DataError
from starling.speech.corpora import CorpusConfig
from starling.speech.usable import Checker, Checking, FilterConfig
from tests.computing import computing_below

PIECES = [
    *("../", "/etc/hostname", "/", ".", "", "\0", "\ud800", "\\ud800", "\\u0000", "x" * 5000, "9" * 400, "-1", "1e400"),
    *("NaN", "Infinity", "null", "true", "[]", "{}", '"', "\t", "\n", "\r", ",", "|", " ", "[" * 5000, "é", "\u2028"),
]


def _corpora(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The file that is mutated, and the settings that read it."""
    table = write_table(folder, count=3, seconds=0.1)
    for i in range(3):
        write_wav(folder / f"{i}.wav", 0.1, seed=i)
    files = {
        "nemo": [{"audio_filepath": f"{i}.wav", "text": "a", "offset": 0.01, "duration": 0.05} for i in range(3)],
        "wenet": [{"key": f"k{i}", "wav": f"{i}.wav", "txt": "a", "start": 0.01, "end": 0.05} for i in range(3)],
        "lhotse": [_cut(folder, i) for i in range(3)],
    }
    found: list[tuple[Path, dict[str, Any]]] = [(table, {"kind": "tsv", "path": table, "sets": {"train": {}}})]
    for kind, items in files.items():
        (folder / kind).write_text("".join(json.dumps(item) + "\n" for item in items))
        found.append((folder / kind, {"kind": kind, "path": folder, "sets": {"train": kind}}))
    (folder / "coqui").write_text("wav_filename,wav_filesize,transcript\n0.wav,1,a\n1.wav,1,b\n")
    found.append((folder / "coqui", {"kind": "coqui", "path": folder, "sets": {"train": "coqui"}}))
    for name, line in {
        "wav.scp": "r0 0.wav",
        "text": "s0 a b",
        "segments": "s0 r0 0.0 0.05",
        "utt2spk": "s0 me",
    }.items():
        (folder / name).write_text(f"{line}\n")
        found.append((folder / name, {"kind": "kaldi", "path": folder, "sets": {"train": "."}}))
    return found


def _cut(folder: Path, number: int) -> dict[str, Any]:
    recording = Recording.from_file(folder / f"{number}.wav")
    said = SupervisionSegment(f"u{number}", recording.id, 0, 0.05, text="text", speaker="s")
    cut: dict[str, Any] = MonoCut(f"u{number}", 0.01, 0.05, 0, supervisions=[said], recording=recording).to_dict()
    return cut


def _mutated(text: str, random: np.random.Generator) -> bytes:
    """A field or a few characters are replaced, removed or repeated, or bytes are changed."""
    place, other = (int(each) for each in random.integers(0, len(text), 2))
    piece = PIECES[random.integers(len(PIECES))]
    how = random.integers(5)
    if how == 0:
        spoilt = bytearray(text.encode())
        for each in random.integers(0, len(spoilt), random.integers(1, 4)):
            spoilt[each] = random.integers(256)
        return bytes(spoilt)
    if how == 1:
        text = text[:place] + text[place + int(random.integers(1, 20)) :]
    elif how == 2:
        text = text[:place] + text[other : other + 30] + text[place:]
    elif how == 3:
        text = text[:place] + piece + text[place:]
    else:
        start = max(text.rfind(mark, 0, place) for mark in ":\t, ") + 1
        ends = [end for mark in ",}\t\n " if (end := text.find(mark, place)) >= 0]
        text = text[:start] + piece + text[min(ends, default=len(text)) :]
    return text.encode("utf-8", "surrogatepass")


def _read(settings: dict[str, Any]) -> int:
    corpus = TypeAdapter(CorpusConfig).validate_python(settings)
    checker = Checker(Checking("train", 8000, "upper", FilterConfig(min_seconds=0.0, on_bad="fail")))
    return len(list(checker.usable(corpus.utterances("train"))))


@pytest.mark.wide
@pytest.mark.parametrize("number", range(9))
def test_mutated_manifests_are_read_or_data_errors(tmp_path: Path, number: int) -> None:
    """200 mutations of each kind of list are read as `starling prepare` reads it."""
    file, settings = _corpora(tmp_path)[number]
    assert _read(settings) >= 1
    whole = file.read_text()
    random = np.random.default_rng(number)
    ends: Counter[str] = Counter()
    for _ in range(200):
        file.write_bytes(_mutated(whole, random))
        with computing_below(1.0):
            try:
                _read(settings)
                ends["read"] += 1
            except DataError:
                ends["refused"] += 1
    assert ends["refused"] > 50


@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan"), float("inf"), True, "1", [1]])
def test_invalid_seconds_are_refused_by_line(tmp_path: Path, value: object) -> None:
    """Whole numbers beyond any floating-point number are included."""
    write_wav(tmp_path / "a.wav", 0.1)
    (tmp_path / "m").write_text(json.dumps({"audio_filepath": "a.wav", "text": "a", "offset": value}))
    with pytest.raises(DataError, match="m:1: field 'offset' is"):
        _read({"kind": "nemo", "path": tmp_path, "sets": {"train": "m"}})


@pytest.mark.parametrize("name", ["/", ".", "", "\ud800.wav", "a\0.wav", "x" * 5000])
def test_names_that_no_file_can_have_are_refused_by_line(tmp_path: Path, name: str) -> None:
    """Names of folders, names with halves of characters, and too long names are refused."""
    (tmp_path / "m").write_text(json.dumps({"audio_filepath": name, "text": "a"}))
    with pytest.raises(DataError, match="m:1"):
        _read({"kind": "nemo", "path": tmp_path, "sets": {"train": "m"}})


def test_a_header_that_names_a_column_twice_is_refused(tmp_path: Path) -> None:
    """It is unclear which of the columns is meant."""
    table = write_table(tmp_path, count=1)
    table.write_text(table.read_text().replace("speaker", "id", 1))
    with pytest.raises(DataError, match="has the column 'id' twice"):
        _read({"kind": "tsv", "path": table, "sets": {"train": {}}})
