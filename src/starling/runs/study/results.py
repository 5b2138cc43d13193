"""What the cells of a study found: one JSON file for each, and all of them by what was varied."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from starling.configuration import Config
from starling.errors import DataError
from starling.files import replace_file
from starling.runs.recipe.problems import describe
from starling.runs.study.arms import ARMS
from starling.runs.study.config import Cell

NOTHING_RECOGNISED = 100.0
"""The word error rate, in per cent, of a run whose numbers stopped being finite."""


class CellResult(Config):
    """The outcome of one cell."""

    cell: Cell
    digest: str
    """Of the recipe that was run."""
    diverged: bool
    """A loss or the weights stopped being finite; nothing was recognised then."""
    wer: float
    """Word error rate of the consensus model on the test sets, in per cent."""
    errors: int
    words: int
    loss: float | None
    """The mean training loss of the last tenth of the budget; None where none of it was trained on."""
    curve: tuple[tuple[float, float], ...]
    """Training loss against the share of the budget spent, each the mean of a part of the budget."""
    num_gradients: int
    """Mini-batches computed by all learners."""
    num_steps: int
    """Optimizer steps on the weights that count."""
    mean_staleness: float
    """Changes of the weights between reading them for a gradient and the gradient's step."""
    largest_staleness: int
    simulated_seconds: float
    cpu_seconds: float
    """Of training and scoring, on the machine that computed the cell."""


class ResultFolder:
    """One JSON file for each finished cell."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, result: CellResult) -> None:
        """Keep a result."""
        self.path.mkdir(parents=True, exist_ok=True)
        replace_file(self._file(result.cell), result.model_dump_json(indent=1))

    def read(self, cell: Cell, digest: str) -> CellResult | None:
        """The result of a cell if it was computed from a recipe with this digest.

        Raises DataError for a file that cannot be read.
        """
        file = self._file(cell)
        if not file.is_file():
            return None
        try:
            result = CellResult.model_validate_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reasons = describe(error, CellResult, {}) if isinstance(error, ValidationError) else [str(error)]
            reason = "; ".join(reasons)
            raise DataError(f"{file}: not the result of a cell ({reason}); remove it to compute it again") from error
        return result if result.digest == digest else None

    def _file(self, cell: Cell) -> Path:
        return self.path / f"{cell.name}.json"


Setting = tuple[str, str, float]
"""Model, optimizer and warm-up: what the arms are compared under."""


class Outcomes:
    """All results, by what was varied. Labels keep the order of the results."""

    def __init__(self, results: Sequence[CellResult]) -> None:
        self.results = results
        cells = [result.cell for result in results]
        self.models = list(dict.fromkeys(cell.model for cell in cells))
        self.optimizers = list(dict.fromkeys(cell.optimizer for cell in cells))
        self.warmups = sorted({cell.warmup for cell in cells})
        self.arms = [arm for arm in ARMS if any(cell.arm == arm for cell in cells)]
        numbers = {cell.workers for cell in cells if cell.workers is not None}
        self.workers: list[int | None] = [*sorted(numbers)] or [None]

    @property
    def settings(self) -> list[Setting]:
        """Every model with every optimizer and warm-up."""
        return [
            (model, optimizer, warmup)
            for model in self.models
            for optimizer in self.optimizers
            for warmup in self.warmups
        ]

    def of(self, setting: Setting, arm: str, workers: int | None) -> list[CellResult]:
        """One result for each seed; `workers` does not matter to an arm that does not depend on it."""
        wanted = (*setting, arm, workers if ARMS[arm].depends else None)
        return [
            result
            for result in self.results
            for cell in [result.cell]
            if (cell.model, cell.optimizer, cell.warmup, cell.arm, cell.workers) == wanted
        ]
