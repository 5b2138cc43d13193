"""The engine `processes`: each learner is a process, on `torch.distributed`.

On the CPU learners communicate by shared memory on one machine and by gloo between machines. On CUDA, means use NCCL if
each learner has its own device; everything else uses gloo through host memory.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from torch import Tensor

from starling.checkpoint.state import LearnerState
from starling.engines.processes.backend import ReducingModel
from starling.engines.processes.batches import ProcessBatches
from starling.engines.processes.checkpoint_barrier import CheckpointBarrier, SaveRequests
from starling.engines.processes.communicator import MEAN_OF_GRADIENT, ConnectedLearner
from starling.engines.processes.handshake import Peers
from starling.engines.processes.island import GATHERING, IslandGroup, IslandModel
from starling.engines.processes.rounds import StoreCuts
from starling.engines.processes.threads import GradientHandle
from starling.engines.processes.tickets import DoneNotes
from starling.errors import ConfigError, ProtocolError
from starling.learner import Handle, Shard
from starling.strategies.islands import NO_ISLANDS, between_islands
from starling.training.checks import changed_beneath, check_elementwise
from starling.training.course import Course, CourseLearner
from starling.training.faults import Fault, Pause, kill_this_process, stop_this_process
from starling.training.flat import Model, load_buffers
from starling.training.job import Job, Observer, Statistics
from starling.training.loading import Loader
from starling.training.replica import Replica
from starling.training.shards import MakeOptimizer
from starling.training.stragglers import Stragglers
from starling.training.succession import Life
from starling.training.tickets import SyncGroupTickets
from starling.workload import Position


class ProcessLearner(CourseLearner, ConnectedLearner):
    """The learner that runs in this process, in one membership. It continues with the state in its `life`."""

    def __init__(
        self,
        job: Job,
        peers: Peers,
        flat: Model,
        life: Life,
        shares: Sequence[int],
        loader: Loader,
        observer: Observer,
        save_requests: SaveRequests | None = None,
    ) -> None:
        self._island = flat.island if isinstance(flat, IslandModel) else None
        start = life.state
        if start is not None:
            load_buffers(flat.model, start.buffers)
        self._job, self._flat, self._life = job, flat, life
        self._has_delays = job.stragglers != Stragglers()
        self._elsewhere: Model | None = None  # a copy of the model, for gradients at a snapshot
        self._reducing: dict[bool, ReducingModel] = {}  # by whether it wraps `_elsewhere`
        self._begun = time.monotonic()
        row = between_islands(job.strategy, NO_ISLANDS)  # what the ranks that hold the same shard of a model see
        super().__init__(
            peers,
            row.sync_groups(job.options, peers.world // job.island.size),
            self._make_replica(job, flat),
            job.seed,
            peers.place.has_own_device(flat.weights.device),
            Statistics(),
            row_size=job.island.size,
        )
        if self._island is not None:
            self._island.statistics = self.statistics
        self._barrier = CheckpointBarrier(self.peers, save_requests, self._add_barrier, self.naming_the_lost)
        position, sync_groups = start.position if start else Position(), job.sync_groups(peers.world)
        shared_by = job.island.tensor
        tickets = SyncGroupTickets(job.workload, position, job.budget, sync_groups.size, shares, shared_by)
        # if all learners have the same model, the number of their mini-batches determines which tickets are done
        is_noting = peers.feed.is_watched and not job.strategy.has_one_model
        self.batches = ProcessBatches(
            job,
            tickets,
            (life.name if shared_by == 1 else peers.rank // shared_by) % job.workload.num_parts,
            loader,
            self,
            self._barrier,
            DoneNotes(peers.store, peers.rank, sync_groups.num_workers) if is_noting else None,
            self.now,
        )
        self.shard_of_island = flat.shard_of_island(self.replica.optimizer) if isinstance(flat, IslandModel) else None
        self.cut_agreement = StoreCuts(self._place.store, self.rank, self.world, self.naming_the_lost)
        self.course = Course(job, self, peers.rank, peers.world, life, tickets, observer)
        self.shards = self.course.shards
        self.rounds.cuts = self.course.cuts

    def _make_replica(self, job: Job, flat: Model) -> Replica:
        in_island = None if self._island is None else self._sum_over_island
        replica = Replica(
            flat.weights, flat.gradients, flat.parameters, job.make_optimizer, job.clip_norm, sum_over_island=in_island
        )
        if in_island is not None:
            check_elementwise(replica.optimizer)
        return replica

    def drive(self) -> LearnerState:
        """Run the strategy to its end; returns this learner's final state."""
        coroutine = self._job.strategy.start(self, self._job.options)
        try:
            while True:
                coroutine.send(None)  # waiting happens in `Handle.result`
        except StopIteration:
            self.end_rounds()
            num_drawn, undone = self.batches.drawn_by_all()
            self.batches.settle()
            return self.course.finish(self.course.tickets.handed_out(num_drawn), undone)
        finally:
            self.batches.close()
            self.close_foreground_mean()

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
        super().leave()  # before saving, because the background changes the weights
        self._reducing.clear()  # their hooks would act on later gradients
        self.course.leave(self.peers.membership.number)

    # what the course needs

    def now(self) -> float:
        return time.monotonic() - self._begun

    def named_buffers(self) -> dict[str, Tensor]:
        return dict(self._flat.model.named_buffers())

    def suffer(self, fault: Fault) -> None:
        if isinstance(fault, Pause):
            stop_this_process(fault.seconds)
        else:
            kill_this_process()

    def consensus_distance(self) -> None:
        """Unknown: it takes all learners' weights."""

    # the contract with the strategy

    def claim(self) -> bool:
        self.release.check()
        return self.course.claim()

    def gradient(self, at: Tensor) -> Handle[Tensor]:
        course, version = self.course, self.replica.version
        claimed = course.begin_gradient()
        is_mine = at is self.replica.weights
        if not is_mine:
            self._elsewhere = self._elsewhere or self._flat.twin()
            self._elsewhere.use_weights(at)

        def result(reduced: bool) -> Tensor:
            if is_mine and self.replica.version != version:
                raise changed_beneath(self.peers.rank)
            if course.newest_claim is not claimed:
                raise ProtocolError(f"learner {self.peers.rank} claimed again before it awaited its gradient")
            return self._compute(self._flat if is_mine or self._elsewhere is None else self._elsewhere, reduced)

        # an injected delay must come before the gradient is sent; DDP sends it during backward
        may_reduce = not self._has_delays and self.reduces_in_backward
        return GradientHandle(self.peers.rank, result, may_reduce)

    def step(self, gradient: Tensor, read_at: int | None = None, scale: float = 1.0) -> None:
        begin = time.monotonic()
        self.course.step(gradient, read_at, scale)
        if self._background is not None:
            self.rounds.gradient_made()
        self.statistics.spent.computing += time.monotonic() - begin

    def keep(self, piece: slice, make_optimizer: MakeOptimizer | None = None) -> Shard:
        self._refuse_in_island("keeps a model shard")
        return super().keep(piece, make_optimizer)

    def share(self, pieces: Sequence[slice]) -> Handle[Sequence[Shard]]:
        self._refuse_in_island("shares a model in memory")
        return super().share(pieces)

    def mean(self, of: Tensor | Handle[Tensor], group: Sequence[int] | None = None) -> Handle[Tensor]:
        self.course.is_averaged |= isinstance(of, Handle)
        return super().mean(of, group)

    # implementation

    def _compute(self, flat: Model, reduced: bool) -> Tensor:
        """The gradient of the claimed mini-batch, or the sync group's mean of it."""
        begin, course = time.monotonic(), self.course
        waited = 0.0
        if self._island is not None:
            before = self._island.seconds
            loss = self._compute_in_island(flat, self._island)
            waited = self._island.seconds - before
        elif not reduced or len(self.sync_group) == 1:
            loss = course.compute_gradient(flat.model, flat)
        else:
            self.count_mean(flat.gradients.nbytes)
            is_elsewhere = flat is not self._flat
            if is_elsewhere not in self._reducing:
                self._reducing[is_elsewhere] = self.reducing(flat.model)
            reducing = self._reducing[is_elsewhere]
            with self.naming_the_lost(MEAN_OF_GRADIENT), reducing.reducing():
                try:
                    before_last = reducing.model.no_sync
                    loss = course.compute_gradient(reducing.model, flat, before_last, must_reach_all=True)
                    self.await_device()
                finally:
                    self.peers.waits.end()  # begun by the forward hook of `reducing`
        if flat is not self._flat:
            flat.use_weights(self.replica.weights)  # release the snapshot
        if self._has_delays:
            time.sleep(self._life.delays.after(time.monotonic() - begin - waited))
        self.statistics.spent.computing += time.monotonic() - begin - waited
        self.statistics.spent.waiting_for_peers += waited
        course.report_step(loss)
        return flat.gradients

    def _compute_in_island(self, flat: Model, island: IslandGroup) -> float:
        """Compute this rank's part of the mean gradient of the island's mini-batches; returns the loss of its own.

        All ranks make as many passes as the one with the most micro-batches, since they communicate in each.
        """
        course = self.course
        with self.naming_the_lost(GATHERING), island.telling_failures():
            if isinstance(flat, IslandModel):
                flat.prepare()
            loss = course.compute_gradient(
                flat.model, flat, num_passes=lambda num_parts: int(max(island.gathered(num_parts)))
            )
        if course.unused and isinstance(flat, IslandModel):
            raise ConfigError(
                f"learner {self.peers.rank}: parameter {flat.name_of(min(course.unused))} took no part in "
                f"mini-batch {course.claimed()[0][0].step}, but an island needs a gradient of every parameter from "
                "every mini-batch; use it in each, freeze it, or leave out island"
            )
        return loss

    def _sum_over_island(self, number: float) -> float:
        if self._island is None:
            return number
        with self.naming_the_lost("the norm of a gradient"):
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

    def _where(self) -> str:
        num_claimed = self.statistics.num_claimed
        return f"round {num_claimed}" if len(self.sync_group) == self.world else f"after {num_claimed} claims"
