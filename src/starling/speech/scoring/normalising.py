"""Normalisers that make texts comparable before they are scored."""

import re
import unicodedata
from collections.abc import Collection, Iterable
from typing import Literal, get_args

from starling.errors import ConfigError
from starling.extras import require

Kind = Literal["numbers", "punctuation", "case"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_NUMBER = re.compile(r"(?<![\w.,])(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(st|nd|rd|th)?(?!\w)", re.IGNORECASE)
_APOSTROPHES = "'’ʼ"
_MAX_DIGITS = 30


class Normaliser:
    """Writes numbers in words, removes punctuation, and ignores case, as far as `kinds` says; in this order.

    * numbers: `42` becomes `forty two`, `3.5` `three point five`, `2nd` `second`; in capitals if `texts`, those to be
      compared, have no small letters.
    * punctuation: an apostrophe inside a word stays; a dash or a slash becomes a space; the rest is removed.
    * case: all letters become small.

    Raises ConfigError for an unknown kind, or a language in which numbers cannot be written.
    """

    def __init__(self, kinds: Collection[str], texts: Iterable[str] = (), language: str = "en") -> None:
        if unknown := sorted(set(kinds) - set(KINDS)):
            raise ConfigError(f"there is no normaliser {unknown[0]!r}; there are {', '.join(KINDS)}")
        self._kinds = set(kinds)
        self._language = language
        self._is_upper = not any(character.islower() for text in texts for character in text)
        if "numbers" in self._kinds:
            require("decoding", "the normaliser `numbers`", ("num2words",))
            self._in_words("1", is_ordinal=False)

    def __call__(self, text: str) -> str:
        if "numbers" in self._kinds:
            text = _NUMBER.sub(self._written, text)
        if "punctuation" in self._kinds:
            text = _without_punctuation(text)
        if "case" in self._kinds:
            text = text.lower()
        return " ".join(text.split())

    @property
    def name(self) -> str:
        """The kinds, as they are written into score files; empty if there are none."""
        return ", ".join(kind for kind in KINDS if kind in self._kinds)

    def _written(self, match: re.Match[str]) -> str:
        whole, fraction, ordinal = match.groups()
        number = whole.replace(",", "") + (fraction or "")
        if len(number) > _MAX_DIGITS or (fraction and ordinal):
            return match[0]
        words = re.sub(r"[-,]", " ", self._in_words(number, is_ordinal=bool(ordinal)))
        return words.upper() if self._is_upper else words

    def _in_words(self, number: str, is_ordinal: bool) -> str:
        from num2words import num2words

        try:
            return str(num2words(number, lang=self._language, to="ordinal" if is_ordinal else "cardinal"))
        except NotImplementedError:
            raise ConfigError(f"numbers cannot be written in the language {self._language!r}") from None


def _without_punctuation(text: str) -> str:
    found = []
    for place, character in enumerate(text):
        kind = unicodedata.category(character)
        if character in _APOSTROPHES:
            inside = text[max(0, place - 1) : place] + text[place + 1 : place + 2]
            found.append("'" if len(inside) == 2 and inside.isalnum() else "")
        elif kind == "Pd" or character in "/\\_":
            found.append(" ")
        elif kind[0] != "P":
            found.append(character)
    return "".join(found)
