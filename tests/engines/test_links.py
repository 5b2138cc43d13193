"""Links between learners of one machine: here between threads of one process, which share nothing but their store."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from starling.consensus import rank_ordered_mean
from starling.engines.processes import links
from starling.engines.processes.backend import ConnectionFailed
from starling.engines.processes.collectives import SMALL_BYTES, SharedMean
from starling.engines.processes.handshake import Peers
from starling.engines.processes.links import NUM_SLOTS, LinkBoard, MemoryLinks
from starling.engines.processes.place import Place

pytestmark = pytest.mark.skipif(links._machine() is None, reason="links need Linux")
SECONDS = 60.0
NUM_BYTES = 4 * SMALL_BYTES


def linked(world: int, do: Callable[[int, MemoryLinks], Any]) -> list[Any]:
    """What `do` gives for each of `world` learners, each a thread with its links."""
    store = HashStore()

    def be(rank: int) -> Any:
        own = MemoryLinks(Peers(Place(rank, world, 0, 1, store), SECONDS), NUM_BYTES)
        try:
            return do(rank, own)
        finally:
            met.wait(SECONDS)
            own.close()

    met = threading.Barrier(world)
    with ThreadPoolExecutor(world) as pool:
        return [future.result(SECONDS) for future in [pool.submit(be, rank) for rank in range(world)]]


def numbers(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("size", [1, 5, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, NUM_BYTES // 4])
def test_a_shared_mean_has_the_bits_of_a_sum_in_rank_order(world: int, size: int) -> None:
    """Small and large, many in a row, whether a result is waited for at once or after the next has begun."""

    def average(rank: int, own: MemoryLinks) -> list[Tensor]:
        means = SharedMean(own, range(world), 0)
        waits = [means.start(numbers(10 * step + rank, size)) for step in range(5)]
        return [wait() for wait in waits] + [means.start(torch.full((1,), float(rank)))()]

    found = linked(world, average)
    for step in range(5):
        expected = rank_ordered_mean([numbers(10 * step + rank, size) for rank in range(world)])
        assert all(torch.equal(each[step], expected) for each in found)
    assert all(float(each[5]) == (world - 1) / 2 for each in found)


def test_messages_arrive_by_tag_and_in_their_order() -> None:
    """Also when they are asked for in another order, by several threads."""

    def talk(rank: int, own: MemoryLinks) -> list[float]:
        for value in range(4):
            assert own.send(1 - rank, torch.tensor([10.0 * rank + value]), tag=value % 2)

        def take(tag: int) -> list[float]:
            received = [own.receive(1 - rank, tag, SECONDS) for _ in range(2)]
            return [float(each.view(torch.float32)) for each in received if isinstance(each, Tensor)]

        with ThreadPoolExecutor(2) as pool:
            odd, even = pool.submit(take, 1), pool.submit(take, 0)
            return even.result(SECONDS) + odd.result(SECONDS)

    assert linked(2, talk) == [[10.0, 12.0, 11.0, 13.0], [0.0, 2.0, 1.0, 3.0]]


def test_a_snapshot_is_read_in_place_and_its_slot_reused_only_when_unreferenced() -> None:
    """Neither its owner, not even by a part of it, nor who received it."""
    sent: Future[int] = Future()
    read: Future[None] = Future()
    checked: Future[None] = Future()

    def lend(rank: int, own: MemoryLinks) -> None:
        if rank == 1:
            received = own.receive(0, 7, SECONDS)
            assert isinstance(received, Tensor)
            assert received.view(torch.float32).tolist() == [0.0, 1.0, 2.0]
            read.set_result(None)
            checked.result(SECONDS)
            del received
            return
        memory = own.snapshot_memory(torch.empty(3))
        assert memory is not None
        memory.copy_(torch.arange(3.0))
        part, address = memory[1:], memory.data_ptr()
        assert own.send(1, memory, tag=7)
        sent.set_result(address)
        read.result(SECONDS)
        del memory
        others = [own.snapshot_memory(torch.empty(3)) for _ in range(NUM_SLOTS)]
        assert [each is None for each in others] == [False] * (NUM_SLOTS - 1) + [True]
        assert part.tolist() == [1.0, 2.0]
        assert address not in {each.data_ptr() for each in others if each is not None}
        assert not own.send(1, torch.zeros(3), tag=8), "what finds no slot travels by the backend"
        checked.set_result(None)

    linked(2, lend)
    assert sent.result() != 0


def test_who_waits_hears_at_once_that_a_peer_is_gone_or_that_it_is_to_wait_no_more() -> None:
    """Without a time-out's help."""

    def wait(rank: int, own: MemoryLinks) -> str:
        if rank == 0:
            with pytest.raises(ConnectionFailed) as gone:
                own.receive(1, 0, None)
            return str(gone.value)
        if rank == 1:
            own._lines[0].connection.close()
            return ""
        threading.Timer(0.0, own.release).start()
        with pytest.raises(ConnectionFailed) as released:
            own.receive(1, 0, None)
        return str(released.value)

    gone, _, released = linked(3, wait)
    assert gone == "learner 1 closed its link"
    assert "has stopped waiting" in released


def test_a_wait_ends_with_its_time_out() -> None:
    """And says for whom it was."""

    def wait(rank: int, own: MemoryLinks) -> None:
        with pytest.raises(ConnectionFailed, match=f"Timed out waiting for learner {1 - rank}"):
            own.receive(1 - rank, 0, 0.05)

    linked(2, wait)


def test_rounds_open_for_all_and_end_for_all() -> None:
    """One opens two rounds and the other one more; both see three, and the end."""

    def go(rank: int, own: MemoryLinks) -> list[bool]:
        board = LinkBoard(own)
        seen = []
        for number in range(3):
            if rank == number % 2:
                board.open(number, is_behind=False)
            seen.append(board.await_open(number))
        board.finish(3)
        return [*seen, board.await_open(3)]

    assert linked(2, go) == [[True, True, True, False]] * 2


def test_learners_of_two_machines_are_linked_within_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one whose system has no links is linked with nobody."""
    rank_of_thread = threading.local()
    monkeypatch.setattr(links, "_machine", lambda: rank_of_thread.machine)
    store, machines = HashStore(), ["a", "a", None, "b", "b"]
    met = threading.Barrier(len(machines))

    def be(rank: int) -> tuple[list[int], bool, bool]:
        rank_of_thread.machine = machines[rank]
        own = MemoryLinks(Peers(Place(rank, len(machines), 0, 1, store), SECONDS), NUM_BYTES)
        found = sorted(own.peers), own.join(range(2)), own.join(range(1, 4))
        met.wait(SECONDS)
        own.close()
        return found

    with ThreadPoolExecutor(len(machines)) as pool:
        found = list(pool.map(be, range(len(machines))))
    assert [peers for peers, _, _ in found] == [[1], [0], [], [4], [3]]
    assert all(first and not mixed for _, first, mixed in found)
