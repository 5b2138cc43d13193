"""Batch shares: learners of unequal speed step together, each with as many mini-batches as it has time for."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from starling.budget import Budget, Schedule
from starling.engines.virtual.cluster import Cluster, ComputeModel, LinkModel
from starling.engines.virtual.engine import Outcome, VirtualEngine
from starling.errors import ConfigError
from starling.strategies import STRATEGIES
from starling.strategies.islands import Island
from starling.training.faults import Fault, Join, Kill
from starling.training.flat import trainable
from starling.training.gradient import measured_seconds
from starling.training.job import EpochReport, Job, Observer, StepReport
from starling.training.speeds import Stragglers, shares_for
from starling.training.succession import MembershipStart, Past, plan_after
from starling.training.tickets import DoneTickets
from starling.workload import Position, Ticket, Weighting
from tests.contract.cases import CHOICES, SHARED, cases, sgd
from tests.contract.oracle import SYNCHRONOUS, Gradient, Vector, gradient_of_regression
from tests.contract.problems import Normalised, TinyRegression, Uneven
from tests.engines.test_virtual_faults import UNEQUAL, Record, check

LEARNERS, SHARES = 3, (2, 1, 3)
BY_NAME = {0: 2, 2: 3}


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainable(model)])


def shared(of: Gradient) -> Gradient:
    """The gradient of each learner as an oracle counts: number k L + l is learner l's in round k. The mean over all
    learners is that over all mini-batches of the round."""

    def gradient(weights: Vector, number: int) -> Vector:
        k, rank = divmod(number, LEARNERS)
        first = k * sum(SHARES) + sum(SHARES[:rank])
        summed = sum(of(weights, first + place) for place in range(SHARES[rank]))
        return np.asarray(LEARNERS / sum(SHARES) * summed)

    return gradient


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_a_strategy_follows_its_equation_with_each_mini_batch_counting_alike(strategy: str) -> None:
    """In matrix form: only the gradients are others, and their mean is the gradient of all mini-batches together."""
    job = replace(cases()[f"{strategy}/sgd"].job(LEARNERS), batch_shares=BY_NAME)
    start = flat(TinyRegression().make_model()).double().numpy()
    expected = SYNCHRONOUS[strategy](start, shared(gradient_of_regression()), 0.1, LEARNERS, 24 // sum(SHARES))
    states = VirtualEngine(job, LEARNERS, UNEQUAL).run().states
    measured = torch.stack([state.weights for state in states], dim=1).double().numpy()
    np.testing.assert_allclose(measured, expected, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("strategy", ["local-sgd", "dpsgd-ring", "sgp", "delay-by-one"])
def test_steps_of_ones_own_gradient_count_as_their_mini_batches_whatever_the_optimizer(strategy: str) -> None:
    """From common weights, the mean of the models moves by the mean over all mini-batches of what Adam makes of each
    learner's gradient: Adam ignores its scale."""
    job = replace(cases()[f"{strategy}/adam"].job(LEARNERS), batch_shares=BY_NAME, budget=Budget(steps=1))
    job = replace(job, schedule=Schedule(decay="constant"))
    workload, moved, first = job.workload, [], 0
    start = flat(workload.make_model())
    for share in SHARES:
        model = workload.make_model()
        optimizer = job.make_optimizer(list(model.parameters()))
        points = [workload.load(Ticket(0, place, place))[0] for place in range(first, first + share)]
        first += share
        torch.stack([workload.loss(model, each) for each in points]).mean().backward()
        optimizer.step()
        moved.append(flat(model) - start)
    expected = start + sum(share * each for share, each in zip(SHARES, moved, strict=True)) / sum(SHARES)
    states = VirtualEngine(job, LEARNERS, UNEQUAL).run().states
    found = torch.stack([state.weights for state in states]).mean(dim=0)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("weighting", ["batches", "utterances", "frames"])
def test_a_step_is_that_of_one_process_on_all_mini_batches_together(weighting: Weighting) -> None:
    """To 1e-6, by the weighting of the job; by utterances it is the mean over all of them at once. The losses that are
    reported are each mini-batch's own."""
    workload, size, steps = Uneven(), sum(SHARES), 4
    model, reported, expected = workload.make_model(), {}, []

    class Watcher(Observer):
        def on_step(self, report: StepReport) -> None:
            reported[report.ticket.step] = report.loss

    for step in range(steps):
        tickets = [Ticket(0, 0, step * size + place) for place in range(size)]
        points = [workload.load(ticket)[0] for ticket in tickets]
        losses = [workload.loss(model, each) for each in points]
        expected += [float(loss.detach()) for loss in losses]
        if weighting == "utterances":
            inputs, targets = (torch.cat([getattr(each, name) for each in points]) for name in ("inputs", "targets"))
            loss = workload.loss(model, replace(points[0], inputs=inputs, targets=targets))
        else:
            sizes = [1.0 if weighting == "batches" else workload.planned_size(each, weighting) for each in tickets]
            loss = torch.stack([share / sum(sizes) * each for share, each in zip(sizes, losses, strict=True)]).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    job = Job(
        workload,
        STRATEGIES["allreduce"],
        Budget(steps=steps * size),
        sgd(0.1),
        weighting=weighting,
        batch_shares=BY_NAME,
    )
    found = VirtualEngine(job, LEARNERS, UNEQUAL, observer=Watcher()).run().states[0].weights
    torch.testing.assert_close(found, flat(model), rtol=0.0, atol=1e-6)
    assert [reported[number] for number in range(steps * size)] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("strategy", SHARED)
def test_a_learner_of_half_the_speed_and_half_the_share_holds_no_other_up(strategy: str) -> None:
    """Without shares two learners have the speed of two slow ones; with them of one and a half fast ones, and neither
    waits. On links that take no time."""
    cluster = Cluster(compute=ComputeModel(seconds=0.1), link=LinkModel(latency=0.0, bandwidth=1e12))
    waited: Counter[int] = Counter()

    class Watcher(Observer):
        def on_epoch(self, report: EpochReport, state: object) -> None:
            waited[report.rank] += round(1e6 * report.spent.waiting_for_peers)

    def seconds(shares: dict[int, int]) -> float:
        waited.clear()
        job = replace(cases()[f"{strategy}/sgd"].job(2), stragglers=Stragglers(slow={1: 2.0}), batch_shares=shares)
        return VirtualEngine(job, 2, cluster, Watcher()).run().seconds

    assert seconds({}) == pytest.approx(24 * 0.1)
    assert waited[0] > 0.9e6 and waited[1] < 1e3
    assert seconds({0: 2}) == pytest.approx(24 * 0.1 / 1.5)
    assert max(waited.values(), default=0) < 1e3


def run(
    strategy: str, *faults: Fault, steps: int, world: int = 3, shares: dict[int, int] | None = None
) -> tuple[Outcome, Record]:
    record, choice = Record(), CHOICES[strategy]
    job = Job(
        TinyRegression(),
        choice.strategy,
        Budget(steps=steps),
        sgd(0.1),
        options=choice.options(world),
        faults=faults,
        batch_shares=BY_NAME if shares is None else shares,
    )
    return VirtualEngine(job, world, UNEQUAL, record, changes=record).run(), record


def by_learner(reports: list[StepReport]) -> Counter[int]:
    return Counter(report.rank for report in reports)


@pytest.mark.parametrize("strategy", SHARED)
@pytest.mark.parametrize("victim", [0, 1])
def test_shares_belong_to_learners_and_outlast_a_death(strategy: str, victim: int) -> None:
    """Killed at any event: each mini-batch counts once, and the others keep the shares that they had."""
    for event in range(1, 60, 13):
        outcome, record = run(strategy, Kill(kill=victim, at_event=event), steps=60)
        assert [loss.learner for loss in outcome.losses] == [victim] and outcome.num_memberships == 2
        check(outcome, record, 60)
        after = by_learner(record.seen[-1])
        expected = {name: share for name, share in enumerate(SHARES) if name != victim}
        num_steps = after[2] // 3
        assert num_steps > 3 and after == {name: num_steps * share for name, share in expected.items()}


def test_a_restarted_learner_has_its_share_again_and_a_new_one_a_share_of_one() -> None:
    """Joiners are named: learner 0 comes back with 2 mini-batches a step, learner 3 is new."""
    faults = Kill(kill=0, at_step=2), Join(join=0, at_seconds=2.0), Join(join=3, at_seconds=4.0)
    outcome, record = run("allreduce", *faults, steps=120)
    check(outcome, record, 120)
    assert record.members[-1] == (1, 2, 0, 3)
    last = by_learner(record.seen[-1])
    assert last == {0: 2 * last[3], 1: last[3], 2: 3 * last[3], 3: last[3]} and last[3] > 3


@pytest.mark.parametrize("strategy", SHARED)
def test_a_run_resumes_with_other_shares(strategy: str) -> None:
    """Tickets are handed out one by one, whatever the shares were: none is lost, and none is given out twice."""
    outcome, _ = run(strategy, steps=12)
    end = outcome.states[0].position
    assert end == Position(Ticket(1, 0, 12))
    choice, later = CHOICES[strategy], Record(begun=[end])
    job = Job(
        TinyRegression(),
        choice.strategy,
        Budget(steps=24),
        sgd(0.1),
        options=choice.options(3),
        batch_shares={1: 2},
    )
    resumed = VirtualEngine(job, 3, UNEQUAL, later, outcome.states, changes=later).run()
    assert sorted(report.ticket.step for report in later.seen[0]) == list(range(12, 24))
    assert by_learner(later.seen[0]) == {0: 3, 1: 6, 2: 3}
    assert resumed.states[0].position.next_ticket.step == 24


@pytest.mark.parametrize(
    ("seconds", "shares"),
    [
        ((0.1, 0.1, 0.1), (1, 1, 1)),
        ((0.1, 0.108, 0.1), (1, 1, 1)),
        ((0.1, 0.2), (2, 1)),
        ((0.104, 0.2), (2, 1)),
        ((0.1, 0.15), (3, 2)),
        ((0.1, 0.1, 0.1, 1.0), (11, 11, 11, 1)),
        ((0.01, 1.0), (16, 1)),
        ((0.2,), (1,)),
    ],
)
def test_measured_shares_are_small_whole_numbers_in_the_ratio_of_the_speeds(
    seconds: tuple[float, ...], shares: tuple[int, ...]
) -> None:
    """Speeds that hardly differ give equal shares, so that what is left of chance in a measurement changes nothing."""
    assert shares_for(seconds) == shares


@pytest.mark.parametrize("strategy", SHARED)
def test_a_simulation_measures_shares_which_a_death_and_a_return_leave_alone(strategy: str) -> None:
    """They are those of the speeds that it simulates: with learner 2 at half speed, as if they were given."""
    choice, results = CHOICES[strategy], []
    for shares in ("auto", {0: 2, 1: 2}):
        record = Record()
        job = Job(
            TinyRegression(),
            choice.strategy,
            Budget(steps=90),
            sgd(0.1),
            options=choice.options(3),
            stragglers=Stragglers(slow={2: 2.0}),
            faults=(Kill(kill=1, at_step=4), Join(join=1, at_seconds=3.0)),
            batch_shares=shares,
        )
        outcome = VirtualEngine(job, 3, UNEQUAL, record, changes=record).run()
        check(outcome, record, 90)
        assert record.members[-1] == (0, 2, 1)
        results.append(outcome.event_hash)
    assert results[0] == results[1]


def test_a_measurement_leaves_the_model_and_the_random_numbers_alone() -> None:
    """What a run computes must not depend on whether speeds were measured."""
    workload = Normalised()
    model = workload.make_model()
    before, random = {name: each.clone() for name, each in model.state_dict().items()}, torch.get_rng_state()
    assert measured_seconds(workload, model, torch.device("cpu")) > 0.0
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random, torch.get_rng_state())


def test_a_plan_tells_the_shares_of_its_membership() -> None:
    """A learner that has missed a membership, as a joiner has, must know how many tickets its portions had."""
    before = MembershipStart(3, Position(), 0.0, shares=SHARES)
    job = Job(TinyRegression(), STRATEGIES["allreduce"], Budget(steps=99), sgd(0.1), batch_shares=BY_NAME)
    after = plan_after(before, [Past(0, 4), Past(0, 5)], job, lambda: DoneTickets(Position()), names=(0, 2))
    assert (after.position.num_done, after.takers, after.shares) == (5 * sum(SHARES), (0,), (2, 3))
    assert MembershipStart.decode(after.encode()) == after


@pytest.mark.parametrize("strategy", ["adpsgd-ring", "hogwild", "hadpsgd", "server-asynchronous"])
def test_shares_are_refused_where_learners_do_not_wait_for_each_other(strategy: str) -> None:
    """There a fast learner takes more mini-batches anyway."""
    with pytest.raises(ConfigError, match="batch_shares: only where all learners step together"):
        run(strategy, steps=12, world=4)


def test_a_share_of_nothing_and_shares_of_an_islands_ranks_are_refused() -> None:
    """The errors say what to change."""
    with pytest.raises(ConfigError, match="at least 1"):
        run("allreduce", steps=12, shares={1: 0})
    job = Job(
        TinyRegression(),
        STRATEGIES["allreduce"],
        Budget(steps=4),
        sgd(0.1),
        batch_shares={0: 2},
        island=Island(sharded=2),
    )
    with pytest.raises(ConfigError, match="batch_shares: the ranks of an island"):
        VirtualEngine(job, 4)
