"""Scores sets with the newest or the best model of an experiment.

exp/<name>/decode/             greedy texts (the decoder's, if there is one); with `loss: frames`, texts of the search
exp/<name>/decode/beam/        texts of the beam search with a language model, and its best hypotheses
exp/<name>/decode/ctc/         greedy texts of CTC, if the model also has a decoder
exp/<name>/decode/decoder/     texts of the decoder's beam search
exp/<name>/decode/rescored/    texts of the beam search over CTC, rescored with the attention decoder
exp/<name>/decode/boosted/     greedy texts with boosted phrases; decode/beam/boosted/ has those of the beam search
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from rich.console import Console

from starling.errors import ConfigError, DataError, MissingExtraError, did_you_mean, require
from starling.experiment.folder import ExperimentFolder
from starling.reporting.progress import Bars, Say
from starling.speech.augmentation import check_codec, label_of
from starling.speech.check.findings import seen_in_training
from starling.speech.commands.beam_search import BestSearch, best_search, first_text, tuning_sample, write_hypotheses
from starling.speech.data import DataConfig, set_digest
from starling.speech.decoding import DecodingConfig
from starling.speech.decoding.beam import Hypothesis
from starling.speech.decoding.decoders import Phrases, greedy_decode, read_phrases
from starling.speech.models.transformer import AttentionDecoder
from starling.speech.prepare import prepare
from starling.speech.recipe import Recipe
from starling.speech.recogniser import Heard, Recogniser
from starling.speech.scoring import (
    count_errors,
    lines_of_unseen,
    matched_pairs,
    references_of,
    without_tags,
    write_score_files,
)
from starling.speech.store import SpeechSet
from starling.speech.trained import load_recogniser, open_experiment

ATTENTION_WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
USUAL_ATTENTION = 1.0
"""Weight of the attention decoder if there is no set to tune it on."""


@dataclass(frozen=True)
class Way:
    """One decoding method whose texts are scored."""

    folder: str
    """The method's folder in `decode/`; empty for `decode/` itself."""
    title: str
    """The method's name in the output; empty for the first method."""
    texts: Callable[[Heard, Sequence[Sequence[Hypothesis]]], Iterable[str]]
    """A function that returns the texts of a batch of utterances. Its arguments are the network's outputs and the
    hypotheses of the beam search, if any."""


def evaluate(
    experiment: Path,
    sets: Sequence[str] | None,
    tell: Say,
    console: Console,
    is_best: bool = False,
    with_beam: bool | None = None,
    jobs: int = 1,
    conditions: Sequence[str] = (),
    average: int | None = None,
    boost: Path | None = None,
) -> dict[str, float]:
    """Score `sets` (by default the recipe's test sets), and pass each set's name and its score in Kaldi's format to
    `tell`. Returns the lowest error rate of each set, in per cent.

    `conditions` are names of codecs. The audio is passed through each codec, and the score is reported as that of, for
    example, `test@telephone`.

    `load_recogniser` selects the model. Files that list every error are written to the experiment's `decode` folder.
    `with_beam` adds the scores of beam searches, run in `jobs` processes, for a model with CTC; None adds them if the
    recipe has a `decoding` section. `boost`, a file of phrases, adds the scores of texts with boosted phrases. Raises
    CheckpointError if there is no model, ConfigError for a set that the recipe does not define, and DataError for
    phrases that cannot be used.
    """
    folder, recipe = open_experiment(experiment)
    names, known = list(sets or recipe.data.test), recipe.data.sets
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"set {name!r} is not in data.corpus.sets; {hint}its sets: {', '.join(known)}")
    for codec in conditions:
        try:
            check_codec(codec)
        except ValueError as error:
            raise ConfigError(f"--condition: {error}") from error
    phrases = None if boost is None else read_phrases(boost)
    recogniser = load_recogniser(experiment, is_best, average)
    if with_beam is None:
        with_beam = recipe.decoding is not None
    with ExitStack() as stack:
        search: BestSearch | None = None
        if with_beam and recipe.loss == "ctc":
            try:
                require("decoding", "the beam search", ("flashlight",))
                with Bars(console) as bars:
                    search = stack.enter_context(best_search(recipe, folder, recogniser, bars, jobs))
            except (MissingExtraError, DataError) as error:
                if recipe.decoding is not None and isinstance(error, DataError):
                    raise
                tell(f"only greedy decoding: {error}" if recogniser.decoder is None else f"no language model: {error}")
        evaluation = _Evaluation(recipe, folder, recogniser, search, tell, console)
        ways = list(evaluation.ways(with_beam))
        if phrases is not None:
            ways += evaluation.boosted(phrases, f"--boost {boost}")
        scored = product(names, conditions or (None,))
        return {label_of(*each): evaluation.score(*each, ways) for each in scored}


@dataclass(frozen=True)
class _Evaluation:
    """Scores sets with a recogniser of an experiment, and optionally with a beam search."""

    recipe: Recipe
    folder: ExperimentFolder
    recogniser: Recogniser
    search: BestSearch | None
    tell: Say
    console: Console

    def ways(self, with_beam: bool) -> Iterator[Way]:
        """Yield the decoding methods. If the model has a decoder in addition to CTC, the first method's greedy texts
        are the decoder's."""
        recogniser, config = self.recogniser, self.recipe.decoding or DecodingConfig()
        yield Way("", "", lambda heard, found: recogniser.texts(heard))
        if self.search is not None:
            yield Way("beam", self.search.tuned.line, lambda heard, found: map(first_text, found))
        if not with_beam or recogniser.decoder is None:
            return
        has_attention, tokenizer = isinstance(recogniser.decoder, AttentionDecoder), recogniser.tokenizer
        yield Way("ctc", "greedy CTC", lambda heard, found: greedy_decode(heard.log_probs, heard.lengths, tokenizer))
        yield Way(
            "decoder",
            f"beam search of the {'attention' if has_attention else 'transducer'} decoder, beam {config.decoder_beam}",
            lambda heard, found: recogniser.searched(heard, config.decoder_beam),
        )
        if self.search is not None and has_attention:
            weight, how = self._attention_weight(config, self.search)
            yield Way(
                "rescored",
                f"N-best of the beam search, rescored by attention with weight {weight:g}; {how}",
                lambda heard, found: [_chosen(*each, weight) for each in _rated(recogniser, heard, found)],
            )

    def boosted(self, phrases: Sequence[str], source: str) -> Iterator[Way]:
        """Yield greedy decoding and the beam search, each with boosted phrases. If there is a beam search and
        the model has a decoder, greedy decoding is left out, because the greedy texts are then not CTC's."""
        recogniser, search = self.recogniser, self.search
        if search is None or recogniser.decoder is None:
            boost = partial(_boosted, recogniser, recogniser.phrases(phrases, source), False)
            yield Way(
                "boosted", f"greedy decoding, {source}", lambda heard, found: boost(heard, recogniser.texts(heard))
            )
        if search is not None:
            boost_best = partial(_boosted, recogniser, recogniser.phrases(phrases, source, True), True)
            title = f"beam search, {source}"
            yield Way("beam/boosted", title, lambda heard, found: boost_best(heard, map(first_text, found)))

    def _attention_weight(self, config: DecodingConfig, search: BestSearch) -> tuple[float, str]:
        """The weight of the attention decoder's log-probability relative to the search's score, and a description of
        its origin. Unless the recipe sets the weight, it is tuned on the validation set: the smallest weight with the
        fewest word errors, then the fewest character errors, is chosen."""
        if config.attention_weight is not None:
            return config.attention_weight, "given"
        if (sample := tuning_sample(self.recipe)) is None:
            return USUAL_ATTENTION, "not tuned"
        texts: dict[float, dict[str, str]] = {weight: {} for weight in ATTENTION_WEIGHTS}
        with Bars(self.console) as bars:
            for names, heard in self.recogniser.heard(sample, progress=partial(bars, f"rescoring {sample.name}")):
                for utterance, each in zip(names, _rated(self.recogniser, heard, search(heard)), strict=True):
                    for weight, own in texts.items():
                        own[utterance] = _chosen(*each, weight)

        references = references_of(sample)

        def errors(weight: float) -> tuple[int, int, float]:
            words, characters = count_errors(references, texts[weight])
            return words.errors, characters.errors, weight

        return min(ATTENTION_WEIGHTS, key=errors), f"tuned on {len(sample)} utterances of {sample.name}"

    def score(self, name: str, codec: str | None, ways: Sequence[Way]) -> float:
        """Score one set with each decoding method in `ways`, after passing its audio through `codec` if one is given.
        Returns the lowest error rate."""
        label, data, rates = label_of(name, codec), self.recipe.data, list[float]()
        texts: dict[str, dict[str, str]] = {way.folder: {} for way in ways}
        best: dict[str, Sequence[Hypothesis]] = {}
        with Bars(self.console) as bars:
            prepare(data.model_copy(update={"train": name, "valid": None, "test": ()}), bars)
            speech_set, progress = SpeechSet.open(data.set_folder(name)), partial(bars, f"decoding {label}")
            for ids, heard in self.recogniser.heard(speech_set, progress=progress, codec=codec):
                found = [] if self.search is None else self.search(heard)
                best.update(zip(ids, found, strict=False))
                for way in ways:
                    texts[way.folder].update(zip(ids, way.texts(heard, found), strict=True))
        if self.search is not None:
            write_hypotheses(self.folder.decode / "beam" / f"nbest-{label}.jsonl", best)
        dropped, greedy = _dropped(speech_set), dict[str, str]()
        for way in ways:
            references, hypotheses, tagged = references_of(speech_set), texts[way.folder], list[str]()
            if data.tags:
                references, hypotheses, line = without_tags(references, hypotheses, data.tags)
                tagged = [line] * (not way.folder)
            remarks = [*dropped, *tagged, *_unseen(data, name, references, hypotheses)]
            if way.folder == "beam":
                verdict = matched_pairs(references, greedy, hypotheses).verdict
                remarks.append(f"greedy decoding - beam search: {verdict}")
            greedy = greedy or hypotheses
            written = [way.title, *remarks] if way.title else remarks
            home = self.folder.decode / way.folder
            score = write_score_files(home, label, references, hypotheses, data.text, written)
            for line in (", ".join([label, *written[: bool(way.title)]]), *score.lines(), *remarks):
                self.tell(line)
            rates.append(score.rate)
        return min(rates)


def _dropped(speech_set: SpeechSet) -> list[str]:
    """A line about the utterances that are not scored because preparation dropped them, if there are any."""
    if not (count := speech_set.summary.dropped):
        return []
    listed = speech_set.folder / "dropped.tsv"
    return [f"{count} of {count + len(speech_set)} utterances were dropped in preparation and are not scored: {listed}"]


def _unseen(data: DataConfig, name: str, references: Mapping[str, str], hypotheses: Mapping[str, str]) -> list[str]:
    """A line with the score without near-duplicates of training utterances, if `starling check` has found some, or with
    the reason why this score is not available."""
    try:
        digests = set_digest(data, data.train), set_digest(data, name)
        seen = seen_in_training(data.folder, data.train, name, digests)
    except DataError as error:
        return [f"no score without near-duplicates of training: {error}"]
    return lines_of_unseen(references, hypotheses, seen or ())


def _boosted(
    recogniser: Recogniser, phrases: Phrases, is_searched: bool, heard: Heard, texts: Iterable[str]
) -> list[str]:
    """The texts of a batch of utterances, with boosted phrases."""
    pairs = zip(heard.rows, texts, strict=True)
    return [recogniser.placed(row, text, is_searched, phrases)[0] for row, text in pairs]


def _rated(
    recogniser: Recogniser, heard: Heard, found: Sequence[Sequence[Hypothesis]]
) -> list[tuple[Sequence[Hypothesis], list[float]]]:
    """The hypotheses of a search for each utterance of a batch, with the attention decoder's log-probability of
    each."""
    scores = recogniser.attention_scores(heard, [[each.text for each in hypotheses] for hypotheses in found])
    return list(zip(found, scores, strict=True))


def _chosen(hypotheses: Sequence[Hypothesis], scores: Sequence[float], weight: float) -> str:
    """The text with the largest sum of the search's score and `weight` times the attention decoder's log-probability;
    empty if there is no hypothesis."""
    totals = [each.score + weight * score for each, score in zip(hypotheses, scores, strict=True)]
    return hypotheses[totals.index(max(totals))].text if totals else ""
