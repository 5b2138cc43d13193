"""Reads files in an object store, or any other store that fsspec supports, by byte ranges."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from starling.errors import ConfigError, DataError

PAUSES = (0.2, 1.0, 3.0)
"""Seconds before each retry after a network failure, in addition to the retries of the libraries."""
CONNECTIONS = 64
"""Concurrent requests to a store, about as many as a mini-batch has utterances."""
_SECRET = ("secret", "password", "passphrase", "account_key", "sas_token", "connection_string", "access_key")

_Result = TypeVar("_Result")
StorageOptions = Mapping[str, Any]


class Range(NamedTuple):
    """A byte range of a file."""

    file: str
    start: int
    size: int


def address_problem(address: str, options: StorageOptions) -> str | None:
    """A message if a recipe cannot have this address or these options; otherwise None.

    The options are part of the recipe, which is copied into the folders of runs. So secrets belong in the environment
    or in the credentials file of the store's library, such as AWS_SECRET_ACCESS_KEY or ~/.aws/credentials.
    """
    if "://" not in address:
        return (
            f"data.remote: {address} has no protocol; give an address such as s3://bucket/corpus or file:///mnt/corpus"
        )
    import fsspec

    protocol = fsspec.utils.get_protocol(address)
    if protocol == "memory":
        return "data.remote cannot be in the memory of one process: give an address such as s3://bucket/corpus"
    if protocol not in fsspec.available_protocols():
        return f"data.remote: {protocol}:// is unknown; known are {', '.join(sorted(fsspec.available_protocols()))}"
    secret = [name for name in _names(options) if any(part in name.lower() for part in _SECRET)]
    if secret:
        return (
            f"data.storage_options must not contain {', '.join(secret)}, because recipes are copied into folders of "
            "runs: put secrets in the environment or in the store's credentials file"
        )
    return None


def _names(options: StorageOptions) -> list[str]:
    names = list(options)
    for value in options.values():
        if isinstance(value, Mapping):
            names += _names(value)
    return names


class ObjectFolder:
    """A folder given by its fsspec address, such as s3://bucket/corpus/train.

    Each process, including a fork, connects once, at the first request. All errors are DataErrors; network failures are
    raised after several retries.
    """

    def __init__(self, address: str, options: StorageOptions) -> None:
        self.address, self._options = address.rstrip("/"), options
        self._owner: int | None = None
        self._file_system: Any = None

    def read(self, file: str) -> bytes:
        """A whole file."""
        content: bytes = self._tried(file, lambda system: system.cat_file(self._path(file)))
        return content

    def sizes(self, folder: str = "") -> dict[str, int]:
        """The size in bytes of each file directly in `folder`, a subfolder of this one, by name."""
        entries = self._tried(folder, lambda system: system.ls(self._path(folder), detail=True))
        return {entry["name"].rsplit("/", 1)[-1]: int(entry["size"]) for entry in entries if entry["type"] == "file"}

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """The contents of several ranges, requested concurrently; fewer bytes if a file ends earlier."""
        found: list[Any] = [None] * len(ranges)
        missing = list(range(len(ranges)))
        for pause in (*PAUSES, None):
            asked = [ranges[place] for place in missing]
            pieces = self._tried(asked[0].file if asked else "", partial(self._cat, ranges=asked))
            for place, piece in zip(missing, pieces, strict=True):
                found[place] = piece
            missing = [place for place in missing if not isinstance(found[place], bytes)]
            if not missing:
                break
            first = missing[0]
            if pause is None or _is_final(found[first]):
                raise self._error(ranges[first].file, found[first])
            time.sleep(pause)
        return found

    def copy(self, file: str, to: Path) -> None:
        """Copy a whole file to this machine."""
        self._tried(file, lambda system: system.get_file(self._path(file), str(to)))

    def _cat(self, system: Any, ranges: Sequence[Range]) -> list[Any]:
        paths = [self._path(each.file) for each in ranges]
        starts, ends = [each.start for each in ranges], [each.start + each.size for each in ranges]
        pieces: list[Any] = system.cat_ranges(paths, starts, ends, on_error="return")
        # a range beyond the end of a file is an error of the store: the file has become shorter
        return [b"" if _begins_behind_end(piece) else piece for piece in pieces]

    def _path(self, file: str) -> str:
        return f"{self.address}/{file}" if file else self.address

    def _tried(self, file: str, action: Callable[[Any], _Result]) -> _Result:
        for pause in (*PAUSES, None):
            try:
                return action(self._connected())
            except DataError:
                raise
            except Exception as error:
                if pause is None or _is_final(error):
                    raise self._error(file, error) from error
                time.sleep(pause)
        raise AssertionError("the last pause is None")

    def _connected(self) -> Any:
        import fsspec

        if self._owner != os.getpid():
            try:
                self._file_system, _ = fsspec.core.url_to_fs(self.address, **self._all_options())
            except ImportError as error:
                raise DataError(
                    f"{self.address}: reading {fsspec.utils.get_protocol(self.address)}:// needs a package that is not "
                    f"installed ({error}); for s3:// install starling-asr[cloud]"
                ) from error
            self._owner = os.getpid()
        return self._file_system

    def _all_options(self) -> dict[str, Any]:
        import fsspec

        options = {"skip_instance_cache": True, "use_listings_cache": False, **self._options}
        if fsspec.utils.get_protocol(self.address) in (
            "s3",
            "s3a",
        ):  # botocore's default of 10 is too few for a mini-batch
            options["config_kwargs"] = {"max_pool_connections": CONNECTIONS, **options.get("config_kwargs", {})}
        return options

    def _error(self, file: str, error: BaseException) -> DataError:
        path = self._path(file)
        if isinstance(error, FileNotFoundError):
            return DataError(f"{path}: is missing; copy the prepared sets to {self.address} again, or set data.remote")
        if _is_refused(error):
            return DataError(
                f"{path}: access is refused ({_text(error)}); check the credentials in this machine's environment or "
                "credentials file, and data.storage_options (anon: true for a public bucket)"
            )
        return DataError(
            f"{path}: cannot be read after {len(PAUSES) + 1} tries ({_text(error)}); check the network, data.remote "
            "and data.storage_options"
        )


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _is_refused(error: BaseException) -> bool:
    return isinstance(error, PermissionError) or "Credential" in type(error).__name__


def _is_final(error: BaseException) -> bool:
    """Whether a retry cannot succeed."""
    kinds = (FileNotFoundError, IsADirectoryError, NotADirectoryError, TypeError, ValueError, ConfigError)
    return _is_refused(error) or (isinstance(error, kinds) and not isinstance(error, TimeoutError))


def _begins_behind_end(error: object) -> bool:
    return isinstance(error, Exception) and ("InvalidRange" in str(error) or "range is not satisfiable" in str(error))
