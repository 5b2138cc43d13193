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
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from starling.configuration import Config, differing
from starling.errors import ConfigError, DataError
from starling.speech.check.config import CheckConfig
from starling.speech.corpora import CorpusConfig, Utterance
from starling.speech.left_out import left_out_of
from starling.speech.object_store import address_problem
from starling.speech.preparing.executors import Executor, InThisProcess
from starling.speech.preparing.making import REPORT_EVERY, SETTINGS, SetPlan, make_set
from starling.speech.preparing.making import Progress as Progress
from starling.speech.preparing.stages import Checking
from starling.speech.remote import fetch_sets
from starling.speech.set_summary import FORMAT, SetSummary, read_summary
from starling.speech.shards import REMOTE
from starling.speech.store import SpeechSet
from starling.speech.strings import StringsConfig, copies_problem
from starling.speech.usable import NO_SPEAKER, Checked, FilterConfig, TextStyle

_MOST_SHOWN = 5  # settings that have changed


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
                key = "train" if name == self.train else "valid" if name == self.valid else "test"
                remedy = ", or set data.valid=null to have none" if key == "valid" else ""
                problems.append(
                    f"data.{key} names the set {name!r}, which is not in data.corpus.sets ({', '.join(known)}){hint}; "
                    f"name one of them{remedy}"
                )
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
    without_speakers: tuple[str, ...] = ()
    """Those just written in which no utterance has a speaker."""


def prepare(
    config: DataConfig,
    progress: Progress | None = None,
    executor: Executor | None = None,
    overwrite: bool = False,
) -> Summary:
    """Prepare the sets that the recipe uses; sets that are there already, made from the same settings, are kept.

    A set in the folder that was made from other settings is replaced only with `overwrite`.

    A set is made in `<set>.partial`, shard by shard, and renamed when it is complete. What a call that failed or was
    killed has finished is not done again, and the bytes of a set depend neither on that nor on the executor,
    which says where shards are made (default: here, one after the other). Two calls at once take turns.
    Of sets with `remote` only the index is fetched.

    Raises:
        ConfigError: the folder holds sets made from other settings, and `overwrite` is off; nothing was changed.
        DataError: the corpus is missing or wrong, naming the utterance or file; nothing half-written remains
            that looks finished.
    """
    report = progress or (lambda name, done, total: None)
    with _locked(config.folder):
        written: list[str] = []
        if config.remote is not None:
            rate, names = config.sampling_rate, config.used_sets
            written += fetch_sets(config.remote, config.storage_options, config.folder, names, rate, report)
        own = config.used_sets if config.remote is None else ()
        missing = [name for name in own if _finished_digest(config.set_folder(name)) != set_digest(config, name)]
        if not overwrite:
            _check_nothing_is_lost(config, missing)
        for name in own:
            if name in missing:
                _prepare_set(config, name, executor or InThisProcess(), report)
                written.append(name)
            elif _partial_folder(config, name).exists():
                shutil.rmtree(_partial_folder(config, name), ignore_errors=True)
        sets = tuple(read_summary(config.set_folder(name)) for name in config.used_sets)
        unnamed = [name for name in written if _has_no_speakers(config.set_folder(name))]
    return Summary(config.folder, sets, tuple(written), tuple(unnamed))


def set_digest(config: DataConfig, name: str) -> str:
    """Digest of `set_settings`."""
    return hashlib.sha256(json.dumps(set_settings(config, name), sort_keys=True).encode()).hexdigest()


def set_settings(config: DataConfig, name: str) -> dict[str, Any]:
    """All settings that a set is made from, as JSON has them; sets of other names do not change them, nor does what to
    do about utterances that cannot be used: a user who meets some while training may change that and keep the set."""
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
    return {
        "format": FORMAT,
        "set": name,
        "corpus": corpus,
        "maker": config.corpus.maker(name),
        "strings": strings,
        **settings,
    }


def setting_differences(name: str, before: Any, now: Any) -> list[str]:
    """`data.text=upper (now lower)` for each of the `set_settings` of a set that has changed."""
    described = []
    for key, old, new in sorted(differing(before, json.loads(json.dumps(now))), key=itemgetter(0)):
        if key == "left_out":
            old, new = (f"a list of {len(each or ())} of its utterances" for each in (old, new))
        key = key.replace("corpus.sets", f"corpus.sets.{name}", 1).replace("left_out", "filter.leave_out")
        described.append(f"data.{key}={old} (now {new})")
    return described


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
    if summary.without_speakers:
        lines.append(
            f"warning: {', '.join(summary.without_speakers)}: the corpus names no speakers, so that all utterances "
            "count as one speaker's, and nothing tells whether training and test share any; name them (in utt2spk of a "
            "Kaldi folder, in `speaker` of other manifests)"
        )
    return "\n".join(lines)


def _has_no_speakers(folder: Path) -> bool:
    found = SpeechSet.open(folder)
    return len(found) > 1 and found.summary.speakers == 1 and found.speaker(0) == NO_SPEAKER


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


def _check_nothing_is_lost(config: DataConfig, missing: Sequence[str]) -> None:
    """Raises ConfigError if one of the sets that are to be prepared would replace one made from other settings."""
    found: dict[str, list[str]] = {}
    for name in missing:
        folder = config.set_folder(name)
        recorded = _recorded_settings(folder)
        if recorded is not None:
            found[name] = setting_differences(name, recorded, set_settings(config, name))
        elif _finished_digest(folder) is not None:
            found[name] = ["other settings, which that version of Starling did not record"]
    changed = [name for name, changes in found.items() if changes]
    if changed:
        changes = list(dict.fromkeys(change for name in changed for change in found[name]))
        more = f" and {len(changes) - _MOST_SHOWN} more" if len(changes) > _MOST_SHOWN else ""
        raise ConfigError(
            f"{config.folder}: {', '.join(changed)} prepared with {', '.join(changes[:_MOST_SHOWN])}{more}; set "
            "data.folder to another folder, or replace what is there with `starling prepare RECIPE --overwrite`"
        )


def _recorded_settings(folder: Path) -> Any:
    """The settings that a set was prepared from here, or None if they are not known."""
    if (folder / REMOTE).exists():
        return None
    try:
        return json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _prepare_set(config: DataConfig, name: str, executor: Executor, report: Progress) -> None:
    left_out = left_out_of(config.filter.leave_out, name)
    plan = SetPlan(
        name,
        set_digest(config, name),
        set_settings(config, name),
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
