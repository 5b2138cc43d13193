"""The files of a checkpoint. Each file is on disk once its write returns. The last file, `manifest.json`, contains the
SHA-256 of every other file."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError
from safetensors import SafetensorError

from starling.configuration import Config, digest
from starling.errors import CheckpointError
from starling.files import save_tensors, sha256, sync
from starling.workload import Position, Ticket

if TYPE_CHECKING:
    from torch import Tensor


PARTIAL = ".partial"
"""Suffix of a folder that is being written or removed."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
MAX_JSON_BYTES = 256 << 20
"""Size of the largest JSON file that is read. A learner's file has a few kilobytes, plus some bytes for each parameter
tensor."""


def partial_folder(final: Path) -> Path:
    """Return the folder in which the files of `final` are written before `final` is published."""
    return final.with_name(f".{final.name}{PARTIAL}")


@contextmanager
def writing(final: Path, needed: int, undo: Callable[[], None]) -> Iterator[None]:
    """Check that `needed` bytes are free before writing inside the context. A file system that does not report its size
    passes the check. If the check or a write fails, call `undo` to remove the written files, and raise a
    `CheckpointError` with the remedy."""
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
    """Write `content` as a JSON file, and wait until it is on disk."""
    path.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
    sync(path)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors in the safetensors format, and wait until they are on disk."""
    save_tensors(path, apart(tensors))
    sync(path)


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the tensors on the CPU, contiguous and without shared memory, as safetensors requires."""
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
    """Check that `path` is a regular file before reading inside the context, because a link may lead elsewhere, and
    reading a pipe or a device may never end. If the file cannot be read, raise a `CheckpointError` that names it."""
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
    """Return the content of a JSON file. Raises a `CheckpointError` that names the file if it cannot be read."""
    with reading(path), path.open("rb") as file:
        content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has more than {MAX_JSON_BYTES} bytes; resume from another checkpoint")
        return json.loads(content.decode("utf-8"))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a safetensors file. Raises a `CheckpointError` that names the file if it cannot be read."""
    from safetensors.torch import load_file

    with reading(path):
        return load_file(path)


def publish(partial: Path, final: Path) -> None:
    """Atomically rename a finished folder to its final name."""
    sync(*partial.rglob("*"), partial)
    partial.rename(final)
    sync(final.parent)


def remove(folder: Path, ignore_errors: bool = False) -> None:
    """Remove a folder. Other processes see either the complete folder or no folder."""
    doomed = folder.with_name(f".{secrets.token_hex(8)}{PARTIAL}")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors)


def remove_partial(folder: Path) -> None:
    """Remove the partial folders that crashes have left in `folder`. A learner that still writes to one fails."""
    for leftover in list(folder.glob(f".*{PARTIAL}")):
        with suppress(FileNotFoundError):  # another process has removed it
            remove(leftover, ignore_errors=True)


def incomplete(folder: Path, part: str = "*") -> list[str]:
    """Return the names of the checkpoints in `folder` that some learners have saved, among them the one with the file
    `part`, and others have not."""
    return sorted({path.parent.name[1 : -len(PARTIAL)] for path in folder.glob(f".*{PARTIAL}/{part}")})


def remove_part(partial: Path, rank: int) -> None:
    """Remove one learner's files from a partial folder, and the folder if it is then empty."""
    for path in partial.glob(f"learner-{rank}.*"):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        partial.rmdir()


def _is_full(error: Exception) -> bool:
    """Return whether a write failed because the disk or the quota is full."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    return any(os.strerror(number) in str(error) for number in _FULL)


def _free_bytes(folder: Path, unknown: int = 0) -> int:
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return usage.free if usage.total else unknown


FORMAT = 6
"""Format of checkpoints since Starling 0.2. Later versions will read it; earlier formats are not read."""
MANIFEST = "manifest.json"
MODEL = "model"
"""Folder of the consensus model inside a checkpoint."""


class FileEntry(Config):
    """One file of a checkpoint."""

    num_bytes: int = Field(ge=0)
    sha256: str


class Manifest(Config):
    """A checkpoint's description."""

    next_ticket: Ticket
    """First ticket that had not been claimed when the learners saved."""
    outstanding: tuple[Ticket, ...] = ()
    """Tickets that had been claimed and not completed."""
    format: int = FORMAT
    starling: str
    """Version of Starling that wrote the checkpoint."""
    fingerprints: dict[str, str]
    """Digests of the parts of the recipe that a resume may not change, by section."""
    world: int = Field(ge=1)
    """Number of learners that trained."""
    learners: int = Field(ge=0)
    """Number of learners that saved their state. It is `world`, or 0 in a checkpoint that cannot be resumed."""
    sync_group_size: int | None = Field(default=None, ge=1)
    """Number of learners that claimed mini-batches together; None means all."""
    epochs_ended: int | None = Field(default=None, ge=0)
    """Number of epochs that had ended; None unless the checkpoint was saved at the end of an epoch."""
    minutes: float = Field(ge=0)
    """Longest training time among the learners when they saved, in minutes."""
    consensus_distance: float | None = Field(default=None, ge=0)
    """(1/L) sum_l |w_l - mean|^2 of the saved weights; None if it is not finite."""
    is_finite: bool
    """Whether every saved number is finite."""
    files: dict[str, FileEntry]
    """Every other file, by its path inside the checkpoint."""
    digest: str = ""
    """SHA-256 of all other fields."""

    @property
    def position(self) -> Position:
        """The data position at which the learners saved."""
        return Position(self.next_ticket, self.outstanding)

    def with_digest(self) -> Manifest:
        """Return a copy of the manifest with its `digest` set."""
        return self.model_copy(update={"digest": digest(self.model_dump(mode="json", exclude={"digest"}))})


_NAME = re.compile(r"step-(\d+)(?:\+(\d+))?")


def checkpoint_name(position: Position) -> str:
    """Return the name of a checkpoint's folder. It contains the number of completed tickets and, if there are any, the
    number of outstanding tickets.

    During a run, different positions have different names, so that learners at different checkpoint barriers never
    write to the same folder.
    """
    beyond = f"+{len(position.outstanding)}" if position.outstanding else ""
    return f"step-{position.num_done:08d}{beyond}"


def sort_key(name: str) -> tuple[int, ...]:
    """Return the key that sorts checkpoints by name, oldest first. It is empty for a name that no checkpoint can have.

    The key consists of the two numbers in the name, because names with more than eight digits do not sort correctly as
    text.
    """
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else ()


def listing(folder: Path) -> dict[str, FileEntry]:
    """Return all files in `folder` and its subfolders, except the manifest, in the form in which a manifest lists
    them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {
        path.relative_to(folder).as_posix(): FileEntry(num_bytes=path.stat().st_size, sha256=sha256(path))
        for path in files
    }


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises `CheckpointError` if it is missing or damaged, or has a different
    format."""
    path = folder / MANIFEST
    content = read_json(path)
    version = content.get("format") if isinstance(content, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, but this version reads formats up to {FORMAT}: use a newer Starling"
        )
    if isinstance(version, int) and version < FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, from before Starling 0.2; this version reads format {FORMAT}: train "
            "again, or resume with the version that wrote it"
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise CheckpointError(f"{path} is not a manifest ({problem}); use another checkpoint") from error
    if manifest != manifest.with_digest():
        raise CheckpointError(f"{path} is damaged: its content does not match its digest; use another checkpoint")
    return manifest


def _is_inside(name: str, folder: Path) -> bool:
    """Return whether the relative path `name` stays in `folder` and contains no symbolic link."""
    try:
        is_name = len(name) < 1000 and not Path(name).is_absolute()
        return is_name and folder.resolve() / name == (folder / name).resolve()
    except (OSError, ValueError, RuntimeError):
        return False


def verify(folder: Path, manifest: Manifest) -> None:
    """Raise a `CheckpointError` that names the file if a file is missing, or its size or content differs from the
    manifest."""
    for name, entry in manifest.files.items():
        path = folder / name
        if not _is_inside(name, folder):
            raise CheckpointError(
                f"{folder / MANIFEST} lists {name[:200]!r}, which lies outside the checkpoint; use another checkpoint"
            )
        with reading(path):
            size, found = path.stat().st_size, sha256(path)
        if size != entry.num_bytes:
            raise CheckpointError(
                f"{path} is damaged: it has {size} bytes, {MANIFEST} says {entry.num_bytes}; use another checkpoint"
            )
        if found != entry.sha256:
            raise CheckpointError(
                f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}; use another checkpoint"
            )
