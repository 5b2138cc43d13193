"""Error rates in the usual formats, files that list all errors, and tests of whether two recognisers differ."""

import ast
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import kaldialign
import numpy as np

from starling.errors import DataError, some

if TYPE_CHECKING:
    from starling.speech.store import SpeechSet, SpeechSets

NOTHING = " "  # stands for a missing word in an alignment; no word is a single space
_LONGEST_WORD = 12  # characters, on average; longer words are sentences without spaces
_REPLICATIONS = 2000
_BUFFER = 2
"""Number of consecutive words that both recognisers must recognise to end a segment."""
_PAIRED_REPLICATIONS = 10_000
_LEVEL = 0.05
_AT_A_TIME = 200  # number of replications that are computed together, to limit memory

Alignment = list[tuple[str, str]]  # (reference word, recognised word), with `NOTHING` for a missing word


@dataclass(frozen=True)
class ErrorCounts:
    """The numbers of errors in a set, in words or in characters."""

    insertions: int
    deletions: int
    substitutions: int
    reference: int  # words or characters in the references

    @property
    def errors(self) -> int:
        """The number of errors."""
        return self.insertions + self.deletions + self.substitutions

    @property
    def rate(self) -> float:
        """Errors per 100 reference words or characters; infinite if there are errors but no reference words."""
        if self.reference:
            return 100.0 * self.errors / self.reference
        return math.inf if self.errors else 0.0


@dataclass(frozen=True)
class ErrorRates:
    """The scores of one test set."""

    words: ErrorCounts
    characters: ErrorCounts  # including spaces
    sentences: int
    wrong_sentences: int
    interval: tuple[float, float] | None  # 95 % bootstrap interval of the WER, per cent; None: cannot be estimated
    missing: tuple[str, ...]  # utterances without a hypothesis, counted as deletions

    @property
    def wer(self) -> float:
        """Word error rate in per cent."""
        return self.words.rate

    @property
    def cer(self) -> float:
        """Character error rate in per cent."""
        return self.characters.rate

    @property
    def rate(self) -> float:
        """The word error rate or, for texts without spaces between words, the character error rate, in per cent."""
        return self.cer if self.characters.reference > _LONGEST_WORD * self.words.reference else self.wer

    @property
    def ser(self) -> float:
        """Sentence error rate in per cent."""
        return 100.0 * self.wrong_sentences / self.sentences

    def lines(self) -> list[str]:
        """The lines %WER (with its interval), %SER and %CER, in Kaldi's format."""
        interval = "" if self.interval is None else f" 95% interval {self.interval[0]:.2f} - {self.interval[1]:.2f}"
        lines = [
            _kaldi_line("WER", self.words) + interval,
            f"%SER {self.ser:.2f} [ {self.wrong_sentences} / {self.sentences} ]",
            _kaldi_line("CER", self.characters),
        ]
        if self.missing:
            missing = f"{len(self.missing)} utterances without a hypothesis are counted as deletions"
            lines.append(f"{missing}: {some(self.missing)}")
        return lines


def error_rates(references: Mapping[str, str], hypotheses: Mapping[str, str]) -> ErrorRates:
    """Compare texts by utterance id. Errors are summed over the set, not averaged over utterances.

    Raises DataError if there are no references, or a hypothesis has no reference.
    """
    if not references:
        raise DataError("there is no reference to score against: the set is empty")
    if unknown := sorted(hypotheses.keys() - references.keys()):
        raise DataError(
            f"{len(unknown)} hypotheses, such as {unknown[0]!r}, do not belong to an utterance of the set: they were "
            "made for a different set"
        )
    pairs = _words(references, hypotheses)
    words, characters = count_errors(references, hypotheses)
    return ErrorRates(
        words=words,
        characters=characters,
        sentences=len(references),
        wrong_sentences=sum(spoken != heard for spoken, heard in pairs),
        interval=_interval(pairs),
        missing=tuple(name for name in references if name not in hypotheses),
    )


def references_of(speech_set: "SpeechSet | SpeechSets") -> dict[str, str]:
    """The texts of a set, by utterance id."""
    return {speech_set.id(number): speech_set.text(number) for number in range(len(speech_set))}


def count_errors(references: Mapping[str, str], hypotheses: Mapping[str, str]) -> tuple[ErrorCounts, ErrorCounts]:
    """Count the errors in words and in characters. A missing hypothesis counts as deletions. This is faster than
    `error_rates`."""
    words = _words(references, hypotheses)
    return _count(words), _count([(list(" ".join(spoken)), list(" ".join(heard))) for spoken, heard in words])


def without_tags(
    references: Mapping[str, str], hypotheses: Mapping[str, str], tags: Collection[str]
) -> tuple[dict[str, str], dict[str, str], str]:
    """Remove tags, which are single characters at the beginning of texts. Returns the references and hypotheses without
    tags, and a line that says how many hypotheses begin with the right tag."""
    table = str.maketrans(dict.fromkeys(tags, " "))
    right = sum(text[:1] in tags and hypotheses.get(name, "")[:1] == text[:1] for name, text in references.items())
    spoken, heard = (
        {name: " ".join(text.translate(table).split()) for name, text in texts.items()}
        for texts in (references, hypotheses)
    )
    return spoken, heard, f"tags: {right} of {len(references)} utterances have the right one; not scored as words"


def lines_of_unseen(references: Mapping[str, str], hypotheses: Mapping[str, str], seen: Collection[str]) -> list[str]:
    """The %WER line without the utterances that have a near-duplicate in training; empty if there are none."""
    unseen = {name: text for name, text in references.items() if name not in seen}
    without = len(references) - len(unseen)
    if not without:
        return []
    if not unseen:
        return [f"the audio or text of all {without} utterances also occurs in training: no score without these"]
    result = error_rates(unseen, {name: text for name, text in hypotheses.items() if name in unseen})
    left_out = f"{without} utterance{'s' * (without > 1)}"
    return [f"{result.lines()[0]}, without {left_out} whose audio or text also occurs in training"]


def align_words(references: Mapping[str, str], hypotheses: Mapping[str, str]) -> dict[str, Alignment]:
    """The word alignment of each utterance. If a hypothesis is missing, all words of the reference are deletions."""
    pairs = zip(references, _words(references, hypotheses), strict=True)
    return {name: kaldialign.align(spoken, heard, NOTHING) for name, (spoken, heard) in pairs}


def scored_in(folder: Path) -> list[str]:
    """The names of the sets whose texts `write_score_files` has written to a folder."""
    return sorted(path.stem.removeprefix("recogs-") for path in folder.glob("recogs-*.txt"))


def read_texts(recogs: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Read the references and hypotheses that `write_score_files` wrote, by utterance id. Raises DataError if the file
    is damaged."""
    texts: dict[str, dict[str, str]] = {"ref": {}, "hyp": {}}
    for number, line in enumerate(recogs.read_text(encoding="utf-8", errors="replace").splitlines()):
        kind = "ref" if number % 2 == 0 else "hyp"
        name, mark, words = line.partition(f":\t{kind}=")
        try:
            value = ast.literal_eval(words)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = None
        if not mark or not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise DataError(f"{recogs}:{number + 1}: {line[:80]!r} is not {kind!r} of an utterance")
        texts[kind][name] = " ".join(value)
    if not texts["ref"] or texts["ref"].keys() != texts["hyp"].keys():
        raise DataError(f"{recogs}: it ends in the middle of an utterance; score the set again")
    return texts["ref"], texts["hyp"]


def num_errors(alignment: Alignment) -> int:
    """The number of errors in an alignment."""
    return sum(reference != hypothesis for reference, hypothesis in alignment)


def write_score_files(
    folder: Path,
    set_name: str,
    references: Mapping[str, str],
    hypotheses: Mapping[str, str],
    normaliser: str,
    remarks: Sequence[str] = (),
) -> ErrorRates:
    """Score a set and write `recogs-`, `errs-` and `wer-summary-<set_name>.txt` to `folder`.

    `normaliser` is the name of the text normaliser; `remarks` are written after the scores. Raises DataError for the
    same reasons as `error_rates`.
    """
    result = error_rates(references, hypotheses)
    folder.mkdir(parents=True, exist_ok=True)
    pairs = zip(references, _words(references, hypotheses), strict=True)
    recogs = [f"{name}:\tref={spoken}\n{name}:\thyp={heard}" for name, (spoken, heard) in pairs]
    summary = [f"set {set_name}, text normaliser: {normaliser}", *result.lines(), *remarks]
    errors = [*summary, "", *_error_lines(align_words(references, hypotheses))]
    for kind, lines in (("recogs", recogs), ("errs", errors), ("wer-summary", summary)):
        (folder / f"{kind}-{set_name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return result


def _words(references: Mapping[str, str], hypotheses: Mapping[str, str]) -> list[tuple[list[str], list[str]]]:
    """The words of each reference, paired with the words of its hypothesis."""
    return [(text.split(), hypotheses.get(name, "").split()) for name, text in references.items()]


def _count(pairs: Sequence[tuple[list[str], list[str]]]) -> ErrorCounts:
    found = [kaldialign.edit_distance(spoken, heard) for spoken, heard in pairs]
    insertions, deletions, substitutions = (sum(each[kind] for each in found) for kind in ("ins", "del", "sub"))
    return ErrorCounts(insertions, deletions, substitutions, sum(len(spoken) for spoken, _ in pairs))


def _interval(pairs: Sequence[tuple[list[str], list[str]]]) -> tuple[float, float] | None:
    if len(pairs) < 2 or not all(spoken for spoken, _ in pairs):
        return None  # a bootstrap sample could have no reference words
    if all(spoken == heard for spoken, heard in pairs):
        return None  # a bootstrap would claim that there is no error in other utterances either
    references, hypotheses = map(list, zip(*pairs, strict=True))
    result = kaldialign.bootstrap_wer_ci(references, hypotheses, replications=_REPLICATIONS)
    return max(0.0, 100.0 * result["ci95min"]), 100.0 * result["ci95max"]


def _kaldi_line(name: str, counts: ErrorCounts) -> str:
    return (
        f"%{name} {counts.rate:.2f} [ {counts.errors} / {counts.reference}, {counts.insertions} ins, "
        f"{counts.deletions} del, {counts.substitutions} sub ]"
    )


def _error_lines(alignments: Mapping[str, Alignment]) -> list[str]:
    """The sections of an `errs-` file, in icefall's order and with its titles."""
    pairs = Counter(pair for alignment in alignments.values() for pair in alignment)
    wrong = [(count, *pair) for pair, count in pairs.items() if pair[0] != pair[1]]
    wrong.sort(key=lambda each: (-each[0], each[1:]))
    lines = ["PER-UTT DETAILS: corr or (ref->hyp)"]
    lines += [f"{name}:\t{' '.join(map(_show, alignment))}" for name, alignment in alignments.items()]
    lines += ["", "SUBSTITUTIONS: count ref -> hyp"]
    lines += [f"{count}   {ref} -> {hyp}" for count, ref, hyp in wrong if NOTHING not in (ref, hyp)]
    lines += ["", "DELETIONS: count ref", *(f"{count}   {ref}" for count, ref, hyp in wrong if hyp == NOTHING)]
    lines += ["", "INSERTIONS: count hyp", *(f"{count}   {hyp}" for count, ref, hyp in wrong if ref == NOTHING)]
    return [*lines, "", *_word_lines(pairs)]


def _word_lines(pairs: Counter[tuple[str, str]]) -> list[str]:
    in_reference, in_hypothesis, correct = Counter[str](), Counter[str](), Counter[str]()
    for (reference, hypothesis), count in pairs.items():
        in_reference[reference] += count
        in_hypothesis[hypothesis] += count
        correct[reference] += count * (reference == hypothesis)
    wrong = in_reference + in_hypothesis  # a substitution counts as an error of both words
    wrong.subtract(correct + correct)
    lines = ["PER-WORD STATS: word  corr tot_errs count_in_ref count_in_hyp"]
    words = sorted(wrong.keys() - {NOTHING}, key=lambda word: (-wrong[word], word))
    return lines + [
        f"{each}   {correct[each]} {wrong[each]} {in_reference[each]} {in_hypothesis[each]}" for each in words
    ]


def _show(pair: tuple[str, str]) -> str:
    reference, hypothesis = ("*" if word == NOTHING else word for word in pair)
    return reference if pair[0] == pair[1] else f"({reference}->{hypothesis})"


@dataclass(frozen=True)
class MatchedPairs:
    """The result of the test of matched pairs of sentence segments (MAPSSWE)."""

    segments: int
    difference: float  # mean errors of the first minus those of the second, per segment
    t: float | None  # the statistic, with segments - 1 degrees of freedom; None: it cannot be computed
    p: float | None  # probability of a difference at least this large, in either direction, if they do not differ

    @property
    def verdict(self) -> str:
        """The result of the test as a sentence."""
        told = f"matched pairs (MAPSSWE): {self.segments} segments, mean difference {self.difference:+.3f} errors"
        if self.p is None or self.t is None:
            return f"{told}; there is no test, because the segments are too few or all alike"
        verdict = "significant" if self.p < _LEVEL else "not significant"
        p = f"p = {self.p:.3g}" if self.p >= 1e-4 else f"p = {max(self.p, math.ulp(0.0)):.1e}"
        return f"{told}, t = {self.t:.2f}, {p}: {verdict} at {_LEVEL:.0%}"


@dataclass(frozen=True)
class PairedBootstrap:
    """The difference between two word error rates, first minus second, in per cent of the reference words."""

    difference: float
    interval: tuple[float, float]  # 95 %
    second_better: float  # fraction of the samples in which the second has fewer errors


def matched_pairs(references: Mapping[str, str], first: Mapping[str, str], second: Mapping[str, str]) -> MatchedPairs:
    """Test whether two recognisers differ in errors per segment.

    A segment is a stretch of an utterance in which either recogniser makes errors. It ends with two consecutive words
    that both recognise, with nothing inserted between them. Errors in different segments are assumed to be independent.
    The mean difference is tested with Student's t, which for many segments approaches the normal distribution of the
    original test.

    References:
        Gillick and Cox, "Some statistical issues in the comparison of speech recognition algorithms", ICASSP 1989.
        Pallett, Fisher and Fiscus, "Tools for the analysis of benchmark speech recognition tests", ICASSP 1990.
    """
    from scipy.stats import ttest_1samp

    ours, theirs = align_words(references, first), align_words(references, second)
    pairs = [pair for name in references for pair in error_segments(ours[name], theirs[name])]
    differences = np.array([one - two for one, two in pairs], dtype=np.float64)
    mean = float(differences.mean()) if pairs else 0.0
    if len(pairs) < 2 or not differences.std():
        return MatchedPairs(len(pairs), mean, None, None)
    result = ttest_1samp(differences, 0.0)
    return MatchedPairs(len(pairs), mean, float(result.statistic), float(result.pvalue))


def error_segments(first: Alignment, second: Alignment) -> list[tuple[int, int]]:
    """The numbers of errors of both recognisers in each segment of an utterance, from alignments with the same
    reference."""
    found: list[tuple[int, int]] = []
    errors, good = (0, 0), 0
    for number, (ours, theirs) in enumerate(zip(_steps(first), _steps(second), strict=True)):
        if ours or theirs:
            errors, good = (errors[0] + ours, errors[1] + theirs), 0
        else:
            good += number % 2  # every other step is a word
        if good >= _BUFFER and any(errors):
            found.append(errors)
            errors = (0, 0)
    return [*found, errors] if any(errors) else found


def _steps(alignment: Alignment) -> list[int]:
    """The number of words inserted before the first reference word, 1 if this word is wrong (otherwise 0), the number
    of words inserted before the second reference word, and so on."""
    steps = [0]
    for reference, hypothesis in alignment:
        if reference == NOTHING:
            steps[-1] += 1
        else:
            steps += [int(reference != hypothesis), 0]
    return steps


def paired_bootstrap(
    references: Mapping[str, str], first: Mapping[str, str], second: Mapping[str, str]
) -> PairedBootstrap | None:
    """The difference between two word error rates over samples of the utterances, drawn with replacement. None if there
    are fewer than two utterances or a reference is empty, because the difference then cannot be estimated.

    References:
        Bisani and Ney, "Bootstrap estimates for confidence intervals in ASR performance evaluation", ICASSP 2004.
    """
    words = np.array([len(text.split()) for text in references.values()], dtype=np.int64)
    if len(words) < 2 or not words.all():
        return None
    ours, theirs = align_words(references, first), align_words(references, second)
    errors = np.array([num_errors(ours[name]) - num_errors(theirs[name]) for name in references])
    generator = np.random.default_rng(0)
    sums = []
    for _ in range(_PAIRED_REPLICATIONS // _AT_A_TIME):
        drawn = generator.integers(len(words), size=(_AT_A_TIME, len(words)))
        sums.append(100.0 * errors[drawn].sum(1) / words[drawn].sum(1))
    differences = np.concatenate(sums)
    low, high = np.percentile(differences, [2.5, 97.5]).tolist()
    difference = 100.0 * float(errors.sum()) / float(words.sum())
    return PairedBootstrap(difference, (low, high), float((differences > 0).mean()))
