"""Scores against another library, and the files that are usual in speech recognition."""

import jiwer
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.errors import DataError
from starling.speech.scoring import error_rates, lines_of_unseen, write_score_files

WORD = st.sampled_from(["ONE", "TWO", "THREE", "TEN", "ÉTÉ"])
REFERENCE = st.lists(WORD, min_size=1, max_size=6).map(" ".join)
HYPOTHESIS = st.lists(WORD, max_size=6).map(" ".join)


@given(st.lists(st.tuples(REFERENCE, HYPOTHESIS), min_size=1, max_size=8))
def test_rates_are_those_of_jiwer(pairs):
    """WER and CER, summed over the set, agree with jiwer for any texts."""
    references, hypotheses = ([pair[side] for pair in pairs] for side in (0, 1))
    result = error_rates(
        {str(number): text for number, text in enumerate(references)},
        {str(number): text for number, text in enumerate(hypotheses)},
    )
    assert result.wer == pytest.approx(100 * jiwer.wer(references, hypotheses))
    assert result.cer == pytest.approx(100 * jiwer.cer(references, hypotheses))
    wrong = sum(first != second for first, second in pairs)
    assert result.ser == pytest.approx(100 * wrong / len(pairs))


def counted(reference: list[str], hypothesis: list[str], substitution: int, other: int) -> tuple[int, int]:
    """Errors of the alignment with the lowest weight, and insertions minus deletions; among equal ones, the fewest."""
    row = [(other * column, column) for column in range(len(hypothesis) + 1)]
    for place, word in enumerate(reference, 1):
        before, row = row, [(other * place, place)]
        for column, found in enumerate(hypothesis, 1):
            wrong = int(word != found)
            weight, errors = before[column - 1]
            ways = [(weight + substitution * wrong, errors + wrong)]
            ways += [(cost + other, number + 1) for cost, number in (before[column], row[-1])]
            row.append(min(ways))
    return row[-1][1], len(hypothesis) - len(reference)


@given(REFERENCE, HYPOTHESIS)
def test_errors_are_counted_as_by_sclite(reference, hypothesis):
    """With weights of 1, the number is the same; sclite's weights (4, 3 and 3) never find fewer. The words add up."""
    counts = error_rates({"a": reference}, {"a": hypothesis}).words
    words = reference.split(), hypothesis.split()
    errors, surplus = counted(*words, substitution=1, other=1)
    assert (counts.errors, counts.insertions - counts.deletions) == (errors, surplus)
    assert counts.errors <= counted(*words, substitution=4, other=3)[0]
    correct = counts.reference - counts.substitutions - counts.deletions
    assert correct + counts.substitutions + counts.insertions == len(words[1])


def test_the_lines_are_those_of_kaldi():
    """`%WER rate [ errors / words, ins, del, sub ]`, then %SER and %CER."""
    references = {"a": "ONE TWO", "b": "THREE"}
    lines = error_rates(references, {"a": "ONE", "b": "TREE FOUR"}).lines()
    assert lines[0].startswith("%WER 100.00 [ 3 / 3, 1 ins, 1 del, 1 sub ] 95% interval ")
    assert lines[1] == "%SER 100.00 [ 2 / 2 ]"
    assert lines[2] == "%CER 83.33 [ 10 / 12, 5 ins, 5 del, 0 sub ]"
    assert len(lines) == 3


def test_texts_without_spaces_have_the_rate_of_their_characters():
    """A whole sentence counts as one word, so a single wrong character is a word error of 100 %."""
    spoken, heard = "それは私の本ではありませんよ", "それは私の本ではありますよ"
    assert error_rates({"a": spoken}, {"a": heard}).rate == pytest.approx(100 * 2 / 14)
    assert error_rates({"a": "DO RE MI"}, {"a": "DO RE"}).rate == pytest.approx(100 / 3)


def test_a_missing_utterance_is_all_deletions_and_is_named():
    """A missing hypothesis counts against the result, and the lines report it."""
    result = error_rates({"a": "ONE TWO", "b": "THREE"}, {"a": "ONE TWO"})
    assert (result.words.deletions, result.missing) == (1, ("b",))
    assert result.lines()[-1] == "1 utterances without a hypothesis are counted as deletions: b"


def test_a_hypothesis_without_reference_is_refused():
    """Results of another set are never scored as if they belonged to this one."""
    with pytest.raises(DataError, match="'x'"):
        error_rates({"a": "ONE"}, {"a": "ONE", "x": "TWO"})


def test_an_empty_set_is_refused():
    """Nothing has no error rate."""
    with pytest.raises(DataError, match="empty"):
        error_rates({}, {})


def test_the_interval_covers_the_rate_it_belongs_to():
    """With errors at 10 %, about 95 in 100 intervals over many sets contain the true rate."""
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        wrong = generator.random((100, 5)) < 0.1
        references = {str(number): "A B C D E" for number in range(100)}
        hypotheses = {
            str(n): " ".join("X" if bad else w for bad, w in zip(wrong[n], "ABCDE", strict=True)) for n in range(100)
        }
        low, high = error_rates(references, hypotheses).interval
        covered += low <= 10 <= high
    assert 180 <= covered <= 199


def test_without_words_there_is_no_interval_and_no_division_by_zero():
    """References without words give an infinite rate, or zero when nothing was recognised either."""
    assert error_rates({"a": ""}, {"a": "ONE"}).wer == float("inf")
    assert error_rates({"a": ""}, {"a": ""}).wer == 0
    assert error_rates({"a": "ONE", "b": ""}, {"a": "ONE", "b": ""}).interval is None


def test_the_files_show_every_error(tmp_path):
    """Recognised texts, aligned errors with counts per word, and a summary, in icefall's layout."""
    references = {"u1": "ONE TWO THREE", "u2": "ONE ONE"}
    hypotheses = {"u1": "ONE TEN THREE FOUR", "u2": "ONE"}
    result = write_score_files(tmp_path, "test", references, hypotheses, "upper")
    assert (tmp_path / "recogs-test.txt").read_text().splitlines() == [
        "u1:\tref=['ONE', 'TWO', 'THREE']",
        "u1:\thyp=['ONE', 'TEN', 'THREE', 'FOUR']",
        "u2:\tref=['ONE', 'ONE']",
        "u2:\thyp=['ONE']",
    ]
    summary = (tmp_path / "wer-summary-test.txt").read_text().splitlines()
    assert summary == ["set test, text normaliser: upper", *result.lines()]
    errors = (tmp_path / "errs-test.txt").read_text().splitlines()
    details = errors.index("PER-UTT DETAILS: corr or (ref->hyp)")
    assert errors[details + 1] == "u1:\tONE (TWO->TEN) THREE (*->FOUR)"
    assert errors[details + 2] in ("u2:\tONE (ONE->*)", "u2:\t(ONE->*) ONE")
    for title, line in [
        ("SUBSTITUTIONS: count ref -> hyp", "1   TWO -> TEN"),
        ("DELETIONS: count ref", "1   ONE"),
        ("INSERTIONS: count hyp", "1   FOUR"),
        ("PER-WORD STATS: word  corr tot_errs count_in_ref count_in_hyp", "FOUR   0 1 0 1"),
    ]:
        assert errors[errors.index(title) + 1] == line
    assert "ONE   2 1 3 2" in errors


def test_a_word_that_looks_like_a_gap_is_a_word(tmp_path):
    """A star in a transcript is scored like any other word."""
    result = write_score_files(tmp_path, "stars", {"a": "* ONE"}, {"a": "ONE"}, "as-is")
    assert (result.words.deletions, result.words.reference) == (1, 2)


def test_texts_that_also_occur_in_training_are_not_called_leaked_recordings():
    """Digits have few texts; whether recordings are shared is for the check to say."""
    (line,) = lines_of_unseen({"a": "ONE", "b": "TWO"}, {}, {"a", "b"})
    assert line == "the audio or text of all 2 utterances also occurs in training: no score without these"
