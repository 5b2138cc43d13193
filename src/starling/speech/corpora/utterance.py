"""The utterances that all importers yield, and the base classes of importers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from starling.configuration import Config
from starling.errors import DataError
from starling.speech.audio import Audio, read_audio


@dataclass(frozen=True)
class Utterance:
    """One transcribed utterance of a corpus, whose audio has not been read.

    `origin` is the file or the manifest line that the utterance comes from. `read` returns the audio or raises
    `DataError`. The utterances of an importer can be pickled.
    """

    id: str
    speaker: str
    text: str
    origin: str
    read: Callable[[], Audio]
    segment: str = ""
    """The file, and its segment, that `read` reads; empty if the settings of the corpus determine them."""
    wordless: str = ""
    """Marks, such as `<NOISE>`, if the transcript consists only of them. The utterance is then left out."""


class FileCorpus(Config):
    """The base class of importers for manifests of audio files."""

    path: Path | tuple[Path, ...]
    """The path of the corpus, or several paths, of which the first that exists is used."""
    audio_root: Path | None = None
    """The folder to which audio paths are relative; by default, the folder of the manifest. Audio outside the folder is
    an error, except that absolute paths are allowed by default."""
    channel: int | None = None
    """The channel to read, counted from 0. If it is not set, audio with several channels is an error."""

    def located(self) -> Path:
        """The first path in `path` that exists.

        Raises:
            DataError: None of the paths exists. The message names all of them.
        """
        places = self.path if isinstance(self.path, tuple) else (self.path,)
        for place in places:
            if place.exists():
                return place
        names = ", ".join(str(place.absolute()) for place in places)
        raise DataError(
            f"corpus not found: none of these exists: {names}; put it there, or set data.corpus.path to where it is"
        )

    def inside(self, set_name: str, name: str) -> Path:
        """The file or folder `name` inside `path` from which a set is read.

        Raises:
            DataError: The file or folder is missing, or is outside the corpus.
        """
        base = self.located()
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise DataError(f"set {set_name}: {name!r} is not a path inside {base}; change data.corpus.sets")
        path = base / name
        if not path.exists():
            raise DataError(f"set {set_name}: {path.absolute()} does not exist; change data.corpus.sets")
        return path

    def maker(self, set_name: str) -> str:
        """A description of what a set depends on besides its settings. The default is empty: a set depends on nothing
        else."""
        return ""

    def utterance(
        self,
        manifest: Path,
        line: int,
        id: str,  # noqa: A002 - same name as in `Utterance`
        speaker: str,
        text: str,
        audio: str,
        start: float = 0.0,
        duration: float | None = None,
    ) -> Utterance:
        """An utterance in an audio file, with its start and duration in seconds."""
        origin = f"{manifest}:{line}"
        path = self.audio_path(manifest, origin, audio)
        read = partial(read_audio, path, start, duration, self.channel)
        return Utterance(id, speaker, text, origin, read, f"{path} {start} {duration}")

    def audio_path(self, manifest: Path, origin: str, name: str) -> Path:
        """The path of the audio file `name` in a manifest. It must be inside `audio_root`, or may be absolute if
        `audio_root` is not set."""
        root = (self.audio_root or (manifest if manifest.is_dir() else manifest.parent)).resolve()
        if not name or "\0" in name:
            raise DataError(f"{origin}: {name!r} is not a usable name for an audio file")
        path = root / name
        try:
            target = path.resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(f"{origin}: {name[:200]!r} is not a usable name for an audio file ({error})") from error
        is_inside = target.is_relative_to(root) or (self.audio_root is None and Path(name).is_absolute())
        if ".." in Path(name).parts or not is_inside:
            raise DataError(
                f"{origin}: audio {name!r} is outside {root}; if that is intended, set data.corpus.audio_root to a "
                f"folder that contains all audio, and use paths without '..'"
            )
        return path


class NamedSets(FileCorpus):
    """A corpus whose sets are files or folders inside `path`, or `path` itself ('.')."""

    sets: dict[str, str]
    """The file or folder of each set, relative to `path`, by the name of the set."""

    def set_path(self, set_name: str) -> Path:
        """The file or folder of a set.

        Raises:
            DataError: The file or folder is missing, or is outside the corpus.
        """
        return self.inside(set_name, self.sets[set_name])
