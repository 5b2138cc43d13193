"""Waiting for others through the store costs little, however many they are and however long it takes."""

import pytest
from torch.distributed import DistStoreError

from starling.engines.processes import handshake as greeting
from starling.engines.processes.handshake import Peers
from starling.engines.processes.place import Place


class CountingStore:
    """A store in which nobody ever writes."""

    def __init__(self) -> None:
        self.num_checks = 0

    def check(self, keys: list[str]) -> bool:
        self.num_checks += 1
        return False


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("num_learners", [2, 64, 4096])
def test_an_idle_waiter_asks_the_store_a_bounded_number_of_times_a_second(
    num_learners: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it tells who is not there yet, of thousands."""
    clock, store = Clock(), CountingStore()
    monkeypatch.setattr(greeting, "time", clock)
    keys = [f"word/{rank}" for rank in range(num_learners)]
    with pytest.raises(DistStoreError, match="for 600 s"):
        Peers(Place(0, num_learners, 0, 1, store)).await_keys(keys, writers=range(num_learners))  # type: ignore[arg-type]
    assert 600.0 <= clock.now < 601.0
    assert store.num_checks < 35 * 600 + num_learners
