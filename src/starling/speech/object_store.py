"""Reads byte ranges of files in an object store, or in any other store that fsspec supports."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from starling.errors import ConfigError, DataError

PAUSES = (0.2, 1.0, 3.0)
"""Seconds before each retry after a network failure, in addition to the retries of the libraries."""
CONNECTIONS = 64
"""Number of concurrent requests to a store; a mini-batch has about as many utterances."""
_SECRET = ("secret", "password", "passphrase", "account_key", "sas_token", "connection_string", "access_key")

StorageOptions = Mapping[str, Any]


class Range(NamedTuple):
    """A byte range of a file."""

    file: str
    offset: int
    size: int


def address_problem(address: str, options: StorageOptions) -> str | None:
    """A description of the problem with an address or its options in a recipe; None if there is no problem.

    Secrets must not be in the options, because the recipe is copied into the folders of runs. They belong in the
    environment or in the credentials file of the store's library, such as AWS_SECRET_ACCESS_KEY or ~/.aws/credentials.
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

    Each process, including a forked one, connects once, at its first request. All errors are DataErrors. Network
    failures are raised after several retries.
    """

    def __init__(self, address: str, options: StorageOptions) -> None:
        self.address, self._options = address.rstrip("/"), options

    def read(self, file: str) -> bytes:
        """The contents of a file."""
        content: bytes = self._one(file, lambda system, path: system.cat_file(path))
        return content

    def sizes(self, folder: str = "") -> dict[str, int]:
        """The size in bytes of each file that is directly in the subfolder `folder`, by the name of the file."""
        entries = self._one(folder, lambda system, path: system.ls(path, detail=True))
        return {entry["name"].rsplit("/", 1)[-1]: int(entry["size"]) for entry in entries if entry["type"] == "file"}

    def copy(self, file: str, to: Path) -> None:
        """Copy a whole file to this machine."""
        self._one(file, lambda system, path: system.get_file(path, str(to)))

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """Request several ranges concurrently, and return their contents. These are shorter if a file ends earlier."""
        return self._tried([each.file for each in ranges], partial(self._cat, ranges))

    def _cat(self, ranges: Sequence[Range], system: Any, places: Sequence[int]) -> list[Any]:
        """The contents of the ranges at `places`, with an error in place of each range that failed."""
        chosen = [ranges[place] for place in places]
        paths = [self._path(each.file) for each in chosen]
        starts, ends = [each.offset for each in chosen], [each.offset + each.size for each in chosen]
        pieces: list[Any] = system.cat_ranges(paths, starts, ends, on_error="return")
        # stores report an error for a range that begins after the end of a file that has become shorter
        return [b"" if _begins_behind_end(piece) else piece for piece in pieces]

    def _path(self, file: str) -> str:
        return f"{self.address}/{file}" if file else self.address

    def _one(self, file: str, ask: Callable[[Any, str], Any]) -> Any:
        return self._tried([file], lambda system, places: [ask(system, self._path(file))])[0]

    def _tried(self, files: Sequence[str], ask: Callable[[Any, Sequence[int]], list[Any]]) -> list[Any]:
        """Request an answer for each file, with retries. `ask` returns the answers for the files at the given indices,
        with an error in place of each request that failed."""
        answers: dict[int, Any] = {}
        for pause in (*PAUSES, None):
            missing = [place for place in range(len(files)) if place not in answers]
            try:
                found = ask(self._file_system(), missing)
            except DataError:
                raise
            except Exception as error:
                found = [error] * len(missing)
            for place, answer in zip(missing, found, strict=True):
                if not isinstance(answer, BaseException):
                    answers[place] = answer
                elif pause is None or _is_final(answer):
                    raise self._error(files[place], answer) from answer
            if len(answers) == len(files):
                break
            time.sleep(pause or 0.0)
        return [answers[place] for place in range(len(files))]

    def _file_system(self) -> Any:
        """This process's connection to the store, which fsspec keeps open."""
        import fsspec

        protocol = fsspec.utils.get_protocol(self.address)
        options = {"use_listings_cache": False, **self._options}
        if protocol in ("s3", "s3a"):  # botocore's default of 10 is too few for a mini-batch
            options["config_kwargs"] = {"max_pool_connections": CONNECTIONS, **options.get("config_kwargs", {})}
        try:
            return fsspec.core.url_to_fs(self.address, **options)[0]
        except ImportError as error:
            raise DataError(
                f"{self.address}: reading {protocol}:// needs a package that is not installed ({error}); for s3:// "
                "install starling-asr[cloud]"
            ) from error

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
