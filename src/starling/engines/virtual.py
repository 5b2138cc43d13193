"""The virtual engine: all learners in one process, on a simulated clock, with real gradients.

The same seed gives the same events in the same order, and `Outcome.event_hash` proves it. When nothing is left to
happen while a learner waits, that is a deadlock, and the error says who waits for whom.
"""

import hashlib
import struct
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

import simpy
import torch
from torch import Tensor, nn

from starling.checkpoint.state import LearnerState
from starling.consensus import consensus, consensus_distance
from starling.engines.cluster import Cluster, ComputeTimes
from starling.engines.faults import Fault, Pause
from starling.engines.flat import FlatModel, split
from starling.engines.job import Job, Observer, Silence
from starling.engines.loading import Loaded, Loader
from starling.engines.network import Network, VirtualGradient, VirtualHandle, VirtualRounds, first_of
from starling.engines.replica import Replica
from starling.engines.rounds import Pace
from starling.engines.shards import HeldShard, check_piece, host_copy
from starling.engines.tickets import TeamTickets
from starling.engines.training import TrainingLearner
from starling.errors import ConfigError, Deadlock, ProtocolError
from starling.learner import Handle, Shard
from starling.workload import Standing, Ticket

T = TypeVar("T")
FOREGROUND, BACKGROUND = "", "'s background"
"""What a learner is doing, as the deadlock report says it."""


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


class _Failed(Exception):  # noqa: N818 - carries what a strategy raised
    """Brings a strategy's exception, as it is, through simpy, which would make a new one of its first arguments."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class VirtualLearner(TrainingLearner):
    """A learner that is a coroutine on the simulated clock, or two of them."""

    def __init__(
        self,
        engine: "VirtualEngine",
        rank: int,
        replica: Replica,
        observer: Observer,
        start: LearnerState | None,
    ) -> None:
        super().__init__(engine.job, rank, engine.world, replica, observer, start)
        self.activity = FOREGROUND
        self.is_finished = False
        self._engine = engine
        self._times = ComputeTimes(engine.cluster.compute, engine.job.seed, rank)
        self._gradient = torch.empty_like(replica.weights)
        self._num_means: dict[str, int] = {}  # means have no name but their place in each learner's sequence
        self._pace = Pace()
        self._next_round = 0
        self._round_waited_for: int | None = None
        self._pause = 0.0  # seconds that the gradient under way takes longer, on purpose

    def now(self) -> float:
        return float(self._engine.environment.now)

    def _agreed_seconds(self) -> float:
        return self._engine.agreed_seconds.setdefault((self.team.start, self.num_claimed), self.now())

    def _next_batch(self) -> Loaded | None:
        number = self._engine.draw(self.team.start, self.num_claimed)
        if self.tickets.is_beyond(number):
            return None
        return self._engine.take(replace(self.tickets.ticket(number, self.place_in_team), part=self.part))

    def _buffers(self) -> dict[str, Tensor]:
        return dict(self._engine.model.model.named_buffers())

    def _consensus_distance(self) -> float | None:
        return self._engine.consensus_distance() if self._rank == 0 else None

    def claim(self) -> bool:
        claimed = super().claim()
        step = self._claimed()[0].step - self.place_in_team + len(self.team) if claimed else -1
        self._engine.record(self._rank, "claim", struct.pack("<q", step))
        return claimed

    def start_on_shard(self, num_bytes: int, passes: int, do: Callable[[], T]) -> Handle[T]:
        def result() -> T:
            self._engine.record(self._rank, "shard", struct.pack("<q", passes))
            return do()

        seconds = self._engine.cluster.memory.seconds(num_bytes, passes)
        return VirtualHandle(self._engine.environment.timeout(seconds), result, lambda: "its own memory", seconds)

    def share(self, pieces: Sequence[slice]) -> Handle[Sequence[Shard]]:
        for piece in pieces:
            check_piece(piece, self)
        memory, counts = self._engine.shared(len(pieces))
        shards = [
            self.hold(HeldShard(self, piece, memory[piece], counts[number], self._rank))
            for number, piece in enumerate(pieces)
        ]
        return VirtualHandle(self._engine.environment.timeout(0.0), lambda: shards, lambda: "shared memory")

    def first(self, handles: Mapping[int, Handle[Any]]) -> Handle[int]:
        return first_of(self._engine.environment, handles)

    def _suffer(self, fault: Fault) -> None:
        if not isinstance(fault, Pause):
            raise ConfigError(f"faults: learners cannot be killed on the simulated clock yet; leave out {fault}")
        self._pause += fault.seconds

    def _step(self, gradient: Tensor) -> None:
        super()._step(gradient)
        self._engine.record(self._rank, "step")
        self._pace.gradient_made()
        if self._round_waited_for is not None and self._pace.may_open and not self.is_finished:
            self._engine.rounds.open(self._round_waited_for)

    def apply(self, delta: Tensor, piece: slice | None = None) -> None:
        super().apply(delta, piece)
        self._engine.record(self._rank, "apply")

    def gradient(self, at: Tensor) -> Handle[Tensor]:
        loss = self._engine.real_gradient(self, at, out=self._gradient)
        version = self._gradient_version = self.replica.version
        seconds = self._times.draw()
        seconds += self.delays.after(seconds) + self._pause
        self._pause = 0.0

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

    def mean(self, of: Tensor | Handle[Tensor], group: Sequence[int] | None = None) -> Handle[Tensor]:
        chosen = self.check_group(group)
        if isinstance(of, Tensor):
            self.check_mean(of)
        if isinstance(of, VirtualGradient) and not of.event.processed:
            of.given_away = self.given_away
        number = self._num_means[self.activity] = self._num_means.get(self.activity, -1) + 1
        size = self.weights.nbytes if isinstance(of, Handle) else of.nbytes
        self.averaging.bytes_sent += 2 * (len(chosen) - 1) * size // len(chosen)
        return self._engine.network.mean(self._rank, chosen, self.activity, number, of)

    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle[None]:
        self.check_peer(peer)
        self.averaging.bytes_sent += tensor.nbytes if peer != self._rank else 0
        return self._engine.network.send(self._rank, peer, tensor, tag)

    def receive(self, peer: int, like: Tensor, tag: int) -> Handle[Tensor]:
        self.check_peer(peer)
        return self._engine.network.receive(
            self._rank, peer, tag, lambda theirs: self.check_received(peer, tag, theirs, like)
        )

    def exchange(self, peer: int, tensor: Tensor, tag: int) -> Handle[Tensor]:
        self.send(peer, tensor, tag)
        return self.receive(peer, tensor, tag)

    def background(self, activity: Coroutine[Any, Any, None]) -> None:
        self._engine.start(self, activity, BACKGROUND)

    def round(self, period: float) -> Handle[int | None]:
        number, self._next_round = self._next_round, self._next_round + 1
        self._pace.period = period
        if self._pace.may_open and not self.is_finished:
            self._engine.rounds.open(number)
        else:
            self._round_waited_for = number

        def result() -> int | None:
            self._round_waited_for = None
            self._pace.entered()
            takes_place = self._engine.rounds.enter(number)
            self._engine.record(self._rank, "round", struct.pack("<q", number if takes_place else -1))
            if takes_place:
                self.averaging.rounds += 1
            return number if takes_place else None

        return VirtualHandle(self._engine.rounds.event(number), result, lambda: f"round {number} to open")

    def book(self, waited: float, computing: float) -> None:
        """Book the seconds spent waiting for a handle, of which at most `computing` were this learner's own work."""
        self.spent.computing += min(waited, computing)
        self.spent.waiting_for_peers += max(0.0, waited - computing)


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
        self.network = Network(self.environment, self.cluster, self.record)
        self.rounds = VirtualRounds(self.environment, world)
        self.model = FlatModel(job.workload.make_model(), device)
        self.agreed_seconds: dict[tuple[int, int], float] = {}
        self._hash = hashlib.sha256()
        self._num_events = 0
        self._waiting: dict[tuple[int, str], VirtualHandle[Any]] = {}
        self._draws: dict[tuple[int, int], int] = {}
        self._shared: tuple[Tensor, Tensor] | None = None
        team_size = job.team_size(world)
        self._tickets = TeamTickets(job.workload, start[0].standing if start else Standing(), job.budget, team_size)
        in_order = self._tickets.take(count(), members=range(team_size))
        self._loader = Loader(job.workload, job.num_workers)
        self._batches = self._loader.load(in_order)
        self._loaded: dict[int, Loaded] = {}
        self._learners = [
            VirtualLearner(self, rank, self._new_replica(), observer or Silence(), start[rank] if start else None)
            for rank in range(world)
        ]

    def run(self) -> Outcome:
        """Let everything happen. Raises what a learner raised, and `Deadlock`."""
        for learner in self._learners:
            self.start(learner, self.job.strategy.start(learner, self.job.options), FOREGROUND)
        try:
            self.environment.run()
        except _Failed as failed:
            raise failed.error from None
        finally:
            self._loader.close()
        if self._waiting:
            raise Deadlock(
                f"deadlock after {self.environment.now:.6g} simulated seconds: nothing is left to happen, but "
                + "; ".join(
                    f"learner {rank}{activity} waits for {handle.waits_for()}"
                    for (rank, activity), handle in sorted(self._waiting.items())
                )
            )
        num_portions = self._tickets.handed_out(len(self._draws))
        states = [learner.finish(num_portions) for learner in self._learners]
        return Outcome(states, float(self.environment.now), self._num_events, self._hash.hexdigest())

    def start(self, learner: VirtualLearner, coroutine: Coroutine[Any, Any, None], activity: str) -> None:
        """Begin to drive one of a learner's coroutines."""
        self.environment.process(self._drive(learner, coroutine, activity))

    def record(self, rank: int, kind: str, detail: bytes = b"") -> None:
        """Add an event to the hash."""
        self._num_events += 1
        self._hash.update(struct.pack("<dq", self.environment.now, rank) + kind.encode() + b"\0" + detail)

    def draw(self, team: int, claim: int) -> int:
        """The number of the tickets that a team gets at its claim of this number: the next that nobody has."""
        return self._draws.setdefault((team, claim), len(self._draws))

    def take(self, ticket: Ticket) -> Loaded:
        """A ticket with its mini-batch. Those of undivided data are loaded in order and kept until taken."""
        if self.job.workload.num_parts > 1:
            return ticket, self.job.workload.load(ticket)
        while ticket.step not in self._loaded:
            loaded = next(self._batches)
            self._loaded[loaded[0].step] = loaded
        return self._loaded.pop(ticket.step)

    def real_gradient(self, learner: VirtualLearner, at: Tensor, out: Tensor) -> float:
        """Put the gradient of the learner's mini-batch at the weights `at` `[P]` into `out` `[P]`; the loss."""
        self.model.weights.copy_(at)
        loss = learner.compute_gradient(self.model.model, self.model)
        out.copy_(self.model.gradients)
        return loss

    def consensus_distance(self) -> float:
        """(1/L) sum_l |w_l - consensus|^2, now."""
        weights = [learner.weights for learner in self._learners]
        if not any(learner.shards for learner in self._learners):
            return consensus_distance(weights, consensus(weights, []))
        model = torch.cat([shard.weights for shard in self._shards()])
        return consensus_distance((learner.weights for learner in self._learners if learner.is_worker), model)

    def _shards(self) -> list[HeldShard]:
        """The pieces of the model, each once, in their order."""
        found = {shard.piece.start: shard for learner in self._learners for shard in learner.shards}
        return [found[start] for start in sorted(found)]

    def shared(self, num_pieces: int) -> tuple[Tensor, Tensor]:
        """The memory that all learners share, `[P]`, and for each piece the steps of each learner on it."""
        if self._shared is None:
            counts = torch.zeros(num_pieces, self.world, dtype=torch.int64)
            self._shared = host_copy(self._learners[0].weights), counts
        return self._shared

    def _new_replica(self) -> Replica:
        weights = self.model.weights.clone()
        parameters = [nn.Parameter(view) for view in split(weights, self.model.parameters)]
        for parameter, gradient in zip(parameters, split(self.model.gradients, self.model.parameters), strict=True):
            parameter.grad = gradient
        return Replica(weights, self.model.gradients, parameters, self.job.make_optimizer, self.job.clip_norm)

    def _drive(
        self, learner: VirtualLearner, coroutine: Coroutine[Any, Any, None], activity: str
    ) -> Generator[simpy.Event, None, None]:
        """Run a coroutine; whenever it waits for a handle, wait for the handle's event."""
        try:
            while True:
                learner.activity = activity
                handle = coroutine.send(None)
                if not isinstance(handle, VirtualHandle):
                    raise ProtocolError(
                        f"learner {learner.rank} awaited {handle!r}; a strategy awaits only what its learner started"
                    )
                begin = learner.now()
                self._waiting[learner.rank, activity] = handle
                if not handle.event.processed:
                    yield handle.event
                del self._waiting[learner.rank, activity]
                if activity == FOREGROUND:
                    learner.book(learner.now() - begin, handle.computing)
        except StopIteration:
            self.record(learner.rank, "end")
            if activity == FOREGROUND:
                learner.is_finished = True
                self.rounds.finish()
        except Exception as error:
            raise _Failed(error) from error
