"""Other readers read back subtitles, JSON and CTM."""

import json
import re
from itertools import pairwise

import pysubs2
import pytest
import webvtt

from starling.errors import DataError
from starling.speech.transcribing.transcript import Segment, Transcript, Word, formatted

CTM = re.compile(r"(\S+) 1 (\d+\.\d{3}) (\d+\.\d{3}) (\S+) ([01]\.\d{4})")
MANY = tuple(Word(f"WORD{number}", 4000 + 0.5 * number, 4000.4 + 0.5 * number, 0.9) for number in range(40))
SPOKEN = Transcript(
    (
        Segment(0.25, 2.0, "A B & Ç", (Word("A", 0.3, 0.5, 1.0), Word("B", 0.5, 0.9, 0.25), Word("&", 1, 1.2, 0.5),
                                         Word("Ç", 1.2, 1.5, 0.5))),
        Segment(3.0, 4.0, "", ()),
        Segment(4000.0, 4020.0, " ".join(word.text for word in MANY), MANY),
    ),
    4020.5,
)  # fmt: skip
WITHOUT_TIMES = Transcript((Segment(1.0, 2.5, "ONE TWO", None),), 3.0)


def test_srt_is_read_by_pysubs2() -> None:
    """Times are exact to the millisecond, cues have at most two lines and seven seconds, and every word occurs once."""
    cues = pysubs2.SSAFile.from_string(formatted(SPOKEN, "srt", "x"), format_="srt")
    assert (cues[0].start, cues[0].end, cues[0].plaintext) == (300, 1500, "A B & Ç")
    assert " ".join(cue.plaintext.replace("\n", " ") for cue in cues) == SPOKEN.text
    assert all(0 < cue.end - cue.start <= 7000 for cue in cues)
    assert all(len(line) <= 42 for cue in cues for line in cue.plaintext.split("\n"))
    assert all(cue.plaintext.count("\n") <= 1 for cue in cues)
    assert all(cue.end <= after.start for cue, after in pairwise(cues))


def test_vtt_is_read_by_webvtt() -> None:
    """The cues are the same; marks of the format are escaped."""
    text = formatted(SPOKEN, "vtt", "x")
    cues = webvtt.from_string(text)
    subtitles = pysubs2.SSAFile.from_string(formatted(SPOKEN, "srt", "x"), format_="srt")
    assert [cue.start_in_seconds for cue in cues] == [each.start // 1000 for each in subtitles]
    assert (cues[0].start, cues[0].end) == ("00:00:00.300", "00:00:01.500")
    assert cues[1].start == "01:06:40.000"
    assert "A B &amp; Ç" in text
    marked = Transcript((Segment(0.0, 1.0, "<B> --> C", None),), 1.0)
    assert "&lt;B&gt; --&gt; C" in formatted(marked, "vtt", "x")
    assert len(cues) == len(subtitles)


def test_ctm_has_a_line_for_each_word() -> None:
    """The line has name, channel, start, duration, word and confidence."""
    lines = formatted(SPOKEN, "ctm", "my talk").splitlines()
    found = [CTM.fullmatch(line) for line in lines]
    assert all(found)
    rows = [each.groups() for each in found if each is not None]
    assert rows[1] == ("my_talk", "0.500", "0.400", "B", "0.2500")
    assert [row[3] for row in rows] == [word.text for word in SPOKEN.words]


def test_json_has_words_in_segments() -> None:
    """Keys and types are those that docs/transcribing.md lists."""
    found = json.loads(formatted(SPOKEN, "json", "talk.wav"))
    assert {key: type(value) for key, value in found.items()} == {
        "file": str, "seconds": float, "text": str, "segments": list,
    }  # fmt: skip
    assert found["text"] == SPOKEN.text
    for segment, own in zip(found["segments"], SPOKEN.segments, strict=True):
        assert set(segment) == {"start", "end", "text", "confidence", "words"}
        assert (segment["start"], segment["end"], segment["text"]) == (own.start, own.end, own.text)
        assert all(set(word) == {"text", "start", "end", "confidence"} for word in segment["words"])
    assert found["segments"][0]["confidence"] == 0.5625
    assert json.loads(formatted(WITHOUT_TIMES, "json", "x"))["segments"][0] == {
        "start": 1.0, "end": 2.5, "text": "ONE TWO", "confidence": None, "words": None,
    }  # fmt: skip


def test_words_without_times_make_subtitles_by_segment_and_no_ctm() -> None:
    """One error lists the formats that are possible."""
    (cue,) = pysubs2.SSAFile.from_string(formatted(WITHOUT_TIMES, "srt", "x"), format_="srt")
    assert (cue.start, cue.end, cue.plaintext) == (1000, 2500, "ONE TWO")
    assert formatted(WITHOUT_TIMES, "txt", "x") == "ONE TWO\n"
    with pytest.raises(DataError, match=r"x: CTM needs word times, .*use txt, json, srt or vtt"):
        formatted(WITHOUT_TIMES, "ctm", "x")


def test_an_empty_transcript_is_valid_in_every_format() -> None:
    """The result is an empty file, or an empty list."""
    nothing = Transcript((), 2.0)
    assert len(pysubs2.SSAFile.from_string(formatted(nothing, "srt", "x"), format_="srt")) == 0
    assert len(webvtt.from_string(formatted(nothing, "vtt", "x"))) == 0
    assert formatted(nothing, "ctm", "x") == formatted(nothing, "txt", "x") == ""
    assert json.loads(formatted(nothing, "json", "x"))["segments"] == []
