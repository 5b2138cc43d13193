"""Files that are complete on the disk before anything relies on them."""

import hashlib
import os
import threading
from pathlib import Path


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(*paths: Path) -> None:
    """Wait until files, or the names in folders, are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_file(path: Path, text: str, aside: Path | None = None) -> None:
    """Write a UTF-8 text file under another name, sync it, and rename it: readers see the old text or the new one.

    Until then it lies in the folder `aside` of the same file system, by default beside `path`. Characters that UTF-8
    cannot hold are written as escapes. Raises OSError when the file cannot be written.
    """
    partial = (aside or path.parent) / f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial"
    try:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")
        sync(partial)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
