"""The distance of word times from espeak-ng's, for `starling transcribe` and for `starling align`, which knows the
text: `python -m benchmarks.word_times exp/demo`.

The voices of the demo's test set speak new sentences. espeak-ng reports where each phoneme begins; a word reaches from
the beginning of its first phoneme to the end of its last one. Only words of correctly recognised sentences count.
"""

import ctypes
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import espeakng_loader
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from starling.reporting.progress import Bars
from starling.speech.corpora.synthetic import LANGUAGES, VOICES, add_noise, draw_sentence, draw_text
from starling.speech.espeak import Sentence
from starling.speech.tokens import PhonesConfig
from starling.speech.transcribing.aligning import AlignedWord, load_aligner
from starling.speech.transcribing.files import load_model
from starling.speech.transcribing.transcript import Seconds, Word

SENTENCES, SEED, LIMIT = 300, 2026, 0.08
_SYNCHRONOUS, _UTF8, _PHONEMES = 2, 1, 1
_RATE, _PITCH, _RANGE = 1, 3, 4
_END, _WORD, _PHONEME = 0, 1, 7


class _Event(ctypes.Structure):
    """espeak-ng's struct `espeak_EVENT`."""

    _fields_ = (
        ("kind", ctypes.c_int), ("message", ctypes.c_uint), ("text", ctypes.c_int), ("length", ctypes.c_int),
        ("milliseconds", ctypes.c_int), ("sample", ctypes.c_int), ("user", ctypes.c_void_p),
        ("name", ctypes.c_char * 8),
    )  # fmt: skip


@dataclass(frozen=True)
class Spoken:
    """A sentence as samples `[T]` in [-1, 1], and the seconds at which each of its words begins and ends."""

    text: str
    samples: NDArray[np.float32]
    rate: int
    spans: list[tuple[Seconds, Seconds]]


def spoken(count: int, seed: int, set_name: str = "test") -> Iterator[Spoken]:
    """Sentences of the demo's kind, with its noise."""
    random, words = np.random.default_rng(seed), LANGUAGES["en"]
    library = ctypes.CDLL(espeakng_loader.get_library_path())
    rate = library.espeak_Initialize(_SYNCHRONOUS, 0, espeakng_loader.get_data_path().encode(), _PHONEMES)
    pieces: list[bytes] = []
    events: list[tuple[int, int, bytes]] = []

    def collect(samples: "ctypes._Pointer[ctypes.c_short]", size: int, found: "ctypes._Pointer[_Event]") -> int:
        if samples and size > 0:
            pieces.append(ctypes.string_at(samples, 2 * size))
        place = 0
        while (event := found[place]).kind != _END:
            events.append((event.kind, event.sample, bytes(event.name)))
            place += 1
        return 0

    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))(
        collect
    )
    library.espeak_SetSynthCallback(callback)
    for _ in range(count):
        text = draw_text(random, (2, 5), 0.4, words)
        sentence = draw_sentence(random, text, VOICES[set_name], (90, 135), (35, 65), words.accents)
        pieces.clear()
        events.clear()
        _say(library, sentence)
        audio = np.frombuffer(b"".join(pieces), "<i2").astype(np.float32) / 32768.0
        yield Spoken(text, add_noise(audio, random, (15.0, 40.0)), rate, _spans(events, rate, len(audio)))


def _say(library: ctypes.CDLL, sentence: Sentence) -> None:
    library.espeak_SetVoiceByName(sentence.voice.encode())
    for parameter, value in ((_RATE, sentence.rate), (_PITCH, sentence.pitch), (_RANGE, sentence.range)):
        library.espeak_SetParameter(parameter, value, 0)
    encoded = sentence.text.encode()
    library.espeak_Synth(encoded, len(encoded) + 1, 0, 1, 0, _UTF8, None, None)


def _spans(events: list[tuple[int, int, bytes]], rate: int, total: int) -> list[tuple[Seconds, Seconds]]:
    """The span of each word, from its first phoneme to the next event that is not one of its phonemes."""
    spans: list[tuple[Seconds, Seconds]] = []
    begin: int | None = None
    is_open = False
    for kind, sample, name in [*events, (_WORD, total, b"")]:
        is_pause = kind == _PHONEME and name.strip(b"\0 ").lstrip(b"_:;,.|~^") == b""
        if is_open and begin is not None and (kind == _WORD or is_pause):
            spans.append((begin / rate, sample / rate))
            is_open, begin = False, None
        if kind == _WORD:
            is_open = True
        elif kind == _PHONEME and not is_pause and is_open and begin is None:
            begin = sample
    return spans


def measure(experiment: Path, seed: int = SEED, count: int = SENTENCES) -> None:
    """Print the errors of beginnings and ends."""
    model = load_model(experiment)
    with Bars(Console(stderr=True)) as bars:
        aligner = load_aligner(experiment, PhonesConfig(), bars)
    heard: list[tuple[Seconds, Seconds]] = []
    known: list[tuple[Seconds, Seconds]] = []
    understood = 0
    for each in spoken(count, seed):
        if len(each.spans) != len(each.text.split()):
            continue
        samples = model.recogniser.waveform(each.samples, each.rate).numpy()
        known += _errors(aligner.align(samples, each.text).words, each.spans)
        found = model.transcribe(each.samples, each.rate)
        if found.text == each.text:
            understood += 1
            heard += _errors(found.words, each.spans)
    print(f"{understood} of {count} sentences understood, {len(heard)} words; aligned: {len(known)} words")
    for way, errors in (("transcribe", heard), ("align", known)):
        for name, values in zip(("starts", "ends"), np.reshape(errors, (-1, 2)).T, strict=True):
            sizes = np.abs(values)
            print(
                f"{way}, {name}: {100 * (sizes <= LIMIT).mean():.1f} % within {1000 * LIMIT:.0f} ms; "
                f"|error|: median {1000 * np.median(sizes):.0f} ms, 95 % {1000 * np.quantile(sizes, 0.95):.0f} ms; "
                f"median error {1000 * np.median(values):+.0f} ms"
            )


def _errors(
    words: Sequence[Word | AlignedWord], spans: Sequence[tuple[Seconds, Seconds]]
) -> list[tuple[Seconds, Seconds]]:
    return [(word.start - start, word.end - end) for word, (start, end) in zip(words, spans, strict=True)]


if __name__ == "__main__":
    measure(Path(sys.argv[1]), *map(int, sys.argv[2:]))
