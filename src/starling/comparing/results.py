"""What the cells of a comparison found: one JSON file for each."""

from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from starling.comparing.grid import Cell
from starling.configuration import Config
from starling.errors import DataError
from starling.files import replace_file
from starling.recipe.problems import describe

Seconds = float


class Metric(Config):
    """What arms are compared by."""

    name: str
    higher_is_better: bool = False
    all_right: float | None = None
    """Values at or beyond this say that everything is right, and nothing about which arm is better."""
    all_wrong: float | None = None
    """Values at or beyond this say that everything is wrong."""
    diverged: float | None = None
    """What a run counts whose numbers stopped being finite; None: it cannot be compared."""
    of_loss: bool = False
    """Whether it is the training loss, in place of what is scored."""
    beside: str = ""
    """With `of_loss`: the name of the score that is reported beside it."""

    def limit(self, value: float) -> str:
        """At which end of the scale a value is; empty inside."""
        sign = -1.0 if self.higher_is_better else 1.0
        if self.all_right is not None and sign * value <= sign * self.all_right:
            return "everything right"
        if self.all_wrong is not None and sign * value >= sign * self.all_wrong:
            return "everything wrong"
        return ""


class Point(NamedTuple):
    """The mean training loss of a part of the budget, at the part's middle."""

    share: float
    """Of the budget."""
    samples: float
    seconds: Seconds
    loss: float


class CellResult(Config):
    """The outcome of one cell. Fields that earlier versions wrote, and that are gone, are ignored."""

    model_config = Config.model_config | {"extra": "ignore"}

    cell: Cell
    digest: str
    """Of all that it depends on."""
    diverged: bool
    """A loss or the weights stopped being finite; nothing was scored then."""
    valid: float | None = None
    """The validation result: rates are chosen by it."""
    test: float | None = None
    """The test result. No choice depends on it."""
    errors: int | None = None
    """Words wrong in the test sets, of `words`."""
    words: int | None = None
    loss: float | None
    """The mean training loss of the last tenth of the budget; None where none of it was trained on."""
    curve: tuple[Point, ...]
    num_gradients: int
    """Mini-batches computed by all learners."""
    num_samples: float
    """Training examples in them."""
    seconds: Seconds
    """Of training: simulated, or real."""
    consensus_distance: float | None = None
    """(1/L) sum_l |w_l - mean|^2 at the end."""
    mean_staleness: float
    """Changes of the weights between reading them for a gradient and the gradient's step."""
    largest_staleness: int
    bytes_sent: int
    """By all learners."""
    computing: float
    """Shares of the time of the learners that compute, in per cent."""
    waiting_for_data: float
    waiting_for_peers: float
    cpu_seconds: Seconds
    """Of training and scoring, on the machine that computed the cell."""

    def when(self, target: float) -> Point | None:
        """Where the training loss first falls to a target, linear between points; None if it does not."""
        before: Point | None = None
        for point in self.curve:
            if point.loss <= target:
                if before is None:
                    return point
                part = (before.loss - target) / (before.loss - point.loss)
                return Point(*(a + part * (b - a) for a, b in zip(before, point, strict=True)))
            before = point
        return None


class ResultFolder:
    """One JSON file for each finished cell."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, result: CellResult) -> None:
        """Keep a result."""
        self.path.mkdir(parents=True, exist_ok=True)
        replace_file(self._file(result.cell), result.model_dump_json(indent=1))

    def read(self, cell: Cell, digest: str) -> CellResult | None:
        """The result of a cell, if all that it depends on has this digest.

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
