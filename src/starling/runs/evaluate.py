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
from torch import Tensor

from starling.checkpoint.reader import checkpoints_in, latest, load
from starling.errors import CheckpointError, ConfigError, DataError, MissingExtraError, did_you_mean
from starling.extras import require
from starling.report.progress import Bars, Say
from starling.runs.beam_search import BestSearch, best_search
from starling.runs.cores import use_threads
from starling.runs.decoder_search import DecoderSearch, decoder_search
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
    average: int | None = None,
) -> None:
    """Score `sets` (None: the recipe's test sets), and pass each set's name and its score in Kaldi's format to `tell`.

    With `conditions`, which are codecs, the audio goes through each of them, and a set is scored as `test@telephone`.

    The model is that of `load_recogniser`. Files that list every
    error go to the experiment's `decode` folder. `with_beam` adds the scores of beam searches, by `jobs` processes, for
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
        audio = speech_set if codec is None else Transmitted(speech_set, codec)
        progress = partial(bars, f"decoding {label}")
        hypotheses: dict[str, str] = {}
        if search is not None:
            search.found.clear()
        if beside is not None:
            beside.clear()
        for ids, heard in recogniser.heard(audio, progress=progress):
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


def transcribe(
    experiment: Path,
    files: Sequence[Path],
    tell: Say,
    is_best: bool = False,
    with_beam: bool = False,
    console: Console | None = None,
) -> None:
    """Pass a line for each file to `tell`: its name, a tab, and the text, greedy or by the beam search that `evaluate`
    has tuned; without that it is tuned first.

    Raises DataError that names the files which are not audio, after the text of all others; and ConfigError for a beam
    search with a model that is not trained with CTC.
    """
    folder, recipe = _open(experiment)
    recogniser = load_recogniser(experiment, recipe, is_best)
    with ExitStack() as stack:
        search: BestSearch | None = None
        if with_beam:
            if recipe.loss != "ctc":
                raise ConfigError(f"{experiment}: the beam search is for CTC, but it was trained with {recipe.loss}")
            require("decoding", "the beam search", ("flashlight",))
            with Bars(console or Console(stderr=True)) as bars:
                search = stack.enter_context(best_search(recipe, folder, recogniser, bars))
        problems = []
        for file in files:
            try:
                features = recogniser.matrix(*_read_all_channels(file))
            except DataError as error:
                message = str(error)
                problems.append(message if str(file) in message else f"{file}: {message}")
                continue
            tell(f"{file}\t{_text(recogniser, features, search)}")
    if problems:
        several = f"{len(problems)} of {len(files)} files cannot be transcribed: " if len(files) > 1 else ""
        raise DataError(several + "; ".join(problems))


def _text(recogniser: Recogniser, features: Tensor, search: BestSearch | None) -> str:
    """The text of one recording's features `[T, F]`."""
    if search is None:
        return recogniser.texts(*recogniser.hear([features]))[0]
    search.take([""], *recogniser.log_probs([features]))
    return search.texts[""]


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
