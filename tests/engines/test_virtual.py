"""The virtual engine: deterministic, timed, and honest about deadlocks."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch

from starling.budget import Budget
from starling.engines.virtual.cluster import Cluster, ComputeModel, ComputeTimes, LinkModel
from starling.engines.virtual.engine import Outcome, VirtualEngine
from starling.engines.virtual.membership import VirtualMembership
from starling.errors import CheckpointError, DataError, Deadlock, NonFiniteError, ProtocolError
from starling.learner import Learner
from starling.strategies import STRATEGIES, Strategy
from starling.training.flat import FlatModel
from starling.training.job import EpochReport, Job, Observer, StepReport
from starling.training.speeds import Stragglers
from tests.contract.cases import CHOICES, Choice, cases, sgd
from tests.contract.problems import TinyRegression
from tests.engines.hashing import printed_under_another_hash

UNEQUAL = Cluster(compute=ComputeModel(distribution="log-normal", seconds=0.1, spread=0.4))
ONE_SLOW = Stragglers(slow={1: 3.0})

every_strategy = pytest.mark.parametrize("strategy", CHOICES)


def run(
    strategy: str | Strategy,
    world: int,
    budget: Budget,
    cluster: Cluster | None = None,
    seed: int = 1,
    stragglers: Stragglers = ONE_SLOW,
) -> Outcome:
    choice = CHOICES[strategy] if isinstance(strategy, str) else Choice(strategy)
    job = Job(
        TinyRegression(),
        choice.strategy,
        budget,
        sgd(0.1),
        options=choice.options(world),
        stragglers=stragglers,
        seed=seed,
    )
    return VirtualEngine(job, world, cluster).run()


@pytest.mark.parametrize("strategy", ["allreduce", "adpsgd-pairs", "hadpsgd"])
def test_what_a_run_remembers_of_its_tickets_does_not_grow_with_their_number(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only claims that others of a team have still to make, and tickets that are done while an earlier one is not."""
    ends: list[VirtualMembership] = []
    finish = VirtualMembership.finish

    def noting(self: VirtualMembership) -> Any:
        ends.append(self)
        return finish(self)

    monkeypatch.setattr(VirtualMembership, "finish", noting)
    run(strategy, 4, Budget(steps=200, minutes=1000.0), UNEQUAL, stragglers=Stragglers(slow={1: 1.5}))
    (end,) = ends
    assert end.batches.done.beyond >= 200
    assert len(end.batches.done.others) == len(end.batches.agreed) == 0


@every_strategy
def test_the_same_seed_gives_the_same_events_and_another_seed_others(strategy: str) -> None:
    """Two runs of one seed are the same to the last event and the last bit."""
    first, again = (run(strategy, 5, Budget(epochs=2), UNEQUAL) for _ in range(2))
    assert first.event_hash == again.event_hash
    assert torch.equal(first.states[3].weights, again.states[3].weights)
    assert run(strategy, 5, Budget(epochs=2), UNEQUAL, seed=2).event_hash != first.event_hash


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_run_leaves_the_garbage_collector_as_the_program_had_it(is_frozen: bool) -> None:
    """During the run it searches only what is new; what a program has frozen stays frozen."""
    frozen: list[int] = []

    class Looks(Observer):
        def on_step(self, report: StepReport) -> None:
            frozen.append(gc.get_freeze_count())

    (gc.freeze if is_frozen else gc.unfreeze)()
    before = gc.get_freeze_count()
    try:
        VirtualEngine(
            Job(TinyRegression(), STRATEGIES["allreduce"], Budget(steps=4), sgd(0.1)), 2, observer=Looks()
        ).run()
        assert (gc.get_freeze_count() > 0) == (before > 0) == is_frozen
    finally:
        gc.unfreeze()
    assert len(frozen) == 4 and min(frozen) > 0


@pytest.mark.wide
def test_the_event_hash_does_not_depend_on_how_python_hashes() -> None:
    """Nothing in a virtual run is ordered by Python's hash of strings."""
    program = (
        "from tests.engines.test_virtual import run, UNEQUAL; from starling.budget import Budget; "
        "print(run('delay-by-one', 5, Budget(epochs=1), UNEQUAL).event_hash)"
    )
    assert printed_under_another_hash(program) == run("delay-by-one", 5, Budget(epochs=1), UNEQUAL).event_hash


def test_allreduce_takes_the_slowest_gradient_and_the_reduction_of_each_round() -> None:
    """Time per round has a closed form: max of the gradients, then 2 (L - 1) messages of P / L numbers."""
    link = LinkModel(latency=0.01, bandwidth=1000.0)
    cluster = Cluster(compute=ComputeModel(seconds=0.1), link=link)
    outcome = run("allreduce", 3, Budget(steps=12), cluster, stragglers=Stragglers(slow={2: 10.0}))
    num_bytes = 4 * (5 * 4 + 4 + 4 + 1)
    expected = 4 * (1.0 + 2 * 2 * (0.01 + -(-num_bytes // 3) / 1000.0))
    assert outcome.seconds == pytest.approx(expected)


def test_delay_by_one_hides_the_average_behind_the_gradient() -> None:
    """When the average takes less time than a gradient, only gradients count."""
    cluster = Cluster(compute=ComputeModel(seconds=1.0), link=LinkModel(latency=0.0, bandwidth=1000.0))
    equal = Stragglers()
    assert run("delay-by-one", 3, Budget(steps=12), cluster, stragglers=equal).seconds == pytest.approx(4.0)
    assert run("allreduce", 3, Budget(steps=12), cluster, stragglers=equal).seconds > 4.4


def test_waiting_is_booked_to_whom_it_belongs() -> None:
    """A fast learner of a synchronous run waits for its peers nine tenths of the time, the slow one never."""
    reports: dict[int, EpochReport] = {}

    class Watcher(Observer):
        def on_epoch(self, report: EpochReport, state: object) -> None:
            reports[report.rank] = report

    cluster = Cluster(compute=ComputeModel(seconds=0.1), link=LinkModel(latency=0.0, bandwidth=1e12))
    job = Job(
        TinyRegression(), STRATEGIES["allreduce"], Budget(steps=20), sgd(0.1), stragglers=Stragglers(slow={1: 10.0})
    )
    VirtualEngine(job, 2, cluster, Watcher()).run()
    fast, slow = reports[0].spent, reports[1].spent
    assert fast.waiting_for_peers / (fast.waiting_for_peers + fast.computing) == pytest.approx(0.9)
    assert slow.waiting_for_peers == pytest.approx(0.0, abs=1e-6)


def test_a_deadlock_says_who_waits_for_whom() -> None:
    """A learner that leaves while others need it is named."""

    async def leaves_early(me: Learner) -> None:
        while me.claim():
            gradient = await me.gradient(me.weights)
            if me.rank == 2:
                return
            me.step(await me.mean(gradient))

    with pytest.raises(Deadlock, match=r"learner 0 waits for mean 0, which learner 2 did not join; learner 1 waits"):
        run(Strategy("leaves", "only in tests", leaves_early), 3, Budget(steps=9))


def test_an_unanswered_exchange_is_a_deadlock() -> None:
    """Two learners that wait for each other under different tags are both named."""

    async def misses(me: Learner) -> None:
        me.claim()
        await me.exchange(1 - me.rank, me.weights, tag=me.rank)

    with pytest.raises(Deadlock, match="learner 0 waits for learner 1 to send under tag 0; learner 1 waits"):
        run(Strategy("misses", "only in tests", misses), 2, Budget(steps=2))


def test_weights_that_change_under_a_gradient_are_refused() -> None:
    """A gradient at `weights` belongs to the weights as they were; the strategy is told to take a snapshot."""

    async def hasty(me: Learner) -> None:
        while me.claim():
            under_way = me.gradient(me.weights)
            me.apply(me.weights)
            me.step(await under_way)

    with pytest.raises(ProtocolError, match="learner 0: its weights changed while a gradient"):
        run(Strategy("hasty", "only in tests", hasty), 1, Budget(steps=2))


def test_losses_that_stay_not_finite_stop_the_run_and_name_the_mini_batch() -> None:
    """An exploding run ends with who, where and what to do."""
    job = Job(TinyRegression(), STRATEGIES["allreduce"], Budget(epochs=40), sgd(1e4))
    with pytest.raises(NonFiniteError, match=r"learner 0: the loss of mini-batch \d+ of epoch \d+ is (nan|inf)"):
        VirtualEngine(job, 2).run()


def made_of(text: Callable[[Learner], Coroutine[Any, Any, None]]) -> Strategy:
    return Strategy("made up", "only in tests", text)


def test_what_a_strategy_raises_arrives_as_it_was() -> None:
    """The clock's library would make a new exception of the first arguments; the file's name would be gone."""

    async def fails(me: Learner) -> None:
        raise OSError(28, "No space left", "the file")

    with pytest.raises(OSError, match="the file"):
        run(made_of(fails), 2, Budget(steps=2))


def test_the_mean_of_a_gradient_that_was_awaited_is_the_mean() -> None:
    """It does not matter whether a gradient is complete when its mean begins."""

    async def patient(me: Learner) -> None:
        while me.claim():
            gradient = me.gradient(me.weights)
            await gradient
            me.step(await me.mean(gradient))

    usual, late = (run(strategy, 2, Budget(steps=6)).states[1] for strategy in ("allreduce", made_of(patient)))
    assert torch.equal(usual.weights, late.weights)


def test_a_gradient_given_to_a_mean_cannot_be_awaited_for_itself() -> None:
    """On real processes only the mean is ever computed; so it is refused here too."""

    async def greedy(me: Learner) -> None:
        me.claim()
        gradient = me.gradient(me.weights)
        me.mean(gradient)
        await gradient

    with pytest.raises(ProtocolError, match="learner 0 awaited a gradient after giving it to `mean`"):
        run(made_of(greedy), 1, Budget(steps=1))


def test_means_and_exchanges_of_the_wrong_size_are_refused_by_name() -> None:
    """gloo would abort the process; the virtual engine says who brought what."""

    async def long(me: Learner) -> None:
        await me.mean(torch.cat([me.weights, me.weights]))

    async def uneven(me: Learner) -> None:
        await me.mean(me.weights[: 3 + me.rank])

    async def unequal(me: Learner) -> None:
        await me.exchange(1 - me.rank, me.weights[: 3 + me.rank], tag=4)

    with pytest.raises(ProtocolError, match=r"learner 0 cannot average torch.float32 \[58\]: its weights .* \[29\]"):
        run(made_of(long), 2, Budget(steps=2))
    with pytest.raises(ProtocolError, match=r"learner 1 cannot join a mean with \[4\]: others brought \[3\]"):
        run(made_of(uneven), 2, Budget(steps=2))
    with pytest.raises(ProtocolError, match=r"learner 1 and learner 0 exchange .* under tag 4: .* \[4\] and .* \[3\]"):
        run(made_of(unequal), 2, Budget(steps=2))


def test_exchanges_of_one_tag_meet_in_the_order_they_began() -> None:
    """As messages between two processes do."""
    met: dict[int, list[float]] = {}

    async def twice(me: Learner) -> None:
        under_way = [me.exchange(1 - me.rank, torch.tensor([float(10 * me.rank + k)]), tag=0) for k in range(2)]
        met[me.rank] = [float(await each) for each in under_way]

    run(made_of(twice), 2, Budget(steps=2))
    assert met == {0: [10.0, 11.0], 1: [0.0, 1.0]}


def test_awaiting_what_no_learner_started_is_refused() -> None:
    """A strategy is not asyncio."""

    async def sleeps(me: Learner) -> None:
        await asyncio.sleep(0)

    with pytest.raises(ProtocolError, match="learner 0 awaited None"):
        run(made_of(sleeps), 1, Budget(steps=1))


def test_a_spent_budget_stays_spent_and_ends_the_epoch_once() -> None:
    """Asking again is answered, and reported to nobody."""
    ends: list[int] = []

    class Watcher(Observer):
        def on_epoch(self, report: EpochReport, state: object) -> None:
            ends.append(report.epoch)

    async def asks_again(me: Learner) -> None:
        while me.claim():
            me.step(await me.gradient(me.weights))
        assert not me.claim()

    VirtualEngine(Job(TinyRegression(), made_of(asks_again), Budget(steps=2), sgd(0.1)), 1, observer=Watcher()).run()
    assert ends == [0]


def test_resuming_with_weights_of_another_model_is_an_error() -> None:
    """One number would otherwise be spread over all weights without a word."""
    job = cases()["allreduce/sgd"].job(1)
    (state,) = VirtualEngine(job, 1).run().states
    with pytest.raises(CheckpointError, match="the checkpoint holds 1 weights, the model has 29"):
        VirtualEngine(job, 1, start=[replace(state, weights=state.weights[:1])])


def test_an_epoch_without_mini_batches_is_an_error_and_not_an_endless_search() -> None:
    """A workload that has nothing to train on is told so."""
    with pytest.raises(DataError, match="epoch 0 has 0 mini-batches"):
        VirtualEngine(Job(TinyRegression(batches=0), STRATEGIES["allreduce"], Budget(steps=2), sgd(0.1)), 1).run()


@every_strategy
@pytest.mark.parametrize("budget", [Budget(steps=0), Budget(epochs=0), Budget(minutes=0.0)])
def test_an_empty_budget_is_a_clean_end(strategy: str, budget: Budget) -> None:
    """No step, no error: the weights are those of the beginning."""
    outcome = run(strategy, 3, budget)
    start = FlatModel(cases()["allreduce/sgd"].job(1).workload.make_model(), torch.device("cpu")).weights
    assert all(torch.equal(state.weights, start) for state in outcome.states)


def test_minutes_are_simulated_minutes_and_agreed_upon() -> None:
    """A budget of minutes ends a synchronous run at the same round for all, by the simulated clock."""
    cluster = Cluster(compute=ComputeModel(distribution="uniform", seconds=1.0, spread=0.5))
    outcome = run("delay-by-one", 4, Budget(minutes=1.0), cluster, stragglers=Stragglers())
    assert 60.0 <= outcome.seconds < 63.0
    assert len({state.position for state in outcome.states}) == 1


@pytest.mark.parametrize("distribution", ["constant", "uniform", "log-normal"])
def test_compute_times_have_the_mean_that_was_asked_for(distribution: str) -> None:
    """Whatever the distribution, `seconds` is its mean."""
    model = ComputeModel(
        distribution=distribution,  # type: ignore[arg-type]
        seconds=0.2,
        spread=0.0 if distribution == "constant" else 0.5,
    )
    times = ComputeTimes(model, seed=1, rank=1)
    assert sum(times.draw() for _ in range(20_000)) / 20_000 == pytest.approx(0.2, rel=0.03)
