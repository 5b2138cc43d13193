"""Tab-separated lists that Starling writes and reads."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from starling import files
from starling.errors import DataError
from starling.speech.corpora.lines import read_lines


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a list atomically.

    Raises:
        DataError: It cannot be written.
    """
    text = io.StringIO()
    table = csv.writer(text, dialect="excel-tab", lineterminator="\n")
    table.writerow(header)
    table.writerows(rows)
    replace_file(path, text.getvalue())


def read_table(path: Path, header: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and fields of each row.

    Raises:
        DataError: The file is missing, is not such a list, or exceeds the limits of `read_lines`.
    """
    rows = csv.reader((line + "\n" for _, line in read_lines(path)), dialect="excel-tab", strict=True)
    try:
        first = next(rows, [])
        if first != list(header):
            raise DataError(f"{path}: expected the columns {', '.join(header)}, found {', '.join(first) or 'none'}")
        for row in rows:
            if len(row) != len(header):
                raise DataError(f"{path}:{rows.line_num}: {len(row)} columns, the header has {len(header)}")
            yield rows.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}:{rows.line_num}: not a tab-separated list: {error}") from error


def replace_file(path: Path, text: str) -> None:
    """Write a text file atomically.

    Raises:
        DataError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace_file(path, text)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error}; free disk space, or set another folder") from error
