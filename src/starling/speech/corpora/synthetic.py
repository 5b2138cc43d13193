"""Synthesised speech, for the demo."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator

from starling.configuration import Config
from starling.speech.corpora.utterance import Audio, Utterance
from starling.speech.espeak import Sentence, speak
from starling.speech.synthesis import LANGUAGES, VOICES, add_noise, draw_sentence, draw_text


class SyntheticCorpus(Config):
    """Speech synthesised by espeak-ng; sets have no voices in common. Needs `pip install 'starling-asr[demo]'`."""

    kind: Literal["synthetic"]
    sets: dict[Literal["train", "dev", "test"], PositiveInt] = Field(min_length=1)
    """Number of utterances of each set."""
    seed: int = Field(default=0, ge=0)
    """The seed of voices, words and noise."""
    language: Literal["en", "de", "es"] = "en"
    """The language that is spoken: English, German or Spanish."""
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
        """The keys that no prepared set depends on, for pydantic's `exclude`; a set of English is as before there were
        others."""
        return {"language": True} if self.language == "en" else {}

    def maker(self, set_name: str) -> str:
        """What a set depends on besides its settings: the voices and words of this version."""
        words = LANGUAGES[self.language]
        return " ".join([*VOICES[set_name], *words.accents, *words.digits, *words.commands])

    def utterances(self, set_name: str) -> Sequence[Utterance]:
        """All utterances of a set, synthesised by this call. The same configuration gives the same utterances.

        Raises:
            DataError: The synthesiser is not installed or failed.
        """
        names = ("train", "dev", "test")
        random = np.random.default_rng([self.seed, names.index(set_name)])
        words = LANGUAGES[self.language]
        texts, sentences = [], []
        for _ in range(self.sets[set_name]):  # type: ignore[index]
            text = draw_text(random, self.digits, self.commands, words)
            texts.append(text)
            sentences.append(
                draw_sentence(random, text, VOICES[set_name], self.words_per_minute, self.pitch, words.accents)
            )
        spoken = speak(sentences)
        return [
            self._utterance(f"{set_name}-{i:05d}", text, sentence, samples, rate)
            for i, (text, sentence, (samples, rate)) in enumerate(zip(texts, sentences, spoken, strict=True))
        ]

    def _utterance(self, name: str, text: str, sentence: Sentence, samples: NDArray[np.int16], rate: int) -> Utterance:
        voice = sentence.voice.rpartition("+")[2]
        set_name, _, number = name.rpartition("-")
        read = partial(_noisy, samples, rate, (self.seed, *set_name.encode(), int(number)), self.snr)
        return Utterance(name, voice, text, f"espeak-ng, voice {sentence.voice}", read)


def _noisy(samples: NDArray[np.int16], rate: int, seed: tuple[int, ...], snr: tuple[float, float]) -> Audio:
    return add_noise(samples.astype(np.float32) / 32768.0, np.random.default_rng(seed), snr), rate
