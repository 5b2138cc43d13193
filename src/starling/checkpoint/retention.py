"""Which checkpoints may be removed: never the newest that is intact and finite."""

from pathlib import Path

from starling.checkpoint.manifest import read_manifest
from starling.checkpoint.reader import checkpoints_in, is_intact
from starling.errors import CheckpointError


def surplus(folder: Path, keep: int, written: Path | None = None) -> list[Path]:
    """The checkpoints that may be removed, oldest first: all except the newest `keep`, and except the newest one that
    is intact and finite.

    `written` was just written and is known to be intact. Older ones are verified only if it is not finite.
    """
    best = newest_good(folder, written)
    return [path for path in checkpoints_in(folder)[:-keep] if path != best]


def newest_good(folder: Path, written: Path | None = None) -> Path | None:
    """The newest checkpoint in a folder that is intact and finite; `written` is known to be intact."""
    found = reversed(checkpoints_in(folder))
    return next((path for path in found if is_finite(path) and (path == written or is_intact(path))), None)


def is_finite(folder: Path) -> bool:
    """Whether every number in a checkpoint is finite; False if its manifest cannot be read."""
    try:
        return read_manifest(folder).is_finite
    except CheckpointError:
        return False
