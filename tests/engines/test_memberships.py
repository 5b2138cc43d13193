"""Survivors that continue in a new membership: who belongs to it, what was done, and what they take from each other."""

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from starling.budget import Budget
from starling.checkpoint.state import OWN_PREFIX, LearnerState
from starling.engines.processes.collectives import share_state
from starling.engines.processes.handshake import Peers
from starling.engines.processes.member import PLAN, agree_on_plan
from starling.engines.processes.place import Place
from starling.engines.processes.process_group import Connections
from starling.engines.processes.tickets import DoneNotes, noted
from starling.errors import PeerLost
from starling.strategies import find_strategy
from starling.training.job import Job
from starling.training.membership import Membership, MembershipChanged, MembershipFeed
from starling.training.succession import MembershipStart, Past
from starling.training.tickets import DoneTickets, TicketSequence, position_after
from starling.workload import Position, Ticket
from tests.contract.cases import sgd
from tests.contract.problems import TinyRegression

WORKLOAD = TinyRegression(batches=5)


@given(st.integers(0, 12), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 30)))
def test_what_is_not_done_is_given_out_again(position: int, undone: set[int], done: set[int]) -> None:
    """By a naive count: all that is done is done once, and a run from there does the rest of the stream."""
    sequence = TicketSequence(WORKLOAD, Ticket(0, 0, 0))
    start = Position(sequence[position], tuple(sequence[step] for step in sorted(undone) if step < position))
    done = {step for step in done if step >= position or step in undone}
    all_done = DoneTickets(start)
    for step in done:
        all_done.add(step)
    after = position_after(start, WORKLOAD, all_done)
    before = {step for step in range(position) if step not in undone}
    reached = set(range(after.next_ticket.step)) - {ticket.step for ticket in after.outstanding}
    assert reached == before | done
    assert after.next_ticket == sequence[after.next_ticket.step]
    assert list(after.outstanding) == [sequence[ticket.step] for ticket in after.outstanding]


def job(strategy: str) -> Job:
    chosen = find_strategy(strategy)
    return Job(WORKLOAD, chosen, Budget(steps=100), sgd(0.1), options=chosen.options())


def agreed(strategy: str, pasts: list[Past], noted: dict[int, list[int]], world: int = 3) -> list[MembershipStart]:
    """What the learners of membership 1 agree on when those of membership 0 had noted some tickets as done."""
    root = HashStore()
    before = PrefixStore("membership/0", root)
    before.set(PLAN, MembershipStart(world, Position(), 1.0).encode())
    sequence = TicketSequence(WORKLOAD, Ticket(0, 0, 0))
    for rank, steps in noted.items():
        notes = DoneNotes(before, rank, world)
        for step in steps:
            notes.add(sequence[step])
    membership = Membership(1, tuple(range(len(pasts))))
    plans: list[MembershipStart | None] = [None] * len(pasts)
    makers: list[MembershipStart] = []

    def take_part(rank: int) -> None:
        peers = Peers(Place(rank, len(pasts), 0, 1, root), 20.0).enter(membership)
        plans[rank] = agree_on_plan(root, peers, pasts[rank], job(strategy), makers.append)

    threads = [threading.Thread(target=take_part, args=[rank]) for rank in range(len(pasts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(makers) == 1
    assert len(set(plans)) == 1
    return [plan for plan in plans if plan is not None]


@settings(deadline=None, max_examples=20)
@given(st.randoms(use_true_random=False), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 5))
def test_notes_of_done_tickets_do_not_grow_with_their_number_and_are_read_as_they_were_made(
    random: Random, speeds: list[int], num_unfinished: int
) -> None:
    """By learners of any speeds, also those that begin with what an earlier run left unfinished."""
    store, world = HashStore(), len(speeds)
    start = Position(Ticket(0, 50, 50), tuple(Ticket(0, step, step) for step in range(7, 7 + num_unfinished)))
    notes = [DoneNotes(store, rank, world) for rank in range(world)]
    given = [*(ticket.step for ticket in start.outstanding), *range(50, 50 + random.randint(0, 4000))]
    done, under_way, most = set[int](), dict[int, int](), 0
    for step in given:  # whoever is free does what it has, and takes the next
        (rank,) = random.choices(range(world), speeds)
        if rank in under_way:
            notes[rank].add(Ticket(0, under_way[rank], under_way[rank]))
            done.add(under_way[rank])
        under_way[rank] = step
        most = max(most, store.num_keys())
    found = noted(store, world, start)
    assert {step for step in range(5000) if step in found} == done
    assert most <= 4 * world + 3 * sum(speeds)


def test_what_a_lost_learner_had_done_counts() -> None:
    """Each of asynchronous learners keeps its own weights; the notes of all three are read."""
    (plan, _) = agreed("adpsgd", [Past(0, 2, 3.0), Past(0, 1, 2.0)], {0: [0, 3], 1: [2], 2: [1, 6]})
    assert plan.position == Position(Ticket(1, 2, 7), (Ticket(0, 4, 4), Ticket(1, 0, 5)))
    assert (plan.source, plan.takers, plan.minutes, plan.world) == (None, (), 3.0, 2)


def test_where_there_is_one_model_the_newest_of_those_left_counts() -> None:
    """Who had come a step less far takes its state; a step that only the lost one had made is made again."""
    (plan, _) = agreed("allreduce", [Past(0, 1), Past(0, 2)], {0: [0], 1: [1, 4], 2: [2, 5, 8]})
    assert plan.position == Position(Ticket(1, 1, 6))
    assert (plan.source, plan.takers) == (1, (0,))


def test_who_is_new_takes_the_state_of_a_neighbour() -> None:
    """And nothing else changes."""
    (plan, *_) = agreed("adpsgd", [Past(), Past(0, 1), Past(0, 1)], {1: [0], 2: [1]})
    assert (plan.source, plan.takers, plan.world) == (1, (0,), 3)


def test_resuming_from_nothing_is_an_error() -> None:
    """Were all that had begun lost, it would be a new run."""
    with pytest.raises(PeerLost, match="before training began"):
        agree_on_plan(HashStore(), Peers(Place(0, 1, 0, 1, HashStore())), Past(), job("adpsgd"), lambda plan: None)


def test_a_plan_is_written_and_read() -> None:
    """The same comes back."""
    plan = MembershipStart(3, Position(Ticket(1, 2, 7), (Ticket(0, 4, 4),)), 1.5, 1, (0, 2))
    assert MembershipStart.decode(plan.encode()) == plan


def test_a_membership_feed_reports_newer_memberships_only_and_at_once() -> None:
    """Whoever listens late hears of the membership that has come meanwhile."""
    first, second, third = (Membership(number, (0, 1)) for number in range(3))
    membership = MembershipFeed(0, first, is_watched=True)
    assert membership.beyond(first, within=0.0) is None
    heard: list[BaseException] = []
    with membership.telling(first, heard.append):
        membership.announce(second)
        membership.announce(second)
    membership.announce(third)
    with membership.telling(second, heard.append):
        pass
    assert [each.membership for each in heard if isinstance(each, MembershipChanged)] == [second, third]
    assert membership.beyond(first, within=0.0) == third
    assert MembershipFeed(0, first).beyond(first, within=100.0) is None  # nobody watches: nobody is waited for


def test_connections_made_in_between_are_cut_and_no_others() -> None:
    """Both ends see it; listening sockets, and those of before and after, stay."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def connect() -> tuple[socket.socket, socket.socket]:
            near = socket.create_connection(server.getsockname())
            return near, server.accept()[0]

        before = connect()
        connections = Connections()
        between = connect()
        connections.note()
        after = connect()
        connections.cut()
        connections.cut()
        assert [end.recv(1) for end in between] == [b"", b""]
        for near, far in (before, after, connect()):
            near.sendall(b"x")
            assert far.recv(1) == b"x"
            near.close()
            far.close()
        for end in between:
            end.close()
        connections.cut()  # of what is closed


@pytest.fixture
def alone() -> Any:
    """A process group of one."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("make", [torch.optim.Adam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
@pytest.mark.usefixtures("alone")
def test_a_state_that_is_shared_arrives_whole(make: Callable[..., torch.optim.Optimizer]) -> None:
    """Weights, buffers and what the optimizer remembers, to the bit; nothing of where the learner stands."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = make(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    weights = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    buffers = dict(model.named_buffers())
    kept = {"steps": torch.tensor([5]), f"{OWN_PREFIX}sent": weights.clone()}
    state = LearnerState(0, 1, Position(), 2.0, weights, buffers, optimizer.state_dict(), strategy=kept)
    received = share_state(state, 0)
    assert all(torch.equal(received.strategy[name], each) for name, each in kept.items())
    assert torch.equal(received.weights, weights)
    assert all(torch.equal(received.buffers[name], buffer) for name, buffer in buffers.items())
    other = make(model.parameters())
    other.load_state_dict(received.optimizer)
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(two[name])) for name in one)
    assert replace(received, weights=weights, buffers=buffers, optimizer={}, strategy=kept) == replace(
        state, optimizer={}
    )


def test_survivors_take_the_common_part_of_a_strategys_state_from_one_of_them() -> None:
    """They may have been at different steps when a learner was lost; what is a learner's own stays its own."""
    mine, theirs = (
        LearnerState(
            rank, 2, Position(), 1.0, torch.zeros(2), {}, {},
            strategy={"steps": torch.tensor([rank]), f"{OWN_PREFIX}sent": torch.tensor([float(rank)])},
        )
        for rank in range(2)
    )  # fmt: skip
    following = mine.with_strategy_of(theirs)
    assert {name: each.item() for name, each in following.strategy.items()} == {"steps": 1, f"{OWN_PREFIX}sent": 0.0}
    following.strategy["steps"].add_(1)
    assert theirs.strategy["steps"].item() == 1


def test_a_joiner_does_not_get_what_is_another_learners_own() -> None:
    """A residual or a push of its donor's would be delivered twice."""
    donor = LearnerState(0, 2, Position(), 1.0, torch.zeros(2), {}, {}, strategy={"steps": torch.tensor([3])})
    donor.strategy[f"{OWN_PREFIX}residual"] = torch.ones(2)
    joiner = LearnerState(1, 2, Position(), 1.0, torch.zeros(2), {}, {})
    assert set(joiner.with_strategy_of(donor).strategy) == {"steps"}


def test_a_change_carries_its_membership() -> None:
    """And says why."""
    membership = Membership(3, (0, 2), "learner 1 was killed")
    assert MembershipChanged(membership).membership is membership
    assert str(MembershipChanged(membership)) == "learner 1 was killed"
