"""The files of a checkpoint: on the disk before anything relies on them."""

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
"""The end of the name of a folder that is being written or removed."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
MAX_JSON_BYTES = 256 << 20
"""Of one JSON file; a learner's has a few kilobytes, and more for each parameter of the model."""


def partial_folder(final: Path) -> Path:
    """Where the files of `final` are put together."""
    return final.with_name(f".{final.name}{PARTIAL}")


@contextmanager
def writing(final: Path, needed: int, undo: Callable[[], None]) -> Iterator[None]:
    """Turn what the system says about a failed write into a `CheckpointError` that says what to do, after `undo` has
    removed what was written; `needed` bytes were to be."""
    try:
        check_room(final, needed)
        yield
    except (OSError, SafetensorError) as error:
        with suppress(OSError):  # a disk that fails may not let go of anything either
            undo()
        if _is_full(error):
            free = _free_bytes(final)
            problem = f"disk full: needs {needed:,} bytes, {free:,} free; make room, then resume"
        else:
            problem = f"a checkpoint cannot be written ({error}); check the disk and its permissions, then resume"
        raise CheckpointError(f"{final}: {problem}") from error


def check_room(folder: Path, needed: int) -> None:
    """Raises OSError where less than `needed` bytes are free; a file system that does not know passes."""
    if _free_bytes(folder, unknown=needed) < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def write_json(path: Path, content: Any) -> None:
    """Write `content` and wait until it is on the disk."""
    path.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
    sync(path)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors in the safetensors format and wait until they are on the disk."""
    from safetensors.torch import save_file

    from starling.checkpoint.encoding import apart

    save_file(apart(tensors), path)
    sync(path)


def check_plain(path: Path) -> None:
    """Raises CheckpointError for what is missing, or a link, pipe, device or folder: reading it may lead elsewhere, or
    never end."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; resume from another checkpoint") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is not a plain file; resume from another checkpoint")


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises CheckpointError naming it."""
    check_plain(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has more than {MAX_JSON_BYTES} bytes; resume from another checkpoint")
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deeply; resume from another checkpoint") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises CheckpointError naming it."""
    from safetensors.torch import load_file

    check_plain(path)
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, RuntimeError, MemoryError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from error


def publish(partial: Path, final: Path) -> None:
    """Give a finished folder its name, in one step that either happens or does not."""
    sync(*partial.rglob("*"), partial)
    partial.rename(final)
    sync(final.parent)


def remove(folder: Path) -> None:
    """Remove a folder; others see it whole or not at all."""
    doomed = partial_folder(folder)
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def remove_partial(folder: Path) -> None:
    """Remove what crashes have left half-written in `folder`. A learner that still writes there fails."""
    for leftover in list(folder.glob(f".*{PARTIAL}")):
        doomed = folder / f".{secrets.token_hex(8)}{PARTIAL}"
        with suppress(FileNotFoundError):  # others remove it too
            leftover.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def remove_part(partial: Path, rank: int) -> None:
    """Remove what one learner has written into a partial folder, and the folder when it is empty then."""
    for path in partial.glob(f"learner-{rank}.*"):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        partial.rmdir()


def _is_full(error: Exception) -> bool:
    """Whether a write failed for want of room."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    return any(os.strerror(number) in str(error) for number in _FULL)


def _free_bytes(folder: Path, unknown: int = 0) -> int:
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return usage.free if usage.total else unknown
