"""Mini-batches come in order, once each, whoever loads them; what goes wrong in a loading process is told."""

import heapq
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from starling.errors import DataError
from starling.training import loading
from starling.training.loading import Loaded, Loader, Lookahead
from starling.workload import Ticket, Workload

_AT_HOME = 0.002
"""Seconds that the caller's own process takes, so that it leaves the processor to those that start."""


class WhoLoads(Workload[Any]):
    """Each mini-batch is the process that loaded it, unless that is a loading process and is to fail."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.home = os.getpid()

    def load(self, ticket: Ticket) -> Sequence[Any]:
        if os.getpid() == self.home:
            time.sleep(_AT_HOME)
        elif self.fails:
            raise DataError(f"mini-batch {ticket.step} cannot be read")
        return [os.getpid()]

    def num_batches(self, epoch: int) -> int:
        raise NotImplementedError

    def make_model(self) -> nn.Module:
        raise NotImplementedError

    def loss(self, model: nn.Module, examples: Any) -> Tensor:
        raise NotImplementedError


def tickets() -> Iterator[Ticket]:
    """All there are."""
    return (Ticket(0, step, step) for step in count())


def until_processes_load(loaded: Iterator[Loaded]) -> Loaded:
    """The first that this process did not load itself."""
    return next(each for each in loaded if each[1] != [os.getpid()])


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [0, 2])
def test_without_processes_and_before_they_are_up_who_asks_loads(num_workers: int) -> None:
    """Nobody waits for a process to start."""
    with Loader(WhoLoads(), num_workers) as loader:
        assert next(loader.load(tickets())) == (Ticket(0, 0, 0), [os.getpid()])


@pytest.mark.wide
def test_every_ticket_comes_once_and_in_order_also_where_processes_take_over() -> None:
    """Which of them did is not to be seen; then all of them load."""
    drawn: list[Ticket] = []

    def drawing() -> Iterator[Ticket]:
        for ticket in tickets():
            drawn.append(ticket)
            yield ticket
            if len(drawn) == last:
                return

    last = -1
    with Loader(WhoLoads(), num_workers=2) as loader:
        loaded = loader.load(drawing())
        ticket, _ = until_processes_load(loaded)
        assert len(drawn) == ticket.step + 6  # two for each process, and the one that is received
        last = len(drawn) + 50
        rest = list(loaded)
    assert [each.step for each, _ in rest] == list(range(ticket.step + 1, last))
    assert len({process for _, (process,) in rest} - {os.getpid()}) == 2
    assert multiprocessing.active_children() == []


def test_what_a_process_raises_reaches_who_asked() -> None:
    """With its own type."""
    with Loader(WhoLoads(fails=True), num_workers=1) as loader, pytest.raises(DataError, match="cannot be read"):
        until_processes_load(loader.load(tickets()))


@pytest.mark.wide
def test_a_process_that_is_killed_ends_the_wait() -> None:
    """Torch says which."""
    with Loader(WhoLoads(), num_workers=1) as loader:
        loaded = loader.load(tickets())
        _, (process,) = until_processes_load(loaded)
        os.kill(process, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=f"DataLoader worker.*{process}"):
            list(islice(loaded, 100))


@pytest.mark.wide
def test_a_signal_that_comes_while_processes_start_does_not_end_them() -> None:
    """torchrun signals all that a learner has started, which is to save first: also those that load libraries yet."""
    with Loader(WhoLoads(), num_workers=2, ignores_signals=True) as loader:
        starting = multiprocessing.active_children()
        assert len(starting) == 2
        for process in starting:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGTERM)
            os.kill(process.pid, signal.SIGINT)
        loaded = loader.load(tickets())
        _, (process_of,) = until_processes_load(loaded)
        assert process_of in {process.pid for process in starting}
        assert len(list(islice(loaded, 20))) == 20
    assert multiprocessing.active_children() == []


@pytest.mark.wide
def test_new_tickets_may_replace_the_rest_or_follow_the_last() -> None:
    """What was loaded ahead is dropped, and the same processes go on."""
    with Loader(WhoLoads(), num_workers=2) as loader:
        until_processes_load(loader.load(tickets()))
        others = [Ticket(1, step, 1000 + step) for step in range(20)]
        for again in (others, others, others[:3]):
            assert [ticket for ticket, _ in loader.load(iter(again))] == again
        first = next(loader.load(tickets()))
        assert first[0] == Ticket(0, 0, 0) and first[1] != [os.getpid()]
        assert len(multiprocessing.active_children()) == 2


@pytest.mark.wide
def test_an_end_before_the_last_ticket_leaves_no_process() -> None:
    """Neither processes nor the thread."""
    with Loader(WhoLoads(), num_workers=1) as loader:
        until_processes_load(loader.load(tickets()))
        assert len(multiprocessing.active_children()) == 1
    assert multiprocessing.active_children() == []
    for thread in threading.enumerate():
        if thread.name == "loader":  # on a busy machine, the loader has not waited for it to the end
            thread.join(60.0)
            assert not thread.is_alive()


@pytest.mark.wide
def test_fewer_are_drawn_ahead_than_the_processes_hold_when_told_so() -> None:
    """Each comes nevertheless, once and in order; none is drawn ahead where 0 are allowed."""
    drawn: list[Ticket] = []
    allowed = [5, 5, 5, 2, 0, 0, 1, 3, 0, 5, 1] * 4

    def drawing() -> Iterator[Ticket]:
        for ticket in tickets():
            drawn.append(ticket)
            yield ticket

    with Loader(WhoLoads(), num_workers=2) as loader:
        until_processes_load(loader.load(tickets()))
        following = iter(allowed)
        loaded = loader.load(drawing(), lambda: next(following))
        most = 0
        for number, (num_ahead, (ticket, _)) in enumerate(zip(allowed, loaded, strict=False)):
            assert ticket.step == number
            most = max(most - 1, num_ahead)  # what was drawn before is not given back
            assert len(drawn) == number + 1 + most
        assert number == len(allowed) - 1
        assert loader.load_seconds > 0.0


def end_of_run(step_seconds: Sequence[float], load_seconds: float, num_tickets: int) -> tuple[list[float], list[int]]:
    """When each of some simulated learners ends, which have these speeds and look ahead as learners do; and how many
    mini-batches each had drawn ahead at the most."""
    aheads = [Lookahead() for _ in step_seconds]
    drawn, newest, most = [0] * len(step_seconds), [0] * len(step_seconds), [0] * len(step_seconds)
    ends = [0.0] * len(step_seconds)
    total, has_begun = 0, [False] * len(step_seconds)
    times = [(0.001 * rank, rank) for rank in range(len(step_seconds))]
    while times:
        now, rank = heapq.heappop(times)
        ends[rank] = now
        wanted = 1 + (aheads[rank].num(now, load_seconds) if drawn[rank] or total < num_tickets else 0)
        while drawn[rank] < wanted and total < num_tickets:
            newest[rank], total, drawn[rank] = total, total + 1, drawn[rank] + 1
        if has_begun[rank]:
            aheads[rank].began(now, step_seconds[rank], newest[rank] / num_tickets)
        if drawn[rank]:
            drawn[rank], has_begun[rank] = drawn[rank] - 1, True
            most[rank] = max(most[rank], drawn[rank])
            heapq.heappush(times, (now + step_seconds[rank], rank))
    assert total == num_tickets
    return ends, most


@pytest.mark.wide
@settings(deadline=None)
@given(
    st.lists(st.floats(0.05, 0.2), min_size=2, max_size=8),
    st.floats(2.0, 30.0),
    st.floats(0.0, 0.1),
    st.integers(0, 99),
)
def test_a_slow_learner_that_looks_ahead_ends_at_most_about_one_of_its_gradients_late(
    speeds: list[float], slower: float, load_seconds: float, more: int
) -> None:
    """However slow it is. Without that rule it ends up to six late, with two loading processes."""
    slow = max(speeds) * slower
    ends, _ = end_of_run([*speeds, slow], load_seconds, num_tickets=int(20 * slow / min(speeds)) + more)
    assert ends[-1] - max(ends[:-1]) <= 1.5 * slow


@pytest.mark.wide
@settings(deadline=None)
@given(st.floats(0.001, 1.0), st.integers(2, 6), st.floats(0.1, 4.0))
def test_learners_draw_ahead_what_takes_as_long_to_compute_as_to_load(
    step_seconds: float, num_learners: int, load_steps: float
) -> None:
    """So none waits for data, whose mini-batches take up to a few of its steps to load."""
    _, most = end_of_run([step_seconds] * num_learners, load_steps * step_seconds, num_tickets=100 * num_learners)
    assert all(load_steps < each <= 2.0 * load_steps + 2.0 for each in most)


def test_a_loading_process_exits_if_its_learner_ended_while_it_started() -> None:
    """It takes seconds to start, with signals blocked; nobody would end it later."""
    gone, started = os.getpid() + 1, os.fork()
    if started == 0:
        loading._initialize_process(gone, True, 0)
        time.sleep(30.0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(started, 0)[1]) == 0
