"""Preparation in stages: the same bytes wherever they run, nothing done twice, and the same errors as in one
process."""

import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import soundfile
import yaml
from corpus_builders import RATE, replace_row, sound, write_table, write_wav
from lhotse import CutSet

from benchmarks.ray_cluster import RayCluster
from starling.cli import app
from starling.errors import ConfigError, DataError, MissingExtraError
from starling.launch.on_ray import connected
from starling.reporting.progress import Bars
from starling.speech.cli import prepare as prepare_recipe
from starling.speech.corpora import Utterance
from starling.speech.data import DataConfig
from starling.speech.prepare import make_set, prepare
from starling.speech.prepare_stages import Executor, OnRay, Processes, Stage, executor_of
from starling.speech.store import SpeechSet
from starling.speech.usable import Checking, FilterConfig, Source
from tests.speech.deadly import read_or_die

_FORK = multiprocessing.get_context("fork")
_SKIP = {"on_bad": "skip", "max_skipped": 0.5}


def _settings(folder: Path, table: Path, **settings: object) -> dict[str, object]:
    corpus = {"kind": "tsv", "path": str(table), "sets": {"train": {}}}
    plain: dict[str, object] = {"folder": str(folder), "corpus": corpus, "sampling_rate": RATE, "shard_size": 5}
    return plain | {"valid": None, "test": []} | settings


def _config(folder: Path, table: Path, **settings: object) -> DataConfig:
    return DataConfig.model_validate(_settings(folder, table, **settings))


def _bytes(folder: Path) -> dict[str, bytes]:
    """The contents of every file that a preparation left."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def _ids(folder: Path) -> list[str]:
    opened = SpeechSet.open(folder)
    return [opened.id(i) for i in range(len(opened))]


def _marks(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of change of every shard, which stay the same when it is used again."""
    found = {path.name: path.stat() for path in folder.glob("recording.*.tar")}
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in found.items()}


def _silence(table: Path, *utterances: str) -> None:
    for each in utterances:
        soundfile.write(table.parent / "audio" / f"{each}.wav", sound(0.4) * 0, RATE)


@pytest.fixture
def stages_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The numbers of the stages of a test that this process has run."""
    numbers: list[int] = []
    run = Stage.run

    def counted(stage: Stage, tick: Callable[[int], None]) -> int:
        if stage.work.is_relative_to(tmp_path):
            numbers.append(stage.number)
        return run(stage, tick)

    monkeypatch.setattr(Stage, "run", counted)
    return numbers


def _prepare_by_command(recipe: Path, progress: Connection) -> None:
    """Run the command in its own process group; it waits forever once it has reported its progress."""

    def tell_and_wait(bars: Bars, name: str, done: int, total: int) -> None:
        progress.send(done)
        signal.pause()

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    Bars.__call__ = tell_and_wait  # type: ignore[method-assign]
    app(["prepare", str(recipe), "jobs=2"])


@pytest.mark.wide
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_preparation_can_be_resumed_and_leaves_no_process(
    tmp_path: Path, stages_run: list[int], end: signal.Signals
) -> None:
    """After SIGKILL of one process or Ctrl-C to all, finished shards are used again, and the bytes are those of an
    uninterrupted run."""
    table = write_table(tmp_path / "corpus", count=60, seconds=0.1)
    recipe = tmp_path / "recipe.yaml"
    settings = _settings(tmp_path / "data", table)
    recipe.write_text(yaml.safe_dump({"name": "r", "budget": {"epochs": 1}, "data": settings}))
    told, telling = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_prepare_by_command, args=(recipe, telling))
    process.start()
    assert told.poll(120)
    assert told.recv() >= 25
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    if end == signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid or 0, end)
    process.join(60)
    assert process.exitcode == (-end if end == signal.SIGKILL else 128 + end)
    assert psutil.wait_procs(children, timeout=10)[1] == []

    assert not (tmp_path / "data" / "train").exists()
    (work,) = (tmp_path / "data" / "train.partial").iterdir()
    finished = [int(path.name.split(".")[1]) for path in (work / "stages").iterdir()]
    before = _marks(work / "set" / "shar")
    marks = {name: before[name] for name in (f"recording.{number:06d}.tar" for number in finished)}
    assert 3 <= len(finished) < 12
    prepare(_config(tmp_path / "data", table))
    assert sorted(stages_run + finished) == list(range(12))
    assert marks.items() <= _marks(tmp_path / "data" / "train" / "shar").items()
    prepare(_config(tmp_path / "whole", table))
    assert _bytes(tmp_path / "data") == _bytes(tmp_path / "whole")


def _prepare_on_a_full_disk(config: DataConfig, answer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    try:
        prepare(config)
    except DataError as error:
        answer.send(str(error))


def test_a_full_disk_is_reported_and_finished_shards_are_used(tmp_path: Path, stages_run: list[int]) -> None:
    """The message names the folder, no partial file remains, and the next call continues once there is space."""
    table = write_table(tmp_path / "corpus", count=15)
    write_wav(table.parent / "audio" / "u12.wav", 15.0)
    config = _config(tmp_path / "data", table)
    answer, answering = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_prepare_on_a_full_disk, args=(config, answering))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    message = answer.recv()
    assert "set train: " in message
    assert "train.partial cannot be written: [Errno 27]" in message
    (work,) = (tmp_path / "data" / "train.partial").iterdir()
    assert sorted(path.name for path in work.rglob("*.tar")) == ["recording.000000.tar", "recording.000001.tar"]
    assert not list(work.glob("aside-*"))
    prepare(config)
    assert stages_run == [2]


@pytest.fixture(scope="module")
def pool() -> Iterator[Processes]:
    """Two processes, for all tests that need several."""
    with Processes(2) as processes:
        yield processes


@pytest.fixture(scope="module")
def ray(ray_head: RayCluster) -> Iterator[Executor]:
    """A running Ray cluster with one CPU."""
    with executor_of(["executor=ray"], ray_head.address) as executor:
        yield executor


def _mixed_corpus(folder: Path) -> Path:
    """A corpus with a different rate, silence, audio that is too short, a whole chunk of such audio, and an id that
    occurs twice."""
    table = write_table(folder, count=42, seconds=0.1)
    write_wav(folder / "audio" / "u1.wav", 0.7, rate=16000)
    _silence(table, "u7", "u30")
    for i in range(15, 20):
        write_wav(folder / "audio" / f"u{i}.wav", 0.05)
    replace_row(table, "u37", id="u2")
    return table


@pytest.mark.parametrize("strings", [None, {"copies": 2}])
def test_the_bytes_do_not_depend_on_where_shards_are_written(
    tmp_path: Path, pool: Processes, ray: Executor, strings: dict[str, object] | None
) -> None:
    """One process, two, and the nodes of a Ray cluster: every file is the same."""
    table = _mixed_corpus(tmp_path / "corpus")
    made = {}
    for name, executor in {"one": None, "pool": pool, "ray": ray}.items():
        prepare(_config(tmp_path / name, table, filter=_SKIP, strings=strings), None, executor)
        made[name] = _bytes(tmp_path / name)
    assert len(made["one"]) > 15
    assert made["one"] == made["pool"] == made["ray"]


def test_an_empty_shard_is_not_written(tmp_path: Path) -> None:
    """The other shards keep their numbers, and lhotse reads them in order."""
    table = _mixed_corpus(tmp_path / "corpus")
    prepare(_config(tmp_path / "data", table, filter=_SKIP))
    folder = tmp_path / "data" / "train"
    wanted = [f"u{i}" for i in range(42) if i not in (7, 15, 16, 17, 18, 19, 30, 37)]
    assert _ids(folder) == [cut.id for cut in CutSet.from_shar(in_dir=folder / "shar")] == wanted
    assert not (folder / "shar" / "recording.000003.tar").exists()
    assert not (folder / "shar" / "cuts.000003.jsonl.gz").exists()
    assert [shard.file for shard in SpeechSet.open(folder).summary.shards] == [
        f"recording.{number:06d}.tar" for number in (0, 1, 2, 4, 5, 6, 7, 8)
    ]


def _problem(config: DataConfig, executor: Executor | None) -> str:
    with pytest.raises(DataError) as caught:
        prepare(config, None, executor)
    return str(caught.value)


def test_an_error_of_another_process_is_the_one_that_this_process_would_raise(
    tmp_path: Path, pool: Processes, ray: Executor
) -> None:
    """The first error in the order of the corpus is raised, although a later shard and the table itself are wrong,
    too."""
    table = write_table(tmp_path / "corpus", count=30)
    _silence(table, "u7", "u11")
    with table.open("a") as file:
        file.write("a row of one column\n")
    strict = {"on_bad": "fail"}
    here = _problem(_config(tmp_path / "one", table, filter=strict), None)
    assert here == _problem(_config(tmp_path / "pool", table, filter=strict), pool)
    assert here == _problem(_config(tmp_path / "ray", table, filter=strict), ray)
    assert "utterance 'u7'" in here
    assert "corpus.tsv:9): the audio is silent" in here


@pytest.mark.wide
def test_after_an_error_finished_shards_are_kept_and_the_wrong_one_is_rewritten(
    tmp_path: Path, pool: Processes, stages_run: list[int]
) -> None:
    """Nothing looks finished, and preparing the corrected corpus repeats only what was wrong."""
    table = write_table(tmp_path / "corpus", count=15)
    _silence(table, "u12", "u13")
    config = _config(tmp_path / "data", table)
    _problem(config, pool)
    with pytest.raises(DataError, match="no prepared data"):
        SpeechSet.open(tmp_path / "data" / "train")
    for each in ("u12", "u13"):
        write_wav(table.parent / "audio" / f"{each}.wav", 0.4)
    prepare(config)
    assert stages_run == [2]
    assert len(_ids(tmp_path / "data" / "train")) == 15


@pytest.mark.wide
@pytest.mark.parametrize("away", [False, True])
def test_the_limit_of_skipped_utterances_is_that_of_the_whole_set(tmp_path: Path, pool: Processes, away: bool) -> None:
    """Two of 40 in different shards are 5 %; after repairing the audio, nothing needs to be removed by hand."""
    table = write_table(tmp_path / "corpus", count=40)
    _silence(table, "u7", "u30")
    executor = pool if away else None
    tight = _config(tmp_path / "data", table, filter={"on_bad": "skip", "max_skipped": 0.04})
    message = _problem(tight, executor)
    assert "2 of 40 utterances are unusable" in message
    assert message.index("'u7'") < message.index("'u30'")
    exact = _config(tmp_path / "exact", table, filter={"on_bad": "skip", "max_skipped": 0.05})
    assert prepare(exact, None, executor).sets[0].dropped == 2
    for each in ("u7", "u30"):
        write_wav(table.parent / "audio" / f"{each}.wav", 0.4)
    assert prepare(tight, None, executor).sets[0].utterances == 40


@pytest.mark.wide
@pytest.mark.parametrize("away", [False, True])
def test_a_duplicate_id_is_reported_whichever_shards_have_it(tmp_path: Path, pool: Processes, away: bool) -> None:
    """The error names its second place, as in one shard; if skipped, the same utterances remain as with one shard."""
    table = write_table(tmp_path / "corpus", count=30)
    for row, other in (("u6", "u1"), ("u16", "u1"), ("u17", "u1"), ("u25", "u9")):
        replace_row(table, row, id=other)
    executor = pool if away else None
    message = _problem(_config(tmp_path / "data", table, filter={"on_bad": "fail"}), executor)
    assert "utterance 'u1'" in message
    assert "corpus.tsv:8): an earlier utterance has the same id" in message
    _silence(table, "u9")
    for name, shard_size in (("parts", 5), ("whole", 1000)):
        prepare(_config(tmp_path / name, table, filter=_SKIP, shard_size=shard_size), None, executor)
    parts, whole = tmp_path / "parts" / "train", tmp_path / "whole" / "train"
    assert _ids(parts) == _ids(whole)
    assert _ids(parts).count("u9") == 1
    assert (parts / "dropped.tsv").read_bytes() == (whole / "dropped.tsv").read_bytes()


def _stopped_at(config: DataConfig, utterances: int) -> None:
    """Start a preparation, and stop it."""

    def stop(name: str, done: int, total: int) -> None:
        if done >= utterances:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config, stop)


def test_stages_with_other_settings_are_discarded(tmp_path: Path, stages_run: list[int]) -> None:
    """Finished stages count only for identical settings."""
    table = write_table(tmp_path / "corpus", count=30)
    _stopped_at(_config(tmp_path / "data", table), 25)
    stages_run.clear()
    changed = _config(tmp_path / "data", table, text="lower")
    prepare(changed)
    assert stages_run == list(range(6))
    assert SpeechSet.open(tmp_path / "data" / "train").text(0) == "word0"
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [".lock", "train"]


def test_stages_of_a_changed_list_are_repeated(tmp_path: Path, stages_run: list[int]) -> None:
    """A changed row costs its shard, and shards beyond the end of a shorter list are removed."""
    table = write_table(tmp_path / "corpus", count=40)
    config = _config(tmp_path / "data", table)
    _stopped_at(config, 25)
    replace_row(table, "u6", text="other")
    replace_row(table, "u11", audio="audio/u30.wav")
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:19]))
    stages_run.clear()
    prepare(config)
    assert stages_run == [1, 2, 3]
    prepare(_config(tmp_path / "whole", table))
    assert _bytes(tmp_path / "data") == _bytes(tmp_path / "whole")


def test_a_missing_or_shortened_shard_of_a_finished_stage_is_written_again(
    tmp_path: Path, stages_run: list[int]
) -> None:
    """A stage is finished only while its files have their sizes."""
    table = write_table(tmp_path / "corpus", count=40)
    config = _config(tmp_path / "data", table)
    _stopped_at(config, 25)
    (shards,) = (tmp_path / "data" / "train.partial").glob("*/set/shar")
    (shards / "cuts.000001.jsonl.gz").unlink()
    tar = shards / "recording.000002.tar"
    tar.write_bytes(tar.read_bytes()[:-10])
    stages_run.clear()
    prepare(config)
    assert stages_run == [1, 2, 4, 5, 6, 7]
    prepare(_config(tmp_path / "whole", table))
    assert _bytes(tmp_path / "data") == _bytes(tmp_path / "whole")


def test_progress_counts_the_utterances_of_all_processes(tmp_path: Path, pool: Processes) -> None:
    """It never falls, and ends with all."""
    calls: list[int] = []
    prepare(
        _config(tmp_path / "data", write_table(tmp_path / "corpus", count=60)),
        lambda *call: calls.append(call[1]),
        pool,
    )
    assert calls == sorted(calls)
    assert calls[-1] == 60


@pytest.mark.wide
def test_a_process_that_dies_is_reported_with_its_shard(tmp_path: Path) -> None:
    """The process ends as if the system had killed it for lack of memory."""
    deadly = [Utterance("u0", "s", "TEXT", "nowhere", partial(os._exit, 9))]
    plan = Source(Checking("train", RATE, "as-is", FilterConfig()), lambda: deadly, digest="d" * 64, shard_size=5)
    with (
        Processes(1) as processes,
        pytest.raises(DataError, match="set train: the process that wrote shard 0 ended unexp"),
    ):
        make_set(plan, tmp_path / "train", processes, lambda *call: None)
    assert list(tmp_path.iterdir()) == []


def _plan(mark: Path | None) -> Source:
    """A set of two shards, the second of which is deadly."""
    alive = partial(read_or_die, Path(__file__))
    listed = [
        Utterance(f"u{i}", "s", "TEXT", "nowhere", load) for i, load in enumerate([alive, partial(read_or_die, mark)])
    ]
    return Source(Checking("train", RATE, "as-is", FilterConfig()), lambda: listed, digest="d" * 64, shard_size=1)


def test_ray_repeats_the_stage_of_a_lost_process(tmp_path: Path, ray: Executor) -> None:
    """The bytes are those of an undisturbed preparation."""
    mark = tmp_path / "mark"
    for name, executor in {"ray": ray, "one": Executor()}.items():
        folder = tmp_path / name
        folder.mkdir()
        make_set(_plan(mark), folder / "train", executor, lambda *call: None)
        assert mark.exists()
    assert _bytes(tmp_path / "ray") == _bytes(tmp_path / "one")
    assert _ids(tmp_path / "ray" / "train") == ["u0", "u1"]


def test_a_stage_that_no_process_of_ray_survives_is_reported_and_the_others_are_kept(
    tmp_path: Path, ray_head: RayCluster
) -> None:
    """The stage is not repeated forever."""
    folder, partial_folder = tmp_path / "train", tmp_path / "train.partial"
    with (
        OnRay(partial(connected, ray_head.address), retries=0) as executor,
        pytest.raises(DataError, match=r"set train: Ray could not write shard 1: .*data\.shard_size; repeat"),
    ):
        make_set(_plan(None), folder, executor, lambda *call: None)
    assert [path.name for path in partial_folder.glob("*/stages/*")] == ["written.000000.json"]


def test_a_missing_ray_cluster_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes within seconds, and nothing of the set remains."""
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # of other tests
    config = _config(tmp_path / "data", write_table(tmp_path / "corpus"))
    with (
        executor_of(["executor=ray"], "127.0.0.1:9") as executor,
        pytest.raises(ConfigError, match=r"executor=ray: no Ray cluster at 127\.0\.0\.1:9 .*ray start --head.*jobs=N"),
    ):
        prepare(config, None, executor)
    assert [path.name for path in (tmp_path / "data").iterdir()] == [".lock"]


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised before anything is read."""
    monkeypatch.setattr("starling.errors.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"executor=ray needs ray: pip install 'starling-asr\[ray\]'"):
        executor_of(["executor=ray"])


def test_processes_are_started_only_on_request() -> None:
    """One job needs no pool, and more have one."""
    assert type(executor_of([])) is Executor
    assert type(executor_of(["jobs=1"])) is Executor
    assert isinstance(executor_of(["jobs=2"]), Processes)


def test_wrong_arguments_and_a_wrong_recipe_are_reported_together(tmp_path: Path) -> None:
    """A single error lists everything that is wrong."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: r\n")
    with pytest.raises(ConfigError) as caught:
        prepare_recipe(recipe, ["jobs=none", "executor=spark", "budgt.epochs=1"], debug=True)
    for part in ("jobs: must be a whole number from 1", "got 'spark'", "budgt: unknown key", "data: missing"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="jobs: executor=ray uses all CPUs of the cluster"):
        executor_of(["jobs=2", "executor=ray"])
