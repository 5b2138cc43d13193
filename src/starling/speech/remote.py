"""Prepared sets in an object store: the index is fetched once, and audio is read from the store by byte ranges."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from starling.errors import DataError
from starling.files import sync
from starling.speech.object_store import ObjectFolder, StorageOptions
from starling.speech.set_summary import INDEX_FILES, parse_summary
from starling.speech.shards import REMOTE
from starling.speech.store import SpeechSet

_LISTED = ("dropped.tsv",)  # fetched if it exists


def fetch_sets(
    address: str,
    options: StorageOptions,
    folder: Path,
    names: Sequence[str],
    sampling_rate: int,
    progress: Callable[[str, int, int], None],
    cache: Path | None = None,
) -> list[str]:
    """Fetch the index of each set at `address` to `<folder>/<name>`. Returns the names of the sets that were fetched.

    `address`, e.g. s3://bucket/corpus, is a copy of a folder that `starling prepare` wrote. Of the sets' settings only
    the sampling rate, in Hz, must be that of the recipe. Shards that have been read are kept in `cache`, if any.

    Raises:
        DataError: A set or shard is missing, incomplete or of another size, access is refused, or the store does not
            respond.
    """
    written = []
    for name in names:
        objects, final = ObjectFolder(f"{address.rstrip('/')}/{name}", options), folder / name
        text = objects.read("summary.json")
        _check_summary(text, objects, sampling_rate)
        where: dict[str, object] = {"address": f"{objects.address}/shar", "options": dict(options)}
        if cache is not None:  # another upload of the set has a folder of its own
            where["cache"] = str(cache.absolute() / name / hashlib.sha256(text).hexdigest()[:16])
        if (final / "shar").exists():
            raise DataError(
                f"{final}: contains a set that was prepared on this machine; set data.folder to another folder for the "
                f"set at {objects.address}, or remove data.remote"
            )
        if not _is_there(final, text, where):
            _fetch(objects, text, where, final, partial(progress, name))
            written.append(name)
    return written


def _check_summary(text: bytes, objects: ObjectFolder, sampling_rate: int) -> None:
    """Raise DataError if a set's summary is damaged, or its sampling rate or the size of a shard is another."""
    try:
        summary = parse_summary(text, objects.address)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{objects.address}/summary.json: cannot be read ({error}); copy the set there again"
        ) from error
    if summary.sampling_rate != sampling_rate:
        raise DataError(
            f"{objects.address}: was prepared at {summary.sampling_rate} Hz; the recipe's data.sampling_rate is "
            f"{sampling_rate} Hz"
        )
    sizes = objects.sizes("shar")
    for shard in summary.shards:
        if (size := sizes.get(shard.file)) != shard.num_bytes:
            raise DataError(f"{objects.address}/shar/{shard.file}: {shard.state(size)}; copy the set there again")


def _is_there(folder: Path, summary: bytes, where: dict[str, object]) -> bool:
    """Whether a set was fetched from the same address before, and can be opened."""
    try:
        same = (folder / "summary.json").read_bytes() == summary
        same = same and json.loads((folder / REMOTE).read_text(encoding="utf-8")) == where
        return same and len(SpeechSet.open(folder)) >= 0
    except (OSError, ValueError, DataError):
        return False


def _fetch(
    objects: ObjectFolder,
    summary: bytes,
    where: dict[str, object],
    final: Path,
    report: Callable[[int, int], None],
) -> None:
    """Fetch everything except the shards into a folder next to `final`, and rename it when it is complete."""
    aside = final.with_name(f"{final.name}.partial")
    files = [f"index/{name}" for name in INDEX_FILES] + [name for name in _LISTED if name in objects.sizes()]
    try:
        shutil.rmtree(aside, ignore_errors=True)
        (aside / "index").mkdir(parents=True)
        for number, name in enumerate(files):
            report(number, len(files))
            (aside / name).write_bytes(objects.read(name))
        report(len(files), len(files))
        (aside / REMOTE).write_text(json.dumps(where, indent=2) + "\n", encoding="utf-8")
        (aside / "summary.json").write_bytes(summary)
        sync(*aside.rglob("*"), aside)
        try:
            SpeechSet.open(aside)
        except DataError as error:  # name the store, not the local copy
            found = str(error).partition(";")[0].replace(str(aside), objects.address)
            raise DataError(f"{found}; the set in the store is damaged: copy it again") from error
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
    except OSError as error:
        raise DataError(f"{aside}: cannot be written: {error}; set data.folder to another place") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
