"""The real engine: each learner is a process, on `torch.distributed`.

On the CPU everything travels by gloo. On CUDA, with a device for each learner, collectives travel by NCCL; learners
that share a device fall back to gloo through host memory.
"""

import copy
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.nn.parallel import DistributedDataParallel

from starling.checkpoint.state import LearnerState
from starling.engines.base import FIRST_TICKET, EngineLearner, given_away
from starling.engines.collectives import OrderedMean
from starling.engines.flat import FlatModel
from starling.engines.greeting import Greeting, greet, part, silent_learners
from starling.engines.job import Job, Observer
from starling.engines.loading import Loaded, load_ahead
from starling.engines.replica import Replica
from starling.engines.tickets import TicketSequence, round_tickets
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


class GradientHandle(ProcessHandle[Tensor]):
    """A gradient, computed when it is waited for; `mean` may ask before that for the mean over all learners instead."""

    def __init__(self, rank: int, compute: Callable[[bool], Tensor]) -> None:
        super().__init__(lambda: compute(False))
        self._rank = rank
        self._reduced = ProcessHandle(lambda: compute(True))
        self._is_given_away = False

    def reduced(self) -> Handle[Tensor]:
        """The mean over all learners, in whose place the gradient itself is never computed."""
        self._is_given_away = True
        return self._reduced

    def result(self) -> Tensor:
        if self._is_given_away:
            raise given_away(self._rank)
        return super().result()


class ProcessLearner(EngineLearner):
    """A learner that is this process."""

    def __init__(
        self,
        job: Job,
        place: Place,
        flat: FlatModel,
        observer: Observer,
        start: LearnerState | None,
        timeout_seconds: float,
    ) -> None:
        replica = Replica(flat.weights, flat.gradients, flat.parameters, job.make_optimizer, job.clip_norm)
        if start is not None:
            flat.load_buffers(start.buffers)
        super().__init__(job, place.rank, place.world, replica, observer, start)
        self._store = place.store
        self._flat = flat
        self._device = flat.weights.device
        self._by_nccl = has_own_device(place, self._device)
        self._elsewhere: FlatModel | None = None  # the model at weights other than this learner's own
        self._reducing: DistributedDataParallel | None = None
        self._begin = time.monotonic()
        first = start.position if start else FIRST_TICKET
        tickets = round_tickets(TicketSequence(job.workload, first), job.budget, first, place.world)
        mine = (ticket for ticket in tickets if (ticket.step - first.step) % place.world == place.rank)
        self._batches = load_ahead(job.workload, mine, job.num_workers)
        # a new group would not take over the time-out of the default one, but wait for half an hour
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._ordered = OrderedMean(group, place.rank, place.world)

    def now(self) -> float:
        return time.monotonic() - self._begin

    def gradient(self, at: Tensor) -> Handle[Tensor]:
        version, ticket = self.replica.version, self._claimed()[0]
        mine = at is self.weights
        if not mine:
            if self._elsewhere is None:
                self._elsewhere = FlatModel(
                    copy.deepcopy(self._flat.model), self._device, gradients=self._flat.gradients
                )
            self._elsewhere.weights.copy_(at)

        def result(reduced: bool) -> Tensor:
            if mine and self.replica.version != version:
                raise self.changed_beneath()
            if self._ticket is not ticket:
                raise ProtocolError(f"learner {self._rank} claimed again before it awaited its gradient")
            return self._gradient(self._flat if mine or self._elsewhere is None else self._elsewhere, reduced)

        return GradientHandle(self._rank, result)

    def step(self, gradient: Tensor) -> None:
        begin = self.now()
        super().step(gradient)
        self.spent.computing += self.now() - begin

    def mean(self, of: Tensor | Handle[Tensor]) -> Handle[Tensor]:
        if isinstance(of, GradientHandle) and not of.is_finished:
            return of.reduced()
        if isinstance(of, ProcessHandle) and of.is_finished:
            of = of.result()
        if isinstance(of, Handle):
            return ProcessHandle(lambda: self.mean(of.result()).result())
        self.check_mean(of)
        if self._by_nccl:
            vector = of.clone()
            work = dist.all_reduce(vector, async_op=True)

            def reduced() -> Tensor:
                self._for_peers("a mean", work.wait)
                return vector.div_(self._world)

            return ProcessHandle(reduced)
        under_way = self._ordered.start(of)
        return ProcessHandle(lambda: self._for_peers("a mean", under_way.result).to(self._device))

    def exchange(self, peer: int, tensor: Tensor, tag: int) -> Handle[Tensor]:
        self.check_peer(peer)
        mine = tensor.detach().to("cpu", copy=True)
        theirs = torch.empty_like(mine)
        works = [dist.isend(mine, peer, tag=tag), dist.irecv(theirs, peer, tag=tag)]

        def result() -> Tensor:
            for work in works:
                if work is not None:
                    self._for_peers(f"an exchange with learner {peer}", work.wait)
            return theirs.to(self._device)

        return ProcessHandle(result)

    def drive(self) -> LearnerState:
        """Run the strategy to its end; the state in which it leaves this learner."""
        coroutine = self.job.strategy.start(self, self.job.options)
        try:
            while True:
                coroutine.send(None)  # it waits inside the handle's result
        except StopIteration:
            return self.state()
        finally:
            self._ordered.close()

    def _gradient(self, flat: FlatModel, reduced: bool) -> Tensor:
        begin = self.now()
        if not reduced or self._world == 1:
            loss = self.compute_gradient(flat.model, flat)
        elif flat is not self._flat:
            raise ProtocolError("the mean of a gradient needs the gradient at `weights`; await the gradient first")
        else:
            with self._naming_the_lost("the mean of a gradient"):
                if self._reducing is None:
                    self._reducing = DistributedDataParallel(flat.model, broadcast_buffers=False)
                loss = self.compute_gradient(self._reducing, flat, before_last=self._reducing.no_sync)
        self.spent.computing += self.now() - begin
        self.report_step(loss)
        return flat.gradients

    def _for_peers(self, what: str, wait: Callable[[], T]) -> T:
        begin = self.now()
        with self._naming_the_lost(what):
            result = wait()
        self.spent.waiting_for_peers += self.now() - begin
        return result

    @contextmanager
    def _naming_the_lost(self, what: str) -> Generator[None, None, None]:
        """Turn a backend's complaint about an address into a `PeerLost` that says what was going on."""
        try:
            yield
        except RuntimeError as error:
            if not _blames_a_connection(error):
                raise
            lost = silent_learners(self._store, self._rank, self._world)
            raise PeerLost(
                f"learner {self._rank} lost {lost} in {what}, round {self._next_step // self._world} "
                f"({str(error).splitlines()[0]})"
            ) from error

    def _next_batch(self) -> Loaded | None:
        begin = self.now()
        loaded = next(self._batches, None)
        self.spent.waiting_for_data += self.now() - begin
        return loaded

    def _agreed_seconds(self, step: int) -> float:
        """Learner 0's clock, through the store."""
        key = "clock/{}".format
        if self._rank == 0:
            self._store.set(key(step), repr(self.now()))
            self._store.delete_key(key(step - 2 * self._world))
        with self._naming_the_lost("agreeing on the time"):
            return float(self._store.get(key(step)))

    def _buffers(self) -> dict[str, Tensor]:
        return dict(self._flat.model.named_buffers())


def _blames_a_connection(error: Exception) -> bool:
    """Whether torch complains of the network; gloo's complaints are RuntimeErrors like any other."""
    words = ("gloo", "Connection", "Timed out", "peer")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def choose_device(name: str, place: Place) -> torch.device:
    """The device of a learner: `auto` is CUDA where there is one, a device each as far as they go."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", place.local_rank % torch.cuda.device_count())


def has_own_device(place: Place, device: torch.device) -> bool:
    """Whether no two learners of this machine share a CUDA device, which NCCL would refuse."""
    return device.type == "cuda" and place.local_world <= torch.cuda.device_count()


@contextmanager
def process_group(place: Place, device: torch.device, timeout_seconds: float) -> Generator[None, None, None]:
    """The default process group of `torch.distributed`, for as long as the context lasts."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_own_device(place, device) else "gloo",
            store=PrefixStore("group/0", place.store),
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except RuntimeError as error:
        lost = silent_learners(place.store, place.rank, place.world)
        raise PeerLost(
            f"learner {place.rank} lost {lost} while connecting to the others ({str(error).splitlines()[0]})"
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_learner(
    job: Job,
    place: Place,
    device: torch.device,
    digest: str,
    observer: Observer,
    start: LearnerState | None = None,
    timeout_seconds: float = 600.0,
) -> LearnerState:
    """Be the learner at `place` from greeting to end, and return the state it ends in.

    `digest` stands for the whole configuration and must be the same on all learners. Raises `ProtocolError` when
    learners differ, `PeerLost` when one is gone or does not answer within `timeout_seconds`.
    """
    flat = FlatModel(job.workload.make_model(), device)
    mine = Greeting(
        world=place.world,
        strategy=job.strategy.name,
        num_parameters=flat.num_parameters,
        dtype=str(flat.weights.dtype),
        configuration=digest,
        **Greeting.of_versions(),
    )
    greet(place.store, place.rank, mine, timeout_seconds)
    with process_group(place, device, timeout_seconds):
        state = ProcessLearner(job, place, flat, observer, start, timeout_seconds).drive()
        part(place.store, place.rank, place.world, timeout_seconds)
    return state
