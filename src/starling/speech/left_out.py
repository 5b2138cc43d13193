"""Lists of utterances to leave out of prepared sets."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from starling.errors import DataError
from starling.speech.tables import read_table, write_table


@dataclass(frozen=True)
class LeftOut:
    """One utterance to leave out."""

    set: str
    id: str
    seconds: float
    reason: str


_HEADER = tuple(field.name for field in fields(LeftOut))


def read_left_out(path: Path) -> list[LeftOut]:
    """Read a list.

    Raises:
        DataError: The list is missing or invalid.
    """
    items = []
    for line, row in read_table(path, _HEADER):
        try:
            items.append(LeftOut(row["set"], row["id"], float(row["seconds"]), row["reason"]))
        except ValueError:
            raise DataError(f"{path}:{line}: {row['seconds']!r} is not a number of seconds") from None
    return items


def write_left_out(path: Path, items: Iterable[LeftOut]) -> None:
    """Write a list for `data.filter.leave_out`, atomically."""
    write_table(path, _HEADER, map(astuple, items))


def left_out_of(path: Path | None, set_name: str) -> dict[str, LeftOut]:
    """The entries of a list for one set, by utterance id; empty if `path` is None.

    Raises:
        DataError: The list is missing or invalid.
    """
    if path is None:
        return {}
    try:
        return {item.id: item for item in read_left_out(path) if item.set == set_name}
    except DataError as error:
        raise DataError(f"data.filter.leave_out: {error}") from error
