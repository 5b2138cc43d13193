"""Scores sets and transcribes files with the newest or the best model of an experiment."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from rich.console import Console

from starling.checkpoint.reader import latest, load
from starling.errors import CheckpointError, ConfigError, DataError, MissingExtraError, did_you_mean
from starling.extras import require
from starling.report.progress import Bars, Say
from starling.runs.beam_search import BestSearch, best_search
from starling.runs.cores import use_threads
from starling.runs.experiment.folder import ExperimentFolder, existing
from starling.runs.recipe.recipe import Recipe, load_resolved
from starling.runs.validate import best_model
from starling.speech.check.findings import seen_in_training
from starling.speech.codecs import Transmitted, check_codec, label_of
from starling.speech.corpora.audio import read_audio
from starling.speech.data import DataConfig, set_digest
from starling.speech.prepare import prepare
from starling.speech.recogniser import Recogniser
from starling.speech.scoring import line_of_unseen, without_tags, write_score_files
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
    conditions: Sequence[str] = (),
) -> None:
    """Score `sets` (None: the recipe's test sets), and pass each set's name and its score in Kaldi's format to `tell`.

    With `conditions`, which are codecs, the audio goes through each of them, and a set is scored as `test@telephone`.

    The model is the newest one, or with `is_best` the one that scored best on the validation set. Files that list every
    error go to the experiment's `decode` folder. `with_beam` adds the score of a beam search, by `jobs` processes, for
    a model with CTC (None: if the recipe has a section `decoding`). Raises CheckpointError if there is no model,
    ConfigError for a set that the recipe does not define.
    """
    folder, recipe = _open(experiment)
    names = list(sets or recipe.data.test)
    for name in names:
        _check_set(recipe, name)
    for codec in conditions:
        try:
            check_codec(codec)
        except ValueError as error:
            raise ConfigError(f"--condition: {error}") from error
    recogniser = load_recogniser(experiment, recipe, is_best)
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
        for name, condition in product(names, conditions or (None,)):
            _score_set(recipe, folder, recogniser, name, condition, search, tell, console)


def _score_set(
    recipe: Recipe,
    folder: ExperimentFolder,
    recogniser: Recogniser,
    name: str,
    codec: str | None,
    search: BestSearch | None,
    tell: Say,
    console: Console,
) -> None:
    """Score one set, through a codec if that is given, by greedy decoding or the words of tied states, and by `search`
    if there is one."""
    label = label_of(name, codec)
    with Bars(console) as bars:
        data = recipe.data.model_copy(update={"train": name, "valid": None, "test": ()})
        prepare(data, bars)
        speech_set = SpeechSet.open(recipe.data.set_folder(name))
        heard = speech_set if codec is None else Transmitted(speech_set, codec)
        progress = partial(bars, f"decoding {label}")
        if search is None:
            hypotheses = recogniser.recognise(heard, progress=progress)
        else:
            hypotheses = {}
            search.found.clear()
            for ids, log_probs, frames in recogniser.outputs(heard, progress=progress):
                hypotheses.update(zip(ids, recogniser.texts(log_probs, frames), strict=True))
                search.take(ids, log_probs, frames)
    references = {speech_set.id(index): speech_set.text(index) for index in range(len(speech_set))}
    dropped = _dropped(speech_set)
    searched = {} if search is None else search.texts
    tagged: list[str] = []
    if tags := recipe.data.tags:
        _, searched, _ = without_tags(references, searched, tags)
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


def load_recogniser(experiment: Path, recipe: Recipe, is_best: bool = False) -> Recogniser:
    """The newest consensus model of an experiment, or the best on the validation set, on the recipe's device. Raises
    CheckpointError if there is none."""
    use_threads(recipe, 1)
    best = best_model(ExperimentFolder(experiment))
    if is_best and best is None:
        raise CheckpointError(
            f"{experiment / 'best'}: no model was scored during training; set data.valid and train again, or use the "
            "newest model, without --best"
        )
    recogniser = Recogniser.load(best if is_best and best is not None else load(latest(experiment)).model_folder)
    if recipe.engine.device != "cpu" and torch.cuda.is_available():
        recogniser.model.to("cuda")
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
