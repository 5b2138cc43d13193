"""Samplers that give each sample of an epoch to exactly one learner: the first that asks for more samples."""

import itertools
import json
import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, Generic, TypeVar

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.utils.data import Sampler

from starling.chance import derive_seed
from starling.errors import ConfigError
from starling.launch.joining import newest_place

T = TypeVar("T")
_NUM_SAMPLERS = itertools.count()
Part = tuple[int, int]
"""A range of positions in the order of an epoch, as (start, stop); `stop` is exclusive."""
_TRIES = 50


class Claims:
    """Divides the positions of an epoch among learners, so that each position goes to one learner. Each learner creates
    one object for each epoch.

    `remaining` lists the parts to give out, and `size` is the largest number of positions in a claim; all learners pass
    the same values. If the last part has no end (None), positions are given out as long as learners ask.

    A counter in the store holds the number of claims that were given out, so that no claim is given twice. Each learner
    also records in the store its claims, before it uses them, and how many of their positions are done.
    """

    def __init__(self, store: Store, rank: int, remaining: Sequence[tuple[int, int | None]], size: int) -> None:
        self._store, self._rank, self._remaining, self._size = store, rank, remaining, size
        self._num_claims = self._first = self._num_done = 0  # `_first`: this learner's first claim that is not done
        self._sizes: dict[int, int] = {}
        self._is_counted = False

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
        """Record that this learner has finished `num_positions` more of its positions, in the order in which it claimed
        them."""
        self._num_done, self._is_counted = self._num_done + num_positions, True
        while self._first in self._sizes and self._num_done >= self._sizes[self._first]:
            self._num_done -= self._sizes.pop(self._first)
            self._first += 1
        self._store.set(f"done/{self._rank}", json.dumps([self._first, self._num_done]))

    @property
    def is_finished(self) -> bool:
        """Whether this learner has finished all positions that it received, or never called `done`."""
        return not (self._sizes and self._is_counted)

    def reissue(self, rank: int) -> None:
        """Give the unfinished positions of a lost learner to the learners that ask next. Further calls for the same
        learner do nothing."""
        if self._count(f"lost/{rank}", 1) == 1:
            for part in self._outstanding(rank):
                self._store.set(f"again/{self._count('again')}", json.dumps(part))
                self._count("again", 1)

    def remaining(self) -> list[tuple[int, int | None]]:
        """The parts of the epoch that no learner has finished."""
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
        """Yield the parts that remain after `given` claims."""
        for start, stop in self._remaining:
            num_claims = given if stop is None else min(given, -(-(stop - start) // self._size))
            first = start + num_claims * self._size
            if stop is None or first < stop:
                yield first, stop
            given -= num_claims

    def _outstanding(self, rank: int) -> list[Part]:
        """Return the positions that a learner has claimed and not finished. The list is empty if the learner never
        recorded any position as done."""
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


class _Shared(Sampler[T], Generic[T]):
    """The common base of both samplers. It counts epochs, and keeps the state of the present epoch."""

    def __init__(self, remaining: list[tuple[int, int | None]], claim_size: int, **identity: object) -> None:
        if claim_size < 1:
            raise ConfigError(f"claim_size: must be at least 1, got {claim_size}")
        self._whole, self._claim_size, self._identity = remaining, claim_size, identity
        self._number, self._find_place = next(_NUM_SAMPLERS), newest_place
        self._epoch = self._num_passes = 0
        self._remaining = remaining
        self._has_ended = False
        self._present: Claims | None = None

    is_shared = True
    """Whether all learners load the state of the same learner from a checkpoint of `starling.join`."""
    _end: int | None = None
    """Number of positions in an epoch, if it only becomes known at the end of a pass."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. All learners must choose the same epoch. Without this call, each pass is
        the next epoch."""
        if epoch != self._epoch or self._has_ended:
            self._epoch, self._remaining, self._has_ended, self._present = epoch, self._whole, False, None

    def done(self, num: int) -> None:
        """Record that this learner has trained on `num` more of its samples, or batches, in the order in which it
        received them.

        `state_dict` and `reissue` then cover only the samples that are not done. If a learner never calls `done`, they
        treat all samples that it has received as done.
        """
        self._claims().done(num)

    def reissue(self, rank: int) -> None:
        """Give the samples that a lost learner had not recorded as done to the learners that ask next. The samples are
        given out once, even if several learners make this call."""
        self._claims().reissue(rank)

    def state_dict(self) -> dict[str, Any]:
        """Return the part of the present epoch that remains, for all learners together. The state is small, and
        consists of numbers and lists.

        After a pass, when this learner has finished its own samples, the epoch counts as ended: what others still train
        on is in their parts of the checkpoint that they save after their passes.
        """
        remaining = [part for part in self._claims().remaining() if self._end is None or part[0] < self._end]
        epoch = self._epoch
        if self._has_ended and (not remaining or self._claims().is_finished):
            epoch, remaining = epoch + 1, self._whole
        return {"epoch": epoch, "remaining": [list(part) for part in remaining], **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass give out the rest of a saved epoch. All learners load the same state.

        Raises:
            ConfigError: The state belongs to different data or a different seed.
        """
        if found := {name: state[name] for name, value in self._identity.items() if state[name] != value}:
            own = ", ".join(f"{name} {self._identity[name]}" for name in found)
            raise ConfigError(
                f"sampler: the saved state has {', '.join(f'{name} {value}' for name, value in found.items())}, but "
                f"this sampler has {own}; resume with the same data and seed"
            )
        self._remaining, self._present = [(start, stop) for start, stop in state["remaining"]], None
        self._epoch, self._has_ended = int(state["epoch"]), False

    def _parts(self) -> Iterator[tuple[int, int]]:
        """Yield this learner's claims in a pass over the rest of the epoch."""
        if self._has_ended:
            self.set_epoch(self._epoch + 1)
        self._present = None
        claims = self._claims()
        self._num_passes += 1
        yield from claims
        self._has_ended = True

    def _claims(self) -> Claims:
        """The claims of the present pass; before any pass has begun, those of the first pass."""
        if self._present is None:
            place = self._find_place()  # not earlier: Lightning sets the ranks when a fit begins
            store = PrefixStore(f"sampler/{self._number}/pass/{self._num_passes}", place.store)
            self._present = Claims(store, place.rank, self._remaining, self._claim_size)
        return self._present


class SharedSampler(_Shared[int]):
    """A sampler that gives each sample of an epoch to exactly one learner. A fast learner gets more samples than a slow
    one.

    Give the sampler to a `DataLoader` as `sampler`. Every learner must create it; if there are several samplers, all
    learners must create them in the same order. It has no length, because the number of samples that a learner gets
    depends on the other learners. The order of samples in an epoch depends only on the seed and the epoch. A pass ends
    once all samples have been given out.

    Args:
        data: A map-style dataset, or the number of its samples.
        shuffle: Whether the samples are shuffled, differently in each epoch.
        seed: The seed of the order.
        claim_size: The number of successive samples that a learner gets when it asks. A larger number means fewer
            requests to the store, but learners may then finish an epoch further apart.

    Raises:
        ConfigError: There are no samples, or `claim_size` is not positive.
    """

    def __init__(self, data: Sized | int, shuffle: bool = True, seed: int = 0, claim_size: int = 8) -> None:
        size = data if isinstance(data, int) else len(data)
        if size < 1:
            raise ConfigError("data: the dataset is empty")
        self._size, self._shuffle, self._seed = size, shuffle, seed
        self._given = (0, 0)
        super().__init__([(0, size)], claim_size, samples=size, seed=seed)

    @property
    def progress(self) -> float:
        """The number of epochs, including fractions, that had been given out to all learners together when this learner
        last asked.

        A learning rate that follows `progress` is the same for all learners, whatever their speeds. A learning rate
        that follows a learner's own steps stays high on a slow learner.
        """
        epoch, first = self._given
        return epoch + first / self._size

    def __iter__(self) -> Iterator[int]:
        order: list[int] = []
        for start, stop in self._parts():
            self._given = max(self._given, (self._epoch, start)) if order else (self._epoch, start)
            order = order or self._order()
            yield from order[start:stop]

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._size))
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "order", self._epoch))
        order: list[int] = torch.randperm(self._size, generator=generator).tolist()
        return order


class SharedBatches(_Shared[T]):
    """A sampler that gives each batch of another sampler, such as a lhotse sampler of cuts, to exactly one learner.

    Every learner iterates over the whole of `sampler`, and keeps the batches that it has claimed. Therefore `sampler`
    must yield the same batches in the same order on all learners. A lhotse sampler reads only metadata when it is
    iterated; create it with `rank=0, world_size=1`. Calls of `set_epoch` are passed on to `sampler`. Give this object
    to a `DataLoader` as `sampler`, with `batch_size=None`.

    Raises:
        ConfigError: `sampler` itself divides its batches among processes.
    """

    def __init__(self, sampler: Iterable[T]) -> None:
        if getattr(sampler, "world_size", 1) != 1:
            raise ConfigError(
                f"sampler: it divides its batches among {getattr(sampler, 'world_size', 1)} processes; create it with "
                "rank=0, world_size=1"
            )
        self._sampler = sampler
        super().__init__([(0, None)], 1)

    def __iter__(self) -> Iterator[T]:
        batches: Iterator[T] | None = None
        following = 0
        for number, _ in self._parts():
            if batches is None or number < following:  # the first batch, or one of a lost learner
                if hasattr(self._sampler, "set_epoch"):
                    self._sampler.set_epoch(self._epoch)
                batches, following = iter(self._sampler), 0
            try:
                while following <= number:
                    batch = next(batches)
                    following += 1
            except StopIteration:
                self._has_ended, self._end = True, following
                return
            yield batch
