"""The summary of a prepared set, and checks of a set's files before they are read."""

import json
import math
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from starling.configuration import digest
from starling.errors import DataError
from starling.files import sha256
from starling.speech.shards import Shard, again

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
"""The arrays [N] of the index, and their types."""
TEXTS = ("ids", "texts", "speakers")
ARRAYS = NUMBERS | dict.fromkeys(TEXTS, "u1") | {f"{name}_ends": "i8" for name in TEXTS}
INDEX_FILES = tuple(f"{name}.npy" for name in ARRAYS)
"""The files in the folder `index` of a prepared set."""
_MAX_BYTES = 64 << 20
_SHARD_NAME = re.compile(r"recording\.[0-9]{6,12}\.tar")


@dataclass(frozen=True)
class SetSummary:
    """The contents of a prepared set. `dropped` counts utterances, `dropped_seconds` their audio, if it is known."""

    name: str
    utterances: int
    seconds: float
    speakers: int
    sampling_rate: int
    dropped: int
    dropped_seconds: float
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
        """A message if the summary is invalid; otherwise None."""
        numbers = (self.utterances, self.speakers, self.dropped, *(shard.num_bytes for shard in self.shards))
        names = [shard.file for shard in self.shards]
        bad = next((name for name in names if not _SHARD_NAME.fullmatch(name)), None)
        if bad is not None:
            return f"{bad[:200]!r} is not the name of a shard"
        if len(set(names)) < len(names):
            return f"it lists {next(name for name in names if names.count(name) > 1)} twice"
        if min(numbers) < 0 or max(numbers) >= 1 << 62 or not 1000 <= self.sampling_rate <= 192_000:
            return "its numbers are out of range"
        if not (math.isfinite(self.seconds) and math.isfinite(self.dropped_seconds)):
            return "its numbers are not finite"
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
        raise DataError(f"{path}: a link that leads out of the prepared set; replace it by the file")
    return path


def check_index(folder: Path, files: Mapping[str, str]) -> None:
    """Raise DataError, naming the file, if a file of the index does not match its SHA-256."""
    for name, expected in files.items():
        try:
            found = sha256(checked_file(folder, f"index/{name}"))
        except OSError as error:
            raise DataError(f"{folder}/index/{name}: cannot be read ({error}); {again(folder)}") from error
        if found != expected:
            reason = "its SHA-256 is not the one in summary.json"
            raise DataError(f"{folder}/index/{name}: cannot be read ({reason}); {again(folder)}")
