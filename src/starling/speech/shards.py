"""Reads the FLAC bytes of a prepared set's utterances from local shards or from an object store."""

import errno
import fcntl
import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from starling.errors import DataError
from starling.speech.object_store import ObjectFolder, Range, StorageOptions

MAX_OPEN_SHARDS = 64
REMOTE = "remote.json"
"""A file in the folder of a set with remote shards: {"address": folder of the shards, "options": fsspec's}, and perhaps
"cache": a folder of this machine."""


@dataclass(frozen=True)
class Shard:
    """A tar of FLAC files, and its size."""

    file: str
    num_bytes: int


def again(folder: Path) -> str:
    """What to do about a damaged set that was prepared here, for messages."""
    return f"remove {folder} and run `starling prepare RECIPE` again"


class Place(NamedTuple):
    """The location of an utterance's FLAC: shard number, offset and size in bytes."""

    shard: int
    offset: int
    size: int


class Shards:
    """Reads utterances' bytes. Not picklable: each process creates its own."""

    def check(self) -> None:
        """Raise DataError if a local shard is missing or has another size. Those of a store were checked when the set's
        index was fetched; checking again would need a request in every process."""

    def where(self, shard: int) -> str:
        """The path or address of a shard, for messages."""
        raise NotImplementedError

    def remedy(self) -> str:
        """What to do about damaged shards, for messages."""
        raise NotImplementedError

    def read(self, places: Sequence[Place]) -> list[bytes]:
        """The bytes at `places`, fewer if a shard ends earlier. DataError if a shard cannot be read."""
        raise NotImplementedError

    def close(self) -> None:
        """Close open files; they are opened again when needed."""


def open_shards(folder: Path, shards: Sequence[Shard]) -> Shards:
    """The shards of the set in `folder`, local or remote."""
    path = folder / REMOTE
    if not path.is_file():
        return LocalShards(folder, shards)
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        address, options = str(description["address"]), dict(description.get("options", {}))
        cache = Path(description["cache"]) if "cache" in description else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({error}); {again(folder)}") from error
    remote = RemoteShards(address, options, shards)
    return remote if cache is None else CachedShards(cache, remote, shards)


class LocalShards(Shards):
    """Tars in `<folder>/shar`, read with `pread`: forked processes may share the open files."""

    def __init__(self, folder: Path, shards: Sequence[Shard]) -> None:
        self._folder, self._shards = folder, shards
        self._files: OrderedDict[int, int] = OrderedDict()

    def check(self) -> None:
        for shard in self._shards:
            path = self._path(shard)
            if path.is_symlink() and not path.resolve().is_relative_to(self._folder.resolve()):
                raise DataError(f"{path}: a link that leads out of the prepared set; replace it by the file")
            size = path.stat().st_size if path.is_file() else None
            if size != shard.num_bytes:
                state = "is missing" if size is None else f"has {size} bytes, not {shard.num_bytes}"
                raise DataError(f"{path}: {state}; {self.remedy()}")

    def where(self, shard: int) -> str:
        return str(self._path(self._shards[shard]))

    def remedy(self) -> str:
        return again(self._folder)

    def _path(self, shard: Shard) -> Path:
        return self._folder / "shar" / shard.file

    def read(self, places: Sequence[Place]) -> list[bytes]:
        try:
            return [os.pread(self._file(place.shard), place.size, place.offset) for place in places]
        except OSError as error:
            raise DataError(f"{self._folder}/shar: cannot be read: {error.strerror}; {self.remedy()}") from error

    def _file(self, shard: int) -> int:
        descriptor = self._files.get(shard)
        if descriptor is not None:
            self._files.move_to_end(shard)
            return descriptor
        try:
            descriptor = os.open(self.where(shard), os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{self.where(shard)}: cannot be opened: {error.strerror}") from error
        self._files[shard] = descriptor
        if len(self._files) > MAX_OPEN_SHARDS:
            os.close(self._files.popitem(last=False)[1])
        return descriptor

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


class RemoteShards(Shards):
    """Tars in an object store. All utterances of a call are requested concurrently, one range each."""

    def __init__(self, address: str, options: StorageOptions, shards: Sequence[Shard]) -> None:
        self._shards, self._objects = shards, ObjectFolder(address, options)

    def where(self, shard: int) -> str:
        return f"{self._objects.address}/{self._shards[shard].file}"

    def remedy(self) -> str:
        return f"copy the prepared set to {self._objects.address.rsplit('/', 1)[0]} again"

    def copy(self, shard: Shard, to: Path) -> None:
        """Copy a whole shard to this machine. DataError if it cannot be read, or has another size."""
        self._objects.copy(shard.file, to)
        if (size := to.stat().st_size) != shard.num_bytes:
            where = f"{self._objects.address}/{shard.file}"
            raise DataError(f"{where}: has {size} bytes, not {shard.num_bytes}; {self.remedy()}")

    def read(self, places: Sequence[Place]) -> list[bytes]:
        return self._objects.read_ranges(
            [Range(self._shards[place.shard].file, place.offset, place.size) for place in places]
        )


class CachedShards(LocalShards):
    """Tars in an object store, each copied whole to a folder of this machine when it is first read.

    One process of the machine copies a shard, and the others wait for it.
    """

    def __init__(self, cache: Path, remote: RemoteShards, shards: Sequence[Shard]) -> None:
        super().__init__(cache, shards)
        self._remote = remote

    def check(self) -> None:
        return

    def remedy(self) -> str:
        return f"remove {self._folder}, or {self._remote.remedy()}"

    def read(self, places: Sequence[Place]) -> list[bytes]:
        for shard in {place.shard for place in places} - set(self._files):
            try:
                self._fetch(self._shards[shard])
            except OSError as error:
                raise DataError(
                    f"{self._folder}: {self._remote.where(shard)} cannot be copied there ({error.strerror}); set "
                    "data.cache to a folder with room on each machine, or leave it out"
                ) from error
        return super().read(places)

    def _fetch(self, shard: Shard) -> None:
        final = self._path(shard)
        if final.exists():
            return
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
                self._remote.copy(shard, aside)
                aside.replace(final)
            finally:
                aside.unlink(missing_ok=True)
