"""N-gram models against KenLM's `lmplz`, and against what every probability must satisfy."""

import math
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from starling.errors import DataError
from starling.speech.decoding.ngram import BEGIN, END, UNKNOWN, NgramModel, estimate

LMPLZ = Path(__file__).parent / "lmplz"
SENTENCES = [line.split() for line in (LMPLZ / "text.txt").read_text(encoding="utf-8").splitlines()]
WORDS = st.lists(st.lists(st.sampled_from("abcd"), max_size=5), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("name", "order", "sentences"), [("order-3", 3, SENTENCES), ("order-4-fallback", 4, SENTENCES[:6])]
)
def test_probabilities_and_weights_are_those_of_lmplz(name: str, order: int, sentences: list[list[str]]) -> None:
    """Both with estimated discounts and with its fallback where the data are too few, the n-grams are the same, to
    1e-6."""
    theirs, ours = NgramModel.read(LMPLZ / f"{name}.arpa"), estimate(sentences, order)
    assert ours.order == theirs.order == order
    for number in range(order):
        expected = {gram: value for gram, value in theirs.probabilities[number].items() if gram != (BEGIN,)}
        found = {gram: value for gram, value in ours.probabilities[number].items() if gram != (BEGIN,)}
        assert found == pytest.approx(expected, abs=1e-6)
        weights = {gram: value for gram, value in theirs.backoffs[number].items() if value != 0.0}
        assert dict(ours.backoffs[number]) == pytest.approx(weights, abs=1e-6)


def test_the_perplexity_is_that_of_lmplzs_model() -> None:
    """The sentences are not in the text, and one has an unknown word."""
    texts = ["one two foo", "stop go right", "水 last left one"]
    theirs = NgramModel.read(LMPLZ / "order-3.arpa").perplexity(texts)
    ours = estimate(SENTENCES, 3).perplexity(texts)
    assert (ours.num_words, ours.num_unknown) == (theirs.num_words, theirs.num_unknown) == (13, 1)
    assert ours.with_unknown == pytest.approx(theirs.with_unknown, rel=1e-5)
    assert ours.without_unknown == pytest.approx(theirs.without_unknown, rel=1e-5)


@given(WORDS.filter(any), st.integers(1, 4), st.lists(st.sampled_from("abcde"), max_size=3))
@example([list(each) for each in ("bb", "babcb", "cbaba", "cbdbc", "bcdb")], 3, [])  # a discount would be 0
def test_probabilities_sum_to_one_after_any_words(sentences: list[list[str]], order: int, history: list[str]) -> None:
    """The sum runs over all words, the end, and `<unk>`, whether or not the history was seen."""
    model = estimate(sentences, order)
    words = [*model.words, END, UNKNOWN]
    assert sum(10 ** model.log10(word, [BEGIN, *history]) for word in words) == pytest.approx(1.0)


def test_a_unigram_model_is_computed_by_hand() -> None:
    """Counts are a: 1, b: 2, c: 3, end: 2; n1 = 1, n2 = 2, n3 = 1, so that Y = 1/5, and D is 1 - 4/5, 2 - 3/10 and
    3."""
    model = estimate([["c", "b", "c"], ["a", "b", "c"]], 1)
    left = (0.2 + 1.7 + 1.7 + 3.0) / 8
    expected = {"a": 0.8 / 8 + left / 5, "b": 0.3 / 8 + left / 5, "c": left / 5, END: 0.3 / 8 + left / 5, "z": left / 5}
    assert {word: 10 ** model.log10(word, []) for word in expected} == pytest.approx(expected)
    assert model.perplexity(["a"]).without_unknown == pytest.approx((expected["a"] * expected[END]) ** -0.5)


def test_a_file_gives_the_same_model_back(tmp_path: Path) -> None:
    """They agree to the seven digits of ARPA files."""
    model = estimate(SENTENCES, 3)
    model.write(tmp_path / "lm.arpa")
    again = NgramModel.read(tmp_path / "lm.arpa")
    assert again.words == model.words
    for before, after in zip(model.probabilities, again.probabilities, strict=True):
        assert dict(after) == pytest.approx(dict(before), abs=1e-6)
    assert again.perplexity(["one two"]).with_unknown == pytest.approx(
        model.perplexity(["one two"]).with_unknown, rel=1e-5
    )


def test_the_order_is_no_higher_than_the_longest_sentence() -> None:
    """Single words, with their beginning and end, have trigrams at most."""
    assert estimate([["a"], ["b"], []], 6).order == 3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", r"lm\.arpa: not an ARPA file, or cut off"),
        ("\\data\\\nngram 1=1\n\n\\1-grams:\n-1 a 0\n", r"no line \\end\\"),
        ("\\data\\\nngram 1=2\n\n\\1-grams:\n-1 a\n\\end\\\n", r"announces \[2\] n-grams, but it contains 1"),
        ("\\data\\\nngram 2=1\n", r":2: .* is not the number of 1-grams"),
        ("\\data\\\nngram 1=1\n\\1-grams:\n-1 a b c\n\\end\\\n", r":4: '-1 a b c' is not an n-gram of order 1"),
        ("\\data\\\nngram 1=1\n\\1-grams:\nnan a\n\\end\\\n", r":4: 'nan a' holds a number that is not finite"),
        ("\\data\\\nngram 1=1\n-1 a\n", r":3: '-1 a' is not an n-gram of order 0"),
    ],
)
def test_a_file_that_is_not_a_model_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    """The error names its line."""
    (tmp_path / "lm.arpa").write_text(text)
    with pytest.raises(DataError, match=problem):
        NgramModel.read(tmp_path / "lm.arpa")


def test_texts_without_words_and_special_words_are_refused() -> None:
    """A model of nothing would predict nothing; `</s>` inside a text would end it."""
    with pytest.raises(DataError, match="at least one word"):
        estimate([[], []], 2)
    with pytest.raises(DataError, match="'</s>' has a special meaning"):
        estimate([["a", END]], 2)
    with pytest.raises(DataError, match="no known word"):
        estimate([["a"]], 2).perplexity([])
    assert math.isfinite(estimate([["a"]], 2).log10("b", []))
