"""What a checkpoint says about itself: `manifest.json`, written last, with the SHA-256 of every other file."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError

from starling.checkpoint.files import check_plain, read_json
from starling.configuration import Config, digest
from starling.errors import CheckpointError
from starling.files import sha256
from starling.workload import Position, Ticket

FORMAT = 6
"""That of Starling 0.2, the first to be kept: later versions read it."""
MANIFEST = "manifest.json"
MODEL = "model"
"""The folder of the consensus model inside a checkpoint."""


class FileEntry(Config):
    """One file of a checkpoint."""

    num_bytes: int = Field(ge=0)
    sha256: str


class TicketRecord(Config):
    """A ticket."""

    epoch: int = Field(ge=0)
    index: int = Field(ge=0)
    step: int = Field(ge=0)

    @classmethod
    def of(cls, ticket: Ticket) -> Self:
        return cls(epoch=ticket.epoch, index=ticket.index, step=ticket.step)

    @property
    def ticket(self) -> Ticket:
        return Ticket(self.epoch, self.index, self.step)


class Manifest(Config):
    """A checkpoint's description."""

    format: int = FORMAT
    starling: str
    """The version that wrote it."""
    fingerprints: dict[str, str]
    """Digests of the parts of the recipe that a resume may not change, by section."""
    world: int = Field(ge=1)
    """How many learners trained."""
    learners: int = Field(ge=0)
    """How many of them have their own state here: all, or none."""
    sync_group_size: int | None = Field(default=None, ge=1)
    """How many of them claimed mini-batches together; None: all."""
    next_ticket: TicketRecord
    """The first ticket that was not yet claimed."""
    outstanding: tuple[TicketRecord, ...] = ()
    """Tickets that were claimed and not completed."""
    epochs_ended: int | None = Field(default=None, ge=0)
    """How many epochs had ended, if this is the end of one."""
    minutes: float = Field(ge=0)
    """Time spent training when the last learner arrived."""
    consensus_distance: float | None = Field(default=None, ge=0)
    """(1/L) sum_l |w_l - mean|^2 of the learners' weights as they are here; None if that is not a number."""
    is_finite: bool
    """Whether every number of every learner is finite."""
    files: dict[str, FileEntry]
    """Every other file, by its path inside the checkpoint."""
    digest: str = ""
    """SHA-256 of all the rest of this."""

    def signed(self) -> "Manifest":
        """The same with its digest."""
        return self.model_copy(update={"digest": self._digest()})

    @property
    def is_whole(self) -> bool:
        """Whether it is as it was written."""
        return self.digest == self._digest()

    def _digest(self) -> str:
        return digest(self.model_dump(mode="json", exclude={"digest"}))

    @property
    def position(self) -> Position:
        """What all learners together had done."""
        return Position(self.next_ticket.ticket, tuple(each.ticket for each in self.outstanding))


_NAME = re.compile(r"step-(\d+)(?:\+(\d+))?")


def checkpoint_name(position: Position) -> str:
    """The folder of a checkpoint: the number of mini-batches done, and of outstanding ones before the next ticket. Two
    that differ in what is done never share a name, so learners at different ones do not complete each other's."""
    beyond = f"+{len(position.outstanding)}" if position.outstanding else ""
    return f"step-{position.num_done:08d}{beyond}"


def age(name: str) -> tuple[int, int] | None:
    """What checkpoints are ordered by, oldest first: the two numbers in their names, for text sorts wrongly beyond
    eight digits. None for a name that no checkpoint has."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


@dataclass(frozen=True)
class Listing:
    """The files of a folder, as a manifest lists them."""

    entries: dict[str, FileEntry]

    @classmethod
    def of(cls, folder: Path) -> "Listing":
        """Of all files in `folder` and below, but the manifest."""
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
        return cls(
            {
                path.relative_to(folder).as_posix(): FileEntry(num_bytes=path.stat().st_size, sha256=sha256(path))
                for path in files
            }
        )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError for one that is missing, damaged, or of another format."""
    path = folder / MANIFEST
    content = read_json(path)
    version = content.get("format") if isinstance(content, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise CheckpointError(f"{path} has format {version}, this version reads up to {FORMAT}: use a newer Starling")
    if isinstance(version, int) and version < FORMAT:
        raise CheckpointError(
            f"{path} has format {version} and was written before Starling 0.2, which reads format {FORMAT}: train "
            "again, or resume with the version that wrote it"
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        raise CheckpointError(f"{path} is not a manifest ({error.errors()[0]['msg']}); use another one") from error
    if not manifest.is_whole:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in itself; use another checkpoint")
    return manifest


def _is_inside(name: str, folder: Path) -> bool:
    """Whether a file of that name would lie in `folder`, no link on the way."""
    try:
        is_name = len(name) < 1000 and not Path(name).is_absolute()
        return is_name and folder.resolve() / name == (folder / name).resolve()
    except (OSError, ValueError, RuntimeError):
        return False


def verify(folder: Path, manifest: Manifest) -> None:
    """Raises CheckpointError, naming the file, when one is missing, of another size, or has other content."""
    for name, entry in manifest.files.items():
        path = folder / name
        if not _is_inside(name, folder):
            raise CheckpointError(
                f"{folder / MANIFEST} lists {name[:200]!r}, which lies outside; use another checkpoint"
            )
        check_plain(path)
        try:
            size, found = path.stat().st_size, sha256(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from error
        if size != entry.num_bytes:
            raise CheckpointError(
                f"{path} has {size} bytes, {MANIFEST} says {entry.num_bytes}: it is damaged; use another checkpoint"
            )
        if found != entry.sha256:
            raise CheckpointError(
                f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}; use another checkpoint"
            )
