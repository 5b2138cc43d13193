"""A resume with every other strategy, with another number of learners and in another encoding: learners that must be
equal are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from starling.checkpoint.state import LearnerState
from starling.engines.virtual.engine import Outcome, VirtualEngine
from tests.boundaries.grid import (
    CLUSTERS,
    Method,
    Watch,
    methods,
    named,
    representatives,
    resumed,
    same_bits,
    tiered,
    undisturbed,
)
from tests.contract.cases import adamw
from tests.contract.problems import TinyRegression

WORLD, STEPS = 4, 13
"""Learners, and mini-batches for each of them before a resume; no strategy agrees after as many."""
MORE = 7
"""Mini-batches for each learner after it."""
WORKLOAD, OPTIMIZER = TinyRegression(), adamw(0.05)
"""The optimizers of learners keep what differs between them."""


@cache
def checkpoint(method: Method) -> Sequence[LearnerState]:
    """The last checkpoint but one of a run, which lies between two agreements."""
    watch = Watch()
    job = method.job(WORKLOAD, OPTIMIZER, STEPS * WORLD, WORLD, "uneven", checkpoint_every=WORLD)
    VirtualEngine(job, WORLD, CLUSTERS["uneven"], watch).run()
    return watch.complete[-1]


@cache
def ends_equal(method: Method, world: int) -> bool:
    """Whether a run in which nothing happens ends with equal learners."""
    return same_bits(weights(undisturbed(method, WORKLOAD, OPTIMIZER, MORE * world, world, "uneven")))


def weights(outcome: Outcome) -> list[Tensor]:
    """Those of the learners that compute."""
    return [state.weights for state in outcome.states if state.is_worker]


def go_on(before: Method, after: Method, world: int, folder: Path) -> tuple[list[LearnerState], list[list[Tensor]]]:
    """Resume with another method: what learners begin with, and the weights of all of them at each checkpoint of the
    resumed run and at its end."""
    states, watch = checkpoint(before), Watch()
    steps = states[0].position.num_done + MORE * world
    job = after.job(WORKLOAD, OPTIMIZER, steps, world, "uneven", checkpoint_every=world)
    start = resumed(states, folder, job, world)
    outcome = VirtualEngine(job, world, CLUSTERS["uneven"], watch, start).run()
    between = [[state.weights for state in each if state.is_worker] for each in watch.complete]
    return start, [*between, weights(outcome)]


def problem(before: Method, after: Method, world: int, folder: Path) -> str | None:
    """What a resume with another method breaks. Learners begin with one model, and without what the other method kept;
    those that have one model keep it, and those that end with one when nothing happens do so after a resume."""
    name = f"{before.name}, then {after.name} with {world}"
    try:
        start, then = go_on(before, after, world, folder)
    except Exception as error:  # whatever it raises is a finding
        return f"{name}: {type(error).__name__}: {error}"
    if not same_bits([each.weights for each in start]):
        return f"{name}: learners begin with different weights"
    if before.strategy is not after.strategy and any(each.strategy for each in start):
        return f"{name}: learners begin with {sorted(start[0].strategy)} of another strategy"
    if after.strategy.has_one_model and not all(map(same_bits, then)):
        return f"{name}: learners with one model differ"
    if ends_equal(after, world) and not same_bits(then[-1]):
        return f"{name}: learners end with different models"
    return None


def problems(before: Method, afters: Sequence[Method], folder: Path) -> list[str]:
    """What is wrong after a resume with each of the others, in turn with as many learners, fewer and more."""
    found = []
    for number, after in enumerate(afters):
        worlds = [world for world in (WORLD, WORLD - 1, WORLD + 1) if after.fits(world)]
        found.append(problem(before, after, worlds[number % len(worlds)], folder))
    return [each for each in found if each is not None]


def others(before: Method) -> list[Method]:
    """A method of each other strategy."""
    return [after for after in representatives() if after.strategy is not before.strategy]


def encoded_otherwise(before: Method) -> list[Method]:
    """The same method in the other encodings."""
    base, _, _ = before.name.partition("/")
    return [each for name, each in methods().items() if name.startswith(f"{base}/") and each is not before]


@pytest.mark.parametrize("before", [tiered(each, f"{each.name} once", each) for each in representatives()])
def test_learners_are_equal_after_a_resume_with_another_strategy(before: Method, tmp_path: Path) -> None:
    """Of each strategy with one other."""
    number, found = [each.name for each in representatives()].index(before.name), others(before)
    assert problems(before, [found[number * 7 % len(found)]], tmp_path) == []


@pytest.mark.soak
@pytest.mark.parametrize("before", [named(each.name, each) for each in representatives()])
def test_learners_are_equal_after_a_resume_with_any_other_strategy(before: Method, tmp_path: Path) -> None:
    """All ordered pairs of strategies."""
    assert problems(before, others(before), tmp_path) == []


@pytest.mark.soak
@pytest.mark.parametrize(
    "before",
    [named(f"{each.name} encoded", each) for each in methods().values() if encoded_otherwise(each)],
)
def test_learners_are_equal_after_a_resume_in_another_encoding(before: Method, tmp_path: Path) -> None:
    """All ordered pairs of encodings that a method accepts."""
    assert problems(before, encoded_otherwise(before), tmp_path) == []
