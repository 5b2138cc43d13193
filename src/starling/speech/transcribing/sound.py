"""Reads audio of any length in blocks, from files, streams and raw PCM; every error is a `DataError`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import soundfile
from numpy.typing import NDArray

from starling.errors import DataError
from starling.speech.corpora.utterance import check_regular, read_blocks, share_there

Seconds = float
_BLOCK = 1 << 18
"""Bytes of raw PCM that are read at once."""
RATES = (1_000, 768_000)
"""The lowest and the highest sampling rate, Hz."""


@dataclass
class Sound:
    """Audio that is being read. Its blocks come by iteration."""

    rate: int
    seconds: float | None
    """Length of the audio by its header; None: unknown."""
    blocks: Iterator[NDArray[np.float32]]
    """The mean of the channels, `[T]` each. Raises DataError for a truncated file and for samples that are not
    finite."""
    note: str = ""
    """What its user should know."""
    heard: Seconds = 0.0
    """Length of the blocks so far."""

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        samples = 0
        for block in self.blocks:
            samples += len(block)
            self.heard = samples / self.rate
            yield block


@contextmanager
def opened(audio: Path | IO[bytes], name: str, raw_rate: int | None = None) -> Iterator[Sound]:
    """A file, or a stream that can be sought; or, if `raw_rate` is given, a stream of raw PCM of that rate. Raises
    DataError that begins with `name`."""
    if raw_rate is not None and not isinstance(audio, Path):
        yield Sound(raw_rate, None, _pcm_blocks(audio, name))
        return
    if isinstance(audio, Path):
        check_regular(audio)
    try:
        file = soundfile.SoundFile(audio)
    except (soundfile.SoundFileError, OSError, RuntimeError, ValueError, TypeError) as error:
        reason = re.sub(r"^Error opening <.*?>: ", "", str(error))  # without the name of an object in memory
        raise DataError(f"{name}: cannot be read as audio: {reason}") from error
    with file:
        check_rate(int(file.samplerate), name)
        share = share_there(name, file)
        means = (block.mean(axis=1) if file.channels > 1 else block[:, 0] for block in read_blocks(file, name))
        blocks = (checked(block, name) for block in means)
        sound = Sound(int(file.samplerate), file.frames / file.samplerate, blocks)
        if share < 1.0:
            sound.note = f"{name}: {1 - share:.1%} of the audio that its header declares is missing; the rest is used"
        yield sound


def check_rate(rate: int, name: str) -> None:
    """Raise DataError for an impossible sampling rate."""
    if not RATES[0] <= rate <= RATES[1]:
        raise DataError(
            f"{name}: a sampling rate of {rate} Hz is impossible; the limits are {RATES[0]} and {RATES[1]} Hz"
        )


def _pcm_blocks(stream: IO[bytes], name: str) -> Iterator[NDArray[np.float32]]:
    """Raw PCM of one channel, 16 bits, little-endian, as soon as it arrives."""
    rest = b""
    read1 = getattr(stream, "read1", stream.read)
    while data := read1(_BLOCK):
        samples, rest = pcm(rest + data)
        if len(samples):
            yield samples
    if rest:
        raise DataError(f"{name}: ends within a sample; raw PCM has 16 bits a sample")


def pcm(data: bytes) -> tuple[NDArray[np.float32], bytes]:
    """Samples of 16 bits, little-endian, in [-1, 1], and a byte that is left over."""
    whole = len(data) // 2 * 2
    return np.frombuffer(data[:whole], "<i2").astype(np.float32) / 32768.0, data[whole:]


def checked(samples: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    """The samples. Raises DataError if some are not finite."""
    if not np.isfinite(samples).all():
        raise DataError(f"{name}: contains samples that are not finite (NaN or infinity): decode it again")
    return samples
