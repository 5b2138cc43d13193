"""From a transcript to the states that its frames go through, from left to right."""

from collections.abc import Sequence

from starling.errors import DataError
from starling.speech.tokens import BLANK, Tokenizer

SILENCE = BLANK
"""The unit of frames without speech, and a word's neighbour beyond its ends. No text holds it."""

ContextState = tuple[int, ...]
"""A state of a unit in its context: its number in the unit, the unit, the units before it, the units after it."""


class StateSpeller:
    """States of words and texts: each character of a word has `per_unit` states, which depend on `context` characters
    on either side within the word. Silence, of one state, may be before, between and behind words."""

    def __init__(self, tokenizer: Tokenizer, per_unit: int, context: int) -> None:
        self.tokenizer = tokenizer
        self.per_unit = per_unit
        self.context = context
        self.silence: ContextState = (0, SILENCE, *[SILENCE] * (2 * context))
        self._known: dict[str, tuple[ContextState, ...]] = {}

    def word(self, word: str, utterance: str = "") -> Sequence[ContextState]:
        """The states of a word. Raises DataError, naming `utterance`, for a character that is no token."""
        if word not in self._known:
            beyond = [SILENCE] * self.context
            units = [*beyond, *self.tokenizer.encode(word, utterance), *beyond]
            self._known[word] = tuple(
                (part, units[place], *units[place - self.context : place], *units[place + 1 : place + 1 + self.context])
                for place in range(self.context, len(units) - self.context)
                for part in range(self.per_unit)
            )
        return self._known[word]

    def text(self, text: str, utterance: str = "") -> tuple[list[ContextState], list[bool]]:
        """The states of a text, and which of them may be skipped: silences. Raises DataError as `word`, and for an
        empty text."""
        words = text.split()
        if not words:
            raise DataError(f"the transcript of utterance {utterance!r} is empty: remove it from the manifest")
        states, optional = [self.silence], [True]
        for word in words:
            own = self.word(word, utterance)
            states += [*own, self.silence]
            optional += [*[False] * len(own), True]
        return states, optional
