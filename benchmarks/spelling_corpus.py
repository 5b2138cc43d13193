"""Makes a small corpus of spelled words, numbers and dates in synthetic voices, as a stand-in for real corpora of that
kind.

    python -m benchmarks.spelling_corpus data/spelling
    starling train recipes/spelling.yaml

It has about 48 minutes of 74 training speakers at 16 kHz, and sets of 5 and 10 other speakers, whose espeak-ng voices
no training speaker has. A speaker is a voice with its own accent, pitch, rate and room. The same version of espeak-ng
gives the same corpus.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

from starling.speech.corpora.synthetic import LANGUAGES, VOICES, add_noise
from starling.speech.espeak import Sentence, speak

RATE = 16000
SPEAKERS = {"train": 74, "dev": 5, "test": 10}
UTTERANCES = {"train": 950, "dev": 65, "test": 130}
SEED = 2026

LETTERS = {
    **{"A": "ay", "B": "bee", "C": "see", "D": "dee", "E": "ee", "F": "eff", "G": "jee", "H": "aitch", "I": "eye"},
    **{"J": "jay", "K": "kay", "L": "ell", "M": "em", "N": "en", "O": "oh", "P": "pee", "Q": "cue", "R": "are"},
    **{"S": "ess", "T": "tee", "U": "you", "V": "vee", "W": "double you", "X": "ex", "Y": "why", "Z": "zee"},
}
"""The names of letters, as written for the synthesiser."""
DIGITS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")
TEENS = (
    "TEN", "ELEVEN", "TWELVE", "THIRTEEN", "FOURTEEN", "FIFTEEN", "SIXTEEN", "SEVENTEEN", "EIGHTEEN", "NINETEEN",
)  # fmt: skip
TENS = ("TWENTY", "THIRTY", "FORTY", "FIFTY", "SIXTY", "SEVENTY", "EIGHTY", "NINETY")
MONTHS = (
    "JANUARY", "FEBRUARY", "MARCH", "APRIL", "MAY", "JUNE", "JULY", "AUGUST", "SEPTEMBER", "OCTOBER", "NOVEMBER",
    "DECEMBER",
)  # fmt: skip
ORDINALS = (
    "FIRST", "SECOND", "THIRD", "FOURTH", "FIFTH", "SIXTH", "SEVENTH", "EIGHTH", "NINTH", "TENTH", "ELEVENTH",
    "TWELFTH", "THIRTEENTH", "TWENTIETH", "THIRTIETH",
)  # fmt: skip
COMMANDS = ("YES", "NO", "GO", "HELP", "START", "STOP", "ENTER", "ERASE", "REPEAT", "RUBOUT")
SYLLABLES = (
    "MA", "RI", "AN", "JO", "HN", "SON", "LE", "STER", "BER", "TON", "PIT", "TS", "BUR", "GH", "KE", "VIN", "WAL",
    "FOR", "D", "QU", "EX", "ZA", "CH", "OX", "UG", "YE",
)  # fmt: skip


def draw_text(random: np.random.Generator) -> str:
    """A spelled word, a telephone or house number, a number in words, a date, or a command."""
    kind = random.choice(
        ["spelled", "digits", "number", "date", "address", "command"], p=[0.3, 0.2, 0.15, 0.15, 0.1, 0.1]
    )
    if kind == "spelled":
        return _spelled(random, int(random.integers(2, 5)))
    if kind == "digits":
        return " ".join(random.choice((*DIGITS, "OH"), int(random.choice([3, 5, 7]))).tolist())
    if kind == "number":
        thousands = f"{random.choice(DIGITS[1:])} THOUSAND " if random.random() < 0.3 else ""
        return f"{thousands}{random.choice(DIGITS[1:])} HUNDRED {random.choice(['AND ', ''])}{_below_100(random)}"
    if kind == "date":
        year = f"NINETEEN {_below_100(random)}" if random.random() < 0.7 else _below_100(random)
        return f"{random.choice(MONTHS)} {random.choice(['TWENTY ', ''])}{random.choice(ORDINALS)} {year}"
    if kind == "address":
        return f"{' '.join(random.choice(DIGITS, 4).tolist())} {_spelled(random, 2)} STREET"
    return str(random.choice([*COMMANDS, "DOUBLE SPACE", "POUND POINT", "ENTER APOSTROPHE"]))


def _spelled(random: np.random.Generator, syllables: int) -> str:
    return " ".join("".join(random.choice(SYLLABLES, syllables).tolist()))


def _below_100(random: np.random.Generator) -> str:
    if random.random() < 0.3:
        return str(random.choice(TEENS))
    return f"{random.choice(TENS)} {random.choice(DIGITS[1:])}"


def room(random: np.random.Generator) -> NDArray[np.float64]:
    """An impulse response `[T]`: a direct sound, and noise that decays by 60 dB in 0.05 to 0.3 s."""
    decay = random.uniform(0.05, 0.3)
    time = np.arange(round(decay * RATE)) / RATE
    tail = random.standard_normal(len(time)) * 10 ** (-3 * time / decay)
    tail *= 10 ** (-random.uniform(3, 15) / 20) / np.sqrt(np.sum(tail**2))
    tail[0] = 1.0
    return tail


def _sentences(name: str) -> Iterator[tuple[str, str, Sentence, NDArray[np.float64], np.random.Generator]]:
    """Speaker, text, sentence, room and random generator of each utterance of a set, speaker after speaker."""
    for speaker in range(SPEAKERS[name]):
        random = np.random.default_rng([SEED, sorted(SPEAKERS).index(name), speaker])
        voices: Sequence[str] = VOICES[name]
        voice = f"{random.choice(LANGUAGES['en'].accents)}+{voices[speaker % len(voices)]}"
        rate, pitch, own_room = int(random.integers(80, 125)), int(random.integers(25, 75)), room(random)
        share = UTTERANCES[name] * (speaker + 1) // SPEAKERS[name] - UTTERANCES[name] * speaker // SPEAKERS[name]
        for _ in range(share):
            text = draw_text(random)
            spoken = " ".join(LETTERS.get(word, word.lower()) for word in text.split())
            sentence = Sentence(
                spoken, voice, rate + int(random.integers(-10, 11)), pitch, int(random.integers(35, 66))
            )
            yield f"{name}{speaker:02d}", text, sentence, own_room, random


def main(folder: Path) -> None:
    """Write `spelling.tsv` and `flac/` into a folder."""
    (folder / "flac").mkdir(parents=True, exist_ok=True)
    rows = ["id\tspeaker\tset\taudio\ttext"]
    for name in SPEAKERS:
        planned = list(_sentences(name))
        seconds = 0.0
        spoken = speak([sentence for _, _, sentence, _, _ in planned])
        for number, ((speaker, text, _, own_room, random), (samples, rate)) in enumerate(
            zip(planned, spoken, strict=True)
        ):
            speech = np.convolve(_at_16_khz(samples, rate), own_room).astype(np.float32)
            audio = add_noise(speech, random, (15.0, 30.0))
            path = f"flac/{speaker}-{number:04d}.flac"
            soundfile.write(folder / path, audio, RATE)
            rows.append(f"{speaker}-{number:04d}\t{speaker}\t{name}\t{path}\t{text}")
            seconds += len(audio) / RATE
        words = {word for row in rows for word in row.rpartition("\t")[2].split()}
        print(f"{name}: {len(planned)} utterances, {seconds / 60:.1f} minutes; {len(words) - 1} words so far")
    (folder / "spelling.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def _at_16_khz(samples: NDArray[np.int16], rate: int) -> NDArray[np.float64]:
    """The samples, resampled linearly: espeak-ng's 22,050 Hz have little above 8 kHz."""
    times = np.arange(round(len(samples) * RATE / rate)) * (rate / RATE)
    return np.interp(times, np.arange(len(samples)), samples.astype(np.float64)) / 32768.0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
