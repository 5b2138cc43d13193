"""Fragments that are merged once a quorum has pushed them: lists of events in NumPy, special cases, losses, speeds."""

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from starling.budget import Budget
from starling.engines.virtual.cluster import LinkModel
from starling.engines.virtual.engine import Outcome, VirtualEngine
from starling.engines.virtual.timing import simulate_timing
from starling.errors import ConfigError
from starling.strategies import STRATEGIES
from starling.strategies.decoupled_diloco import DecoupledOptions
from starling.strategies.diloco import DiLoCoOptions
from starling.strategies.parts import syncer
from starling.training.faults import Fault, Join, Kill, Pause
from starling.training.job import Job
from starling.training.speeds import Stragglers
from tests.contract.cases import sgd
from tests.contract.oracle import Vector, gradient_of_regression
from tests.contract.problems import ConstantGradient, TinyRegression
from tests.contract.test_async_local import CLUSTER, RATE, SECONDS, SLOW, STEPS
from tests.contract.test_contract import flat
from tests.contract.test_servers import model, run

BY_ONE = 2.0**-6


def exactly(change: Vector) -> Vector:
    return change


def in_4_bits(change: Vector) -> Vector:
    """As docs/compression.md has it; a fragment has fewer than 256 numbers, and so one scale."""
    scale = float(np.abs(change).max()) / 7.0
    return np.round(change / scale) * scale if scale else change


def events(
    every: int,
    rate: float,
    beta: float,
    num_fragments: int,
    tau: int,
    quorum: int,
    sent_of: Callable[[Vector], Vector] = exactly,
) -> Vector:
    """theta at the end, from the page's equations; messages take no time. Each learner is in one of two states: it
    computes a gradient, or it waits for a fragment."""
    gradient, theta = gradient_of_regression(), flat(TinyRegression().make_model()).double().numpy()
    size, period, learners = -(-len(theta) // num_fragments), every // num_fragments, range(len(SECONDS))
    pieces = [slice(first, min(first + size, len(theta))) for first in range(0, len(theta), size)]
    velocity, merges, num_merged = np.zeros(len(theta)), [0] * num_fragments, [0] * num_fragments
    pushes: list[list[tuple[int, int, Vector]]] = [[] for _ in pieces]  # learner, steps, change
    x, taken, steps = [theta.copy() for _ in learners], [theta.copy() for _ in learners], [0] * len(learners)
    known, pushed_at = [[0] * num_fragments for _ in learners], [[0] * num_fragments for _ in learners]
    under_way: list[tuple[int, int, Vector] | None] = [None] * len(learners)  # fragment, step of departure, x then
    waiting, left, claimed, computing = list[int](), set[int](), 0, list[tuple[float, int, int]]()

    def push(one: int, p: int) -> Vector:
        """Push a fragment, and return s, which is x without the error of the encoding."""
        change = sent_of(taken[one][pieces[p]] - x[one][pieces[p]])
        pushes[p].append((one, steps[one] - pushed_at[one][p], change))
        pushed_at[one][p] = steps[one]
        return taken[one][pieces[p]] - change

    def merge(p: int) -> None:
        if pushes[p]:
            change = sum(n * each for _, n, each in pushes[p]) / sum(n for _, n, _ in pushes[p])
            velocity[pieces[p]] = beta * velocity[pieces[p]] + change
            theta[pieces[p]] -= rate * (change + beta * velocity[pieces[p]])
        num_merged[p] = len({learner for learner, _, _ in pushes[p]})
        pushes[p].clear()
        merges[p] += 1

    def receives(one: int) -> bool:
        """Whether this learner gets the fragment under way, or has none."""
        if under_way[one] is None:
            return True
        p, _, sent = under_way[one]
        have_pushed, needed = {learner for learner, _, _ in pushes[p]}, min(quorum, len(learners) - len(left))
        if merges[p] > known[one][p]:
            needed = max(needed, num_merged[p])
        if one in have_pushed and len(have_pushed) >= needed:
            merge(p)
        if merges[p] == known[one][p]:
            return False
        x[one][pieces[p]] += theta[pieces[p]] - sent
        taken[one][pieces[p]] = theta[pieces[p]]
        known[one], under_way[one] = list(merges), None
        return True

    def goes_on(one: int, now: float) -> bool:
        """Whether this learner, which has made a step or waits, can begin its next gradient or leave."""
        nonlocal claimed
        if under_way[one] is not None and steps[one] - under_way[one][1] >= tau and not receives(one):
            return False
        if steps[one] % period == 0 and steps[one] > departed_at[one]:
            departed_at[one] = steps[one]
            p = min(range(num_fragments), key=known[one].__getitem__)
            under_way[one] = p, steps[one], push(one, p)
            if tau == 0:
                return False  # the learners that wait already are answered first
        if claimed < STEPS:
            heapq.heappush(computing, (now + SECONDS[one], one, claimed))
            claimed += 1
            return True
        if not receives(one):
            return False
        for p in range(num_fragments):
            if steps[one] > pushed_at[one][p]:
                push(one, p)
        left.add(one)
        return True

    departed_at = [0] * len(learners)
    for one in (1, 0, 2):  # learner 0, which starts the syncer, receives its first fragment after learner 1
        goes_on(one, 0.0)
    while computing:
        now, one, ticket = heapq.heappop(computing)
        x[one], steps[one] = x[one] - RATE * gradient(x[one], ticket), steps[one] + 1
        if not goes_on(one, now):
            waiting.append(one)
        while (gone := next((each for each in waiting if goes_on(each, now)), None)) is not None:
            waiting.remove(gone)
    assert len(left) == len(learners)
    for p in range(num_fragments):
        merge(p)
    return theta


def decoupled(learners: int = 3, **options: Any) -> Vector:
    chosen = DecoupledOptions.model_validate(options)
    outcome = run("decoupled-diloco", chosen, learners, CLUSTER, sgd(RATE), stragglers=SLOW, budget=Budget(steps=STEPS))
    assert all(torch.equal(each.weights, outcome.states[0].weights) for each in outcome.states)
    found: Vector = model(outcome).double().numpy()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"every": 3, "rate": 0.4, "momentum": 0.5, "fragments": 1, "overlap": 0, "quorum": 3},
        {"every": 4, "rate": 0.7, "momentum": 0.9, "fragments": 2, "overlap": 1, "quorum": 3},
        {"every": 2, "rate": 0.3, "momentum": 0.6, "fragments": 1, "overlap": 0, "quorum": 1},
        {"every": 4, "rate": 0.3, "momentum": 0.6, "fragments": 2, "overlap": 2, "quorum": 1},
        {"every": 4, "rate": 0.3, "momentum": 0.6, "fragments": 1, "overlap": 3, "quorum": 2},
    ],
    ids=str,
)
def test_learners_of_unlike_speed_follow_the_equations(options: dict[str, Any]) -> None:
    expected = events(
        options["every"], options["rate"], options["momentum"], options["fragments"], options["overlap"],
        options["quorum"],
    )  # fmt: skip
    np.testing.assert_allclose(decoupled(**options), expected, rtol=0.0, atol=2e-5)


def test_an_encoded_push_leaves_its_error_to_the_next_one() -> None:
    """Without feedback of the errors, theta would be elsewhere."""
    expected = events(4, 0.7, 0.9, 2, 1, 3, in_4_bits)
    found = decoupled(every=4, rate=0.7, momentum=0.9, fragments=2, overlap=1, quorum=3, compression="int4")
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=2e-5)
    assert np.abs(expected - events(4, 0.7, 0.9, 2, 1, 3)).max() > 1e-3


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_fragment_that_waits_for_all_is_diloco(momentum: float) -> None:
    more: dict[str, Any] = {"every": 4, "rate": 0.7, "momentum": momentum}
    budget = Budget(steps=48)
    mine = DecoupledOptions(fragments=1, overlap=0, quorum=3, **more)
    found = run("decoupled-diloco", mine, 3, CLUSTER, sgd(RATE), budget=budget)
    expected = run("diloco", DiLoCoOptions(**more), 3, CLUSTER, sgd(RATE), budget=budget)
    torch.testing.assert_close(model(found), expected.states[0].weights, rtol=0.0, atol=1e-6)


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of steps in each merge."""
    weights: list[int] = []
    merge = syncer.Merged.merge

    def counted(self: syncer.Merged) -> None:
        weights.append(self.param_groups[0]["weight"])
        merge(self)

    monkeypatch.setattr(syncer.Merged, "merge", counted)
    return weights


OPTIONS: dict[str, Any] = {"every": 6, "fragments": 2, "overlap": 2, "rate": 1.0, "momentum": 0.0, "quorum": 2}


def counting(*faults: Fault, learners: int = 4, slow: float = 1.7, steps: int = 60, **options: Any) -> Outcome:
    """Steps, each of which moves all weights by the same."""
    strategy = STRATEGIES["decoupled-diloco"]
    job = Job(
        ConstantGradient(7), strategy, Budget(steps=steps), sgd(BY_ONE), options=DecoupledOptions(**OPTIONS | options),
        faults=faults, seed=11, stragglers=Stragglers(slow={2: slow}),
    )  # fmt: skip
    cluster = CLUSTER.model_copy(update={"link": LinkModel(latency=0.05, bandwidth=1e9)})
    outcome = VirtualEngine(job, learners, cluster).run()
    assert all(torch.equal(each.weights, outcome.states[0].weights) for each in outcome.states)
    return outcome


def test_each_step_is_merged_once(merged: list[int]) -> None:
    counting()
    assert sum(merged) == 60 * OPTIONS["fragments"]


def test_a_join_costs_no_step(merged: list[int]) -> None:
    """At any time, also while pushes are under way: they are pushed again, and added once."""
    for tenth in range(1, 60, 4):
        merged.clear()
        assert counting(Join(join=9, at_seconds=tenth / 4)).num_memberships == 2
        assert sum(merged) == 60 * OPTIONS["fragments"], tenth


def test_a_loss_costs_what_the_lost_learner_had_not_pushed(merged: list[int]) -> None:
    """Its steps since it last pushed each fragment, and the gradient under way, which others then compute."""
    num_losses, lost = 0, []
    for event in range(2, 400, 11):
        merged.clear()
        outcome = counting(Kill(kill=3, at_event=event))
        num_losses += len(outcome.losses)
        lost.append(60 * OPTIONS["fragments"] - sum(merged))
    assert num_losses > 20
    assert min(lost) >= 0
    assert 0 < max(lost) <= OPTIONS["fragments"] * OPTIONS["every"]


@pytest.mark.parametrize("victims", [(0,), (0, 1), (1, 0, 2)], ids=str)
def test_if_the_syncer_is_lost_another_learner_continues_with_the_mean(victims: tuple[int, ...]) -> None:
    """Learners step in turn and push alike, so theta counts the steps of one of them, except for the lost ones."""
    num_losses = 0
    for event in range(2, 300, 13):
        faults = [Kill(kill=each, at_event=event + 29 * number) for number, each in enumerate(victims)]
        outcome = counting(*faults, slow=1.0, quorum=4)
        num_losses += len(outcome.losses)
        found = -outcome.states[0].weights.double() / BY_ONE
        assert float(found.min()) > 60 / 4 - OPTIONS["every"] * len(victims) - 1.0
        assert float(found.max()) < 60.0 / (4 - len(victims)) + OPTIONS["every"]
    assert num_losses > 10 * len(victims)


def test_a_learner_that_was_late_once_does_not_stay_a_merge_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the length of its pause: at most once it receives a fragment that lacks its own push."""
    lacking: list[int] = []
    answer = syncer.Syncer._answer

    async def watched(self: syncer.Syncer, learner: int, asked: syncer.Report) -> list[Any]:
        if learner in self._waiting[asked.fragment]:
            lacking.append(learner)
        return await answer(self, learner, asked)

    monkeypatch.setattr(syncer.Syncer, "_answer", watched)
    for seconds in (2.1, 3.1, 4.1, 8.1):
        lacking.clear()
        pause = Pause(pause=3, at_seconds=4.5, seconds=seconds)
        counting(pause, slow=1.0, steps=200, every=4, fragments=1, overlap=3)
        assert len(lacking) <= 1, seconds


def test_a_slow_learner_does_not_slow_down_the_others() -> None:
    """With a quorum of three of four; `diloco` waits for it."""

    slow = Stragglers(slow={3: 10.0})

    def seconds(name: str, **options: Any) -> float:
        strategy = STRATEGIES[name]
        chosen = strategy.options.model_validate({"every": 8} | options)
        return simulate_timing(strategy, chosen, 4, CLUSTER, 4_000, 400, stragglers=slow).seconds

    assert seconds("decoupled-diloco", fragments=2, overlap=2, quorum=3) <= 400 / 3.1 + 10.0
    assert seconds("diloco") > 900.0


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"every": 2, "fragments": 3, "overlap": 0}, "fragments"),
        ({"every": 8, "fragments": 4, "overlap": 3}, "overlap"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"strategy.{wrong}"):
        STRATEGIES["decoupled-diloco"].validate(DecoupledOptions(**options), 3)
