"""Timing-only runs: the same events at the same times as with real gradients, and no weights."""

import resource
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import pytest

from starling.budget import Budget
from starling.checkpoint.state import LearnerState
from starling.configuration import Config
from starling.engines.virtual.cluster import Cluster, ComputeModel, LinkModel
from starling.engines.virtual.engine import VirtualEngine
from starling.engines.virtual.simulation import Simulation
from starling.engines.virtual.timing import TimingOutcome, simulate_timing
from starling.errors import ConfigError, Deadlock
from starling.learner import Learner
from starling.strategies import STRATEGIES, Strategy
from starling.strategies.adpsgd import AsynchronousOptions
from starling.strategies.dpsgd import DpsgdOptions
from starling.training.job import Averaging, EpochReport, Job, Observer, Spent
from starling.training.speeds import Pause, Stragglers
from tests.contract.cases import CHOICES, MakeOptimizer, adam, sgd
from tests.contract.conftest import widely
from tests.contract.problems import TinyRegression

NUM_BYTES = 4 * (5 * 4 + 4 + 4 + 1)
"""The weights of `TinyRegression`."""
CLUSTER = Cluster(
    compute=ComputeModel(distribution="log-normal", seconds=0.1, spread=0.4),
    link=LinkModel(latency=0.005, bandwidth=5000.0, jitter=0.3),
)
STRAGGLERS = Stragglers(slow={1: 3.0}, jitter=0.2, pauses=(Pause(learner=2, after=3, seconds=0.5),))
Event = tuple[float, int, str, bytes]


@dataclass
class Recorded:
    """What happened in a run, without the losses."""

    events: list[Event] = field(default_factory=list)


Did = tuple[int, Spent, Averaging]
"""A learner's gradients, how it spent its time, and its averaging."""


class Epochs(Observer):
    """Keeps the reports of all learners."""

    def __init__(self) -> None:
        self.reports: list[EpochReport] = []

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self.reports.append(report)


def did(reports: Sequence[EpochReport]) -> Did:
    """What a learner did in all epochs together."""
    spent = Spent(*map(sum, zip(*(astuple(each.spent) for each in reports), strict=True)))
    averaging = Averaging(
        sum(each.averaging.rounds for each in reports),
        sum(each.averaging.bytes_sent for each in reports),
        sum((each.averaging.staleness for each in reports), Counter()),
    )
    return sum(each.num_steps for each in reports), spent, averaging


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """The events of the runs that a test makes, in order."""
    found, record = Recorded(), Simulation.record

    def noting(self: Simulation, name: int, kind: str, detail: bytes) -> None:
        found.events.append((self.now, name, kind, b"" if kind == "gradient" else detail))
        record(self, name, kind, detail)

    monkeypatch.setattr(Simulation, "record", noting)
    return found


def real(
    strategy: Strategy, options: Config | None, world: int, steps: int, batches: int, optimizer: MakeOptimizer
) -> tuple[float, list[Did]]:
    """Simulated seconds and what each learner did, with real gradients."""
    job = Job(
        TinyRegression(batches),
        strategy,
        Budget(steps=steps),
        optimizer,
        options=options,  # type: ignore[arg-type]
        stragglers=STRAGGLERS,
        seed=5,
    )
    epochs = Epochs()
    seconds = VirtualEngine(job, world, CLUSTER, epochs).run().seconds
    return seconds, [did([each for each in epochs.reports if each.rank == rank]) for rank in range(world)]


def timed(strategy: Strategy, options: Config | None, world: int, steps: int, vectors: int = 0) -> TimingOutcome:
    return simulate_timing(
        strategy, options, world, CLUSTER, NUM_BYTES, steps, seed=5, stragglers=STRAGGLERS, optimizer_vectors=vectors
    )


@pytest.mark.wide
@pytest.mark.parametrize("world", [3, 6])
@pytest.mark.parametrize("name", widely(name for name in CHOICES if "low-rank" not in name))  # refused
def test_a_timing_only_run_has_the_events_of_a_run_with_real_gradients(
    name: str, world: int, recorded: Recorded
) -> None:
    """The same claims, messages and rounds of the same learners at the same simulated times, the same bytes and
    stalenesses, and the same seconds computing and waiting: all to the last bit."""
    strategy, options = CHOICES[name].strategy, CHOICES[name].options(world)
    seconds, learners = real(strategy, options, world, 30, 1000, sgd(0.01))
    events, recorded.events = recorded.events, []
    outcome = timed(strategy, options, world, 30)
    assert len(events) > 100
    assert recorded.events == events
    assert (outcome.seconds, outcome.num_events) == (seconds, len(events))
    assert [did([each]) for each in outcome.learners] == learners
    assert outcome.num_gradients >= 30
    for rank, times in outcome.gradients_at.items():
        assert list(times) == [now for now, name, kind, _ in events if (name, kind) == (rank, "gradient")]


def test_epochs_of_the_data_change_no_event(recorded: Recorded) -> None:
    """A timing-only run knows no data; a run with real gradients may go through them several times."""
    strategy, options = STRATEGIES["adpsgd"], AsynchronousOptions()
    seconds, learners = real(strategy, options, 3, 30, 7, sgd(0.01))
    events, recorded.events = recorded.events, []
    outcome = timed(strategy, options, 3, 30)
    assert recorded.events == events
    assert outcome.seconds == seconds
    assert [each.averaging for each in outcome.learners] == [averaging for _, _, averaging in learners]


def test_what_the_optimizer_remembers_travels_when_it_is_averaged(recorded: Recorded) -> None:
    """Adam's two moments triple the bytes of `optimizer_state: averaged`, in timing-only runs, too."""
    strategy, options = STRATEGIES["dpsgd"], DpsgdOptions(optimizer_state="averaged")
    _, learners = real(strategy, options, 3, 30, 1000, adam(0.01))
    events, recorded.events = recorded.events, []
    assert [did([each]) for each in timed(strategy, options, 3, 30, vectors=2).learners] == learners
    assert recorded.events == events
    assert timed(strategy, options, 3, 30).bytes_sent * 3 == sum(averaging.bytes_sent for _, _, averaging in learners)


@pytest.mark.parametrize("name", ["post-local-sgd", "adpsgd-all-averaged"])
def test_every_way_of_averaging_sends_what_an_optimizer_would_remember(name: str) -> None:
    """Momentum, of which a timing-only run holds no numbers."""

    def sent(vectors: int) -> int:
        options = CHOICES[name].options(6)
        return simulate_timing(
            CHOICES[name].strategy, options, 6, CLUSTER, NUM_BYTES, 40, seed=2, optimizer_vectors=vectors
        ).bytes_sent

    assert sent(1) > sent(0)


def test_the_seed_decides_over_a_timing_only_run() -> None:
    """One seed has one event hash, another seed another."""
    strategy = STRATEGIES["adpsgd"]
    first, again = (simulate_timing(strategy, None, 4, CLUSTER, NUM_BYTES, 40, seed=1) for _ in range(2))
    assert first == again
    assert simulate_timing(strategy, None, 4, CLUSTER, NUM_BYTES, 40, seed=2).event_hash != first.event_hash


@pytest.mark.wide
def test_messages_take_the_time_of_their_real_size_and_weights_no_memory() -> None:
    """Time per round of `allreduce` has a closed form; the weights of these learners would take 256 GB."""
    world, num_bytes, rounds = 64, 4 * 10**9, 3
    cluster = Cluster(compute=ComputeModel(seconds=2.0), link=LinkModel(latency=0.01, bandwidth=1e9))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = simulate_timing(STRATEGIES["allreduce"], None, world, cluster, num_bytes, rounds * world)
    round_seconds = 2.0 + 2 * (world - 1) * (0.01 + num_bytes / world / 1e9)
    assert outcome.seconds == pytest.approx(rounds * round_seconds)
    assert outcome.bytes_sent == rounds * world * (2 * (world - 1) * num_bytes // world)
    for name in ("adpsgd", "parameter-server", "hogwild"):
        simulate_timing(STRATEGIES[name], None, world, cluster, num_bytes, world)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 200 * 1024


@pytest.mark.parametrize("num_bytes", [0, -4, 6])
def test_a_size_that_is_no_number_of_weights_is_refused(num_bytes: int) -> None:
    """A message of half a weight would be rounded without a word."""
    with pytest.raises(ConfigError, match=f"timing: {num_bytes} bytes are no whole number of float32 weights"):
        simulate_timing(STRATEGIES["allreduce"], None, 2, Cluster(), num_bytes, 4)


def test_without_learners_there_is_nothing_to_time() -> None:
    """Rather than a run that ends at once."""
    with pytest.raises(ConfigError, match="timing: 0 learners; it needs at least 1"):
        simulate_timing(STRATEGIES["allreduce"], None, 0, Cluster(), 4, 4)


def test_a_deadlock_is_reported_in_timing_only_runs() -> None:
    """They drive the strategy's own text, with its faults."""

    async def misses(me: Learner) -> None:
        me.claim()
        await me.exchange(1 - me.rank, me.weights, tag=me.rank)

    with pytest.raises(Deadlock, match="learner 0 waits for learner 1 to send under tag 0; learner 1 waits"):
        simulate_timing(Strategy("misses", "only in tests", misses), None, 2, Cluster(), 400, 2)


def test_a_strategy_that_looks_at_values_learns_that_there_are_none() -> None:
    """It must not decide by numbers that do not exist."""

    async def looks(me: Learner) -> None:
        while me.claim():
            gradient = await me.gradient(me.weights)
            if float(gradient.sum()) > 0.0:
                me.step(gradient)

    with pytest.raises((RuntimeError, NotImplementedError), match="meta tensor"):
        simulate_timing(Strategy("looks", "only in tests", looks), None, 2, Cluster(), 400, 2)
