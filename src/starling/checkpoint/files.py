"""Reads and writes the files of a checkpoint; a write returns once the file is on disk."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from starling.errors import CheckpointError
from starling.files import sync

if TYPE_CHECKING:
    from torch import Tensor

PARTIAL = ".partial"
"""Suffix of a folder that is being written or removed."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
MAX_JSON_BYTES = 256 << 20
"""Size of the largest JSON file that is read. A learner's file has a few kilobytes, plus some bytes per parameter
tensor."""


def partial_folder(final: Path) -> Path:
    """The folder in which the files of `final` are written before it is published."""
    return final.with_name(f".{final.name}{PARTIAL}")


@contextmanager
def writing(final: Path, needed: int, undo: Callable[[], None]) -> Iterator[None]:
    """Check that `needed` bytes are free before writing inside the context; a file system that does not report its size
    passes. If that or a write fails, call `undo` to remove what was written, and raise a `CheckpointError` with the
    remedy."""
    try:
        if _free_bytes(final, unknown=needed) < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(final))
        yield
    except (OSError, SafetensorError) as error:
        with suppress(OSError):  # removing may fail on the same disk
            undo()
        if _is_full(error):
            free = _free_bytes(final)
            problem = f"disk full: needs {needed:,} bytes, {free:,} free; make room, then resume"
        else:
            problem = f"a checkpoint cannot be written ({error}); check the disk and its permissions, then resume"
        raise CheckpointError(f"{final}: {problem}") from error


def write_json(path: Path, content: Any) -> None:
    """Write `content`, and wait until it is on disk."""
    path.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
    sync(path)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors in the safetensors format, and wait until they are on disk."""
    from safetensors.torch import save_file

    save_file(apart(tensors), path)
    sync(path)


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors on the CPU, contiguous and without shared memory, as safetensors requires."""
    import torch

    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        owned = plain.untyped_storage().nbytes() == plain.numel() * plain.element_size()
        if not owned or plain.untyped_storage().data_ptr() in seen:
            plain = plain.clone(memory_format=torch.contiguous_format)
        seen.add(plain.untyped_storage().data_ptr())
        result[name] = plain
    return result


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Check that `path` is a regular file before reading inside the context: reading a link may lead elsewhere, reading
    a pipe or a device may never end. Whatever cannot be read is a `CheckpointError` that names the file."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise CheckpointError(f"{path} is not a plain file; resume from another checkpoint")
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; resume from another checkpoint") from None
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deeply; resume from another checkpoint") from None
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, RuntimeError, MemoryError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from error


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises a CheckpointError that names the file."""
    with reading(path), path.open("rb") as file:
        content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has more than {MAX_JSON_BYTES} bytes; resume from another checkpoint")
        return json.loads(content.decode("utf-8"))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises a CheckpointError that names the file."""
    from safetensors.torch import load_file

    with reading(path):
        return load_file(path)


def publish(partial: Path, final: Path) -> None:
    """Atomically rename a finished folder to its final name."""
    sync(*partial.rglob("*"), partial)
    partial.rename(final)
    sync(final.parent)


def remove(folder: Path, ignore_errors: bool = False) -> None:
    """Remove a folder; other processes see it complete or not at all."""
    doomed = folder.with_name(f".{secrets.token_hex(8)}{PARTIAL}")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors)


def remove_partial(folder: Path) -> None:
    """Remove the partial folders that crashes have left in `folder`. A learner that still writes to one fails."""
    for leftover in list(folder.glob(f".*{PARTIAL}")):
        with suppress(FileNotFoundError):  # another process has removed it
            remove(leftover, ignore_errors=True)


def remove_part(partial: Path, rank: int) -> None:
    """Remove one learner's files from a partial folder, and the folder if it is then empty."""
    for path in partial.glob(f"learner-{rank}.*"):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        partial.rmdir()


def _is_full(error: Exception) -> bool:
    """Whether a write failed because the disk or the quota is full."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    return any(os.strerror(number) in str(error) for number in _FULL)


def _free_bytes(folder: Path, unknown: int = 0) -> int:
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return usage.free if usage.total else unknown
