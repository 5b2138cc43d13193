"""Corpora in lhotse's formats."""

import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np

from starling.errors import DataError
from starling.speech.audio import MAX_SECONDS, Audio, read_audio
from starling.speech.corpora.lines import read_json_lines, told_as
from starling.speech.corpora.utterance import NamedSets, Utterance


def check_archive(path: Path) -> None:
    """Check the names and types of a tar's members, without reading their contents.

    Raises:
        DataError: The tar cannot be read, or contains `..`, an absolute name, a link, a device or a duplicate name.
    """
    if not path.is_file():
        raise DataError(f"{path}: not a regular file")
    seen: set[str] = set()
    with told_as(f"{path}: cannot be read as Shar"), tarfile.open(path, "r:") as tar:  # a compressed one could expand
        for member in tar:
            name = member.name
            if ".." in PurePosixPath(name).parts or name.startswith("/"):
                raise DataError(f"{path}: {name[:200]!r} leads out of the archive")
            if not member.isfile():
                raise DataError(f"{path}: {name[:200]!r} is not a regular file but a link, a device or similar")
            if name in seen:
                raise DataError(f"{path}: contains {name[:200]!r} twice")
            seen.add(name)


_REFUSED_SOURCES = ("command", "url")


class LhotseCorpus(NamedSets):
    """Manifests of lhotse cuts (`.jsonl`, `.jsonl.gz`), or Shar folders; each cut has one transcribed supervision.

    Relative audio paths start at the working folder, as in lhotse, unless `audio_root` is set.
    """

    kind: Literal["lhotse"]

    def utterances(self, set_name: str) -> Iterator[Utterance]:
        path = self.set_path(set_name)
        for origin, cut in _shar_cuts(path) if path.is_dir() else _listed_cuts(path):
            yield utterance_of(cut, None, origin, self.channel, self.audio_root)


def _listed_cuts(manifest: Path) -> Iterator[tuple[str, Any]]:
    from lhotse.serialization import deserialize_item

    for line, item in read_json_lines(manifest):
        origin = f"{manifest}:{line}"
        with told_as(f"{origin}: not a lhotse cut"):
            cut = deserialize_item(item)
        yield origin, cut


def _shar_cuts(folder: Path) -> Iterator[tuple[str, Any]]:
    from lhotse import CutSet

    manifests = sorted(folder.glob("cuts.*.jsonl*"))
    if not manifests:
        raise DataError(f"{folder}: no cuts.*.jsonl.gz here; a Shar folder is expected")
    for manifest in manifests:
        for _ in read_json_lines(manifest):  # rejects decompression bombs and long lines before lhotse reads the file
            pass
    for archive in sorted(folder.glob("*.tar*")):
        check_archive(archive)
    with told_as(f"{folder}: cannot be read as Shar"):
        for cut in CutSet.from_shar(in_dir=folder):
            yield str(folder), cut


def utterance_of(cut: Any, utterance_id: str | None, origin: str, channel: int | None, root: Path | None) -> Utterance:
    """One cut as an utterance, with `utterance_id` or, if that is None, the cut's id."""
    name = str(getattr(cut, "id", "?"))
    try:
        spoken = [each for each in getattr(cut, "supervisions", ()) if each.text is not None]
        segment = _segment(cut)
    except (AttributeError, TypeError, ValueError) as error:  # fields may be of any type
        raise DataError(f"{origin}: cut {name} is not a valid lhotse cut ({error})") from error
    if len(spoken) != 1:
        raise DataError(
            f"{origin}: cut {name} has {len(spoken)} transcribed supervisions, exactly one is expected; "
            f"use lhotse's CutSet.trim_to_supervisions"
        )
    if not cut.has_recording:
        raise DataError(f"{origin}: cut {name} has no recording")
    return Utterance(
        utterance_id or name,
        str(spoken[0].speaker or "unknown"),
        str(spoken[0].text),
        origin,
        partial(_load, cut, origin, channel, root),
        segment,
    )


def _parts(cut: Any) -> tuple[list[Any], list[Any]]:
    """The cuts that a cut mixes (or the cut itself), and their audio sources."""
    tracks = [track.cut for track in cut.tracks] if hasattr(cut, "tracks") else [cut]
    return tracks, [source for each in tracks if each.has_recording for source in each.recording.sources]


def _segment(cut: Any) -> str:
    """A cut's audio files, start and duration."""
    _, sources = _parts(cut)
    return " ".join([*(str(each.source) for each in sources if each.type == "file"), str(cut.start), str(cut.duration)])


def _load(cut: Any, origin: str, channel: int | None, root: Path | None) -> Audio:
    """The audio of a cut."""
    name = f"{origin} (cut {cut.id})"
    with told_as(f"{name}: cannot be read as audio"):  # its fields may be of any type
        return _loaded(cut, name, channel, root)


def _loaded(cut: Any, name: str, channel: int | None, root: Path | None) -> Audio:
    """The audio of a cut. A simple segment of a file is read by `read_audio`, with its checks."""
    tracks, sources = _parts(cut)
    for source in sources:
        if source.type in _REFUSED_SOURCES:
            raise DataError(f"{name}: its audio source is a {source.type} ({source.source!r}); only files are read")
        if source.type == "file" and not _inside(root, source.source).is_file():
            raise DataError(f"{name}: audio file {_inside(root, source.source)} is missing or not a regular file")
    if cut.duration > MAX_SECONDS:
        raise DataError(f"{name}: {cut.duration:.0f} s of audio, the limit is {MAX_SECONDS:.0f} s")
    wanted = cut.channel if channel is None and not hasattr(cut, "tracks") else channel
    if len(tracks) == 1 and len(sources) == 1 and sources[0].type == "file" and not cut.recording.transforms:
        channels = list(sources[0].channels)
        column = channels.index(wanted) if wanted in channels else wanted
        if isinstance(column, int):
            return read_audio(_inside(root, sources[0].source), cut.start, cut.duration, column)
    if root is not None:
        cut = cut.with_recording_path_prefix(root)
    samples = np.atleast_2d(cut.load_audio())
    if len(samples) > 1 and channel is None:
        raise DataError(f"{name}: {len(samples)} channels; set data.corpus.channel to the one to read (from 0)")
    if channel is not None and channel >= len(samples):
        raise DataError(f"{name}: {len(samples)} channels, so there is no channel {channel} (from 0)")
    return np.ascontiguousarray(samples[channel or 0], dtype=np.float32), int(cut.sampling_rate)


def _inside(root: Path | None, name: str) -> Path:
    """The path of an audio file: unchanged without `root`, otherwise inside it."""
    if root is None:
        return Path(name)
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise DataError(f"audio {name!r} is outside data.corpus.audio_root, {root}")
    return path
