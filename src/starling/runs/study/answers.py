"""The two questions of the study, answered for each optimizer and number of workers."""

from collections.abc import Iterator
from itertools import combinations

from starling.runs.study.contrasts import Side, learned_any, losses
from starling.runs.study.grid import Setting
from starling.runs.study.intervals import difference, estimate
from starling.runs.study.outcomes import Outcomes, mean_by_seed
from starling.runs.study.words import verdict


def answers(outcomes: Outcomes) -> list[str]:
    """Whom plain asynchronous updates hurt more, and whether summing restores what they cost; means over warm-ups."""
    if not {"one", "asynchronous"} <= set(outcomes.arms):
        return []
    lines = []
    for optimizer in outcomes.optimizers:
        for workers in outcomes.workers:
            sides = [
                Side(model, tuple(Setting(model, optimizer, warmup) for warmup in outcomes.warmups))
                for model in outcomes.models
            ]
            where = f"{optimizer}, {workers} workers"
            for first, second in combinations(sides, 2):
                lines += [f"- {where}: {words}." for words in _hurt(outcomes, first, second, workers)]
            if "summed" in outcomes.arms:
                lines += [
                    f"- {where}, {side.label}: {words}."
                    for side in sides
                    for words in _restored(outcomes, side, workers)
                ]
    return ["", "## In short, means over warm-ups", "", *lines]


def _hurt(outcomes: Outcomes, first: Side, second: Side, workers: int) -> Iterator[str]:
    lost = [losses(outcomes, side, "asynchronous", workers) for side in (first, second)]
    found = difference(*lost)
    if found is None:
        return
    if not any(learned_any(outcomes, side, "asynchronous", workers) for side in (first, second)):
        yield f"under plain asynchronous updates neither {first.label} nor {second.label} learned"
        return
    common = lost[0].keys() & lost[1].keys()
    means = [estimate([each[seed] for seed in common]).mean for each in lost]
    said = verdict(found, f"{second.label} is hurt more", f"{first.label} is hurt more")
    yield (
        f"plain asynchronous updates cost {first.label} {means[0]:.1f} points and {second.label} {means[1]:.1f}; {said}"
    )


def _restored(outcomes: Outcomes, side: Side, workers: int) -> Iterator[str]:
    one, plain, summed = (_rates(outcomes, side, arm, workers) for arm in ("one", "asynchronous", "summed"))
    won, left = difference(plain, summed), difference(one, summed)
    if won is None or left is None:
        return
    common = plain.keys() & summed.keys() & one.keys()
    means = [estimate([each[seed] for seed in common]).mean for each in (plain, summed, one)]
    rates = f"summing takes {means[0]:.1f} % wrong to {means[1]:.1f}, where one learner has {means[2]:.1f}"
    if not any(learned_any(outcomes, side, arm, workers) for arm in ("asynchronous", "summed")):
        yield f"{rates}; neither asynchronous arm learned"
        return
    restored = ""
    if won.sign < 0:
        restored = ", and not all that was lost" if left.sign > 0 else ", to where one learner may be as well"
    yield f"{rates}; against plain updates {verdict(won, 'worse', 'better')}{restored}"


def _rates(outcomes: Outcomes, side: Side, arm: str, workers: int) -> dict[int, float]:
    return mean_by_seed([outcomes.wers(setting, arm, workers) for setting in side.settings])
