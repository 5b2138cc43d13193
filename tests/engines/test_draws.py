"""Portions are drawn while a learner computes, and each is drawn once."""

import threading
import time
from typing import Any

import pytest
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from starling.engines.processes.handshake import Peers
from starling.engines.processes.place import Place
from starling.engines.processes.tickets import KEPT_CLAIMS, Draws


class GatedStore:
    """A store whose answers wait for `gate`, or are errors."""

    def __init__(self, store: Any, error: Exception | None = None) -> None:
        self._store, self._error = store, error
        self.gate = threading.Event()

    def clone(self) -> "GatedStore":
        return self

    def __getattr__(self, name: str) -> Any:
        def ask(*given: Any) -> Any:
            assert self.gate.wait(timeout=30.0)
            if self._error is not None:
                raise self._error
            return getattr(self._store, name)(*given)

        return ask


@pytest.fixture
def store() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def draws_of(store: Any, rank: int, group: range, timeout_seconds: float = 30.0) -> Draws:
    return Draws(Peers(Place(rank, 3, 0, 3, store), timeout_seconds), group)


def test_groups_share_the_portions_and_members_of_a_group_have_the_same(store: Any) -> None:
    first, second = draws_of(store, 0, range(2)), draws_of(store, 1, range(2))
    alone = draws_of(store, 2, range(2, 3))
    number = KEPT_CLAIMS + 8  # so that old claims are deleted meanwhile
    found: list[list[int]] = [[], [], []]
    for _ in range(number):
        for mine, draws in zip(found, (first, second, alone), strict=True):
            mine.append(draws.take())
    assert found[0] == found[1]
    assert sorted(found[0] + found[2]) == list(range(2 * number))
    for draws in (first, second, alone):
        draws.close()


def test_a_learner_does_not_wait_for_the_store_until_it_takes_what_it_drew(store: Any) -> None:
    """Here the store answers only after the learner has continued."""
    gated = GatedStore(store)
    draws = draws_of(gated, 0, range(1))
    draws.begin()
    draws.begin()
    assert draws.num_known == 0
    gated.gate.set()
    assert [draws.take(), draws.take()] == [0, 1]
    assert draws.num_under_way == 0
    draws.close()


def test_a_draw_is_dated_when_it_begins_not_when_it_is_taken(store: Any) -> None:
    """Otherwise a slow learner would underestimate how soon the budget is spent."""
    draws = draws_of(store, 0, range(1))
    before = time.monotonic()
    draws.begin()
    draws.begin()
    after = time.monotonic()
    draws.take()
    first = draws.drawn_at
    draws.take()
    assert before <= first <= draws.drawn_at <= after
    draws.take()  # begins when it is taken
    assert draws.drawn_at >= after
    draws.close()


def test_who_waits_for_a_first_that_never_draws_gives_up_or_is_closed(store: Any) -> None:
    draws = draws_of(store, 1, range(2), timeout_seconds=0.0)
    with pytest.raises(DistError, match="no draw for 0 s"):
        draws.take()
    draws.close()
    assert not [each for each in threading.enumerate() if each.name == "starling-draws"]


def test_an_error_of_the_store_is_raised_where_the_draw_is_taken(store: Any) -> None:
    gated = GatedStore(store, DistError("the store is gone"))
    gated.gate.set()
    draws = draws_of(gated, 0, range(1))
    draws.begin()
    with pytest.raises(DistError, match="the store is gone"):
        draws.take()
    draws.close()
