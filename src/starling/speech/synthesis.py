"""The demo corpus: digits and short commands, spoken by a synthesiser in many voices, with noise."""

from collections.abc import Sequence
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator

from starling.configuration import Config
from starling.speech.corpora.utterance import Audio, Utterance
from starling.speech.espeak import Sentence, speak

DIGITS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")
COMMANDS = (
    "STOP", "GO", "TURN LEFT", "TURN RIGHT", "LIGHTS ON", "LIGHTS OFF", "OPEN THE DOOR", "CLOSE THE DOOR",
    "VOLUME UP", "VOLUME DOWN", "PLAY MUSIC", "CALL HOME", "CANCEL",
)  # fmt: skip
ACCENTS = ("en", "en-us", "en-gb-scotland", "en-gb-x-rp", "en-us-nyc")
VOICES = {
    "train": (
        "m1", "m4", "m5", "m6", "m8", "f1", "f3", "Alex", "Andrea", "Andy", "Denis", "Gene", "Hugo", "Jacky", "Lee",
        "Marco", "Mario", "Mike", "Nguyen", "Reed", "adam", "anika", "antonio", "belinda", "boris", "david", "ed",
        "edward", "ian", "linda", "norbert", "pablo", "quincy", "shelby",
    ),
    "dev": ("m2", "f4", "Michael", "paul"),
    "test": ("m3", "m7", "f2", "Annie", "gustave", "rob", "steph", "victor"),
}  # fmt: skip
"""espeak-ng's variants that sound like people, by the set that they speak in; near twins are left out."""
LEVEL = 0.07
"""Root mean square of the speech that the loudness of an utterance varies around."""


class SyntheticCorpus(Config):
    """Speech made by espeak-ng; no voice speaks in two sets. Needs `pip install 'starling-asr[demo]'`."""

    kind: Literal["synthetic"]
    sets: dict[Literal["train", "dev", "test"], PositiveInt] = Field(min_length=1)
    """Number of utterances of each set."""
    seed: int = Field(default=0, ge=0)
    digits: tuple[int, int] = (2, 5)
    """Shortest and longest string of digits."""
    commands: float = Field(default=0.4, ge=0, le=1)
    """Share of the utterances that are commands."""
    words_per_minute: tuple[int, int] = (130, 190)
    pitch: tuple[int, int] = (35, 65)
    """espeak's scale, 0 to 100."""
    snr: tuple[float, float] = (15.0, 40.0)
    """Signal-to-noise ratio, dB."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for name in ("digits", "words_per_minute", "pitch", "snr"):
            low, high = getattr(self, name)
            if low > high or (low < 1 and name != "snr"):
                raise ValueError(f"{name} {low}, {high}: needs the smaller first, from 1")
        return self

    def utterances(self, set_name: str) -> Sequence[Utterance]:
        """All utterances of a set, spoken when this is called: the same for the same configuration.

        Raises:
            DataError: the synthesiser is not installed.
        """
        keys = ("train", "dev", "test")
        random = np.random.default_rng([self.seed, keys.index(set_name)])
        texts, sentences = [], []
        for _ in range(self.sets[set_name]):  # type: ignore[index]
            texts.append(self._text(random))
            sentences.append(self._sentence(random, texts[-1], VOICES[set_name]))
        spoken = speak(sentences)
        return [
            self._utterance(f"{set_name}-{i:05d}", text, sentence, samples, rate)
            for i, (text, sentence, (samples, rate)) in enumerate(zip(texts, sentences, spoken, strict=True))
        ]

    def _text(self, random: np.random.Generator) -> str:
        if random.random() < self.commands:
            return str(random.choice(COMMANDS))
        count = int(random.integers(self.digits[0], self.digits[1] + 1))
        return " ".join(str(digit) for digit in random.choice(DIGITS, count))

    def _sentence(self, random: np.random.Generator, text: str, voices: Sequence[str]) -> Sentence:
        return Sentence(
            text=text.lower(),
            voice=f"{random.choice(ACCENTS)}+{random.choice(voices)}",
            rate=int(random.integers(self.words_per_minute[0], self.words_per_minute[1] + 1)),
            pitch=int(random.integers(self.pitch[0], self.pitch[1] + 1)),
            range=int(random.integers(35, 66)),
        )

    def _utterance(self, name: str, text: str, sentence: Sentence, samples: NDArray[np.int16], rate: int) -> Utterance:
        voice = sentence.voice.rpartition("+")[2]

        def read() -> Audio:
            set_name, _, number = name.rpartition("-")
            random = np.random.default_rng([self.seed, *set_name.encode(), int(number)])
            return add_noise(samples.astype(np.float32) / 32768.0, random, self.snr), rate

        return Utterance(name, voice, text, f"espeak-ng, voice {sentence.voice}", read)


def add_noise(
    speech: NDArray[np.float32], random: np.random.Generator, snr: tuple[float, float]
) -> NDArray[np.float32]:
    """The speech, [T], at a random level, in coloured noise at a random ratio within `snr` dB."""
    loudness = LEVEL * 10 ** (random.uniform(-6, 6) / 20)
    noise = random.standard_normal(len(speech))
    noise = np.convolve(noise, [1.0, random.uniform(0.0, 0.95)], mode="same")
    speech = speech * (loudness / _rms(speech))
    noise *= loudness / _rms(noise) * 10 ** (-random.uniform(*snr) / 20)
    mixture = (speech + noise).astype(np.float32)
    return mixture / max(1.0, float(np.abs(mixture).max()))


def _rms(samples: NDArray[np.floating]) -> float:
    return float(np.sqrt(np.mean(np.square(samples, dtype=np.float64)))) or 1.0
