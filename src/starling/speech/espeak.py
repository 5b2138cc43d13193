"""The espeak-ng synthesiser, called through ctypes in a separate process, so that each run starts from the same state.

espeak-ng keeps state between sentences (noise, glottal phase) that cannot be reset, so the same sentence sounds
slightly different each time. A new process that speaks the same list produces the same samples. This file is the
program of that process. It reads JSON from standard input, `[[text, voice, rate, pitch, range], ...]`. For each
sentence, it writes the sampling rate and the number of samples (32-bit each), and then the samples (16-bit), all
little-endian. With the argument `phones`, it reads `[voice, [word, ...]]` and writes a JSON list of phones for each
word.
"""

import ctypes
import json
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from starling.errors import ConfigError, DataError

_RATE, _PITCH, _RANGE = 1, 3, 4
_SYNCHRONOUS = 2
_UTF8 = 1
_IPA = 2
_BETWEEN_PHONES = "_"
_STRESS = "ˈˌ"
_OTHER_LANGUAGE = re.compile(r"\([a-z-]+\)")  # marks a word that is pronounced as in another language
_UNKNOWN_VOICE = 3  # exit code of the program
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True)
class Sentence:
    """A sentence to speak. The rate is in words per minute; pitch and range are on espeak's scale from 0 to 100."""

    text: str
    voice: str
    rate: int
    pitch: int
    range: int


def speak(sentences: Sequence[Sentence]) -> Iterator[tuple[NDArray[np.int16], int]]:
    """Yield the samples `[T]` and the sampling rate in Hz of each sentence. They are the same whenever the list is the
    same.

    Raises:
        DataError: espeakng-loader is not installed, or the synthesiser failed.
    """
    spoken = _run("speech synthesis failed", [astuple(sentence) for sentence in sentences])
    position = 0
    for _ in sentences:
        rate, count = struct.unpack_from("<ii", spoken, position)
        yield np.frombuffer(spoken, "<i2", count, position + 8), rate
        position += 8 + 2 * count


def pronounce(words: Sequence[str], voice: str) -> list[list[str]]:
    """The phones of each word, in the International Phonetic Alphabet and without stress marks. The list is empty for a
    word that espeak-ng cannot pronounce.

    Raises:
        ConfigError: espeak-ng has no such voice.
        DataError: espeakng-loader is not installed, or espeak-ng failed.
    """
    found: list[list[str]] = json.loads(_run("espeak-ng cannot pronounce words", [voice, list(words)], "phones"))
    return found


def _run(failure: str, content: object, *arguments: str) -> bytes:
    """Run this file as a program with `content`, as JSON, on its standard input, and return its output. Raises
    DataError, whose message begins with `failure`, or ConfigError for an unknown voice."""
    command = [sys.executable, "-P", str(Path(__file__)), *arguments]
    program = subprocess.run(command, input=json.dumps(content).encode(), capture_output=True, check=False)
    if program.returncode:
        message = (program.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        if program.returncode == _UNKNOWN_VOICE:
            raise ConfigError(message)
        raise DataError(f"{failure} (exit code {program.returncode}): {message}")
    return program.stdout


def _library() -> tuple[ctypes.CDLL, int]:
    """The espeak-ng library, and its sampling rate in Hz."""
    try:
        import espeakng_loader
    except ImportError:
        sys.exit("the package espeakng-loader is missing: pip install 'starling-asr[demo]'")
    library = ctypes.CDLL(espeakng_loader.get_library_path())
    sampling_rate = library.espeak_Initialize(_SYNCHRONOUS, 0, espeakng_loader.get_data_path().encode(), 0)
    if sampling_rate <= 0:
        sys.exit(f"espeak-ng does not start (code {sampling_rate})")
    return library, sampling_rate


def _phones() -> None:
    library, _ = _library()
    library.espeak_TextToPhonemes.restype = ctypes.c_char_p
    voice, words = json.load(sys.stdin)
    if library.espeak_SetVoiceByName(voice.encode()):
        sys.stderr.write(f"espeak-ng has no voice {voice!r}; it has, for example, en-us, en-gb, de and fr")
        sys.exit(_UNKNOWN_VOICE)
    found = []
    for word in words:
        rest = ctypes.c_char_p(word.encode())
        spoken = ""
        while rest.value:  # one clause at a time
            spoken += " " + library.espeak_TextToPhonemes(
                ctypes.byref(rest), _UTF8, _IPA | ord(_BETWEEN_PHONES) << 8
            ).decode(errors="replace")
        spoken = _OTHER_LANGUAGE.sub(" ", spoken).replace(_BETWEEN_PHONES, " ")
        phones = (each.strip(_STRESS) for each in spoken.split())
        found.append([phone for phone in phones if phone])
    json.dump(found, sys.stdout)


def _main() -> None:
    library, sampling_rate = _library()
    pieces: list[bytes] = []

    def collect(samples: "ctypes._Pointer[ctypes.c_short]", count: int, _: object) -> int:
        if samples and count > 0:
            pieces.append(ctypes.string_at(samples, 2 * count))
        return 0

    callback = _Callback(collect)
    library.espeak_SetSynthCallback(callback)
    for text, voice, *values in json.load(sys.stdin):
        pieces.clear()
        if library.espeak_SetVoiceByName(voice.encode()):
            sys.exit(f"espeak-ng has no voice {voice!r}")
        for parameter, value in zip((_RATE, _PITCH, _RANGE), values, strict=True):
            library.espeak_SetParameter(parameter, value, 0)
        encoded = text.encode()
        if library.espeak_Synth(encoded, len(encoded) + 1, 0, 1, 0, _UTF8, None, None):
            sys.exit(f"espeak-ng cannot pronounce {text!r}")
        spoken = b"".join(pieces)
        sys.stdout.buffer.write(struct.pack("<ii", sampling_rate, len(spoken) // 2) + spoken)


if __name__ == "__main__":
    _phones() if sys.argv[1:] == ["phones"] else _main()
