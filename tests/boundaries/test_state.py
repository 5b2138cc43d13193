"""State in = state out: whatever a strategy keeps between its steps is in the checkpoint, or dropped by a declaration.

A class, or a module for the local variables of its coroutines, declares in `DROPPED` what does not outlive a
membership: what the next one computes again, or what it does not need.
"""

from __future__ import annotations

import random
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from starling.checkpoint.state import LearnerState
from starling.engines.virtual.engine import VirtualEngine
from starling.learner import Learner
from starling.strategies import NoOptions, Strategy
from tests.boundaries.grid import CLUSTERS, Method, Watch, methods, named, representatives, resumed, tiered
from tests.boundaries.walking import found_in
from tests.contract.cases import adamw
from tests.contract.problems import TinyRegression

WORLD, STEPS = 4, 15
WORKLOAD, OPTIMIZER = TinyRegression(), adamw(0.02)


class Live(Watch):
    """What the coroutines of each learner keep at each barrier."""

    def __init__(self) -> None:
        super().__init__()
        self.coroutines: dict[int, list[Coroutine[Any, Any, None]]] = {}
        self.saved: dict[int, list[Tensor]] = {}
        """What `strategy_state` has returned to each learner."""
        self.found: dict[int, list[dict[str, Any]]] = {}

    def of(self, strategy: Strategy) -> Strategy:
        """A strategy whose coroutines can be walked."""

        async def run(me: Learner, *options: Any) -> None:
            coroutines: list[Coroutine[Any, Any, None]] = []
            kept: list[Tensor] = []
            start, keep = me.background.start, me.strategy_state

            def background(activity: Coroutine[Any, Any, None]) -> None:
                coroutines.append(activity)
                start(activity)

            def strategy_state(*arguments: Any, **named: Any) -> Tensor:
                kept.append(keep(*arguments, **named))
                return kept[-1]

            me.background.start, me.strategy_state = background, strategy_state  # type: ignore[method-assign]
            coroutines.append(strategy.run(me, *options))
            self.coroutines[me.rank], self.saved[me.rank] = coroutines, kept
            await coroutines[-1]

        return replace(strategy, run=run)

    def on_barrier(self, state: LearnerState) -> None:
        super().on_barrier(state)
        found = found_in(self.coroutines[state.rank])
        kept = {each.untyped_storage().data_ptr() for each in self.saved[state.rank]}
        plain = {
            path: value.tolist() if isinstance(value, Tensor) else value
            for path, value in found.items()
            if not (isinstance(value, Tensor) and value.untyped_storage().data_ptr() in kept)
        }
        self.found.setdefault(state.rank, []).append(plain)


def kept_beside_the_checkpoint(method: Method) -> set[str]:
    """What changes from one barrier to another without being saved: paths to numbers and tensors."""
    live = Live()
    method = replace(method, strategy=live.of(method.strategy))
    job = method.job(WORKLOAD, OPTIMIZER, STEPS * WORLD, WORLD, "uneven", checkpoint_every=WORLD)
    VirtualEngine(job, WORLD, CLUSTERS["uneven"], live).run()
    assert all(len(barriers) >= 3 for barriers in live.found.values())  # else this shows nothing
    changed = set()
    for barriers in live.found.values():
        for path in set().union(*barriers):
            values = [barrier[path] for barrier in barriers if path in barrier]
            if any(repr(value) != repr(values[0]) for value in values):
                changed.add(path)
    return changed


def stays_the_same(method: Method, folder: Path, num: int) -> list[str]:
    """Stop a run at some of its checkpoints, and resume each in a new run: what differs from the run that went on."""
    watch, steps = Watch(), STEPS * WORLD
    job = method.job(WORKLOAD, OPTIMIZER, steps, WORLD, "uneven", checkpoint_every=WORLD)
    whole = VirtualEngine(job, WORLD, CLUSTERS["uneven"], watch).run()
    found, barriers = [], [states for states in watch.complete if states[0].position.num_done < steps]
    assert len(barriers) > 5
    for states in random.Random(method.name).sample(barriers, num):
        start = resumed(states, folder, job, WORLD)
        again = VirtualEngine(job, WORLD, CLUSTERS["uneven"], start=start).run()
        apart = max(
            float((one.weights - other.weights).abs().max())
            for one, other in zip(whole.states, again.states, strict=True)
        )
        if apart:
            found.append(f"resumed after {states[0].position.num_done} mini-batches, weights differ by {apart:.2g}")
    return found


def in_step(method: Method) -> bool:
    """Whether all learners step together, so that a resumed run is the same as one that went on (guarantee 23)."""
    return method.strategy.sync_group_size(method.options(WORLD), WORLD) == WORLD


@pytest.mark.parametrize("method", [tiered(each, each.name, each) for each in representatives()])
def test_what_a_strategy_keeps_is_in_the_checkpoint(method: Method) -> None:
    """Whatever changes from one barrier to another, in any object that its coroutines hold, is saved or declared."""
    assert kept_beside_the_checkpoint(method) == set()


@pytest.mark.soak
@pytest.mark.parametrize("method", [named(each.name, each) for each in methods().values()])
def test_what_any_method_keeps_is_in_the_checkpoint(method: Method) -> None:
    """The same of each method, in every encoding."""
    assert kept_beside_the_checkpoint(method) == set()


@pytest.mark.parametrize(
    "method", [tiered(each, f"{each.name} once", each) for each in representatives() if in_step(each)]
)
def test_a_run_resumed_once_ends_in_the_same_bits(method: Method, tmp_path: Path) -> None:
    """From a checkpoint's files, where all learners step together."""
    assert stays_the_same(method, tmp_path, 1) == []


@pytest.mark.soak
@pytest.mark.parametrize("method", [named(each.name, each) for each in methods().values() if in_step(each)])
def test_a_run_resumed_anywhere_ends_in_the_same_bits(method: Method, tmp_path: Path) -> None:
    """The same of each method, in every encoding, at four moments."""
    assert stays_the_same(method, tmp_path, 4) == []


def test_the_walk_finds_what_a_strategy_hides() -> None:
    """A tensor in a closure, a number in an object, a queue of a generator: each is found; what is overwritten before
    it is read, what is saved, and what is declared are not."""
    method = Method("hiding", Strategy("hiding", "only in tests", hiding, keeps_state=True), lambda world: NoOptions())
    found = {path.rpartition(" ")[2] for path in kept_beside_the_checkpoint(method)}
    assert found == {"total", "add(total)", "box.count", "has", "num"}


class Box:
    """Holds two numbers."""

    DROPPED = ("declared",)

    def __init__(self) -> None:
        self.count, self.declared = 0, 0


async def hiding(me: Learner) -> None:
    """A strategy that keeps things in places from which no checkpoint takes them."""
    box, saved, num, queue = Box(), me.strategy_state("saved", torch.zeros(1)), 0, [0]
    total = torch.zeros(1)

    def add() -> None:
        total.add_(1.0)

    while me.claim():
        temporary = me.weights.clone()
        gradient = await me.gradient(me.weights)
        add()
        saved.add_(temporary.norm())
        box.count, box.declared, num = box.count + 1, box.declared + 1, num + 1
        queue.append(len(queue))
        me.step(gradient)
