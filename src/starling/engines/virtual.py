"""The virtual engine: all learners in one process, on a simulated clock, with real gradients.

The same seed gives the same events in the same order, and `Outcome.event_hash` proves it. When nothing is left to
happen while a learner waits, that is a deadlock, and the error says who waits for whom.
"""

import hashlib
import struct
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import simpy
import torch
from torch import Tensor, nn

from starling.checkpoint.state import LearnerState
from starling.engines.base import FIRST_TICKET, EngineLearner, given_away
from starling.engines.cluster import Cluster, ComputeTimes
from starling.engines.flat import FlatModel, split
from starling.engines.job import Job, Observer, Silence
from starling.engines.loading import Loaded, load_ahead
from starling.engines.replica import Replica
from starling.engines.tickets import TicketSequence, round_tickets
from starling.errors import Deadlock, ProtocolError
from starling.learner import Handle

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """How a virtual run ended."""

    states: list[LearnerState]
    """By rank."""
    seconds: float
    """On the simulated clock."""
    num_events: int
    event_hash: str
    """SHA-256 over every event: when, who, what, and the bits of every loss."""


class VirtualHandle(Handle[T]):
    """Work that is over when `event` happens.

    `waits_for` says what that takes, for the deadlock report; `computing` is how many of the seconds until then are
    the learner's own computation.
    """

    def __init__(
        self,
        event: simpy.Event,
        result: Callable[[], T],
        waits_for: Callable[[], str],
        computing: float = 0.0,
    ) -> None:
        self.event = event
        self.waits_for = waits_for
        self.computing = computing
        self._result = result

    def result(self) -> T:
        return self._result()


class VirtualGradient(VirtualHandle[Tensor]):
    """A gradient; once `mean` has taken it, only the mean may be awaited, as on the `processes` engine."""

    taken_from: int | None = None

    def result(self) -> Tensor:
        if self.taken_from is not None:
            raise given_away(self.taken_from)
        return super().result()


class _Failed(Exception):  # noqa: N818 - carries what a strategy raised
    """Brings a strategy's exception, as it is, through simpy, which would make a new one of its first arguments."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


@dataclass
class _Exchange:
    """Two learners that meet, each with a vector."""

    event: simpy.Event
    brought: dict[int, Tensor] = field(default_factory=dict)


class _Mean:
    """A mean of all learners' vectors, summed in rank order; who comes before its turn waits as a copy."""

    def __init__(self, event: simpy.Event, world: int) -> None:
        self.event = event
        self.result: Tensor | None = None
        self._world = world
        self._num_summed = 0
        self._early: dict[int, Tensor] = {}

    def join(self, rank: int, vector: Tensor) -> bool:
        """Add a vector `[P]` as it is now; whether it was the last."""
        if rank != self._num_summed:
            self._early[rank] = vector.clone()
            return False
        while True:
            self.result = vector.clone() if self.result is None else self.result.add_(vector)
            self._num_summed += 1
            if self._num_summed not in self._early:
                break
            vector = self._early.pop(self._num_summed)
        if self._num_summed < self._world:
            return False
        self.result.div_(self._world)
        return True

    def missing(self) -> list[int]:
        return [rank for rank in range(self._num_summed, self._world) if rank not in self._early]


class VirtualLearner(EngineLearner):
    """A learner that is a coroutine on the simulated clock."""

    def __init__(
        self,
        engine: "VirtualEngine",
        rank: int,
        replica: Replica,
        observer: Observer,
        start: LearnerState | None,
    ) -> None:
        super().__init__(engine.job, rank, engine.world, replica, observer, start)
        self._engine = engine
        self._times = ComputeTimes(engine.cluster.compute, engine.job.seed, rank)
        self._gradient = torch.empty_like(replica.weights)
        self._means = 0  # collectives have no name but their place in each learner's sequence

    def now(self) -> float:
        return float(self._engine.environment.now)

    def _agreed_seconds(self, step: int) -> float:
        return self._engine.agreed_seconds.setdefault(step, self.now())

    def _next_batch(self) -> Loaded | None:
        return self._engine.take(self._next_step + self._rank)

    def _buffers(self) -> dict[str, Tensor]:
        return dict(self._engine.model.model.named_buffers())

    def claim(self) -> bool:
        claimed = super().claim()
        self._engine.record(self._rank, "claim", struct.pack("<q", self._next_step if claimed else -1))
        return claimed

    def step(self, gradient: Tensor) -> None:
        super().step(gradient)
        self._engine.record(self._rank, "step")

    def gradient(self, at: Tensor) -> Handle[Tensor]:
        loss = self._engine.real_gradient(self, at, out=self._gradient)
        version = self.replica.version
        seconds = self._times.draw()

        def finish(_: object) -> None:
            self._engine.record(self._rank, "gradient", struct.pack("<d", loss))
            self.report_step(loss)

        def result() -> Tensor:
            if at is self.weights and self.replica.version != version:
                raise self.changed_beneath()
            return self._gradient

        event = self._engine.environment.timeout(seconds)
        event.callbacks.append(finish)
        return VirtualGradient(event, result, lambda: "its own gradient", computing=seconds)

    def book(self, waited: float, computing: float) -> None:
        """Book the seconds spent waiting for a handle, of which at most `computing` were this learner's own work."""
        self.spent.computing += min(waited, computing)
        self.spent.waiting_for_peers += max(0.0, waited - computing)

    def mean(self, of: Tensor | Handle[Tensor]) -> Handle[Tensor]:
        number, self._means = self._means, self._means + 1
        return self._engine.mean(self._rank, number, of)

    def exchange(self, peer: int, tensor: Tensor, tag: int) -> Handle[Tensor]:
        self.check_peer(peer)
        return self._engine.exchange(self._rank, peer, tensor, tag)


class VirtualEngine:
    """`world` learners of `job` on the simulated `cluster`."""

    def __init__(
        self,
        job: Job,
        world: int,
        cluster: Cluster | None = None,
        observer: Observer | None = None,
        start: Sequence[LearnerState] | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - devices are values
    ) -> None:
        self.job = job
        self.world = world
        self.cluster = cluster or Cluster()
        self.environment = simpy.Environment()
        self.model = FlatModel(job.workload.make_model(), device)
        self.agreed_seconds: dict[int, float] = {}
        self._hash = hashlib.sha256()
        self._num_events = 0
        self._means: dict[int, _Mean] = {}
        self._exchanges: dict[tuple[int, int, int], list[_Exchange]] = {}
        self._waiting: dict[int, VirtualHandle[Any]] = {}
        first = start[0].position if start else FIRST_TICKET
        tickets = round_tickets(TicketSequence(job.workload, first), job.budget, first, world)
        self._batches = load_ahead(job.workload, tickets, job.num_workers)
        self._loaded: dict[int, Loaded] = {}
        self._learners = [
            VirtualLearner(self, rank, self._new_replica(), observer or Silence(), start[rank] if start else None)
            for rank in range(world)
        ]

    def run(self) -> Outcome:
        """Let everything happen. Raises what a learner raised, and `Deadlock`."""
        for learner in self._learners:
            self.environment.process(self._drive(learner))
        try:
            self.environment.run()
        except _Failed as failed:
            raise failed.error from None
        if self._waiting:
            raise Deadlock(
                f"deadlock after {self.environment.now:.6g} simulated seconds: nothing is left to happen, but "
                + "; ".join(
                    f"learner {rank} waits for {self._waiting[rank].waits_for()}" for rank in sorted(self._waiting)
                )
            )
        states = [learner.state() for learner in self._learners]
        return Outcome(states, float(self.environment.now), self._num_events, self._hash.hexdigest())

    def record(self, rank: int, kind: str, detail: bytes = b"") -> None:
        """Add an event to the hash."""
        self._num_events += 1
        self._hash.update(struct.pack("<dq", self.environment.now, rank) + kind.encode() + b"\0" + detail)

    def take(self, step: int) -> Loaded | None:
        """The mini-batch of ticket `step`; None after the last. Batches are loaded in order and kept until taken."""
        while step not in self._loaded:
            loaded = next(self._batches, None)
            if loaded is None:
                return None
            self._loaded[loaded[0].step] = loaded
        return self._loaded.pop(step)

    def real_gradient(self, learner: VirtualLearner, at: Tensor, out: Tensor) -> float:
        """Put the gradient of the learner's mini-batch at the weights `at` `[P]` into `out` `[P]`; the loss."""
        self.model.weights.copy_(at)
        loss = learner.compute_gradient(self.model.model, self.model)
        out.copy_(self.model.gradients)
        return loss

    def mean(self, rank: int, number: int, of: Tensor | Handle[Tensor]) -> Handle[Tensor]:
        """Join the mean with this number: of a vector as it is now, or of a gradient when it is complete."""
        joined = self._means.get(number)
        if joined is None:
            joined = self._means[number] = _Mean(self.environment.event(), self.world)
        mean = joined

        def join(vector: Tensor) -> None:
            self._learners[rank].check_mean(vector)
            if mean.join(rank, vector):
                del self._means[number]
                seconds = self.cluster.link.reduce_seconds(vector.numel() * vector.element_size(), self.world)
                self._happen(mean.event, seconds)

        computing = 0.0
        if isinstance(of, VirtualHandle) and of.event.processed:
            join(of.result())
        elif isinstance(of, VirtualHandle):
            computing = of.computing
            of.event.callbacks.append(lambda _: join(VirtualHandle.result(of)))
            if isinstance(of, VirtualGradient):
                of.taken_from = rank
        elif isinstance(of, Tensor):
            join(of)

        def result() -> Tensor:
            self.record(rank, "mean", struct.pack("<q", number))
            if mean.result is None:
                raise ProtocolError(f"learner {rank} read mean {number} before all learners had joined it")
            return mean.result

        return VirtualHandle(
            mean.event, result, lambda: f"mean {number}, which {_named(mean.missing())} did not join", computing
        )

    def exchange(self, rank: int, peer: int, tensor: Tensor, tag: int) -> Handle[Tensor]:
        """Meet `peer` under `tag`; each gets what the other brought."""
        key = (min(rank, peer), max(rank, peer), tag)
        waiting = self._exchanges.setdefault(key, [])  # several of one tag meet in the order they began
        exchange = next((each for each in waiting if rank not in each.brought), None)
        if exchange is None:
            exchange = _Exchange(self.environment.event())
            waiting.append(exchange)
        exchange.brought[rank] = tensor.clone()
        if peer in exchange.brought:
            waiting.remove(exchange)
            if not waiting:
                del self._exchanges[key]
            _check_alike(rank, tensor, peer, exchange.brought[peer], tag)
            self._happen(exchange.event, self.cluster.link.send_seconds(tensor.numel() * tensor.element_size()))

        def result() -> Tensor:
            self.record(rank, "exchange", struct.pack("<qq", peer, tag))
            return exchange.brought[peer]

        return VirtualHandle(exchange.event, result, lambda: f"learner {peer} to exchange under tag {tag}")

    def _new_replica(self) -> Replica:
        weights = self.model.weights.clone()
        parameters = [nn.Parameter(view) for view in split(weights, self.model.parameters)]
        for parameter, gradient in zip(parameters, split(self.model.gradients, self.model.parameters), strict=True):
            parameter.grad = gradient
        return Replica(weights, self.model.gradients, parameters, self.job.make_optimizer, self.job.clip_norm)

    def _happen(self, event: simpy.Event, seconds: float) -> None:
        """Let `event` happen after some simulated seconds."""
        self.environment.timeout(seconds).callbacks.append(lambda _: event.succeed())

    def _drive(self, learner: VirtualLearner) -> Generator[simpy.Event, None, None]:
        """Run the learner's coroutine; whenever it waits for a handle, wait for the handle's event."""
        coroutine = self.job.strategy.start(learner, self.job.options)
        try:
            while True:
                handle = coroutine.send(None)
                if not isinstance(handle, VirtualHandle):
                    raise ProtocolError(
                        f"learner {learner.rank} awaited {handle!r}; a strategy awaits only what its learner started"
                    )
                begin = learner.now()
                self._waiting[learner.rank] = handle
                if not handle.event.processed:
                    yield handle.event
                del self._waiting[learner.rank]
                learner.book(learner.now() - begin, handle.computing)
        except StopIteration:
            self.record(learner.rank, "end")
        except Exception as error:
            raise _Failed(error) from error


def _check_alike(rank: int, mine: Tensor, peer: int, theirs: Tensor, tag: int) -> None:
    """`ProtocolError` unless two learners exchange tensors of one shape and dtype; gloo would abort the process."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        raise ProtocolError(
            f"learner {rank} and learner {peer} exchange tensors that differ under tag {tag}: "
            f"{mine.dtype} {list(mine.shape)} and {theirs.dtype} {list(theirs.shape)}"
        )


def _named(ranks: Sequence[int]) -> str:
    return " and ".join(f"learner {rank}" for rank in ranks) or "the network"
