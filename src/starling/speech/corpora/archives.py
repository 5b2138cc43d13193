"""Tars that others have made."""

import tarfile
from pathlib import Path, PurePosixPath

from starling.errors import DataError


def check_archive(path: Path) -> None:
    """Look at the names in a tar, and at nothing else of it.

    Raises:
        DataError: it cannot be read, or holds `..`, an absolute name, a link, a device, or a name twice.
    """
    if not path.is_file():
        raise DataError(f"{path}: not a regular file")
    seen: set[str] = set()
    try:
        with tarfile.open(path, "r:") as tar:  # a compressed one may unpack to anything
            for member in tar:
                _check_member(path, member, seen)
                seen.add(member.name)
    except DataError:
        raise
    except Exception as error:  # tarfile, of headers that make no sense
        raise DataError(f"{path}: cannot be read as Shar: {type(error).__name__}: {error}") from error


def _check_member(path: Path, member: tarfile.TarInfo, seen: set[str]) -> None:
    name = member.name
    if ".." in PurePosixPath(name).parts or name.startswith("/"):
        raise DataError(f"{path}: {name[:200]!r} leads out of the archive")
    if not member.isfile():
        raise DataError(f"{path}: {name[:200]!r} is a link or a device, or no file for another reason")
    if name in seen:
        raise DataError(f"{path}: {name[:200]!r} is there twice")
