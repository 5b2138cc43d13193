"""Reads untrusted audio: files, segments of files, streams and raw PCM, with bounded memory. Every error is a
`DataError`.

libsndfile reads WAV, FLAC, MP3, Opus and others. FFmpeg decodes other formats, such as m4a, mp4, webm and video, if the
extra `[media]` is installed.
"""

import re
import stat
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from starling.errors import DataError

if TYPE_CHECKING:
    import soundfile

Seconds = float
Audio = tuple[NDArray[np.float32], int]
"""Mono samples `[T]`, and their sampling rate in Hz."""
MAX_SECONDS = 3600.0
"""Maximum length of audio that is read at once. Longer recordings must be read in segments."""
MAX_SAMPLES = round(MAX_SECONDS * 48_000)
"""Maximum number of samples that are read at once. This bounds memory at very high sampling rates."""
RATES = (1_000, 768_000)
"""The lowest and the highest supported sampling rate, in Hz."""
LEAST_SHARE = 0.9
"""The smallest accepted fraction of the audio that a header declares. A recorder that is switched off, or whose disk is
full, leaves a header that declares slightly more audio than the file has. Such a file is read to its end, as sox and
FFmpeg do."""
SUFFIXES = (".wav", ".flac", ".mp3", ".opus", ".ogg", ".oga", ".aif", ".aiff", ".aifc", ".au", ".w64", ".rf64", ".caf")
"""Suffixes of the files that libsndfile reads."""
MEDIA_SUFFIXES = (".m4a", ".aac", ".mp4", ".mov", ".3gp", ".webm", ".mkv", ".avi", ".wma", ".wmv", ".amr")
"""Suffixes of the files that FFmpeg reads in addition."""
_MEDIA = {"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,aac,asf,avi,amr", "protocol_whitelist": ""}
"""FFmpeg's options, which allow only formats that contain the audio itself. Playlists are excluded because they name
other files and addresses."""
_UNKNOWN_FORMAT = 1  # libsndfile's error code
_UNREADABLE = (OSError, RuntimeError, ValueError, MemoryError)  # soundfile's own errors are RuntimeErrors
_ESTIMATED_LENGTH = ("MP3", "MPEG")
_SHORT_CHUNK = re.compile(r"data : (\d+) \(should be (\d+)\)")
_BLOCK = 1 << 18
"""Number of values, over all channels, that are read at once, and number of bytes that are read at once from raw
PCM."""
_STREAMED = 0x7FFFF000
"""A declared size of at least this value is a placeholder: the length was unknown when the header was written."""
_short: ContextVar[list[str] | None] = ContextVar("short", default=None)


class Media(AbstractContextManager["Media"]):
    """The first audio track of a file that FFmpeg decodes, with the interface of a `soundfile.SoundFile`. The length is
    an estimate. FFmpeg reads from the open file, so that the file's contents cannot refer to another file."""

    format, extra_info = "", ""
    least_share = 0.0
    """The smallest accepted fraction of the declared length. It is 0 because a video may be longer than its audio."""

    def __init__(self, audio: Path | IO[bytes]) -> None:
        self._file = audio.open("rb") if isinstance(audio, Path) else audio
        self._is_own = isinstance(audio, Path)
        self._blocks = self._decoded()
        try:
            with self._opened() as container:
                track = container.streams.audio[0]
                self.samplerate, self.channels = int(track.rate or 0), int(track.channels)
                seconds = float(track.duration * track.time_base if track.duration else (container.duration or 0) / 1e6)
                self.least_share = LEAST_SHARE if track.duration else 0.0
            self.frames = round(seconds * self.samplerate) or sum(map(len, self._decoded()))
        except BaseException:
            self.__exit__()
            raise
        self._rest = np.zeros((0, self.channels), np.float32)

    def __exit__(self, *_: object) -> None:
        self._blocks.close()
        if self._is_own:
            self._file.close()

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        import av

        self._file.seek(0)
        try:
            with av.open(self._file, "r", container_options=_MEDIA, metadata_errors="replace") as container:
                if not container.streams.audio:
                    raise ValueError("there is no audio in it")
                if container.streams.audio[0].codec_context is None:
                    raise ValueError("FFmpeg does not know the codec of its audio")
                yield container
        except av.FFmpegError as error:
            raise ValueError(f"FFmpeg: {error.strerror or error}") from error

    def _decoded(self) -> Generator[NDArray[np.float32], None, None]:
        """Yield the decoded blocks `[n, channels]`."""
        from av import AudioResampler, FFmpegError

        with self._opened() as container:
            track = container.streams.audio[0]
            as_floats = AudioResampler("fltp", track.layout, track.rate)
            try:
                for frame in chain(container.decode(track), [None]):
                    for part in as_floats.resample(frame):
                        yield np.asarray(part.to_ndarray().T, np.float32)
            except FFmpegError:
                if not self.least_share:  # otherwise, `read_blocks` detects missing audio
                    raise

    def seek(self, first: int) -> None:
        """Skip the first `first` samples."""
        while first > 0 and len(left_out := self.read(min(first, _BLOCK))):
            first -= len(left_out)

    def read(self, most: int, **_: object) -> NDArray[np.float32]:
        """The next samples `[n, channels]`, where n is at most `most`, and 0 at the end."""
        while not len(self._rest) and (block := next(self._blocks, None)) is not None:
            self._rest = block
        found, self._rest = self._rest[:most], self._rest[most:]
        return found


_File: TypeAlias = "soundfile.SoundFile | Media"


def audio_suffixes() -> tuple[str, ...]:
    """Suffixes of the files that this installation can read."""
    return SUFFIXES if find_spec("av") is None else SUFFIXES + MEDIA_SUFFIXES


def open_audio(audio: Path | IO[bytes], name: object) -> _File:
    """Open a file or a seekable stream. Raises DataError, whose message begins with `name`, if it cannot be opened."""
    import soundfile

    try:
        return soundfile.SoundFile(str(audio) if isinstance(audio, Path) else audio)
    except (soundfile.SoundFileError, OSError, RuntimeError, ValueError, TypeError) as error:
        reason = re.sub(r"^Error opening .*?: ", "", str(error))  # without the name of the file or in-memory object
        is_unknown = getattr(error, "code", None) == _UNKNOWN_FORMAT
    if is_unknown and find_spec("av") is not None:
        try:
            return Media(audio)
        except (OSError, RuntimeError, ValueError) as error:
            reason = f"libsndfile does not know its format, and {error}"
    elif is_unknown:
        reason = "libsndfile does not know its format; for m4a, mp4, webm and video: pip install 'starling-asr[media]'"
    raise DataError(f"{name}: cannot be read as audio: {reason}")


@dataclass
class Sound:
    """Audio that is being read. Iterating over a `Sound` yields its blocks."""

    rate: int
    seconds: float | None
    """Length of the audio according to its header; None if it is unknown."""
    blocks: Iterator[NDArray[np.float32]]
    """Blocks `[T]`, each the mean of the channels. Raises DataError for a truncated file and for samples that are not
    finite."""
    note: str = ""
    """A remark for the user."""
    heard: Seconds = 0.0
    """Length of the blocks read so far."""

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        samples = 0
        for block in self.blocks:
            samples += len(block)
            self.heard = samples / self.rate
            yield block


@contextmanager
def opened(audio: Path | IO[bytes], name: str, raw_rate: int | None = None) -> Iterator[Sound]:
    """Open a file or a seekable stream. If `raw_rate` is given, the stream contains raw PCM at this rate. Raises
    DataError, whose message begins with `name`, if the audio cannot be opened."""
    if raw_rate is not None and not isinstance(audio, Path):
        yield Sound(raw_rate, None, _pcm_blocks(audio, name))
        return
    if isinstance(audio, Path):
        check_regular(audio)
    with open_audio(audio, name) as file:
        check_rate(int(file.samplerate), name)
        share = share_there(name, file)
        means = (block.mean(axis=1) if file.channels > 1 else block[:, 0] for block in read_blocks(file, name))
        blocks = (checked(block, name) for block in means)
        sound = Sound(int(file.samplerate), file.frames / file.samplerate, blocks)
        if share < 1.0:
            sound.note = f"{name}: {1 - share:.1%} of the audio that its header declares is missing; the rest is used"
        yield sound


def read_audio(
    path: Path, start: float = 0.0, duration: float | None = None, channel: int | None = None
) -> tuple[NDArray[np.float32], int]:
    """Read a file, or its segment of `duration` seconds from `start`. Returns samples `[T]` in -1..1 and the sampling
    rate in Hz.

    Raises:
        DataError: The file is missing, not a regular file, empty, truncated or not audio; the segment is longer than
            an hour or extends beyond the end; `channel` does not exist, or is not given although there are several.
    """
    check_regular(path)
    with open_audio(path, path) as file:
        try:
            first, count = _segment(path, file, start, duration)
            column = _channel(path, file.channels, channel)
            if first:
                file.seek(first)
            samples = np.concatenate([block[:, column] for block in read_blocks(file, path, count)])
            return samples, int(file.samplerate)
        except _UNREADABLE as error:
            raise DataError(f"{path}: cannot be read as audio: {error}") from error


@contextmanager
def noting_short() -> Iterator[list[str]]:
    """A context manager that collects the names of files, read within the context, that have slightly less audio than
    their headers declare."""
    found = list[str]()
    token = _short.set(found)
    try:
        yield found
    finally:
        _short.reset(token)


def read_blocks(file: _File, name: object, count: int | None = None) -> Iterator[NDArray[np.float32]]:
    """Yield the next `count` samples (None: all) in blocks `[n, channels]`. Memory use depends on the samples present,
    not on the header. Raises DataError, whose message begins with `name`, if there are fewer samples, or none."""
    most, read = max(1, _BLOCK // file.channels), 0
    while count is None or read < count:
        try:
            block = file.read(most if count is None else min(most, count - read), dtype="float32", always_2d=True)
        except _UNREADABLE as error:
            raise DataError(f"{name}: cannot be read as audio: {error}") from error
        if not len(block):
            break
        read += len(block)
        yield block
    wanted = file.frames if count is None else count
    least = file.least_share if isinstance(file, Media) else float(file.format not in _ESTIMATED_LENGTH)
    if read < least * wanted:
        raise DataError(f"{name}: truncated: only {read} of {wanted} samples")
    if read == 0:
        raise DataError(f"{name}: no samples")


def check_regular(path: Path) -> None:
    """Raise DataError unless the path is a regular file that is not empty."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: audio file cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a regular file")
    if status.st_size == 0:
        raise DataError(f"{path}: audio file is empty (0 bytes)")


def _segment(path: Path, file: _File, start: float, duration: float | None) -> tuple[int, int]:
    """The first sample of a segment, and the number of samples to read."""
    rate, total = int(file.samplerate), int(file.frames)
    if rate < 1:
        raise DataError(f"{path}: sampling rate {rate} Hz")
    if (share := share_there(path, file)) < 1.0 and (noted := _short.get()) is not None:
        noted.append(str(path))
    first = round(start * rate)
    count = total - first if duration is None else round(duration * rate)
    # samples that the file lacks; a segment may lack at most a tenth of its own samples
    missing = round(total / share) - total
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


def share_there(name: object, file: _File) -> float:
    """The fraction of the declared audio that the file contains: 1, or slightly less. Raises DataError, whose message
    begins with `name`, if the fraction is less than `LEAST_SHARE`."""
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


def check_rate(rate: int, name: str) -> None:
    """Raise DataError for an unsupported sampling rate."""
    if not RATES[0] <= rate <= RATES[1]:
        raise DataError(
            f"{name}: a sampling rate of {rate} Hz is impossible; the limits are {RATES[0]} and {RATES[1]} Hz"
        )


def _pcm_blocks(stream: IO[bytes], name: str) -> Iterator[NDArray[np.float32]]:
    """Yield blocks of raw PCM (one channel, 16 bits, little-endian) as soon as they arrive."""
    rest = b""
    read1 = getattr(stream, "read1", stream.read)
    while data := read1(_BLOCK):
        samples, rest = pcm(rest + data)
        if len(samples):
            yield samples
    if rest:
        raise DataError(f"{name}: ends within a sample; raw PCM has 16 bits per sample")


def pcm(data: bytes) -> tuple[NDArray[np.float32], bytes]:
    """The samples, in [-1, 1], of 16-bit little-endian PCM, and any byte left over."""
    whole = len(data) // 2 * 2
    return np.frombuffer(data[:whole], "<i2").astype(np.float32) / 32768.0, data[whole:]


def checked(samples: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    """Return `samples` unchanged. Raises DataError if some of them are not finite."""
    if not np.isfinite(samples).all():
        raise DataError(f"{name}: contains samples that are not finite (NaN or infinity): decode it again")
    return samples
