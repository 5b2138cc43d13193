"""Findings of a check, and the files in which they are listed."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from starling.errors import DataError
from starling.speech.check.config import OVERLAPS, SEEN_IN_TRAINING, CheckConfig, Kind
from starling.speech.check.heard import SetHeard
from starling.speech.left_out import LeftOut
from starling.speech.tables import read_table, replace_file, write_table

FORMAT = 1
_HEARD_HEADER = ("set", "id", "score", "gap", "fit", "errors", "text", "heard")
_HEADER = ("kind", "set", "id", "other_set", "other_id", "value", "limit", "detail")


@dataclass(frozen=True)
class Finding:
    """A problem of an utterance, or something that it has in common with another.

    `value` is the measured value and `limit` the limit, if there are such numbers.
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
    """False if another utterance has the same id, which would be left out as well."""


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
    """What a recogniser heard, if there was one."""

    def count(self, kind: Kind, set_name: str) -> int:
        """The number of findings of a kind in a set."""
        return sum(each.kind == kind and each.set == set_name for each in self.findings)


def list_path(folder: Path) -> Path:
    """The list of findings for the data in `folder`."""
    return folder / "check.tsv"


def heard_path(folder: Path) -> Path:
    """The list of what a recogniser heard in the data in `folder`."""
    return folder / "check-heard.tsv"


def write_report(folder: Path, report: Report) -> Path:
    """Write the lists of findings and of what was heard, and then a file that identifies the checked data; returns the
    path of the first."""
    path, data_file = list_path(folder), _data_path(folder)
    try:
        data_file.unlink(missing_ok=True)
        heard_path(folder).unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{data_file}: cannot be replaced: {error}") from error
    write_table(path, _HEADER, map(_row, report.findings))
    if report.heard:
        write_table(heard_path(folder), _HEARD_HEADER, _heard_rows(report.heard))
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
    """Utterances of set `test` with a near-duplicate in set `train`; None if `folder` has no check of both sets.

    `digests` are the current digests of the two sets.

    Raises:
        DataError: The check belongs to other data, or its files are damaged.
    """
    try:
        content = json.loads(_data_path(folder).read_text(encoding="utf-8"))
        checked = content["sets"] if content["format"] == FORMAT and content["train"] == train else {}
        own = (checked.get(train), checked.get(test))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{_data_path(folder)}: cannot be read ({error}); run `starling check` again") from error
    if test == train or None in own:
        return None
    if own != digests:
        raise DataError(f"{list_path(folder)} was made for other data; run `starling check` again")
    rows = (row for _, row in read_table(list_path(folder), _HEADER) if row["kind"] in SEEN_IN_TRAINING)
    return frozenset(row["id"] for row in rows if (row["set"], row["other_set"]) == (test, train))


def to_drop(report: Report, config: CheckConfig, earlier: Iterable[LeftOut] = ()) -> list[LeftOut]:
    """The utterances to leave out: the `earlier` ones and those of the report, each once.

    Of duplicates within a set the first is kept; of overlaps only utterances of the training set are left out.
    """
    items = {(item.set, item.id): item for item in earlier}
    for each in report.findings:
        only_train = config.drop_from == "train" or each.kind in OVERLAPS
        if each.kind in config.drop and each.droppable and (each.set == report.train or not only_train):
            item = LeftOut(each.set, each.id, each.seconds, f"{each.kind}{_other(each)}")
            items.setdefault((item.set, item.id), item)
    return list(items.values())


def _other(each: Finding) -> str:
    """The other utterance of a finding, in words."""
    if not each.other_id:
        return ""
    relation = {"swapped": "with", "misfit": "but fits"}.get(each.kind, "of")
    return f" {relation} {each.other_id} in {each.other_set}"


def _heard_rows(heard: Iterable[SetHeard]) -> Iterator[Sequence[str]]:
    for whole in heard:
        for each in whole.heard:
            numbers = (f"{number:.4g}" for number in (each.score, each.gap, each.fit, each.errors))
            yield (each.set, each.id, *numbers, each.text, each.heard)


def _data_path(folder: Path) -> Path:
    return folder / "check.json"


def _row(each: Finding) -> Sequence[str]:
    numbers = ["" if number is None else f"{number:.6g}" for number in (each.value, each.limit)]
    return (each.kind, each.set, each.id, each.other_set, each.other_id, *numbers, each.detail)
