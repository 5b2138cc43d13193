"""Made-up results of studies."""

from collections.abc import Mapping, Sequence

from starling.runs.study.config import Cell
from starling.runs.study.results import CellResult

Key = tuple[str, str, float, str, int | None]
"""Model, optimizer, warm-up, arm, workers."""


def made_up(rates: Mapping[Key, Sequence[float | None]]) -> list[CellResult]:
    """Results with given word error rates for seeds 1, 2, …; None diverged."""
    return [
        CellResult(
            cell=Cell(model=model, optimizer=optimizer, warmup=warmup, arm=arm, workers=workers, seed=seed),
            digest="",
            diverged=wer is None,
            wer=100.0 if wer is None else wer,
            errors=0,
            words=600,
            loss=None if wer is None else wer / 50,
            curve=((0.25, 2.0), (0.75, 1.0 + seed / 10)),
            num_gradients=100,
            num_steps=25,
            mean_staleness=3.0,
            largest_staleness=7,
            simulated_seconds=1.5,
            cpu_seconds=2.0,
        )
        for (model, optimizer, warmup, arm, workers), wers in rates.items()
        for seed, wer in enumerate(wers, start=1)
    ]
