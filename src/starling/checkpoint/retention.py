"""Which checkpoints may be removed: never the newest that is whole and finite."""

from pathlib import Path

from starling.checkpoint.manifest import read_manifest
from starling.checkpoint.reader import checkpoints_in, is_whole
from starling.errors import CheckpointError


def surplus(folder: Path, keep: int, written: Path | None = None) -> list[Path]:
    """The checkpoints in a folder beyond the newest `keep`, oldest first, without the newest that is whole and finite.

    `written` was checked while it was written; the others are checked, from the newest on, until one is whole and
    finite, which costs nothing where `written` is.
    """
    best = newest_good(folder, written)
    return [path for path in checkpoints_in(folder)[:-keep] if path != best]


def newest_good(folder: Path, written: Path | None = None) -> Path | None:
    """The newest checkpoint in a folder that is whole and finite, where `written` is known to be whole."""
    found = reversed(checkpoints_in(folder))
    return next((path for path in found if is_finite(path) and (path == written or is_whole(path))), None)


def is_finite(folder: Path) -> bool:
    """Whether every number in a checkpoint is finite; False where its manifest cannot be read."""
    try:
        return read_manifest(folder).is_finite
    except CheckpointError:
        return False
