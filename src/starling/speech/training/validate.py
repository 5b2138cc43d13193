"""Scores the validation set during training, and keeps the best model.

    exp/<name>/validation/step-00001234/    a consensus model from the end of an epoch, to be scored
    exp/<name>/best/step-00001234/          the model that scored best so far, and score.json

Learners write a model only if `validation/` is empty. The launcher empties it when it is ready for the next one.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch

from starling.checkpoint.files import partial_folder, publish, remove, write_json
from starling.checkpoint.manifest import read_manifest
from starling.checkpoint.reader import Checkpoint
from starling.errors import StarlingError
from starling.experiment.folder import SCORE, ExperimentFolder, best_model
from starling.experiment.task import Scoring
from starling.launch.messages import LearnerMessage, ModelSaved, Saved
from starling.reporting.curves import Curves
from starling.reporting.epochs import Score
from starling.reporting.progress import Say
from starling.speech.recipe import Recipe
from starling.speech.recogniser import Recogniser
from starling.speech.trained import recognised

_REST = 19.0
"""The pause after each scoring, as a multiple of its duration: scoring takes at most a twentieth of the time."""


class Validation(Scoring, AbstractContextManager["Validation"]):
    """Scores models in a background thread, one at a time, and keeps the best. A context manager.

    Training never waits for validation, and an error in validation does not end it. A model that arrives while another
    one is being scored is skipped, unless it is the final one; so is one that cannot be read.
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
        self._has_told = False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._is_over.set()
        self._thread.shutdown(wait=error is None, cancel_futures=error is not None)
        shutil.rmtree(self._folder.validation, ignore_errors=True)

    def hear(self, message: LearnerMessage) -> None:
        """Score the model of a message that says that one was saved."""
        if isinstance(message, Saved) and message.moment != "barrier":
            self.saved(Path(message.folder), is_last=message.moment == "end")
        if isinstance(message, ModelSaved):
            self.saved(Path(message.folder))

    def is_enough(self) -> bool:
        """Whether the error has not fallen for as many epochs as the recipe's `patience` allows. An error of 100 % or
        more, with which training begins, may stay for longer."""
        patience = self._recipe.patience
        if patience is None or self._best is None or self._best >= 100.0:
            return False
        return self._newest_epochs - self._best_epochs >= patience

    def saved(self, folder: Path, is_last: bool = False) -> None:
        """Score a new checkpoint or model if none is being scored, or if it is the final one (`is_last`)."""
        every = self._recipe.validate_every
        if every is None or self._recipe.data.valid is None:
            return
        if is_last or self._under_way is None or self._under_way.done():
            self._under_way = self._thread.submit(self._take, folder, every, self._recipe.data.valid)
        else:
            self._discard(folder)

    def _take(self, folder: Path, every: int, name: str) -> None:
        began = self._clock()
        try:
            self._score(folder, every, name)
        except (StarlingError, OSError) as error:
            self._say(f"validation of {folder.name} was skipped: {error}")
        finally:
            self._is_over.wait(_REST * (self._clock() - began))
            self._discard(folder)

    def _discard(self, folder: Path) -> None:
        """Remove a model from `validation/`, so that learners write the next one; a checkpoint stays."""
        if folder.parent.name == self._folder.validation.name:
            with suppress(OSError):
                remove(folder)

    def _score(self, folder: Path, every: int, name: str) -> None:
        torch.set_num_threads(1)
        checkpoint = Checkpoint(folder, read_manifest(folder))
        epochs, steps = checkpoint.manifest.epochs_ended, checkpoint.manifest.position.num_done
        if epochs is not None and epochs % every != 0:  # None: the budget was spent inside an epoch
            return
        result = recognised(Recogniser.load(checkpoint.model_folder), self._recipe.data.set_folder(name))
        self._on_score(Score(name, result.wer, epochs, steps, result.lines()[0]))
        curves = Curves(self._folder.tensorboard)
        curves.add("valid", {"valid/wer": result.wer}, steps)
        curves.close()
        self._newest_epochs = self._newest_epochs if epochs is None else float(epochs)
        if self._best is None or result.wer < self._best:
            self._best_epochs = self._newest_epochs
        if self._best is None or result.wer <= self._best:  # of two equal models, keep the later one
            self._best = result.wer
            self._keep(checkpoint, {"set": name, "wer": result.wer, "steps": steps, "epochs": epochs})
        if self.is_enough() and not self._has_told:
            self._has_told = True
            self._say(
                f"no lower error on {name} since epoch {self._best_epochs:g}: training ends; the best model is scored"
            )

    def _keep(self, checkpoint: Checkpoint, scored: dict[str, Any]) -> None:
        """Replace the best model."""
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
    """The word error rate of the best model, or its epochs; None if there is none or it cannot be read."""
    try:
        return None if model is None else float(json.loads((model / SCORE).read_text(encoding="utf-8"))[key])
    except (OSError, ValueError, KeyError, TypeError):
        return None
