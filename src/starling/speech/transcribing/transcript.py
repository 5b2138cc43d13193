"""Transcripts with times, and their output as text, JSON, subtitles and CTM."""

import html
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from textwrap import wrap

from starling.errors import DataError

Seconds = float
FORMATS = {
    "txt": "text/plain",
    "json": "application/json",
    "srt": "application/x-subrip",
    "vtt": "text/vtt",
    "ctm": "text/plain",
}
"""The media type of each format."""

_CUE_SECONDS = 7.0
_CUE_CHARACTERS = 84  # two lines of 42, the usual limit of subtitles
_LINE_CHARACTERS = 42
_CUE_PAUSE = 1.0


@dataclass(frozen=True)
class Word:
    """A word of a transcript."""

    text: str
    """The word, as the model writes it."""
    start: Seconds
    """Beginning of the word, in seconds from the beginning of the recording."""
    end: Seconds
    """End of the word, in seconds from the beginning of the recording."""
    confidence: float
    """Geometric mean, from 0 to 1, of the probabilities that the network gives the word's tokens."""


@dataclass(frozen=True)
class Segment:
    """A stretch of speech between two pauses, decoded as a whole."""

    start: Seconds
    """Beginning of the segment, in seconds from the beginning of the recording."""
    end: Seconds
    """End of the segment, in seconds from the beginning of the recording."""
    text: str
    """All words of the segment, on one line."""
    words: tuple[Word, ...] | None
    """The words with their times; None if the model provides no times because it was trained with `loss: frames`."""

    @property
    def confidence(self) -> float | None:
        """The mean confidence of the words; None if there are no words."""
        return sum(word.confidence for word in self.words) / len(self.words) if self.words else None

    def as_json(self) -> dict[str, object]:
        """The segment as `{"start", "end", "text", "confidence", "words": [{"text", "start", "end", "confidence"}]}`.
        `words` is null if the model provides no times; `confidence` is null if there are no words."""
        mean = None if self.confidence is None else round(self.confidence, 4)
        words = None if self.words is None else [asdict(word) for word in self.words]
        return {"start": self.start, "end": self.end, "text": self.text, "confidence": mean, "words": words}


@dataclass(frozen=True)
class Transcript:
    """The transcript of a recording."""

    segments: tuple[Segment, ...]
    """The segments, in order. Stretches without speech belong to no segment."""
    seconds: Seconds
    """Length of the recording."""
    note: str = ""
    """A remark for the user about the recording, for example that a part of it is missing."""

    @property
    def text(self) -> str:
        """The whole text, on one line."""
        return " ".join(segment.text for segment in self.segments if segment.text)

    @property
    def words(self) -> tuple[Word, ...]:
        """All words that have times, in order."""
        return tuple(word for segment in self.segments for word in segment.words or ())

    def as_json(self, name: str) -> dict[str, object]:
        """The transcript as `{"file": name, "seconds", "text", "segments": [...]}`, with times in seconds, and with
        `"note"` if there is a note."""
        note = {"note": self.note} if self.note else {}
        segments = [segment.as_json() for segment in self.segments]
        return {"file": name, "seconds": round(self.seconds, 3), "text": self.text, **note, "segments": segments}


@dataclass(frozen=True)
class Update:
    """The result of a live transcription since the last update."""

    final: tuple[Segment, ...] = ()
    """Segments that have ended since the last update. Their text is final."""
    partial: str = ""
    """The text so far of the segment that has not ended yet."""

    def as_json(self) -> dict[str, object]:
        """The update as `{"final": [...], "partial"}`."""
        return {"final": [segment.as_json() for segment in self.final], "partial": self.partial}


def formatted(transcript: Transcript, form: str, name: str) -> str:
    """A transcript in one of the `FORMATS`. `name` is the recording's name in JSON and CTM.

    Raises DataError if the format is CTM and words have no times.
    """
    if form == "txt":
        return "".join(f"{segment.text}\n" for segment in transcript.segments if segment.text)
    if form == "json":
        return json.dumps(transcript.as_json(name), ensure_ascii=False) + "\n"
    if form == "ctm":
        return "".join(_ctm_lines(transcript, name))
    cues = [cue for segment in transcript.segments for cue in _cues(segment)]
    if form == "srt":
        return "\n".join(f"{number}\n{_time(cue, ',')}\n{cue.text}\n" for number, cue in enumerate(cues, 1))
    body = "".join(f"\n{_time(cue, '.')}\n{html.escape(cue.text, quote=False)}\n" for cue in cues)
    return f"WEBVTT\n{body}"


def _ctm_lines(transcript: Transcript, name: str) -> Iterator[str]:
    """Yield lines `NAME CHANNEL START DURATION WORD CONFIDENCE`. Spaces in the name become underscores."""
    for segment in transcript.segments:
        if segment.words is None:
            raise DataError(
                f"{name}: CTM needs word times, and the text from {segment.start:.2f} s has none; use txt, json, srt "
                "or vtt"
            )
        recording = re.sub(r"\s+", "_", name)
        for word in segment.words:
            duration = max(0.0, word.end - word.start)
            yield f"{recording} 1 {word.start:.3f} {duration:.3f} {word.text} {word.confidence:.4f}\n"


def _cues(segment: Segment) -> Iterator[Segment]:
    """Divide a segment into subtitles of at most two lines and seven seconds. A segment whose words have no times is
    not divided."""
    if segment.words is None:
        if segment.text:
            yield segment
        return
    shown: list[Word] = []
    for word in segment.words:
        length = sum(len(each.text) + 1 for each in shown) + len(word.text)
        is_long = length > _CUE_CHARACTERS or (shown and word.end - shown[0].start > _CUE_SECONDS)
        if shown and (is_long or word.start - shown[-1].end > _CUE_PAUSE):
            yield _cue(shown)
            shown = []
        shown.append(word)
    if shown:
        yield _cue(shown)


def _cue(words: list[Word]) -> Segment:
    """Join words into one subtitle. Its first line has the usual length; its second line has the remaining words."""
    text = " ".join(word.text for word in words)
    first = wrap(text, _LINE_CHARACTERS, break_long_words=False, break_on_hyphens=False)[0]
    lines = f"{first}\n{text[len(first) :].strip()}".strip()
    return Segment(words[0].start, max(words[-1].end, words[0].start + 0.001), lines, tuple(words))


def _time(cue: Segment, mark: str) -> str:
    """The times of a subtitle, such as `00:00:01,250 --> 00:00:02,000`."""

    def written(seconds: float) -> str:
        minutes, milliseconds = divmod(round(1000 * seconds), 60_000)
        return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{mark}{milliseconds % 1000:03}"

    return f"{written(cue.start)} --> {written(cue.end)}"
