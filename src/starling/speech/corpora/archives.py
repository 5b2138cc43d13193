"""Checks of tar archives that Starling did not write."""

import tarfile
from pathlib import Path, PurePosixPath

from starling.errors import DataError


def check_archive(path: Path) -> None:
    """Check the names and types of a tar's members, without reading their contents.

    Raises:
        DataError: The tar cannot be read, or contains `..`, an absolute name, a link, a device or a duplicate name.
    """
    if not path.is_file():
        raise DataError(f"{path}: not a regular file")
    seen: set[str] = set()
    try:
        with tarfile.open(path, "r:") as tar:  # not compressed: that could expand without limit
            for member in tar:
                _check_member(path, member, seen)
                seen.add(member.name)
    except DataError:
        raise
    except Exception as error:  # raised by tarfile for invalid headers
        raise DataError(f"{path}: cannot be read as Shar: {type(error).__name__}: {error}") from error


def _check_member(path: Path, member: tarfile.TarInfo, seen: set[str]) -> None:
    name = member.name
    if ".." in PurePosixPath(name).parts or name.startswith("/"):
        raise DataError(f"{path}: {name[:200]!r} leads out of the archive")
    if not member.isfile():
        raise DataError(f"{path}: {name[:200]!r} is not a regular file but a link, a device or similar")
    if name in seen:
        raise DataError(f"{path}: contains {name[:200]!r} twice")
