"""A learner on the simulated clock: what it starts are events, and what it says travels over the simulated network."""

import copy
import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import simpy
from torch import Tensor

from starling.checkpoint.state import LearnerState
from starling.engines.virtual.cluster import ComputeTimes
from starling.engines.virtual.network import VirtualGradient, VirtualHandle, first_of
from starling.learner import Handle, Shard
from starling.training.faults import Fault, FaultsOf, Kill, Pause
from starling.training.job import Named, Observer
from starling.training.learner import Tally, TrainingLearner
from starling.training.loading import Loaded
from starling.training.pace import Pace
from starling.training.replica import Replica
from starling.training.shards import HeldShard, check_piece
from starling.training.stragglers import Delays
from starling.training.succession import Past
from starling.workload import Ticket

if TYPE_CHECKING:
    from starling.engines.virtual.membership import VirtualMembership

T = TypeVar("T")
FOREGROUND, BACKGROUND = "", "'s background"
"""What a learner is doing, as the deadlock report says it."""


@dataclass
class Life:
    """What is a learner's own from view to view."""

    name: int
    times: ComputeTimes
    delays: Delays
    faults: FaultsOf
    state: LearnerState | None = None
    """With which it left its last view, or was resumed; None: it has none yet."""
    past: Past = field(default_factory=Past)
    tally: Tally | None = None
    still_until: float = 0.0
    """Simulated seconds until which it stands still."""
    death: str = ""
    """Why it is dead."""

    @property
    def is_dead(self) -> bool:
        return bool(self.death)


class VirtualLearner(TrainingLearner):
    """A learner that is a coroutine on the simulated clock, or two of them."""

    def __init__(
        self,
        view: "VirtualMembership",
        life: Life,
        rank: int,
        replica: Replica,
        observer: Observer,
        start: LearnerState | None,
    ) -> None:
        self.life = life
        super().__init__(view.job, rank, view.world, replica, Named(observer, life.name), start)
        self.delays, self.faults = life.delays, life.faults
        self.part = life.name % view.job.workload.num_parts
        self.buffers: list[Tensor | None] = copy.deepcopy(view.first_buffers)
        """The model's buffers, of which each learner has its own."""
        if start is not None:
            view.model.look_at_buffers(self.buffers)
            view.model.load_buffers(start.buffers)
        self.activity = FOREGROUND
        self.is_finished = False
        self.has_left = False
        self._view = view
        self._num_means: dict[str, int] = {}  # means have no name but their place in each learner's sequence
        self._pace = Pace()
        self._next_round = 0
        self._round_waited_for: int | None = None
        self._kept_up: tuple[float, simpy.Event] | None = None
        self._pause = 0.0  # seconds that the gradient under way takes longer, on purpose

    def now(self) -> float:
        return self._view.now()

    def past(self) -> Past:
        """What this learner brings to the next view."""
        return Past(self._view.view.number, self.num_done, self._minutes_before + self.now() / 60.0)

    def _agreed_seconds(self) -> float:
        return self._view.agreed_seconds(self.sync_group.start, self.num_claimed)

    def _next_batch(self) -> Loaded | None:
        number = self._view.draw(self.sync_group.start, self.num_claimed)
        if self.tickets.is_beyond(number):
            return None
        return self._view.take(replace(self.tickets.ticket(number, self.place_in_sync_group), part=self.part))

    def _note_done(self, ticket: Ticket) -> None:
        self._view.noted.add(ticket.step)

    def _buffers(self) -> dict[str, Tensor]:
        self._view.model.look_at_buffers(self.buffers)
        return dict(self._view.model.model.named_buffers())

    def _consensus_distance(self) -> float | None:
        return self._view.consensus_distance() if self._rank == 0 else None

    def claim(self) -> bool:
        self._view.check()
        claimed = super().claim()
        step = self._claimed()[0].step - self.place_in_sync_group + len(self.sync_group) if claimed else -1
        self._view.record(self._rank, "claim", struct.pack("<q", step))
        return claimed

    def start_on_shard(self, num_bytes: int, passes: int, do: Callable[[], T]) -> Handle[T]:
        def result() -> T:
            self._view.record(self._rank, "shard", struct.pack("<q", passes))
            return do()

        seconds = self._view.cluster.memory.seconds(num_bytes, passes)
        return VirtualHandle(self._view.environment.timeout(seconds), result, lambda: "its own memory", seconds)

    def share(self, pieces: Sequence[slice]) -> Handle[Sequence[Shard]]:
        for piece in pieces:
            check_piece(piece, self)
        memory, counts = self._view.shared(len(pieces))
        shards = [
            self.hold(HeldShard(self, piece, memory[piece], counts[number], self._rank))
            for number, piece in enumerate(pieces)
        ]
        return VirtualHandle(self._view.environment.timeout(0.0), lambda: shards, lambda: "shared memory")

    def first(self, handles: Mapping[int, Handle[Any]]) -> Handle[int]:
        return first_of(self._view.environment, handles)

    def _suffer(self, fault: Fault) -> None:
        if isinstance(fault, Kill):
            self._view.faults.kill(self.life, "was killed on purpose")
        if isinstance(fault, Pause):
            self._pause += fault.seconds
            self._view.faults.pause(self.life, fault.seconds)

    def _step(self, gradient: Tensor) -> None:
        super()._step(gradient)
        self._view.record(self._rank, "step")
        self._pace.gradient_made()
        if self._round_waited_for is not None and self._pace.may_open and not self.is_finished:
            self._view.rounds.open(self._round_waited_for)
            self._pace.opened()

    def apply(self, delta: Tensor, piece: slice | None = None) -> None:
        super().apply(delta, piece)
        self._view.record(self._rank, "apply")

    def gradient(self, at: Tensor) -> Handle[Tensor]:
        loss = self._view.real_gradient(self, at)
        is_mine = at is self.weights  # what `at` is otherwise need not be kept
        version = self._gradient_version = self.replica.version
        seconds = self.life.times.draw()
        seconds += self.delays.after(seconds) + self._pause
        self._pause = 0.0
        waiting = self._view.faults.seconds_cut_off(self.life)  # what it claimed comes when it is heard again

        def finish(_: object) -> None:
            if self.life.is_dead or self.has_left:
                return
            self._view.record(self._rank, "gradient", struct.pack("<d", loss))
            self.report_step(loss)

        def result() -> Tensor:
            if is_mine and self.replica.version != version:
                raise self.changed_beneath()
            return self.replica.gradients

        event = self._view.environment.timeout(seconds + waiting)
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
        return self._view.network.mean(self._rank, chosen, self.activity, number, of)

    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle[None]:
        self.check_peer(peer)
        self.averaging.bytes_sent += tensor.nbytes if peer != self._rank else 0
        return self._view.network.send(self._rank, peer, tensor, tag)

    def receive(self, peer: int, like: Tensor, tag: int) -> Handle[Tensor]:
        self.check_peer(peer)
        return self._view.network.receive(
            self._rank, peer, tag, lambda theirs: self.check_received(peer, tag, theirs, like)
        )

    def exchange(self, peer: int, tensor: Tensor, tag: int) -> Handle[Tensor]:
        self.send(peer, tensor, tag)
        return self.receive(peer, tensor, tag)

    def background(self, activity: Coroutine[Any, Any, None]) -> None:
        self._view.start(self, activity, BACKGROUND)

    def round(self, period: float) -> Handle[int | None]:
        number, self._next_round = self._next_round, self._next_round + 1
        self._pace.completed()
        self._look_at_lag()
        self._pace.period = period
        if self._pace.may_open and not self.is_finished:
            self._view.rounds.open(number)
            self._pace.opened()
        else:
            self._round_waited_for = number

        def result() -> int | None:
            self._round_waited_for = None
            takes_place = self._view.rounds.enter(number)
            self._view.record(self._rank, "round", struct.pack("<q", number if takes_place else -1))
            if takes_place:
                self._pace.entered()
                self.averaging.rounds += 1
            else:
                self._pace.completed()
                self._look_at_lag()
            return number if takes_place else None

        return VirtualHandle(self._view.rounds.event(number), result, lambda: f"round {number} to open")

    def keep_up(self, most: float) -> Handle[None]:
        event = self._view.environment.event()
        if self._pace.lags(most):
            self._kept_up = most, event
        else:
            event.callbacks = None  # it has happened, and takes no place in the queue of events
        return VirtualHandle(event, lambda: None, lambda: "its own averaging round")

    def _look_at_lag(self) -> None:
        if self._kept_up is not None and not self._pace.lags(self._kept_up[0]):
            kept_up, self._kept_up = self._kept_up[1], None
            kept_up.succeed()

    def book(self, waited: float, computing: float) -> None:
        """Book the seconds spent waiting for a handle, of which at most `computing` were this learner's own work."""
        self.spent.computing += min(waited, computing)
        self.spent.waiting_for_peers += max(0.0, waited - computing)
