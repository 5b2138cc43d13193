"""Reads lists in text files line by line, with limits on a line's length and on a compressed file's expansion."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starling import files
from starling.errors import DataError

MAX_LINE_BYTES = 1 << 20
MAX_EXPANSION = 200
"""Maximum ratio by which a compressed manifest may expand; JSON Lines reach about 30."""
_FREE_BYTES = 64 << 20


@contextmanager
def told_as(problem: str) -> Iterator[None]:
    """A context manager that raises any error of another library as a DataError whose message begins with `problem`."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{problem}: {type(error).__name__}: {error or 'a check failed'}") from error


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number (from 1) and the text of each non-blank line of a text file, which may be gzipped.

    Raises:
        DataError: The file is missing, not a regular file, not UTF-8 or a decompression bomb, or has a line over 1 MiB.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file" if not path.exists() else f"{path}: not a regular file")
    compressed = path.suffix == ".gz"
    allowed = max(_FREE_BYTES, MAX_EXPANSION * path.stat().st_size) if compressed else None
    total = number = 0
    try:
        with gzip.open(path, "rb") if compressed else path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                total += len(line)
                if len(line) > MAX_LINE_BYTES:
                    raise DataError(f"{path}:{number}: a line of more than {MAX_LINE_BYTES} bytes")
                if allowed is not None and total > allowed:
                    raise DataError(f"{path}: expands to more than {allowed} bytes; it may be a decompression bomb")
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}: not UTF-8: {error.reason} at byte {error.start} of the line") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the object of each non-blank line of a JSONL file.

    Raises:
        DataError: The file violates a limit of `read_lines`, or a line is not a JSON object.
    """
    for number, line in read_lines(path):
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(item, dict):
            raise DataError(f"{path}:{number}: expected a JSON object, found {type(item).__name__}")
        yield number, item


def field(item: dict[str, Any], name: str, origin: str) -> str:
    """A text field of a JSON object.

    Raises:
        DataError: The field is missing, or is neither text nor a number.
    """
    value = item.get(name)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{origin}: field {name!r} is {'missing' if value is None else repr(value)}")
    return str(value)


def seconds(item: dict[str, Any], name: str, origin: str) -> float | None:
    """A field in seconds, which must be finite and not negative; None if the field is absent.

    Raises:
        DataError: The field has any other value.
    """
    value = item.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e9:
        raise DataError(f"{origin}: field {name!r} is {value!r}, not a number of seconds")
    return float(value)


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table atomically.

    Raises:
        DataError: The file cannot be written.
    """
    text = io.StringIO()
    table = csv.writer(text, dialect="excel-tab", lineterminator="\n")
    table.writerow(header)
    table.writerows(rows)
    replace_file(path, text.getvalue())


def read_table(
    path: Path, columns: Sequence[str], dialect: str = "excel-tab", has_more: bool = False
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line number and the fields of each row of a table, by default in the format of `write_table`. With
    `has_more`, the table may have further columns.

    Raises:
        DataError: The file is missing, is not such a table, or exceeds the limits of `read_lines`.
    """
    line = 0

    def lines() -> Iterator[str]:
        nonlocal line
        for line, text in read_lines(path):  # noqa: B007 - the number is that of the newest row
            yield text + "\n"

    rows = csv.reader(lines(), dialect=dialect, strict=True)
    try:
        header = next(rows, [])
        if header != list(columns) and not (has_more and set(columns) <= set(header)):
            raise DataError(f"{path}: expected the columns {', '.join(columns)}, found {', '.join(header) or 'none'}")
        for row in rows:
            if len(row) != len(header):
                raise DataError(f"{path}:{line}: {len(row)} columns, the header has {len(header)}")
            yield line, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}:{line}: not CSV ({dialect}): {error}") from error


def replace_file(path: Path, text: str) -> None:
    """Write a text file atomically.

    Raises:
        DataError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace_file(path, text)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error}; free disk space, or set another folder") from error
