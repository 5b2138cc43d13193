"""Which learner gets which part of an epoch's data, where learners ask a store instead of counting tickets."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.distributed_c10d import Store

from starling.errors import ConfigError

Part = tuple[int, int]
"""Positions in the order of an epoch: from the first on, and before the second."""
_TRIES = 50


class Claims:
    """Divides the positions of an epoch among learners, each once. One object for each learner and epoch.

    `remaining` are the parts to give out, and `size` the most positions of a claim; all learners pass the same. Without
    an end (None) positions are given out until no learner asks.

    In the store, the number of claims that were given out is a counter, so that no claim is given twice; each learner
    records its claims before it gets them, and how many of their positions it is done with.
    """

    def __init__(self, store: Store, rank: int, remaining: Sequence[tuple[int, int | None]], size: int) -> None:
        self._store, self._rank, self._remaining, self._size = store, rank, remaining, size
        self._num_claims = self._first = self._num_done = 0  # of this learner; the first claim that is not done
        self._sizes: dict[int, int] = {}

    def __iter__(self) -> Iterator[Part]:
        """This learner's claims, until all positions have been given out."""
        while (part := self._next()) is not None:
            if self._num_claims == 0:
                self._store.set(f"learner/{self._count('learners', 1) - 1}", str(self._rank))
            self._store.set(f"claim/{self._rank}/{self._num_claims}", json.dumps(part))
            self._sizes[self._num_claims] = part[1] - part[0]
            self._num_claims = self._count(f"claims/{self._rank}", 1)
            yield part

    def done(self, num_positions: int) -> None:
        """Record that this learner is done with so many more of its positions, in the order it got them."""
        self._num_done += num_positions
        while self._first in self._sizes and self._num_done >= self._sizes[self._first]:
            self._num_done -= self._sizes.pop(self._first)
            self._first += 1
        self._store.set(f"done/{self._rank}", json.dumps([self._first, self._num_done]))

    def reissue(self, rank: int) -> None:
        """Give what a lost learner was not done with to those that ask next; further calls do nothing."""
        if self._count(f"lost/{rank}", 1) == 1:
            for part in self._outstanding(rank):
                self._store.set(f"again/{self._count('again')}", json.dumps(part))
                self._count("again", 1)

    def remaining(self) -> list[tuple[int, int | None]]:
        """What no learner is done with."""
        for _ in range(_TRIES):  # a learner may be about to record its claim
            given, again, taken = self._count("given"), self._count("again"), self._count("taken")
            ranks = [int(self._store.get(f"learner/{number}")) for number in range(self._count("learners"))]
            if sum(self._count(f"claims/{rank}") for rank in ranks) >= given - self._count("ends") + min(taken, again):
                break
            time.sleep(0.001)
        lost = [rank for rank in ranks if self._count(f"lost/{rank}") > 0]
        found: list[tuple[int, int | None]] = [
            part for rank in ranks if rank not in lost for part in self._outstanding(rank)
        ]
        found += [self._returned(number) for number in range(min(taken, again), again)]
        return sorted(found, key=lambda part: part[0]) + list(self._not_given(given))

    def _next(self) -> Part | None:
        if self._count("taken") < self._count("again") and (number := self._count("taken", 1)) <= self._count("again"):
            return self._returned(number - 1)
        for start, stop in self._not_given(self._count("given", 1) - 1):
            return start, start + self._size if stop is None else min(start + self._size, stop)
        self._count("ends", 1)
        return None

    def _not_given(self, given: int) -> Iterator[tuple[int, int | None]]:
        """What remains of the parts after so many claims."""
        for start, stop in self._remaining:
            num_claims = given if stop is None else min(given, -(-(stop - start) // self._size))
            first = start + num_claims * self._size
            if stop is None or first < stop:
                yield first, stop
            given -= num_claims

    def _outstanding(self, rank: int) -> list[Part]:
        """What a learner has claimed and is not done with; nothing if it never said."""
        if not self._store.check([f"done/{rank}"]):
            return []
        first, num_done = json.loads(self._store.get(f"done/{rank}"))
        numbers = range(first, self._count(f"claims/{rank}"))
        parts = [json.loads(self._store.get(f"claim/{rank}/{number}")) for number in numbers]
        return [(start + (num_done if place == 0 else 0), stop) for place, (start, stop) in enumerate(parts)]

    def _returned(self, number: int) -> Part:
        start, stop = json.loads(self._store.get(f"again/{number}"))
        return start, stop

    def _count(self, what: str, more: int = 0) -> int:
        return int(self._store.add(what, more))


def parts_of(state: dict[str, Any], **expected: object) -> list[tuple[int, int | None]]:
    """What remains according to the saved state of a sampler, which must be of the `expected` data and seed."""
    if found := {name: state[name] for name, value in expected.items() if state[name] != value}:
        raise ConfigError(
            f"sampler: the saved state has {', '.join(f'{name} {value}' for name, value in found.items())}, but this "
            f"sampler has {', '.join(f'{name} {expected[name]}' for name in found)}; resume with the same data and seed"
        )
    return [(start, stop) for start, stop in state["remaining"]]
