"""Reads mutated audio in a separate process with little memory: `mutated_audio.py FOLDER COUNT`; prints how each
reading ended."""

import json
import resource
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import soundfile

from starling.errors import DataError
from starling.speech.audio import read_audio
from starling.speech.corpora import Utterance
from starling.speech.usable import Checker, Checking, FilterConfig
from tests.speech.corpus_builders import RATE, sound

MORE_MEMORY = 768 << 20
"""Limit in bytes: an hour at 48 kHz takes 691 MB, which a file of 4 KB may not cause."""
FORMS = {"wav": "PCM_16", "wav-float": "FLOAT", "flac": "PCM_16", "flac-24": "PCM_24"}
PIECES = [
    *(b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\x00\x00\xc0\x7f"),
    *(b"RIFF", b"RF64", b"data", b"fmt ", b"LIST", b"fLaC", b"ds64", b"OggS", b"ID3\x04", b"\xff\xf8\xc9\x18"),
]


def mutated(content: bytes, random: np.random.Generator) -> bytes:
    """A file that is cut off, only a header, silent, not a number, random, or with some bytes changed, most of them in
    the header."""
    spoilt = bytearray(content)
    how = random.integers(12)
    if how == 0:
        return bytes(spoilt[: random.integers(len(spoilt))])
    if how == 1:
        return bytes(spoilt[: random.integers(20, 100)])
    if how == 2:
        return random.bytes(int(random.integers(1, 4000)))
    if how == 3:
        return bytes(spoilt[:60]) + random.bytes(len(spoilt) - 60)
    if how == 4:
        header = content.find(b"data") + 8 if b"WAVE" in content else 60
        fill = (b"\0\0\0\0", b"\0\0\xc0\x7f", b"\xff\xff\xff\x7f")[random.integers(3)]
        return content[:header] + fill * ((len(content) - header) // 4)
    for _ in range(random.integers(1, 4)):
        place = int(random.integers(len(spoilt) if how < 7 else 90))
        if how % 2:
            piece = PIECES[random.integers(len(PIECES))]
            spoilt[place : place + len(piece)] = piece
        else:
            spoilt[place] = random.integers(256)
    return bytes(spoilt)


def _utterance(path: Path) -> Utterance:
    return Utterance("u", "s", "a", "here", partial(read_audio, path))


def main(folder: Path, count: int) -> None:
    """Read each mutation as `starling prepare` reads an utterance, and as `starling transcribe` reads a file."""
    whole = []
    for form, subtype in FORMS.items():
        path = folder / f"{form}.{form[:4].rstrip('-')}"
        soundfile.write(path, sound(0.25) / 32768, RATE, subtype=subtype)
        whole.append((path, path.read_bytes()))
    limits = FilterConfig(min_seconds=0.0, max_seconds=3600.0, on_bad="fail")
    for path, _ in whole:  # the resampler and the codecs are loaded
        list(Checker(Checking("set", 16_000, "upper", limits)).usable([_utterance(path)]))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_MEMORY,) * 2)
    random = np.random.default_rng(16)
    ends: Counter[str] = Counter()
    longest = 0.0
    for number in range(count):
        path, content = whole[number % len(whole)]
        path.write_bytes(mutated(content, random))
        began = time.process_time()
        try:
            ((_, _, samples, _),) = Checker(Checking("set", RATE, "upper", limits)).usable([_utterance(path)])
            if not (np.isfinite(samples).all() and np.abs(samples).max() > 0):
                raise RuntimeError("audio that is none was accepted")
            ends["accepted"] += 1
        except DataError as error:
            ends["refused"] += 1
            for reason in ("truncated", "silent", "not finite", "full scale", "declares", "no samples", "resampled"):
                ends[reason] += reason in str(error)
        longest = max(longest, time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(json.dumps({**ends, "longest": longest, "peak": peak, "used": used}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
