"""Scoring the valid set beside the training: people see the error rate fall, and the best model is kept.

    exp/<name>/validation/step-00001234/    what the consensus model of the end of an epoch is made from, to be scored
    exp/<name>/best/step-00001234/          the model that scored best so far, and score.json

Learners write a model for the launcher to score when `validation/` is empty; the launcher empties it when the next one
may come.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from starling.checkpoint.files import partial_folder, publish, remove, write_json
from starling.checkpoint.manifest import age, read_manifest
from starling.checkpoint.reader import Checkpoint
from starling.errors import StarlingError
from starling.report.curves import Curves
from starling.report.epochs import Score
from starling.report.progress import Say
from starling.runs.experiment.folder import ExperimentFolder
from starling.runs.recipe.recipe import Recipe
from starling.speech.recogniser import Recogniser
from starling.speech.scoring import score
from starling.speech.store import SpeechSet

_SCORE = "score.json"
_REST = 19.0
"""Times what a scoring took until the next one begins: scoring takes a twentieth of the time at most."""


def best_model(folder: ExperimentFolder) -> Path | None:
    """The folder of the model that scored best on the valid set; None if none was scored."""
    found = [path for path in folder.best.glob("step-*") if (path / _SCORE).is_file()]
    return max(found, key=lambda path: age(path.name) or (0, 0), default=None)


class Validation:
    """Scores models in a thread of its own, one at a time, as a context manager; keeps the best.

    A model that comes while another is being scored is left out, unless it is that of the end, and so is one that
    cannot be read any more: training never waits for validation, and never fails by it.
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
        self._best = _score_of(best_model(folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.shutdown(wait=error is None, cancel_futures=error is not None)
        shutil.rmtree(self._folder.validation, ignore_errors=True)

    def saved(self, folder: Path, is_last: bool = False) -> None:
        """A checkpoint, or a model to be scored, is there: score it if it is its turn and nothing else is scored."""
        every = self._recipe.validate_every
        if every is None or self._recipe.data.valid is None:
            return
        if is_last or self._under_way is None or self._under_way.done():
            self._under_way = self._thread.submit(self._take, folder, every, self._recipe.data.valid)
        else:
            self._let_go(folder)

    def _take(self, folder: Path, every: int, name: str) -> None:
        began = self._clock()
        try:
            self._score(folder, every, name)
        except (StarlingError, OSError) as error:
            self._say(f"validation of {folder.name} was left out: {error}")
        finally:
            self._is_over.wait(_REST * (self._clock() - began))
            self._let_go(folder)

    def _let_go(self, folder: Path) -> None:
        """Make room for the next model to be scored."""
        if folder.parent.name == self._folder.validation.name:
            with suppress(OSError):
                remove(folder)

    def _score(self, folder: Path, every: int, name: str) -> None:
        torch.set_num_threads(1)
        checkpoint = Checkpoint(folder, read_manifest(folder))
        epochs, steps = checkpoint.manifest.epochs_ended, checkpoint.manifest.position.num_done
        if epochs is not None and epochs % every != 0:  # None: the budget ended in the middle of an epoch
            return
        recogniser = Recogniser.load(checkpoint.model_folder)
        speech_set = SpeechSet.open(self._recipe.data.set_folder(name))
        references = {speech_set.id(index): speech_set.text(index) for index in range(len(speech_set))}
        result = score(references, recogniser.recognise(speech_set))
        self._on_score(Score(name, result.wer, epochs, steps, result.lines()[0]))
        curves = Curves(self._folder.tensorboard / "valid")
        curves.word_error_rate(result.wer, steps)
        curves.close()
        if self._best is None or result.wer <= self._best:  # of two that are alike, the one that has trained longer
            self._best = result.wer
            self._keep(checkpoint, {"set": name, "wer": result.wer, "steps": steps, "epochs": epochs})

    def _keep(self, checkpoint: Checkpoint, scored: dict[str, Any]) -> None:
        """Put a model in the place of the best one so far."""
        final = self._folder.best / checkpoint.folder.name
        if final.exists():
            return
        partial = partial_folder(final)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(checkpoint.model_folder, partial)
        write_json(partial / _SCORE, scored)
        publish(partial, final)
        for other in self._folder.best.glob("step-*"):
            if other != final:
                remove(other)


def _score_of(model: Path | None) -> float | None:
    """The word error rate of a model that was kept; None for one that cannot be read."""
    try:
        return None if model is None else float(json.loads((model / _SCORE).read_text(encoding="utf-8"))["wer"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
