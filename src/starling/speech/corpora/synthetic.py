"""Synthesised speech, for the demo: digits and short commands in many voices, with noise."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, TypeAdapter, model_validator

from starling.configuration import Config
from starling.speech.audio import Audio
from starling.speech.corpora.manifests import Utterance
from starling.speech.espeak import Sentence, speak


@dataclass(frozen=True)
class Words:
    """The words of a language, and the espeak-ng accents that pronounce them."""

    digits: tuple[str, ...]
    commands: tuple[str, ...]
    accents: tuple[str, ...]


_SPOKEN = json.loads((Path(__file__).parent / "synthetic.json").read_text(encoding="utf-8"))
LANGUAGES = TypeAdapter(dict[str, Words]).validate_python(_SPOKEN["languages"])
"""The words of each language, by its ISO 639 code."""
VOICES: dict[str, list[str]] = _SPOKEN["voices"]
"""espeak-ng's natural-sounding voice variants, by the set in which they speak.

Variants that are very similar to others are excluded, and so are all variants with `breath`, whose noise differs
between processes.
"""
LEVEL = 0.07
"""Mean level of utterances, as a root mean square. The levels of single utterances vary around it."""


def add_noise(
    speech: NDArray[np.float32], random: np.random.Generator, snr: tuple[float, float]
) -> NDArray[np.float32]:
    """Set speech `[T]` to a random level, and add coloured noise at a random signal-to-noise ratio in the range `snr`,
    in dB."""
    loudness = LEVEL * 10 ** (random.uniform(-6, 6) / 20)
    noise = random.standard_normal(len(speech))
    noise = np.convolve(noise, [1.0, random.uniform(0.0, 0.95)], mode="same")
    speech = speech * (loudness / _rms(speech))
    noise *= loudness / _rms(noise) * 10 ** (-random.uniform(*snr) / 20)
    mixture = (speech + noise).astype(np.float32)
    return mixture / max(1.0, float(np.abs(mixture).max()))


def _rms(samples: NDArray[np.floating]) -> float:
    return float(np.sqrt(np.mean(np.square(samples, dtype=np.float64)))) or 1.0


def draw_text(random: np.random.Generator, digits: tuple[int, int], commands: float, words: Words) -> str:
    """Draw a command with probability `commands`, and otherwise a string of digits with a length in the range
    `digits`."""
    if random.random() < commands:
        return str(random.choice(words.commands))
    count = int(random.integers(digits[0], digits[1] + 1))
    return " ".join(str(digit) for digit in random.choice(words.digits, count))


def draw_sentence(
    random: np.random.Generator,
    text: str,
    voices: Sequence[str],
    rates: tuple[int, int],
    pitches: tuple[int, int],
    accents: Sequence[str] = LANGUAGES["en"].accents,
) -> Sentence:
    """Make the text a sentence with a random accent, voice, rate and pitch."""
    return Sentence(
        text=text.lower(),
        voice=f"{random.choice(accents)}+{random.choice(voices)}",
        rate=int(random.integers(rates[0], rates[1] + 1)),
        pitch=int(random.integers(pitches[0], pitches[1] + 1)),
        range=int(random.integers(35, 66)),
    )


class SyntheticCorpus(Config):
    """Speech synthesised by espeak-ng. The sets have no voices in common.

    Requires `pip install 'starling-asr[demo]'`.
    """

    kind: Literal["synthetic"]
    sets: dict[Literal["train", "dev", "test"], PositiveInt] = Field(min_length=1)
    """Number of utterances of each set."""
    seed: int = Field(default=0, ge=0)
    """The seed of voices, words and noise."""
    language: Literal["en", "de", "es"] = "en"
    """The spoken language: English, German or Spanish."""
    digits: tuple[int, int] = (2, 5)
    """Minimum and maximum number of digits in a string."""
    commands: float = Field(default=0.4, ge=0, le=1)
    """Fraction of utterances that are commands instead of digits."""
    words_per_minute: tuple[int, int] = (90, 135)
    """Minimum and maximum speed of the voices."""
    pitch: tuple[int, int] = (35, 65)
    """Minimum and maximum pitch of the voices, on espeak's scale from 0 to 100."""
    snr: tuple[float, float] = (15.0, 40.0)
    """Minimum and maximum signal-to-noise ratio."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for name in ("digits", "words_per_minute", "pitch", "snr"):
            low, high = getattr(self, name)
            if low > high or (low < 1 and name != "snr"):
                raise ValueError(f"{name} {low}, {high}: needs 1 <= first <= second (snr: first <= second)")
        return self

    @property
    def without_effect(self) -> dict[str, Any]:
        """The keys that no prepared set depends on, for pydantic's `exclude`. For English they include `language`, so
        that sets prepared before there were other languages remain valid."""
        return {"language": True} if self.language == "en" else {}

    def maker(self, set_name: str) -> str:
        """A description of what a set depends on besides its settings: the voices and words of this version."""
        words = LANGUAGES[self.language]
        return " ".join([*VOICES[set_name], *words.accents, *words.digits, *words.commands])

    def utterances(self, set_name: str) -> Sequence[Utterance]:
        """All utterances of a set, synthesised by this call. The same configuration gives the same utterances.

        Raises:
            DataError: The synthesiser is not installed or failed.
        """
        random = np.random.default_rng([self.seed, list(VOICES).index(set_name)])
        words, drawn, utterances = LANGUAGES[self.language], [], []
        for _ in range(self.sets[set_name]):  # type: ignore[index]
            text = draw_text(random, self.digits, self.commands, words)
            voices = (VOICES[set_name], self.words_per_minute, self.pitch, words.accents)
            drawn.append((text, draw_sentence(random, text, *voices)))
        spoken = speak([sentence for _, sentence in drawn])
        for number, ((text, sentence), (samples, rate)) in enumerate(zip(drawn, spoken, strict=True)):
            read = partial(_noisy, samples, rate, (self.seed, *set_name.encode(), number), self.snr)
            name, voice = f"{set_name}-{number:05d}", sentence.voice.rpartition("+")[2]
            utterances.append(Utterance(name, voice, text, f"espeak-ng, voice {sentence.voice}", read))
        return utterances


def _noisy(samples: NDArray[np.int16], rate: int, seed: tuple[int, ...], snr: tuple[float, float]) -> Audio:
    return add_noise(samples.astype(np.float32) / 32768.0, np.random.default_rng(seed), snr), rate
