"""Faults on purpose, and what becomes of gradients that are not finite."""

import re

import pytest
import torch
from pydantic import ValidationError

from starling.budget import Budget
from starling.checkpoint.state import LearnerState
from starling.configuration import checked
from starling.engines.virtual.engine import Outcome, VirtualEngine
from starling.errors import ConfigError, NonFiniteError
from starling.recipe.run import RunConfig
from starling.strategies import STRATEGIES, find_strategy
from starling.training.faults import Fault, Join, Kill, NotFinite, Pause, Split, at_times, faults_of, only_simulated
from starling.training.job import EpochReport, Job, Observer, StepReport
from tests.contract.cases import sgd
from tests.contract.problems import TinyRegression


class Listener(Observer):
    """Keeps what learners report."""

    def __init__(self) -> None:
        self.losses: dict[int, list[float]] = {}
        self.num_not_finite = 0

    def on_step(self, report: StepReport) -> None:
        self.losses.setdefault(report.rank, []).append(report.loss)

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self.num_not_finite += report.num_not_finite


def run(strategy: str, *faults: Fault, world: int = 2, steps: int = 48) -> tuple[Outcome, Listener]:
    """A run on the virtual engine, and what was reported of it."""
    chosen, listener = find_strategy(strategy), Listener()
    options = chosen.options(**({"per_node": 1} if strategy == "hadpsgd" else {}))
    job = Job(TinyRegression(), chosen, Budget(steps=steps), sgd(0.05), options=options, faults=faults)
    return VirtualEngine(job, world, observer=listener).run(), listener


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_gradient_that_is_not_finite_is_neither_applied_nor_mixed(strategy: str) -> None:
    """All weights of all learners are finite at the end; each is counted once, or by all where it is in their mean, as
    at first where learners warm up together."""
    outcome, listener = run(strategy, NotFinite(nan=1, at_step=3), NotFinite(nan=0, at_step=7))
    assert all(state.weights.isfinite().all() for state in outcome.states)
    assert sum(loss != loss for losses in listener.losses.values() for loss in losses) == 2
    in_a_mean = find_strategy(strategy).has_one_model or strategy in (
        "bmuf",
        "post-local-sgd",
    )
    assert listener.num_not_finite == (4 if in_a_mean else 2)
    assert sum(map(len, listener.losses.values())) == 48


def test_a_step_that_is_left_out_changes_nothing() -> None:
    """One learner whose second of two gradients is not finite is where it was after the first."""
    (one,) = run("allreduce", world=1, steps=1)[0].states
    (two,) = run("allreduce", NotFinite(nan=0, at_step=2), world=1, steps=2)[0].states
    assert torch.equal(one.weights, two.weights)
    assert two.position.num_done == 2


@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce", "parameter-server"])
def test_many_in_a_row_fail_the_run_and_single_ones_do_not(strategy: str) -> None:
    """Nine pass, ten do not; the message names the learner and the mini-batch."""
    nine = [NotFinite(nan=1, at_step=step) for step in range(2, 11)]
    run(strategy, *nine)
    with pytest.raises(NonFiniteError, match=r"learner \d: the (loss|gradient) of mini-batch \d+ of epoch \d+ is n"):
        run(strategy, *nine, NotFinite(nan=1, at_step=11))


def test_a_pause_takes_its_time_on_the_simulated_clock() -> None:
    """In step, everybody waits."""
    assert run("allreduce", Pause(pause=1, at_step=2, seconds=5.0))[0].seconds == pytest.approx(
        run("allreduce")[0].seconds + 5.0
    )


def test_faults_come_at_the_learners_own_mini_batches() -> None:
    """Each once, and only its own."""
    faults = (Kill(kill=1, at_step=3), NotFinite(nan=0, at_step=2), NotFinite(nan=1, at_step=2))
    own = faults_of(faults, 1)
    assert [list(next(own)) for _ in range(4)] == [[], [faults[2]], [faults[0]], []]


def test_a_fault_for_a_learner_that_does_not_exist_is_a_problem() -> None:
    """With its place in the recipe."""
    faults = (Kill(kill=1, at_step=3), Kill(kill=2, at_step=3), Split(split=(0, 2), at_seconds=1, seconds=1))
    tree = {"name": "r", "budget": {"steps": 1}, "learners": 2, "faults": (*faults, Join(join=5, at_seconds=1.0))}
    with pytest.raises(ConfigError) as caught:
        checked(RunConfig, tree, "r.yaml")
    assert re.findall(r"  faults\.(\d): there is no learner 2 among 2", str(caught.value)) == ["1", "2"]


def test_a_fault_has_one_place() -> None:
    """At a mini-batch, at a time or at an event; what only the simulated clock knows is named for real processes."""
    with pytest.raises(ValidationError, match="give exactly one of at_step, at_seconds and at_event"):
        Kill(kill=1)
    with pytest.raises(ValidationError, match="give exactly one of at_step, at_seconds and at_event"):
        Pause(pause=1, at_step=3, at_event=5, seconds=1.0)
    assert Pause(pause=1, seconds=1.0).at_step == 1
    with pytest.raises(ValidationError, match="give exactly one of at_seconds and at_event"):
        Split(split=(1,), seconds=1.0)
    split = Split(split=(1,), at_seconds=1.0, seconds=1.0)
    faults = (Kill(kill=1, at_event=3), Kill(kill=1, at_step=3), split, Kill(kill=1, at_seconds=3.0))
    assert [problem.partition(":")[0] for problem in only_simulated(faults)] == ["faults.0", "faults.2"]
    assert at_times((faults[3], Join(join=1, at_seconds=2.0), faults[1])) == [Join(join=1, at_seconds=2.0), faults[3]]
