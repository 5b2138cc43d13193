"""From a corpus to prepared sets: checked, filtered, resampled, and written as Shar shards."""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from starling.configuration import Config
from starling.errors import DataError
from starling.speech.check.config import CheckConfig
from starling.speech.corpora import CorpusConfig, Utterance
from starling.speech.left_out import left_out_of
from starling.speech.object_store import address_problem
from starling.speech.preparing.executors import Executor, InThisProcess
from starling.speech.preparing.making import REPORT_EVERY, SetPlan, make_set
from starling.speech.preparing.making import Progress as Progress
from starling.speech.preparing.stages import Checking
from starling.speech.remote import fetch_sets
from starling.speech.set_summary import FORMAT, SetSummary, read_summary
from starling.speech.shards import REMOTE
from starling.speech.store import SpeechSet
from starling.speech.strings import StringsConfig, copies_problem
from starling.speech.usable import Checked, FilterConfig, TextStyle


class DataConfig(Config):
    """The `data:` section of a recipe."""

    folder: Path
    """Where the prepared sets live, e.g. data/fsdd."""
    remote: str | None = None
    """Where the prepared sets were copied to, e.g. s3://bucket/fsdd: they are read from there, not prepared here, and
    `folder` holds their index."""
    storage_options: dict[str, Any] = Field(default_factory=dict)
    """For the store that `remote` names, as fsspec takes them, e.g. {anon: true}. Secrets do not belong here: they are
    taken from the environment or the store's credentials file."""
    corpus: CorpusConfig
    sampling_rate: int = Field(default=16000, ge=1000, le=192000)
    """Hz; audio of another rate is resampled."""
    text: TextStyle = "upper"
    """Normaliser of transcripts; runs of spaces become one whichever is chosen."""
    filter: FilterConfig = FilterConfig()
    check: CheckConfig = CheckConfig()
    """What `starling check` looks for; changes nothing that is prepared."""
    strings: StringsConfig | None = None
    """Join recordings into strings, e.g. isolated digits into connected ones."""
    shard_size: int = Field(default=1000, ge=1)
    """Utterances of the corpus that make a shard; it holds fewer where some of them are dropped."""
    train: str = "train"
    valid: str | None = "dev"
    test: tuple[str, ...] = ("test",)

    @field_validator("test", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _sets_exist(self) -> Self:
        problems = []
        known: list[str] = list(self.corpus.sets)
        for name in self.used_sets:
            if name not in known:
                near = get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                problems.append(f"set {name!r} is not in corpus.sets ({', '.join(known)}){hint}")
        problems += [
            f"{name!r} cannot be the name of a set: it names a folder"
            for name in known
            if not name or Path(name).name != name or name.startswith(".") or name.endswith(".partial")
        ]
        if self.strings is not None and (problem := copies_problem(self.strings, known)):
            problems.append(problem)
        if self.remote is not None and (problem := address_problem(self.remote, self.storage_options)):
            problems.append(problem)
        if self.remote is None and self.storage_options:
            problems.append("data.storage_options are for data.remote, which is not set; leave them out")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def used_sets(self) -> tuple[str, ...]:
        """The sets that this recipe trains on, watches and tests on."""
        return tuple(dict.fromkeys([self.train, *([self.valid] if self.valid else []), *self.test]))

    def set_folder(self, name: str) -> Path:
        """Where a prepared set lives."""
        return self.folder / name


@dataclass(frozen=True)
class Summary:
    """All prepared sets of a recipe, and which of them this call wrote."""

    folder: Path
    sets: tuple[SetSummary, ...]
    written: tuple[str, ...]


def prepare(config: DataConfig, progress: Progress | None = None, executor: Executor | None = None) -> Summary:
    """Prepare the sets that the recipe uses; sets that are there already, made from the same settings, are kept.

    A set is made in `<set>.partial`, shard by shard, and renamed when it is complete. What a call that failed or was
    killed has finished is not done again, and the bytes of a set depend neither on that nor on the executor,
    which says where shards are made (default: here, one after the other). Two calls at once take turns.
    Of sets with `remote` only the index is fetched.

    Raises:
        DataError: the corpus is missing or wrong, naming the utterance or file; nothing half-written remains
            that looks finished.
    """
    report = progress or (lambda name, done, total: None)
    with _locked(config.folder):
        written: list[str] = []
        if config.remote is not None:
            rate, names = config.sampling_rate, config.used_sets
            written += fetch_sets(config.remote, config.storage_options, config.folder, names, rate, report)
        for name in config.used_sets if config.remote is None else ():
            if _finished_digest(config.set_folder(name)) != set_digest(config, name):
                _prepare_set(config, name, executor or InThisProcess(), report)
                written.append(name)
            elif _partial_folder(config, name).exists():
                shutil.rmtree(_partial_folder(config, name), ignore_errors=True)
        sets = tuple(read_summary(config.set_folder(name)) for name in config.used_sets)
    return Summary(config.folder, sets, tuple(written))


def set_digest(config: DataConfig, name: str) -> str:
    """Digest of all settings that a set is made from; sets of other names do not change it, nor does what to do about
    utterances that cannot be used: whoever meets some while training may change it, and go on with the same set."""
    settings = config.model_dump(mode="json", include={"sampling_rate", "text", "filter", "shard_size"})
    for name_of_key in ("leave_out", "on_bad", "max_skipped"):  # of the first, what it holds counts, not where it is
        del settings["filter"][name_of_key]
    if left_out := left_out_of(config.filter.leave_out, name):
        settings["left_out"] = sorted(left_out)
    corpus = config.corpus.model_dump(mode="json")
    corpus["sets"] = corpus["sets"][name]
    strings = config.strings.model_dump(mode="json") if config.strings else None
    if strings is not None and config.strings is not None:
        strings["copies"] = config.strings.copies_of(name)
    everything = {
        "format": FORMAT,
        "set": name,
        "corpus": corpus,
        "maker": config.corpus.maker(name),
        "strings": strings,
        **settings,
    }
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


def describe(summary: Summary) -> str:
    """One line for each set: utterances, hours, speakers, rate, and what was dropped."""
    lines = []
    for each in summary.sets:
        state = "written" if each.name in summary.written else "there already"
        line = (
            f"{each.name}: {_number(each.utterances, 'utterance')}, {each.hours:.2f} h, "
            f"{_number(each.speakers, 'speaker')}, "
            f"{each.sampling_rate} Hz, {state}"
        )
        if each.dropped:
            listed = summary.folder / each.name / "dropped.tsv"
            line += f"; dropped {each.dropped} ({each.dropped_seconds / 3600:.2f} h), listed in {listed}"
        lines.append(line)
    return "\n".join(lines)


def _number(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error}; set data.folder to another place") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _finished_digest(folder: Path) -> str | None:
    """Digest of a set that was prepared here and opens without complaint, or None."""
    if (folder / REMOTE).exists():
        return None
    try:
        return SpeechSet.open(folder).summary.digest
    except DataError:
        return None


def _prepare_set(config: DataConfig, name: str, executor: Executor, report: Progress) -> None:
    left_out = left_out_of(config.filter.leave_out, name)
    plan = SetPlan(
        name,
        set_digest(config, name),
        partial(config.corpus.utterances, name),
        Checking(name, config.sampling_rate, config.text, config.filter, left_out),
        config.strings,
        config.shard_size,
    )
    make_set(plan, config.set_folder(name), _partial_folder(config, name), executor, report)


def _partial_folder(config: DataConfig, name: str) -> Path:
    return config.folder / f"{name}.partial"


def counted(
    usable: Iterable[Checked], utterances: Iterable[Utterance], label: str, report: Progress
) -> Iterator[Checked]:
    """The usable ones of some utterances, reporting progress under a label on the way."""
    total = len(utterances) if isinstance(utterances, Sequence) else 0
    done = 0
    for done, each in enumerate(usable, start=1):
        if done % REPORT_EVERY == 0:
            report(label, done, total)
        yield each
    report(label, done, total or done)
