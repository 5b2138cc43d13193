"""A learner on the simulated clock. The work that it starts becomes events, and its messages are sent over the
simulated network."""

import struct
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import simpy
from torch import Tensor

from starling.checkpoint.state import LearnerState
from starling.engines.virtual.computation import Member
from starling.engines.virtual.membership import Activity, Killed, MembershipBatches, VirtualBatches, VirtualMembership
from starling.engines.virtual.network import VirtualGradient, VirtualHandle, first_of
from starling.engines.virtual.simulation import VirtualLife
from starling.errors import ProtocolError
from starling.learner import EncodedMean, Handle, Shard
from starling.training.faults import Fault, Pause
from starling.training.job import Observer, Spent
from starling.training.membership import MembershipChanged
from starling.training.pace import Rounds
from starling.training.replica import changed_beneath, given_away
from starling.training.succession import CutAgreement

T = TypeVar("T")
FOREGROUND, BACKGROUND = "", "'s background"
"""The names of a learner's two activities in the deadlock report."""


class Failed(Exception):  # noqa: N818 - carries what a strategy raised
    """Carries a strategy's exception unchanged through simpy, which would otherwise create a new exception from its
    arguments."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class VirtualLearner(Member):
    """A learner of a membership that consists of one or two coroutines on the simulated clock."""

    life: VirtualLife

    def __init__(
        self, membership: VirtualMembership, rank: int, observer: Observer, start: LearnerState | None
    ) -> None:
        simulation, computation, life = membership.simulation, membership.computation, membership.lives[rank]
        job = simulation.job
        self.rank, self.world, self.seed = rank, membership.world, job.seed
        self.replica, self.now = computation.new_replica(), membership.now
        self.buffers = computation.new_buffers(start)
        """Buffers of this learner's model. Each learner has its own buffers."""
        self.statistics = life.statistics
        self.statistics.under_way = self._spent_waiting
        self._membership, self._simulation, self._environment = membership, simulation, simulation.environment
        self._network, self.rounds = membership.network, Rounds(membership.rounds)
        self._record = partial(simulation.record, life.name)
        self._activity = FOREGROUND
        self._has_left = False
        self._wait: tuple[float, float] | None = None
        """The foreground's wait that is under way: its start time, and the number of its seconds that are the learner's
        own computation."""
        self._num_means: dict[str, int] = {}  # a mean is identified by its position in each learner's sequence
        self._pause = 0.0  # seconds that injected pauses add to the gradient under way
        self._gradient_ends = 0.0
        """Time on the simulated clock at which the newest gradient is complete."""
        self.life = life
        self.batches = self._batches_of(membership.batches)
        self.cut_agreement, life.state = self._cuts_of(membership), start
        super().__init__(job, rank, self.world, life, membership.batches.tickets, observer)

    @property
    def is_behind(self) -> bool:
        return self._activity == BACKGROUND

    def claim(self) -> bool:
        self._membership.check()
        claimed, step = super().claim(), -1
        if claimed:
            first, tickets = self.claimed()[0][0], self.tickets
            step = first.step - tickets.places[self.rank - self.claimers.start].start + tickets.portion_size
            step //= tickets.ranks_per_learner
        self._record("claim", struct.pack("<q", step))
        return claimed

    def gradient(self, at: Tensor) -> Handle[Tensor]:
        begun = self._membership.computation.gradient(self, at)
        is_mine = at is self.weights  # any other `at` need not be kept
        version, times = self.replica.version, self.life.times
        num_draws = len(self.begin_gradient()) // self.tickets.ranks_per_learner
        seconds = sum(times.draw() for _ in range(num_draws))
        self.statistics.averaging.bytes_sent += times.communication_bytes
        seconds += self.life.delays.after(seconds)
        paused, self._pause = self._pause, 0.0
        waiting = self._simulation.seconds_cut_off(self.life)  # a claim is answered once the store receives it

        def finish(_: object) -> None:
            if self.life.is_dead or self._has_left:
                return
            self.statistics.spent.computing -= paused  # the wait for this gradient counts as computing
            self.statistics.spent.stopped += paused
            loss = begun()
            self._record("gradient", struct.pack("<d", loss or 0.0))
            if loss is not None:
                self.report_step(loss)

        def result() -> Tensor:
            if is_mine and self.replica.version != version:
                raise changed_beneath(self.rank)
            return self.replica.gradients

        event = self._environment.timeout(seconds + paused + waiting)
        self._gradient_ends = self._environment.now + seconds + paused + waiting
        event.callbacks.append(finish)
        computing = seconds + paused - times.communication_seconds
        return VirtualGradient(event, result, lambda: "its own gradient", computing=computing)

    def step(self, gradient: Tensor, read_at: int | None = None, scale: float = 1.0) -> None:
        super().step(gradient, read_at, scale)
        self._record("step", b"")
        self.rounds.gradient_made()

    def apply(self, delta: Tensor, piece: slice | None = None) -> None:
        super().apply(delta, piece)
        self._record("apply", b"")

    def share(self, pieces: Sequence[slice]) -> Handle[Sequence[Shard]]:
        shards = self.own_shards.share(pieces, *self._membership.shared_memory(len(pieces)))
        return VirtualHandle(self._environment.timeout(0.0), lambda: shards, lambda: "shared memory")

    def mean(self, of: Tensor | Handle[Tensor] | EncodedMean, group: Sequence[int] | None = None) -> Handle[Tensor]:
        self.begin_mean(of, group, self.claimers)
        self.order.flush()
        if isinstance(of, EncodedMean):
            return self._started(self._join_mean(of, 2 * (len(self.claimers) - 1) * of.message_bytes))
        self.is_averaged = self.is_averaged or isinstance(of, Handle)
        if isinstance(of, VirtualGradient) and not of.event.processed:
            of.is_own, of.refusal = False, given_away(self.rank)
        size, num_bytes = len(self.claimers), self.weights.nbytes if isinstance(of, Handle) else of.nbytes
        return self._started(self._join_mean(of, 2 * (size - 1) * num_bytes // size))

    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle[None]:
        self.check_peer(peer)
        self.order.flush()
        self.count_sent(tensor)
        self.statistics.averaging.bytes_sent += tensor.nbytes if peer != self.rank else 0
        return self._started(self._network.send(self.rank, peer, tensor, tag))

    def _started(self, handle: T) -> T:
        """Record that the activity has started some work. In a replay, the activity waits in this method if it got no
        further in the record: a process may fail after it has sent a message and before it can note this."""
        self.order.started(self.is_behind)
        return handle

    def receive(self, peer: int, like: Tensor, tag: int) -> Handle[Tensor]:
        self.check_peer(peer)

        def check(theirs: Tensor) -> None:
            if theirs.shape != like.shape or theirs.dtype != like.dtype:
                raise ProtocolError(
                    f"learner {self.rank} and learner {peer} exchange different tensors under tag {tag}: "
                    f"{like.dtype} {list(like.shape)} and {theirs.dtype} {list(theirs.shape)}"
                )

        return self._started(self._network.receive(self.rank, peer, tag, check))

    def first(self, handles: Mapping[int, Handle[Any]]) -> Handle[int]:
        return first_of(self._environment, handles, self.order.chose)

    def exchange(self, peer: int, tensor: Tensor, tag: int) -> Awaitable[Tensor]:
        self.send(peer, tensor, tag)
        return self.receive(peer, tensor, tag)

    def start(self, activity: Coroutine[Any, Any, None]) -> None:
        self.order.share()
        self._drive(activity, BACKGROUND)

    def round(self, period: float) -> Handle[int | None]:
        (number, _), board = self.rounds.begin(period), self._membership.rounds

        def result() -> int | None:
            takes_place = board.enter(number)
            self.order.entered(takes_place)
            self._record("round", struct.pack("<q", number if takes_place else -1))
            self.statistics.averaging.rounds += takes_place
            return self.rounds.enter(number, takes_place)

        return VirtualHandle(board.event(number), result, lambda: f"round {number} to open")

    def keep_up(self, most: float) -> Handle[None]:
        event = self._environment.event()
        if self.rounds.keeps_up(most, event.succeed):
            event.callbacks = None  # the event has happened, and need not enter the queue of events
        return VirtualHandle(event, lambda: None, lambda: "its own averaging round")

    def begin(self) -> None:
        """Start the strategy."""
        self._drive(self.job.strategy.start(self, self.job.options), FOREGROUND)

    def _drive(self, coroutine: Coroutine[Any, Any, None], kind: str) -> None:
        """Begin to run a coroutine as an activity."""
        activity = self._membership.activities[self.rank, kind] = Activity(self.rank)
        activity.process = self._environment.process(self._drive_to_end(activity, coroutine, kind))

    def _drive_to_end(
        self, activity: Activity, coroutine: Coroutine[Any, Any, None], kind: str
    ) -> Generator[simpy.Event, None, None]:
        """Run a coroutine to its end, or until this learner leaves its membership or dies."""
        membership, life, has_ended = self._membership, self.life, False
        try:
            if not (life.is_dead or membership.reasons):
                has_ended = yield from self._advance(activity, coroutine, kind)
        except (MembershipChanged, Killed, simpy.Interrupt):
            pass
        except Exception as error:
            raise Failed(error) from error
        if has_ended:
            self._record("end", b"")
        if kind == FOREGROUND:  # the foreground may continue after the background has left
            self._has_left |= not has_ended
            if has_ended:
                self.rounds.finish()
        while membership.reasons and not life.is_dead and (seconds := self._seconds_until_leaving()) > 0.0:
            try:
                yield self._environment.timeout(seconds)
            except simpy.Interrupt:
                continue
        self._close(activity, coroutine)
        del membership.activities[self.rank, kind]
        membership.look_whether_over()

    def _seconds_until_leaving(self) -> float:
        """Return the seconds that this learner still takes to leave a membership that is over. If it is paused or cut
        off, it is not notified immediately. It completes a gradient that is under way, even if no mean needs it."""
        under_way = self._gradient_ends - float(self._environment.now)
        return max(self._simulation.seconds_cut_off(self.life), self.life.still_until - self._simulation.now, under_way)

    def _advance(
        self, activity: Activity, coroutine: Coroutine[Any, Any, None], kind: str
    ) -> Generator[simpy.Event, None, bool]:
        """Run the coroutine, and wait for the event of each handle that it awaits. Return True at the end of the
        coroutine, and False if this learner dies or must leave earlier."""
        membership, life = self._membership, self.life
        while True:
            membership.driven, self._activity = life, kind
            try:
                handle = self._resume(activity, coroutine)
            except StopIteration:
                return True
            finally:
                membership.driven = None
            if not isinstance(handle, VirtualHandle):
                raise ProtocolError(
                    f"learner {self.rank} awaited {handle!r}; a strategy awaits only what its learner started"
                )
            activity.waits_for = handle
            if membership.reasons and not handle.is_own:
                return False
            if kind == FOREGROUND:
                self._wait = self.now(), handle.computing
            if not handle.event.processed:
                yield handle.event
            while not life.is_dead and life.still_until > self._environment.now:
                yield self._environment.timeout(life.still_until - self._environment.now)
            if life.is_dead:
                return False
            activity.waits_for = None
            self._awaited(kind)
            if kind == FOREGROUND:
                self.statistics.spent, self._wait = self.statistics.spent_now(), None

    def _awaited(self, kind: str) -> None:
        """Record that an activity has awaited a handle."""
        self.order.started(kind == BACKGROUND)

    def _resume(self, activity: Activity, coroutine: Coroutine[Any, Any, None]) -> Any:
        """Run a coroutine until it awaits a handle, and return the handle."""
        return coroutine.send(None)

    def _close(self, activity: Activity, coroutine: Coroutine[Any, Any, None]) -> None:
        coroutine.close()

    def _batches_of(self, shared: MembershipBatches) -> VirtualBatches:
        group = self._simulation.job.sync_groups(self.world).of(self.rank)
        return VirtualBatches(shared, group, self.rank, self.life.name)

    def _cuts_of(self, membership: VirtualMembership) -> CutAgreement:
        return membership.rounds

    def _spent_waiting(self) -> Spent:
        """Return the seconds of the foreground's wait so far. They count first as its own computation, and then as
        waiting for other learners."""
        if self._wait is None:
            return Spent()
        since, computing = self._wait
        waited = self.now() - since
        return Spent(computing=min(waited, computing), waiting_for_peers=max(0.0, waited - computing))

    def _join_mean(self, of: Tensor | Handle[Tensor] | EncodedMean, num_bytes: int) -> Handle[Tensor]:
        number = self._num_means[self._activity] = self._num_means.get(self._activity, -1) + 1
        self.statistics.averaging.bytes_sent += num_bytes
        return self._network.mean(self.rank, self.claimers, self._activity, number, of)

    def start_on_memory(self, num_bytes: int, passes: int, do: Callable[[], T]) -> Handle[T]:
        def result() -> T:
            self._record("shard", struct.pack("<q", passes))
            return do()

        seconds = self._simulation.cluster.memory.seconds(num_bytes, passes)
        return VirtualHandle(self._environment.timeout(seconds), result, lambda: "its own memory", seconds)

    def named_buffers(self) -> dict[str, Tensor]:
        return self._membership.computation.named(self.buffers)

    def suffer(self, fault: Fault) -> None:
        if isinstance(fault, Pause):
            self._pause += fault.seconds
        self._simulation.inject(fault)

    def consensus_distance(self) -> float | None:
        return self._membership.consensus_distance() if self.rank == 0 else None
