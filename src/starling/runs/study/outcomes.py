"""The results of a study, to be asked by setting, arm and workers."""

from collections.abc import Callable, Iterable, Sequence

from starling.runs.study.arms import ARMS
from starling.runs.study.grid import Setting
from starling.runs.study.intervals import Estimate, estimate
from starling.runs.study.results import CellResult

LEARNED_NOTHING = 90.0
"""Per cent of words wrong from which a run has learned nothing: networks that emit only blanks make 100."""


class Outcomes:
    """All results, by what was varied. Labels keep the order of the results."""

    def __init__(self, results: Sequence[CellResult]) -> None:
        self.results = results
        self.models = _each(result.model for result in results)
        self.optimizers = _each(result.optimizer for result in results)
        self.warmups = sorted({result.warmup for result in results})
        self.arms = [arm for arm in ARMS if any(result.arm == arm for result in results)]
        self.workers = sorted({result.workers for result in results if result.workers is not None})
        self.seeds = sorted({result.seed for result in results})

    @property
    def settings(self) -> list[Setting]:
        """Every model with every optimizer and warm-up."""
        return [
            Setting(model, optimizer, warmup)
            for model in self.models
            for optimizer in self.optimizers
            for warmup in self.warmups
        ]

    def of(self, setting: Setting, arm: str, workers: int | None) -> list[CellResult]:
        """One result for each seed; `workers` does not matter to an arm that does not depend on it."""
        wanted = workers if ARMS[arm].depends else None
        return [
            result
            for result in self.results
            if (result.cell.setting, result.arm, result.workers) == (setting, arm, wanted)
        ]

    def wers(self, setting: Setting, arm: str, workers: int | None) -> dict[int, float]:
        """Word error rates in per cent, by seed."""
        return {result.seed: result.wer for result in self.of(setting, arm, workers)}

    def learned(self, setting: Setting, arm: str, workers: int | None) -> bool:
        """Whether the runs learned anything, on average."""
        wers = list(self.wers(setting, arm, workers).values())
        return bool(wers) and sum(wers) / len(wers) < LEARNED_NOTHING


def mean_of(results: Sequence[CellResult], value: Callable[[CellResult], float | None]) -> Estimate | None:
    """The mean over results of a value that some may not have; None if none has it."""
    values = [found for result in results if (found := value(result)) is not None]
    return estimate(values) if values else None


def mean_by_seed(several: Sequence[dict[int, float]]) -> dict[int, float]:
    """For each seed that all have, the mean of what they have for it."""
    if not several:
        return {}
    common = set.intersection(*(set(each) for each in several))
    return {seed: sum(each[seed] for each in several) / len(several) for seed in sorted(common)}


def _each(labels: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(labels))
