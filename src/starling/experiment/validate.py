"""Scoring the valid set beside the training, so that people see the error rate fall."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from starling.checkpoint.manifest import read_manifest
from starling.checkpoint.reader import Checkpoint
from starling.errors import StarlingError
from starling.experiment.recipe import Recipe
from starling.report.curves import Curves
from starling.report.progress import Say
from starling.speech.recogniser import Recogniser
from starling.speech.scoring import score
from starling.speech.store import SpeechSet


class Validation:
    """Scores checkpoints in a thread of its own, one at a time, as a context manager.

    A checkpoint that comes while another is being scored is left out, and so is one that cannot be read any more:
    training never waits for validation, and never fails by it.
    """

    def __init__(self, recipe: Recipe, tensorboard: Path, say: Say) -> None:
        self._recipe = recipe
        self._tensorboard = tensorboard
        self._say = say
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="starling-validation")
        self._under_way: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=error is None, cancel_futures=True)

    def saved(self, folder: Path) -> None:
        """A checkpoint is there: score it if it is its turn and nothing else is being scored."""
        every = self._recipe.validate_every
        if every is None or self._recipe.data.valid is None:
            return
        if self._under_way is None or self._under_way.done():
            self._under_way = self._thread.submit(self._score, folder, every, self._recipe.data.valid)

    def _score(self, folder: Path, every: int, name: str) -> None:
        torch.set_num_threads(1)
        try:
            checkpoint = Checkpoint(folder, read_manifest(folder))
            epochs, steps = checkpoint.manifest.epochs_ended, checkpoint.manifest.standing.num_done
            if epochs is not None and epochs % every != 0:  # None: the budget ended in the middle of an epoch
                return
            recogniser = Recogniser.load(checkpoint.model_folder)
            speech_set = SpeechSet.open(self._recipe.data.set_folder(name))
            references = {speech_set.id(index): speech_set.text(index) for index in range(len(speech_set))}
            result = score(references, recogniser.recognise(speech_set))
        except StarlingError as error:
            self._say(f"validation of {folder.name} was left out: {error}")
            return
        trained = f"epoch {epochs}" if epochs is not None else f"{steps} steps"
        self._say(f"after {trained}, {name}: {result.lines()[0]}")
        curves = Curves(self._tensorboard / "valid")
        curves.word_error_rate(result.wer, steps)
        curves.close()
