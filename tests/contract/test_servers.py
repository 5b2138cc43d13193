"""Parameter servers and Hogwild on the virtual clock: what each rule is equal to, and what it bounds."""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import Tensor, nn

from starling.budget import Budget
from starling.checkpoint.state import LearnerState
from starling.configuration import Config, checked
from starling.consensus import consensus
from starling.engines.virtual.cluster import Cluster, ComputeModel, LinkModel, MemoryModel
from starling.engines.virtual.engine import Outcome, VirtualEngine
from starling.errors import ConfigError, NonFiniteError
from starling.strategies import STRATEGIES
from starling.strategies.allreduce import AllReduceOptions
from starling.strategies.delayed import DelayOptions
from starling.strategies.hogwild import HogwildOptions
from starling.strategies.parts.rules import Asynchronous, Hybrid, ServerOptions, Summed, Synchronous
from starling.training.faults import Join, NotFinite
from starling.training.job import EpochReport, Job, Observer, StepReport
from starling.training.speeds import Stragglers
from starling.workload import Ticket
from tests.contract.cases import MakeOptimizer, adam, sgd
from tests.contract.oracle import Vector, gradient_of_regression
from tests.contract.problems import ConstantGradient, Points, TinyRegression, Workload

AT_ONCE = LinkModel(latency=0.0, bandwidth=1e18)
INSTANT = MemoryModel(bandwidth=1e18)
EQUAL = Cluster(compute=ComputeModel(seconds=1.0), link=LinkModel(latency=0.01, bandwidth=1e15), memory=INSTANT)
ADAM = adam(0.01)
VARYING = Cluster(compute=ComputeModel(distribution="log-normal", spread=0.5), link=AT_ONCE, memory=INSTANT)


class Notes(Observer):
    """Remembers what learners report."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.epochs: list[EpochReport] = []
        self.staleness: Counter[int] = Counter()

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self.epochs.append(report)
        self.staleness.update(report.averaging.staleness)


def run(
    strategy: str,
    options: Config,
    learners: int,
    cluster: Cluster = EQUAL,
    optimizer: MakeOptimizer = ADAM,
    workload: Workload[Points] | None = None,
    notes: Notes | None = None,
    **job: Any,
) -> Outcome:
    return VirtualEngine(
        Job(
            workload or TinyRegression(),
            STRATEGIES[strategy],
            make_optimizer=optimizer,
            options=options,
            **{"budget": Budget(steps=24), "seed": 11} | job,
        ),
        learners,
        cluster,
        notes,
    ).run()


def served(learners: int, cluster: Cluster = EQUAL, **options: Any) -> Tensor:
    """What a run with servers of their own for so many workers ends in."""
    choice = ServerOptions.model_validate({"servers": "own"} | options)
    return model(run("parameter-server", choice, learners + choice.shards, cluster))


def model(outcome: Outcome) -> Tensor:
    return consensus([state.weights for state in outcome.states], [state.kept for state in outcome.states])


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("learners", [2, 3, 4])
def test_hybrid_is_allreduce_to_rounding(learners: int, shards: int) -> None:
    """The mean of all gradients at the same weights, under Adam, wherever the step is made: synchronous SGD of the
    sharded server, Section 4.1 of Dean et al. 2012 without its asynchrony."""
    expected = model(run("allreduce", AllReduceOptions(), learners))
    torch.testing.assert_close(served(learners, VARYING, update="hybrid", shards=shards), expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("cluster", [EQUAL, VARYING], ids=["equal", "varying"])
def test_summed_over_one_gradient_is_asynchronous(cluster: Cluster) -> None:
    """To the bit, and in the same time."""
    one = run("parameter-server", Summed(sum=1), 4, cluster)
    asynchronous = run("parameter-server", Asynchronous(), 4, cluster)
    assert torch.equal(model(one), model(asynchronous))
    assert one.event_hash == asynchronous.event_hash


@pytest.mark.parametrize(
    ("staleness", "overlap"),
    [
        ("gap-aware", True),
        *(
            pytest.param(*each, marks=pytest.mark.wide)
            for each in [("none", False), ("none", True), ("gap-aware", False)]
        ),
    ],
)
def test_gradients_that_wait_for_a_sum_outlive_a_join(staleness: Any, overlap: bool) -> None:
    """Where messages take no time, each counts once, whenever a learner joins; a rule for staleness leaves those of the
    earlier membership as they are."""
    options = Summed(sum=7, shards=2, overlap=overlap, staleness=staleness)
    uneven = VARYING.model_copy(update={"compute": ComputeModel(seconds=1.0, distribution="log-normal", spread=0.5)})
    found = []
    for tenth in range(5, 60, 4):
        outcome = run(
            "parameter-server", options, 3, uneven, sgd(2.0**-6), ConstantGradient(7), budget=Budget(steps=60),
            faults=[Join(join=9, at_seconds=tenth / 10)],
        )  # fmt: skip
        assert outcome.num_memberships == 2
        found.append(-model(outcome) * 2.0**6)
    if staleness == "none":
        assert all(torch.equal(each, torch.full_like(each, 60.0)) for each in found), found
    else:
        assert all(bool(((each > 0.0) & (each <= 60.0)).all()) for each in found), found


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("learners", [2, 3, 4])
def test_summed_over_all_workers_of_one_speed_is_a_synchronous_step(learners: int, shards: int) -> None:
    """Gradients that arrive together make one step before anybody gets weights again."""
    for combine in ("sum", "mean"):
        summed = served(learners, update="summed", sum=learners, combine=combine, shards=shards)
        assert torch.equal(summed, served(learners, update="hybrid", combine=combine))


@pytest.mark.parametrize(
    "options",
    [
        {"update": "hybrid"},
        {"update": "synchronous"},
        {},
        {"overlap": True},
        {"update": "summed", "sum": 3},
        {"staleness_bound": 1},
        {"scale_by_staleness": True},
    ],
    ids=str,
)
def test_sharding_changes_nothing(options: dict[str, Any]) -> None:
    """Where messages take no time, any number of servers gives the bits of one, whatever the workers' speeds."""
    expected = served(3, VARYING, **options)
    for shards in (2, 5):
        assert torch.equal(served(3, VARYING, **options, shards=shards), expected)


def one_after_the_other(
    seconds: Sequence[float], steps: int, rate: Callable[[int], float]
) -> tuple[Vector, Counter[int]]:
    """Asynchronous SGD as a list of events: w <- w - a g(Phi) whenever a worker is done (Downpour SGD, Section 4.1 of
    Dean et al. 2012; for Hogwild, Algorithm 1 of Niu et al. 2011, arXiv 1106.5730, with dense gradients).

    `rate` gives the learning rate for a gradient of that staleness; a / staleness is the modulation of Zhang et al.
    2016, arXiv 1511.05950. The last weights, and how often each staleness was seen.
    """
    gradient = gradient_of_regression()
    start = torch.cat([part.detach().reshape(-1) for part in TinyRegression().make_model().parameters()])
    weights, changes, seen = start.double().numpy(), 0, Counter[int]()
    under_way = [(each, worker, worker, weights, 0) for worker, each in enumerate(seconds)]
    claimed = len(seconds)
    heapq.heapify(under_way)
    while under_way:
        now, worker, ticket, read, when = heapq.heappop(under_way)
        staleness = changes - when
        weights = weights - rate(staleness) * gradient(read, ticket)
        changes, seen[staleness] = changes + 1, seen[staleness] + 1
        if claimed < steps:
            heapq.heappush(under_way, (now + seconds[worker], worker, claimed, weights, changes))
            claimed += 1
    return weights, seen


@pytest.mark.parametrize(
    ("strategy", "options", "rate"),
    [
        ("parameter-server", Asynchronous(), lambda staleness: 0.05),
        ("parameter-server", ServerOptions(shards=3), lambda staleness: 0.05),
        ("parameter-server", Asynchronous(scale_by_staleness=True), lambda staleness: 0.05 / max(1, staleness)),
        ("hogwild", HogwildOptions(), lambda staleness: 0.05),
        ("hogwild", HogwildOptions(scale_by_staleness=True), lambda staleness: 0.05 / max(1, staleness)),
    ],
    ids=["asynchronous", "sharded", "scaled by staleness", "hogwild", "hogwild scaled by staleness"],
)
def test_asynchronous_updates_follow_their_events(strategy: str, options: Config, rate: Callable[[int], float]) -> None:
    """Workers of unlike speed against a list of events in double precision: every change in its order, at its age."""
    seconds = (1.0, 2.3, 3.7)
    slow = Stragglers(slow={rank: each for rank, each in enumerate(seconds) if each > 1.0})
    instant = Cluster(compute=ComputeModel(seconds=1.0), link=AT_ONCE, memory=INSTANT)
    expected, seen = one_after_the_other(seconds, 24, rate)
    notes = Notes()
    outcome = run(strategy, options, 3, instant, sgd(0.05), notes=notes, stragglers=slow)
    assert_allclose(model(outcome).double().numpy(), expected, rtol=0.0, atol=2e-6)
    pieces = getattr(options, "shards", 1)
    assert notes.staleness == Counter({staleness: count * pieces for staleness, count in seen.items()})


@pytest.mark.wide
@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(2, 5),
    bound=st.integers(0, 4),
    overlap=st.booleans(),
    update=st.sampled_from(["asynchronous", "summed"]),
    factors=st.lists(st.floats(1.0, 20.0), min_size=5, max_size=5),
    jitter=st.floats(0.0, 3.0),
    latency=st.floats(0.0, 2.0),
    seed=st.integers(0, 1000),
)
def test_a_staleness_bound_is_never_exceeded(
    workers: int,
    bound: int,
    overlap: bool,
    update: str,
    factors: list[float],
    jitter: float,
    latency: float,
    seed: int,
) -> None:
    """Whatever the speeds: no worker begins a gradient when it is more than `bound` ahead of the slowest that is left:
    the bound of stale synchronous parallel, Section 2 of Ho et al. 2013."""
    options = ServerOptions.model_validate(
        {"update": update, "staleness_bound": bound, "overlap": overlap and bound > 0}
        | ({"sum": 2} if update == "summed" else {})
    )
    notes = Notes()
    run(
        "parameter-server",
        options,
        workers,
        Cluster(compute=ComputeModel(seconds=1.0), link=LinkModel(latency=latency, bandwidth=1e15)),
        sgd(0.01),
        notes=notes,
        budget=Budget(steps=30),
        stragglers=Stragglers(slow=dict(enumerate(factors[:workers])), jitter=jitter),
        seed=seed,
    )
    last = {report.rank: place for place, report in enumerate(notes.steps)}
    made = Counter(dict.fromkeys(last, 0))
    furthest = 0
    for place, report in enumerate(notes.steps):
        # whoever makes its last gradient later than this one is still among those that may be waited for
        slowest = min((made[rank] for rank in last if last[rank] > place and rank != report.rank), default=None)
        if slowest is not None:
            furthest = max(furthest, made[report.rank] - slowest)
        made[report.rank] += 1
    assert furthest <= bound
    assert sum(made.values()) == 30


def test_without_a_bound_a_fast_worker_runs_ahead() -> None:
    """What the property above would find: ten gradients of the fast one for each of the slow one."""
    notes = Notes()
    slow = Stragglers(slow={1: 10.0})
    run("parameter-server", Asynchronous(), 2, EQUAL, notes=notes, budget=Budget(minutes=0.5), stragglers=slow)
    made = Counter(report.rank for report in notes.steps)
    assert made[0] > 8 * made[1] > 0


def test_one_worker_at_a_time_is_never_stale() -> None:
    """`synchronous`: gradients do not overlap in time, each is taken at the newest weights, and all get their turns."""
    notes = Notes()
    outcome = run("parameter-server", Synchronous(shards=2), 3, EQUAL, notes=notes)
    assert set(notes.staleness) == {0}
    assert outcome.seconds > 24.0
    assert Counter(report.rank for report in notes.steps) == {0: 8, 1: 8, 2: 8}
    plain = run("allreduce", AllReduceOptions(), 1)
    torch.testing.assert_close(model(outcome), model(plain), rtol=0.0, atol=1e-6)


def test_staleness_is_counted_from_the_weights_that_a_gradient_was_taken_at() -> None:
    """With `overlap` those are the ones before the last pull; with `delayed`, those of d steps ago."""
    overlapping, late = Notes(), Notes()
    run("parameter-server", Asynchronous(overlap=True), 1, EQUAL, notes=overlapping)
    assert overlapping.staleness == Counter({0: 1, 1: 23})
    run("delayed", DelayOptions(delay=3), 1, EQUAL, notes=late)
    assert late.staleness == Counter({0: 1, 1: 1, 2: 1, 3: 21})


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("parameter-server", Asynchronous()),
        ("parameter-server", Asynchronous(servers="own", staleness_bound=1)),
        ("hogwild", HogwildOptions()),
    ],
    ids=["beside", "own", "hogwild"],
)
def test_no_learner_spends_more_than_the_time_there_was(strategy: str, options: Config) -> None:
    """Waiting for the others behind the last mini-batch is no part of an epoch."""
    notes = Notes()
    run(strategy, options, 3, VARYING, notes=notes, stragglers=Stragglers(slow={0: 10.0}))
    for report in notes.epochs:
        assert report.spent.computing + report.spent.waiting_for_peers <= report.seconds * (1 + 1e-9)


def test_the_gradients_left_over_make_a_last_step() -> None:
    """Seven gradients in sums of three are three steps, and none is lost."""
    weights = model(
        run(
            "parameter-server",
            Summed(sum=3),
            2,
            optimizer=sgd(1.0),
            workload=ConstantGradient(4),
            budget=Budget(steps=7),
        )
    )
    assert torch.equal(weights, torch.full((4,), -7.0))


class Torn(ConstantGradient):
    """Remembers whether weights that began alike, and change alike, were unlike when a gradient was taken."""

    num_torn = 0

    def loss(self, network: nn.Module, examples: Points) -> Tensor:
        (weight,) = network.parameters()
        self.num_torn += bool((weight != weight[0, 0]).any())
        return super().loss(network, examples)


@pytest.mark.parametrize(("pieces", "is_torn"), [(1, False), (8, True)])
def test_hogwild_reads_while_others_write(pieces: int, is_torn: bool) -> None:
    """Others come in between two pieces, so that what was read is of different ages; yet no step is lost."""
    workload = Torn(64)
    slow_memory = Cluster(
        compute=ComputeModel(distribution="uniform", seconds=1.0, spread=0.5), memory=MemoryModel(bandwidth=256.0)
    )
    options = HogwildOptions(piece_megabytes=256 / pieces / 2**20)
    outcome = run("hogwild", options, 4, slow_memory, sgd(1.0), workload, budget=Budget(steps=60))
    assert (workload.num_torn > 0) == is_torn
    assert torch.equal(model(outcome), torch.full((64,), -60.0))


class Overflowing(TinyRegression):
    """Of some mini-batches, or all, the loss is finite and its gradient is not."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.always = always

    def loss(self, network: nn.Module, examples: Points) -> Tensor:
        loss = super().loss(network, examples)
        (first, *_) = network.parameters()
        is_one = self.always or examples.targets.sum() > 3.0
        return loss + (first.sum() * 0.0).sqrt() if is_one else loss


@pytest.mark.parametrize(
    ("strategy", "options"), [("parameter-server", Asynchronous()), ("hogwild", HogwildOptions())], ids=str
)
def test_a_gradient_that_is_not_finite_is_not_sent(strategy: str, options: Config) -> None:
    """It counts as nothing, and the model stays finite; after many in a row the learner says which it was."""
    outcome = run(strategy, options, 3, workload=Overflowing())
    assert model(outcome).isfinite().all()
    with pytest.raises(
        NonFiniteError, match=r"learner \d: the gradient of mini-batch \d+ of epoch \d+ is not finite, and its last 10"
    ):
        run(strategy, options, 3, workload=Overflowing(always=True), budget=Budget(steps=60))


def with_momentum_and_decay(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that moves the weights even where the gradient is 0."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


MOVING_BY_THEMSELVES: dict[str, MakeOptimizer] = {
    "momentum": with_momentum_and_decay,
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


def stepping_through(optimizer: MakeOptimizer, sums: Sequence[Sequence[int]], mean: bool) -> Tensor:
    """The plain loop whose every step takes the sum, or the mean, of the gradients of some mini-batches: the summed
    updates of Aji & Heafield 2019, arXiv 1906.03496."""
    workload = TinyRegression()
    network = workload.make_model()
    chosen = optimizer(list(network.parameters()))
    for numbers in sums:
        chosen.zero_grad()
        for number in numbers:
            (points,) = workload.load(Ticket(number // 12, number % 12, number))
            (workload.loss(network, points) / (len(numbers) if mean else 1)).backward()
        chosen.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in network.parameters()])


ALL_BUT_TWO = [[number] for number in range(12) if number not in (2, 5)]
LEFT_OUT: dict[str, tuple[str, Config, int, tuple[int, ...], list[list[int]]]] = {
    "asynchronous": ("parameter-server", Asynchronous(), 1, (3, 6), ALL_BUT_TWO),
    "sharded": ("parameter-server", ServerOptions(shards=3, servers="own"), 4, (3, 6), ALL_BUT_TWO),
    "synchronous": ("parameter-server", Synchronous(), 1, (3, 6), ALL_BUT_TWO),
    "hogwild": ("hogwild", HogwildOptions(), 1, (3, 6), ALL_BUT_TWO),
    "hybrid": (
        "parameter-server",
        Hybrid(shards=2),
        3,
        (1, 3),
        [[1, 2], [3, 4, 5], [7, 8], [9, 10, 11]],
    ),
    "hybrid of one": ("parameter-server", Hybrid(), 1, (3, 6), ALL_BUT_TWO),
    "summed": (
        "parameter-server",
        Summed(sum=3),
        1,
        (2, 6),
        [[0, 2, 3], [4, 6, 7], [8, 9, 10], [11]],
    ),
}
"""Strategy, options, learners, at which of its mini-batches the gradient of learner 0 is not finite, and which
mini-batches are then in each step."""


@pytest.mark.parametrize("optimizer", MOVING_BY_THEMSELVES.values(), ids=MOVING_BY_THEMSELVES)
@pytest.mark.parametrize(("strategy", "options", "learners", "faults", "sums"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_gradient_that_is_not_finite_makes_no_optimizer_step(
    optimizer: MakeOptimizer,
    strategy: str,
    options: Config,
    learners: int,
    faults: tuple[int, ...],
    sums: list[list[int]],
) -> None:
    """No momentum, decay or count of staleness moves; means and sums are those of the finite gradients alone.

    The oracle is the plain loop that leaves those mini-batches out.
    """
    notes = Notes()
    not_finite = tuple(NotFinite(nan=0, at_step=step) for step in faults)
    outcome = run(
        strategy, options, learners, optimizer=optimizer, notes=notes, budget=Budget(steps=12), faults=not_finite
    )
    is_mean = getattr(options, "update", "") == "hybrid"
    torch.testing.assert_close(model(outcome), stepping_through(optimizer, sums, is_mean), rtol=0.0, atol=1e-6)
    assert notes.staleness.total() == sum(map(len, sums)) * getattr(options, "shards", 1)
    assert sum(report.num_not_finite for report in notes.epochs) == len(faults)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shards": 2, "overlap": True},
        {"staleness_bound": 1},
        {"staleness_bound": 1, "overlap": True},
        {"update": "summed", "sum": 3, "overlap": True, "staleness_bound": 2},
        {"update": "synchronous", "shards": 2},
        {"update": "hybrid", "shards": 2},
        {"update": "hybrid", "servers": "own"},
    ],
    ids=str,
)
def test_workers_without_a_finite_gradient_change_nothing_and_hold_up_no_one(options: dict[str, Any]) -> None:
    """Not one of 24 gradients is finite: the run ends, and the model is what it was at the start."""
    notes = Notes()
    everything = tuple(NotFinite(nan=rank, at_step=step) for rank in range(3) for step in range(1, 25))
    outcome = run(
        "parameter-server",
        ServerOptions.model_validate(options),
        3,
        VARYING,
        with_momentum_and_decay,
        notes=notes,
        faults=everything,
        most_not_finite=25,
    )
    start = torch.cat([part.detach().reshape(-1) for part in TinyRegression().make_model().parameters()])
    assert torch.equal(model(outcome), start)
    assert not notes.staleness
    assert sum(report.num_not_finite for report in notes.epochs) == 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update": "summed"}, "sum: missing"),
        ({"sum": 4}, "sum: only for update: summed; leave it out"),
        ({"update": "summed", "sum": 0}, "greater than or equal to 1"),
        (
            {"update": "hybrid", "staleness_bound": 3, "overlap": True},
            "staleness_bound: only for update: asynchronous, summed; leave it out\n  overlap: only for update: ",
        ),
        ({"update": "hybrid", "scale_by_staleness": True}, "scale_by_staleness: only for update: asynchronous, summed"),
        ({"update": "hybrid", "bound": 3}, "bound: unknown key; "),
        ({"update": "sumed", "sum": 4}, "'asynchronous', 'summed', 'hybrid' or 'synchronous'"),
        ({"staleness_bound": -1}, "greater than or equal to 0"),
        ({"combine": "mean"}, "combine: only for update: summed, hybrid"),
        ({"update": "synchronous", "overlap": True}, "overlap: only for update: asynchronous, summed"),
        ({"overlap": True, "staleness_bound": 0}, "overlap needs at least 1"),
        ({"shards": 0}, "greater than or equal to 1"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    """Before anything starts."""
    with pytest.raises(ConfigError, match=message):
        checked(ServerOptions, options, "parameter-server")


@pytest.mark.parametrize(
    ("options", "learners", "message"),
    [
        (ServerOptions(shards=3), 2, "3 servers, but only 2 learners"),
        (ServerOptions(shards=2, servers="own"), 2, "none of the 2 learners is a worker"),
        (ServerOptions(shards=30), 30, "30 servers cannot share the model's 29 parameters"),
    ],
    ids=["beside", "own", "parameters"],
)
def test_more_servers_than_there_is_room_for_are_refused(options: ServerOptions, learners: int, message: str) -> None:
    """By number of learners, and by number of parameters."""
    with pytest.raises(ConfigError, match=message):
        run("parameter-server", options, learners)


def test_the_servers_optimizer_and_the_last_weights_are_what_a_resumed_run_has() -> None:
    """A run of 24 + 24 gradients has the bits of one of 48, momentum and Adam's count of steps included."""
    options = Hybrid(shards=2, servers="own")

    def job(steps: int) -> Job:
        workload, budget = TinyRegression(), Budget(steps=steps)
        return Job(workload, STRATEGIES["parameter-server"], budget, adam(0.01), options=options, seed=11)

    whole = VirtualEngine(job(48), 4, EQUAL).run()
    half = VirtualEngine(job(24), 4, EQUAL).run().states
    resumed = VirtualEngine(job(48), 4, EQUAL, start=half).run()
    assert torch.equal(model(resumed), model(whole))
    assert not torch.equal(model(resumed), consensus([each.weights for each in half], [each.kept for each in half]))


def test_what_servers_keep_is_the_consensus_and_workers_end_with_it() -> None:
    """Every learner that computes has the last weights at the end; servers have their own pieces of them."""
    outcome = run("parameter-server", ServerOptions(shards=2, servers="own"), 5, VARYING)
    expected = model(outcome)
    assert [state.is_worker for state in outcome.states] == [True, True, True, False, False]
    assert [state.kept for state in outcome.states[3:]] == [[(0, 14)], [(14, 29)]]
    for state in outcome.states[:3]:
        assert torch.equal(state.weights, expected)
    assert np.isfinite(expected.numpy()).all()
