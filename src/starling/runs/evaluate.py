"""Scores sets and transcribes files with the newest or the best model of an experiment."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from rich.console import Console

from starling.checkpoint.reader import checkpoints_in, latest, load
from starling.errors import CheckpointError, ConfigError, DataError, MissingExtraError, did_you_mean
from starling.extras import require
from starling.report.progress import Bars, Say
from starling.runs.beam_search import BestSearch, best_search
from starling.runs.cores import use_threads
from starling.runs.experiment.folder import ExperimentFolder, existing
from starling.runs.recipe.recipe import Recipe, load_resolved
from starling.runs.validate import best_model
from starling.speech.check.findings import seen_in_training
from starling.speech.corpora.audio import read_audio
from starling.speech.data import DataConfig, set_digest
from starling.speech.prepare import prepare
from starling.speech.recogniser import Recogniser
from starling.speech.scoring import line_of_unseen, write_score_files
from starling.speech.significance import in_words, matched_pairs
from starling.speech.store import SpeechSet


def evaluate(
    experiment: Path,
    sets: Sequence[str] | None,
    tell: Say,
    console: Console,
    is_best: bool = False,
    with_beam: bool | None = None,
    jobs: int = 1,
    average: int | None = None,
) -> None:
    """Score `sets` (None: the recipe's test sets), and pass each set's name and its score in Kaldi's format to `tell`.

    The model is that of `load_recogniser`. Files that list every
    error go to the experiment's `decode` folder. `with_beam` adds the score of a beam search, by `jobs` processes, for
    a model with CTC (None: if the recipe has a section `decoding`). Raises CheckpointError if there is no model,
    ConfigError for a set that the recipe does not define.
    """
    folder, recipe = _open(experiment)
    names = list(sets or recipe.data.test)
    for name in names:
        _check_set(recipe, name)
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
                tell(f"only greedy decoding: {error}")
        for name in names:
            _score_set(recipe, folder, recogniser, name, search, tell, console)


def _score_set(
    recipe: Recipe,
    folder: ExperimentFolder,
    recogniser: Recogniser,
    name: str,
    search: BestSearch | None,
    tell: Say,
    console: Console,
) -> None:
    """Score one set by greedy decoding or the words of tied states, and by `search` if there is one."""
    with Bars(console) as bars:
        data = recipe.data.model_copy(update={"train": name, "valid": None, "test": ()})
        prepare(data, bars)
        speech_set = SpeechSet.open(recipe.data.set_folder(name))
        progress = partial(bars, f"decoding {name}")
        if search is None:
            hypotheses = recogniser.recognise(speech_set, progress=progress)
        else:
            hypotheses = {}
            search.found.clear()
            for ids, log_probs, frames in recogniser.outputs(speech_set, progress=progress):
                hypotheses.update(zip(ids, recogniser.texts(log_probs, frames), strict=True))
                search.take(ids, log_probs, frames)
    references = {speech_set.id(index): speech_set.text(index) for index in range(len(speech_set))}
    dropped = _dropped(speech_set)
    remarks = [*dropped, *_unseen(recipe.data, name, references, hypotheses)]
    score = write_score_files(folder.decode, name, references, hypotheses, recipe.data.text, remarks)
    for line in (name, *score.lines(), *remarks):
        tell(line)
    if search is not None:
        beam = folder.decode / "beam"
        search.write(beam / f"nbest-{name}.jsonl")
        difference = f"greedy decoding - beam search: {in_words(matched_pairs(references, hypotheses, search.texts))}"
        remarks = [search.tuned.line, *dropped, *_unseen(recipe.data, name, references, search.texts), difference]
        score = write_score_files(beam, name, references, search.texts, recipe.data.text, remarks)
        for line in (f"{name}, {remarks[0]}", *score.lines(), *remarks[1:]):
            tell(line)


def transcribe(experiment: Path, files: Sequence[Path], tell: Say, is_best: bool = False) -> None:
    """Pass a line for each file to `tell`: its name, a tab, and the text. Raises DataError for a file that is not
    audio."""
    _, recipe = _open(experiment)
    recogniser = load_recogniser(experiment, recipe, is_best)
    for file in files:
        samples, rate = _read_all_channels(file)
        try:
            text = recogniser.transcribe(samples, rate)
        except DataError as error:
            raise DataError(f"{file}: {error}") from error
        tell(f"{file}\t{text}")


def load_recogniser(experiment: Path, recipe: Recipe, is_best: bool = False, average: int | None = None) -> Recogniser:
    """The newest consensus model of an experiment, the mean of its `average` newest ones (None: the recipe's number),
    or the best on the validation set; on the recipe's device. Raises CheckpointError if there is none."""
    use_threads(recipe, 1)
    best = best_model(ExperimentFolder(experiment))
    if is_best and best is None:
        raise CheckpointError(
            f"{experiment / 'best'}: no model was scored during training; set data.valid and train again, or use the "
            "newest model, without --best"
        )
    if is_best and best is not None:
        recogniser = Recogniser.load(best)
    else:
        recogniser = _mean(experiment, recipe.average if average is None else average)
    if recipe.engine.device != "cpu" and torch.cuda.is_available():
        recogniser.model.to("cuda")
    return recogniser


def _mean(experiment: Path, number: int) -> Recogniser:
    """The recogniser whose weights are the mean of those of the newest checkpoints; of fewer, if there are fewer."""
    newest = latest(experiment)
    folders = [path for path in checkpoints_in(newest.parent) if path != newest][1 - number :] if number > 1 else []
    recogniser = Recogniser.load(load(newest).model_folder)
    state = recogniser.model.state_dict()
    others = [Recogniser.load(load(path).model_folder).model.state_dict() for path in folders]
    for name, values in state.items():
        if others and values.is_floating_point():
            values.copy_(torch.stack([values, *(other[name] for other in others)]).double().mean(0))
    return recogniser


def _open(experiment: Path) -> tuple[ExperimentFolder, Recipe]:
    folder = existing(experiment)
    return folder, load_resolved(folder.config)


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


def _read_all_channels(file: Path) -> tuple[NDArray[np.float32], int]:
    """Samples `[channels, T]` in [-1, 1], and their sampling rate in Hz."""
    first, rate = read_audio(file, channel=0)
    channels = int(soundfile.info(str(file)).channels)
    others = [read_audio(file, channel=channel)[0] for channel in range(1, channels)]
    return np.stack([first, *others]), rate
