"""Samplers that give each sample of an epoch to one of the learners: whichever asks first."""

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
"""A range of positions in the order of an epoch, as (start, stop), stop exclusive."""
_TRIES = 50


class Claims:
    """Divides the positions of an epoch among learners, each once. One object for each learner and epoch.

    `remaining` are the parts to give out, and `size` is the largest number of positions in a claim; all learners pass
    the same values. Without an end (None), positions are given out until no learner asks.

    In the store, the number of claims that were given out is a counter, so that no claim is given twice; each learner
    records its claims before it gets them, and how many of their positions are done.
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
        """Record that this learner is done with `num_positions` more of its positions, in the order in which it got
        them."""
        self._num_done += num_positions
        while self._first in self._sizes and self._num_done >= self._sizes[self._first]:
            self._num_done -= self._sizes.pop(self._first)
            self._first += 1
        self._store.set(f"done/{self._rank}", json.dumps([self._first, self._num_done]))

    def reissue(self, rank: int) -> None:
        """Give the unfinished positions of a lost learner to the learners that ask next; further calls do nothing."""
        if self._count(f"lost/{rank}", 1) == 1:
            for part in self._outstanding(rank):
                self._store.set(f"again/{self._count('again')}", json.dumps(part))
                self._count("again", 1)

    def remaining(self) -> list[tuple[int, int | None]]:
        """The parts with which no learner is done."""
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
        """The rest of the parts after `given` claims."""
        for start, stop in self._remaining:
            num_claims = given if stop is None else min(given, -(-(stop - start) // self._size))
            first = start + num_claims * self._size
            if stop is None or first < stop:
                yield first, stop
            given -= num_claims

    def _outstanding(self, rank: int) -> list[Part]:
        """The positions that a learner has claimed and not finished; none if it never recorded any as done."""
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
    """The common part of both samplers: epochs, and the state of the present one."""

    def __init__(self, remaining: list[tuple[int, int | None]], claim_size: int, **identity: object) -> None:
        if claim_size < 1:
            raise ConfigError(f"claim_size: must be at least 1, got {claim_size}")
        self._whole, self._claim_size, self._identity = remaining, claim_size, identity
        self._number, self._find_place = next(_NUM_SAMPLERS), newest_place
        self._epoch = self._num_passes = 0
        self._remaining = remaining
        self._has_ended = False
        self._present: Claims | None = None

    _end: int | None = None
    """Number of positions, if only the end of a pass shows it."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, the same on all learners. Without it, each pass is the next epoch."""
        if epoch != self._epoch or self._has_ended:
            self._epoch, self._remaining, self._has_ended, self._present = epoch, self._whole, False, None

    def done(self, num: int) -> None:
        """Record that this learner has trained on `num` more of its samples, or batches, in the order in which it got
        them.

        `state_dict` and `reissue` then return only the rest. They take all that a learner got as done if it never calls
        this.
        """
        self._claims().done(num)

    def reissue(self, rank: int) -> None:
        """Give the samples that a lost learner had not recorded as done to the learners that ask next. It happens once,
        even if several learners call it."""
        self._claims().reissue(rank)

    def state_dict(self) -> dict[str, Any]:
        """The part of the present epoch that remains, for all learners together: small, and made of numbers and
        lists."""
        remaining = [part for part in self._claims().remaining() if self._end is None or part[0] < self._end]
        epoch = self._epoch
        if self._has_ended and not remaining:
            epoch, remaining = epoch + 1, self._whole
        return {"epoch": epoch, "remaining": [list(part) for part in remaining], **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass give out the rest of a saved epoch. All learners load the same state.

        Raises:
            ConfigError: The state is of other data, or of another seed.
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
        """This learner's claims in a pass over what remains of the epoch."""
        if self._has_ended:
            self.set_epoch(self._epoch + 1)
        self._present = None
        claims = self._claims()
        self._num_passes += 1
        yield from claims
        self._has_ended = True

    def _claims(self) -> Claims:
        """The claims of the present pass, or of the first one before it begins."""
        if self._present is None:
            place = self._find_place()  # not earlier: Lightning sets the ranks when a fit begins
            store = PrefixStore(f"sampler/{self._number}/pass/{self._num_passes}", place.store)
            self._present = Claims(store, place.rank, self._remaining, self._claim_size)
        return self._present


class SharedSampler(_Shared[int]):
    """A sampler that gives each sample of an epoch to exactly one learner, at any speeds: a fast one gets more of them.

    Give it to a `DataLoader` as `sampler`. All learners create it; if there are several samplers, in the same order. It
    has no length, because what a learner gets depends on the others. The order of samples in an epoch depends only on
    seed and epoch. A pass ends once all samples have been given out.

    Args:
        data: A map-style dataset, or the number of its samples.
        shuffle: Whether each epoch has an order of its own.
        seed: Seeds the order.
        claim_size: How many successive samples a learner gets when it asks. More of them make fewer requests to the
            store, and a greater difference between the ends of learners.

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
        """Epochs of samples that had been given out, to all learners together, when this learner last asked.

        A learning rate that follows it is the same for all learners at any speeds; one that follows a learner's own
        steps stays high on a slow learner.
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
    """A sampler that gives each batch of another sampler to exactly one learner, such as a lhotse sampler of cuts.

    Every learner iterates the whole of `sampler`, which must therefore give the same batches in the same order to all,
    and takes those that it has claimed. With lhotse that costs only metadata: create its sampler with `rank=0,
    world_size=1`. `set_epoch` is passed on to it. Give this to a `DataLoader` as `sampler`, with `batch_size=None`.

    Raises:
        ConfigError: `sampler` divides its batches among processes itself.
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
            if batches is None or number < following:  # at first, or for a batch of a lost learner
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
