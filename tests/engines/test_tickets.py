"""Every mini-batch is computed exactly once: at any speeds, across stops and resumes, with any number of learners."""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from starling.budget import Budget
from starling.checkpoint.state import LearnerState
from starling.consensus import consensus
from starling.engines.virtual.cluster import Cluster, ComputeModel, LinkModel
from starling.engines.virtual.engine import VirtualEngine
from starling.strategies import STRATEGIES
from starling.strategies.adpsgd import AsynchronousOptions
from starling.strategies.hadpsgd import HierarchicalOptions
from starling.training.job import EpochReport, Job, Observer, StepReport
from starling.training.speeds import Stragglers
from starling.training.tickets import Barriers, DoneTickets, SyncGroupTickets
from starling.workload import Position, Ticket, Workload
from tests.contract.cases import CHOICES, PERIODIC, sgd
from tests.contract.problems import Points, TinyRegression

UNLIMITED = Budget(steps=1 << 40)


class Uneven(Workload[Points]):
    """Epochs of different lengths, over and over; the data do not matter."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)

    def make_model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return nn.Linear(2, 1)

    def num_batches(self, epoch: int) -> int:
        return self.lengths[epoch % len(self.lengths)]

    def load(self, ticket: Ticket) -> Sequence[Points]:
        return [Points(torch.ones(1, 2), torch.zeros(1))]

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        return model(examples.inputs).square().mean()

    def tickets_before(self, position: Ticket) -> set[Ticket]:
        """All tickets before one, counted off one by one."""
        step, found = 0, set()
        for epoch in range(position.epoch + 1):
            for index in range(self.num_batches(epoch) if epoch < position.epoch else position.index):
                found.add(Ticket(epoch, index, step))
                step += 1
        assert step == position.step
        return found


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(lengths, st.lists(st.tuples(st.integers(1, 7), st.integers(0, 12), st.randoms()), min_size=1, max_size=6))
def test_what_is_done_and_what_is_unfinished_are_all_tickets_before_the_position(
    lengths: list[int], runs: list[tuple[int, int, object]]
) -> None:
    """Whatever teams take turns, however many portions each is given, and whichever of them it leaves undone."""
    workload = Uneven(lengths)
    position, done = Position(), Counter[Ticket]()
    for sync_group_size, num_portions, random in runs:
        tickets = SyncGroupTickets(workload, position, UNLIMITED, sync_group_size)
        undone = {number for number in range(num_portions) if random.random() < 0.3}  # type: ignore[attr-defined]
        for number in range(num_portions):
            portion = [tickets.ticket(number, member) for member in range(sync_group_size)]
            assert all(tickets.number_of(ticket) == number for ticket in portion)
            if number not in undone:
                done.update(portion)
        position = tickets.position(num_portions, undone)
        everything = workload.tickets_before(position.next_ticket)
        assert set(done) | set(position.outstanding) == everything
        assert len(done) + len(position.outstanding) == len(everything)
        assert set(done.values()) <= {1}
        assert position.num_done == len(done)


@given(lengths, st.integers(1, 7), st.one_of(st.none(), st.integers(1, 20)), st.integers(1, 40), st.data())
def test_barriers_are_the_same_for_everybody(
    lengths: list[int], sync_group_size: int, every: int | None, num_portions: int, data: st.DataObject
) -> None:
    """A learner that claims few portions passes the same barriers as one that claims them all; each epoch ends
    once, and a portion before its end is the last that begins in it."""
    tickets = SyncGroupTickets(Uneven(lengths), Position(), UNLIMITED, sync_group_size)
    claimed = [*sorted(data.draw(st.sets(st.integers(0, num_portions - 1)))), num_portions]
    diligent, lazy = Barriers(tickets, every), Barriers(tickets, every)
    barriers = [barrier for number in range(num_portions + 1) for barrier in diligent.until(number)]
    assert barriers == [barrier for number in claimed for barrier in lazy.until(number)]
    ended = [epoch for barrier in barriers for epoch in barrier.ended]
    assert ended == list(range(tickets.ticket(num_portions).epoch))
    for barrier in barriers:
        assert all(
            tickets.ticket(barrier.number - 1).epoch <= epoch < tickets.ticket(barrier.number).epoch
            for epoch in barrier.ended
        )
    if every is not None:
        steps = [barrier.number * sync_group_size for barrier in barriers]
        assert all(
            any(k * every <= step < k * every + sync_group_size for step in steps)
            for k in range(1, num_portions * sync_group_size // every + 1)
        )


@settings(deadline=None)
@given(st.permutations(range(30)), st.integers(0, 40), st.lists(st.integers(0, 9), unique=True))
def test_done_tickets_are_a_set_that_keeps_only_what_is_not_contiguous(
    order: list[int], first: int, outstanding: list[int]
) -> None:
    """In whatever order they are done, 10,000 of them in a row, and some from before the position."""
    start = Position(Ticket(0, first + 10, first + 10), tuple(Ticket(0, step, step) for step in sorted(outstanding)))
    done, expected = DoneTickets(start), set[int]()
    for step in [*outstanding, *(first + 10 + each for each in order)]:
        done.add(step)
        expected.add(step)
        assert all((step in done) == (step in expected) for step in range(100))
    for step in range(first + 40, first + 10_040):
        done.add(step)
    assert len(done.others) == len(outstanding) and done.below == first + 10_040


def test_passing_barriers_costs_about_the_same_however_many_portions_others_have_claimed_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A learner among thousands has one in thousands of the portions. The agreed barriers behind it are forgotten."""
    tickets, num_looks = SyncGroupTickets(Uneven([1 << 30]), Position(), UNLIMITED, 1), 0
    barriers = Barriers(tickets, every=400_000)
    look = SyncGroupTickets.ticket

    def counted(self: SyncGroupTickets, number: int, member: int = 0) -> Ticket:
        nonlocal num_looks
        num_looks += 1
        return look(self, number, member)

    monkeypatch.setattr(SyncGroupTickets, "ticket", counted)
    for number in range(0, 1_000_000, 10_000):
        barriers.add(number + 5)
    found = [barrier.number for barrier in barriers.until(1_000_000)]
    assert found == sorted([*range(5, 1_000_000, 10_000), 400_000, 800_000])
    assert num_looks < 200 * len(found)
    assert not barriers._agreed


@dataclass
class Ledger(Observer):
    """Remembers who computed what, and what every learner kept at each barrier."""

    seen: list[tuple[int, Ticket]] = field(default_factory=list)
    kept: dict[Position, dict[int, LearnerState]] = field(default_factory=dict)

    def on_step(self, report: StepReport) -> None:
        self.seen.append((report.rank, report.ticket))

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self.kept.setdefault(state.position, {})[state.rank] = state

    def on_barrier(self, state: LearnerState) -> None:
        self.kept.setdefault(state.position, {})[state.rank] = state


@dataclass(frozen=True)
class Run:
    """One start of a job: its learners, their speeds, how it agrees, and how it ends."""

    learners: int
    strategy: str
    steps: int
    minutes: float | None
    slow: float
    dies: bool
    """Whether the run is lost in the end, so that the next goes on from an earlier barrier."""

    def job(self, workload: Workload[Points], done: int, minutes: float) -> Job:
        options = {
            "adpsgd": AsynchronousOptions(pattern="pairs"),
            "hadpsgd": HierarchicalOptions(per_node=2, pattern="pairs"),
        }.get(self.strategy)
        limit = None if self.minutes is None else minutes + self.minutes
        return Job(
            workload,
            STRATEGIES[self.strategy],
            Budget(steps=done + self.steps, minutes=limit),
            sgd(0.01),
            stragglers=Stragglers(slow={0: self.slow}, jitter=0.3),
            checkpoint_every=5,
            options=STRATEGIES[self.strategy].options() if options is None else options,
        )


runs = st.builds(
    Run,
    learners=st.sampled_from([2, 4, 6]),
    strategy=st.sampled_from(["allreduce", "delay-by-one", "dpsgd", "adpsgd", "hadpsgd", "parameter-server"]),
    steps=st.integers(1, 20),
    minutes=st.one_of(st.none(), st.floats(0.05, 0.3)),
    slow=st.floats(1.0, 8.0),
    dies=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(lengths, st.lists(runs, min_size=1, max_size=4))
def test_every_mini_batch_counts_exactly_once(lengths: list[int], runs: list[Run]) -> None:
    """Under every strategy, with fast and slow learners, budgets that end anywhere, runs that are lost and gone on with
    from any barrier, and another number of learners each time."""
    workload = Uneven(lengths)
    cluster = Cluster(compute=ComputeModel(seconds=1.0), link=LinkModel(latency=1e-3, bandwidth=1e9))
    position, states, minutes = Position(), None, 0.0
    counted: list[Ticket] = []
    for run in runs:
        ledger = Ledger()
        model = states and consensus([state.weights for state in states], [state.kept for state in states])
        start = states and [
            LearnerState(rank, run.learners, position, minutes, model, state.buffers, state.optimizer)
            for rank in range(run.learners)
            for state in [states[rank % len(states)]]
        ]
        outcome = VirtualEngine(
            run.job(workload, position.num_done, minutes), run.learners, cluster, ledger, start or None
        ).run()
        end = outcome.states[0].position
        assert {state.position for state in outcome.states} == {end}
        whole = [kept for kept, by in sorted(ledger.kept.items(), key=_age) if len(by) == run.learners]
        if run.dies and len(whole) > 1:
            end = whole[-2]
            states = list(ledger.kept[end].values())
        else:
            states = outcome.states
        lost = set(workload.tickets_before(outcome.states[0].position.next_ticket)) - workload.tickets_before(
            end.next_ticket
        )
        lost |= set(end.outstanding)
        counted += [ticket for _, ticket in ledger.seen if ticket not in lost]
        position, minutes = end, max(state.minutes for state in states)
        assert Counter(counted) == Counter(workload.tickets_before(position.next_ticket) - set(position.outstanding))


def _age(kept: tuple[Position, object]) -> int:
    return kept[0].num_done


@settings(max_examples=20, deadline=None)
@given(lengths, st.integers(1, 3), st.sampled_from([1, 2, 3, 5]), st.sampled_from(["allreduce", "adpsgd"]))
def test_a_budget_of_epochs_sees_all_of_them(lengths: list[int], epochs: int, learners: int, strategy: str) -> None:
    """All mini-batches of all epochs once, and of what follows only what fills the last portion."""
    workload, ledger = Uneven(lengths), Ledger()
    job = Job(workload, STRATEGIES[strategy], Budget(epochs=epochs), sgd(0.01), options=_options(strategy))
    VirtualEngine(job, learners, Cluster(), ledger).run()
    seen = Counter(ticket for _, ticket in ledger.seen)
    assert set(seen.values()) == {1}
    whole = {ticket for ticket in seen if ticket.epoch < epochs}
    assert len(whole) == sum(workload.num_batches(epoch) for epoch in range(epochs))
    assert len(seen) - len(whole) < (learners if strategy == "allreduce" else 1)


def _options(strategy: str) -> object:
    return AsynchronousOptions(pattern="pairs") if strategy == "adpsgd" else STRATEGIES[strategy].options()


@pytest.mark.parametrize("strategy", ["allreduce", "delay-by-one", "dpsgd-ring", *PERIODIC])
@pytest.mark.parametrize("learners", [1, 3])
def test_a_run_resumed_from_a_barrier_inside_an_epoch_ends_in_the_same_bits(strategy: str, learners: int) -> None:
    """Weights, momentum, and what mini-batches hold: from any barrier on, as if the run had never been stopped."""

    def run(start: list[LearnerState] | None, ledger: Ledger) -> list[Tensor]:
        job = Job(
            TinyRegression(7), CHOICES[strategy].strategy, Budget(steps=30), momentum,
            options=CHOICES[strategy].options(learners), checkpoint_every=4,
        )  # fmt: skip
        return [state.weights for state in VirtualEngine(job, learners, Cluster(), ledger, start).run().states]

    whole = Copies()
    expected = run(None, whole)
    inside = [position for position in whole.kept if position.next_ticket.index > 0 and position.num_done < 27]
    assert len(inside) >= 3
    for position in inside:
        states = [whole.kept[position][rank] for rank in range(learners)]
        for found, weights in zip(run(states, Ledger()), expected, strict=True):
            assert torch.equal(found, weights)


class Copies(Ledger):
    """Keeps copies, for the engine goes on with what it shows."""

    def on_barrier(self, state: LearnerState) -> None:
        super().on_barrier(copy.deepcopy(state))

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        super().on_epoch(report, copy.deepcopy(state))


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
