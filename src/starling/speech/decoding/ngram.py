"""N-gram language models with interpolated modified Kneser-Ney smoothing, and their ARPA files."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Self

from starling.errors import DataError
from starling.speech.corpora.lines import read_lines, replace_file

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
_SPECIAL = (BEGIN, END, UNKNOWN)
_FALLBACK = (0.5, 1.0, 1.5)
"""Discounts for counts of 1, of 2, and of 3 or more, used if there are too few data to estimate them. KenLM uses the
same values."""
_NEVER = -99.0  # the log10 probability of `<s>`, by convention
Gram = tuple[str, ...]


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a model on texts, per word and end of sentence."""

    with_unknown: float  # unknown words are scored as `<unk>`
    without_unknown: float  # unknown words are left out
    num_words: int  # includes the ends of sentences
    num_unknown: int


@dataclass(frozen=True)
class NgramModel:
    """A back-off n-gram model.

    Args:
        probabilities: log10 p(last word | the words before it), by n-gram, for each order from 1.
        backoffs: log10 of the weight of the lower order after these words; 0 if missing.
    """

    probabilities: tuple[Mapping[Gram, float], ...]
    backoffs: tuple[Mapping[Gram, float], ...]

    @property
    def order(self) -> int:
        return len(self.probabilities)

    @property
    def words(self) -> list[str]:
        """All words except `<s>`, `</s>` and `<unk>`."""
        return [word for (word,) in self.probabilities[0] if word not in _SPECIAL]

    def log10(self, word: str, history: Sequence[str]) -> float:
        """The logarithm log10 p(word | history). A word that the model does not know counts as `<unk>`."""
        known = self.probabilities[0]
        if (word,) not in known:
            word = UNKNOWN
        context = tuple(each if (each,) in known else UNKNOWN for each in history)
        context = context[max(0, len(context) - self.order + 1) :]
        total = 0.0
        while True:
            found = self.probabilities[len(context)].get((*context, word))
            if found is not None:
                return total + found
            if not context:  # the model has no <unk>
                return -math.inf
            total += self.backoffs[len(context) - 1].get(context, 0.0)
            context = context[1:]

    def perplexity(self, texts: Iterable[str]) -> Perplexity:
        """The perplexity of texts, each of which is one sentence."""
        known: dict[bool, list[float]] = {True: [], False: []}
        for text in texts:
            words = [BEGIN, *text.split(), END]
            for place, word in enumerate(words[1:], 1):
                known[(word,) in self.probabilities[0]].append(self.log10(word, words[:place]))
        if not known[True]:
            raise DataError("the texts contain no known word, so they have no perplexity")
        every = [*known[True], *known[False]]
        return Perplexity(10 ** -fmean(every), 10 ** -fmean(known[True]), len(every), len(known[False]))

    def write(self, path: Path) -> None:
        """Write an ARPA file, atomically. Raises DataError if it cannot be written."""
        lines = ["\\data\\", *(f"ngram {n}={len(grams)}" for n, grams in enumerate(self.probabilities, 1))]
        for number, (grams, backoffs) in enumerate(zip(self.probabilities, self.backoffs, strict=True), 1):
            lines += ["", f"\\{number}-grams:"]
            for gram, value in grams.items():
                weight = "" if number == self.order else f"\t{backoffs.get(gram, 0.0):.7g}"
                lines.append(f"{value:.7g}\t{' '.join(gram)}{weight}")
        replace_file(path, "\n".join([*lines, "", "\\end\\", ""]))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the model in an ARPA file. Raises DataError, naming the line, if the file is not a valid ARPA file."""
        sizes: list[int] = []
        probabilities: list[dict[Gram, float]] = []
        backoffs: list[dict[Gram, float]] = []
        lines = ((number, line.strip()) for number, line in read_lines(path))
        for _, text in lines:
            if text == "\\data\\":
                break
        for number, text in lines:
            order = len(probabilities)
            if text == "\\end\\":
                break
            if text.startswith("ngram ") and not order:
                sizes.append(_size(text, len(sizes) + 1, f"{path}:{number}"))
            elif text == f"\\{order + 1}-grams:" and order < len(sizes):
                probabilities.append({})
                backoffs.append({})
            else:
                fields = text.split()
                if not order or len(fields) not in (order + 1, order + 2):
                    raise DataError(
                        f"{path}:{number}: {text[:80]!r} is not an n-gram of order {order}: log10 p, its words, and "
                        "optionally a weight"
                    )
                gram = tuple(fields[1 : order + 1])
                try:
                    probabilities[-1][gram] = _finite(fields[0])
                    if len(fields) == order + 2:
                        backoffs[-1][gram] = _finite(fields[-1])
                except ValueError:
                    raise DataError(f"{path}:{number}: {text[:80]!r} holds a number that is not finite") from None
        else:
            raise DataError(f"{path}: not an ARPA file, or cut off: it has no line \\end\\ after its n-grams")
        if [len(each) for each in probabilities] != sizes or not sizes:
            found = ", ".join(str(len(each)) for each in probabilities)
            raise DataError(f"{path}: its header announces {sizes or 'no'} n-grams, but it contains {found or 'none'}")
        return cls(tuple(probabilities), tuple(backoffs))


def estimate(sentences: Iterable[Sequence[str]], order: int) -> NgramModel:
    """Estimate a model from sentences, each a sequence of words, with interpolated modified Kneser-Ney smoothing.

        p(w | h) = max(a(hw) - D(a(hw)), 0) / sum over v of a(hv) + gamma(h) p(w | h')

    For an n-gram that has the highest order or begins with `<s>`, a is its count; for any other n-gram, a is the number
    of different words that precede it. h' is h without its first word; below unigrams, all words and `<unk>` are
    equally probable. gamma(h) normalises the sum over w to 1. D has three values, for counts of 1, of 2, and of 3 or
    more. They are estimated for each order from the numbers n1 to n4 of n-grams with counts 1 to 4. If n1, n2 or n3 is
    0, or an estimate is impossible, the three values are 0.5, 1 and 1.5. No n-gram is pruned. KenLM's `lmplz
    --discount_fallback` computes the same model.

    References:
        Chen and Goodman, "An empirical study of smoothing techniques for language modeling", Computer Speech and
        Language 13 (1999), section 3 and equation 26.
        Heafield et al., "Scalable modified Kneser-Ney language model estimation", ACL 2013.

    Raises DataError if there are no words, or if a word is `<s>`, `</s>` or `<unk>`.
    """
    padded = [[BEGIN, *words, END] for words in sentences if words]
    if not padded:
        raise DataError("a language model needs texts with at least one word")
    for sentence in padded:
        if special := next((word for word in sentence[1:-1] if word in _SPECIAL), None):
            raise DataError(f"{special!r} has a special meaning in language models: remove it from the texts")
    counts = _adjusted_counts(padded, min(order, max(map(len, padded))))
    probabilities: list[dict[Gram, float]] = []
    backoffs: list[dict[Gram, float]] = [{}]
    lower: dict[Gram, float] = {(): 1.0 / (len(counts[0]) + 1)}
    for number, grams in enumerate(counts, 1):
        discounts = _discounts(grams.values())
        totals, left = Counter[Gram](), defaultdict[Gram, float](float)
        for gram, count in grams.items():
            totals[gram[:-1]] += count
            left[gram[:-1]] += discounts[min(count, 3) - 1]
        gamma = {history: left[history] / totals[history] for history in totals}
        found = {
            gram: (count - discounts[min(count, 3) - 1]) / totals[gram[:-1]]
            + gamma[gram[:-1]] * lower[gram[1:] if number > 1 else ()]
            for gram, count in grams.items()
        }
        if number == 1:
            found = {(UNKNOWN,): gamma[()] * lower[()], **found}
        else:
            backoffs[-1] = {history: math.log10(value) for history, value in gamma.items()}
            backoffs.append({})
        probabilities.append({gram: math.log10(value) for gram, value in found.items()})
        lower = found
    probabilities[0] = {(BEGIN,): _NEVER, **probabilities[0]}
    return NgramModel(tuple(probabilities), tuple(backoffs))


def _adjusted_counts(padded: Sequence[Sequence[str]], order: int) -> list[dict[Gram, int]]:
    """The adjusted count a of each n-gram, for each order from 1. The unigram `<s>` has no count."""
    highest = Counter(tuple(each[at : at + order]) for each in padded for at in range(len(each) - order + 1))
    counts: list[dict[Gram, int]] = [highest]
    for shorter in range(order - 1, 0, -1):
        found = Counter(gram[1:] for gram in counts[0])
        if shorter > 1:
            found.update(tuple(each[:shorter]) for each in padded if len(each) >= shorter)
        counts.insert(0, found)
    if order == 1:
        del highest[(BEGIN,)]
    return counts


def _discounts(counts: Iterable[int]) -> tuple[float, float, float]:
    n = Counter(count for count in counts if count <= 4)
    if not all(n[count] for count in (1, 2, 3)):
        return _FALLBACK
    y = n[1] / (n[1] + 2 * n[2])
    one, two, more = (count - (count + 1) * y * n[count + 1] / n[count] for count in (1, 2, 3))
    if not (0 < one <= 1 and 0 < two <= 2 and 0 < more <= 3):  # with 0, unseen words would have no probability
        return _FALLBACK
    return one, two, more


def _size(text: str, order: int, where: str) -> int:
    """The number in a line of the form `ngram ORDER=NUMBER`."""
    name, _, size = text.removeprefix("ngram ").partition("=")
    if name.strip() != str(order) or not size.strip().isdecimal():
        raise DataError(f"{where}: {text[:80]!r} is not the number of {order}-grams")
    return int(size)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value
