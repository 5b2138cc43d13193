"""Audio is cut at its pauses, whatever pieces it comes in, and no word is cut or lost."""

from itertools import pairwise

import numpy as np
import pytest

from starling.speech.transcribing.segmenter import Piece, Segmentation, Segmenter
from tests.speech.tones import RATE, WORDS, performance


def cut(waveform: np.ndarray, sizes: list[int] | None = None, segmentation: Segmentation | None = None) -> list[Piece]:
    """The segments of a waveform that comes in pieces of some sizes, repeated cyclically."""
    segmenter, pieces, place, number = Segmenter(RATE, segmentation), [], 0, 0
    while place < len(waveform):
        size = len(waveform) if sizes is None else sizes[number % len(sizes)]
        pieces += segmenter.feed(waveform[place : place + size])
        place, number = place + size, number + 1
    return pieces + segmenter.end()


def sentences(count: int, noise: float = 0.002, seed: int = 1) -> tuple[np.ndarray, list[tuple[str, float, float]]]:
    """Words with short gaps, in sentences with long pauses between them."""
    generator = np.random.default_rng(seed)
    words = generator.choice(list(WORDS), 4 * count).tolist()
    gaps = [
        generator.uniform(0.8, 2.0) if number % 4 == 0 else generator.uniform(0.05, 0.3) for number in range(len(words))
    ]
    return performance(words, [*gaps, 1.0], generator, noise=noise)


@pytest.mark.parametrize("noise", [0.0, 0.002, 0.01])
def test_every_sentence_is_a_segment_with_its_words_whole(noise: float) -> None:
    """This holds for any noise: at 0.01 the words are 17 dB above it."""
    waveform, spans = sentences(12, noise)
    pieces = cut(waveform)
    assert len(pieces) == 12
    for number, piece in enumerate(pieces):
        start, end = piece.start / RATE, (piece.start + len(piece.samples)) / RATE
        first, last = spans[4 * number], spans[4 * number + 3]
        assert 0.0 <= first[1] - start <= 0.1
        assert 0.0 <= end - last[2] <= 0.1
        np.testing.assert_array_equal(piece.samples, waveform[piece.start : piece.start + len(piece.samples)])


def test_segments_do_not_depend_on_the_pieces_in_which_audio_comes() -> None:
    """The pieces have one sample, odd sizes, or everything at once."""
    waveform, _ = sentences(3)
    whole = cut(waveform)
    for sizes in ([7, 1, 800, 81], [79], [12_345]):
        pieces = cut(waveform, sizes)
        assert [piece.start for piece in pieces] == [piece.start for piece in whole]
        for piece, other in zip(pieces, whole, strict=True):
            np.testing.assert_array_equal(piece.samples, other.samples)


def test_noise_alone_and_silence_give_no_segments() -> None:
    """This holds for any level and duration."""
    generator = np.random.default_rng(1)
    for level in (0.0, 1e-4, 0.01, 0.2):
        assert cut((level * generator.standard_normal(10 * RATE)).astype(np.float32)) == []


def test_a_word_without_any_silence_around_it_is_kept() -> None:
    """A recording may be cut tightly, so that it begins or ends with speech."""
    generator = np.random.default_rng(1)
    (waveform, _), (long, spans) = performance(["DO"], [0, 0], generator), sentences(3)
    (piece,) = cut(waveform)
    assert len(piece.samples) == len(waveform)
    tight = long[round(spans[0][1] * RATE) : round(spans[-1][2] * RATE)]
    pieces = cut(tight)
    assert len(pieces) == 3
    assert pieces[0].start == 0
    assert pieces[-1].start + len(pieces[-1].samples) == len(tight)


def test_speech_without_pauses_is_cut_between_words() -> None:
    """Segments last at most 20 s, or the requested limit; every word is inside one."""
    generator = np.random.default_rng(2)
    words = generator.choice(list(WORDS), 150).tolist()
    waveform, spans = performance(words, generator.uniform(0.06, 0.2, 151).tolist(), generator)
    for longest in (20.0, 6.0):
        pieces = cut(waveform, [4000], Segmentation(longest=longest))
        assert max(len(piece.samples) for piece in pieces) <= longest * RATE
        own = [piece.own for piece in pieces]
        cuts = [(piece.start / RATE, (piece.start + len(piece.samples)) / RATE) for piece in own]
        for _, start, stop in spans:
            assert any(begin <= start + 0.01 and stop - 0.01 <= end for begin, end in cuts)
            assert not any(start + 0.01 < end < stop - 0.01 for _, end in cuts)
            assert all(end <= begin for (_, end), (begin, _) in pairwise(cuts))
            assert all(each.trail for each in pieces[:-1])


def test_a_long_recording_is_never_held_as_a_whole() -> None:
    """In ten minutes of speech and silence, at most the longest segment and a block are kept."""
    waveform, _ = sentences(30)
    segmenter, most = Segmenter(RATE), 0
    for number in range(8):
        for block in np.array_split(np.zeros_like(waveform) if number % 4 == 3 else waveform, 20):
            segmenter.feed(block)
            most = max(most, len(segmenter._samples))
    assert segmenter.taken == 8 * len(waveform) >= 600 * RATE
    assert most <= 21 * RATE


@pytest.mark.parametrize("noise", [0.0, 0.001, 0.005])
def test_noise_between_recordings_is_not_speech_even_if_they_have_quieter_places(noise: float) -> None:
    """Clean recordings may be joined with a noise floor between them."""
    generator, parts, spans = np.random.default_rng(2), [], []
    for _ in range(10):
        gap = noise * generator.standard_normal(round(generator.uniform(0.6, 2.0) * RATE))
        words, _ = performance(["DO", "MI", "FA"], [0.0, 0.1, 0.2, 0.0], generator, noise=0.0)
        parts += [gap, words]
        end = sum(map(len, parts)) / RATE
        spans.append((end - len(words) / RATE, end))
    pieces = cut(np.concatenate([*parts, noise * generator.standard_normal(RATE)]).astype(np.float32))
    assert len(pieces) == 10
    for piece, (start, end) in zip(pieces, spans, strict=True):
        assert 0.0 <= start - piece.start / RATE <= 0.1
        assert 0.0 <= (piece.start + len(piece.samples)) / RATE - end <= 0.1
