"""Effects of transmission and storage on audio: lower sampling rates, the telephone's band, and lossy codecs.

Every codec is the real one: audio is encoded in memory by libsndfile, and decoded again.
"""

from __future__ import annotations

import io
import re
from functools import cache
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator

from starling.errors import DataError

_NAME = re.compile(r"(rate|mp3|opus)-([1-9][0-9]{0,5})")
_LIMITS = {"rate": (1000, 192_000), "mp3": (8, 64), "opus": (6, 256)}
"""Limits of the sampling rate in Hz, and of the bit rate in kbit/s: those that MP3 allows at every rate up to 24 kHz,
and those that Opus allows."""
_MP3_KBITS = {8000: (8, 64), 16000: (8, 160), 24000: (8, 160), 48000: (32, 320)}
"""The lowest and the highest bit rate at some of MP3's sampling rates, between which libsndfile interpolates."""
_MP3_DELAY = 1105
"""Samples by which LAME and mpg123 together delay audio."""
_HIGHEST_LEVEL = 0.99
"""Highest compression level: libsndfile 1.2.2 cannot encode MP3 at a level of 1."""
_RATES = {"opus": (8000, 12000, 16000, 24000, 48000), "mp3": tuple(_MP3_KBITS)}
"""Sampling rates of the codecs in Hz, ascending; other codecs use the telephone's."""
TELEPHONE_RATE = 8000
"""Sampling rate of the telephone, Hz."""
TELEPHONE_BAND = (300.0, 3400.0)
"""Band of the telephone, Hz."""
KINDS = "telephone, gsm, rate-HZ, opus-KBITS (6 to 256) and mp3-KBITS (8 to 64)"


def check_codec(name: str) -> str:
    """Return the name of a known codec or sampling rate. Raises ValueError for any other name."""
    _kind_of(name)
    return name


def _kind_of(name: str) -> tuple[str, int]:
    """The kind of a codec, and its number, such as kbit/s. Raises ValueError for an unknown one."""
    if name in ("telephone", "gsm"):
        return name, 0
    if (found := _NAME.fullmatch(name)) is None:
        raise ValueError(f"{name!r} is not a codec; known are {KINDS}, such as opus-8")
    low, high = _LIMITS[found[1]]
    if not low <= int(found[2]) <= high:
        raise ValueError(f"{name!r}: {found[1]} has {low} to {high} {'Hz' if found[1] == 'rate' else 'kbit/s'}")
    return found[1], int(found[2])


Codec = Annotated[str, AfterValidator(check_codec)]
"""`telephone` is the band from 300 to 3400 Hz at 8 kHz in µ-law; `gsm` the same band, in GSM 06.10 at 13 kbit/s;
`rate-6000` a conversion to 6 kHz and back; `opus-8` and `mp3-16` are those codecs at that many kbit/s."""


def transmitted(samples: NDArray[np.float32], rate: int, codec: str) -> NDArray[np.float32]:
    """`samples` `[T]`, in -1..1 at `rate` Hz, after a codec, with the same length, rate and timing.

    A pure function of its arguments. Samples beyond -1..1 are clipped.
    """
    import torch

    from starling.speech.resampling import resampled

    kind, value = _kind_of(codec)
    rates = _RATES.get(kind, (TELEPHONE_RATE,))
    own = min(value, rate) if kind == "rate" else next((each for each in rates if each >= rate), rates[-1])
    sent = resampled(torch.from_numpy(np.clip(samples, -1.0, 1.0)), rate, own).clamp(-1.0, 1.0).numpy()
    if kind == "rate":
        received = sent
    elif kind == "opus":
        received = _coded(sent, own, "OGG", "OPUS", 1 - (value - 6) / 250)  # libsndfile's scale: 256 to 6 kbit/s
    elif kind == "mp3":
        low, high = _MP3_KBITS[own]
        received = _coded(sent, own, "MP3", "MPEG_LAYER_III", 1 - (max(value, low) - low) / (high - low))
        if len(received) > len(sent):  # at low bit rates, the file does not say how much padding to remove
            received = received[_MP3_DELAY:]
    else:
        received = _coded(_telephone_band(sent), own, "WAV", "ULAW" if kind == "telephone" else "GSM610")
    back = resampled(torch.from_numpy(received), own, rate).numpy()[: len(samples)]
    return np.pad(back, (0, len(samples) - len(back)))


def label_of(set_name: str, codec: str | None) -> str:
    """The name under which a set is scored, such as `test@telephone`."""
    return set_name if codec is None else f"{set_name}@{codec}"


def set_of(label: str) -> str:
    """The set that a label names."""
    name, _, codec = label.rpartition("@")
    try:
        check_codec(codec)
    except ValueError:
        return label
    return name


def _coded(
    samples: NDArray[np.float32], rate: int, kind: str, subtype: str, level: float | None = None
) -> NDArray[np.float32]:
    """Samples encoded by libsndfile and decoded again; `level` is its compression level, from 0 to 1."""
    import soundfile

    options: dict[str, Any] = {}
    if level is not None:
        options["compression_level"] = min(level, _HIGHEST_LEVEL)
    if kind == "MP3":
        options["bitrate_mode"] = "CONSTANT"
    file = io.BytesIO()
    try:
        soundfile.write(file, samples, rate, format=kind, subtype=subtype, **options)
        file.seek(0)
        decoded, _ = soundfile.read(file, dtype="float32")
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError) as error:
        raise DataError(
            f"libsndfile cannot encode {subtype} ({kind}): {error}; install soundfile 0.13 or later"
        ) from error
    return np.asarray(decoded, np.float32)


def _telephone_band(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """The part between 300 and 3400 Hz of audio at 8 kHz: a Butterworth filter of the eighth order."""
    from scipy.signal import sosfilt

    return np.asarray(sosfilt(_band_filter(), samples), np.float32)


@cache
def _band_filter() -> NDArray[np.float64]:
    from scipy.signal import butter

    return np.asarray(butter(4, TELEPHONE_BAND, "bandpass", fs=TELEPHONE_RATE, output="sos"))
