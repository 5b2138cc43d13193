"""Prepared sets in an object store: the same samples as on disk, few requests, and clear messages on failure."""

import json
import logging
import multiprocessing
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
from corpus_builders import RATE, write_table
from moto.server import ThreadedMotoServer
from tones import song_set

from starling.errors import DataError
from starling.speech import object_store
from starling.speech.data import DataConfig
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.object_store import address_problem
from starling.speech.prepare import describe, fetch_sets, prepare
from starling.speech.store import SpeechSet
from starling.speech.tokens import CharacterTokenizer
from starling.speech.training.workload import load_batch

BUCKET = "corpora"
COUNT = 12


class Requests(logging.Handler):
    """The requests that the server has answered; its log is not written elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def count(self, method: str) -> int:
        return sum(f"{method} /{BUCKET}" in line for line in self.lines)


class Store:
    """An S3 store on this machine with one bucket."""

    def __init__(self) -> None:
        self.requests = Requests()
        log = logging.getLogger("werkzeug")
        log.handlers, log.propagate, log.level = [self.requests], False, logging.INFO
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self.server.start()
        host, port = self.server.get_host_and_port()
        self.options = {"endpoint_url": f"http://{host}:{port}", "config_kwargs": {"retries": {"max_attempts": 1}}}
        self.client = boto3.client("s3", endpoint_url=self.options["endpoint_url"])
        self.client.create_bucket(Bucket=BUCKET)

    def upload(self, folder: Path) -> str:
        """Copy a folder into the bucket unchanged, and return its address."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.client.upload_file(str(path), BUCKET, str(path.relative_to(folder.parent)))
        return f"s3://{BUCKET}/{folder.name}"

    def replace(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(object_store, "PAUSES", (0.0, 0.0))
    log = logging.getLogger("werkzeug")
    before = log.handlers, log.propagate, log.level
    made = Store()
    try:
        yield made
    finally:
        made.server.stop()
        log.handlers, log.propagate, log.level = before


@pytest.fixture
def songs(tmp_path: Path) -> SpeechSet:
    return song_set(tmp_path / "songs" / "train", COUNT)


def silent(name: str, done: int, total: int) -> None:
    """A progress callback that shows nothing."""


def fetched(address: str, options: dict[str, object], folder: Path) -> SpeechSet:
    fetch_sets(address, options, folder, ["train"], 8000, silent)
    return SpeechSet.open(folder / "train")


def test_audio_in_a_bucket_is_the_audio_on_the_disk(store: Store, songs: SpeechSet, tmp_path: Path) -> None:
    """Samples, texts and whole batches agree, and a batch requests each of its utterances once."""
    remote = fetched(store.upload(songs.folder.parent), store.options, tmp_path / "here")
    assert not (remote.folder / "shar").exists()
    for index in range(COUNT):
        assert (remote.id(index), remote.text(index)) == (songs.id(index), songs.text(index))
        np.testing.assert_array_equal(remote.audio(index), songs.audio(index))
    store.requests.lines.clear()
    some = np.array([7, 0, 3, 11, 5])
    log_mel, tokenizer = LogMel(FeatureConfig(), 8000), CharacterTokenizer(" ADEFIMOR")
    found, expected = (load_batch(each, some, log_mel, None, tokenizer, seed=1) for each in (remote, songs))
    assert found.features.equal(expected.features) and found.ids == expected.ids
    assert store.requests.count("GET") == len(some)
    assert len(store.requests.lines) <= len(some) + 1  # and at most one question about the bucket


@pytest.mark.wide
def test_a_machine_copies_each_shard_once_and_then_asks_the_store_for_nothing(
    store: Store, songs: SpeechSet, tmp_path: Path
) -> None:
    """Any of its processes may be first. The rest of an interrupted copy is not used."""
    address, here, cache = store.upload(songs.folder.parent), tmp_path / "here", tmp_path / "cache"
    fetch_sets(address, store.options, here, ["train"], 8000, silent, cache)
    store.requests.lines.clear()
    shards = songs.summary.shards
    kept = Path(read_description(here)["cache"])
    assert kept.is_relative_to(cache)
    (kept / "shar").mkdir(parents=True)
    (kept / "shar" / f"{shards[0].file}.partial").write_bytes(b"interrupted")
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        sums = pool.map(heard, [here / "train"] * 6, chunksize=1)
    assert sums == [heard(songs.folder)] * 6
    gets = [line for line in store.requests.lines if "GET" in line and "shar" in line]
    assert len(gets) == len(shards)
    assert {path.name for path in (kept / "shar").iterdir()} == {
        name for shard in shards for name in (shard.file, f"{shard.file}.lock")
    }


def test_a_full_cache_and_a_missing_shard_are_named(store: Store, songs: SpeechSet, tmp_path: Path) -> None:
    address = store.upload(songs.folder.parent)
    (tmp_path / "file").write_text("no folder")
    fetch_sets(address, store.options, tmp_path / "a", ["train"], 8000, silent, tmp_path / "file")
    with pytest.raises(DataError, match=r"cannot be copied there .*; set data\.cache to a folder with room"):
        SpeechSet.open(tmp_path / "a" / "train").audio(0)
    fetch_sets(address, store.options, tmp_path / "b", ["train"], 8000, silent, tmp_path / "cache")
    (gone, *_) = songs.summary.shards
    store.client.delete_object(Bucket=BUCKET, Key=f"songs/train/shar/{gone.file}")
    with pytest.raises(DataError, match=f"{gone.file}: is missing"):
        SpeechSet.open(tmp_path / "b" / "train").audio(0)
    assert not list((tmp_path / "cache").rglob("*.partial"))


def read_description(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "train" / "remote.json").read_text(encoding="utf-8")))


def heard(folder: Path) -> float:
    """The sum of all samples of a set."""
    return total(SpeechSet.open(folder))


def test_an_index_is_fetched_once_and_again_when_it_has_changed(store: Store, songs: SpeechSet, tmp_path: Path) -> None:
    """A second call reads only the summary and the sizes; a set that was prepared again replaces the old one."""
    address = store.upload(songs.folder.parent)
    arguments = (address, store.options, tmp_path / "here", ["train"], 8000, silent)
    assert fetch_sets(*arguments) == ["train"]
    store.requests.lines.clear()
    assert fetch_sets(*arguments) == []
    assert store.requests.count("GET") <= 2
    shutil.rmtree(songs.folder)
    song_set(songs.folder, COUNT + 3)
    store.upload(songs.folder.parent)
    assert fetch_sets(*arguments) == ["train"]
    assert len(SpeechSet.open(tmp_path / "here" / "train")) == COUNT + 3
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["train"]


def total(opened: SpeechSet) -> float:
    return float(sum(np.abs(each.samples).sum() for each in opened.read(range(len(opened)))))


@pytest.mark.wide
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_make_their_own_connections(store: Store, songs: SpeechSet, tmp_path: Path, method: str) -> None:
    """A set that already has a connection can be handed to forked and to spawned processes."""
    remote = fetched(store.upload(songs.folder.parent), store.options, tmp_path / "here")
    expected = total(songs)
    assert total(remote) == expected
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.map_async(total, [remote]).get(timeout=60) == [expected]
    assert total(remote) == expected


def test_a_deleted_object_is_named(store: Store, songs: SpeechSet, tmp_path: Path) -> None:
    """A missing shard is named with its address, at once and not utterance by utterance, also when fetching."""
    address = store.upload(songs.folder.parent)
    remote = fetched(address, store.options, tmp_path / "here")
    store.client.delete_object(Bucket=BUCKET, Key="songs/train/shar/recording.000000.tar")
    with pytest.raises(DataError, match=r"s3://corpora/songs/train/shar/recording\.000000\.tar: is missing"):
        remote.read([1, 2])
    with pytest.raises(DataError, match=r"recording\.000000\.tar: is missing"):
        fetch_sets(address, store.options, tmp_path / "elsewhere", ["train"], 8000, silent)
    assert not any((tmp_path / "elsewhere").glob("*"))


def test_a_missing_set_is_named(store: Store, tmp_path: Path) -> None:
    """The message has the address of its summary."""
    with pytest.raises(DataError, match=r"s3://corpora/nothing/train/summary\.json: is missing"):
        fetch_sets(f"s3://{BUCKET}/nothing", store.options, tmp_path, ["train"], 8000, silent)


def test_damaged_and_missing_bytes_are_named(store: Store, songs: SpeechSet, tmp_path: Path) -> None:
    """If an object changed after it was fetched, each damaged utterance has its own error, and no other has one."""
    remote = fetched(store.upload(songs.folder.parent), store.options, tmp_path / "here")
    shard = songs.folder / "shar" / "recording.000000.tar"
    content = bytearray(shard.read_bytes())
    place = songs._range(4)
    content[place.offset : place.offset + place.size] = bytes(place.size)
    store.replace("songs/train/shar/recording.000000.tar", bytes(content[: songs._range(8).offset + 100]))
    found = [each.samples for each in remote.read(range(COUNT))]
    assert [isinstance(each, DataError) for each in found] == [n == 4 or n >= 8 for n in range(COUNT)]
    assert "s3://corpora/songs/train/shar/recording.000000.tar: the audio of song-4 is damaged" in str(found[4])
    assert "only 100 of" in str(found[8]) and "only 0 of" in str(found[9])


@pytest.mark.wide
def test_refused_access_says_where_credentials_belong(
    store: Store, songs: SpeechSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without credentials the message names the object and the environment; nothing is tried again."""
    address = store.upload(songs.folder.parent)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"summary\.json: access is refused .*credentials file"):
        fetch_sets(address, store.options, tmp_path / "here", ["train"], 8000, silent)


@pytest.mark.wide
def test_a_store_that_does_not_answer_is_tried_a_few_times_and_named(
    store: Store, songs: SpeechSet, tmp_path: Path
) -> None:
    """After the last attempt, the message has their number and the network's answer."""
    remote = fetched(store.upload(songs.folder.parent), store.options, tmp_path / "here")
    store.server.stop()
    with pytest.raises(DataError, match=r"recording\.000000\.tar: cannot be read after 3 tries .*check the network"):
        remote.read([0, 1])


def test_a_temporary_failure_goes_unnoticed(
    store: Store, songs: SpeechSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the ranges that failed are requested again."""
    remote = fetched(store.upload(songs.folder.parent), store.options, tmp_path / "here")
    ask, asked = object_store.ObjectFolder._cat, []

    def fail_once(self, ranges, system, places):
        pieces = ask(self, ranges, system, places)
        asked.append(len(places))
        return [ConnectionResetError("reset"), *pieces[1:]] if len(asked) == 1 else pieces

    monkeypatch.setattr(object_store.ObjectFolder, "_cat", fail_once)
    for found, index in zip(remote.read([2, 5, 6]), [2, 5, 6], strict=True):
        np.testing.assert_array_equal(found.samples, songs.audio(index))
    assert asked == [3, 1]


def test_a_local_folder_is_an_address_too(songs: SpeechSet, tmp_path: Path) -> None:
    """`file://` reads a copied folder, such as one on a network file system, without any other package."""
    remote = fetched(f"file://{songs.folder.parent}", {}, tmp_path / "here")
    assert json.loads((remote.folder / "remote.json").read_text())["address"] == f"file://{songs.folder}/shar"
    assert total(remote) == total(songs)
    (songs.folder / "shar" / "recording.000000.tar").unlink()
    with pytest.raises(DataError, match=r"recording\.000000\.tar: is missing"):
        remote.audio(0)


def test_a_damaged_index_is_named_where_it_is_damaged(songs: SpeechSet, tmp_path: Path) -> None:
    """The error names the store, not the copy, of which nothing remains."""
    shutil.copytree(songs.folder.parent, tmp_path / "store")
    ids = tmp_path / "store" / songs.folder.name / "index" / "ids.npy"
    ids.write_bytes(ids.read_bytes()[:-9])
    with pytest.raises(
        DataError, match=rf"file://{ids}: cannot be read .*the set in the store is damaged: copy it again"
    ):
        fetched(f"file://{tmp_path / 'store'}", {}, tmp_path / "here")
    assert not list((tmp_path / "here").iterdir())


def test_a_set_that_was_prepared_here_is_never_replaced(songs: SpeechSet, tmp_path: Path) -> None:
    """Fetching into the folder of a set with shards is refused, and the set is still there."""
    shutil.copytree(songs.folder.parent, tmp_path / "copy")
    with pytest.raises(DataError, match="contains a set that was prepared on this machine"):
        fetch_sets(f"file://{tmp_path}/copy", {}, songs.folder.parent, ["train"], 8000, silent)
    assert total(SpeechSet.open(songs.folder)) > 0


def test_a_different_sampling_rate_is_refused(songs: SpeechSet, tmp_path: Path) -> None:
    """The message has both rates."""
    with pytest.raises(DataError, match=r"prepared at 8000 Hz.* is 16000 Hz"):
        fetch_sets(f"file://{songs.folder.parent}", {}, tmp_path / "here", ["train"], 16000, silent)


def test_a_store_whose_package_is_missing_names_the_extra(tmp_path: Path) -> None:
    """The message says which package reads such addresses, and what to install for S3."""
    with pytest.raises(DataError, match=r"reading oss:// needs a package .*ossfs.*install starling-asr\[cloud\]"):
        fetch_sets("oss://bucket/corpus", {}, tmp_path, ["train"], 8000, silent)


@pytest.mark.parametrize(
    ("address", "options", "message"),
    [
        ("memory://corpus", {}, "memory of one process"),
        ("s4://bucket/corpus", {}, "s4:// is unknown"),
        ("corpora/fsdd", {}, "no protocol"),
        ("s3://bucket/corpus", {"secret": "x"}, "must not contain secret"),
        (
            "s3://bucket/corpus",
            {"client_kwargs": {"aws_secret_access_key": "x"}},
            "must not contain aws_secret_access_key",
        ),
    ],
)
def test_impossible_addresses_and_secrets_are_refused(address: str, options: dict, message: str) -> None:
    """They are refused before anything is fetched, and without showing the secret; good ones have no problem."""
    problem = address_problem(address, options)
    assert problem is not None and message in problem and "'x'" not in problem
    assert address_problem("s3://bucket/corpus", {"anon": True, "endpoint_url": "http://127.0.0.1"}) is None


def test_preparing_fetches_what_another_machine_has_prepared(tmp_path: Path) -> None:
    """With data.remote, the corpus need not exist here; without it, a set is prepared where its index was."""
    table = write_table(tmp_path / "corpus")
    config = {"folder": tmp_path / "there", "sampling_rate": RATE, "filter": {"min_seconds": 0.1}, "valid": None}
    config["corpus"] = {
        "kind": "tsv", "path": str(table), "sets": {"train": {"split": "train"}, "test": {"split": "test"}}
    }  # fmt: skip
    prepare(DataConfig.model_validate(config))
    table.rename(tmp_path / "away.tsv")
    config |= {"folder": tmp_path / "here", "remote": f"file://{tmp_path}/there"}
    remote = DataConfig.model_validate(config)
    assert prepare(remote).written == ("train", "test") and prepare(remote).written == ()
    assert "train: 8 utterances" in describe(prepare(remote))
    opened = SpeechSet.open(remote.set_folder("train"))
    assert not (opened.folder / "shar").exists() and total(opened) > 0
    (tmp_path / "away.tsv").rename(table)
    assert prepare(DataConfig.model_validate({**config, "remote": None})).written == ("train", "test")
    assert (opened.folder / "shar").is_dir() and not (opened.folder / "remote.json").exists()


def test_a_recipe_with_secrets_is_refused_without_showing_them(tmp_path: Path) -> None:
    """The message says where they belong."""
    corpus = {"kind": "synthetic", "sets": {"train": 1, "dev": 1, "test": 1}}
    with pytest.raises(ValueError, match="must not contain secret") as caught:
        DataConfig.model_validate(
            {"folder": tmp_path, "corpus": corpus, "remote": "s3://bucket/x", "storage_options": {"secret": "hidden"}}
        )
    assert "must not contain" in caught.value.errors()[0]["msg"] and "hidden" not in caught.value.errors()[0]["msg"]
