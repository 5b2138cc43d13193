"""The prepared set: random access and lhotse read back what was written."""

import copy
import multiprocessing
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
from corpus_builders import RATE, sound
from hypothesis import given, settings
from hypothesis import strategies as st
from lhotse import CutSet

from benchmarks.speech_writer import SpeechWriter
from starling.errors import DataError
from starling.speech.shards import MAX_OPEN_SHARDS
from starling.speech.store import SpeechSet

_IDS = st.text(st.characters(categories=("L", "N"), include_characters="-_"), min_size=1, max_size=150)
_TEXTS = st.text(st.characters(categories=("L", "M", "N", "P", "S")), min_size=1, max_size=60)


def _written(folder: Path, ids: Sequence[str], texts: Sequence[str], shard_size: int = 4) -> SpeechSet:
    with SpeechWriter(folder, "train", RATE, shard_size) as writer:
        for i, (name, text) in enumerate(zip(ids, texts, strict=True)):
            writer.write(name, f"speaker{i % 3}", text, sound(0.01 + 0.003 * i, seed=i) / np.float32(32768))
        writer.finish("digest")
    return SpeechSet.open(folder)


@pytest.fixture
def small_set(tmp_path: Path) -> SpeechSet:
    return _written(tmp_path / "set", [f"u{i}" for i in range(10)], [f"TEXT {i}" for i in range(10)])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(_IDS, _TEXTS), min_size=1, max_size=12, unique_by=lambda pair: pair[0]))
def test_random_access_equals_what_lhotse_reads_from_the_shards(pairs: list[tuple[str, str]]) -> None:
    """Ids, texts, speakers, durations and every sample agree with CutSet.from_shar, in any order."""
    with tempfile.TemporaryDirectory() as folder:
        opened = _written(Path(folder) / "set", [i for i, _ in pairs], [t for _, t in pairs])
        cuts = list(CutSet.from_shar(in_dir=Path(folder) / "set" / "shar"))
        assert len(opened) == len(cuts) == len(pairs)
        for i in reversed(range(len(opened))):
            (supervision,) = cuts[i].supervisions
            assert (opened.id(i), opened.text(i)) == (cuts[i].id, supervision.text) == pairs[i]
            assert opened.speaker(i) == supervision.speaker
            assert opened.durations[i] == np.float32(cuts[i].duration)
            np.testing.assert_array_equal(opened.audio(i), cuts[i].load_audio()[0])
        opened.close()


def test_sixteen_bit_audio_comes_back_to_the_bit(small_set: SpeechSet) -> None:
    """FLAC keeps 16-bit recordings without loss, mono, as float32 in -1..1."""
    for i in range(len(small_set)):
        samples = small_set.audio(i)
        assert samples.dtype == np.float32
        np.testing.assert_array_equal(samples * 32768, sound(0.01 + 0.003 * i, seed=i))


def test_samples_beyond_full_scale_are_clipped_and_do_not_wrap(tmp_path: Path) -> None:
    """A sample of 1.5 is stored as the largest 16-bit value."""
    with SpeechWriter(tmp_path / "set", "train", RATE) as writer:
        writer.write("loud", "s", "LOUD", np.array([1.5, -1.5, 0.0] * 100, np.float32))
        writer.finish("digest")
    assert SpeechSet.open(tmp_path / "set").audio(0)[:3].tolist() == [32767 / 32768, -1.0, 0.0]


def test_a_set_that_was_never_prepared_says_which_command_to_run(tmp_path: Path) -> None:
    """The error names the folder and `starling prepare`."""
    with pytest.raises(DataError, match=r"train.*run `starling prepare"):
        SpeechSet.open(tmp_path / "train")


@pytest.mark.parametrize("victim", ["shar/recording.000001.tar", "index/offsets.npy", "index/texts.npy"])
def test_a_missing_or_truncated_file_is_named(small_set: SpeechSet, victim: str) -> None:
    """Opening a set checks its files; the message names the one at fault."""
    path = small_set.folder / victim
    path.write_bytes(path.read_bytes()[:64])
    with pytest.raises(DataError, match=path.name):
        SpeechSet.open(small_set.folder)
    path.unlink()
    with pytest.raises(DataError, match=path.name):
        SpeechSet.open(small_set.folder)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99}', '{"format": 1}', '{"format": 2}'])
def test_a_damaged_summary_is_named(small_set: SpeechSet, content: str) -> None:
    """An unreadable summary, or one of another version, is a DataError that names the folder."""
    (small_set.folder / "summary.json").write_text(content)
    with pytest.raises(DataError, match=str(small_set.folder)):
        SpeechSet.open(small_set.folder)


def test_overwritten_audio_is_an_error_that_names_the_utterance(small_set: SpeechSet) -> None:
    """Bytes that are no longer FLAC are a DataError with the id, never noise."""
    shard = small_set.folder / "shar" / "recording.000000.tar"
    shard.write_bytes(b"\0" * shard.stat().st_size)
    with pytest.raises(DataError, match="audio of u0 is damaged"):
        SpeechSet.open(small_set.folder).audio(0)


def test_an_index_outside_the_set_is_refused(small_set: SpeechSet) -> None:
    """Neither negative nor too large indices wrap around to another utterance."""
    for i in (-1, len(small_set)):
        with pytest.raises(IndexError, match="which has 10"):
            small_set.text(i)


def _total(opened: SpeechSet) -> float:
    return float(sum(np.abs(opened.audio(i)).sum() for i in range(len(opened))))


@pytest.mark.wide
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_the_same_audio_as_their_parent(small_set: SpeechSet, method: str) -> None:
    """A set whose files are already open can be handed to forked and to spawned workers."""
    expected = _total(small_set)
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(_total, [small_set] * 4) == [expected] * 4
    assert _total(small_set) == expected


def test_a_copy_carries_no_data(small_set: SpeechSet) -> None:
    """Only the path is pickled for a worker; the copy is the same set with no file open."""
    small_set.audio(0)
    assert small_set.__reduce__()[1] == (small_set.folder.absolute(), True)
    assert [copy.copy(small_set).id(i) for i in range(10)] == [small_set.id(i) for i in range(10)]


def _num_open_files() -> int:
    return psutil.Process().num_fds()


def test_open_files_stay_bounded_however_many_shards(tmp_path: Path) -> None:
    """Reading every shard keeps at most MAX_OPEN_SHARDS files open, and `close` closes them."""
    count = MAX_OPEN_SHARDS + 20
    opened = _written(tmp_path / "set", [f"u{i}" for i in range(count)], ["A"] * count, shard_size=1)
    before = _num_open_files()
    for i in range(count):
        opened.audio(i)
    assert _num_open_files() == before + MAX_OPEN_SHARDS
    opened.close()
    assert _num_open_files() == before


def test_the_index_of_a_million_utterances_takes_less_than_200_megabytes(tmp_path: Path) -> None:
    """Besides its id and text, an utterance costs at most 54 bytes of index."""
    count = 300
    opened = _written(tmp_path / "set", [f"{i:030}" for i in range(count)], ["X" * 100] * count, shard_size=100)
    headers = 13 * 200
    size = sum(path.stat().st_size for path in (opened.folder / "index").iterdir()) - headers
    assert size / count <= 30 + 100 + 54
