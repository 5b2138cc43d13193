"""The `compare:` section of a recipe, with arms, numbers of learners, learning rates and seeds; the cells that these
form; and the result of each cell, which is in a separate JSON file.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from starling.configuration import Config, describe
from starling.errors import DataError, did_you_mean
from starling.files import replace_file
from starling.recipe import Tree
from starling.recipe.run import Learners, StrategyChoice

Seconds = float
_LABEL = r"[A-Za-z0-9][A-Za-z0-9.-]*"
Label = Annotated[str, Field(pattern=rf"^{_LABEL}$", max_length=30)]
"""A name that becomes part of a file's name, in which an underscore separates labels."""
ONE = "one"
"""Name of the arm, a lone learner, that is added as the baseline if none is named and no arm has one learner."""


def _listed(value: object) -> object:
    """The value as a list, if it is a single value where a list may stand."""
    return value if isinstance(value, list | tuple) else (value,)


def _rate(value: object) -> object:
    """A learning rate, or a multiple of the arm's own rate: `0.5x`."""
    if isinstance(value, str):
        if not re.fullmatch(r"\d*\.?\d+([eE][-+]?\d+)?x", value.strip()):
            raise ValueError(
                f"{value!r} is neither a learning rate such as 3e-3 nor a multiple of the arm's such as 2x"
            )
        return value.strip()
    return value


Rate = Annotated[Annotated[float, Field(ge=0.0)] | str, BeforeValidator(_rate)]
Counts = Annotated[tuple[Learners, ...], BeforeValidator(_listed), Field(min_length=1)]
Rates = Annotated[tuple[Rate, ...], BeforeValidator(_listed)]
Seeds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_listed), Field(min_length=1)]


def rate_of(rate: Rate, own: float) -> float:
    """Return the learning rate for which `rate` stands if the arm's own rate is `own`. The result has six digits, as in
    the name of a cell."""
    found = own * float(rate[:-1]) if isinstance(rate, str) else rate
    return float(f"{found:.6g}")


class Arm(BaseModel):
    """One way to train, which consists of a strategy and any other keys of the recipe that are changed."""

    model_config = ConfigDict(extra="allow", frozen=True, arbitrary_types_allowed=True)

    strategy: StrategyChoice | None = None
    """Strategy of the arm; None uses the recipe's."""
    summary: str = ""
    """Description of the arm, for the legend of the table."""
    learners: Counts | None = None
    """Numbers of learners of the arm; None uses those of the comparison."""
    rates: Rates | None = None
    """Learning rates of the arm; None uses those of the comparison."""
    seeds: Seeds | None = None
    """Seeds of the arm; None uses those of the comparison."""
    settings: Annotated[tuple[str, ...], BeforeValidator(_listed)] | None = None
    """Settings of the comparison in which the arm is compared; None means all."""

    @property
    def keys(self) -> Tree:
        """Keys that the arm changes besides the strategy."""
        return dict(self.model_extra or {})


@dataclass(frozen=True)
class Row:
    """One row of the table, which is one arm with one number of learners in one setting."""

    setting: str
    """Name of the setting; empty if the recipe has no settings."""
    arm: str
    learners: int

    def cell(self, rate: float, seed: int) -> "Cell":
        """Return one run of the row."""
        return Cell(setting=self.setting, arm=self.arm, learners=self.learners, rate=rate, seed=seed)


class Cell(Config):
    """One run, which is an arm in a setting with a number of learners, a learning rate and a seed."""

    setting: str = ""
    arm: str
    learners: int
    rate: float
    """Peak learning rate."""
    seed: int

    @property
    def row(self) -> Row:
        """The row to which the cell belongs."""
        return Row(self.setting, self.arm, self.learners)

    @property
    def name(self) -> str:
        """The name of the cell's file."""
        setting = f"{self.setting}_" if self.setting else ""
        rate = f"{self.rate:.6g}".replace("+", "")
        return f"{setting}{self.arm}_{self.learners}_lr{rate}_seed{self.seed}"


class CompareConfig(Config):
    """The `compare:` section: every arm in every setting, with each number of learners, learning rate and seed."""

    arms: dict[Label, Arm] = Field(min_length=1)
    """Arms that are compared, by name."""
    settings: dict[Label, Tree] = Field(default_factory=dict)
    """Keys of the recipe under which all arms are compared; arms of different settings are not compared."""
    learners: Counts = (4,)
    """Numbers of learners: one, or a list."""
    rates: Rates = ()
    """The grid over which each arm is tuned, as learning rates, or as multiples of the arm's own rate (`0.5x`). If it
    is empty, each arm uses its own rate."""
    bracket: bool = False
    """Whether a row's grid grows, by the factor between its last two rates, while its best rate lies at an end.

    An arm with one rate keeps it.
    """
    seeds: Seeds = (1, 2, 3)
    """Seeds of the initial weights, the order of the data and the times of the cluster."""
    tuning_seeds: int | None = Field(default=None, ge=1)
    """Number of seeds with which the best rate is chosen; the other seeds run only at that rate. None means all."""
    baseline: str | None = None
    """Arm with which the others are compared, at their number of learners if it has that number; None means a single
    learner."""
    by: Literal["score", "loss"] = "score"
    """Quantity by which rates are chosen and arms compared: the score, or the training loss of the last tenth of the
    budget. The loss shows effects on training for which scores are too coarse; scores are reported beside it."""
    target: float | None = None
    """Training loss to reach. The time and the number of samples until it is reached are measured, and speed-ups refer
    to these."""
    engine: Literal["virtual", "processes"] = "virtual"
    """Engine of the cells: simulated learners, or processes on this machine, one cell at a time."""
    jobs: int = Field(default=1, ge=1, le=256)
    """Number of processes that compute simulated cells simultaneously. Results do not depend on this number."""

    @field_validator("learners", "rates", "seeds")
    @classmethod
    def _each_once(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        twice = sorted({str(value) for value in values if values.count(value) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} given twice; list each once")
        return values

    @model_validator(mode="after")
    def _makes_sense(self) -> "CompareConfig":
        if self.baseline is not None and self.baseline not in self.arms:
            hint = did_you_mean(self.baseline, self.arms)
            raise ValueError(f"baseline: {self.baseline!r} is no arm; {hint}arms are {', '.join(self.arms)}")
        for label, arm in self.arms.items():
            if unknown := sorted(set(arm.settings or ()) - self.settings.keys()):
                raise ValueError(
                    f"arms.{label}.settings: {unknown[0]!r} is none of {', '.join(self.settings) or 'none'}"
                )
        if fixed := [name for name, keys in self.settings.items() if "learners" in keys]:
            raise ValueError(
                f"settings.{fixed[0]}.learners: has no effect, because arms are compared with each number in "
                "compare.learners; list it there, or give an arm its own"
            )
        if (base := self._base) in self.arms and self.arms[base].settings is not None:
            raise ValueError(f"arms.{base}.settings: others are compared with it in every setting; leave them out")
        if self.engine == "processes" and self.jobs > 1:
            raise ValueError("jobs: real learners need the machine to themselves; leave it out with engine: processes")
        if self.bracket and all(len(self.rates if arm.rates is None else arm.rates) < 2 for arm in self.arms.values()):
            raise ValueError("bracket: no arm has two rates, from which a grid could grow; give `rates`")
        return self

    @cached_property
    def all_arms(self) -> Mapping[str, Arm]:
        """The arms, preceded by a lone learner if that is the baseline and not among them."""
        if self._base in self.arms:
            return self.arms
        lone = Arm(strategy=StrategyChoice(name="allreduce"), summary="one learner", learners=(1,))
        return {ONE: lone} | self.arms

    @property
    def _base(self) -> str:
        """The baseline, which is the named arm, or else the first arm with one learner."""
        return self.baseline or next((label for label, arm in self.arms.items() if self.learners_of(arm) == (1,)), ONE)

    def learners_of(self, arm: Arm) -> tuple[int, ...]:
        """Numbers of learners of an arm."""
        return arm.learners or self.learners

    def rates_of(self, row: Row, own: float) -> tuple[float, ...]:
        """Return the different learning rates of a row whose own rate is `own`, in ascending order."""
        arm = self.all_arms[row.arm]
        rates = self.rates if arm.rates is None else arm.rates
        return tuple(sorted({rate_of(rate, own) for rate in rates or (own,)}))

    def baseline_of(self, row: Row) -> Row:
        """Return the row with which a row is compared, or the row itself if it is the baseline."""
        counts = self.learners_of(self.all_arms[self._base])
        return Row(row.setting, self._base, row.learners if row.learners in counts else counts[0])

    @property
    def rows(self) -> list[Row]:
        """The rows of the table, in its order."""
        return [
            Row(setting, label, learners)
            for setting in self.settings or ("",)
            for label, arm in self.all_arms.items()
            if arm.settings is None or setting in arm.settings
            for learners in self.learners_of(arm)
        ]

    def seeds_of(self, row: Row, is_tuning: bool) -> tuple[int, ...]:
        """Return the seeds with which a row is tuned or, unless `is_tuning`, the other seeds."""
        seeds = self.all_arms[row.arm].seeds or self.seeds
        count = self.tuning_seeds or len(seeds)
        return seeds[:count] if is_tuning else seeds[count:]


def beyond(rates: Sequence[float], edge: str) -> float:
    """Return the rate that continues a grid of ascending rates at its `lowest` or `highest` end."""
    near, inner = (rates[0], rates[1]) if edge == "lowest" else (rates[-1], rates[-2])
    return rate_of(near * near / inner, 0.0)


def chosen_arms(section: Any, names: Sequence[str]) -> Tree:
    """Return the arms with these names. A name that is not an arm of the section is taken as a strategy."""
    arms = section.get("arms") if isinstance(section, dict) else None
    known = arms if isinstance(arms, dict) else {}
    return {re.sub(r"[^A-Za-z0-9.-]", "-", name): known.get(name, {"strategy": name}) for name in names}


class Metric(Config):
    """The quantity by which arms are compared."""

    name: str
    higher_is_better: bool = False
    all_right: float | None = None
    """Bound at or beyond which a value says only that everything is right, and nothing about which arm is better."""
    all_wrong: float | None = None
    """Bound at or beyond which a value says that everything is wrong."""
    diverged: float | None = None
    """Value that counts for a run whose numbers stopped being finite; None if such a run cannot be compared."""
    of_loss: bool = False
    """Whether the metric is the training loss, in place of a score."""
    beside: str = ""
    """Name of the score that is reported beside the loss if `of_loss` is set."""

    def limit(self, value: float) -> str:
        """Return the end of the scale at which a value is, or an empty text if it is inside the scale."""
        sign = -1.0 if self.higher_is_better else 1.0
        if self.all_right is not None and sign * value <= sign * self.all_right:
            return "everything right"
        if self.all_wrong is not None and sign * value >= sign * self.all_wrong:
            return "everything wrong"
        return ""


class Point(NamedTuple):
    """The mean training loss of a part of the budget, assigned to the middle of that part."""

    share: float
    """Middle of the part, as a fraction of the budget."""
    samples: float
    seconds: Seconds
    loss: float


class CellResult(Config):
    """The outcome of one cell. Fields that earlier versions wrote, and that no longer exist, are ignored."""

    model_config = Config.model_config | {"extra": "ignore"}

    cell: Cell
    digest: str
    """Digest of everything on which the result depends."""
    diverged: bool
    """Whether a loss or the weights stopped being finite; if so, nothing was scored."""
    valid: float | None = None
    """Validation result, by which rates are chosen."""
    test: float | None = None
    """Test result. No choice depends on it."""
    errors: int | None = None
    """Number of wrong words in the test sets, out of `words`."""
    words: int | None = None
    loss: float | None
    """Mean training loss of the last tenth of the budget; None if no training took place in it."""
    curve: tuple[Point, ...]
    num_gradients: int
    """Number of mini-batches that all learners computed."""
    num_samples: float
    """Number of training examples in these mini-batches."""
    seconds: Seconds
    """Duration of training, simulated or real."""
    consensus_distance: float | None = None
    """(1/L) sum_l |w_l - mean|^2 at the end."""
    mean_staleness: float
    """Mean number of changes of the weights between reading them for a gradient and the gradient's step."""
    largest_staleness: int
    bytes_sent: int
    """Number of bytes that all learners sent."""
    computing: float
    """Share of the workers' time spent computing, in per cent; the next two fields are the shares spent waiting."""
    waiting_for_data: float
    waiting_for_peers: float
    cpu_seconds: Seconds
    """Processor time of training and scoring, on the machine that computed the cell."""

    @property
    def score(self) -> float | None:
        """The test result, or without one the validation result."""
        return self.valid if self.test is None else self.test

    def when(self, target: float) -> Point | None:
        """Return the point at which the training loss first falls to a target, interpolated linearly between points, or
        None if it does not reach the target."""
        before: Point | None = None
        for point in self.curve:
            if point.loss <= target:
                if before is None:
                    return point
                part = (before.loss - target) / (before.loss - point.loss)
                return Point(*(a + part * (b - a) for a, b in zip(before, point, strict=True)))
            before = point
        return None

    def write(self, folder: Path) -> None:
        """Write the result as a JSON file."""
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / f"{self.cell.name}.json", self.model_dump_json(indent=1))

    @classmethod
    def read(cls, folder: Path, cell: Cell, digest: str) -> "CellResult | None":
        """Return the result of a cell in a folder, or None unless everything on which the result depends has this
        digest.

        Raises `DataError` for a file that cannot be read.
        """
        file = folder / f"{cell.name}.json"
        if not file.is_file():
            return None
        try:
            result = cls.model_validate_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = "; ".join(describe(error, cls, {})) if isinstance(error, ValidationError) else str(error)
            raise DataError(f"{file}: not the result of a cell ({reason}); remove it to compute it again") from error
        return result if result.digest == digest else None
