"""What a recogniser heard in the utterances of a set."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heard:
    """What a recogniser hears in an utterance, and how well the transcript fits."""

    set: str
    id: str
    text: str
    heard: str
    errors: float
    """Character errors of `heard`, divided by the characters of `text`."""
    gap: float
    """Nats per token by which the transcript is less likely than what is heard; infinite if no path exists."""
    fit: float
    """0: as likely as other transcripts of its length; 1: as likely as what is heard."""

    @property
    def score(self) -> float:
        """How badly the transcript fits, in nats per token: gap * (1 - fit), with 0 <= 1 - fit <= 1.

        The first factor alone also finds utterances in which every transcript is unlikely, the second alone those in
        which every transcript is about equally likely.
        """
        return self.gap * min(max(1.0 - self.fit, 0.0), 1.0)


@dataclass(frozen=True)
class SetHeard:
    """What was heard in a set, worst transcript first, and the limit above which a transcript does not fit."""

    name: str
    heard: tuple[Heard, ...]
    skipped: tuple[tuple[str, str], ...]
    """Id and reason of each utterance that the recogniser cannot compare."""
    limit: float

    @property
    def errors(self) -> float:
        """Character errors of what is heard, divided by the characters of the transcripts."""
        return sum(each.errors * len(each.text) for each in self.heard) / max(self.characters, 1)

    @property
    def characters(self) -> int:
        """Characters of the transcripts."""
        return sum(len(each.text) for each in self.heard)
