"""Utterances, as all importers yield them, the base classes of importers, and the untrusted audio files that they read.

Audio is read with bounded memory; every error is a `DataError`.
"""

import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from starling.configuration import Config
from starling.errors import DataError

if TYPE_CHECKING:
    import soundfile

MAX_SECONDS = 3600.0
"""Maximum length of audio that is read at once; longer recordings need segments."""
MAX_SAMPLES = round(MAX_SECONDS * 48_000)
"""Maximum number of samples that are read at once. It bounds memory at very high sampling rates."""
_ESTIMATED_LENGTH = ("MP3", "MPEG")
_SHORT_CHUNK = re.compile(r"data : (\d+) \(should be (\d+)\)")
_BLOCK = 1 << 18
"""Numbers that are read at once; all channels together."""
_STREAMED = 0x7FFFF000
"""Declared sizes of at least this value are placeholders: the length was unknown when the header was written."""

LEAST_SHARE = 0.9
"""The least share of the audio that a header declares: recorders that are switched off, or whose disk is full, leave
headers that declare a little more than there is. It is used as it is, as by sox and FFmpeg."""
_short: ContextVar[list[str] | None] = ContextVar("short", default=None)

Audio = tuple[NDArray[np.float32], int]
"""Samples [T], mono, and their rate in Hz."""


@dataclass(frozen=True)
class Utterance:
    """One transcribed utterance of a corpus, whose audio has not been read.

    `origin` is the file or manifest line it comes from; `read` returns the audio or raises `DataError`. An importer's
    utterances can be pickled.
    """

    id: str
    speaker: str
    text: str
    origin: str
    read: Callable[[], Audio]
    segment: str = ""
    """The file and the segment of it that `read` reads, unless the settings of the corpus determine them."""
    wordless: str = ""
    """Marks, such as `<NOISE>`, that were the whole transcript: the utterance is left out."""


class FileCorpus(Config):
    """The base class of importers for manifests of audio files."""

    path: Path | tuple[Path, ...]
    """The corpus, or several places where it may be: the first that exists is used."""
    audio_root: Path | None = None
    """The folder at which relative audio paths start; by default that of the manifest. Audio outside it is an error,
    except for absolute paths if this is not set."""
    channel: int | None = None
    """The channel to read, from 0. If it is not set, audio with several channels is an error."""

    def located(self) -> Path:
        """The first existing place in `path`.

        Raises:
            DataError: None exists; the message names all of them.
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
        """The file or folder `name` inside `path` that a set is read from.

        Raises:
            DataError: It is missing, or outside the corpus.
        """
        base = self.located()
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise DataError(f"set {set_name}: {name!r} is not a path inside {base}; change data.corpus.sets")
        path = base / name
        if not path.exists():
            raise DataError(f"set {set_name}: {path.absolute()} does not exist; change data.corpus.sets")
        return path

    def maker(self, set_name: str) -> str:
        """What a set depends on besides its settings: nothing."""
        return ""

    def utterance(
        self,
        manifest: Path,
        line: int,
        id: str,  # noqa: A002 - as in an Utterance
        speaker: str,
        text: str,
        audio: str,
        start: float = 0.0,
        duration: float | None = None,
    ) -> Utterance:
        """An utterance of an audio file; start and duration are in seconds."""
        origin = f"{manifest}:{line}"
        path = self.audio_path(manifest, origin, audio)
        read = partial(read_audio, path, start, duration, self.channel)
        return Utterance(id, speaker, text, origin, read, f"{path} {start} {duration}")

    def audio_path(self, manifest: Path, origin: str, name: str) -> Path:
        """The path of the audio file `name` of a manifest: inside `audio_root`, or an absolute path."""
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
    """Name of a set -> its file or folder, relative to `path`."""

    def set_path(self, set_name: str) -> Path:
        """The file or folder of a set.

        Raises:
            DataError: It is missing, or outside the corpus.
        """
        return self.inside(set_name, self.sets[set_name])


def read_audio(
    path: Path, start: float = 0.0, duration: float | None = None, channel: int | None = None
) -> tuple[NDArray[np.float32], int]:
    """Samples [T] in -1..1 and sampling rate in Hz of a file, or of the segment of `duration` seconds from `start`.

    Raises:
        DataError: The file is missing, not a regular file, empty, truncated or not audio; the segment is longer than
            an hour or extends beyond the end; `channel` does not exist, or is missing for several channels.
    """
    import soundfile

    check_regular(path)
    try:
        with soundfile.SoundFile(str(path)) as file:
            first, count = _segment(path, file, start, duration)
            column = _channel(path, file.channels, channel)
            if first:
                file.seek(first)
            samples = np.concatenate([block[:, column] for block in read_blocks(file, path, count)])
            return samples, int(file.samplerate)
    except (soundfile.SoundFileError, OSError, RuntimeError, ValueError, MemoryError) as error:
        raise DataError(f"{path}: cannot be read as audio: {error}") from error


@contextmanager
def noting_short() -> Iterator[list[str]]:
    """The files that are read within this context and have a little less audio than their headers declare."""
    found = list[str]()
    token = _short.set(found)
    try:
        yield found
    finally:
        _short.reset(token)


def read_blocks(file: "soundfile.SoundFile", name: object, count: int | None = None) -> Iterator[NDArray[np.float32]]:
    """The next `count` samples (None: all) in blocks `[n, channels]`. Memory use depends on the samples present, not on
    the header. Raises DataError that begins with `name` if there are fewer, or none."""
    import soundfile

    most, read = max(1, _BLOCK // file.channels), 0
    while count is None or read < count:
        try:
            block = file.read(most if count is None else min(most, count - read), dtype="float32", always_2d=True)
        except (soundfile.SoundFileError, OSError, RuntimeError, ValueError, MemoryError) as error:
            raise DataError(f"{name}: cannot be read as audio: {error}") from error
        if not len(block):
            break
        read += len(block)
        yield block
    if read < (wanted := file.frames if count is None else count) and file.format not in _ESTIMATED_LENGTH:
        raise DataError(f"{name}: truncated: only {read} of {wanted} samples")
    if read == 0:
        raise DataError(f"{name}: no samples")


def check_regular(path: Path) -> None:
    """Raise DataError for what is no regular file, or empty."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: audio file cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a regular file")
    if status.st_size == 0:
        raise DataError(f"{path}: audio file is empty (0 bytes)")


def _segment(path: Path, file: "soundfile.SoundFile", start: float, duration: float | None) -> tuple[int, int]:
    """First sample and number of samples to read."""
    rate, total = int(file.samplerate), int(file.frames)
    if rate < 1:
        raise DataError(f"{path}: sampling rate {rate} Hz")
    if (share := share_there(path, file)) < 1.0 and (noted := _short.get()) is not None:
        noted.append(str(path))
    first = round(start * rate)
    count = total - first if duration is None else round(duration * rate)
    missing = round(total / share) - total  # of the file; a segment may lack at most a tenth of itself, too
    slack = rate // 100 + min(missing, round((1.0 - LEAST_SHARE) * count))
    if not (start >= 0 and count >= 0 and first <= total and first + count <= total + slack):
        raise DataError(
            f"{path}: the segment of {f'{duration} s' if duration is not None else 'the rest'} from {start} s does not "
            f"fit: the file has {total / rate:.3f} s"
        )
    count = min(count, total - first)
    if count > MAX_SECONDS * rate:
        raise DataError(
            f"{path}: declares {count / rate:.0f} s of audio, the limit is {MAX_SECONDS:.0f} s; cut it into segments"
        )
    if count > MAX_SAMPLES:
        raise DataError(f"{path}: declares {count} samples, the limit is {MAX_SAMPLES}; cut it into segments")
    return first, count


def share_there(name: object, file: "soundfile.SoundFile") -> float:
    """The share of the audio that the header declares which the file has: 1, or a little less. Raises DataError that
    begins with `name` if it is less than `LEAST_SHARE`."""
    short = _SHORT_CHUNK.search(str(file.extra_info))
    if not short or int(short[1]) >= _STREAMED or int(short[2]) >= int(short[1]):
        return 1.0
    if (share := int(short[2]) / int(short[1])) < LEAST_SHARE:
        raise DataError(f"{name}: truncated: {short[2]} bytes of audio, but the header declares {short[1]}")
    return share


def _channel(path: Path, channels: int, channel: int | None) -> int:
    if channel is None and channels > 1:
        raise DataError(f"{path}: {channels} channels; set data.corpus.channel to the one to read (from 0)")
    if channel is not None and channel >= channels:
        raise DataError(f"{path}: has {channels} channels, so there is no channel {channel} (from 0)")
    return channel or 0
