"""A learner on the simulated clock: what it starts are events, and what it sends travels over the simulated network."""

import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import simpy
from torch import Tensor

from starling.checkpoint.state import LearnerState
from starling.engines.virtual.batches import MembershipBatches, VirtualBatches
from starling.engines.virtual.cluster import Cluster
from starling.engines.virtual.computation import Computation
from starling.engines.virtual.faults import VirtualFaults
from starling.engines.virtual.lives import VirtualLife
from starling.engines.virtual.network import Network, VirtualGradient, VirtualHandle, VirtualRounds, first_of
from starling.learner import EncodedMean, Handle, Shard
from starling.training.checks import changed_beneath, check_group, check_mean, check_peer, check_received, given_away
from starling.training.course import Course
from starling.training.faults import Fault, Kill, Pause
from starling.training.job import Job, Observer, Spent, Statistics
from starling.training.pace import Pace
from starling.training.replica import Replica, ReplicaLearner
from starling.training.shards import MakeOptimizer
from starling.training.tickets import SyncGroupTickets
from starling.workload import Position

T = TypeVar("T")
FOREGROUND, BACKGROUND = "", "'s background"
"""The two activities of a learner, as the deadlock report names them."""


@dataclass(frozen=True)
class Surroundings:
    """What the learners of one virtual membership share."""

    job: Job
    world: int
    cluster: Cluster
    environment: simpy.Environment
    computation: Computation
    faults: VirtualFaults
    batches: MembershipBatches
    network: Network
    rounds: VirtualRounds
    now: Callable[[], float]
    """Simulated seconds since the membership began."""
    record: Callable[[int, str, bytes], None]
    """Adds an event of a learner to the run's: name, kind, detail."""
    check: Callable[[], None]
    """Raises MembershipChanged once the membership is over."""
    consensus_distance: Callable[[], float | None]
    shared_memory: Callable[[int], tuple[Tensor, Tensor]]
    """Weights `[P]` and counts `[pieces, L]` that all learners share, for so many pieces."""
    start: Callable[["VirtualLearner", Coroutine[Any, Any, None], str], None]
    """Begins to drive a coroutine of a learner."""


class VirtualLearner(ReplicaLearner):
    """A learner that is a coroutine on the simulated clock, or two of them."""

    def __init__(
        self,
        surroundings: Surroundings,
        life: VirtualLife,
        rank: int,
        replica: Replica,
        observer: Observer,
        start: LearnerState | None,
    ) -> None:
        job, world = surroundings.job, surroundings.world
        self.life, self.replica = life, replica
        self.now = surroundings.now
        self.statistics = Statistics()
        self.statistics.under_way = self._spent_waiting
        self.wait: tuple[float, float] | None = None
        """The wait of the foreground that is under way: since when, and how many seconds of it are own computation."""
        self.activity = FOREGROUND
        self.is_finished = False
        self.has_left = False
        self.buffers = surroundings.computation.new_buffers(start)
        """The model's buffers, of which each learner has its own."""
        self._surroundings, self._rank = surroundings, rank
        self._environment, self._network = surroundings.environment, surroundings.network
        self._rounds, self._record = surroundings.rounds, partial(surroundings.record, life.name)
        self._sync_group = job.sync_groups(world).of(rank)
        self._num_means: dict[str, int] = {}  # a mean is identified by its place in each learner's sequence
        self._pace = Pace()
        self._next_round = 0
        self._round_waited_for: int | None = None
        self._kept_up: tuple[float, simpy.Event] | None = None
        self._pause = 0.0  # seconds that injected pauses add to the gradient under way
        tickets = SyncGroupTickets(
            job.workload,
            start.position if start else Position(),
            job.budget,
            job.sync_group_size(world),
            surroundings.batches.shares,
        )
        part = life.name % job.workload.num_parts
        self.batches = VirtualBatches(surroundings.batches, tickets, self._sync_group, rank, part)
        self.shard_of_island, self.cut_agreement = None, self._rounds
        life.state = start
        self.course = Course(job, self, life, tickets, observer)
        self.shards = self.course.shards

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world(self) -> int:
        return self._surroundings.world

    @property
    def seed(self) -> int:
        return self._surroundings.job.seed

    @property
    def step_metadata(self) -> Tensor:
        return self.course.step_metadata

    def learning_rate(self, piece: slice | None = None) -> float | Tensor:
        return self.course.learning_rate

    def claim(self) -> bool:
        self._surroundings.check()
        claimed, step = self.course.claim(), -1
        if claimed:
            first, tickets = self.course.claimed()[0][0], self.course.tickets
            step = first.step - tickets.places(self._rank - self._sync_group.start).start + tickets.portion_size
        self._record("claim", struct.pack("<q", step))
        return claimed

    def gradient(self, at: Tensor) -> Handle[Tensor]:
        begun = self._surroundings.computation.gradient(self, at)
        is_mine = at is self.weights  # what `at` is otherwise need not be kept
        version, times = self.replica.version, self.life.times
        seconds = sum(times.draw() for _ in self.course.begin_gradient())
        self.statistics.averaging.bytes_sent += times.communication_bytes
        seconds += self.life.delays.after(seconds) + self._pause
        self._pause = 0.0
        waiting = self._surroundings.faults.seconds_cut_off(self.life)  # a claim is answered once it is heard

        def finish(_: object) -> None:
            if self.life.is_dead or self.has_left:
                return
            loss = begun()
            self._record("gradient", struct.pack("<d", loss or 0.0))
            if loss is not None:
                self.course.report_step(loss)

        def result() -> Tensor:
            if is_mine and self.replica.version != version:
                raise changed_beneath(self._rank)
            return self.replica.gradients

        event = self._environment.timeout(seconds + waiting)
        event.callbacks.append(finish)
        computing = seconds - times.communication_seconds
        return VirtualGradient(event, result, lambda: "its own gradient", computing=computing)

    def clip(self, gradient: Tensor) -> Tensor | None:
        return self.course.clip(gradient)

    @property
    def staleness(self) -> int:
        return self.course.staleness

    def step(self, gradient: Tensor, read_at: int | None = None, scale: float = 1.0) -> None:
        self.course.step(gradient, read_at, scale)
        self._record("step", b"")
        self._pace.gradient_made()
        if self._round_waited_for is not None and self._pace.may_open and not self.is_finished:
            self._rounds.open(self._round_waited_for)
            self._pace.opened()

    def apply(self, delta: Tensor, piece: slice | None = None) -> None:
        self.replica.apply(delta, piece, in_round=self.activity == BACKGROUND)
        self._record("apply", b"")

    def snapshot(self, piece: slice | None = None) -> Tensor:
        return self.replica.snapshot(piece)

    def keep(self, piece: slice, make_optimizer: MakeOptimizer | None = None) -> Shard:
        return self.shards.keep(piece, make_optimizer)

    def share(self, pieces: Sequence[slice]) -> Handle[Sequence[Shard]]:
        for piece in pieces:
            self.shards.check(piece)
        shards = self.shards.share(pieces, *self._surroundings.shared_memory(len(pieces)))
        return VirtualHandle(self._environment.timeout(0.0), lambda: shards, lambda: "shared memory")

    def mean(self, of: Tensor | Handle[Tensor], group: Sequence[int] | None = None) -> Handle[Tensor]:
        chosen = self._sync_group
        check_group(self._rank, group, chosen, self._surroundings.world)
        if isinstance(of, Tensor):
            check_mean(self._rank, of, self.weights)
        else:
            self.course.is_averaged = True
        if isinstance(of, VirtualGradient) and not of.event.processed:
            of.given_away = partial(given_away, self._rank)
        number = self._num_means[self.activity] = self._num_means.get(self.activity, -1) + 1
        size = self.weights.nbytes if isinstance(of, Handle) else of.nbytes
        self.statistics.averaging.bytes_sent += 2 * (len(chosen) - 1) * size // len(chosen)
        return self._network.mean(self._rank, chosen, self.activity, number, of)

    def encoded_mean(self, part: EncodedMean) -> Handle[Tensor]:
        chosen = self._sync_group
        number = self._num_means[self.activity] = self._num_means.get(self.activity, -1) + 1
        self.statistics.averaging.bytes_sent += 2 * (len(chosen) - 1) * part.message_bytes
        return self._network.mean(self._rank, chosen, self.activity, number, part)

    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle[None]:
        check_peer(self._rank, peer, self._surroundings.world)
        self.statistics.averaging.bytes_sent += tensor.nbytes if peer != self._rank else 0
        return self._network.send(self._rank, peer, tensor, tag)

    def receive(self, peer: int, like: Tensor, tag: int) -> Handle[Tensor]:
        check_peer(self._rank, peer, self._surroundings.world)
        return self._network.receive(
            self._rank, peer, tag, lambda theirs: check_received(self._rank, peer, tag, theirs, like)
        )

    def first(self, handles: Mapping[int, Handle[Any]]) -> Handle[int]:
        return first_of(self._environment, handles)

    def exchange(self, peer: int, tensor: Tensor, tag: int) -> Handle[Tensor]:
        self.send(peer, tensor, tag)
        return self.receive(peer, tensor, tag)

    def background(self, activity: Coroutine[Any, Any, None]) -> None:
        self._surroundings.start(self, activity, BACKGROUND)

    def round(self, period: float) -> Handle[int | None]:
        number, self._next_round = self._next_round, self._next_round + 1
        if self.course.cuts is not None:
            self.course.cuts.completed(number)
        self._pace.completed()
        self._look_at_lag()
        self._pace.period = period
        if self._pace.may_open and not self.is_finished:
            self._rounds.open(number)
            self._pace.opened()
        else:
            self._round_waited_for = number

        def result() -> int | None:
            self._round_waited_for = None
            takes_place = self._rounds.enter(number)
            self._record("round", struct.pack("<q", number if takes_place else -1))
            if takes_place:
                if self.course.cuts is not None:
                    self.course.cuts.entered(number)
                self._pace.entered()
                self.statistics.averaging.rounds += 1
            else:
                self._pace.completed()
                self._look_at_lag()
            return number if takes_place else None

        return VirtualHandle(self._rounds.event(number), result, lambda: f"round {number} to open")

    def keep_up(self, most: float) -> Handle[None]:
        event = self._environment.event()
        if self._pace.lags(most):
            self._kept_up = most, event
        else:
            event.callbacks = None  # it has happened, and takes no place in the queue of events
        return VirtualHandle(event, lambda: None, lambda: "its own averaging round")

    def book(self) -> None:
        """The foreground's wait is over: book its seconds."""
        waited = self._spent_waiting()
        self.statistics.spent.computing += waited.computing
        self.statistics.spent.waiting_for_peers += waited.waiting_for_peers
        self.wait = None

    def _spent_waiting(self) -> Spent:
        """The seconds of the foreground's wait so far: first its own computation, then waiting for others."""
        if self.wait is None:
            return Spent()
        since, computing = self.wait
        waited = self.now() - since
        return Spent(computing=min(waited, computing), waiting_for_peers=max(0.0, waited - computing))

    def _look_at_lag(self) -> None:
        if self._kept_up is not None and not self._pace.lags(self._kept_up[0]):
            kept_up, self._kept_up = self._kept_up[1], None
            kept_up.succeed()

    def start_on_memory(self, num_bytes: int, passes: int, do: Callable[[], T]) -> Handle[T]:
        def result() -> T:
            self._record("shard", struct.pack("<q", passes))
            return do()

        seconds = self._surroundings.cluster.memory.seconds(num_bytes, passes)
        return VirtualHandle(self._environment.timeout(seconds), result, lambda: "its own memory", seconds)

    def named_buffers(self) -> dict[str, Tensor]:
        return self._surroundings.computation.named(self.buffers)

    def suffer(self, fault: Fault) -> None:
        if isinstance(fault, Kill):
            self._surroundings.faults.kill(self.life, "was killed on purpose")
        if isinstance(fault, Pause):
            self._pause += fault.seconds
            self._surroundings.faults.pause(self.life, fault.seconds)

    def consensus_distance(self) -> float | None:
        return self._surroundings.consensus_distance() if self._rank == 0 else None
