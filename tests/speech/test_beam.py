"""The beam search against the sum over all alignments."""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from starling.errors import DataError
from starling.speech.commands.beam_search import BEAMS, given, tune
from starling.speech.decoding import DecodingConfig
from starling.speech.decoding.beam import BeamSearch, SearchPool, TimedWord, Weights
from starling.speech.decoding.decoders import greedy_decode
from starling.speech.decoding.ngram import BEGIN, END, NgramModel, estimate
from starling.speech.tokens import CharacterTokenizer, TokenConfig, Tokenizer, make_tokenizer

pytest.importorskip("flashlight.lib.text.decoder.kenlm", reason="the extra `decoding` is not installed")
TEXTS = ["A AB", "AB B A", "B", "A A B"]
WORDS = ["A", "AB", "B"]
TOKENS = CharacterTokenizer(" AB")


def model_of(path: Path, tokenizer: Tokenizer, texts: Sequence[str], is_closed: bool) -> NgramModel:
    """A model of the words of texts, or of their tokens, which is also written to a file."""
    names = tokenizer.names
    sentences = [each.split() if is_closed else [names[token] for token in tokenizer.encode(each)] for each in texts]
    model = estimate(sentences, 3)
    model.write(path)
    return model


def probability(model: NgramModel, words: Sequence[str]) -> float:
    """The natural logarithm of a text's probability, with the end of the sentence."""
    sentence = [BEGIN, *words, END]
    return math.log(10) * sum(model.log10(sentence[at], sentence[:at]) for at in range(1, len(sentence)))


def summed(log_probs: NDArray[np.float32]) -> dict[tuple[int, ...], float]:
    """log p of each sequence of tokens, summed over all its alignments."""
    sums: dict[tuple[int, ...], float] = defaultdict(lambda: -math.inf)
    for path in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        tokens = tuple(token for token, _ in itertools.groupby(path) if token)
        sums[tokens] = np.logaddexp(sums[tokens], sum(log_probs[frame, token] for frame, token in enumerate(path)))
    return sums


def random_log_probs(seed: int, frames: int, tokens: int) -> NDArray[np.float32]:
    return np.log(np.random.default_rng(seed).dirichlet(np.ones(tokens), frames)).astype(np.float32)


def spoken(tokenizer: Tokenizer, text: str, noise: float = 0.0, seed: int = 0) -> NDArray[np.float32]:
    """Log-probabilities of a text: two frames of each token, and a blank before each."""
    path = [token for each in tokenizer.encode(text) for token in (0, each, each)]
    scores = np.random.default_rng(seed).normal(0.0, noise, (len(path), tokenizer.vocab_size))
    scores[np.arange(len(path)), path] += 6.0
    return torch.from_numpy(scores).log_softmax(1).numpy().astype(np.float32)


@pytest.mark.parametrize("seed", range(4))
def test_a_closed_vocabulary_gives_the_sums_over_all_alignments(tmp_path: Path, seed: int) -> None:
    """Any number of spaces may surround words; scores of all texts, their order and the language model's part are
    compared."""
    model = model_of(tmp_path / "lm", TOKENS, TEXTS, is_closed=True)
    log_probs = random_log_probs(seed, 6, 4)
    sums: dict[str, float] = defaultdict(lambda: -math.inf)
    for tokens, value in summed(log_probs).items():
        words = TOKENS.decode(tokens).split()
        if set(words) <= set(WORDS):
            sums[" ".join(words)] = np.logaddexp(sums[" ".join(words)], value)
    weights = Weights(lm_weight=0.7, word_penalty=0.3, beam=5000)
    expected = {
        text: value + 0.7 * probability(model, text.split()) - 0.3 * len(text.split()) for text, value in sums.items()
    }
    found = BeamSearch(TOKENS, tmp_path / "lm", WORDS)(log_probs, weights, 1000)
    assert {each.text: each.score for each in found} == pytest.approx(expected, abs=1e-4)
    assert [each.text for each in found] == sorted(expected, key=expected.__getitem__, reverse=True)
    assert all(each.lm == pytest.approx(probability(model, each.text.split()), abs=1e-4) for each in found)


@pytest.mark.parametrize("seed", range(4))
def test_an_open_vocabulary_gives_the_sums_over_all_alignments(tmp_path: Path, seed: int) -> None:
    """Any sequence of tokens is allowed, weighted by n-grams of tokens."""
    model = model_of(tmp_path / "lm", TOKENS, TEXTS, is_closed=False)
    log_probs = random_log_probs(seed, 6, 4)
    expected: dict[str, float] = {}
    for tokens, value in summed(log_probs).items():
        score = value + 0.7 * probability(model, [TOKENS.names[token] for token in tokens])
        text = " ".join(TOKENS.decode(tokens).split())
        expected[text] = max(score, expected.get(text, -math.inf))  # of texts that differ in spaces, the best
    found = BeamSearch(TOKENS, tmp_path / "lm")(log_probs, Weights(lm_weight=0.7, beam=5000), 1000)
    assert {each.text: each.score for each in found} == pytest.approx(expected, abs=1e-4)


def test_a_search_finds_what_the_best_alignment_hides(tmp_path: Path) -> None:
    """The best path is blank, blank, with 0.36; but three paths of `A` have 0.64 together."""
    model_of(tmp_path / "lm", CharacterTokenizer("A"), ["A"], is_closed=False)
    log_probs = np.log(np.array([[0.6, 0.4], [0.6, 0.4]], dtype=np.float32))
    assert greedy_decode(torch.from_numpy(log_probs)[None], torch.tensor([2]), CharacterTokenizer("A")) == [""]
    (best,) = BeamSearch(CharacterTokenizer("A"), tmp_path / "lm")(log_probs, Weights(lm_weight=0.0))
    assert best.text == "A"
    assert best.score == pytest.approx(math.log(0.64), abs=1e-5)


@pytest.mark.parametrize("is_closed", [True, False])
def test_words_have_the_times_of_their_frames(tmp_path: Path, is_closed: bool) -> None:
    """A B: the tokens A, space, A, B are in frames 1-2, 4-5, 7-8 and 10-11 of 0.04 s."""
    model_of(tmp_path / "lm", TOKENS, TEXTS, is_closed)
    search = BeamSearch(TOKENS, tmp_path / "lm", WORDS if is_closed else None, 0.04)
    (best,) = search(spoken(TOKENS, "A AB"), Weights())
    assert best.words == (TimedWord("A", 0.04, 0.12), TimedWord("AB", 0.28, 0.48))
    assert best.text == "A AB"


@pytest.mark.parametrize("is_closed", [True, False])
def test_pieces_are_searched_like_characters(tmp_path: Path, is_closed: bool) -> None:
    """Words begin with a piece, and no separator is between them."""
    texts = ["THE CAT SAT", "THE HAT", "A CAT HAT THE MAT", "SAT A MAT"]
    pieces = make_tokenizer(TokenConfig(kind="sentencepiece", vocab_size=16), texts)
    model_of(tmp_path / "lm", pieces, texts, is_closed)
    words = sorted({word for text in texts for word in text.split()}) if is_closed else None
    search = BeamSearch(pieces, tmp_path / "lm", words, 0.04)
    for seed, text in enumerate(texts):
        best = search(spoken(pieces, text, noise=1.0, seed=seed), Weights())[0]
        assert best.text == text
        assert [each.word for each in best.words] == text.split()
        assert all(each.start < each.end for each in best.words)
        assert all(each.end <= after.start for each, after in itertools.pairwise(best.words))


def test_an_alphabet_without_a_space_has_one_word_per_utterance(tmp_path: Path) -> None:
    """This is the case of isolated commands."""
    tokens = CharacterTokenizer("AB")
    model_of(tmp_path / "lm", tokens, ["AB", "B", "BA"], is_closed=True)
    found = BeamSearch(tokens, tmp_path / "lm", ["AB", "B", "BA"])(random_log_probs(1, 6, 3), Weights(), 10)
    assert {each.text for each in found} == {"AB", "B", "BA", ""}


def test_there_is_no_hypothesis_if_no_word_fits(tmp_path: Path) -> None:
    """One frame is too short for two letters and impossible to leave empty."""
    model_of(tmp_path / "lm", TOKENS, ["AB"], is_closed=True)
    never_blank = np.array([[-1e9, -1e9, 0.0, -1e9]], dtype=np.float32)
    assert BeamSearch(TOKENS, tmp_path / "lm", ["AB"])(never_blank, Weights()) == []


@pytest.mark.wide
def test_several_processes_find_the_same(tmp_path: Path) -> None:
    """Their order is the same, too."""
    model_of(tmp_path / "lm", TOKENS, TEXTS, is_closed=True)
    search = BeamSearch(TOKENS, tmp_path / "lm", WORDS)
    utterances = [random_log_probs(seed, 5 + seed, 4) for seed in range(5)]
    with SearchPool(search) as alone, SearchPool(search, 2) as together:
        assert alone(utterances, Weights(), 3) == together(utterances, Weights(), 3)


def test_a_file_that_kenlm_refuses_is_a_data_error(tmp_path: Path) -> None:
    """The error names the file."""
    (tmp_path / "lm").write_text("nothing")
    with pytest.raises(DataError, match=r"/lm: KenLM cannot read"):
        BeamSearch(TOKENS, tmp_path / "lm", WORDS)(random_log_probs(0, 3, 4), Weights())


@pytest.fixture
def heard(tmp_path: Path) -> tuple[dict[str, SearchPool], dict[str, NDArray[np.float32]], dict[str, str]]:
    """Searches of both vocabularies, and noisy utterances with their texts."""
    references = {f"{name}-{copy}": name for copy in range(4) for name in TEXTS}
    utterances = {
        name: spoken(TOKENS, text, noise=3.0, seed=number) for number, (name, text) in enumerate(references.items())
    }
    model_of(tmp_path / "words", TOKENS, TEXTS, is_closed=True)
    model_of(tmp_path / "tokens", TOKENS, TEXTS, is_closed=False)
    closed, opened = BeamSearch(TOKENS, tmp_path / "words", WORDS), BeamSearch(TOKENS, tmp_path / "tokens")
    return {"closed": SearchPool(closed), "open": SearchPool(opened)}, utterances, references


def test_tuning_takes_the_weights_with_the_fewest_errors(heard) -> None:  # type: ignore[no-untyped-def]
    """The best of all trials is taken, with the narrowest beam that is as good; noise makes some weights worse than
    others."""
    best, trials = tune(*heard, DecodingConfig())
    assert best.errors == min(trial.errors for trial in trials)
    assert len({trial.errors for trial in trials}) > 1
    assert {trial.vocabulary for trial in trials} == {"closed", "open"}
    narrower = [
        trial
        for trial in trials
        if trial.vocabulary == best.vocabulary
        and trial.weights == best.weights.model_copy(update={"beam": trial.weights.beam})
        and trial.weights.beam < best.weights.beam
    ]
    assert all(trial.errors > best.errors for trial in narrower)
    assert best.weights.beam in BEAMS


def test_values_that_a_recipe_sets_are_not_tuned(heard) -> None:  # type: ignore[no-untyped-def]
    """Neither a given weight nor a given beam is tuned."""
    config = DecodingConfig(lm_weight=0.3, beam=5)
    best, trials = tune(*heard, config)
    assert {(trial.weights.lm_weight, trial.weights.beam) for trial in trials} == {(0.3, 5)}
    assert given(config).model_copy(update={"word_penalty": best.weights.word_penalty}) == best.weights
