"""What was said, and when."""

from dataclasses import dataclass

Seconds = float


@dataclass(frozen=True)
class Word:
    """A word of a transcript."""

    text: str
    """The word, as the model writes it."""
    start: Seconds
    """From the beginning of the recording."""
    end: Seconds
    """From the beginning of the recording."""
    confidence: float
    """From 0 to 1: the geometric mean of what the network gives the word's tokens."""


@dataclass(frozen=True)
class Segment:
    """Speech between two pauses, which was decoded as a whole."""

    start: Seconds
    """From the beginning of the recording."""
    end: Seconds
    """From the beginning of the recording."""
    text: str
    """All words of the segment, in one line."""
    words: tuple[Word, ...] | None
    """None: the model gives no times, because it was trained frame by frame."""

    @property
    def confidence(self) -> float | None:
        """The mean confidence of the words; None without words."""
        return sum(word.confidence for word in self.words) / len(self.words) if self.words else None


@dataclass(frozen=True)
class Transcript:
    """What was said in a recording."""

    segments: tuple[Segment, ...]
    """In order; stretches without speech belong to none."""
    seconds: Seconds
    """Of the recording."""

    @property
    def text(self) -> str:
        """The whole text, in one line."""
        return " ".join(segment.text for segment in self.segments if segment.text)

    @property
    def words(self) -> tuple[Word, ...]:
        """All words, in order; none of segments without times."""
        return tuple(word for segment in self.segments for word in segment.words or ())


@dataclass(frozen=True)
class Update:
    """What a live transcription has found so far."""

    final: tuple[Segment, ...] = ()
    """Segments that have ended since the last update; their text does not change any more."""
    partial: str = ""
    """The text so far of the segment that has not ended."""
