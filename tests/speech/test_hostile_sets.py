"""Damaged or malicious prepared sets and archives are refused by name, or read as they were written."""

import gzip
import io
import json
import os
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_builders import RATE, sound, write_wav
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from lhotse.shar import SharWriter
from pydantic import TypeAdapter

from benchmarks.speech_writer import SpeechWriter
from starling.errors import DataError
from starling.files import sha256
from starling.speech.corpora import CorpusConfig
from starling.speech.shards import SetSummary, read_summary
from starling.speech.store import SpeechSet
from tests.computing import computing_below
from tests.mutations import damaged, mutated

Harm = Callable[[Path], object]
COUNT = 6


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A set of six utterances in three shards."""
    folder = tmp_path / "whole"
    with SpeechWriter(folder, "train", RATE, shard_size=2) as writer:
        for i in range(COUNT):
            writer.write(f"u{i}", f"speaker{i % 2}", f"TEXT {i}", sound(0.02 + 0.003 * i, i) / np.float32(32768))
        writer.finish("digest", dropped=1, dropped_seconds=1)
    return folder


def content_of(folder: Path) -> list[Any]:
    """Everything that training and `starling prepare` read from a set."""
    opened = SpeechSet.open(folder)
    summary = asdict(opened.summary)
    utterances = [
        (opened.id(i), opened.text(i), opened.speaker(i), float(opened.durations[i]), opened.audio(i).tobytes())
        for i in range(len(opened))
    ]
    opened.close()
    return [summary, *utterances]


def signed(folder: Path, **changes: Any) -> SetSummary:
    """Make the summary match what the files contain now, as an attacker can."""
    before = read_summary(folder)
    files = {name: sha256(folder / "index" / name) for name in before.files}
    summary = replace(before, **({"files": files} | changes)).signed()
    (folder / "summary.json").write_text(json.dumps(asdict(summary)))
    return summary


@pytest.mark.wide
@pytest.mark.parametrize("is_forged", [False, True], ids=["damaged", "forged"])
def test_mutations_are_the_same_set_or_data_errors(whole: Path, tmp_path: Path, is_forged: bool) -> None:
    """Each file gets 500 mutations, including deletion and swapping: nothing but DataError is raised, or what was
    written is read, to the bit. If digests are forged to match, texts may differ; errors are still DataErrors, and
    samples have the lengths in the index.

    Where digests are forged to fit, texts may be others; what is raised still is DataError, and samples are those of
    the lengths in the index.
    """
    expected = content_of(whole)
    random = np.random.default_rng(16)
    names = sorted(path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file())
    assert len(names) == 1 + 13 + 2 * 3
    folder = tmp_path / "mutated"
    ends: Counter[str] = Counter()
    for number in range(250 if is_forged else 500):
        damage = damaged(whole, folder, names[number % len(names)], names, random)
        with computing_below(1.0):
            try:
                if is_forged and all((folder / name).exists() for name in names):
                    signed(folder)
                found = content_of(folder)
                assert is_forged or found == expected, damage
                ends["read"] += 1
            except DataError as error:
                assert str(folder) in str(error)
                ends["refused"] += 1
    assert ends["refused"] > 100 and ends["read"] > 10


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"format":' * 100_000, "3", "null", '{"format": [1]}', '{"format": "1"}']
)
def test_an_invalid_summary_is_refused(whole: Path, text: str) -> None:
    """Deep nesting, on which Python gives up, is included."""
    valid = (whole / "summary.json").read_text()
    (whole / "summary.json").write_text(text)
    with pytest.raises(DataError, match="whole"):
        SpeechSet.open(whole)
    (whole / "remote.json").write_text(text)
    (whole / "summary.json").write_text(valid)
    with pytest.raises(DataError, match=r"remote\.json: cannot be read"):
        SpeechSet.open(whole)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"shards": [{"file": "../../x.tar", "num_bytes": 1}]}, r"shards\.0\.file: .*should match pattern"),
        ({"shards": [{"file": "/etc/hostname", "num_bytes": 1}]}, r"shards\.0\.file: .*should match pattern"),
        ({"shards": [{"file": "recording.000000.tar\0", "num_bytes": 1}]}, r"shards\.0\.file: .*should match pattern"),
        ({"shards": [{"file": "recording.000000.tar", "num_bytes": 1}] * 2}, r"it lists recording\.000000\.tar twice"),
        (
            {"shards": [{"file": "recording.000000.tar", "num_bytes": -1}]},
            r"shards\.0\.num_bytes: .*greater than or equal to 0",
        ),
        ({"shards": [{"file": 3, "num_bytes": 1}]}, r"shards\.0\.file: "),
        ({"shards": 3}, "shards: "),
        ({"utterances": -1}, "utterances: .*greater than or equal to 0"),
        ({"utterances": 10**40}, "utterances: .*less than 4611686018427387904"),
        ({"utterances": "6"}, "utterances: "),
        ({"sampling_rate": 0}, "sampling_rate: .*greater than or equal to 1000"),
        ({"seconds": float("nan")}, "seconds: .*finite number"),
        ({"files": {"../../x": ""}}, "its index has the files"),
        ({"utterances": 5}, "its contents do not match its SHA-256"),
        ({"digest": "another"}, "its contents do not match its SHA-256"),
    ],
)
def test_a_summary_is_not_believed(whole: Path, changes: dict[str, Any], problem: str) -> None:
    """Names that lead elsewhere, repeated names, and impossible numbers are refused."""
    path = whole / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(DataError, match=rf"summary\.json: cannot be read \({problem}"):
        SpeechSet.open(whole)


@pytest.mark.parametrize(
    ("name", "array", "problem"),
    [
        ("shard_of", np.full(COUNT, 3, "i4"), "values from 3 to 3, allowed are 0 to 2"),
        ("speaker_of", np.full(COUNT, -1, "i4"), "values from -1 to -1"),
        ("sizes", np.full(COUNT, -5, "i4"), "values from -5"),
        ("durations", np.full(COUNT, np.nan, "f4"), "values from nan"),
        ("num_samples", np.full(COUNT, 2**62, "i8"), "values from 4611686018427387904"),
        ("num_samples", np.full(COUNT, 2**40, "i8"), "the audio of u0 is damaged"),
        ("offsets", np.full(COUNT, 2**40, "i8"), "the audio of u0 is damaged"),
        ("offsets", np.zeros(COUNT, "f8"), "has type float64"),
        ("offsets", np.zeros((COUNT, 1), "i8"), "and 2 dimensions, not i8 and one"),
        ("offsets", np.zeros(COUNT + 1, "i8"), "7 entries for 6 utterances"),
        ("texts", np.full(48, 0xFF, "u1"), r"texts\.npy: entry 0 is damaged"),
        ("texts_ends", np.arange(COUNT, 0, -1), r"texts\.npy: entry 1 is damaged"),
        ("ids_ends", np.full(COUNT, 2**40), r"ids\.npy: entry 0 is damaged"),
    ],
)
def test_an_index_is_not_believed(whole: Path, name: str, array: np.ndarray, problem: str) -> None:
    """Places outside shards, texts that are missing or not UTF-8, and wrong types are refused, even with valid
    digests."""
    np.save(whole / "index" / f"{name}.npy", array)
    signed(whole)
    with pytest.raises(DataError, match=problem):
        content_of(whole)


def _replaced_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _replaced_by_link(path: Path) -> None:
    elsewhere = path.parents[2] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _replaced_by_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("name", ["summary.json", "index/ids.npy", "shar/recording.000001.tar"])
@pytest.mark.parametrize("harm", [_replaced_by_fifo, _replaced_by_link, _replaced_by_device])
def test_files_of_a_set_are_files(whole: Path, name: str, harm: Harm) -> None:
    """A pipe or a device would be read forever; a link may not lead out of the set."""
    harm(whole / name)
    with pytest.raises(DataError, match=rf"{name}: (not a regular file|a link that leads out|is missing)"):
        SpeechSet.open(whole)


def test_an_empty_shard_is_named(whole: Path) -> None:
    """A file that was created but never filled is not a set with fewer utterances."""
    name = "shar/recording.000001.tar"
    (whole / name).write_bytes(b"")
    with pytest.raises(DataError, match=name):
        SpeechSet.open(whole)


def test_a_flipped_bit_anywhere_in_the_audio_is_noticed(whole: Path) -> None:
    """This holds even where the codec would give silence, or the same samples, for it."""
    path = whole / "shar" / "recording.000000.tar"
    content = path.read_bytes()
    opened = SpeechSet.open(whole)
    start, size = (int(np.load(whole / "index" / f"{name}.npy")[1]) for name in ("offsets", "sizes"))
    for place in range(start, start + size, 7):
        spoilt = bytearray(content)
        spoilt[place] ^= 1 << place % 8
        path.write_bytes(spoilt)
        with pytest.raises(DataError, match=r"recording\.000000\.tar: the audio of u1 is damaged"):
            opened.audio(1)
        opened.close()


def test_a_set_of_an_older_version_is_refused_by_name(whole: Path) -> None:
    """Nothing was released before 0.2; the message says what to do."""
    fields = json.loads((whole / "summary.json").read_text())
    (whole / "summary.json").write_text(json.dumps({**fields, "format": 1}))
    with pytest.raises(DataError, match=r"format 1, this version reads format 2; remove the folder and run"):
        SpeechSet.open(whole)


@pytest.mark.parametrize("missing", ["files", "check"])
def test_a_summary_without_digests_is_damaged(whole: Path, missing: str) -> None:
    """Nothing in the index would be checked."""
    fields = json.loads((whole / "summary.json").read_text())
    del fields[missing]
    (whole / "summary.json").write_text(json.dumps(fields))
    with pytest.raises(DataError, match=r"summary\.json: cannot be read"):
        SpeechSet.open(whole)


@pytest.fixture
def shar(tmp_path: Path) -> Path:
    """A Shar folder of two cuts, as lhotse writes it."""
    folder = tmp_path / "corpus" / "shar"
    folder.mkdir(parents=True)
    with SharWriter(folder, fields={"recording": "flac"}) as writer:
        for i in range(2):
            write_wav(tmp_path / f"c{i}.wav", 0.1, seed=i)
            recording = Recording.from_file(tmp_path / f"c{i}.wav")
            said = SupervisionSegment(f"u{i}", recording.id, 0, 0.1, text="text", speaker="s")
            writer.write(MonoCut(f"u{i}", 0, 0.1, 0, supervisions=[said], recording=recording))
    assert len(list(CutSet.from_shar(in_dir=folder))) == 2
    return folder


def _read_shar(folder: Path) -> list[Any]:
    settings = {"kind": "lhotse", "path": folder.parent, "sets": {"train": folder.name}}
    corpus = TypeAdapter(CorpusConfig).validate_python(settings)
    return [utterance.read() for utterance in corpus.utterances("train")]


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


@pytest.mark.parametrize(
    ("member", "problem"),
    [
        (_member("../../outside.flac"), r"'\.\./\.\./outside\.flac' leads out of"),
        (_member("/tmp/outside.flac"), "'/tmp/outside.flac' leads out of"),
        (_member("a.flac", tarfile.SYMTYPE, "/etc/hostname"), "'a.flac' is not a regular file"),
        (_member("a.flac", tarfile.LNKTYPE, "u0.flac"), "'a.flac' is not a regular file"),
        (_member("a.flac", tarfile.CHRTYPE), "'a.flac' is not a regular file"),
        (_member("a.flac", tarfile.FIFOTYPE), "'a.flac' is not a regular file"),
        (_member("u0.flac"), r"contains 'u0\.flac' twice"),
    ],
)
def test_a_tar_with_members_that_are_no_audio_is_refused_by_name(
    shar: Path, tmp_path: Path, member: tarfile.TarInfo, problem: str
) -> None:
    """`..`, absolute names, links, devices and duplicates; nothing is written anywhere."""
    with tarfile.open(shar / "recording.000000.tar", "a") as tar:
        tar.addfile(member, io.BytesIO(b""))
    before = set(tmp_path.rglob("*"))
    with pytest.raises(DataError, match=rf"recording\.000000\.tar: {problem}"):
        _read_shar(shar)
    assert set(tmp_path.rglob("*")) == before


def test_a_mutated_shar_folder_is_read_or_refused(shar: Path) -> None:
    """300 mutations of its tar and its cuts raise nothing but DataError."""
    random = np.random.default_rng(3)
    files = sorted(shar.iterdir())
    whole = {path: path.read_bytes() for path in files}
    ends: Counter[str] = Counter()
    for number in range(300):
        victim = files[number % len(files)]
        content = whole[victim]
        if victim.suffix == ".gz":  # inside of the compression, where damage is not noticed by gzip
            content = gzip.compress(mutated(gzip.decompress(content), random, header=130), mtime=0)
        else:
            content = mutated(content, random, header=130)
        victim.write_bytes(content)
        with computing_below(1.0):
            try:
                _read_shar(shar)
                ends["read"] += 1
            except DataError:
                ends["refused"] += 1
        victim.write_bytes(whole[victim])
    assert ends["refused"] > 100 and len(_read_shar(shar)) == 2
