"""Made-up results of comparisons."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starling.comparing.grid import Cell, CellResult, CompareConfig, Metric, Point, Row
from starling.comparing.table import Best, Comparison

WORD_ERRORS = Metric(name="WER %", all_right=0.0, all_wrong=95.0, diverged=100.0)


def result(cell: Cell, value: float | None = 10.0, **fields: Any) -> CellResult:
    """The result of a cell; None diverged."""
    measured: dict[str, Any] = {
        "digest": "",
        "diverged": value is None,
        "valid": value,
        "test": value,
        "loss": None if value is None else value / 50,
        "curve": (Point(0.25, 25.0, 1.0, 2.0), Point(0.75, 75.0, 3.0, 1.0 + cell.seed / 10)),
        "num_gradients": 100,
        "num_samples": 100.0,
        "seconds": 4.0,
        "mean_staleness": 3.0,
        "largest_staleness": 7,
        "bytes_sent": 1000,
        "computing": 90.0,
        "waiting_for_data": 2.0,
        "waiting_for_peers": 8.0,
        "cpu_seconds": 2.0,
    }
    return CellResult.model_validate({"cell": cell, **measured, **fields})


def made_up(
    rates: Mapping[tuple[str, str, int], Sequence[float | None]],
    folder: Path = Path(),
    metric: Metric = WORD_ERRORS,
    **section: Any,
) -> Comparison:
    """A comparison with given results of seeds 1, 2, … by setting, arm and learners; None diverged."""
    arms: dict[str, dict[str, Any]] = {}
    for _, arm, learners in rates:
        own = arms.setdefault(arm, {"strategy": "allreduce", "learners": []})
        own["learners"] += [learners] if learners not in own["learners"] else []
    settings = {setting: {} for setting, _, _ in rates if setting}
    config = CompareConfig.model_validate({"arms": arms, "settings": settings, **section})
    results = [
        result(Cell(setting=setting, arm=arm, learners=learners, rate=0.5, seed=seed), test)
        for (setting, arm, learners), tests in rates.items()
        for seed, test in enumerate(tests, start=1)
    ]
    best = {Row(*key): Best(0.5) for key in rates}
    return Comparison(folder, config, metric, best, results)
