"""Samplers that give each sample of an epoch to one of the learners: whichever asks first."""

import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, TypeVar

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore
from torch.utils.data import Sampler

from starling.chance import derive_seed
from starling.engines.processes.place import Place
from starling.errors import ConfigError
from starling.launch.joining import shared_place, surviving_place
from starling.launch.rendezvous import is_learner
from starling.training.claims import Claims, parts_of

T = TypeVar("T")
_NUM_SAMPLERS = itertools.count()


class _Shared(Sampler[T], Generic[T]):
    """What both samplers have: epochs, and the state of the present one."""

    def __init__(self, remaining: list[tuple[int, int | None]], claim_size: int, **identity: object) -> None:
        if claim_size < 1:
            raise ConfigError(f"claim_size: must be at least 1, got {claim_size}")
        self._whole, self._claim_size, self._identity = remaining, claim_size, identity
        self._number = next(_NUM_SAMPLERS)
        self._epoch = self._num_passes = 0
        self._remaining = remaining
        self._has_ended = False
        self._present: Claims | None = None

    _end: int | None = None
    """How many positions there are, where only the end of a pass shows it."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, the same on all learners. Without it, each pass is the next epoch."""
        if epoch != self._epoch or self._has_ended:
            self._epoch, self._remaining, self._has_ended, self._present = epoch, self._whole, False, None

    def done(self, num: int) -> None:
        """Record that this learner has trained on `num` more of what it got, in that order: samples, or batches.

        `state_dict` and `reissue` then return only the rest. They take all that a learner got as done if it never calls
        this.
        """
        self._claims().done(num)

    def reissue(self, rank: int) -> None:
        """Give what a lost learner had not recorded as done to those that ask next. It happens once, even if several
        learners call it."""
        self._claims().reissue(rank)

    def state_dict(self) -> dict[str, Any]:
        """Which part of the present epoch remains, for all learners together: small, and made of numbers and lists."""
        remaining = [part for part in self._claims().remaining() if self._end is None or part[0] < self._end]
        epoch = self._epoch
        if self._has_ended and not remaining:
            epoch, remaining = epoch + 1, self._whole
        return {"epoch": epoch, "remaining": [list(part) for part in remaining], **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass give what remained. All learners load the same state.

        Raises:
            ConfigError: The state is of other data, or of another seed.
        """
        self._remaining, self._present = parts_of(state, **self._identity), None
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

    def _find_place(self) -> Place:
        return (surviving_place() or shared_place()) if is_learner() else Place(0, 1, 0, 1, HashStore())

    def _claims(self) -> Claims:
        """The claims of the present pass, or of the first one before it begins."""
        if self._present is None:
            place = self._find_place()  # not earlier: Lightning sets the ranks when a fit begins
            store = PrefixStore(f"sampler/{self._number}/pass/{self._num_passes}", place.store)
            self._present = Claims(store, place.rank, self._remaining, self._claim_size)
        return self._present


class SharedSampler(_Shared[int]):
    """A sampler that gives each sample of an epoch to exactly one learner, at any speeds: a fast one gets more of them.

    Give it to a `DataLoader` as `sampler`. All learners make it, in the same order if there are several. It has no
    length, because what a learner gets depends on the others. The order of samples in an epoch depends only on seed and
    epoch. A pass ends once all samples have been given out.

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
