"""What every importer yields, and the checks that all of them share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from starling.configuration import Config
from starling.errors import DataError
from starling.speech.corpora.audio import read_audio

Audio = tuple[NDArray[np.float32], int]
"""Samples [T], mono, and their rate in Hz."""


@dataclass(frozen=True)
class Utterance:
    """One transcribed utterance of a corpus, its audio not read yet.

    `origin` says where it came from (a file, or a line of a manifest); `read` returns the audio or raises
    `DataError`. An importer's utterances can be sent to another process.
    """

    id: str
    speaker: str
    text: str
    origin: str
    read: Callable[[], Audio]
    stretch: str = ""
    """The file and the stretch of it that `read` reads, where that is not settled by the settings of the corpus."""


class FileCorpus(Config):
    """What the importers of manifests of audio files have in common."""

    path: Path | tuple[Path, ...]
    """The corpus, or several places where it may be: the first that exists is used."""
    audio_root: Path | None = None
    """Where relative audio names start; by default the folder of the manifest. Audio outside of it is refused, but for
    absolute names where this is not set."""
    channel: int | None = None
    """Channel to read, from 0; without it, audio of several channels is refused."""

    def located(self) -> Path:
        """The first of the places that exists.

        Raises:
            DataError: none exists; all are named.
        """
        places = self.path if isinstance(self.path, tuple) else (self.path,)
        for place in places:
            if place.exists():
                return place
        names = ", ".join(str(place.absolute()) for place in places)
        raise DataError(
            f"corpus not found: none of these exists: {names}; put it there, or set data.corpus.path to where it is"
        )

    def maker(self, set_name: str) -> str:
        """What a set is made from beside its settings: nothing."""
        return ""

    def utterance(
        self,
        manifest: Path,
        line: int,
        fields: Mapping[str, str],
        start: float = 0.0,
        duration: float | None = None,
    ) -> Utterance:
        """An utterance of an audio file; `fields` are id, speaker, text and audio, start and duration in seconds."""
        origin = f"{manifest}:{line}"
        path = self.audio_path(manifest, origin, fields["audio"])
        return Utterance(
            fields["id"],
            fields["speaker"],
            fields["text"],
            origin,
            partial(read_audio, path, start, duration, self.channel),
            f"{path} {start} {duration}",
        )

    def audio_path(self, manifest: Path, origin: str, name: str) -> Path:
        """The file that a manifest calls `name`: inside `audio_root`, or anywhere by its absolute name."""
        root = (self.audio_root or (manifest if manifest.is_dir() else manifest.parent)).resolve()
        if not name or "\0" in name:
            raise DataError(f"{origin}: no usable name of an audio file: {name!r}")
        path = root / name
        try:
            target = path.resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(f"{origin}: no usable name of an audio file: {name[:200]!r} ({error})") from error
        is_inside = target.is_relative_to(root) or (self.audio_root is None and Path(name).is_absolute())
        if ".." in Path(name).parts or not is_inside:
            raise DataError(
                f"{origin}: audio {name!r} lies outside of {root}; "
                f"if that is meant, set data.corpus.audio_root to a folder that holds all audio, without '..'"
            )
        return path


class NamedSets(FileCorpus):
    """A corpus whose sets are files or folders beside each other, or the corpus itself ('.')."""

    sets: dict[str, str]
    """Name of a set -> its file or folder, relative to `path`."""

    def set_path(self, set_name: str) -> Path:
        """Where a set lies.

        Raises:
            DataError: it is missing, or outside of the corpus.
        """
        base = self.located()
        name = self.sets[set_name]
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise DataError(f"set {set_name}: {name!r} is not a name inside of {base}; change data.corpus.sets")
        path = base / name
        if not path.exists():
            raise DataError(f"set {set_name}: {path.absolute()} does not exist; change data.corpus.sets")
        return path
