"""Hashes, syncs and atomically replaces files."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_IMODE
from typing import TYPE_CHECKING

from starling.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def writing(what: object, remedy: str = "set exp to another folder") -> Iterator[None]:
    """Inside the context, an OSError becomes the ConfigError that `what` cannot be written, with the remedy."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what}: cannot be written ({error}); {remedy}") from error


def sync(*paths: Path) -> None:
    """Wait until the contents of files, or the entries of folders, are on disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors in the safetensors format, to a file with the mode of other new files: the library makes its files
    private."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata)
    path.chmod(S_IMODE(mode))


def replace_file(path: Path, text: str, aside: Path | None = None) -> None:
    """Atomically replace a UTF-8 text file: readers see the old text or the new one.

    The new text is first written to a temporary file in the folder `aside` on the same file system (default: the folder
    of `path`). Characters that UTF-8 cannot encode are written as escapes. Raises OSError if writing fails.
    """
    partial = (aside or path.parent) / f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial"
    try:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")
        sync(partial)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
