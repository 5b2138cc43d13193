"""Deaths, pauses, newcomers and a split network on the simulated clock, at any event: what becomes of the run."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from starling.budget import Budget
from starling.checkpoint.state import LearnerState
from starling.engines.virtual.cluster import Cluster, ComputeModel, LinkModel, WatchModel
from starling.engines.virtual.engine import Outcome, VirtualEngine
from starling.errors import PeerLost
from starling.training.faults import Fault, Join, Kill, Pause, Split
from starling.training.job import ClaimReport, EpochReport, Job, Observer
from starling.training.membership import Membership, MembershipObserver
from starling.training.speeds import Stragglers
from starling.workload import Position, Ticket
from tests.contract.cases import CHOICES, sgd
from tests.contract.problems import TinyRegression
from tests.engines.hashing import printed_under_another_hash

WORLD, STEPS = 4, 18
WATCH = WatchModel(notice=0.05, regroup=0.3, silence=5.0)
UNEQUAL = Cluster(compute=ComputeModel(distribution="log-normal", seconds=0.1, spread=0.4), watch=WATCH)
EQUAL = Cluster(compute=ComputeModel(seconds=0.1), watch=WATCH)
SERVED = tuple(name for name in CHOICES if name.startswith("server"))


@dataclass
class Record(Observer, MembershipObserver):
    """Who computed what since each beginning, as an experiment's folder keeps it."""

    begun: list[Position] = field(default_factory=lambda: [Position()])
    seen: list[list[ClaimReport]] = field(default_factory=lambda: [[]])
    distances: list[float] = field(default_factory=list)
    members: list[tuple[int, ...]] = field(default_factory=list)

    def on_claim(self, report: ClaimReport) -> None:
        self.seen[-1].append(report)

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        if report.consensus_distance is not None:
            self.distances.append(report.consensus_distance)

    def begin(self, membership: Membership, position: Position, is_first: bool) -> None:
        self.begun.append(position)
        self.seen.append([])
        self.members.append(membership.members)

    def counted(self, end: Position) -> Counter[Ticket]:
        """How often each mini-batch counts in the end: what a later beginning gave out again does not."""
        counts: Counter[Ticket] = Counter()
        for reports, until in zip(self.seen, [*self.begun[1:], end], strict=True):
            counts.update(r.ticket for r in reports if _is_before(r.ticket, until))
        return counts


def _is_before(ticket: Ticket, position: Position) -> bool:
    return ticket.step < position.next_ticket.step and ticket.step not in {each.step for each in position.outstanding}


def run(
    name: str,
    *faults: Fault,
    cluster: Cluster = UNEQUAL,
    steps: int = STEPS,
    world: int = WORLD,
    rate: float = 0.1,
    seed: int = 1,
    start: list[LearnerState] | None = None,
    slow: float = 3.0,
    **options: Any,
) -> tuple[Outcome, Record]:
    choice, record = CHOICES[name], Record()
    job = Job(
        TinyRegression(),
        choice.strategy,
        Budget(steps=steps),
        sgd(rate),
        options=choice.options(world).model_copy(update=options),
        stragglers=Stragglers(slow={1: slow}),
        faults=faults,
        seed=seed,
    )
    return VirtualEngine(job, world, cluster, record, start, changes=record).run(), record


def check(outcome: Outcome, record: Record, steps: int = STEPS) -> None:
    """All that are left agree that the whole budget was done, each mini-batch of it once, and their weights are
    numbers."""
    (end,) = {state.position for state in outcome.states}
    assert steps <= end.num_done < steps + 2 * WORLD
    assert all(ticket.step >= steps for ticket in end.outstanding)
    counted = record.counted(end)
    assert set(counted.values()) == {1}
    assert len(counted) == end.num_done
    assert {ticket.step for ticket in counted} >= set(range(steps))
    assert all(bool(state.weights.isfinite().all()) for state in outcome.states)


def kill_at(name: str, event: int, victim: int) -> None:
    """A run whose `victim` is killed at an event ends well without it, also if it was a server."""
    outcome, record = run(name, Kill(kill=victim, at_event=event))
    assert [loss.learner for loss in outcome.losses] == [victim]
    assert len(outcome.states) == (2 if name == "hadpsgd" else 3)
    assert outcome.num_memberships == 2
    check(outcome, record)


@pytest.mark.parametrize(
    "every", [80, pytest.param(27, marks=pytest.mark.wide), pytest.param(9, marks=pytest.mark.wide)]
)
@pytest.mark.parametrize("name", CHOICES)
def test_a_learner_killed_at_any_event_ends_in_success_or_a_named_error(name: str, every: int) -> None:
    """Under every strategy; never in a deadlock, and each mini-batch counts once. Victims by turns; `make soak` has all
    events and all victims."""
    num_events = run(name)[0].num_events
    for event in range(1, num_events + 1, every):
        kill_at(name, event, victim=event % WORLD)
    kill_at(name, num_events, victim=0)


@pytest.mark.wide
def test_what_a_lost_learner_gave_to_a_mean_is_recorded() -> None:
    """Others may complete the mean in which it is lost, and step with it: all events of a step, all victims."""
    for event in range(50, 62):
        for victim in range(WORLD):
            kill_at("allreduce", event, victim)


@pytest.mark.soak
@pytest.mark.parametrize("name", CHOICES)
def test_any_learner_killed_at_every_event_ends_in_success_or_a_named_error(name: str) -> None:
    """All events and all victims."""
    for event in range(1, run(name)[0].num_events + 1):
        for victim in range(WORLD):
            kill_at(name, event, victim)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["allreduce", "adpsgd-ring", "delayed", "hogwild"])
def test_two_learners_killed_at_any_events_leave_two(name: str) -> None:
    """Also when the second dies while the others leave, or meet anew."""
    num_events = run(name)[0].num_events
    for event in range(1, num_events, 7):
        faults = Kill(kill=event % 4, at_event=event), Kill(kill=(event + 1) % 4, at_event=event + event % 3)
        outcome, record = run(name, *faults)
        assert len(outcome.states) == WORLD - len(outcome.losses) >= 2
        check(outcome, record)
    for seconds in (0.5, 0.52, 0.56, 0.7, 0.9):  # noticed, leaving, meeting
        outcome, record = run(name, Kill(kill=0, at_seconds=0.5), Kill(kill=2, at_seconds=seconds))
        assert {loss.learner for loss in outcome.losses} == {0, 2}
        check(outcome, record)


def test_a_run_without_learners_says_who_was_the_last() -> None:
    """And does not wait for anybody."""
    kills = [Kill(kill=name, at_seconds=0.2 + name / 100) for name in range(WORLD)]
    with pytest.raises(
        PeerLost, match=r"all learners were lost; the last: learner 3 was killed on purpose after 0\.23"
    ):
        run("adpsgd-ring", *kills)


def test_where_no_loss_is_borne_it_ends_the_run() -> None:
    """With who, when and why."""
    job = Job(TinyRegression(), CHOICES["allreduce"].strategy, Budget(steps=9), sgd(0.1), faults=(_KILL,))
    with pytest.raises(PeerLost, match=r"learner 1 was killed on purpose after 0\.2\d* simulated seconds"):
        VirtualEngine(job, 3, EQUAL, survives_losses=False).run()


_KILL = Kill(kill=1, at_step=3)


def test_survivors_in_step_end_in_the_bits_of_a_resume_with_fewer() -> None:
    """A killed learner's mini-batch is given to the others: the same as a run that was stopped there and gone on with
    by three."""
    lost, record = run("allreduce", Kill(kill=3, at_step=3), cluster=EQUAL)
    assert record.begun[1] == Position(Ticket(0, 8, 8))
    first, _ = run("allreduce", cluster=EQUAL, steps=8)
    resumed, _ = run("allreduce", cluster=EQUAL, world=3, start=[replace(state, world=3) for state in first.states[:3]])
    assert all(torch.equal(one.weights, two.weights) for one, two in zip(lost.states, resumed.states, strict=True))
    assert lost.states[0].position == resumed.states[0].position


def test_a_loss_costs_the_others_one_short_pause() -> None:
    """Until they hear of it, have finished what they compute, and have met anew; nothing is computed twice but what the
    lost learner had begun."""
    undisturbed, _ = run("adpsgd-ring", cluster=EQUAL, steps=60, slow=1.0)
    outcome, record = run("adpsgd-ring", Kill(kill=2, at_step=8), cluster=EQUAL, steps=60, slow=1.0)
    alone = 60 / WORLD * 0.1
    assert undisturbed.seconds == pytest.approx(alone, rel=0.02)
    pause = 0.1 + WATCH.notice + WATCH.regroup
    assert outcome.seconds <= 0.7 + (60 - 7 * WORLD) / 3 * 0.1 + pause + 0.1
    again = Counter(report.ticket for reports in record.seen for report in reports)
    assert sum(count - 1 for count in again.values()) <= 1


def test_a_gradient_under_way_is_completed_before_its_learner_leaves() -> None:
    """Also if it was given to a mean that will not be formed: a real learner cannot stop within a gradient."""
    outcome, _ = run("allreduce", Kill(kill=3, at_step=3), cluster=EQUAL, slow=1.0)
    until_left = 0.3  # the third gradient; the loss is noticed after half of it
    num_rounds_of_three = 4  # of the other ten mini-batches
    assert outcome.seconds == pytest.approx(until_left + WATCH.regroup + 0.1 * num_rounds_of_three, abs=0.01)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["allreduce", "delay-by-one", "dpsgd-ring", "adpsgd-ring", "server-hybrid", "hogwild"])
def test_a_learner_that_stands_still_is_waited_for_or_taken_for_dead(name: str) -> None:
    """At any event: below the limit nobody is lost; beyond it, it is as if it had been killed, and whoever wakes up
    late changes nothing."""
    num_events = run(name)[0].num_events
    for event in range(1, num_events, num_events // 7):
        outcome, record = run(name, Pause(pause=2, at_event=event, seconds=4.0))
        assert (outcome.losses, outcome.num_memberships) == ((), 1)
        check(outcome, record)
        outcome, record = run(name, Pause(pause=2, at_event=event, seconds=60.0))
        check(outcome, record)
        for loss in outcome.losses:  # unless the others had done everything by then
            assert "learner 2 sent no heartbeat for 5 s" in loss.reason
            assert loss.stopped == 5.0
            assert outcome.seconds < 60.0


@pytest.mark.parametrize("name", ["allreduce", "adpsgd-ring"])
def test_a_learner_that_was_paused_for_too_long_comes_back_when_its_pause_is_over(name: str) -> None:
    """As a real one, which is started again."""
    outcome, record = run(name, Pause(pause=2, at_seconds=0.5, seconds=6.0), steps=400)
    check(outcome, record, steps=400)
    assert len(outcome.losses) == 1 and "learner 2 sent no heartbeat for 5 s" in outcome.losses[0].reason
    assert record.members == [(0, 1, 3), (0, 1, 3, 2)]


@pytest.mark.wide
@pytest.mark.parametrize(
    "name", ["allreduce", "adpsgd-ring", "hadpsgd", "dpsgd-random", "server-asynchronous", "hogwild"]
)
def test_a_learner_that_comes_takes_part(name: str) -> None:
    """One that was lost comes back, and does a share of the rest; what is done stays done."""
    back = [Kill(kill=3, at_step=2), Join(join=3, at_seconds=1.2)]
    if name == "hadpsgd":  # its node left with it
        back.append(Join(join=2, at_seconds=1.2))
    outcome, record = run(name, *back, steps=60)
    check(outcome, record, steps=60)
    assert len(outcome.states) == WORLD
    assert record.members[-1] == (0, 1, 2, 3)
    assert sum(report.rank == 3 for report in record.seen[-1]) >= 3


@pytest.mark.parametrize("name", ["allreduce", "adpsgd-ring"])
def test_a_learner_that_is_new_begins_with_a_neighbours_weights(name: str) -> None:
    """With a learning rate of 0 it ends with those of all."""
    outcome, record = run(name, Join(join=7, at_seconds=0.5), rate=0.0, steps=60)
    check(outcome, record, steps=60)
    assert record.members == [(0, 1, 2, 3, 7)]
    assert all(torch.equal(state.weights, outcome.states[0].weights) for state in outcome.states)


@pytest.mark.wide
@pytest.mark.parametrize("at", [0.35, 0.6, 0.9, 1.4])
def test_a_network_that_splits_and_heals_loses_nobody(at: float) -> None:
    """While it is split the halves move apart, and what is between them arrives late; then they agree again.

    Each half has to go on without rounds for that: the usual bound on its lag would hold it up instead.
    """
    split = Split(split=(2, 3), at_seconds=at, seconds=4.0)
    outcome, record = run("adpsgd-ring", split, cluster=EQUAL, steps=12 * 40, slow=1.0, max_lag=1e9)
    check(outcome, record, steps=12 * 40)
    assert outcome.losses == ()
    whole, _ = max(enumerate(record.distances), key=lambda item: item[1])
    assert record.distances[whole] > 3.0 * max(record.distances[-5:])


@pytest.mark.parametrize("name", ["allreduce", "adpsgd-ring", pytest.param("dpsgd-ring", marks=pytest.mark.wide)])
def test_of_two_halves_that_stay_apart_one_continues(name: str) -> None:
    """That with the store and with who watches; the other half never claims to have finished, whenever it happens."""
    num_events = run(name)[0].num_events
    for event in range(1, num_events, num_events // 8):
        outcome, record = run(name, Split(split=(1, 2), at_event=event, seconds=1e6), steps=80)
        assert {loss.learner for loss in outcome.losses} == {1, 2}
        assert all("was cut off from the others for 5 s" in loss.reason for loss in outcome.losses)
        assert len(outcome.states) == 2
        check(outcome, record, steps=80)
        assert {report.rank for report in record.seen[-1]} == {0, 3}


def test_a_split_beneath_the_limit_only_takes_time() -> None:
    """In step, everybody waits for it to heal; the same weights come out."""
    whole, _ = run("allreduce", cluster=EQUAL)
    split, record = run("allreduce", Split(split=(0,), at_event=20, seconds=3.0), cluster=EQUAL)
    check(split, record)
    assert all(torch.equal(one.weights, two.weights) for one, two in zip(whole.states, split.states, strict=True))
    assert 2.5 < split.seconds - whole.seconds <= 3.1


@pytest.mark.parametrize(
    "name",
    [
        "adpsgd-ring",
        pytest.param("dpsgd-ring", marks=pytest.mark.wide),
        pytest.param("dpsgd-random", marks=pytest.mark.wide),
        pytest.param("adpsgd-in-pieces", marks=pytest.mark.wide),
        pytest.param("adpsgd-bfloat16", marks=pytest.mark.wide),
    ],
)
def test_messages_that_overtake_each_other_never_move_the_mean(name: str) -> None:
    """With a learning rate of 0, for 200 seeds in all; and the same seed gives the same events."""
    link = LinkModel(latency=0.03, bandwidth=1e5, jitter=2.0)
    cluster = Cluster(compute=UNEQUAL.compute, link=link, watch=WATCH)
    generator = torch.Generator().manual_seed(5)
    blank = run(name, steps=0)[0].states
    for seed in range(40):
        weights = torch.randn(WORLD, len(blank[0].weights), generator=generator)
        start = [replace(state, weights=own.clone()) for state, own in zip(blank, weights, strict=True)]
        outcome, _ = run(name, cluster=cluster, rate=0.0, seed=seed, start=start)
        end = torch.stack([state.weights for state in outcome.states])
        if name != "adpsgd-bfloat16":  # what rounding took is kept aside, and is not in the mean
            torch.testing.assert_close(end.mean(0), weights.mean(0), atol=1e-5, rtol=0.0)
        assert end.var(0).sum() < weights.var(0).sum()
        if seed % 10 == 0:
            assert run(name, cluster=cluster, rate=0.0, seed=seed, start=start)[0].event_hash == outcome.event_hash


def faulty() -> str:
    """The hash of a run in which everything happens."""
    faults = (
        Kill(kill=0, at_event=70),
        Join(join=0, at_seconds=1.5),
        Pause(pause=3, at_step=4, seconds=1.0),
        Split(split=(1,), at_seconds=2.5, seconds=0.7),
        Join(join=4, at_seconds=3.0),
    )
    cluster = Cluster(compute=UNEQUAL.compute, link=LinkModel(latency=0.03, jitter=1.0), watch=WATCH)
    outcome, record = run("adpsgd-ring", *faults, cluster=cluster, steps=150)
    check(outcome, record, steps=150)
    assert record.members == [(1, 2, 3), (1, 2, 3, 0), (1, 2, 3, 0, 4)]
    return outcome.event_hash


@pytest.mark.wide
def test_a_run_in_which_everything_happens_has_the_same_events_each_time() -> None:
    """Also where Python hashes otherwise."""
    program = "from tests.engines.test_virtual_faults import faulty; print(faulty())"
    assert printed_under_another_hash(program) == faulty()
