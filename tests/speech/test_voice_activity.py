"""The voice activity model finds speech where energy alone does not, whatever the pieces in which audio comes."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from starling.errors import MissingExtraError
from starling.speech.espeak import Sentence, speak
from starling.speech.transcribing.files import load_model
from starling.speech.transcribing.segmenter import Piece, Segmentation, Segmenter
from tests.speech.tones import WORDS, performance

pytestmark = pytest.mark.skipif(  # not imported, for the reason below
    any(find_spec(name) is None for name in ("silero_vad", "espeakng_loader")), reason="needs the extras vad and demo"
)
VOICED = Segmentation(voice_activity=True)


@pytest.fixture(scope="module")
def programme() -> tuple[np.ndarray, int, list[tuple[float, float]]]:
    """A melody, a sentence, another melody and another sentence, with the times of the sentences in seconds."""
    texts = ("please turn the lights off in the kitchen now", "three seven one")
    spoken = list(speak([Sentence(text, voice="en-us+f2", rate=120, pitch=50, range=50) for text in texts]))
    rate = spoken[0][1]
    generator = np.random.default_rng(0)
    rest, parts, spans = np.zeros(rate, np.float32), list[np.ndarray](), list[tuple[float, float]]()
    for samples, _ in spoken:
        melody, _ = performance(list(WORDS), [0.1] * (len(WORDS) + 1), generator, rate)
        parts += [(0.3 * melody / np.abs(melody).max()).astype(np.float32), rest]
        start = sum(map(len, parts)) / rate
        spans.append((start, start + len(samples) / rate))
        parts += [samples, rest]
    return np.concatenate(parts), rate, spans


def cut(samples: np.ndarray, rate: int, size: int, segmentation: Segmentation, own_rate: int = 16_000) -> list[Piece]:
    segmenter = Segmenter(own_rate, segmentation, rate)
    blocks = np.split(samples, range(size, len(samples), size))
    return [piece for block in blocks for piece in segmenter.feed(block)] + segmenter.end()


@pytest.mark.parametrize("rate", [8000, 16_000, 11_025])
def test_melodies_are_not_speech(programme: tuple[np.ndarray, int, list[tuple[float, float]]], rate: int) -> None:
    """This holds at any rate of the recogniser. By its energy, a melody would be speech, too."""
    samples, given, spans = programme
    found = cut(samples, given, 4096, VOICED, rate)
    assert len(found) == len(spans)
    for piece, (start, end) in zip(found, spans, strict=True):
        assert start - 0.5 <= piece.start / rate <= start + 0.15
        assert end - 0.15 <= (piece.start + len(piece.samples)) / rate <= end + 0.5
    assert len(cut(samples, given, 4096, Segmentation(), rate)) > len(spans)


def test_segments_do_not_depend_on_the_pieces(programme: tuple[np.ndarray, int, list[tuple[float, float]]]) -> None:
    samples, rate, _ = programme
    whole = cut(samples, rate, len(samples), VOICED)
    for size in (333, 5000):
        pieces = cut(samples, rate, size, VOICED)
        assert [(each.start, len(each.samples)) for each in pieces] == [
            (each.start, len(each.samples)) for each in whole
        ]


def test_torch_keeps_its_threads_and_silence_has_no_segments() -> None:
    """Importing silero-vad would set torch to one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert cut(np.zeros(40_000, np.float32), 16_000, 1000, VOICED) == []
    assert cut(np.zeros(7, np.float32), 16_000, 7, VOICED) == []
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


def test_what_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised before the model is looked for."""
    monkeypatch.setattr("starling.errors.find_spec", lambda name: None if name == "silero_vad" else object())
    with pytest.raises(MissingExtraError, match=r"voice activity detection needs silero_vad: pip install .*\[vad\]"):
        load_model("exp/absent", segmentation=VOICED)
