"""A learner's dealings with its peers among processes: messages, means, rounds, and a background to do them in."""

import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store
from torch.nn.parallel import DistributedDataParallel

from starling.engines.base import ReplicaLearner
from starling.engines.collectives import OrderedMean
from starling.engines.greeting import silent_learners
from starling.engines.rounds import Rounds
from starling.engines.staging import Staging
from starling.errors import PeerLost, ProtocolError
from starling.learner import Handle

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a learner stands among all, and the store through which they meet."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    store: Store


class ProcessHandle(Handle[T]):
    """Work under way in this process; `result()` waits for it once and keeps what it gave."""

    def __init__(self, wait: Callable[[], T]) -> None:
        self._wait = wait
        self._results: list[T] = []

    @property
    def is_finished(self) -> bool:
        return bool(self._results)

    def result(self) -> T:
        if not self._results:
            self._results.append(self._wait())
        return self._results[0]


class Background(threading.Thread):
    """A learner's second coroutine, in a thread. It waits inside its handles and polls nothing."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], rank: int) -> None:
        super().__init__(name=f"starling-background-{rank}", daemon=True)  # it must not keep a failed learner alive
        self._coroutine = coroutine
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            while True:
                self._coroutine.send(None)
        except StopIteration:
            pass
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raise what went wrong in the background, if anything has."""
        if self._error is not None:
            raise self._error


class GradientHandle(ProcessHandle[Tensor]):
    """A gradient, computed when it is waited for; `mean` may ask before that for the mean over the team instead."""

    def __init__(self, learner: ReplicaLearner, compute: Callable[[bool], Tensor], may_reduce: bool) -> None:
        super().__init__(lambda: compute(False))
        self.may_reduce = may_reduce
        self._learner = learner
        self._reduced = ProcessHandle(lambda: compute(True))
        self._is_given_away = False

    def reduced(self) -> Handle[Tensor]:
        """The mean over the team, in whose place the gradient itself is never computed."""
        self._is_given_away = True
        return self._reduced

    def result(self) -> Tensor:
        if self._is_given_away:
            raise self._learner.given_away()
        return super().result()


class PeerLearner(ReplicaLearner):
    """A learner that is this process, among others that are processes; `meet` connects it.

    Everything travels by gloo through host memory, except for what DDP reduces and, where each learner has a device of
    its own (`by_nccl`), means.
    """

    def meet(self, place: Place, device: torch.device, by_nccl: bool, timeout_seconds: float) -> None:
        """Connect with the others; the default process group is there."""
        self.place = place
        self._device = device
        self._by_nccl = by_nccl
        self._begin = time.monotonic()
        self._staging = Staging(device)
        self._rounds = Rounds(place.store, place.rank, place.world)
        self._background: Background | None = None
        timeout = timedelta(seconds=timeout_seconds)
        self._ordered = self._ordered_behind = OrderedMean(self._team_group("gloo", timeout), len(self.team))
        is_whole = len(self.team) == place.world
        self._backend_group = None if is_whole else self._team_group("nccl" if by_nccl else "gloo", timeout)
        if not is_whole:  # the means of two threads must not meet in one group, where their order would be chance
            self._ordered_behind = OrderedMean(self._team_group("gloo", timeout), len(self.team))

    def now(self) -> float:
        """Seconds since this learner met the others."""
        return time.monotonic() - self._begin

    def mean(self, of: Tensor | Handle[Tensor], group: Sequence[int] | None = None) -> Handle[Tensor]:
        self.check_group(group)
        if isinstance(of, GradientHandle) and of.may_reduce and not of.is_finished:
            return of.reduced()
        if isinstance(of, ProcessHandle) and of.is_finished:
            of = of.result()
        if isinstance(of, Handle):
            return ProcessHandle(lambda: self.mean(of.result(), group).result())
        self.check_mean(of)
        self._count_mean(of.nbytes)
        if self._by_nccl:
            vector = of.clone()
            work = dist.all_reduce(vector, group=self._backend_group, async_op=True)

            def reduced() -> Tensor:
                self._wait_for("a mean", work.wait)
                return vector.div_(len(self.team))

            return ProcessHandle(reduced)
        is_behind = threading.current_thread() is self._background
        under_way = (self._ordered_behind if is_behind else self._ordered).start(of)
        return ProcessHandle(lambda: self._wait_for("a mean", under_way.result).to(self._device))

    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle[None]:
        self.check_peer(peer)
        self.averaging.bytes_sent += tensor.nbytes
        host, what = self._staging.to_host(tensor).contiguous(), f"sending to learner {peer}"
        with self._naming_the_lost(what, peer):
            work = dist.isend(host, peer, tag=tag)

        def result() -> None:
            if work is not None:
                self._wait_for(what, work.wait, peer)

        return ProcessHandle(result)

    def receive(self, peer: int, like: Tensor, tag: int) -> Handle[Tensor]:
        self.check_peer(peer)
        theirs, what = self._staging.empty_like(like), f"receiving from learner {peer}"
        with self._naming_the_lost(what, peer):
            work = dist.irecv(theirs, peer, tag=tag)

        def result() -> Tensor:
            if work is not None:
                self._wait_for(what, work.wait, peer)
            return self._staging.to_device(theirs)

        return ProcessHandle(result)

    def exchange(self, peer: int, tensor: Tensor, tag: int) -> Handle[Tensor]:
        receiving = self.receive(peer, tensor, tag)  # first, so that both directions flow at once
        sending = self.send(peer, tensor, tag)

        def result() -> Tensor:
            sending.result()
            return receiving.result()

        return ProcessHandle(result)

    def background(self, activity: Coroutine[Any, Any, None]) -> None:
        if self._background is not None:
            raise ProtocolError(f"learner {self._rank} has a background already; it can have one")
        self._background = Background(activity, self._rank)
        self._background.start()

    def round(self, period: float) -> Handle[int | None]:
        def result() -> int | None:
            with self._naming_the_lost("waiting for a round"):
                number = self._rounds.next(period)
            self.averaging.rounds += number is not None
            return number

        return ProcessHandle(result)

    def reducing(self, model: nn.Module) -> DistributedDataParallel:
        """`model`, whose gradients are averaged over the team while backward runs."""
        return DistributedDataParallel(
            model, process_group=self._backend_group, broadcast_buffers=False, init_sync=False
        )

    def _step(self, gradient: Tensor) -> None:
        super()._step(gradient)
        self._rounds.gradient_made()

    def _check_background(self) -> None:
        """Raise what went wrong in the background, if anything has."""
        if self._background is not None:
            self._background.check()

    def _end_rounds(self) -> None:
        """No gradients will follow: wait until all rounds have ended. The others may still be computing."""
        self._rounds.finish()
        if self._background is not None:
            self._background.join()
            self._background.check()

    def _count_mean(self, num_bytes: int) -> None:
        """Count what a mean over the team sends."""
        self.averaging.bytes_sent += 2 * (len(self.team) - 1) * num_bytes // len(self.team)

    def _team_group(self, backend: str, timeout: timedelta) -> ProcessGroup | None:
        """A group of this learner's team; every process makes those of all teams, in one order."""
        # a new group would not take over the time-out of the default one, but wait for half an hour
        size, mine = len(self.team), None
        for first in range(0, self._world if size > 1 else 0, size):
            group = dist.new_group(range(first, first + size), backend=backend, timeout=timeout)
            mine = group if first == self.team.start else mine
        return mine

    def _wait_for(self, what: str, wait: Callable[[], T], peer: int | None = None) -> T:
        """Wait for others, or for one peer, and name who is lost if they do not come."""
        begin = self.now()
        with self._naming_the_lost(what, peer):
            result = wait()
        if threading.current_thread() is not self._background:
            self.spent.waiting_for_peers += self.now() - begin
        return result

    def _lost_ones(self, suspect: int | None) -> str:
        """Who did not come, in words; `suspect` if a connection to one peer broke."""
        return silent_learners(self.place.store, self._rank, self._world, suspect)

    def _whereabouts(self) -> str:
        """How far this learner has come, for errors."""
        return f"step {self.replica.version}"

    @contextmanager
    def _naming_the_lost(self, what: str, peer: int | None = None) -> Generator[None, None, None]:
        """Turn a backend's complaint about an address into a `PeerLost` that says what was going on."""
        try:
            yield
        except RuntimeError as error:
            if not _blames_a_connection(error):
                raise
            raise PeerLost(
                f"learner {self._rank} lost {self._lost_ones(peer)} in {what}, {self._whereabouts()} "
                f"({str(error).splitlines()[0]})"
            ) from error


def _blames_a_connection(error: Exception) -> bool:
    """Whether torch complains of the network; gloo's complaints are RuntimeErrors like any other."""
    words = ("gloo", "Connection", "Timed out", "peer")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)
