"""Phrases of a list are found where the outputs of CTC come close to them, and replace what was decoded there."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from starling.errors import ConfigError, DataError
from starling.speech.decoding.decoders import BOOST, Phrases, Spotted, emissions_of, read_phrases
from starling.speech.recogniser import Recogniser
from starling.speech.tokens import BLANK, WORD_START, CharacterTokenizer, TokenConfig, Tokenizer, make_tokenizer
from starling.speech.transcribing.transcriber import Transcriber
from starling.speech.transcribing.transcript import Segment
from tests.speech.tones import RATE, performance

TONES = Path(__file__).parents[1] / "data" / "tones"
LETTERS = CharacterTokenizer(" AB")
TEXTS = ["ONE TWO", "ONE THREE", "TWO ONE ONE", "THREE TEN TWO"] * 5
PIECES = make_tokenizer(TokenConfig(kind="sentencepiece", vocab_size=30), TEXTS)


class Pieces(CharacterTokenizer):
    """Pieces of one letter each: a small letter continues a word, a capital begins one."""

    @property
    def names(self) -> list[str]:
        return ["", *(each if each.islower() else f"{WORD_START}{each}" for each in self.alphabet)]


SPELLINGS = {"letters": (LETTERS, ["A", "AB", "A B", "AAB"]), "pieces": (Pieces("ABc"), ["A", "Ac", "AB", "AA", "Bcc"])}


def random_log_probs(seed: int, frames: int, tokens: int) -> NDArray[np.float32]:
    return np.log(np.random.default_rng(seed).dirichlet(np.full(tokens, 0.7), frames)).astype(np.float32)


def spoken(tokenizer: Tokenizer, text: str, **nearly: str) -> NDArray[np.float32]:
    """Log-probabilities of a text: two frames of each token after a blank; `nearly` makes tokens nearly as likely as
    others."""
    path = np.array([token for each in tokenizer.encode(text) for token in (BLANK, each, each)])
    scores = np.full((len(path), tokenizer.vocab_size), -20.0)
    scores[np.arange(len(path)), path] = 0.0
    names = tokenizer.names
    for said, other in nearly.items():
        scores[path == names.index(said), names.index(other)] = -1.5
    return (scores - np.log(np.exp(scores).sum(1, keepdims=True))).astype(np.float32)


def is_said(path: Sequence[int], tokens: Sequence[int], names: Sequence[str], at_start: bool, at_end: bool) -> bool:
    """Whether a path says the tokens, with a word boundary or an end of the utterance on either side."""
    said = [(token, len(list(run))) for token, run in itertools.groupby(path)]
    if not names[tokens[0]].startswith(WORD_START):
        if not at_start:
            first = said.pop(0)
            if names[first[0]] != WORD_START or first[1] > 1:
                return False
    elif path[0] != tokens[0]:
        return False
    if not at_end:
        last = said.pop()
        if not names[last[0]].startswith(WORD_START) or last[1] > 1:
            return False
    return [token for token, _ in said if token != BLANK] == list(tokens)


def gains_of(log_probs: NDArray[np.float32], tokenizer: Tokenizer, weights: dict[str, float]) -> dict[Spotted, float]:
    """The gain of each phrase in each span, from the paths of all its frames."""
    scores, gains = log_probs.astype(np.float64) - log_probs.max(1, keepdims=True), {}
    for begin, end in itertools.combinations(range(len(scores) + 1), 2):
        frames = range(begin, min(end + 1, len(scores)))
        for path in itertools.product(range(scores.shape[1]), repeat=len(frames)):
            for phrase, weight in weights.items():
                tokens = tokenizer.encode(phrase)
                starts = [True, False] if begin == 0 else [False]
                if any(is_said(path, tokens, tokenizer.names, each, end == len(scores)) for each in starts):
                    score = sum(scores[frame, token] for frame, token in zip(frames, path, strict=True))
                    span = Spotted(phrase, begin, end)
                    gains[span] = max(gains.get(span, -math.inf), score + weight * len(tokens))
    return gains


def greatest(gains: dict[Spotted, float], begin: int = 0) -> float:
    """The greatest total gain of any set of spans, from a frame on, that do not overlap."""
    later = {each: gain for each, gain in gains.items() if each.begin >= begin and gain > 0}
    return max([0.0, *(gain + greatest(later, each.end) for each, gain in later.items())])


@pytest.mark.parametrize("kind", SPELLINGS)
@pytest.mark.parametrize("seed", range(6))
def test_the_phrases_that_are_found_have_the_greatest_gain_of_all_paths_and_sets(kind: str, seed: int) -> None:
    """Every path through every span is enumerated, with weights that make few, some or most phrases worthwhile."""
    tokenizer, phrases = SPELLINGS[kind]
    log_probs = random_log_probs(seed, 5, tokenizer.vocab_size)
    weights = {each: (0.3, 1.0, 2.5)[(seed + number) % 3] for number, each in enumerate(phrases)}
    gains = gains_of(log_probs, tokenizer, weights)
    found = Phrases(tokenizer, [f"{each}\t{weight}" for each, weight in weights.items()], "test").spot(log_probs)
    assert sum(gains[each] for each in found) == pytest.approx(greatest(gains), abs=1e-5)
    assert all(one.end <= other.begin for one, other in itertools.pairwise(found))


def test_the_oracle_is_not_trivial() -> None:
    """Its sets have no phrase, one and several."""
    sizes = {
        len(Phrases(tokenizer, phrases, "test").spot(random_log_probs(seed, 5, tokenizer.vocab_size)))
        for tokenizer, phrases in SPELLINGS.values()
        for seed in range(6)
    } | {len(Phrases(LETTERS, ["B\t0.01"], "test").spot(random_log_probs(0, 5, 4)))}
    assert {0, 1, 2} <= sizes


@given(st.integers(0, 10**6), st.sampled_from(list(SPELLINGS)), st.integers(1, 40))
def test_without_phrases_or_below_their_cost_nothing_is_found(seed: int, kind: str, frames: int) -> None:
    """There is no phrase at all, or the weights are at or far below 0."""
    tokenizer, phrases = SPELLINGS[kind]
    log_probs = random_log_probs(seed, frames, tokenizer.vocab_size)
    emissions = emissions_of(log_probs.argmax(1))
    assert Phrases(tokenizer, ["", "# A", "  "], "test")(log_probs, emissions) is None
    for weight in (0.0, -50.0):
        lines = [f"{each}\t{weight}" for each in phrases]
        assert Phrases(tokenizer, lines, "test")(log_probs, emissions) is None


@pytest.mark.parametrize("tokenizer", [CharacterTokenizer(" EHNORTW"), PIECES], ids=["letters", "pieces"])
@pytest.mark.parametrize("text", ["ONE", "TWO ONE ONE", "ONE THREE TWO", "TEN TWO THREE TEN"])
def test_a_phrase_that_is_said_changes_nothing(tokenizer: Tokenizer, text: str) -> None:
    """This holds wherever the phrase is, and for any number of words; another phrase that is not said is not found."""
    log_probs = spoken(tokenizer, text)
    words = text.split()
    said = {" ".join(words[begin:end]) for begin, end in itertools.combinations(range(len(words) + 1), 2)}
    for phrase in said:
        spotted = Phrases(tokenizer, [phrase], "test").spot(log_probs)
        assert [each.phrase for each in spotted] == [phrase] * len(spotted)
        assert spotted
    emissions = emissions_of(log_probs.argmax(1))
    assert Phrases(tokenizer, sorted(said), "test")(log_probs, emissions) == text
    unsaid = [each for each in ("HERO", "NET", "TWO THREE ONE") if tokenizer is not PIECES or each != "HERO"]
    assert Phrases(tokenizer, unsaid, "test")(log_probs, emissions) is None


def test_words_in_the_span_of_a_phrase_are_replaced() -> None:
    """One word replaces one, one replaces several, and several replace one; the words around them stay."""
    letters = CharacterTokenizer(" EHNORTW")

    def text(said: str, *phrases: str, **nearly: str) -> str | None:
        log_probs = spoken(letters, said, **nearly)
        return Phrases(letters, phrases, "test")(log_probs, emissions_of(log_probs.argmax(1)))

    assert text("TWO THREE ONE", "THROE", E="O") == "TWO THROE ONE"
    assert text("TWO NOR TEN", "TWONOR", **{WORD_START: ""}) == "TWONOR TEN"
    assert text("TWOHONE TEN", "TWO ONE", H=WORD_START) == "TWO ONE TEN"
    assert text("TWO ONE", "TON", "ROW", N="R") is None
    for phrase, cost in (("ORE", 3.0 / 3), ("TWO ORE", 3.0 / 7)):  # of two frames, for each token
        assert text("TWO ONE", f"{phrase}\t{cost - 0.01}", N="R") is None
        assert text("TWO ONE", f"{phrase}\t{cost + 0.01}", N="R") == "TWO ORE"
    assert text("TEN", "TER\t2", "NEN\t1.5", N="R", T="N") == "TER"
    assert text("ONE TEN", "NET", **{WORD_START: "N"}) is None


def test_a_phrase_is_not_found_within_a_longer_word() -> None:
    """It is found neither at the beginning nor at the end of a longer word, nor in one that runs on."""
    log_probs = spoken(CharacterTokenizer(" EHNORTW"), "TENOR ONE")
    for phrase in ("TEN", "NOR", "ENO", "R ONE", "TENOR O"):
        assert Phrases(CharacterTokenizer(" EHNORTW"), [phrase], "test").spot(log_probs) == []
    pieces = Pieces("ABc")
    path = spoken(pieces, "ABcc")
    assert Phrases(pieces, ["AB", "Bc"], "test").spot(path) == []
    assert [each.phrase for each in Phrases(pieces, ["A", "Bcc"], "test").spot(path)] == ["A", "Bcc"]


def test_an_alphabet_without_spaces_has_phrases_of_whole_utterances() -> None:
    """Such an alphabet has no other word boundary."""
    letters = CharacterTokenizer("AB")
    log_probs = spoken(letters, "ABA")
    assert Phrases(letters, ["AB", "BA"], "test").spot(log_probs) == []
    assert Phrases(letters, ["ABA"], "test").spot(log_probs) == [Spotted("ABA", 0, 9)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("AéB", r"^words.txt, line 3: 'AéB' has the character 'é' \(U\+00E9\), which the recogniser's tokens cannot"),
        ("A\tloud", r"^words.txt, line 3: write PHRASE, or PHRASE<tab>WEIGHT with a number .*, got 'A\\tloud'"),
        ("A\tnan", "line 3: write PHRASE"),
        ("\t2", "line 3: write PHRASE"),
        ("A\t1\t2", "line 3: write PHRASE"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(line: str, message: str) -> None:
    """The error has the line's number in the list, counting comments and blank lines."""
    with pytest.raises(DataError, match=message):
        Phrases(LETTERS, ["# words", "", line], "words.txt")
    with pytest.raises(DataError, match=r"line 1: 'ONE 5IX' has the character '5' \(U\+0035\)"):
        Phrases(PIECES, ["ONE 5IX"], "words.txt")
    with pytest.raises(DataError, match=r"'A B' has the character ' ' \(U\+0020\)"):
        Phrases(CharacterTokenizer("AB"), ["A B"], "words.txt")


def test_a_list_is_read_from_a_text_file(tmp_path: Path) -> None:
    """A byte order mark may be present; spaces around and between words do not matter, and a weight is optional."""
    path = tmp_path / "words.txt"
    path.write_text("\ufeff A   B \n# B\n\nAB\t3.5\nB\t\n", encoding="utf-8")
    assert len(Phrases(LETTERS, read_phrases(path), str(path))) == 3
    path.write_bytes(b"\xff\xfe")
    for wrong in (path, tmp_path / "absent.txt", tmp_path):
        with pytest.raises(DataError, match=rf"--boost {wrong}: cannot be read .*one phrase a line"):
            read_phrases(wrong)
    path.write_text("# names\n\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"--boost {path}: has no phrases"):
        read_phrases(path)


@pytest.fixture(scope="module")
def transcriber() -> Transcriber:
    return Transcriber(Recogniser.load(TONES))


def test_a_transcript_has_phrases_with_times_and_confidences(transcriber: Transcriber) -> None:
    """The phrases replace the words; without phrases, or if they are said anyway, the transcript is the same to the
    bit."""
    waveform, spans = performance(["DO", "RE", "MI", "FA"], [0.3, 0.1, 0.05, 0.9, 0.8], np.random.default_rng(3))
    plain = transcriber.transcribe(waveform, RATE)
    assert plain.text == "DO RE MI FA"
    for phrases in ([], ["# none"], ["RE MI", "DO", "FA\t4"], ["ROMEO", "DORA MIRA", "FADE"]):
        assert transcriber.boosted(phrases).transcribe(waveform, RATE) == plain
    boosted = transcriber.boosted(["REMI\t5"]).transcribe(waveform, RATE)
    assert [word.text for word in boosted.words] == boosted.text.split() == ["DO", "REMI", "FA"]
    word = boosted.words[1]
    assert (word.start, word.end) == pytest.approx((spans[1][1], spans[2][2]), abs=0.08)
    assert 0.0 < word.confidence <= 1.0
    assert transcriber.transcribe(waveform, RATE) == plain


def test_audio_is_boosted_while_it_is_spoken(transcriber: Transcriber) -> None:
    """Its partial texts, and its segments."""
    waveform, _ = performance(["DO", "RE", "MI"], [0.3, 0.1, 0.05, 0.9], np.random.default_rng(3))
    live, finals, partials = transcriber.boosted(["REMI\t5"]).live(RATE), list[Segment](), set[str]()
    for block in np.array_split(waveform, 20):
        update = live.feed(block)
        partials.add(update.partial)
        finals += update.final
    assert [each.text for each in (*finals, *live.end().final)] == ["DO REMI"]
    assert "DO REMI" in partials


def test_beam_searches_are_boosted_as_greedy_decoding_is(transcriber: Transcriber) -> None:
    """Whatever the text that a search gives."""
    waveform, _ = performance(["DO", "RE", "MI"], [0.3, 0.1, 0.05, 0.3], np.random.default_rng(3))
    for found, text in (("DO RE MI", "DO REMI"), ("DO RE ME", "DO REMI"), ("", "REMI")):
        searched = Transcriber(transcriber.recogniser, lambda log_probs, found=found: found)  # type: ignore[misc]
        assert searched.transcribe(waveform, RATE).text == found
        assert searched.boosted(["REMI\t5"]).transcribe(waveform, RATE).text == text


def test_texts_that_are_not_those_of_ctc_are_not_boosted(
    transcriber: Transcriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of tied states or of a decoder, unless a beam search finds those of CTC beside it."""
    monkeypatch.setattr(Recogniser, "decoder", object())
    with pytest.raises(
        ConfigError, match=r"^--boost words: .* from its decoder; load it with the beam search \(--beam\)$"
    ):
        transcriber.boosted(["DO"], "--boost words")
    Transcriber(transcriber.recogniser, lambda log_probs: "").boosted(["DO"])
    monkeypatch.undo()
    monkeypatch.setattr(transcriber.recogniser, "states", object())
    with pytest.raises(ConfigError, match=r"^phrases: .* from tied states$"):
        transcriber.boosted(["DO"])
    assert BOOST > 0
