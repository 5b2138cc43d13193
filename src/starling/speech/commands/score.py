"""Scores again the texts that `starling evaluate` wrote: with normalisation, by speaker or column, and for one
experiment or two. This module also collects scores for a report, with the audio of some utterances."""

import base64
import io
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import soundfile
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Column, Table

from starling.errors import ConfigError, DataError, StarlingError, did_you_mean, require
from starling.experiment.folder import ExperimentFolder
from starling.reporting.evidence import ScoredSet, Utterance
from starling.speech.augmentation import set_of
from starling.speech.corpora import SeveralCorpus
from starling.speech.corpora.lines import read_lines
from starling.speech.corpora.manifests import TsvCorpus
from starling.speech.recipe import load_resolved
from starling.speech.scoring import (
    NOTHING,
    Alignment,
    align_words,
    error_rates,
    matched_pairs,
    num_errors,
    paired_bootstrap,
    read_texts,
    scored_in,
)
from starling.speech.store import SpeechSet
from starling.speech.trained import recipe_around

Texts = dict[str, str]
_NUMBER = re.compile(r"(?<![\w.,])(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(st|nd|rd|th)?(?!\w)", re.IGNORECASE)
_APOSTROPHES = "'’ʼ"
_MAX_DIGITS = 30
_NO_GROUP = "(none)"
_SET = "set"
"""The column by which utterances of several sets are grouped."""
SHOWN = 3
"""Number of utterances to show of each kind: best, median and worst."""
NUM_CONFUSIONS = 20
MAX_SECONDS = 30.0
"""Maximum seconds of audio of one utterance that a report contains. The rest of longer audio is left out."""
_MP3_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)


def score(
    experiments: Sequence[Path],
    sets: Sequence[str],
    by: str | None,
    table: Path | None,
    kinds: Sequence[str],
    language: str,
) -> None:
    """Score one experiment, or two and their difference, and print the lines and tables.

    An experiment is given as its folder, or as a folder with `recogs-` files, such as `exp/demo/decode/beam`. `sets`
    are the sets to score (by default, all sets that the experiments have in common), and `kinds` are the kinds of
    normalisation. With `by`, utterances are also scored in groups by speaker or by a column. The column is in the
    corpus or in `table`, a tab-separated file with a header, whose first column has the ids. Raises ConfigError or
    DataError if a folder, set or column does not exist, or if the experiments were scored on different utterances.
    """
    folders = [_decoded(path) for path in experiments]
    names = list(sets) or _common_sets(folders)
    everything: list[Texts] = [{} for _ in range(1 + len(folders))]
    of_set: dict[str, str] = {}
    for name in names:
        texts = _texts(name, experiments, folders, kinds, language)
        _tell_scores(name, experiments, texts)
        if by is not None:
            _show_groups(name, by, texts, _groups(experiments[0], folders[0], name, by, table))
        for whole, own in zip(everything, texts, strict=True):
            whole |= {f"{name}/{each}": text for each, text in own.items()}
        of_set |= {f"{name}/{each}": name for each in texts[0]}
    if len(names) > 1:
        _tell_scores(f"all {len(names)} sets", experiments, everything)
        _show_groups("all", _SET, everything, of_set)


def _decoded(path: Path) -> Path:
    """The folder with the `recogs-` files."""
    for folder in (path / "decode", path):
        if scored_in(folder):
            return folder
    raise ConfigError(f"{path}: no set has been scored here; run `starling evaluate`, or name an experiment's folder")


def _common_sets(folders: Sequence[Path]) -> list[str]:
    common = sorted(set.intersection(*(set(scored_in(folder)) for folder in folders)))
    if not common:
        told = "; ".join(f"{folder}: {', '.join(scored_in(folder))}" for folder in folders)
        raise ConfigError(f"the experiments have no scored set in common ({told}); score one with `starling evaluate`")
    return common


def _texts(
    name: str, experiments: Sequence[Path], folders: Sequence[Path], kinds: Sequence[str], language: str
) -> list[Texts]:
    """The references of a set, and the hypotheses of each experiment, normalised. Raises DataError if two experiments
    were scored on different utterances or texts."""
    read: list[Texts] = []
    for folder in folders:
        if name not in (known := scored_in(folder)):
            hint = did_you_mean(name, known)
            raise ConfigError(f"{folder}: set {name!r} is not scored; {hint}scored: {', '.join(known)}")
        read += read_texts(folder / f"recogs-{name}.txt")
    if kinds:
        normalised = normaliser(kinds, (text for texts in read[::2] for text in texts.values()), language)
        read = [{each: normalised(text) for each, text in texts.items()} for texts in read]
    first, second = read[0], read[-2]
    if first != second:
        differing = sorted({each for each, _ in first.items() ^ second.items()})
        raise DataError(
            f"set {name}: {experiments[0]} and {experiments[1]} differ in {len(differing)} references, such as "
            f"{differing[0]!r}: {first.get(differing[0])!r} and {second.get(differing[0])!r}; score both on the same "
            "data"
        )
    return [first, *read[1::2]]


def _tell_scores(title: str, experiments: Sequence[Path], texts: Sequence[Texts]) -> None:
    typer.echo(title)
    references, *hypotheses = texts
    for path, own in zip(experiments, hypotheses, strict=True):
        prefix = f"{path}: " if len(experiments) > 1 else ""
        for line in error_rates(references, own).lines():
            typer.echo(f"{prefix}{line}")
    if len(experiments) < 2:
        return
    if (found := paired_bootstrap(*texts)) is not None:
        low, high = found.interval
        typer.echo(
            f"difference in WER, first - second: {found.difference:+.2f} % absolute, 95% interval {low:+.2f} to "
            f"{high:+.2f}; the second is better in {found.second_better:.1%} of bootstrap samples"
        )
    typer.echo(matched_pairs(*texts).verdict)


def _show_groups(title: str, by: str, texts: Sequence[Texts], groups: Mapping[str, str]) -> None:
    """Print a table with one row per group, sorted by name."""
    references, *hypotheses = texts
    members: dict[str, list[str]] = {}
    for name in references:
        members.setdefault(groups.get(name, _NO_GROUP), []).append(name)
    columns = ["utterances", "words"]
    for suffix in ("",) if len(hypotheses) == 1 else (" 1", " 2"):
        columns += [f"{column}{suffix}" for column in ("WER %", "95 %", "CER %")]
    right = (Column(each, justify="right") for each in columns)
    table = Table(by, *right, title=f"{title} by {by}", title_justify="left")
    for group, names in sorted(members.items()):
        own = {name: references[name] for name in names}
        scores = [error_rates(own, {name: each[name] for name in names}) for each in hypotheses]
        cells = [str(scores[0].sentences), str(scores[0].words.reference)]
        for each in scores:
            interval = "" if each.interval is None else f"{each.interval[0]:.2f} - {each.interval[1]:.2f}"
            cells += [f"{each.wer:.2f}", interval, f"{each.cer:.2f}"]
        table.add_row(group, *cells)
    Console().print(table)


def _groups(experiment: Path, folder: Path, name: str, by: str, table: Path | None) -> dict[str, str]:
    """The group of each utterance of a set."""
    if table is not None:
        return _column(table, None, by)
    recipe = recipe_around(folder)
    if recipe is None:
        raise ConfigError(f"{experiment}: no config.yaml here, so its speakers are unknown; name a table with --table")
    if by == "speaker":
        speech_set = SpeechSet.open(recipe.set_folder(set_of(name)))
        return {speech_set.id(index): speech_set.speaker(index) for index in range(len(speech_set))}
    corpus = recipe.data.corpus
    if isinstance(corpus, SeveralCorpus):
        _, corpus, _ = corpus.member(recipe.data.source(set_of(name)))
    if not isinstance(corpus, TsvCorpus):
        raise ConfigError(
            f"the corpus of {experiment} is not a table, so it has no column {by!r}; name a table with --table"
        )
    return _column(corpus.located(), corpus.id, by)


def _column(path: Path, ids: str | None, column: str) -> dict[str, str]:
    """A mapping from the values of the column `ids` (None: the first column) to those of `column`."""
    rows = (line.split("\t") for _, line in read_lines(path))
    header = next(rows, [])
    for wanted in (ids, column):
        if wanted is not None and wanted not in header:
            raise ConfigError(
                f"{path}: no column {wanted!r}; {did_you_mean(wanted, header)}it has: {', '.join(header) or 'none'}"
            )
    key, value = 0 if ids is None else header.index(ids), header.index(column)
    return {row[key]: row[value] for row in rows if len(row) > max(key, value)}


def normaliser(kinds: Collection[str], texts: Iterable[str] = (), language: str = "en") -> Callable[[str], str]:
    """A function that normalises texts. It writes numbers as words, removes punctuation and ignores case, in this
    order; `kinds` selects which of these steps it performs.

    * numbers: `42` becomes `forty two`, `3.5` becomes `three point five`, and `2nd` becomes `second`. The words are in
      capitals if `texts`, the texts to be compared, have no lower-case letters.
    * punctuation: an apostrophe inside a word stays; a dash or a slash becomes a space; the rest is removed.
    * case: all letters become lower-case.

    Raises ConfigError for an unknown kind, or for a language in which numbers cannot be written as words.
    """
    is_upper = not any(character.islower() for text in texts for character in text)
    spoken = partial(_spoken, language=language, is_upper=is_upper)
    steps: dict[str, Callable[[str], str]] = {
        "numbers": partial(_NUMBER.sub, spoken),
        "punctuation": _without_punctuation,
        "case": str.lower,
    }
    if unknown := sorted(set(kinds) - steps.keys()):
        raise ConfigError(f"there is no normaliser {unknown[0]!r}; known are {', '.join(steps)}")
    if "numbers" in kinds:
        require("decoding", "the normaliser `numbers`", ("num2words",))
        _NUMBER.sub(spoken, "1")  # raises ConfigError for an unsupported language

    def normalised(text: str) -> str:
        for kind, step in steps.items():
            text = step(text) if kind in kinds else text
        return " ".join(text.split())

    return normalised


def _spoken(number: re.Match[str], language: str, is_upper: bool) -> str:
    """A number as words, or unchanged if it cannot be written as words."""
    from num2words import num2words

    whole, fraction, ordinal = number.groups()
    digits = whole.replace(",", "") + (fraction or "")
    if len(digits) > _MAX_DIGITS or (fraction and ordinal):
        return number[0]
    try:
        words = str(num2words(digits, lang=language, to="ordinal" if ordinal else "cardinal"))
    except NotImplementedError:
        raise ConfigError(f"numbers cannot be written in the language {language!r}") from None
    words = re.sub(r"[-,]", " ", words)
    return words.upper() if is_upper else words


def _without_punctuation(text: str) -> str:
    found = []
    for place, character in enumerate(text):
        kind = unicodedata.category(character)
        if character in _APOSTROPHES:
            inside = text[max(0, place - 1) : place] + text[place + 1 : place + 2]
            found.append("'" if len(inside) == 2 and inside.isalnum() else "")
        elif kind == "Pd" or character in "/\\_":
            found.append(" ")
        elif kind[0] != "P":
            found.append(character)
    return "".join(found)


def scored_set(folder: ExperimentFolder, recogs: Path) -> tuple[ScoredSet, str]:
    """Score the set of a `recogs-` file again. Returns the scored set, and a sentence if the set's audio is missing.
    Raises DataError for a damaged file."""
    name = recogs.stem.removeprefix("recogs-")
    references, hypotheses = read_texts(recogs)
    rates = error_rates(references, hypotheses)
    alignments = align_words(references, hypotheses)
    counts = Counter(pair for alignment in alignments.values() for pair in alignment if pair[0] != pair[1])
    frequent = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    utterances = chosen(references, alignments) if recogs.parent == folder.decode else ()
    problem = ""
    try:
        audio = _audio(load_resolved(folder.config).data.set_folder(set_of(name)), [each.name for each in utterances])
        utterances = tuple(replace(each, audio=audio.get(each.name)) for each in utterances)
    except (StarlingError, OSError) as error:
        problem = f"No audio of {name}: {error}."
    return ScoredSet(
        name=name,
        folder=recogs.parent.relative_to(folder.path).as_posix(),
        wer=rates.wer,
        interval=rates.interval,
        cer=rates.cer,
        words=rates.words.reference,
        insertions=rates.words.insertions,
        deletions=rates.words.deletions,
        substitutions=rates.words.substitutions,
        num_utterances=rates.sentences,
        num_wrong=rates.wrong_sentences,
        utterances=utterances,
        confusions=tuple((_word(one), _word(other), times) for (one, other), times in frequent[:NUM_CONFUSIONS]),
        num_confusions=len(frequent),
    ), problem


def chosen(references: Mapping[str, str], alignments: Mapping[str, Alignment]) -> tuple[Utterance, ...]:
    """The best, median and worst utterances by errors per word; no utterance appears twice. Among utterances with equal
    error rates, those with the most words count as best, and those with the most errors count as worst."""

    def order(name: str) -> tuple[float, float, str]:
        words, errors = len(references[name].split()), num_errors(alignments[name])
        rate = errors / max(1, words)
        return rate, errors if errors else -words, name

    names = sorted(references, key=order)
    shown = min(SHOWN, max(1, len(names) // 3))
    begin = (len(names) - shown) // 2
    starts: dict[Literal["best", "median", "worst"], int] = {"best": 0, "median": begin, "worst": len(names) - shown}
    found: dict[str, Utterance] = {}
    for rank, first in starts.items():
        for name in names[max(0, first) : first + shown]:
            alignment = alignments[name]
            words = tuple((_word(reference), _word(hypothesis)) for reference, hypothesis in alignment)
            given = Utterance(rank, name, num_errors(alignment), len(references[name].split()), words)
            found.setdefault(name, given)
    return tuple(found.values())


def encoded(samples: NDArray[np.float32], rate: int) -> str:
    """Encode mono samples `[T]` in -1..1 as a `data:` URI: as MP3, or as FLAC if MP3 does not support the rate."""
    buffer = io.BytesIO()
    kind, media = ("MP3", "mpeg") if rate in _MP3_RATES else ("FLAC", "flac")
    soundfile.write(buffer, samples[: int(MAX_SECONDS * rate)], rate, format=kind)
    return f"data:audio/{media};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _audio(folder: Path, names: Sequence[str]) -> dict[str, str]:
    speech_set = SpeechSet.open(folder)
    wanted = set(names)
    found = speech_set.read([place for place in range(len(speech_set)) if speech_set.id(place) in wanted])
    speech_set.close()
    return {
        each.id: encoded(each.samples, speech_set.sampling_rate)
        for each in found
        if not isinstance(each.samples, DataError)
    }


def _word(word: str) -> str:
    return "" if word == NOTHING else word
