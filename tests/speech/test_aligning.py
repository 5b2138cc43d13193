"""Times of words and phones, on tones whose times are known."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from praatio import textgrid
from rich.console import Console

from starling.errors import DataError
from starling.reporting.progress import Bars
from starling.speech.tokens import PhonesConfig
from starling.speech.transcribing.aligning import AlignedWord, Aligner, Alignment, Span
from starling.speech.transcribing.files import load_model
from starling.speech.transcribing.segmenter import Piece
from starling.speech.transcribing.transcript import Segment, Word
from tests.speech.tones import RATE, WORDS, performance, song_set

TONES = Path(__file__).parents[1] / "data" / "tones"
SPELLED = PhonesConfig(voice=None)


@pytest.fixture(scope="module")
def aligner(tmp_path_factory: pytest.TempPathFactory) -> Aligner:
    songs = song_set(tmp_path_factory.mktemp("songs") / "train", 100)
    with Bars(Console(quiet=True)) as bars:
        return Aligner.learn(load_model(TONES), songs, SPELLED, bars)


def performed(seed: int, count: int) -> tuple[np.ndarray, list[tuple[str, float, float]]]:
    generator = np.random.default_rng(seed)
    words = generator.choice(list(WORDS), count).tolist()
    return performance(words, generator.uniform(0.0, 0.5, count + 1).tolist(), generator)


@pytest.mark.parametrize("seed", range(12))
def test_words_begin_and_end_where_they_are_sung(aligner: Aligner, seed: int) -> None:
    """Errors stay within 40 ms, with and without pauses between words; a window of 25 ms blurs the edges."""
    samples, spans = performed(seed, 4)
    found = aligner.align(samples, " ".join(word for word, _, _ in spans))
    assert [each.text for each in found.words] == [word for word, _, _ in spans]
    for word, (_, start, end) in zip(found.words, spans, strict=True):
        assert abs(word.start - start) <= 0.04
        assert abs(word.end - end) <= 0.04


def test_phones_fill_their_words_in_order(aligner: Aligner) -> None:
    """The phones are letters here, because no pronunciation was given."""
    samples, spans = performed(1, 4)
    for word in aligner.align(samples, " ".join(word for word, _, _ in spans)).words:
        assert [each.text for each in word.phones] == list(word.text)
        edges = [edge for each in word.phones for edge in (each.start, each.end)]
        assert edges == sorted(edges)
        assert edges[1:-1:2] == edges[2::2]
        assert (edges[0], edges[-1]) == (word.start, word.end)


def test_a_long_recording_has_the_times_of_its_parts(aligner: Aligner) -> None:
    """The recording is aligned stretch by stretch, cut in pauses, in memory that does not grow with the square of its
    length."""
    parts = [performed(seed, 8) for seed in range(30)]
    rest = np.zeros(RATE, np.float32)
    whole = np.concatenate([piece for samples, _ in parts for piece in (samples, rest)])
    text = " ".join(word for _, spans in parts for word, _, _ in spans)
    words = iter(aligner.align(whole, text).words)
    begin = 0.0
    for samples, spans in parts:
        for _, start, end in spans:
            word = next(words)
            assert abs(word.start - begin - start) <= 0.04
            assert abs(word.end - begin - end) <= 0.04
        begin += (len(samples) + len(rest)) / RATE


def test_what_is_kept_aligns_the_same(aligner: Aligner, tmp_path: Path) -> None:
    samples, spans = performed(3, 3)
    text = " ".join(word for word, _, _ in spans)
    aligner.save(tmp_path / "kept.safetensors")
    again = Aligner.load(tmp_path / "kept.safetensors", load_model(TONES), SPELLED)
    assert again.align(samples, text) == aligner.align(samples, text)
    (tmp_path / "other.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match=r"other\.safetensors: not what `starling align` writes"):
        Aligner.load(tmp_path / "other.safetensors", load_model(TONES), SPELLED)


def test_a_transcript_gets_the_times_of_its_alignment(aligner: Aligner) -> None:
    """Times count from the beginning of the piece; confidence and texts are the transcript's own. A word without a
    pronunciation keeps the times of CTC."""
    samples, spans = performed(4, 4)
    words = tuple(Word(word, 10.0, 10.1, 0.5) for word, _, _ in spans)
    segment = Segment(10.0, 20.0, " ".join(each.text for each in words), words)
    found = aligner.timed(Piece(10 * RATE, samples), segment)
    assert found.words is not None
    for word, (text, start, end) in zip(found.words, spans, strict=True):
        assert (word.text, word.confidence) == (text, 0.5)
        assert abs(word.start - 10.0 - start) <= 0.04
        assert abs(word.end - 10.0 - end) <= 0.04
    unknown = replace(segment, words=(*words, Word("SOL", 20.0, 20.1, 0.5)))
    assert aligner.timed(Piece(0, samples), unknown) is unknown
    frames = replace(segment, words=None)
    assert aligner.timed(Piece(0, samples), frames) is frames


@pytest.mark.parametrize(
    ("samples", "text", "message"),
    [
        (performed(0, 2)[0], " ", "the text is empty"),
        (performed(0, 2)[0], "DO SOL", "has the phone 'S', which no word of the training set has"),
        (performed(0, 2)[0][: RATE // 4], "DO RE MI FA DO RE MI FA", "too short"),
        (np.zeros(RATE, np.float32), "DO", "the recording is empty, or digital silence"),
        (np.ones(301 * RATE, np.float32), "DO", "lasts 301 s; the limit is 300 s"),
    ],
)
def test_what_cannot_be_aligned_is_refused(aligner: Aligner, samples: np.ndarray, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        aligner.align(samples, text)


ALIGNMENT = Alignment(
    (
        AlignedWord("SAY", 0.1, 0.3, (Span("s", 0.1, 0.2), Span("eɪ", 0.2, 0.3))),
        AlignedWord('"HI"', 0.3, 0.52, (Span("h", 0.3, 0.4), Span("aɪ", 0.4, 0.52))),
    ),
    0.75,
)


def test_praat_reads_a_textgrid(tmp_path: Path) -> None:
    """The most used Praat library reads it, without gaps, and with the quotation marks of a word."""
    path = tmp_path / "a.TextGrid"
    path.write_text(ALIGNMENT.formatted("textgrid", "a"), encoding="utf-8")
    found = textgrid.openTextgrid(str(path), includeEmptyIntervals=True)
    assert found.tierNames == ("words", "phones")
    assert [tuple(each) for each in found.getTier("words").entries] == [
        (0.0, 0.1, ""),
        (0.1, 0.3, "SAY"),
        (0.3, 0.52, '"HI"'),
        (0.52, 0.75, ""),
    ]
    assert [each.label for each in found.getTier("phones").entries] == ["", "s", "eɪ", "h", "aɪ", ""]
    assert found.maxTimestamp == 0.75


def test_ctm_and_json_have_the_same_times() -> None:
    lines = ["my_talk 1 0.100 0.200 SAY", 'my_talk 1 0.300 0.220 "HI"']
    assert ALIGNMENT.formatted("ctm", "my talk").splitlines() == lines
    made = json.loads(ALIGNMENT.formatted("json", "my talk"))
    assert (made["file"], made["seconds"]) == ("my talk", 0.75)
    assert made["words"][0] == {
        "text": "SAY",
        "start": 0.1,
        "end": 0.3,
        "phones": [{"text": "s", "start": 0.1, "end": 0.2}, {"text": "eɪ", "start": 0.2, "end": 0.3}],
    }
