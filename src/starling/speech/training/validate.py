"""Scores the validation set during training, keeps the best model, and diagnoses models that do not work.

    exp/<name>/validation/step-00001234/    a consensus model from the end of an epoch, to be scored
    exp/<name>/best/step-00001234/          the model that scored best so far, and score.json

Learners write a model only if `validation/` is empty. The launcher empties the folder when it is ready for another
model.
"""

import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from starling.budget import Progress as Spent
from starling.checkpoint.files import Manifest, partial_folder, publish, read_manifest, remove, write_json
from starling.checkpoint.reader import Checkpoint, latest
from starling.errors import DataError, StarlingError
from starling.events import read_events
from starling.experiment.folder import SCORE, ExperimentFolder, best_model
from starling.experiment.task import Scoring
from starling.launch.messages import LearnerMessage, ModelSaved, Saved
from starling.reporting.epochs import Score, duration
from starling.reporting.metrics import Curves
from starling.reporting.progress import Say
from starling.speech.features import attempt
from starling.speech.recipe import Recipe
from starling.speech.recogniser import Recogniser, by_duration
from starling.speech.scoring import count_errors
from starling.speech.store import Member, SpeechSets
from starling.speech.tokens import BLANK
from starling.speech.trained import recognised
from starling.speech.training.plan import open_training_set
from starling.speech.usable import frames_needed, kept_utterances, transcripts

_REST = 19.0
"""The pause after each scoring, as a multiple of the scoring's duration. Scoring thus takes at most a twentieth of the
time."""
_LONG_REST = 30.0
"""Seconds of a pause after a scoring above which the first such pause is reported."""
USELESS = 90.0
"""Word error rate, in per cent, above which a recogniser is considered not to work."""
_TOO_EARLY = 0.1
"""Fraction of the budget before which a recogniser's failure is not reported."""
_HALF = 0.5
"""Fraction of the budget before which a lack of time is not reported as the cause of a failure."""
_TOO_LITTLE_TIME = "too little time"
_LOOKED_AT, _COUNTED = 32, 2000
"""Number of utterances of a set that are recognised, and whose tokens are counted, to find the cause of a failure."""
_MANY, _MUCH = 0.25, 0.05
"""Fraction of utterances or gradients with a fault above which the fault is not attributed to chance."""
_TIGHT = 0.9
"""Fraction of an utterance's frames that its tokens need, above which hardly any frames are left for blanks."""
_SILENT = 1e-3
"""Standard deviation, relative to full scale, below which a recording is almost silent (-60 dB)."""
_LEARNT, _STUCK = 50.0, 0.9
"""Word error rate below which the training data have been learnt. Also the loss, relative to that of a model that
ignores the audio, above which nothing has been learnt."""
_CARRIED = 0.3
"""Minimum fraction of the decrease in loss that must carry over to other recordings. A smaller fraction indicates a
fault."""
_WORSE = 1.2
"""Loss, relative to that of a model that ignores the audio, above which the learning rate is considered the cause."""
_MOST_SAID = 200  # maximum number of characters of an unexpected error that are reported
_LONG = 3000
"""Number of mini-batches within which training leaves the plateau of blank outputs, if it leaves it at all."""


class Validation(Scoring, AbstractContextManager["Validation"]):
    """A context manager that scores models in a background thread, one at a time, and keeps the best model.

    Training never waits for validation, and an error in validation does not end training. A model that arrives while
    another model is being scored is skipped, unless it is the final model. A model that cannot be read is also skipped.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: ExperimentFolder,
        say: Say,
        on_score: Callable[[Score], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recipe = recipe
        self._folder = folder
        self._say = say
        self._on_score = on_score
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="starling-validation")
        self._under_way: Future[None] | None = None
        self._is_over = threading.Event()
        self._best = _score_of(best_model(folder), "wer")
        self._best_epochs = _score_of(best_model(folder), "epochs") or 0.0
        self._newest_epochs = 0.0
        self._has_told = self._has_rested = False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._is_over.set()
        self._thread.shutdown(wait=error is None, cancel_futures=error is not None)
        shutil.rmtree(self._folder.validation, ignore_errors=True)

    def hear(self, message: LearnerMessage) -> None:
        """Score a model if the message says that it was saved."""
        if isinstance(message, Saved) and message.moment != "barrier":
            self.saved(Path(message.folder), is_last=message.moment == "end")
        if isinstance(message, ModelSaved):
            self.saved(Path(message.folder))

    def is_enough(self) -> bool:
        """Whether the error rate has not fallen for as many epochs as the recipe's `patience` allows. An error rate of
        100 % or more, with which training begins, may persist for longer."""
        patience = self._recipe.patience
        if patience is None or self._best is None or self._best >= 100.0:
            return False
        return self._newest_epochs - self._best_epochs >= patience

    def saved(self, folder: Path, is_last: bool = False) -> None:
        """Score a new checkpoint or model if no model is being scored, or if this is the final model (`is_last`)."""
        every = self._recipe.validate_every
        if every is None or self._recipe.data.valid is None:
            return
        if is_last or self._under_way is None or self._under_way.done():
            every = 1 if is_last else every  # the final model is always scored
            self._under_way = self._thread.submit(self._take, folder, every, self._recipe.data.valid)
        else:
            self._discard(folder)

    def _take(self, folder: Path, every: int, name: str) -> None:
        began = self._clock()
        try:
            self._score(folder, every, name)
        except (StarlingError, OSError) as error:
            why = error if folder.exists() else "newer checkpoints replaced it before it could be scored"
            self._say(f"validation of {folder.name} was skipped: {why}")
        finally:
            seconds = self._clock() - began
            if (rest := _REST * seconds) > _LONG_REST and not self._has_rested and not self._is_over.is_set():
                self._has_rested = True
                self._say(f"scoring {name} took {duration(seconds)}, so it is not scored for the next {duration(rest)}")
            self._is_over.wait(rest)
            self._discard(folder)

    def _discard(self, folder: Path) -> None:
        """Remove a model from `validation/`, so that learners write the next one. Checkpoints are kept."""
        if folder.parent.name == self._folder.validation.name:
            with suppress(OSError):
                remove(folder)

    def _score(self, folder: Path, every: int, name: str) -> None:
        torch.set_num_threads(1)
        checkpoint = Checkpoint(folder, read_manifest(folder))
        epochs, steps = checkpoint.manifest.epochs_ended, checkpoint.manifest.position.num_done
        if epochs is not None and epochs % every != 0:  # None: the budget was spent inside an epoch
            return
        recogniser = Recogniser.load(checkpoint.model_folder)
        result = recognised(recogniser, self._recipe.data.set_folder(name))
        curves = Curves(self._folder.tensorboard)
        curves.add("valid", {"valid/wer": result.wer, "valid/cer": result.cer}, steps)
        curves.close()
        self._newest_epochs = self._newest_epochs if epochs is None else float(epochs)
        if self._best is None or result.wer < self._best:
            self._best_epochs = self._newest_epochs
        if self._best is None or result.wer <= self._best:  # of two models with equal error rates, keep the later one
            self._best = result.wer
            self._keep(checkpoint, {"set": name, "wer": result.wer, "steps": steps, "epochs": epochs})
        rate = result.rate if self._recipe.patience is None else min(result.rate, self._best)  # then the best is scored
        verdict = verdict_on(self._recipe, self._folder, checkpoint.manifest, recogniser, name, rate)
        of_words, _, of_characters, *_ = result.lines()
        line = f"{of_words}, {of_characters}"
        self._on_score(Score(name, result.wer, result.cer, epochs, steps, line, verdict))
        if self.is_enough() and not self._has_told:
            self._has_told = True
            self._say(
                f"no lower error on {name} since epoch {self._best_epochs:g}: training ends; the best model is scored"
            )

    def _keep(self, checkpoint: Checkpoint, scored: dict[str, Any]) -> None:
        """Make this model the best one."""
        final = self._folder.best / checkpoint.folder.name
        if final.exists():
            return
        partial = partial_folder(final)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(checkpoint.model_folder, partial)
        write_json(partial / SCORE, scored)
        publish(partial, final)
        for other in self._folder.best.glob("step-*"):
            if other != final:
                remove(other)


def _score_of(model: Path | None, key: str) -> float | None:
    """A value of the best model's score, such as its word error rate or its epochs; None if there is no such value or
    it cannot be read."""
    try:
        return None if model is None else float(json.loads((model / SCORE).read_text(encoding="utf-8"))[key])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Looked:
    """Properties of a sample of a set, and of a recogniser's output for it."""

    size: int
    silent: Sequence[str]
    """The ids of the utterances that are almost silent."""
    wer: float
    """Word error rate in per cent."""
    is_empty: bool
    """Whether all texts are empty."""
    ratio: float | None
    """The median over utterances of the CTC loss relative to that of a model that ignores the audio; None without
    CTC."""


def verdict_on_test(recipe: Recipe, folder: ExperimentFolder, rates: Mapping[str, float]) -> str | None:
    """The verdict on the newest model, judged by the test set with the lowest error rate; None if there is no
    verdict."""
    if not rates:
        return None
    if (rate := min(rates.values())) <= USELESS:
        return ""
    name = next(each for each in rates if rates[each] == rate)
    try:
        newest = latest(folder.path)
        checkpoint = Checkpoint(newest, read_manifest(newest))
        recogniser = Recogniser.load(checkpoint.model_folder)
    except (StarlingError, OSError):
        return None
    return verdict_on(recipe, folder, checkpoint.manifest, recogniser, name, rate)


def verdict_on(
    recipe: Recipe, folder: ExperimentFolder, manifest: Manifest, recogniser: Recogniser, name: str, rate: float
) -> str:
    """Return why the recogniser of a checkpoint does not work, and the remedy, judged by its error rate on the set
    `name`. The text is empty if the recogniser works, if less than a tenth of the budget has been spent, or if less
    than half of it has been spent and the likeliest cause is a lack of time."""
    steps, epochs = manifest.position.num_done, manifest.epochs_ended or manifest.next_ticket.epoch
    spent = recipe.budget.fraction(Spent(steps, epochs, manifest.minutes))
    if rate <= USELESS or spent < _TOO_EARLY:
        return ""
    what = f"an error rate of {rate:.1f} %"
    try:
        whole = train = open_training_set(recipe)
        if recipe.loss == "ctc":
            train = kept_utterances(whole, folder.too_short)
        held_out = look(recogniser, SpeechSets([Member(name, recipe.data.set_folder(name))]))
        own = look(recogniser, train)
        if held_out.is_empty and rate == 100.0:
            what = "its output is empty"
        found = (
            _not_finite(recipe, folder)
            or _too_few_frames(recipe, recogniser, whole)
            or _silent(own, train.name)
            or _silent(held_out, name)
            or _learning_rate(recipe, folder, train, own)
        )
        cause, remedy = found or likeliest_cause(recipe, own, held_out, name, steps)
        if spent < _HALF and cause.startswith(_TOO_LITTLE_TIME):
            return ""
    except Exception as error:  # no error in the diagnosis may end the run or lose its scores
        said = " ".join(str(error).split())[:_MOST_SAID]
        cause, remedy = f"unknown, as looking for it failed ({type(error).__name__}: {said})", "`{check}`"
    so_far = f"after {epochs} epoch{'s' * (epochs != 1)}" if manifest.epochs_ended else f"in epoch {epochs + 1}"
    so_far += f" ({steps} mini-batches, {duration(60.0 * manifest.minutes)})"
    limits = ", ".join(f"{key} {value:g}" for key, value in recipe.budget.model_dump(exclude_none=True).items())
    return (
        f"the recogniser does not work: {what} on {name} {so_far}, {spent:.0%} of the budget ({limits}); "
        f"likeliest cause: {cause}; remedy: {remedy.format(check=f'starling check {folder.config}')}"
    )


def look(recogniser: Recogniser, utterances: SpeechSets) -> Looked:
    """Examine utterances that are evenly spread over a set, and a recogniser's outputs for them."""
    sample = utterances.only(np.unique(np.linspace(0, len(utterances) - 1, _LOOKED_AT).astype(np.int64)))
    texts, references, silent = dict[str, str](), dict[str, str](), list[str]()
    tokens, heard_rows = list[Tensor](), list[Tensor]()
    for places in by_duration(sample.durations, 60.0):
        tried = [(each, attempt(recogniser.features.checked, each.samples, each.id)) for each in sample.read(places)]
        good = [(each, waveform) for each, waveform in tried if not isinstance(waveform, DataError)]
        if not good:
            continue
        heard = recogniser.listen([waveform for _, waveform in good])
        for (each, waveform), text, row in zip(good, recogniser.texts(heard), heard.rows, strict=True):
            references[each.id], texts[each.id] = each.text, text
            if float(waveform.std()) < _SILENT:
                silent.append(each.id)
            encoded = attempt(recogniser.tokenizer.encode, each.text, each.id)
            if recogniser.states is None and not isinstance(encoded, DataError) and encoded:
                tokens.append(torch.tensor(encoded))
                heard_rows.append(torch.from_numpy(row))
    return Looked(
        size=len(texts),
        silent=silent,
        wer=count_errors(references, texts)[0].rate,
        is_empty=not any(texts.values()),
        ratio=_ratio(heard_rows, tokens),
    )


def _ratio(rows: Sequence[Tensor], tokens: Sequence[Tensor]) -> float | None:
    """The median over utterances of their CTC loss relative to the loss of outputs `[V]` that are equal in all frames:
    the frequencies of tokens and blanks."""
    if not rows:
        return None
    counts = torch.bincount(torch.cat(list(tokens)), minlength=rows[0].shape[1]).double()
    counts[BLANK] = max(1.0, sum(map(len, rows)) - float(counts.sum()))
    constant = (counts / counts.sum()).clamp_min(1e-9).log()
    ratios = []
    for row, spoken in zip(rows, tokens, strict=True):
        if len(row) < frames_needed(spoken.tolist()):
            continue
        both = torch.stack([row.double(), constant.expand_as(row)], 1)
        lengths = torch.tensor([len(row)] * 2), torch.tensor([len(spoken)] * 2)
        loss, chance = F.ctc_loss(both, spoken.expand(2, -1), *lengths, blank=BLANK, reduction="none").tolist()
        if math.isfinite(loss):
            ratios.append(loss / chance)
    return median(ratios) if ratios else None


def _not_finite(recipe: Recipe, folder: ExperimentFolder) -> tuple[str, str] | None:
    """The cause and the remedy if more than `_MUCH` of the newest run's gradients were not finite."""
    events = read_events(folder.log / "events.jsonl")
    starts = [place for place, each in enumerate(events) if each["kind"] == "start"]
    epochs = [each for each in events[max(starts, default=0) :] if each["kind"] == "epoch"]
    own = [learner for each in epochs for learner in each["learners"].values()]
    bad, total = (sum(each[key] for each in own) for key in ("not_finite", "steps"))
    if bad <= _MUCH * total:
        return None
    return (
        f"{bad} of {total} gradients were not finite (NaN or infinity) and were left out",
        f"lower optimizer.lr (now {recipe.optimizer.lr:g})"
        + (", set engine.autocast=none" if recipe.engine.autocast != "none" else "")
        + ", and look for broken recordings with `{check}`",
    )


def _too_few_frames(recipe: Recipe, recogniser: Recogniser, train: SpeechSets) -> tuple[str, str] | None:
    """The cause and the remedy if many transcripts need nearly all of their encoder frames, or more."""
    if recipe.loss != "ctc":
        return None
    chosen = train.only(np.unique(np.linspace(0, len(train) - 1, _COUNTED).astype(np.int64)))
    tight, features = 0, recogniser.features
    for name, text, seconds in transcripts(chosen):
        frames = recipe.model.encoder_frames(features.num_frames(round(seconds * features.sampling_rate)))
        tokens = attempt(recogniser.tokenizer.encode, text, name)
        tight += not isinstance(tokens, DataError) and frames_needed(tokens) > _TIGHT * frames
    if tight < _MANY * len(chosen):
        return None
    return (
        f"the encoder has too few frames for the tokens: {tight} of {len(chosen)} utterances of {train.name} need more "
        f"than {_TIGHT:.0%} of their frames, one every {1000 * recogniser.output_seconds:.0f} ms",
        f"lower model.subsampling (now {recipe.model.subsampling}), or use longer tokens (tokens.kind=sentencepiece)",
    )


def _silent(looked: Looked, name: str) -> tuple[str, str] | None:
    """The cause and the remedy if many recordings of a set are almost silent."""
    if not looked.silent or len(looked.silent) < _MANY * looked.size:
        return None
    return (
        f"{len(looked.silent)} of {looked.size} recordings of {name} are almost silent (below "
        f"{20 * math.log10(_SILENT):.0f} dB), such as {looked.silent[0]}",
        "listen to them, and record or export them again; `{check}` lists all",
    )


def _learning_rate(recipe: Recipe, folder: ExperimentFolder, train: SpeechSets, own: Looked) -> tuple[str, str] | None:
    """The cause and the remedy if the loss is well above that of a model that ignores the audio."""
    before = look(Recogniser.load(folder.initial), train).ratio if (own.ratio or 0.0) > _WORSE else None
    if own.ratio is None or before is None:
        return None
    losses = (
        f"the loss, relative to that of a model that hears nothing, was {before:.0%} at first and is {own.ratio:.0%}"
    )
    if own.ratio > before:
        return f"the learning rate is too high: {losses}", f"lower optimizer.lr (now {recipe.optimizer.lr:g})"
    return (
        f"{_TOO_LITTLE_TIME}, or too low a learning rate: {losses}",
        f"a larger budget, or a higher optimizer.lr (now {recipe.optimizer.lr:g})",
    )


def _carries_over(own: Looked, held_out: Looked) -> bool:
    """Whether the losses indicate that what was learnt from the training set carries over to another set."""
    if own.ratio is None or held_out.ratio is None:
        return True
    return 1.0 - held_out.ratio > _CARRIED * (1.0 - own.ratio)


def likeliest_cause(recipe: Recipe, own: Looked, held_out: Looked, name: str, steps: int) -> tuple[str, str]:
    """The likeliest cause and its remedy, from the model's performance on the training set (`own`) and on the set
    `name`."""
    rate, ratio = f"optimizer.lr (now {recipe.optimizer.lr:g})", own.ratio
    is_stuck = own.wer > USELESS if ratio is None else ratio >= _STUCK
    carries_over = _carries_over(own, held_out)
    told = "" if ratio is None else f" (its loss is {ratio:.0%} of that of a model that hears nothing)"
    check = "look for wrong transcripts with `{check}`"
    if own.wer < _LEARNT or (own.wer <= USELESS and not is_stuck and not carries_over):
        return (
            f"what was learnt from the training data (WER {own.wer:.0f} %){told} does not carry over to {name}: "
            "transcripts do not belong to their recordings, or the sets differ greatly in speakers and recordings",
            f"{check}; if they are right, train on more, or more similar, recordings",
        )
    if is_stuck and steps >= _LONG:
        return (
            f"nothing was learnt from the training data in {steps} mini-batches{told}: transcripts do not belong to "
            "their recordings, or the learning rate does not fit",
            f"{check}; if they are right, change {rate}",
        )
    longer = "a larger budget"
    if is_stuck:
        is_plateau = own.is_empty and ratio is not None
        where = "is still on the plateau of blanks with which CTC begins" if is_plateau else "has hardly begun"
        return f"{_TOO_LITTLE_TIME}: training {where}{told}", f"{longer}, or a higher or lower {rate}"
    learnt = "the training data are learnt, but slowly"
    if own.wer > USELESS:
        learnt = "the loss is falling, but nothing is recognised yet, not even in the training data"
    return (
        f"{_TOO_LITTLE_TIME}: {learnt}, WER {own.wer:.0f} % there{told}",
        f"{longer}; if more time does not help, {check}",
    )
