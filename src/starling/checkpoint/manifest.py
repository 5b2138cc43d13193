"""The description of a checkpoint: `manifest.json`, written last, with the SHA-256 of every other file."""

import re
from pathlib import Path

from pydantic import Field, ValidationError

from starling.checkpoint.files import read_json, reading
from starling.configuration import Config, digest
from starling.errors import CheckpointError
from starling.files import sha256
from starling.workload import Position, Ticket

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
    """Number of learners that saved their state: all, or none in a checkpoint that cannot be resumed."""
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

    def with_digest(self) -> "Manifest":
        """A copy of the manifest with its `digest` set."""
        return self.model_copy(update={"digest": digest(self.model_dump(mode="json", exclude={"digest"}))})


_NAME = re.compile(r"step-(\d+)(?:\+(\d+))?")


def checkpoint_name(position: Position) -> str:
    """The name of a checkpoint's folder: the number of completed tickets, and the number of outstanding ones if any.

    During a run, different positions have different names, so that learners at different checkpoint barriers never
    write to the same folder.
    """
    beyond = f"+{len(position.outstanding)}" if position.outstanding else ""
    return f"step-{position.num_done:08d}{beyond}"


def sort_key(name: str) -> tuple[int, ...]:
    """The key that sorts checkpoints by name, oldest first; empty for a name that no checkpoint can have.

    The key consists of the two numbers in the name, because names with more than eight digits do not sort correctly as
    text.
    """
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else ()


def listing(folder: Path) -> dict[str, FileEntry]:
    """All files in `folder` and below, except the manifest, as a manifest lists them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {
        path.relative_to(folder).as_posix(): FileEntry(num_bytes=path.stat().st_size, sha256=sha256(path))
        for path in files
    }


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError if it is missing, damaged, or of another format."""
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
    """Whether the relative path `name` stays in `folder` and contains no symbolic link."""
    try:
        is_name = len(name) < 1000 and not Path(name).is_absolute()
        return is_name and folder.resolve() / name == (folder / name).resolve()
    except (OSError, ValueError, RuntimeError):
        return False


def verify(folder: Path, manifest: Manifest) -> None:
    """Raise a CheckpointError that names the file if one is missing, or its size or content differs from the
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
