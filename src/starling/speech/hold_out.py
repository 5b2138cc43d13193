"""Divides a set of a corpus that has no development set of its own."""

from collections.abc import Iterable, Iterator
from typing import Literal

from pydantic import Field

from starling.chance import derive_seed
from starling.configuration import Config
from starling.speech.corpora import Utterance

_SEEDS = 2**63  # as many as `derive_seed` has


class HoldOutConfig(Config):
    """A new set that takes a random part of another, which keeps the rest; `data.hold_out`.

    Whether an utterance is held out depends on its own id or speaker and on the seed, so it stays where it is when the
    corpus grows. With several `folds`, the new sets of `fold` 0, 1, ... are disjoint, and together they are the whole
    set: that is what cross-validation needs.
    """

    set: str = "dev"
    """The name of the new set."""
    of: str = "train"
    """The set that is divided."""
    folds: int = Field(default=20, ge=2)
    """1 / folds of the utterances or speakers are held out, on average."""
    fold: int = Field(default=0, ge=0)
    """Which part is held out, from 0 to folds - 1."""
    by: Literal["utterance", "speaker"] = "utterance"
    """What is held out: single utterances, or whole speakers."""
    seed: int = Field(default=0, ge=0)
    """Selects another division."""

    def problem(self, sets: Iterable[str]) -> str | None:
        """What is wrong with it, for a corpus with these sets; None if nothing is."""
        known = list(sets)
        if self.of not in known:
            return f"data.hold_out.of: {self.of!r} is not in data.corpus.sets ({', '.join(known)}); name one of them"
        if self.set in known:
            return f"data.hold_out.set: data.corpus.sets has a set {self.set!r} already; choose another name"
        if self.fold >= self.folds:
            return f"data.hold_out.fold: {self.fold} of {self.folds} folds; the last is {self.folds - 1}"
        return None

    def utterances(self, whole: Iterable[Utterance], set_name: str) -> Iterator[Utterance]:
        """Those of the divided set that belong to `set_name`, which is `set` or `of`."""
        return (each for each in whole if self._is_held_out(each) == (set_name == self.set))

    def _is_held_out(self, utterance: Utterance) -> bool:
        of = utterance.id if self.by == "utterance" else utterance.speaker
        return derive_seed(self.seed, "hold out", of) * self.folds // _SEEDS == self.fold
