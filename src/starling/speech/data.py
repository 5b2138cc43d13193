"""The `data:` section of a recipe, and what a prepared set depends on."""

import json
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from starling.configuration import Config, differing, digest
from starling.errors import did_you_mean
from starling.speech.check.config import CheckConfig
from starling.speech.corpora import CorpusConfig
from starling.speech.left_out import left_out_of
from starling.speech.object_store import address_problem
from starling.speech.set_summary import FORMAT
from starling.speech.strings import StringsConfig, copies_problem
from starling.speech.usable import FilterConfig, TextStyle


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
                hint = did_you_mean(name, known)
                key = "train" if name == self.train else "valid" if name == self.valid else "test"
                remedy = ", or set data.valid=null to have none" if key == "valid" else ""
                problems.append(
                    f"data.{key} names the set {name!r}, which is not in data.corpus.sets ({', '.join(known)}); "
                    f"{hint}name one of them{remedy}"
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


def set_digest(config: DataConfig, name: str) -> str:
    """Digest of `set_settings`."""
    return digest(set_settings(config, name))


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
