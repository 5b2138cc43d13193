"""The `data:` section of a recipe, and the settings on which a prepared set depends."""

import json
from collections.abc import Iterable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from starling.chance import derive_seed
from starling.configuration import Config, differing, digest
from starling.errors import did_you_mean
from starling.speech.batch_plan import SetNames
from starling.speech.check.findings import CheckConfig
from starling.speech.corpora import CorpusConfig, SeveralCorpus, StringsConfig, Utterance, settings_of
from starling.speech.object_store import address_problem
from starling.speech.shards import FORMAT
from starling.speech.usable import Checking, FilterConfig, Source, TextStyle, left_out_of

_SEEDS = 2**63  # the number of values of `derive_seed`


class HoldOutConfig(Config):
    """A new set that takes a random part of another set, which keeps the rest; `data.hold_out`.

    Whether an utterance is held out depends only on its own id or speaker and on the seed, so it stays in the same set
    when the corpus grows. The new sets with `fold` 0, 1, ... are disjoint, and together they form the whole set, as
    cross-validation requires.
    """

    set: str = "dev"
    """The name of the new set."""
    of: str = "train"
    """The set that is divided."""
    folds: int = Field(default=20, ge=2)
    """Number of parts: on average, 1 / folds of the utterances or speakers are held out."""
    fold: int = Field(default=0, ge=0)
    """Index of the part that is held out, from 0 to folds - 1."""
    by: Literal["utterance", "speaker"] = "utterance"
    """The unit that is held out: single utterances, or whole speakers."""
    seed: int = Field(default=0, ge=0)
    """Seed of the division."""

    def problem(self, sets: Iterable[str]) -> str | None:
        """A description of the problem with these settings for a corpus with the given sets; None if there is no
        problem."""
        known = list(sets)
        if self.of not in known:
            return f"data.hold_out.of: {self.of!r} is not in data.corpus.sets ({', '.join(known)}); name one of them"
        if self.set in known:
            return f"data.hold_out.set: data.corpus.sets has a set {self.set!r} already; choose a different name"
        if self.fold >= self.folds:
            return f"data.hold_out.fold: {self.fold} of {self.folds} folds; the last is {self.folds - 1}"
        return None

    def utterances(self, whole: Iterable[Utterance], set_name: str) -> Iterator[Utterance]:
        """The utterances of the divided set that belong to `set_name`, which is `set` or `of`."""
        return (each for each in whole if self._is_held_out(each) == (set_name == self.set))

    def _is_held_out(self, utterance: Utterance) -> bool:
        of = utterance.id if self.by == "utterance" else utterance.speaker
        return derive_seed(self.seed, "hold out", of) * self.folds // _SEEDS == self.fold


class DataConfig(Config):
    """The location and the preparation of the data, and the sets for training, validation and testing."""

    folder: Path
    """The folder of the prepared sets, e.g. data/fsdd."""
    remote: str | None = None
    """The address of a copy of the prepared sets, e.g. s3://bucket/fsdd. They are read from there instead of being
    prepared here; `folder` then holds only their index."""
    storage_options: dict[str, Any] = Field(default_factory=dict)
    """fsspec's options for the store of `remote`, e.g. {anon: true}. Secrets are an error here: they are read from the
    environment or the store's credentials file."""
    cache: Path | None = None
    """A folder on each machine, e.g. /scratch/fsdd, into which a shard of `remote` is copied when it is first read;
    with null, every utterance is read from the store each time."""
    corpus: CorpusConfig
    """The corpus with the audio and its transcripts; `kind` is the format of the manifests."""
    hold_out: HoldOutConfig | None = None
    """A development set made from a random part of another set."""
    sampling_rate: int = Field(default=16000, ge=1000, le=192000)
    """Hz at which prepared audio is sampled. Audio with other sampling rates is resampled."""
    text: TextStyle = "upper"
    """The normalisation of transcripts. Runs of spaces are always replaced by one space."""
    filter: FilterConfig = FilterConfig()
    check: CheckConfig = CheckConfig()
    """The findings that `starling check` looks for. This section does not affect prepared sets."""
    strings: StringsConfig | None = None
    """Settings for joining recordings into strings, e.g. isolated digits into connected digits."""
    shard_size: int = Field(default=1000, ge=1)
    """Number of the corpus's utterances per shard. It includes dropped utterances, which the shard does not contain."""
    train: str = "train"
    """The set to train on."""
    valid: str | None = "dev"
    """The set that is scored during training, and on which a beam search is tuned; null if there is none."""
    test: SetNames = ("test",)
    """The sets that are scored after training: one name, or a list."""

    @model_validator(mode="after")
    def _sets_exist(self) -> Self:
        problems = []
        known = self.sets
        if self.hold_out is not None and (problem := self.hold_out.problem(self.corpus.sets)):
            problems.append(problem)
        for name in self.used_sets:
            if name not in known:
                key = "train" if name == self.train else "valid" if name == self.valid else "test"
                remedy = ", or set data.valid=null for none" if key == "valid" else ""
                problems.append(
                    f"data.{key} names the set {name!r}, which is not in data.corpus.sets ({', '.join(known)}); "
                    f"{did_you_mean(name, known)}name one of them{remedy}"
                )
        problems += [
            f"{name!r} cannot be the name of a set: it must be a valid folder name"
            for name in known
            if not name or Path(name).name != name or name.startswith(".") or name.endswith(".partial")
        ]
        copies = None if self.strings is None else self.strings.copies
        if isinstance(copies, dict) and (unknown := [name for name in copies if name not in known]):
            problems.append(f"strings.copies names unknown sets: {', '.join(unknown)}")
        if self.remote is not None and (problem := address_problem(self.remote, self.storage_options)):
            problems.append(problem)
        if self.remote is None and self.storage_options:
            problems.append("data.storage_options: only for data.remote, which is not set; leave them out")
        if self.remote is None and self.cache is not None:
            problems.append("data.cache: only for data.remote, which is not set; leave it out")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def used_sets(self) -> tuple[str, ...]:
        """The sets for training, validation and test, each once."""
        return tuple(dict.fromkeys([self.train, *([self.valid] if self.valid else []), *self.test]))

    @property
    def sets(self) -> list[str]:
        """The names of all sets: those of the corpus, and the new set of `hold_out`, if there is one."""
        held_out = [self.hold_out.set] if self.hold_out is not None else []
        return list(dict.fromkeys([*self.corpus.sets, *held_out]))

    def utterances(self, name: str) -> Iterable[Utterance]:
        """The utterances of a set, as the corpus provides them."""
        found = self.corpus.utterances(self.source(name))
        if self.hold_out is not None and self.source(name) == self.hold_out.of:
            return self.hold_out.utterances(found, name)
        return found

    def source(self, name: str) -> str:
        """The name of the corpus's set from which the set `name` is made. It differs from `name` only for a set that is
        held out."""
        return self.hold_out.of if self.hold_out is not None and name == self.hold_out.set else name

    @property
    def tags(self) -> tuple[str, ...]:
        """The words at the beginning of prepared transcripts that name the corpus of an utterance; usually none."""
        tags = self.corpus.tags.values() if isinstance(self.corpus, SeveralCorpus) else ()
        return tuple({"upper": each.upper(), "lower": each.lower(), "as-is": each}[self.text] for each in tags)

    def set_folder(self, name: str) -> Path:
        """The folder of a prepared set."""
        return self.folder / name


def set_digest(config: DataConfig, name: str) -> str:
    """The digest of a set's `set_settings`."""
    return digest(set_settings(config, name))


def set_settings(config: DataConfig, name: str) -> dict[str, Any]:
    """All settings that determine a set, as JSON. They include neither other sets nor the handling of unusable
    utterances, so that changes to these do not require preparing the set again."""
    not_of_the_set = {"leave_out", "on_bad", "max_skipped"}  # the list itself is recorded below
    if config.filter.trim is None:
        not_of_the_set.add("trim")  # sets prepared before the key existed keep their digest
    included = {"sampling_rate", "text", "filter", "shard_size"}
    settings = config.model_dump(mode="json", include=included, exclude={"filter": not_of_the_set})
    if left_out := left_out_of(config.filter.leave_out, name):
        settings["left_out"] = sorted(left_out)
    source = config.source(name)
    if config.hold_out is not None and source == config.hold_out.of:
        settings["hold_out"] = config.hold_out.model_dump(mode="json")
    strings = config.strings and config.strings.model_dump(mode="json") | {"copies": config.strings.copies_of(name)}
    return {
        "format": FORMAT,
        "set": name,
        "corpus": settings_of(config.corpus, source),
        "maker": config.corpus.maker(source),
        "strings": strings,
        **settings,
    }


def source_of(config: DataConfig, name: str) -> Source:
    """The source of a set. Raises DataError if the list of utterances to leave out is missing or invalid."""
    left_out = left_out_of(config.filter.leave_out, name)
    checking = Checking(name, config.sampling_rate, config.text, config.filter, left_out)
    settings = set_settings(config, name)
    utterances = partial(config.utterances, name)
    return Source(checking, utterances, config.strings, digest(settings), settings, config.shard_size)


def setting_differences(name: str, before: Any, now: Any) -> list[str]:
    """A description of each changed entry of `set_settings`, such as `data.text=upper (now lower)`."""
    described = []
    for key, old, new in sorted(differing(before, json.loads(json.dumps(now))), key=itemgetter(0)):
        if key == "left_out":
            old, new = (f"a list of {len(each or ())} of its utterances" for each in (old, new))
        key = key.replace("corpus.sets", f"corpus.sets.{name}", 1).replace("left_out", "filter.leave_out")
        described.append(f"data.{key}={old} (now {new})")
    return described
