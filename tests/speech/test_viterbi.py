"""The best path and the best words agree with exhaustive search."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch

from starling.speech.decoding import DecodingConfig
from starling.speech.hybrid.tying import Node, TiedStates
from starling.speech.hybrid.viterbi import WordDecoder, best_path, path_of
from starling.speech.tokens import CharacterTokenizer

Scored = tuple[float, tuple[int, ...]]


def legal_paths(num_frames: int, optional: list[bool]) -> Iterator[tuple[int, ...]]:
    """Every path through positions in a row."""
    last = len(optional) - 1
    begins = [0, 1] if optional[0] and last else [0]
    ends = [last, last - 1] if optional[last] and last else [last]
    for steps in product((0, 1, 2), repeat=num_frames - 1):
        for begin in begins:
            path = np.cumsum([begin, *steps]).tolist()
            jumps = [place + 1 for place, step in zip(path, steps, strict=False) if step == 2]
            if path[-1] in ends and all(place < last and optional[place] for place in jumps):
                yield tuple(path)


def best_by_trying(scores: np.ndarray, optional: list[bool]) -> Scored:
    """The highest score of a path through `scores` `[T, P]`, and that path."""
    frames = np.arange(len(scores))
    return max((float(scores[frames, path].sum()), path) for path in legal_paths(len(scores), optional))


@pytest.mark.parametrize("seed", range(20))
def test_the_best_path_is_the_best_of_all_paths(seed: int) -> None:
    """The batch has utterances of different lengths, with optional silences at both ends and between."""
    generator = np.random.default_rng(seed)
    rows = [[True, False, False, True, False, True], [False], [True, False, True], [False, False, True, False]]
    lengths = [int(generator.integers(row.count(False), 7)) for row in rows]
    scores = generator.standard_normal((len(rows), max(lengths), 6))
    optional = np.zeros((len(rows), 6), np.bool_)
    for number, row in enumerate(rows):
        optional[number, : len(row)] = row
    found = best_path(scores, np.array(lengths), optional, np.array([len(row) for row in rows]))
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        own = scores[number, :length, : len(row)]
        _, path = best_by_trying(own, row)
        assert tuple(found[number, :length].tolist()) == tuple(path_of(own, np.array(row)).tolist()) == path


def tied(words: tuple[str, ...], decoding: DecodingConfig, log_priors: np.ndarray) -> TiedStates:
    """Silence and the letters a, b, c, of one state each."""
    nodes = tuple(Node(state=number) for number in range(4))
    roots, priors = tuple((0, unit, unit) for unit in range(4)), log_priors.tolist()
    return TiedStates(
        roots=roots, nodes=nodes, per_unit=1, context=0, log_priors=priors, words=words, decoding=decoding
    )


def best_words(scores: np.ndarray, words: tuple[str, ...], decoding: DecodingConfig) -> list[str]:
    """The words whose row of states, with optional silences, scores best; every sequence is tried."""
    letters = {"a": 1, "b": 2, "c": 3}
    lengths = [1] if decoding.words == "one" else range(len(scores) + 1)
    found: list[tuple[float, list[str]]] = []
    for count in lengths:
        for chosen in product(words, repeat=count):
            row, optional = [0], [count > 0]
            for word in chosen:
                row += [*(letters[letter] for letter in word), 0]
                optional += [*[False] * len(word), True]
            if optional.count(False) <= len(scores):
                score, _ = best_by_trying(scores[:, row], optional)
                found.append((score - decoding.word_penalty * count, list(chosen)))
    return max(found)[1]


@pytest.mark.parametrize("kind", ["loop", "one"])
@pytest.mark.parametrize("seed", range(12))
def test_the_best_words_are_the_best_of_all_word_sequences(seed: int, kind: str) -> None:
    """Both a loop of words and a single word are tested, with priors removed, and a cost for each word."""
    generator = np.random.default_rng(seed)
    words = ("ab", "c", "ba")
    decoding = DecodingConfig(words=kind, word_penalty=float(generator.normal()), prior_scale=0.5)
    states = tied(words, decoding, np.log(generator.dirichlet(np.ones(4))))
    posteriors = torch.from_numpy(generator.standard_normal((3, 5, 4))).float().mul(2).log_softmax(2)
    lengths = torch.tensor([5, 4, 2])
    texts = WordDecoder(states, CharacterTokenizer("abc"))(posteriors, lengths)
    for number, text in enumerate(texts):
        scores = states.scaled(posteriors[number, : lengths[number]], 0.5).double().numpy()
        assert text.split() == best_words(scores, words, decoding)


def test_an_utterance_that_no_word_fits_has_an_empty_text() -> None:
    """One frame cannot hold a word of two states."""
    states = tied(("ab",), DecodingConfig(words="one"), np.zeros(4))
    assert WordDecoder(states, CharacterTokenizer("abc"))(torch.zeros(1, 1, 4), torch.tensor([1])) == [""]
