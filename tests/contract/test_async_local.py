"""Learners that step alone and agree with a server: lists of events in NumPy, special cases, speeds, bytes."""

import heapq
import random
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from starling.budget import Budget
from starling.checkpoint.state import LearnerState
from starling.consensus import consensus
from starling.engines.virtual.cluster import Cluster, ComputeModel, LinkModel
from starling.engines.virtual.engine import VirtualEngine
from starling.engines.virtual.timing import TimingOutcome, simulate_timing
from starling.errors import ConfigError
from starling.learner import Learner
from starling.strategies import STRATEGIES
from starling.strategies.aeasgd import AeasgdOptions, aeasgd
from starling.strategies.async_diloco import AsyncDilocoOptions
from starling.strategies.parts.delayed_nesterov import DelayedNesterov, Loans
from starling.strategies.parts.rules import Served, ServerOptions
from starling.training.faults import Fault, Join, Kill
from starling.training.job import EpochReport, Job, Observer
from starling.training.speeds import Stragglers
from tests.contract.cases import sgd
from tests.contract.oracle import Vector, gradient_of_regression
from tests.contract.problems import ConstantGradient, TinyRegression
from tests.contract.test_contract import flat
from tests.contract.test_servers import AT_ONCE, INSTANT, model, run

SECONDS = (1.0, 2.3, 3.7)
"""Of a gradient of each worker."""
SLOW = Stragglers(slow={rank: each for rank, each in enumerate(SECONDS) if each > 1.0})
CLUSTER = Cluster(compute=ComputeModel(seconds=1.0), link=AT_ONCE, memory=INSTANT)
STEPS, RATE = 34, 0.1


def delayed_nesterov(
    theta: Vector, epsilon: float, beta: float, buffer_size: int, c: float
) -> Generator[Vector, Vector]:
    """Yields theta, and is sent a worker's pseudo-gradient: "Delayed Nesterov Update", Algorithm 3 of Liu et al. 2024,
    arXiv 2401.09135, with its names and its order. c is the momentum activation, in [0, 1/N]."""
    momentum, aggregated, t = np.zeros(len(theta)), np.zeros(len(theta)), 0
    while True:
        gradient = yield theta
        aggregated = aggregated + gradient
        if (t + 1) % buffer_size == 0:
            momentum = beta * momentum + aggregated / buffer_size
            activated = (1 - c * buffer_size + c) * beta * momentum
            aggregated = np.zeros(len(theta))
        else:
            activated = c * beta * momentum
        theta = theta - epsilon * (activated + gradient / buffer_size)
        t = t + 1


def diloco_events(every: int, server: Generator[Vector, Vector]) -> Vector:
    """theta at the end. Each worker makes H steps from the theta that it has, sends theta - x, and takes the newest
    theta: Algorithms 1 and 2 of Liu et al. 2024, whose workers finish one after the other. Messages take no time."""
    gradient, theta = gradient_of_regression(), next(server)
    claimed, taken = len(SECONDS), [theta] * len(SECONDS)
    x, since = list(taken), [0] * len(SECONDS)
    under_way = [(seconds, worker, worker) for worker, seconds in enumerate(SECONDS)]
    while under_way:
        now, worker, ticket = heapq.heappop(under_way)
        x[worker], since[worker] = x[worker] - RATE * gradient(x[worker], ticket), since[worker] + 1
        if since[worker] == every or claimed == STEPS:
            theta = server.send(taken[worker] - x[worker])
            x[worker] = taken[worker] = theta
            since[worker] = 0
        if claimed < STEPS:
            heapq.heappush(under_way, (now + SECONDS[worker], worker, claimed))
            claimed += 1
    return theta


def elastic_events(every: int, beta: float) -> Vector:
    """The centre x~ at the end: "Asynchronous EASGD", Algorithm 1 (Section 3.1) of Zhang, Choromanska & LeCun 2015,
    arXiv 1412.6651. For worker i, with t_i its clock, tau the communication period and alpha = beta / p::

        x <- x_i
        if tau divides t_i:   x_i <- x_i - alpha (x - x~),   x~ <- x~ + alpha (x - x~)
        x_i <- x_i - eta g_i(x),   t_i <- t_i + 1

    Our departures: x~ is read when the gradient begins, not when it ends; t_i does not begin with an exchange, and all
    workers make a last one.
    """
    gradient, start = gradient_of_regression(), flat(TinyRegression().make_model()).double().numpy()
    centre, claimed, alpha = start, len(SECONDS), beta / len(SECONDS)
    x, clock, read = [start] * len(SECONDS), [0] * len(SECONDS), [start] * len(SECONDS)
    under_way = [(seconds, worker, worker) for worker, seconds in enumerate(SECONDS)]
    while under_way:
        now, i, ticket = heapq.heappop(under_way)
        at = x[i]
        if clock[i] and clock[i] % every == 0:
            x[i] = x[i] - alpha * (at - read[i])
            centre = centre + alpha * (at - read[i])
        x[i], clock[i] = x[i] - RATE * gradient(at, ticket), clock[i] + 1
        if claimed < STEPS:
            read[i] = centre
            heapq.heappush(under_way, (now + SECONDS[i], i, claimed))
            claimed += 1
        else:
            centre = centre + alpha * (x[i] - centre)
    return centre


def served(name: str, options: Served) -> Vector:
    """What the servers have at the end, with workers of unlike speed; all workers have the same."""
    learners = len(SECONDS) + (options.servers == "own")
    outcome = run(name, options, learners, CLUSTER, sgd(RATE), stragglers=SLOW, budget=Budget(steps=STEPS))
    weights: Vector = model(outcome).double().numpy()
    workers = [state.weights for state in outcome.states if state.is_worker]
    assert all(torch.equal(each, workers[0]) for each in workers)
    return weights


@pytest.mark.parametrize(
    "options",
    [
        {"every": 3, "rate": 0.4},
        {"every": 2, "delay": 4, "spread": 0.2, "rate": 0.3, "shards": 2},
        {"every": 1, "delay": 1, "momentum": 0.5, "rate": 0.5},
        {"every": 3, "delay": 2, "momentum": 0.3, "servers": "own"},
    ],
    ids=str,
)
def test_async_diloco_follows_its_events(options: dict[str, Any]) -> None:
    """Every option of the equation has a value of its own somewhere."""
    chosen = AsyncDilocoOptions.model_validate({"by_speed": False} | options)
    start = flat(TinyRegression().make_model()).double().numpy()
    server = delayed_nesterov(start, chosen.rate, chosen.momentum, chosen.delay or len(SECONDS), chosen.spread)
    found, expected = served("async-diloco", chosen), diloco_events(chosen.every, server)
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("options", [{"every": 1}, {"every": 3, "elasticity": 0.6, "servers": "own"}], ids=str)
def test_aeasgd_follows_its_events(options: dict[str, Any]) -> None:
    """On a server beside a worker, and on one of its own."""
    chosen = AeasgdOptions.model_validate(options)
    expected = elastic_events(chosen.every, chosen.elasticity)
    np.testing.assert_allclose(served("aeasgd", chosen), expected, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "key", "instead"),
    [
        (AsyncDilocoOptions, "elasticity", "name: aeasgd"),
        (AeasgdOptions, "momentum", "name: async-diloco"),
        (AeasgdOptions, "by_speed", "name: async-diloco"),
    ],
)
def test_an_option_of_the_other_method_is_refused(kind: type[Served], key: str, instead: str) -> None:
    """And the class says what to write instead."""
    with pytest.raises(ValueError, match=key):
        kind.model_validate({key: 1})
    moved: dict[str, str] = vars(kind)["MOVED"]
    assert instead in moved[key]


def test_a_momentum_that_waits_for_one_push_is_nesterovs() -> None:
    """Beside torch's own, with pushes for gradients."""
    mine, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 50)) for _ in range(2))
    optimizers = [
        DelayedNesterov([mine], rate=0.3, momentum=0.9, delay=1, spread=0.0),
        torch.optim.SGD([theirs], lr=0.3, momentum=0.9, nesterov=True),
    ]
    for seed in range(9):
        for each, optimizer in zip((mine, theirs), optimizers, strict=True):
            each.grad = torch.randn(50, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
    torch.testing.assert_close(mine, theirs, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("every", [1, 4])
def test_one_worker_without_momentum_and_with_rate_1_is_sgd_on_a_server(every: int) -> None:
    """To rounding, because it pushes what it has moved."""
    alone = AsyncDilocoOptions(every=every, momentum=0.0, rate=1.0, servers="own")
    found = model(run("async-diloco", alone, 2, optimizer=sgd(RATE)))
    expected = model(run("parameter-server", ServerOptions(servers="own"), 2, optimizer=sgd(RATE)))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)


def before_the_end(elasticity: float, learners: int = 3) -> tuple[Tensor, Tensor]:
    """Learners' weights `[L, P]` before all take theta at the end, and theta, under gradients that are all 1."""
    before, theta = {}, {}

    async def watched(me: Learner, options: AeasgdOptions) -> None:
        take = me.replace

        def noted(weights: Tensor, piece: slice | None = None) -> None:
            before[me.rank], theta[me.rank] = me.weights.clone(), weights.clone()
            take(weights, piece)

        me.replace = noted  # type: ignore[method-assign]
        await aeasgd(me, options)

    strategy = replace(STRATEGIES["aeasgd"], run=watched)
    options = AeasgdOptions(every=2, elasticity=elasticity)
    job = Job(ConstantGradient(7), strategy, Budget(steps=STEPS), sgd(0.25), options=options, stragglers=SLOW, seed=11)
    VirtualEngine(job, learners, CLUSTER).run()
    return torch.stack([before[rank] for rank in range(learners)]), theta[0]


def test_what_learners_and_centre_give_each_other_adds_up_to_nothing() -> None:
    """AEASGD's sum rule: learners and centre together have moved by the gradients. And r = 0 is lone learners."""
    weights, theta = before_the_end(0.9)
    assert float(theta.max()) < -0.25
    torch.testing.assert_close(weights.sum(dim=0) + theta, torch.full((7,), -0.25 * STEPS), rtol=0.0, atol=1e-5)
    weights, theta = before_the_end(0.0)
    assert torch.equal(theta, torch.zeros(7)) and torch.equal(weights.sum(dim=0), torch.full((7,), -0.25 * STEPS))
    assert float(weights[0, 0]) < float(weights[1, 0]) < float(weights[2, 0])  # each as far as it is fast


def timing(name: str, slow: float, **options: Any) -> TimingOutcome:
    """Four workers, the first of them slow, with a server of their own where the strategy has one."""
    strategy = STRATEGIES[name]
    chosen = strategy.options.model_validate({"every": 6} | options)
    return simulate_timing(
        *(strategy, chosen, 4 + ("servers" in options), CLUSTER, 4_000, 240), stragglers=Stragglers(slow={0: slow})
    )


@pytest.mark.parametrize("name", ["async-diloco", "aeasgd"])
def test_a_slow_learner_does_not_slow_the_others(name: str) -> None:
    """Three learners and a tenth make 240 gradients of 1 s in 77 s; in step all go at the pace of the slow one."""
    found = timing(name, 10.0, servers="own")
    assert found.seconds <= 240 / 3.1 + 10.0
    assert timing("local-sgd", 10.0).seconds == pytest.approx(600.0, rel=0.01)
    counts = [learner.num_steps for learner in found.learners[:4]]
    assert counts[0] <= 9 and min(counts[1:]) >= 76
    assert all(learner.spent.waiting_for_peers < 1e-3 for learner in found.learners[1:4])


def test_steps_between_pushes_are_in_proportion_to_speed() -> None:
    """A learner a third as fast makes a third of the steps for each push, once speeds are known: its first period has
    all H. Bytes are those of the page's formula."""
    found = timing("async-diloco", 3.0, servers="own")
    report, weights, age = 32, 4_000, 16
    pushes = []
    for learner in found.learners[:4]:
        pushed, rest = divmod(learner.averaging.bytes_sent - 3 * report, weights + 2 * report)
        assert rest in (0, weights + report)  # the last push, after which it leaves instead of asking
        pushes.append(pushed)
    by_worker = [learner.num_steps / each for learner, each in zip(found.learners, pushes, strict=False)]
    assert by_worker[1:] == pytest.approx([6.0] * 3, rel=0.1)
    assert 2.0 <= by_worker[0] <= 2.7
    assert found.learners[4].averaging.bytes_sent == (sum(pushes) + 2 * 4) * (weights + age)
    equal = timing("async-diloco", 3.0, servers="own", by_speed=False).learners[0]
    assert equal.num_steps / ((equal.averaging.bytes_sent - 3 * report) // (weights + 2 * report)) > 4.5


def test_the_servers_momentum_is_part_of_a_checkpoint() -> None:
    """One worker in step with its server: a run of 12 + 12 steps has the bits of one of 24."""

    def job(steps: int) -> Job:
        options = AsyncDilocoOptions(every=3, servers="own", delay=2, rate=0.5)
        return Job(
            TinyRegression(), STRATEGIES["async-diloco"], Budget(steps=steps), sgd(RATE), options=options, seed=1
        )

    whole = VirtualEngine(job(24), 2).run()
    half = VirtualEngine(job(12), 2).run().states
    assert torch.equal(model(VirtualEngine(job(24), 2, start=half).run()), model(whole))


@pytest.mark.parametrize(
    ("options", "world", "message"),
    [
        (
            {"spread": 0.5},
            3,
            "0.5 of the momentum's step with each of 3 pushes is more than one step; set at most 0.33",
        ),
        ({"shards": 3}, 2, "3 servers, but only 2 learners"),
        ({"servers": "own"}, 1, "none of the 1 learners is a worker"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], world: int, message: str) -> None:
    """With what to set instead."""
    with pytest.raises(ConfigError, match=message):
        STRATEGIES["async-diloco"].validate(AsyncDilocoOptions(**options), world)


EXACT = {"every": 5, "rate": 1.0, "momentum": 0.0, "delay": 1, "by_speed": False}
"""theta moves by all that is pushed."""
BY_ONE = 2.0**-6


def counting(name: str, options: dict[str, Any], *faults: Fault, steps: int = 60) -> Job:
    """All gradients are 1, so that weights count the steps that are in them, in units of the rate."""
    strategy = STRATEGIES[name]
    chosen = strategy.options.model_validate(options)
    return Job(
        ConstantGradient(7), strategy, Budget(steps=steps), sgd(BY_ONE), options=chosen, faults=faults, seed=11,
        stragglers=Stragglers(slow={2: 1.7}),
    )  # fmt: skip


def steps_in(weights: Tensor) -> float:
    """The number of steps in weights, which began with 0."""
    return float(-weights.double().mean() / BY_ONE)


@pytest.mark.parametrize(
    ("shards", "servers"),
    [
        (1, "beside"),
        pytest.param(2, "beside", marks=pytest.mark.wide),
        pytest.param(2, "own", marks=pytest.mark.wide),
    ],
)
def test_a_loss_costs_no_step_of_those_that_remain(shards: int, servers: str) -> None:
    """A worker is killed at any event, also while pushes are under way to several servers, or have arrived at some.

    What the killed worker had not pushed is lost: at most H steps. The others push theirs, and no server takes a push
    twice.
    """
    learners = 4 + (shards if servers == "own" else 0)
    options = EXACT | {"shards": shards, "servers": servers}
    cluster = CLUSTER.model_copy(update={"link": LinkModel(latency=0.05, bandwidth=1e9)})
    lost, num_losses = [], 0
    for event in range(2, 240, 7):
        outcome = VirtualEngine(
            counting("async-diloco", options, Kill(kill=3, at_event=event)), learners, cluster
        ).run()
        num_losses += len(outcome.losses)
        model = consensus([state.weights for state in outcome.states], [state.kept for state in outcome.states])
        found = -model.double() / BY_ONE
        lost.append(60 - found)
        assert all(torch.equal(state.weights, model) for state in outcome.states if state.is_worker)
    assert num_losses > 20
    apart = torch.stack(lost)
    assert float(apart.min()) > -1e-3 and float(apart.max()) < EXACT["every"] + 1e-3
    assert float(apart.max()) > 1.0


@pytest.mark.parametrize("servers", ["beside", "own"])
def test_a_join_costs_no_step(servers: str) -> None:
    """At any time: what was not pushed is pushed in the next membership, once."""
    options = EXACT | {"shards": 2, "servers": servers}
    cluster = CLUSTER.model_copy(update={"link": LinkModel(latency=0.3, bandwidth=1e9)})
    for tenth in range(1, 60, 4):
        join = Join(join=9, at_seconds=tenth / 4)
        outcome = VirtualEngine(counting("async-diloco", options, join), 5, cluster).run()
        assert outcome.num_memberships == 2
        model = consensus([state.weights for state in outcome.states], [state.kept for state in outcome.states])
        torch.testing.assert_close(model / -BY_ONE, torch.full_like(model, 60.0), rtol=0.0, atol=1e-3)


def test_the_last_of_two_learners_keeps_the_server() -> None:
    """The other is killed; theta, and what the last one had not pushed, are the model that it continues with."""
    for event in range(4, 60, 5):
        outcome = VirtualEngine(counting("async-diloco", EXACT, Kill(kill=1, at_event=event)), 2, CLUSTER).run()
        assert [state.rank for state in outcome.states] == [0] and outcome.losses
        assert 60 - EXACT["every"] - 1e-3 <= steps_in(outcome.states[0].weights) <= 60 + 1e-3


def elastic_sum(*faults: Fault) -> tuple[Tensor, int]:
    """AEASGD's sum of theta and all learners' weights, in steps, before all take theta at the end; what a joiner began
    with is subtracted. And the number of memberships."""
    before: dict[int, Tensor] = {}
    theta: dict[int, Tensor] = {}
    began: list[Tensor] = []

    async def watched(me: Learner, options: AeasgdOptions) -> None:
        take = me.replace
        if me.rank == me.world - 1 == 3:
            began.append(me.weights.clone())

        def noted(weights: Tensor, piece: slice | None = None) -> None:
            before[me.rank], theta[me.rank] = me.weights.clone(), weights.clone()
            take(weights, piece)

        me.replace = noted  # type: ignore[method-assign]
        await aeasgd(me, options)

    job = counting("aeasgd", {"every": 3, "elasticity": 0.6, "shards": 2}, *faults)
    watching = replace(job, strategy=replace(STRATEGIES["aeasgd"], run=watched))
    cluster = CLUSTER.model_copy(update={"link": LinkModel(latency=0.3, bandwidth=1e9)})
    outcome = VirtualEngine(watching, 3, cluster).run()
    total = sum(before.values(), theta[0]) - sum(began, torch.zeros_like(theta[0]))
    return total / -BY_ONE, outcome.num_memberships


@pytest.mark.wide
def test_what_learners_and_centre_give_each_other_adds_up_to_nothing_when_one_joins() -> None:
    """At any time, also while a difference is under way that a learner has applied and a server has not, or one of two
    servers has; and a worker beside a server keeps its own weights."""
    assert elastic_sum()[1] == 1
    for tenth in range(2, 70, 3):
        found, num_memberships = elastic_sum(Join(join=3, at_seconds=tenth / 4))
        assert num_memberships == 2
        torch.testing.assert_close(found, torch.full_like(found, 60.0), rtol=0.0, atol=2e-3)


def test_a_resume_pushes_what_was_not_pushed() -> None:
    """Each learner from its own state, theta from the servers': stopped where nothing is under way."""
    options = EXACT | {"every": 4, "shards": 2}
    stopped: dict[int, LearnerState] = {}

    class AtEpoch(Observer):
        def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
            if not report.is_last:
                stopped[state.rank] = state.copy()

    job = replace(counting("async-diloco", options), stragglers=Stragglers())
    VirtualEngine(job, 3, CLUSTER, AtEpoch()).run()
    theta = consensus([stopped[rank].weights for rank in range(3)], [stopped[rank].kept for rank in range(3)])
    num_done = stopped[0].position.num_done
    assert steps_in(theta) < num_done - 0.5
    start = [stopped[rank].for_computing() for rank in range(3)]
    outcome = VirtualEngine(job, 3, CLUSTER, start=start).run()
    assert steps_in(outcome.states[0].weights) == pytest.approx(60.0, abs=1e-3)


def test_a_server_takes_a_push_once() -> None:
    """A copy that has been lent is for one push; a worker that has not pushed gets the same one again."""
    loans, theta = (
        Loans(1.0, 0.0, 1, 0.0),
        torch.nn.Parameter(torch.zeros(2)),
    )
    optimizer = loans.optimizer([theta])
    first = loans.lend(0, age=0)
    assert loans.lend(first, age=3) == first
    second = loans.lend(0, age=4)
    assert second != first
    for expected in (3, None):
        assert loans.pay_back(first) == expected
        if expected is not None:
            theta.grad = torch.ones(2)
            optimizer.step()
    other = Loans(1.0, 0.0, 1, 0.0)
    other.optimizer([theta]).load_state_dict(optimizer.state_dict())
    assert other.pay_back(first) is None
    assert other.pay_back(second) == 0
    assert other.pay_back(second + 1) == 0  # lent after the server was saved
    assert other.lend(first, age=9) == second + 2


@pytest.mark.parametrize("seed", range(20))
def test_a_new_server_takes_the_next_push_of_each_worker_once(seed: int) -> None:
    """It replaces a server that was lost, of which four workers have copies, and two have none."""
    chance = random.Random(seed)
    newest = chance.randint(4, 3000)
    held = [*chance.sample(range(max(1, newest - 100), newest + 1), 4), 0, 0]
    loans, theta = Loans(1.0, 0.0, 1, 0.0), torch.nn.Parameter(torch.zeros(1))
    optimizer, pushed = loans.optimizer([theta]), set[int]()
    loans.follow(held[0])
    for _ in range(100):
        worker = chance.randrange(6)
        if held[worker] and chance.random() < 0.6:
            assert loans.pay_back(held[worker]) is not None
            theta.grad = torch.ones(1)
            optimizer.step()
            assert loans.pay_back(held[worker]) is None
            pushed.add(held[worker])
        held[worker] = loans.lend(held[worker], age=0)
        assert held[worker] not in pushed and held.count(held[worker]) == 1
