"""The phones of transcripts, which are the targets of a second CTC loss at a lower layer. They are used only in
training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from starling.configuration import Config
from starling.errors import ConfigError, DataError, require

PHONES_FILE = "phones.json"
_COMMENTS = (";;;", "#")


class PhonesConfig(Config):
    """A second loss, on phones. The total loss is `(1 - weight) * loss + weight * CTC of phones`."""

    layer: int = Field(default=1, ge=1)
    """The layer or block that predicts the phones; 1 is the first."""
    weight: float = Field(default=0.6, gt=0, lt=1)
    """Weight of the phones' CTC loss in the total loss."""
    voice: str | None = "en-us"
    """The voice of espeak-ng that pronounces the words. With null, the characters of the words replace phones."""
    lexicon: Path | None = None
    """A text file with a word and its phones on each line, as in CMUdict; used instead of espeak-ng."""


class Phones(Config):
    """The phones of words; the contents of `phones.json`."""

    format: int = Field(default=1, ge=1, le=1)
    names: tuple[str, ...] = Field(min_length=1)
    """The phones, numbered from 1; number 0 is CTC's blank."""
    words: dict[str, tuple[int, ...]]
    """The numbers of the phones of each word."""

    @model_validator(mode="after")
    def _phones_are_named(self) -> Self:
        if any(not 0 < phone <= len(self.names) for phones in self.words.values() for phone in phones):
            raise ValueError(f"a word has a phone whose number is not between 1 and {len(self.names)}")
        return self

    @classmethod
    def of(cls, pronunciations: Mapping[str, Sequence[str]]) -> Self:
        """Create the phones from words and the names of each word's phones."""
        names = sorted({phone for phones in pronunciations.values() for phone in phones})
        numbers = {name: number for number, name in enumerate(names, 1)}
        words = {word: tuple(numbers[each] for each in phones) for word, phones in pronunciations.items()}
        return cls(names=tuple(names), words=words)

    @property
    def outputs(self) -> list[str]:
        """The names of all outputs. The first output is the blank, whose name is empty."""
        return ["", *self.names]

    def encode(self, text: str) -> list[int]:
        """The numbers of the phones of a text's words, one word after another; empty if any word is unknown."""
        words = text.split()
        if any(word not in self.words for word in words):
            return []
        return [phone for word in words for phone in self.words[word]]

    def save(self, folder: Path) -> Path:
        """Write the file of a recogniser's phones, and return its path."""
        path = folder / PHONES_FILE
        path.write_text(self.model_dump_json(), encoding="utf-8")
        return path


def make_phones(config: PhonesConfig, texts: Iterable[str]) -> tuple[Phones, list[str]]:
    """Look up the words of `texts` in the lexicon or with espeak-ng. Returns their phones, and the words without
    phones, sorted.

    Raises:
        ConfigError: The lexicon cannot be read, or espeak-ng has no such voice.
        MissingExtraError: espeakng-loader is not installed.
        DataError: None of the words has phones.
    """
    words = sorted({word for text in texts for word in text.split()})
    if config.lexicon is not None:
        listed = read_lexicon(config.lexicon)
        found = {word: listed[word.casefold()] for word in words if word.casefold() in listed}
        source = str(config.lexicon)
    elif config.voice is None:
        found, source = {word: list(word) for word in words}, "spelling"
    else:
        require("demo", "model.phones without a lexicon", ["espeakng_loader"])
        from starling.speech.espeak import pronounce

        spoken = pronounce([word.lower() for word in words], config.voice)
        found = {word: phones for word, phones in zip(words, spoken, strict=True) if phones}
        source = f"espeak-ng with the voice {config.voice!r}"
    if not found:
        raise DataError(f"model.phones: {source} pronounces none of the {len(words)} words of the training set")
    return Phones.of(found), [word for word in words if word not in found]


def read_lexicon(path: Path) -> dict[str, list[str]]:
    """The phones of each word, by the word in lower case, from a file with a word and its phones on each line.

    The first of several pronunciations is used. As in CMUdict, `WORD(1)` is a variant of `WORD`. Stress marks (the
    digits 0 to 2 at the end of phones) are dropped. Raises ConfigError, naming the line, for a word without phones.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.phones.lexicon: {path} cannot be read ({error})") from error
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        line = line.partition(" #")[0]
        if not line.strip() or line.startswith(_COMMENTS):
            continue
        word, *phones = line.split()
        if not phones:
            raise ConfigError(
                f"model.phones.lexicon: {path}, line {number}: {word!r} has no phones; write a word and its phones, "
                "with spaces between them, on each line"
            )
        if word.endswith(")") and "(" in word[1:]:
            word = word[: word.rindex("(")]
        found.setdefault(word.casefold(), [phone.rstrip("012") or phone for phone in phones])
    return found
