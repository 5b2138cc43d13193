"""The summary of a prepared set, and checks of a set's files before they are read."""

import json
import stat
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from starling.configuration import digest
from starling.errors import DataError
from starling.speech.shards import Count, Shard, again

FORMAT = 2
NUMBERS = {
    "durations": "f4",
    "num_samples": "i8",
    "speaker_of": "i4",
    "shard_of": "i4",
    "offsets": "i8",
    "sizes": "i4",
    "checks": "u4",
}
"""The arrays [N] of the index, with their types."""
TEXTS = ("ids", "texts", "speakers")
ARRAYS = NUMBERS | dict.fromkeys(TEXTS, "u1") | {f"{name}_ends": "i8" for name in TEXTS}
INDEX_FILES = tuple(f"{name}.npy" for name in ARRAYS)
"""The files in the folder `index` of a prepared set."""
_MAX_BYTES = 64 << 20
Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class SetSummary:
    """The contents of a prepared set. `dropped` counts utterances, `dropped_seconds` their audio, where it is known."""

    name: str
    utterances: Count
    seconds: Finite
    speakers: Count
    sampling_rate: Annotated[int, Field(ge=1000, le=192_000)]
    dropped: Count
    dropped_seconds: Finite
    digest: str
    shards: tuple[Shard, ...]
    format: int = FORMAT
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file of the index."""
    check: str = ""
    """SHA-256 of all other fields."""

    @property
    def hours(self) -> float:
        return self.seconds / 3600

    def signed(self) -> "SetSummary":
        """A copy with `check` set."""
        return replace(self, check=self._check())

    def _check(self) -> str:
        content = {name: value for name, value in asdict(self).items() if name != "check"}
        content |= {"seconds": float(self.seconds), "dropped_seconds": float(self.dropped_seconds)}
        return digest(content)

    def problem(self) -> str | None:
        """The problem with a summary whose fields are valid; None if there is none."""
        names = [shard.file for shard in self.shards]
        if len(set(names)) < len(names):
            return f"it lists {next(name for name in names if names.count(name) > 1)} twice"
        if self.files.keys() != set(INDEX_FILES):
            return f"its index has the files {', '.join(self.files)[:200]}"
        if self.check != self._check():
            return "its contents do not match its SHA-256"
        return None


_SUMMARY = TypeAdapter(SetSummary)


def parse_summary(text: bytes, folder: str) -> SetSummary:
    """Parse the summary of the prepared set in `folder`.

    Raises:
        DataError: The summary has another format.
        ValueError: The text is not a valid summary.
    """
    if len(text) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    try:
        fields = json.loads(text.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(fields, dict) or "format" not in fields:
        raise ValueError("it has no format number")
    if fields["format"] != FORMAT:
        raise DataError(
            f"{folder}: prepared data with format {str(fields['format'])[:20]}, this version reads format {FORMAT}; "
            f"remove the folder and run `starling prepare` again"
        )
    try:
        summary: SetSummary = _SUMMARY.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if problem := summary.problem():
        raise ValueError(problem)
    return summary


def read_summary(folder: Path) -> SetSummary:
    """Read the summary of a prepared set.

    Raises:
        DataError: The folder is missing, incomplete, or was written by an incompatible version.
    """
    path = folder / "summary.json"
    if not path.exists():
        raise DataError(
            f"{folder}: no prepared data here ({path.name} is missing); run `starling prepare RECIPE` first"
        )
    try:
        with checked_file(folder, path.name).open("rb") as file:
            return parse_summary(file.read(_MAX_BYTES + 1), str(folder))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); {again(folder)}") from error


def checked_file(folder: Path, name: str) -> Path:
    """The path of a file of a prepared set.

    Raises:
        DataError: It is not a regular file, or is a link to a file outside the set.
        OSError: It is missing.
    """
    path = folder / name
    if not stat.S_ISREG(path.stat().st_mode):
        raise DataError(f"{path}: not a regular file; {again(folder)}")
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"{path}: a link that leads out of the prepared set; replace it with the file")
    return path
