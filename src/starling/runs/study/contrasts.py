"""Whom an effect hits harder: one model or another, one optimizer or another, with a warm-up or without."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from starling.runs.study.grid import Setting
from starling.runs.study.intervals import difference, estimate
from starling.runs.study.outcomes import Outcomes, mean_by_seed
from starling.runs.study.words import verdict

HARMS = ("batch", "delay", "asynchronous", "summed")
"""Arms whose loss against `one` is compared."""
_INTRODUCTION = (
    "Each loss is against `one` in the same setting and seed. None can be much more than what `one` leaves to 100 %, "
    "so that losses near the end of the scale look more alike than they are."
)


@dataclass(frozen=True)
class Side:
    """One of two that are compared: a label, and the settings that stand for it."""

    label: str
    settings: tuple[Setting, ...]


@dataclass(frozen=True)
class Contrast:
    """Two sides, and what is the same on both."""

    same: str
    first: Side
    second: Side


def contrast_sections(outcomes: Outcomes) -> list[str]:
    """The sections on models, optimizers and warm-ups."""
    if "one" not in outcomes.arms:
        return []
    lines: list[str] = []
    sections = (
        ("Models: which one loses more?", _models(outcomes)),
        ("Optimizers: under which is more lost?", _optimizers(outcomes)),
        ("Warm-up: does it help?", _warmups(outcomes)),
    )
    for title, contrasts in sections:
        said = [line for contrast in contrasts for line in _contrast(outcomes, contrast)]
        if said:
            lines += ["", f"## {title}", "", _INTRODUCTION, "", *said]
    return lines


def _contrast(outcomes: Outcomes, contrast: Contrast) -> Iterator[str]:
    """A sentence for each arm and number of workers: what each side loses, and whether that differs."""
    for arm in (arm for arm in HARMS if arm in outcomes.arms):
        for workers in outcomes.workers:
            lost = [losses(outcomes, side, arm, workers) for side in (contrast.first, contrast.second)]
            found = difference(*lost)
            if found is None:
                continue
            first, second = contrast.first.label, contrast.second.label
            what = f"`{arm}`, {workers} workers, {contrast.same}"
            common = lost[0].keys() & lost[1].keys()
            means = [f"{estimate([loss[seed] for seed in common]).mean:+.1f}" for loss in lost]
            if not any(learned_any(outcomes, side, arm, workers) for side in (contrast.first, contrast.second)):
                said = "neither learned, so that the losses say nothing"
            else:
                said = verdict(found, f"{second} loses more", f"{first} loses more")
            yield f"- {what}: {first} {means[0]}, {second} {means[1]}; {said}."


def losses(outcomes: Outcomes, side: Side, arm: str, workers: int) -> dict[int, float]:
    """By seed: points lost against `one`, the mean over the side's settings."""
    several = []
    for setting in side.settings:
        before, after = outcomes.wers(setting, "one", None), outcomes.wers(setting, arm, workers)
        several.append({seed: after[seed] - before[seed] for seed in before.keys() & after.keys()})
    return mean_by_seed(several)


def learned_any(outcomes: Outcomes, side: Side, arm: str, workers: int) -> bool:
    """Whether an arm learned in any of a side's settings."""
    return any(outcomes.learned(setting, arm, workers) for setting in side.settings)


def _models(outcomes: Outcomes) -> Iterator[Contrast]:
    for optimizer in outcomes.optimizers:
        for first, second in combinations(outcomes.models, 2):
            yield Contrast(
                f"{optimizer}, mean over warm-ups",
                Side(first, tuple(Setting(first, optimizer, warmup) for warmup in outcomes.warmups)),
                Side(second, tuple(Setting(second, optimizer, warmup) for warmup in outcomes.warmups)),
            )


def _optimizers(outcomes: Outcomes) -> Iterator[Contrast]:
    for model in outcomes.models:
        for first, second in combinations(outcomes.optimizers, 2):
            yield Contrast(
                f"{model}, mean over warm-ups",
                Side(first, tuple(Setting(model, first, warmup) for warmup in outcomes.warmups)),
                Side(second, tuple(Setting(model, second, warmup) for warmup in outcomes.warmups)),
            )


def _warmups(outcomes: Outcomes) -> Iterator[Contrast]:
    for model in outcomes.models:
        for optimizer in outcomes.optimizers:
            for first, second in combinations(outcomes.warmups, 2):
                yield Contrast(
                    f"{model}, {optimizer}",
                    Side(f"warm-up {first:g}", (Setting(model, optimizer, first),)),
                    Side(f"warm-up {second:g}", (Setting(model, optimizer, second),)),
                )
