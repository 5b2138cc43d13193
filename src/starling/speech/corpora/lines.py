"""Manifests read line by line, with bounds on what a line or a compressed file may hold."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starling.errors import DataError

MAX_LINE_BYTES = 1 << 20
MAX_EXPANSION = 200
"""A compressed manifest may hold this many times its own size; JSON lines reach about 30."""
_FREE_BYTES = 64 << 20


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of every line that is not blank, of a text file or a gzipped one.

    Raises:
        DataError: missing, not a regular file, not UTF-8, a line over 1 MiB, or a decompression bomb.
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
                    raise DataError(f"{path}: unpacks to more than {allowed} bytes; refused")
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}: not UTF-8: {error.reason} at byte {error.start} of the line") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and object of every line of a JSONL file.

    Raises:
        DataError: as `read_lines`, and for a line that is no JSON object.
    """
    for number, line in read_lines(path):
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(item, dict):
            raise DataError(f"{path}:{number}: a {type(item).__name__}, where a JSON object is expected")
        yield number, item


def field(item: dict[str, Any], name: str, origin: str) -> str:
    """A text field of a JSON object.

    Raises:
        DataError: it is missing, or neither text nor a number.
    """
    value = item.get(name)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{origin}: field {name!r} is {'missing' if value is None else repr(value)}")
    return str(value)


def seconds(item: dict[str, Any], name: str, origin: str) -> float | None:
    """A field in seconds, finite and not negative, or None where it is absent.

    Raises:
        DataError: it is something else.
    """
    value = item.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e9:
        raise DataError(f"{origin}: field {name!r} is {value!r}, not a number of seconds")
    return float(value)
