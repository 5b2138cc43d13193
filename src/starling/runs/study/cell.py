"""One cell of a study: trained on the virtual engine, and scored."""

import math
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from starling.checkpoint.state import LearnerState
from starling.configuration import digest
from starling.consensus import consensus
from starling.engines.virtual.engine import VirtualEngine
from starling.errors import NonFiniteError
from starling.runs.experiment.folder import ExperimentFolder
from starling.runs.job import make_job
from starling.runs.recipe.recipe import Recipe
from starling.runs.study.config import Cell, result_digest
from starling.runs.study.memory import Memory, Remembered
from starling.runs.study.results import NOTHING_RECOGNISED, CellResult
from starling.runs.workload import SpeechWorkload
from starling.speech.recogniser import Recogniser
from starling.speech.scoring import score
from starling.speech.store import SpeechSet
from starling.training.flat import FlatModel
from starling.training.job import EpochReport, Silence, StepReport

CURVE_POINTS = 50
LAST = 0.9
"""The share of the budget after which losses count as the last ones."""


class Watcher(Silence):
    """An observer that keeps what a study reports of a run."""

    def __init__(self) -> None:
        self.staleness: Counter[int] = Counter()
        self.num_gradients = 0
        self.seconds = 0.0
        self._losses: list[tuple[float, float]] = []

    def on_step(self, report: StepReport) -> None:
        self.num_gradients += 1
        self.seconds = 60.0 * report.minutes
        if math.isfinite(report.loss):
            self._losses.append((report.fraction, report.loss))

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self.staleness += report.averaging.staleness

    @property
    def last_loss(self) -> float | None:
        """The mean of the last tenth of the budget."""
        last = [loss for share, loss in self._losses if share >= LAST]
        return sum(last) / len(last) if last else None

    def curve(self) -> tuple[tuple[float, float], ...]:
        """The mean loss of each fiftieth of the budget, at its middle."""
        parts: dict[int, list[float]] = {}
        for share, loss in self._losses:
            parts.setdefault(min(int(share * CURVE_POINTS), CURVE_POINTS - 1), []).append(loss)
        return tuple(((part + 0.5) / CURVE_POINTS, sum(own) / len(own)) for part, own in sorted(parts.items()))


def run_cell(recipe: Recipe, cell: Cell, ready: Path, memory: Memory) -> CellResult:
    """Train and score a cell; `ready` is the folder in which its model was set up.

    Numbers that stop being finite are a result: the cell is `diverged`.
    """
    torch.set_num_threads(recipe.engine.threads or 1)
    begin = time.process_time()
    folder = ExperimentFolder(ready)
    job = make_job(recipe, folder)
    job = replace(job, most_not_finite=1)
    if isinstance(job.workload, SpeechWorkload):  # frames are ready on the disk
        job = replace(job, workload=Remembered(job.workload, memory, _batches_key(recipe)))
    watcher = Watcher()
    engine = VirtualEngine(job, recipe.learners, recipe.cluster, watcher)
    try:
        outcome = engine.run()
        weights = consensus((state.weights for state in outcome.states), [state.kept for state in outcome.states])
        diverged, seconds = not bool(torch.isfinite(weights).all()), outcome.seconds
    except NonFiniteError:
        weights, diverged, seconds = torch.empty(0), True, watcher.seconds
    errors, words = (0, 0) if diverged else _score(recipe, folder, weights)
    return CellResult(
        cell=cell,
        digest=result_digest(recipe),
        diverged=diverged,
        wer=100.0 * errors / max(1, words) if not diverged else NOTHING_RECOGNISED,
        errors=errors,
        words=words,
        loss=watcher.last_loss,
        curve=watcher.curve(),
        num_gradients=watcher.num_gradients,
        num_steps=-(-watcher.num_gradients // cell.num_together),
        mean_staleness=mean_staleness(watcher.staleness),
        largest_staleness=max(watcher.staleness, default=0),
        simulated_seconds=seconds,
        cpu_seconds=time.process_time() - begin,
    )


def mean_staleness(staleness: Counter[int]) -> float:
    """Over all gradients counted; 0 without any."""
    total = staleness.total()
    return sum(value * count for value, count in staleness.items()) / total if total else 0.0


def _score(recipe: Recipe, folder: ExperimentFolder, weights: torch.Tensor) -> tuple[int, int]:
    """Errors and words of the test sets, with the model of the given weights `[P]`."""
    recogniser = Recogniser.load(folder.initial)
    FlatModel(recogniser.model, torch.device("cpu")).weights.copy_(weights)
    errors = words = 0
    for name in recipe.data.test:
        speech_set = SpeechSet.open(recipe.data.set_folder(name))
        references = {speech_set.id(index): speech_set.text(index) for index in range(len(speech_set))}
        counts = score(references, recogniser.recognise(speech_set)).words
        errors, words = errors + counts.errors, words + counts.reference
    return errors, words


def _batches_key(recipe: Recipe) -> str:
    """Equal for recipes whose mini-batches are equal."""
    sections = {"seed", "data", "mixture", "partition", "tokens", "features", "augment", "batches"}
    content = recipe.model_dump(mode="json", include=sections)
    content["parts"] = recipe.num_workers if recipe.partition != "identical" else 1
    content["too short for"] = recipe.model.shape.subsampling  # decides which utterances CTC leaves out
    return digest(content)
