"""The kinds of findings of a check, their limits, and the files in which they are listed."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from starling.configuration import Config
from starling.errors import DataError
from starling.speech.corpora.lines import read_table, replace_file, write_table
from starling.speech.usable import LeftOut

Kind = Literal[
    "unreadable",
    "unusable",
    "silence",
    "clipping",
    "too-short",
    "seconds-per-character",
    "swapped",
    "misfit",
    "same-audio",
    "same-text-and-length",
    "near-text",
    "overlap-audio",
    "overlap-text",
    "overlap-near-text",
    "overlap-speaker",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
HEARD: tuple[Kind, ...] = ("swapped", "misfit")
"""Kinds of findings that need a recogniser."""
OVERLAPS = tuple(kind for kind in KINDS if kind.startswith("overlap-"))
"""Kinds of overlap between a training set and a held-out set. Affected utterances of both sets are listed."""
_KEPT = ("unusable", "clipping", "near-text", "overlap-text", "overlap-near-text", "overlap-speaker")
"""Kinds of findings whose utterances are used all the same, unless a recipe says otherwise."""
SEEN_IN_TRAINING: tuple[Kind, ...] = ("overlap-audio", "overlap-text", "overlap-near-text")
"""Kinds of findings which show that a test utterance has a near-duplicate in the training set."""


class CheckConfig(Config):
    """The kinds of findings that `starling check` looks for, and their limits."""

    kinds: tuple[Kind, ...] = KINDS
    """The kinds of findings to look for."""
    silence_db: float = Field(default=-60.0, lt=0)
    """An utterance with a lower root mean square, in dB relative to full scale, is silent."""
    clipped: float = Field(default=0.001, gt=0, le=1)
    """An utterance with at least this fraction of its samples at full scale is clipped."""
    seconds_per_character: tuple[float, float] = (0.03, 1.0)
    """Minimum and maximum seconds of audio per character of the transcript, including spaces."""
    misfit: float = Field(default=0.5, gt=0)
    """A transcript fits the model if its score is below this value, in nats per token (starling.speech.check.corpus
    defines the score). A score of 0 means that the transcript is as likely as the text that the model hears."""
    outlier: float = Field(default=8.0, gt=0)
    """A transcript also fits the model if its score exceeds the median of its set's scores by at most this many times
    the distance from the median to the 90th percentile."""
    length_tolerance: float = Field(default=0.01, ge=0, le=1)
    """Maximum seconds by which the lengths of two copies of a recording differ."""
    alike: float = Field(default=0.95, gt=0, le=1)
    """Two waveforms with at least this correlation are copies of a recording."""
    similarity: float = Field(default=0.8, ge=0.5, le=1)
    """Two texts with at least this Jaccard similarity are near-duplicates."""
    ngram: int = Field(default=4, ge=1, le=20)
    """Length, in characters, of the n-grams by which texts are compared."""
    drop: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind not in _KEPT)
    """Kinds of findings whose utterances `--drop` lists."""
    drop_from: Literal["train", "all"] = "train"
    """The sets from which `--drop` leaves out utterances. For overlaps, only utterances of the training set are left
    out."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        low, high = self.seconds_per_character
        if not 0 <= low < high:
            raise ValueError(f"seconds_per_character {low}, {high}: needs 0 <= first < second")
        if "overlap-speaker" in self.drop:
            raise ValueError("drop: overlap-speaker concerns whole speakers, not single utterances; leave it out")
        return self


@dataclass(frozen=True, slots=True)
class Heard:
    """A recogniser's text for an utterance, and how well the transcript fits."""

    set: str
    id: str
    text: str
    heard: str
    errors: float
    """Number of character errors of `heard`, divided by the number of characters of `text`."""
    gap: float
    """Nats per token by which the transcript is less likely than the text that is heard; infinite if no path exists."""
    fit: float
    """The fit of the transcript: 0 if it is as likely as other transcripts of its length, and 1 if it is as likely as
    the text that is heard."""

    @property
    def score(self) -> float:
        """The misfit of the transcript, in nats per token: gap * (1 - fit), with 0 <= 1 - fit <= 1.

        The first factor alone would also find utterances for which every transcript is unlikely. The second factor
        alone would also find utterances for which all transcripts are about equally likely.
        """
        return self.gap * min(max(1.0 - self.fit, 0.0), 1.0)


@dataclass(frozen=True)
class SetHeard:
    """The texts that were heard in a set, worst transcript first, and the score above which a transcript does not
    fit."""

    name: str
    heard: tuple[Heard, ...]
    skipped: tuple[tuple[str, str], ...]
    """The id of each utterance that the recogniser cannot compare, with the reason."""
    limit: float

    @property
    def errors(self) -> float:
        """Number of character errors of the texts that are heard, divided by the number of characters of the
        transcripts."""
        return sum(each.errors * len(each.text) for each in self.heard) / max(self.characters, 1)

    @property
    def characters(self) -> int:
        """Number of characters of the transcripts."""
        return sum(len(each.text) for each in self.heard)


LIST, HEARD_LIST = "check.tsv", "check-heard.tsv"
"""The files in the folder of the data that list the findings and what a recogniser heard."""
_DATA = "check.json"
FORMAT = 1
_HEARD_HEADER = ("set", "id", "score", "gap", "fit", "errors", "text", "heard")
_HEADER = ("kind", "set", "id", "other_set", "other_id", "value", "limit", "detail")


@dataclass(frozen=True)
class Finding:
    """A problem with an utterance, or something that the utterance has in common with another utterance.

    `value` is the measured value and `limit` is its limit, if there are any.
    """

    kind: Kind
    set: str
    id: str
    other_set: str = ""
    other_id: str = ""
    value: float | None = None
    limit: float | None = None
    detail: str = ""
    seconds: float = 0.0
    """Length of the utterance."""
    droppable: bool = True
    """False if another utterance has the same id and would be left out as well."""


@dataclass(frozen=True)
class SetSize:
    """The amount of data checked in a set, and the digest of the set's settings."""

    name: str
    utterances: int
    seconds: float
    digest: str


@dataclass(frozen=True)
class Report:
    """All findings about the sets of a corpus."""

    train: str
    sets: tuple[SetSize, ...]
    findings: tuple[Finding, ...]
    heard: tuple[SetHeard, ...] = ()
    """The texts that a recogniser heard in each set; empty without a recogniser."""


def write_report(folder: Path, report: Report) -> Path:
    """Write the list of findings and the list of texts that were heard, and then a file that identifies the checked
    data. Returns the path of the list of findings."""
    path, data_file = folder / LIST, folder / _DATA
    try:
        data_file.unlink(missing_ok=True)
        (folder / HEARD_LIST).unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{data_file}: cannot be replaced: {error}") from error
    write_table(path, _HEADER, map(_row, report.findings))
    if report.heard:
        write_table(folder / HEARD_LIST, _HEARD_HEADER, _heard_rows(report.heard))
    content: dict[str, object] = {
        "format": FORMAT,
        "train": report.train,
        "sets": {each.name: each.digest for each in report.sets},
    }
    if report.heard:
        content["heard"] = {
            each.name: {"character_errors": each.errors, "limit": each.limit, "skipped": len(each.skipped)}
            for each in report.heard
        }
    replace_file(data_file, json.dumps(content, indent=2) + "\n")
    return path


def seen_in_training(folder: Path, train: str, test: str, digests: tuple[str, str]) -> frozenset[str] | None:
    """The utterances of set `test` with a near-duplicate in set `train`; None if `folder` has no check of both sets.

    `digests` are the current digests of the two sets.

    Raises:
        DataError: The check belongs to other data, or its files are damaged.
    """
    try:
        content = json.loads((folder / _DATA).read_text(encoding="utf-8"))
        checked = content["sets"] if content["format"] == FORMAT and content["train"] == train else {}
        own = (checked.get(train), checked.get(test))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder / _DATA}: cannot be read ({error}); run `starling check` again") from error
    if test == train or None in own:
        return None
    if own != digests:
        raise DataError(f"{folder / LIST} was made for other data; run `starling check` again")
    rows = (row for _, row in read_table(folder / LIST, _HEADER) if row["kind"] in SEEN_IN_TRAINING)
    return frozenset(row["id"] for row in rows if (row["set"], row["other_set"]) == (test, train))


def to_drop(report: Report, config: CheckConfig, earlier: Iterable[LeftOut] = ()) -> list[LeftOut]:
    """The utterances to leave out: those in `earlier` and those in the report, without repetitions.

    Among duplicates within a set, the first is kept. For overlaps, only utterances of the training set are left out.
    """
    items = {(item.set, item.id): item for item in earlier}
    for each in report.findings:
        only_train = config.drop_from == "train" or each.kind in OVERLAPS
        if each.kind in config.drop and each.droppable and (each.set == report.train or not only_train):
            item = LeftOut(each.set, each.id, each.seconds, f"{each.kind}{_other(each)}")
            items.setdefault((item.set, item.id), item)
    return list(items.values())


def _other(each: Finding) -> str:
    """A description of the other utterance of a finding."""
    if not each.other_id:
        return ""
    relation = {"swapped": "with", "misfit": "but fits"}.get(each.kind, "of")
    return f" {relation} {each.other_id} in {each.other_set}"


def _heard_rows(heard: Iterable[SetHeard]) -> Iterator[Sequence[str]]:
    for whole in heard:
        for each in whole.heard:
            numbers = (f"{number:.4g}" for number in (each.score, each.gap, each.fit, each.errors))
            yield (each.set, each.id, *numbers, each.text, each.heard)


def _row(each: Finding) -> Sequence[str]:
    numbers = ["" if number is None else f"{number:.6g}" for number in (each.value, each.limit)]
    return (each.kind, each.set, each.id, each.other_set, each.other_id, *numbers, each.detail)
