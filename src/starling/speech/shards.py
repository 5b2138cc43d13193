"""Reads the FLAC bytes of a prepared set's utterances from local shards or from an object store."""

import errno
import fcntl
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from starling.errors import DataError
from starling.speech.object_store import ObjectFolder, Range

MAX_OPEN_SHARDS = 64
REMOTE = "remote.json"
"""The file in the folder of a set with remote shards: {"address": folder of the shards, "options": fsspec's}, and
optionally "cache", a folder on this machine."""


Count = Annotated[int, Field(ge=0, lt=1 << 62)]


@dataclass(frozen=True)
class Shard:
    """A tar of FLAC files, with its size."""

    file: Annotated[str, Field(pattern=r"^recording\.[0-9]{6,12}\.tar$")]
    num_bytes: Count

    def state(self, size: int | None) -> str:
        """The problem with a tar of `size` bytes; a `size` of None means that it is missing."""
        return "is missing" if size is None else f"has {size} bytes, not {self.num_bytes}"


def again(folder: Path) -> str:
    """The remedy for a damaged set that was prepared here, for messages."""
    return f"remove {folder} and run `starling prepare RECIPE` again"


class Shards(ABC):
    """Reads the bytes of utterances. Not picklable: each process creates its own."""

    def __init__(self, root: str, remedy: str) -> None:
        self.root, self.remedy = root, remedy
        """The path or address of the folder with the tars, and the remedy for damaged tars, for messages."""

    @abstractmethod
    def read(self, ranges: Sequence[Range]) -> list[bytes]:
        """The bytes of ranges, fewer if a shard ends earlier. Raises DataError if a shard cannot be read."""

    @abstractmethod
    def close(self) -> None:
        """Close open files; they are opened again when needed."""


def open_shards(folder: Path, shards: Sequence[Shard]) -> Shards:
    """The shards of the set in `folder`, local or remote.

    Raises DataError if a local shard is missing or has another size. Shards in a store were checked when the set's
    index was fetched; checking again would need a request in every process.
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
    """Tars in a folder, read with `pread`: forked processes may share the open files."""

    def __init__(self, folder: Path, remedy: str) -> None:
        super().__init__(str(folder), remedy)
        self._files: dict[str, int] = {}  # the last ones used come last

    def read(self, ranges: Sequence[Range]) -> list[bytes]:
        try:
            return [os.pread(self._file(each.file), each.size, each.offset) for each in ranges]
        except OSError as error:
            raise DataError(
                f"{error.filename or self.root}: cannot be read: {error.strerror}; {self.remedy}"
            ) from error

    def _file(self, name: str) -> int:
        """The descriptor of an open shard."""
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
    """Tars in an object store. All utterances of a call are requested concurrently, in one range each."""

    def __init__(self, objects: ObjectFolder) -> None:
        super().__init__(objects.address, f"copy the prepared set to {objects.address.rsplit('/', 1)[0]} again")
        self.objects = objects

    def read(self, ranges: Sequence[Range]) -> list[bytes]:
        return self.objects.read_ranges(ranges)

    def close(self) -> None:
        """Do nothing: no file is open."""


class CachedShards(LocalShards):
    """Tars in an object store, each copied whole to a folder of this machine when it is first read.

    One process of the machine copies a shard, and the others wait for it; fsspec's caches would copy it in each
    process.
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
