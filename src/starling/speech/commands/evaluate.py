"""Scores sets with the newest or the best model of an experiment."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path

from rich.console import Console

from starling.errors import ConfigError, DataError, MissingExtraError, did_you_mean
from starling.experiment.folder import ExperimentFolder
from starling.extras import require
from starling.reporting.progress import Bars, Say
from starling.speech.check.findings import seen_in_training
from starling.speech.codecs import check_codec, label_of
from starling.speech.commands.beam_search import BestSearch, best_search
from starling.speech.commands.decoder_search import DecoderSearch, decoder_search
from starling.speech.commands.recognisers import load_recogniser, open_experiment
from starling.speech.data import DataConfig, set_digest
from starling.speech.prepare import prepare
from starling.speech.recipe import Recipe
from starling.speech.recogniser import Recogniser
from starling.speech.scoring.score import line_of_unseen, without_tags, write_score_files
from starling.speech.scoring.significance import in_words, matched_pairs
from starling.speech.store import SpeechSet


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
) -> None:
    """Score `sets` (None: the recipe's test sets), and pass each set's name and its score in Kaldi's format to `tell`.

    With `conditions`, which are codecs, the audio goes through each of them, and a set is scored as `test@telephone`.

    The model is that of `load_recogniser`. Files that list every
    error go to the experiment's `decode` folder. `with_beam` adds the scores of beam searches, by `jobs` processes, for
    a model with CTC (None: if the recipe has a section `decoding`). Raises CheckpointError if there is no model,
    ConfigError for a set that the recipe does not define.
    """
    folder, recipe = open_experiment(experiment)
    names = list(sets or recipe.data.test)
    for name in names:
        _check_set(recipe, name)
    for codec in conditions:
        try:
            check_codec(codec)
        except ValueError as error:
            raise ConfigError(f"--condition: {error}") from error
    recogniser = load_recogniser(experiment, recipe, is_best, average)
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
        beside: DecoderSearch | None = None
        if with_beam and recogniser.decoder is not None:
            with Bars(console) as bars:
                beside = decoder_search(recipe, recogniser, search, bars)
        for name, condition in product(names, conditions or (None,)):
            _score_set(recipe, folder, recogniser, name, condition, search, beside, tell, console)


def _score_set(
    recipe: Recipe,
    folder: ExperimentFolder,
    recogniser: Recogniser,
    name: str,
    codec: str | None,
    search: BestSearch | None,
    beside: DecoderSearch | None,
    tell: Say,
    console: Console,
) -> None:
    """Score one set, through a codec if that is given, by greedy decoding or the words of tied states, by `search` if
    there is one, and in the ways of a decoder if there is one (`beside`)."""
    label = label_of(name, codec)
    with Bars(console) as bars:
        data = recipe.data.model_copy(update={"train": name, "valid": None, "test": ()})
        prepare(data, bars)
        speech_set = SpeechSet.open(recipe.data.set_folder(name))
        progress = partial(bars, f"decoding {label}")
        hypotheses: dict[str, str] = {}
        if search is not None:
            search.found.clear()
        if beside is not None:
            beside.clear()
        for ids, heard in recogniser.heard(speech_set, progress=progress, codec=codec):
            hypotheses.update(zip(ids, recogniser.texts(*heard), strict=True))
            if search is not None:
                search.take(ids, heard.log_probs, heard.lengths)
            if beside is not None:
                beside.take(ids, heard)
    references = {speech_set.id(index): speech_set.text(index) for index in range(len(speech_set))}
    dropped = _dropped(speech_set)
    searched = {} if search is None else search.texts
    by_decoder = {} if beside is None else beside.texts
    tagged: list[str] = []
    if tags := recipe.data.tags:
        _, searched, _ = without_tags(references, searched, tags)
        by_decoder = {way: without_tags(references, texts, tags)[1] for way, texts in by_decoder.items()}
        references, hypotheses, line = without_tags(references, hypotheses, tags)
        tagged = [line]
    remarks = [*dropped, *tagged, *_unseen(recipe.data, name, references, hypotheses)]
    score = write_score_files(folder.decode, label, references, hypotheses, recipe.data.text, remarks)
    for line in (label, *score.lines(), *remarks):
        tell(line)
    if search is not None:
        beam = folder.decode / "beam"
        search.write(beam / f"nbest-{label}.jsonl")
        difference = f"greedy decoding - beam search: {in_words(matched_pairs(references, hypotheses, searched))}"
        remarks = [search.tuned.line, *dropped, *_unseen(recipe.data, name, references, searched), difference]
        score = write_score_files(beam, label, references, searched, recipe.data.text, remarks)
        for line in (f"{label}, {remarks[0]}", *score.lines(), *remarks[1:]):
            tell(line)
    for way, texts in by_decoder.items():
        title = "" if beside is None else beside.titles[way]
        remarks = [title, *dropped, *_unseen(recipe.data, name, references, texts)]
        score = write_score_files(folder.decode / way, label, references, texts, recipe.data.text, remarks)
        for line in (f"{label}, {remarks[0]}", *score.lines(), *remarks[1:]):
            tell(line)


def _check_set(recipe: Recipe, name: str) -> None:
    known = recipe.data.sets
    if name not in known:
        hint = did_you_mean(name, known)
        raise ConfigError(f"set {name!r} is not in data.corpus.sets; {hint}its sets: {', '.join(known)}")


def _dropped(speech_set: SpeechSet) -> list[str]:
    """A line about the utterances that preparation dropped, if there are any: they are not scored."""
    if not (count := speech_set.summary.dropped):
        return []
    listed = speech_set.folder / "dropped.tsv"
    return [f"{count} of {count + len(speech_set)} utterances were dropped in preparation and are not scored: {listed}"]


def _unseen(data: DataConfig, name: str, references: Mapping[str, str], hypotheses: Mapping[str, str]) -> list[str]:
    """A line with the score without near-duplicates of training utterances, if `starling check` has found some; or
    why that score is not available."""
    try:
        digests = set_digest(data, data.train), set_digest(data, name)
        seen = seen_in_training(data.folder, data.train, name, digests)
    except DataError as error:
        return [f"no score without near-duplicates of training: {error}"]
    line = line_of_unseen(references, hypotheses, seen or ())
    return [] if line is None else [line]
