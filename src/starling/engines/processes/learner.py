"""The engine `processes`: each learner is a process, on `torch.distributed`.

On the CPU learners communicate by shared memory on one machine and by gloo between machines. On CUDA, means use NCCL if
each learner has its own device; everything else uses gloo through host memory.
"""

import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from starling.checkpoint.state import LearnerState, name_of_state
from starling.engines.processes.backend import ReducingModel
from starling.engines.processes.batches import ProcessBatches
from starling.engines.processes.checkpoint_barrier import CheckpointBarrier, SaveRequests
from starling.engines.processes.communicator import (
    MEAN_OF_GRADIENT,
    Communicator,
    GradientHandle,
    ProcessHandle,
    stopwatch,
)
from starling.engines.processes.done_notes import DoneNotes
from starling.engines.processes.handshake import do_nothing, silent_learners
from starling.engines.processes.island import GATHERING, IslandGroup, IslandModel
from starling.engines.processes.place import Place
from starling.engines.processes.stalls import Waits
from starling.errors import ConfigError, ProtocolError
from starling.learner import EncodedMean, Handle, Learner, Shard
from starling.training.checks import changed_beneath, check_elementwise
from starling.training.course import Course
from starling.training.faults import Fault, Pause, kill_this_process, stop_this_process
from starling.training.flat import Model
from starling.training.job import Job, Observer, Statistics
from starling.training.loading import Loader
from starling.training.membership import Membership, MembershipChanged, MembershipFeed
from starling.training.replica import Replica
from starling.training.shards import MakeOptimizer
from starling.training.stragglers import Stragglers
from starling.training.succession import Life
from starling.training.tickets import SyncGroupTickets
from starling.workload import Position

CAUSE_SECONDS = 5.0
"""How long a learner that lost a connection waits for the launcher to announce which learner was lost."""


class ProcessLearner(Learner):
    """The learner that runs in this process, in one membership.

    While it connects to the others, `look_around` is called repeatedly and may raise.
    """

    def __init__(
        self,
        job: Job,
        place: Place,
        flat: Model,
        observer: Observer,
        start: LearnerState | None,
        life: Life,
        timeout_seconds: float,
        loader: Loader,
        feed: MembershipFeed,
        membership: Membership,
        shares: Sequence[int],
        waits: Waits,
        save_requests: SaveRequests | None = None,
        look_around: Callable[[], None] = do_nothing,
        island: IslandGroup | None = None,
    ) -> None:
        self._island, self._row = island, place.row(job.island.size)
        self.replica = self._make_replica(job, flat)
        if start is not None:
            flat.load_buffers(start.buffers)
        self._job, self._place, self._flat, self._life, self._waits = job, place, flat, life, waits
        self._elsewhere: Model | None = None  # a copy of the model, for gradients at a snapshot
        self._reducing: dict[bool, ReducingModel] = {}  # by whether it wraps `_elsewhere`
        self._feed, self._membership = feed, membership
        self._timeout_seconds = timeout_seconds
        self._statistics, self._now = Statistics(), stopwatch()
        self._sync_groups = job.sync_groups(place.world)
        self._sync_group = self._sync_groups.of(place.rank)
        if island is not None:
            island.statistics = self._statistics
        self.communicator = self._connect(look_around)
        self._barrier = CheckpointBarrier(
            place.store, place.rank, place.world, save_requests, self._add_barrier, timeout_seconds, waits
        )
        position, size = start.position if start else Position(), job.sync_group_size(place.world)
        per_batch = job.island.learners_per_batch
        tickets = SyncGroupTickets(job.workload, position, job.budget, size, shares, per_batch)
        self._batches = self._make_batches(tickets, loader)
        self.course = Course(
            job,
            place.rank,
            place.world,
            life,
            tickets,
            self.replica,
            observer,
            self._statistics,
            start,
            batches=self._batches,
            clock=self._now,
            start_on_memory=self.communicator.start_on_memory,
            buffers=lambda: dict(flat.model.named_buffers()),
            suffer=_suffer,
            shard_of_island=flat.shard_of_island(self.replica.optimizer) if isinstance(flat, IslandModel) else None,
            cut_agreement=self.communicator,
        )
        self.communicator.rounds.cuts = self.course.cuts

    def _make_replica(self, job: Job, flat: Model) -> Replica:
        weights, gradients, parameters, island = flat.weights, flat.gradients, flat.parameters, self._island
        if island is None:
            return Replica(weights, gradients, parameters, job.make_optimizer, job.clip_norm)
        replica = Replica(
            weights, gradients, parameters, job.make_optimizer, job.clip_norm, sum_over_island=self._sum_over_island
        )
        check_elementwise(replica.optimizer)
        return replica

    def _connect(self, look_around: Callable[[], None]) -> Communicator:
        place, weights = self._place, self.replica.weights

        def name_lost(suspect: int | None) -> str:
            process = None if suspect is None else self._row.process(suspect)
            return silent_learners(place.store, place.rank, place.world, process)

        return Communicator(
            self._row,
            self._job.sync_groups_of_row(place.world),
            weights,
            self._place.has_own_device(weights.device),
            self._timeout_seconds,
            self._statistics,
            self._waits,
            self._now,
            self._where,
            explain=self._look_for_change,
            name_lost=name_lost,
            look_around=look_around,
        )

    def _make_batches(self, tickets: SyncGroupTickets, loader: Loader) -> ProcessBatches:
        # if all learners have the same model, the number of their mini-batches determines which tickets are done
        is_noting = self._feed.is_watched and not self._job.strategy.has_one_model
        store, rank, shared_by = self._place.store, self._place.rank, self._job.island.learners_per_batch
        name = self._life.name if shared_by == 1 else rank // shared_by
        return ProcessBatches(
            self._job,
            self._place,
            tickets,
            name % self._job.workload.num_parts,
            loader,
            self.communicator,
            self._barrier,
            DoneNotes(store, rank, self._sync_groups.num_workers) if is_noting else None,
            self._timeout_seconds,
            self._statistics,
            self._waits,
            self._now,
        )

    def drive(self) -> LearnerState:
        """Run the strategy to its end; returns this learner's final state."""
        coroutine = self._job.strategy.start(self, self._job.options)
        try:
            while True:
                coroutine.send(None)  # waiting happens in `Handle.result`
        except StopIteration:
            self.communicator.end_rounds()
            num_drawn, undone = self._batches.drawn_by_all()
            self._batches.settle()
            return self.course.finish(self.course.tickets.handed_out(num_drawn), undone)
        finally:
            self._batches.close()
            self.communicator.close_foreground_mean()

    @contextmanager
    def agreeing(self) -> Generator[None, None, None]:
        """Within this context, the learner agrees with the others on checkpoint barriers."""
        self._barrier.start()
        try:
            yield
        finally:
            self._barrier.close()

    def leave(self) -> None:
        """Leave a membership that has ended and whose connections have been cut, and save this learner's `Life`."""
        self.communicator.leave()  # before saving, because the background changes the weights
        self._reducing.clear()  # their hooks would act on later gradients
        self.course.leave(self._membership.number)

    # the contract with the strategy

    @property
    def rank(self) -> int:
        return self._row.rank

    @property
    def world(self) -> int:
        return self._row.world

    @property
    def seed(self) -> int:
        return self._job.seed

    @property
    def weights(self) -> Tensor:
        return self.replica.weights

    @property
    def version(self) -> int:
        return self.replica.version

    @property
    def step_metadata(self) -> Tensor:
        return self.course.step_metadata

    def learning_rate(self, piece: slice | None = None) -> float | Tensor:
        return self.course.learning_rate

    @property
    def shapes(self) -> Sequence[torch.Size]:
        return [parameter.shape for parameter in self.replica.parameters]

    def claim(self) -> bool:
        self.communicator.release.check()
        return self.course.claim()

    def gradient(self, at: Tensor) -> Handle[Tensor]:
        course, version = self.course, self.replica.version
        claimed = course.claimed()
        course.gradient_version, course.is_averaged = version, False
        is_mine = at is self.replica.weights
        if not is_mine:
            self._elsewhere = self._elsewhere or self._flat.twin()
            self._elsewhere.use_weights(at)

        def result(reduced: bool) -> Tensor:
            if is_mine and self.replica.version != version:
                raise changed_beneath(self._place.rank)
            if course.claimed() is not claimed:
                raise ProtocolError(f"learner {self._place.rank} claimed again before it awaited its gradient")
            return self._compute(self._flat if is_mine or self._elsewhere is None else self._elsewhere, reduced)

        # an injected delay must come before the gradient is sent; DDP sends it during backward
        may_reduce = self._job.stragglers == Stragglers() and self.communicator.reduces_in_backward
        return GradientHandle(self._place.rank, result, may_reduce)

    def clip(self, gradient: Tensor) -> Tensor | None:
        return self.course.clip(gradient)

    @property
    def staleness(self) -> int:
        return self.course.staleness

    def step(self, gradient: Tensor, read_at: int | None = None, scale: float = 1.0) -> None:
        begin = self._now()
        self.course.step(gradient, read_at, scale)
        self.communicator.rounds.gradient_made()
        self._statistics.spent.computing += self._now() - begin

    def apply(self, delta: Tensor, piece: slice | None = None) -> None:
        self.replica.apply(delta, piece, in_round=self.communicator.is_behind)

    def replace(self, weights: Tensor, piece: slice | None = None) -> None:
        self.replica.replace(weights, piece)

    def snapshot(self, piece: slice | None = None) -> Tensor:
        return self.replica.snapshot(piece, self.communicator.snapshot_memory(piece))

    def pieces(self, largest: int, optimizer_state: bool = False) -> Sequence[slice]:
        return self.replica.pieces(largest, optimizer_state)

    def strategy_state(
        self, name: str, initial: Tensor, is_common: bool = True, for_membership: bool = False
    ) -> Tensor:
        return self.replica.state_of_strategy(name_of_state(name, is_common, for_membership), initial)

    def keep(self, piece: slice, make_optimizer: MakeOptimizer | None = None) -> Shard:
        self._refuse_in_island("keeps a model shard")
        return self.course.shards.keep(piece, make_optimizer)

    def share(self, pieces: Sequence[slice]) -> Handle[Sequence[Shard]]:
        self._refuse_in_island("shares a model in memory")
        shards = self.course.shards
        for piece in pieces:
            shards.check(piece)
        return ProcessHandle(lambda: shards.share(pieces, *self.communicator.share(len(pieces))))

    def mean(self, of: Tensor | Handle[Tensor], group: Sequence[int] | None = None) -> Handle[Tensor]:
        self.course.is_averaged |= isinstance(of, Handle)
        return self.communicator.mean(of, group)

    def encoded_mean(self, part: EncodedMean) -> Handle[Tensor]:
        return self.communicator.encoded_mean(part)

    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle[None]:
        return self.communicator.send(peer, tensor, tag)

    def receive(self, peer: int, like: Tensor, tag: int) -> Handle[Tensor]:
        return self.communicator.receive(peer, like, tag)

    def first(self, handles: Mapping[int, Handle[Any]]) -> Handle[int]:
        return self.communicator.first(handles)

    def exchange(self, peer: int, tensor: Tensor, tag: int) -> Handle[Tensor]:
        return self.communicator.exchange(peer, tensor, tag)

    def background(self, activity: Coroutine[Any, Any, None]) -> None:
        self.communicator.start_background(activity, self.communicator.fail)

    def round(self, period: float) -> Handle[int | None]:
        return self.communicator.round(period)

    def keep_up(self, most: float) -> Handle[None]:
        return self.communicator.keep_up(most)

    # implementation

    def _compute(self, flat: Model, reduced: bool) -> Tensor:
        """The gradient of the claimed mini-batch, or the sync group's mean of it."""
        begin, course, communicator = self._now(), self.course, self.communicator
        waited = 0.0
        if self._island is not None:
            before = self._island.seconds
            loss = self._compute_in_island(flat, self._island)
            waited = self._island.seconds - before
        elif not reduced or len(self._sync_group) == 1:
            loss = course.compute_gradient(flat.model, flat)
        else:
            communicator.count_mean(flat.gradients.nbytes)
            is_elsewhere = flat is not self._flat
            if is_elsewhere not in self._reducing:
                self._reducing[is_elsewhere] = communicator.reducing(flat.model)
            reducing = self._reducing[is_elsewhere]
            with communicator.naming_the_lost(MEAN_OF_GRADIENT), reducing.reducing():
                try:
                    before_last = reducing.model.no_sync
                    loss = course.compute_gradient(reducing.model, flat, before_last, must_reach_all=True)
                    communicator.await_device()
                finally:
                    self._waits.end()  # begun by the forward hook of `Communicator.reducing`
        if flat is not self._flat:
            flat.use_weights(self.replica.weights)  # release the snapshot
        delay = self._life.delays.after(self._now() - begin - waited)
        if delay > 0.0:
            time.sleep(delay)
        self._statistics.spent.computing += self._now() - begin - waited
        self._statistics.spent.waiting_for_peers += waited
        course.report_step(loss)
        return flat.gradients

    def _compute_in_island(self, flat: Model, island: IslandGroup) -> float:
        """Compute this rank's part of the mean gradient of the island's mini-batches; returns the loss of its own.

        All ranks make as many passes as the one with the most micro-batches, since they communicate in each.
        """
        course = self.course
        with self.communicator.naming_the_lost(GATHERING), island.telling_failures():
            if isinstance(flat, IslandModel):
                flat.prepare()
            loss = course.compute_gradient(
                flat.model, flat, num_passes=lambda num_parts: int(max(island.gathered(num_parts)))
            )
        if course.unused and isinstance(flat, IslandModel):
            raise ConfigError(
                f"learner {self._place.rank}: parameter {flat.name_of(min(course.unused))} took no part in "
                f"mini-batch {course.claimed()[0][0].step}, but an island needs a gradient of every parameter from "
                "every mini-batch; use it in each, freeze it, or leave out island"
            )
        return loss

    def _sum_over_island(self, number: float) -> float:
        if self._island is None:
            return number
        with self.communicator.naming_the_lost("the norm of a gradient"):
            return self._island.sum(number)

    def _refuse_in_island(self, what: str) -> None:
        if self._island is not None:
            raise ConfigError(f"island: {self._job.strategy.name} {what}, which an island cannot; leave out island")

    def _add_barrier(self, number: int, signal_number: int) -> None:
        """Add a checkpoint barrier before portion `number`, which no learner has reached."""
        if signal_number:
            self.course.tickets.end_at(number)
        else:
            self.course.add_barrier(number)

    def _look_for_change(self, error: Exception) -> None:
        """Raise `MembershipChanged` if the launcher announces a change, which explains a lost connection."""
        self.communicator.release.check()
        if change := self._feed.beyond(self._membership, CAUSE_SECONDS):
            raise MembershipChanged(change) from error

    def _where(self) -> str:
        num_claimed = self._statistics.num_claimed
        return f"round {num_claimed}" if len(self._sync_group) == self._place.world else f"after {num_claimed} claims"


def _suffer(fault: Fault) -> None:
    if isinstance(fault, Pause):
        stop_this_process(fault.seconds)
    else:
        kill_this_process()
