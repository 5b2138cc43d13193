"""What a cell found, and the folder where results wait for the rest of the study."""

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from starling.checkpoint.files import sync
from starling.configuration import Config
from starling.errors import DataError
from starling.runs.recipe.problems import describe
from starling.runs.study.grid import Cell, Setting

NOTHING_RECOGNISED = 100.0
"""The word error rate, in per cent, that a run counts with when its numbers stopped being finite."""


class CellResult(Config):
    """The outcome of one cell."""

    model: str
    optimizer: str
    warmup: float
    arm: str
    workers: int | None
    seed: int
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
    """Steps of the optimizer on the weights that count."""
    mean_staleness: float
    """Changes made to the weights between their being read for a gradient and the gradient's step."""
    largest_staleness: int
    simulated_seconds: float
    cpu_seconds: float
    """Of training and scoring, on the machine that computed it."""

    @property
    def cell(self) -> Cell:
        """Which run it was."""
        return Cell(Setting(self.model, self.optimizer, self.warmup), self.arm, self.workers, self.seed)


class ResultFolder:
    """One JSON file for each cell that is done."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, result: CellResult) -> None:
        """Keep a result: its file is there whole or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        final = self._file(result.cell)
        partial = final.with_name(f".{final.name}.partial")
        partial.write_text(result.model_dump_json(indent=1), encoding="utf-8")
        sync(partial)
        partial.replace(final)

    def read(self, cell: Cell, digest: str) -> CellResult | None:
        """The result of a cell, if one of this recipe is there.

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

    def read_all(self, cells: Iterable[tuple[Cell, str]]) -> list[CellResult]:
        """The results that are there, of cells with their digests."""
        found = (self.read(cell, digest) for cell, digest in cells)
        return [result for result in found if result is not None]

    def _file(self, cell: Cell) -> Path:
        return self.path / f"{cell.name}.json"
