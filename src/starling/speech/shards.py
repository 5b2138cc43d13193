"""Reads the summary and the files of a prepared set, which are checked first, and the FLAC bytes of its utterances,
from local shards or from an object store."""

import errno
import fcntl
import json
import os
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from starling.configuration import digest
from starling.errors import DataError
from starling.speech.object_store import ObjectFolder, Range

MAX_OPEN_SHARDS = 64
REMOTE = "remote.json"
"""The file that a set with remote shards has in its folder. It contains {"address": folder of the shards, "options":
fsspec's options}, and optionally "cache", a folder on this machine."""


Count = Annotated[int, Field(ge=0, lt=1 << 62)]


@dataclass(frozen=True)
class Shard:
    """A tar of FLAC files, given by its name and size."""

    file: Annotated[str, Field(pattern=r"^recording\.[0-9]{6,12}\.tar$")]
    num_bytes: Count

    def state(self, size: int | None) -> str:
        """A description of the problem with a tar of `size` bytes. A `size` of None means that the tar is missing."""
        return "is missing" if size is None else f"has {size} bytes, not {self.num_bytes}"


def again(folder: Path) -> str:
    """The remedy for a damaged set that was prepared here, for use in error messages."""
    return f"remove {folder} and run `starling prepare RECIPE` again"


class Shards(ABC):
    """Reads the bytes of utterances. An instance cannot be pickled; each process creates its own."""

    def __init__(self, root: str, remedy: str) -> None:
        self.root, self.remedy = root, remedy
        """The path or address of the folder with the tars, and the remedy for damaged tars, for use in error
        messages."""

    @abstractmethod
    def read(self, ranges: Sequence[Range]) -> list[bytes]:
        """The bytes of each range; fewer than requested if a shard ends earlier. Raises DataError if a shard cannot be
        read."""

    @abstractmethod
    def close(self) -> None:
        """Close the open files. They are opened again when needed."""


def open_shards(folder: Path, shards: Sequence[Shard]) -> Shards:
    """Open the local or remote shards of the set in `folder`.

    Raises DataError if a local shard is missing or has the wrong size. Shards in a store were checked when the set's
    index was fetched; to check them again would require a request from every process.
    """
    path = folder / REMOTE
    if not path.is_file():
        _check_local(folder, shards)
        return LocalShards(folder / "shar", again(folder))
    try:
        description = {"options": {}, "cache": None} | json.loads(path.read_text(encoding="utf-8"))
        objects = ObjectFolder(str(description["address"]), dict(description["options"]))
        cache = description["cache"] and Path(description["cache"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({error}); {again(folder)}") from error
    return CachedShards(cache, objects, shards) if cache else RemoteShards(objects)


def _check_local(folder: Path, shards: Sequence[Shard]) -> None:
    for shard in shards:
        path = folder / "shar" / shard.file
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise DataError(f"{path}: a link that leads out of the prepared set; replace it with the file")
        size = path.stat().st_size if path.is_file() else None
        if size != shard.num_bytes:
            raise DataError(f"{path}: {shard.state(size)}; {again(folder)}")


class LocalShards(Shards):
    """Reads tars in a folder with `pread`, so that forked processes may share the open files."""

    def __init__(self, folder: Path, remedy: str) -> None:
        super().__init__(str(folder), remedy)
        self._files: dict[str, int] = {}  # most recently used last

    def read(self, ranges: Sequence[Range]) -> list[bytes]:
        try:
            return [os.pread(self._file(each.file), each.size, each.offset) for each in ranges]
        except OSError as error:
            raise DataError(
                f"{error.filename or self.root}: cannot be read: {error.strerror}; {self.remedy}"
            ) from error

    def _file(self, name: str) -> int:
        """The file descriptor of a shard, which is opened if necessary."""
        descriptor = self._files.pop(name, None)
        if descriptor is None:
            descriptor = os.open(f"{self.root}/{name}", os.O_RDONLY)
        self._files[name] = descriptor
        if len(self._files) > MAX_OPEN_SHARDS:
            os.close(self._files.pop(next(iter(self._files))))
        return descriptor

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


class RemoteShards(Shards):
    """Reads tars in an object store. All utterances of a call are requested concurrently, with one range for each."""

    def __init__(self, objects: ObjectFolder) -> None:
        super().__init__(objects.address, f"copy the prepared set to {objects.address.rsplit('/', 1)[0]} again")
        self.objects = objects

    def read(self, ranges: Sequence[Range]) -> list[bytes]:
        return self.objects.read_ranges(ranges)

    def close(self) -> None:
        """Do nothing, because no file is open."""


class CachedShards(LocalShards):
    """Reads tars in an object store. Each tar is copied to a folder on this machine when it is first read.

    One process on the machine copies a shard, and the others wait for the copy. With fsspec's caches, each process
    would copy the shard.
    """

    def __init__(self, cache: Path, objects: ObjectFolder, shards: Sequence[Shard]) -> None:
        self._remote = RemoteShards(objects)
        super().__init__(cache / "shar", f"remove {cache}, or {self._remote.remedy}")
        self._shards = {shard.file: shard for shard in shards}

    def _file(self, name: str) -> int:
        if name not in self._files and not (final := Path(self.root, name)).exists():
            try:
                self._fetch(self._shards[name], final)
            except OSError as error:
                raise DataError(
                    f"{final.parent.parent}: {self._remote.root}/{name} cannot be copied there ({error.strerror}); set "
                    "data.cache to a folder with room on each machine, or leave it out"
                ) from error
        return super()._file(name)

    def _fetch(self, shard: Shard, final: Path) -> None:
        final.parent.mkdir(parents=True, exist_ok=True)
        with final.with_name(f"{shard.file}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if final.exists():
                return
            aside = final.with_name(f"{shard.file}.partial")
            aside.unlink(missing_ok=True)
            if shutil.disk_usage(final.parent).free < shard.num_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            try:
                self._remote.objects.copy(shard.file, aside)
                if (size := aside.stat().st_size) != shard.num_bytes:
                    raise DataError(f"{self._remote.root}/{shard.file}: {shard.state(size)}; {self._remote.remedy}")
                aside.replace(final)
            finally:
                aside.unlink(missing_ok=True)


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
"""The arrays `[N]` of the index, with their types."""
TEXTS = ("ids", "texts", "speakers")
ARRAYS = NUMBERS | dict.fromkeys(TEXTS, "u1") | {f"{name}_ends": "i8" for name in TEXTS}
INDEX_FILES = tuple(f"{name}.npy" for name in ARRAYS)
"""The files in the folder `index` of a prepared set."""
_MAX_BYTES = 64 << 20
Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class SetSummary:
    """A summary of a prepared set. `dropped` is the number of dropped utterances, and `dropped_seconds` is the length
    of their audio, where it is known."""

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
        """A description of the problem with a summary whose fields have valid types; None if there is no problem."""
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
        DataError: The path is not a regular file, or is a link to a file outside the set.
        OSError: The file is missing.
    """
    path = folder / name
    if not stat.S_ISREG(path.stat().st_mode):
        raise DataError(f"{path}: not a regular file; {again(folder)}")
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"{path}: a link that leads out of the prepared set; replace it with the file")
    return path
