"""Samplers that give each sample of an epoch to exactly one learner: the first that asks for more samples."""

import itertools
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Generic, TypeVar

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.utils.data import Sampler

from starling.chance import derive_seed
from starling.errors import ConfigError
from starling.launch.joining import newest_membership, newest_place
from starling.training.membership import Membership

T = TypeVar("T")
_LOG = logging.getLogger("starling")
_NUM_SAMPLERS = itertools.count()
Part = tuple[int, int, int]
"""A range of positions in the order of an epoch, as (start, stop, epoch); `stop` is exclusive."""
Parts = list[tuple[int, int | None, int]]
"""Parts to give out. A part without an end (None) is the last one, and is given out as long as learners ask."""
_TRIES = 50


class Claims:
    """Divides parts of epochs among learners, so that each position goes to one learner.

    All learners make the same passes. Counters in the store number the claims, so that no claim is given twice. Each
    learner also records in the store its claims, before it uses them, and how many of their positions are done. What a
    lost learner had not done goes to the learners that ask next, whatever their passes. `membership` returns the living
    learners, or None if a loss ends the run; a restarted learner has the name of the one that was lost.
    """

    def __init__(
        self, store: Store, name: int, size: int, membership: Callable[[], Membership | None] = lambda: None
    ) -> None:
        self._store, self._name, self._size, self._membership = store, name, size, membership
        self._own: int | None = None  # number of this learner's list of claims
        self._num_claims = self._first = self._num_done = 0  # `_first`: this learner's first claim that is not done
        self._sizes: dict[int, int] = {}
        self._num_taken = 0  # number of returned parts, from the first on, that were taken
        self._seen: Membership | None = None

    def begin(self, number: int, epoch: int, parts: Parts) -> tuple[int, Parts]:
        """Begin pass `number`, and return its epoch and parts: those that the first learner that began it has given.
        What this learner received in earlier passes and has not recorded as done now counts as done."""
        self._first, self._num_done = self._num_claims, 0
        self._sizes.clear()
        self._record()
        own = json.dumps([number, epoch, parts]).encode()
        if (begun := self._store.compare_set(f"pass/{number}", "", own.decode())) == own:
            self._store.set("pass", own.decode())
        _, epoch, parts = json.loads(begun)
        return epoch, parts

    def newest(self) -> tuple[int, int, Parts] | None:
        """Return the number, the epoch and the parts of the newest pass that any learner has begun."""
        return tuple(json.loads(self._store.get("pass"))) if self._store.check(["pass"]) else None

    def next(self, number: int, parts: Parts) -> Part | None:
        """Claim positions in pass `number` over `parts`. Return None if all have been given out."""
        if self._own is None:
            self._own, self._seen = self._count("learners", 1) - 1, None
            self._store.set(f"learner/{self._own}", str(self._name))
        self._count("begun", 1)
        again = (part for place, part in self._returned() if self._count(f"taken/{place}", 1) == 1)
        if (part := next(again, None) or self._given(number, parts)) is not None:
            self._store.set(f"claim/{self._own}/{self._num_claims}", json.dumps(part))
            self._sizes[self._num_claims] = part[1] - part[0]
            self._num_claims = self._count(f"claims/{self._own}", 1)
        self._count("recorded", 1)
        return part

    def withdraw(self) -> None:
        """Make this learner's newest claim empty, because it lies beyond the end."""
        self._sizes[self._num_claims - 1] = 0
        self._store.set(f"claim/{self._own}/{self._num_claims - 1}", json.dumps((0, 0, 0)))
        self._record()

    def done(self, num_positions: int) -> None:
        """Record that this learner has finished `num_positions` more of its positions, in the order in which it claimed
        them."""
        self._num_done += num_positions
        self._store.set("counted", "")
        self._record()

    @property
    def is_finished(self) -> bool:
        """Whether this learner has finished all positions that it received, or no learner ever called `done`."""
        return self._own is None or not self._outstanding(self._own)

    def returned(self) -> Parts:
        """Return the parts of lost learners that no other learner has taken yet."""
        return [part for _, part in self._returned()]

    def unfinished(self, number: int, epoch: int, parts: Parts) -> Parts:
        """Return the parts of an epoch that no learner has finished, in pass `number` over `parts`, and those of lost
        learners that no other learner has taken yet."""
        found = self.returned()
        for _ in range(_TRIES):  # a learner may be about to record its claim
            if self._count("recorded") >= self._count("begun"):
                break
            time.sleep(0.001)
        living = [each for each in self._names() if not self._count(f"lost/{each}")]
        found += [part for each in living for part in self._outstanding(each) if part[2] == epoch]
        return sorted(found, key=lambda part: part[0]) + list(_after(self._count(f"given/{number}"), parts, self._size))

    def _given(self, number: int, parts: Parts) -> Part | None:
        for start, stop, epoch in _after(self._count(f"given/{number}", 1) - 1, parts, self._size):
            return start, start + self._size if stop is None else min(start + self._size, stop), epoch
        return None

    def _record(self) -> None:
        while self._first in self._sizes and self._num_done >= self._sizes[self._first]:
            self._num_done -= self._sizes.pop(self._first)
            self._first += 1
        if self._own is not None:
            self._store.set(f"done/{self._own}", json.dumps([self._first, self._num_done]))

    def _returned(self) -> Iterator[tuple[int, Part]]:
        """Yield the parts of lost learners that no other learner has taken yet, with their numbers."""
        if (present := self._membership()) != self._seen and present is not None:
            self._seen, names = present, self._names()
            newest = {name: number for number, name in names.items()}
            for number, name in names.items():
                if name not in present.members or number != newest[name]:  # lost, or lost and restarted
                    self._reissue(number, name)
        for number in range(self._num_taken, self._count("unfinished")):
            if self._count(f"taken/{number}"):
                self._num_taken += number == self._num_taken
            elif self._store.check([f"unfinished/{number}"]):
                yield number, tuple(json.loads(self._store.get(f"unfinished/{number}")))

    def _reissue(self, number: int, name: int) -> None:
        if self._count(f"lost/{number}", 1) > 1:
            return
        if not self._store.check(["counted"]) and self._count(f"claims/{number}"):
            what = "learner %d was lost, and the samples that it had received are left out of this epoch: call `done` "
            _LOG.warning(what + "of the sampler after each step, so that other learners get those not trained on", name)
        for part in self._outstanding(number):
            self._store.set(f"unfinished/{self._count('unfinished', 1) - 1}", json.dumps(part))

    def _outstanding(self, number: int) -> list[Part]:
        """Return the positions in a list of claims that are not finished; nothing if no learner ever called `done`."""
        if not self._store.check(["counted"]):
            return []
        known = self._store.check([f"done/{number}"])
        first, num_done = json.loads(self._store.get(f"done/{number}")) if known else (0, 0)
        keys = [f"claim/{number}/{each}" for each in range(first, self._count(f"claims/{number}"))]
        parts: list[Part] = [json.loads(self._store.get(key)) for key in keys]
        parts = [(start + num_done * (place == 0), stop, epoch) for place, (start, stop, epoch) in enumerate(parts)]
        return [part for part in parts if part[0] < part[1]]

    def _names(self) -> dict[int, int]:
        """Return the learner of each list of claims."""
        keys = {number: f"learner/{number}" for number in range(self._count("learners"))}
        return {number: int(self._store.get(key)) for number, key in keys.items() if self._store.check([key])}

    def _count(self, what: str, more: int = 0) -> int:
        return int(self._store.add(what, more))


def _after(num_claims: int, parts: Parts, size: int) -> Iterator[tuple[int, int | None, int]]:
    """Yield what remains of parts after a number of claims of `size` positions."""
    for start, stop, epoch in parts:
        num_here = num_claims if stop is None else min(num_claims, -(-(stop - start) // size))
        first = start + num_here * size
        if stop is None or first < stop:
            yield first, stop, epoch
        num_claims -= num_here


class _Shared(Sampler[T], Generic[T]):
    """The common base of both samplers, over `size` positions or, if it is None, as many as there turn out to be. It
    counts epochs, and keeps the state of the present epoch."""

    def __init__(self, size: int | None, claim_size: int, **identity: object) -> None:
        if claim_size < 1:
            raise ConfigError(f"claim_size: must be at least 1, got {claim_size}")
        self._size, self._claim_size, self._identity = size, claim_size, identity
        self._number, self._find_place, self._find_membership = next(_NUM_SAMPLERS), newest_place, newest_membership
        self._pass = self._num_passes = 0
        self._made: tuple[Store, Claims] | None = None
        self._choose(0)

    is_shared = True
    """Whether all learners load the state of the same learner from a checkpoint of `starling.join`."""

    @property
    def epoch(self) -> int:
        """The number of the epoch that is under way or, between two passes, of the next one; the first is 0.

        With loading processes, the samples of a batch may belong to an epoch that has already been given out.
        """
        if self._made is None and self._find_membership() is not None:
            self._claims()  # a process that joins a run takes part in its present pass
        return self._epoch + self._has_ended

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. All learners must choose the same epoch. Without this call, each pass is
        the next epoch."""
        if epoch != self._epoch or self._has_ended:
            self._choose(epoch)

    def done(self, num: int) -> None:
        """Record that this learner has trained on `num` more of its samples, or batches, in the order in which it
        received them.

        `state_dict` then covers only the samples that are not done, and so does what the other learners get of a lost
        one. If no learner calls `done`, all samples that were handed out count as done.
        """
        self._claims().done(num)

    def state_dict(self) -> dict[str, Any]:
        """Return the part of the present epoch that remains, for all learners together. The state is small, and
        consists of numbers and lists.

        After a pass, when this learner has finished its own samples, the epoch counts as ended: what others still train
        on is in their parts of the checkpoint that they save after their passes.
        """
        claims, epoch = self._claims(), self._epoch
        remaining = claims.unfinished(self._pass, epoch, self._remaining)
        if self._has_ended and (not remaining or claims.is_finished):
            epoch += 1
            remaining = [*claims.returned(), (0, self._size, epoch)]
        listed = [[start, stop] if of == epoch else [start, stop, of] for start, stop, of in remaining]
        return {"epoch": epoch, "remaining": listed, **self._identity}

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
        self._choose(int(state["epoch"]))
        remaining = state["remaining"]
        self._remaining = [(start, stop, of[0] if of else self._epoch) for start, stop, *of in remaining]

    def _choose(self, epoch: int) -> None:
        self._epoch, self._remaining, self._has_ended = epoch, [(0, self._size, epoch)], False
        self._pass = self._num_passes

    def _parts(self) -> Iterator[Part]:
        """Yield this learner's claims in a pass over the rest of the epoch."""
        if self._has_ended:
            self._choose(self._epoch + 1)
        claims, self._pass = self._claims(), self._num_passes
        self._num_passes += 1
        self._epoch, self._remaining = claims.begin(self._pass, self._epoch, self._remaining)
        while (part := claims.next(self._pass, self._remaining)) is not None:
            yield part
        self._has_ended = True

    def _claims(self) -> Claims:
        store = (place := self._find_place()).store  # not earlier: Lightning sets the ranks when a fit begins
        if self._made is None or self._made[0] is not store:
            own = PrefixStore(f"sampler/{self._number}", store)
            self._made = store, (claims := Claims(own, place.rank, self._claim_size, self._find_membership))
            if (begun := claims.newest()) is not None and begun[0] >= self._num_passes:  # others are ahead
                self._num_passes, self._epoch, self._remaining = begun
                self._pass = self._num_passes
        return self._made[1]


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
        self._num_samples, self._shuffle, self._seed = size, shuffle, seed
        super().__init__(size, claim_size, samples=size, seed=seed)
        self._given = (0, 0)

    @property
    def progress(self) -> float:
        """The number of epochs, including fractions, that had been given out to all learners together when this learner
        last asked.

        A learning rate that follows `progress` is the same for all learners, whatever their speeds. A learning rate
        that follows a learner's own steps stays high on a slow learner.
        """
        epoch, first = self._given
        return epoch + first / self._num_samples

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        to_give = [start for start, stop, _ in self._remaining if stop == self._num_samples]
        self._given = self._epoch, max(to_give, default=self._num_samples)

    def __iter__(self) -> Iterator[int]:
        order: list[int] = []
        for start, stop, epoch in self._parts():
            if epoch == self._epoch:
                self._given = max(self._given, (epoch, start)) if order else (epoch, start)
                order = order or self._order(epoch)
            yield from (order if epoch == self._epoch else self._order(epoch))[start:stop]

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._num_samples))
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "order", epoch))
        order: list[int] = torch.randperm(self._num_samples, generator=generator).tolist()
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
        super().__init__(None, 1)

    def __iter__(self) -> Iterator[T]:
        batches: Iterator[T] | None = None
        following = of = 0
        for number, _, epoch in self._parts():
            if batches is None or epoch != of or number < following:  # the first batch, or one of a lost learner
                if hasattr(self._sampler, "set_epoch"):
                    self._sampler.set_epoch(epoch)
                batches, following, of = iter(self._sampler), 0, epoch
            try:
                while following <= number:
                    batch = next(batches)
                    following += 1
            except StopIteration:
                self._claims().withdraw()
                batches, self._remaining = None, [] if epoch == self._epoch else self._remaining
            else:
                yield batch
