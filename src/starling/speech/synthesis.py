"""The demo corpus: digits and short commands, spoken by a synthesiser in many voices, with noise."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from starling.speech.espeak import Sentence

DIGITS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")
COMMANDS = (
    "STOP", "GO", "TURN LEFT", "TURN RIGHT", "LIGHTS ON", "LIGHTS OFF", "OPEN THE DOOR", "CLOSE THE DOOR",
    "VOLUME UP", "VOLUME DOWN", "PLAY MUSIC", "CALL HOME", "CANCEL",
)  # fmt: skip
ACCENTS = ("en", "en-us", "en-gb-scotland", "en-gb-x-rp", "en-us-nyc")


@dataclass(frozen=True)
class Words:
    """What is said in a language, and with which accents of espeak-ng's."""

    digits: tuple[str, ...]
    commands: tuple[str, ...]
    accents: tuple[str, ...]


LANGUAGES = {
    "en": Words(DIGITS, COMMANDS, ACCENTS),
    "de": Words(
        ("NULL", "EINS", "ZWEI", "DREI", "VIER", "FÜNF", "SECHS", "SIEBEN", "ACHT", "NEUN"),
        (
            "HALT", "LOS", "NACH LINKS", "NACH RECHTS", "LICHT AN", "LICHT AUS", "MACH DIE TÜR AUF",
            "MACH DIE TÜR ZU", "LAUTER", "LEISER", "SPIEL MUSIK", "RUF ZU HAUSE AN", "ABBRECHEN",
        ),
        ("de",),
    ),
    "es": Words(
        ("CERO", "UNO", "DOS", "TRES", "CUATRO", "CINCO", "SEIS", "SIETE", "OCHO", "NUEVE"),
        (
            "ALTO", "SIGUE", "GIRA A LA IZQUIERDA", "GIRA A LA DERECHA", "ENCIENDE LA LUZ", "APAGA LA LUZ",
            "ABRE LA PUERTA", "CIERRA LA PUERTA", "MÁS ALTO", "MÁS BAJO", "PON MÚSICA", "LLAMA A CASA", "CANCELA",
        ),
        ("es", "es-419"),
    ),
}  # fmt: skip
"""By ISO 639's code."""
VOICES = {
    "train": (
        "m1", "m4", "m5", "m6", "m8", "f1", "Alex", "Andrea", "Andy", "Denis", "Gene", "Hugo", "Jacky", "Lee",
        "Marco", "Mario", "Mike", "Nguyen", "Reed", "adam", "anika", "antonio", "aunty", "belinda", "boris", "david",
        "ed", "edward", "grandma", "ian", "linda", "norbert", "pablo", "quincy",
    ),
    "dev": ("m2", "shelby", "Michael", "paul"),
    "test": ("m3", "m7", "f4", "Annie", "gustave", "rob", "steph"),
}  # fmt: skip
"""espeak-ng's natural-sounding voice variants, by set.

Excluded are variants that are very similar to others, and all with `breath`, whose noise differs between processes.
"""
LEVEL = 0.07
"""The mean level of utterances, as root mean square; each varies around it."""


def add_noise(
    speech: NDArray[np.float32], random: np.random.Generator, snr: tuple[float, float]
) -> NDArray[np.float32]:
    """The speech `[T]` at a random level, with coloured noise at a random signal-to-noise ratio within `snr` dB."""
    loudness = LEVEL * 10 ** (random.uniform(-6, 6) / 20)
    noise = random.standard_normal(len(speech))
    noise = np.convolve(noise, [1.0, random.uniform(0.0, 0.95)], mode="same")
    speech = speech * (loudness / _rms(speech))
    noise *= loudness / _rms(noise) * 10 ** (-random.uniform(*snr) / 20)
    mixture = (speech + noise).astype(np.float32)
    return mixture / max(1.0, float(np.abs(mixture).max()))


def _rms(samples: NDArray[np.floating]) -> float:
    return float(np.sqrt(np.mean(np.square(samples, dtype=np.float64)))) or 1.0


def draw_text(
    random: np.random.Generator, digits: tuple[int, int], commands: float, words: Words = LANGUAGES["en"]
) -> str:
    """A command with probability `commands`, otherwise a string of digits whose length is in the range `digits`."""
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
    accents: Sequence[str] = ACCENTS,
) -> Sentence:
    """The text with a random accent, voice, rate and pitch."""
    return Sentence(
        text=text.lower(),
        voice=f"{random.choice(accents)}+{random.choice(voices)}",
        rate=int(random.integers(rates[0], rates[1] + 1)),
        pitch=int(random.integers(pitches[0], pitches[1] + 1)),
        range=int(random.integers(35, 66)),
    )
