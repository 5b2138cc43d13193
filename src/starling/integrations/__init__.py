"""Other libraries' training loops as learners. Each module needs its library, and is imported only where it is used.

This module has their common parts: the learner of a host framework's training, and the process group before its
processes join.
"""

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from starling.engines.loop.joined import JoinedLearner
from starling.launch.joining import attach, shared_place
from starling.launch.rendezvous import number_of_learners

_NUM_GROUPS = count()


class HostLearner:
    """The learner of an adapter, with the operations that all adapters need. `options` are the keywords of
    `starling.attach`."""

    def __init__(self, strategy: str, options: dict[str, Any]) -> None:
        self.strategy, self.options = strategy, options
        self.learner: JoinedLearner | None = None
        """Newest learner, which may have left."""
        self._training: JoinedLearner | None = None  # the same, between joining and leaving
        self.survives = options.get("on_loss") == "continue"
        """Whether the learner continues when others are lost."""
        self._num_started = 1
        self._is_showing = False  # the model holds a consensus

    @property
    def is_apart(self) -> bool:
        """Whether the host's collectives would wait for learners that are not in step, or that may be lost."""
        return self._training is not None and (self.survives or not self._training.is_in_step)

    @property
    def has_lost(self) -> bool:
        """Whether learners were lost, so that not all processes of the host are left."""
        return self.survives and self.learner is not None and self.learner.world < self._num_started

    def rank(self, of_host: int) -> int:
        """This learner's rank: `of_host`, unless learners have been lost."""
        return of_host if self.learner is None or not self.survives else self.learner.rank

    def attach(self, optimizer: Any, model: nn.Module, scaler: GradScaler | None) -> JoinedLearner:
        """Join the other learners, with an optimizer that accelerate may have wrapped."""
        self._num_started = number_of_learners()
        own = getattr(optimizer, "optimizer", optimizer)
        self.learner = self._training = attach(own, model, self.strategy, scaler=scaler, **self.options)
        return self.learner

    def finish(self) -> None:
        """Adopt the mean of all final weights, and leave once all learners have."""
        if (learner := self._training) is not None:
            with learner.consensus(final=True):
                pass
            self._training = None
            learner.close()

    def leave(self, error: BaseException) -> None:
        """Notify the others that training has failed, unless it has ended."""
        if (learner := self._training) is not None:
            self._training = None
            learner.__exit__(type(error), error, error.__traceback__)

    @contextmanager
    def consensus(self) -> Generator[None, None, None]:
        """A context in which the model holds the mean of all learners' models during training; contexts may nest."""
        if self._training is None or self._is_showing:
            yield
            return
        with self._training.consensus():
            self._is_showing = True
            try:
                yield
            finally:
                self._is_showing = False


def open_host_group(backend: str, timeout: timedelta | None = None, is_alone: bool = False) -> None:
    """Give `torch.distributed` a default process group, unless it has one. All processes must call this equally often.

    It uses the store that learners use later: a second one could not listen at the same port. A process that is alone,
    because others were lost, gets a group of its own.
    """
    if dist.is_initialized():
        return
    if is_alone:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return
    place = shared_place()
    store = PrefixStore(f"host/{next(_NUM_GROUPS)}", place.store)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout)
    store.set(f"connected/{place.rank}", "")  # a process that ended at once would disturb those still connecting
    store.wait([f"connected/{rank}" for rank in range(place.world)])


def close_host_group() -> None:
    """Make room for the learners' own process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
