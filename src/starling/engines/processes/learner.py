"""The engine `processes`, in which each learner is a process that uses `torch.distributed`.

On the CPU, learners communicate through shared memory on one machine and through gloo between machines. On CUDA, means
use NCCL if each learner has its own device; all other communication uses gloo through host memory.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from itertools import count, islice
from typing import Self

from torch import Tensor

from starling.checkpoint.state import LearnerState
from starling.engines.processes.backend import ReducingModel
from starling.engines.processes.checkpoint_barrier import CheckpointBarrier, SaveRequests
from starling.engines.processes.communicator import MEAN_OF_GRADIENT, ConnectedLearner
from starling.engines.processes.handshake import Peers
from starling.engines.processes.island import GATHERING, IslandModel, check_elementwise
from starling.engines.processes.threads import STARTED, GradientHandle, Mean
from starling.engines.processes.tickets import CLAIMING, DoneNotes, Draws, ProcessRounds, StoreCuts
from starling.errors import ConfigError, ProtocolError, ReplayError
from starling.learner import Handle
from starling.strategies.islands import NO_ISLANDS, between_islands
from starling.training.course import CourseLearner
from starling.training.faults import Fault, Pause, kill_this_process, stop_this_process
from starling.training.flat import Model, load_buffers
from starling.training.job import Job, Observer
from starling.training.loading import Loaded, Loader, Lookahead
from starling.training.order import Order, sha256_of
from starling.training.replica import Replica, changed_beneath
from starling.training.speeds import Stragglers
from starling.training.succession import CutAgreement, Life, RecordedCuts
from starling.training.tickets import SyncGroupTickets
from starling.workload import Position, Ticket

KEPT_TIMES = 1 << 16
"""Number of a sync group's claims whose times stay in the store. Learners that agree every H steps are up to H claims
apart."""


class ProcessLearner(ConnectedLearner, CourseLearner):
    """The learner that runs in this process in one membership. It continues from the state in its `Life`, which it has
    from the previous membership or from a checkpoint."""

    batches: "ProcessBatches"
    cut_agreement: CutAgreement
    rounds: ProcessRounds

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
        script, self._num_states = life.script, 0
        part = self._part = flat if isinstance(flat, IslandModel) else None
        start, weights, make_optimizer = life.state, flat.weights, job.make_optimizer
        if start is not None:
            load_buffers(flat.model, start.buffers)
        self._flat = flat
        self._has_delays = job.stragglers != Stragglers()
        self._reducing: ReducingModel | None = None
        self._begun = time.monotonic()
        in_island = None if part is None else self._sum_over_island
        replica = Replica(
            weights, flat.gradients, flat.parameters, make_optimizer, job.clip_norm, sum_over_island=in_island
        )
        if part is not None:
            check_elementwise(replica.optimizer)
            self.shard_of_island = part.shard_of_island(replica.optimizer)
        row = between_islands(job.strategy, NO_ISLANDS)  # what the ranks that hold the same shard of a model see
        ConnectedLearner.__init__(
            self,
            peers,
            row.sync_groups(job.options, peers.world // job.island.size),
            replica,
            job.seed,
            life.statistics,
            row_size=job.island.size,
        )
        self._barrier = CheckpointBarrier(self.peers, save_requests, self._add_barrier)
        position, shared_by = start.position if start else Position(), job.island.tensor
        size = job.sync_groups(peers.world).size
        tickets = SyncGroupTickets(job.workload, position, job.budget, size, shares, shared_by)
        self.cut_agreement = StoreCuts(replace(self.peers, place=self._place))
        if script is not None and script.saves:
            self.cut_agreement = RecordedCuts(script.cuts, lambda: self.order.num_own)
        CourseLearner.__init__(self, job, peers.rank, peers.world, life, tickets, observer)
        for portion, stops in () if script is None else script.barriers:
            self._add_barrier(portion, stops)
        self.batches = ProcessBatches(self, loader, self._barrier)

    def drive(self) -> LearnerState:
        """Run the strategy to its end, and return this learner's final state."""
        coroutine, STARTED.count = self.job.strategy.start(self, self.job.options), self.order.num_started[0]
        try:
            while True:
                coroutine.send(None)  # waiting happens in `Handle.result`
        except StopIteration:
            self.end_rounds()
            num_drawn, undone = self.batches.drawn_by_all()
            self._barrier.settle()  # all learners have made their last claims
            return self.finish(self.tickets.handed_out(num_drawn), undone)
        finally:
            self.batches.close()

    def agreeing(self) -> AbstractContextManager[object]:
        """A context in which the learner agrees with the others on checkpoint barriers."""
        self._barrier.start()
        return closing(self._barrier)

    def leave(self) -> None:
        """Leave a membership that has ended and whose connections were cut, and save this learner's `Life`."""
        super().leave()  # before saving, because the background changes the weights
        self._reducing = None  # its hooks would act on later gradients
        self.end_membership(self.peers.membership.number)

    # what all learners with tickets need

    @property
    def sums_in_order(self) -> bool:
        return len(self.sync_group) == 1 or not (self.reduces_in_backward or self._by_nccl)

    def now(self) -> float:
        return time.monotonic() - self._begun

    def named_buffers(self) -> dict[str, Tensor]:
        return dict(self._flat.model.named_buffers())

    def suffer(self, fault: Fault) -> None:
        if isinstance(fault, Pause):
            stop_this_process(fault.seconds)
        else:
            kill_this_process()

    # the contract with the strategy

    def claim(self) -> bool:
        self.release.check()
        return super().claim()

    def gradient(self, at: Tensor) -> Handle[Tensor]:
        version, claimed = self.replica.version, self.begin_gradient()

        def compute(mean: Mean | None) -> Tensor:
            if at is self.replica.weights and self.replica.version != version:
                raise changed_beneath(self.peers.rank)
            if self.newest_claim is not claimed:
                raise ProtocolError(f"learner {self.peers.rank} claimed again before it awaited its gradient")
            # an injected delay must come before the gradient is sent; DDP sends it during backward
            if mean is not None and (self._has_delays or not self.reduces_in_backward):
                return mean(self._compute(at))
            return self._compute(at, is_mean=mean is not None)

        return GradientHandle(self.peers.rank, compute)

    def step(self, gradient: Tensor, read_at: int | None = None, scale: float = 1.0) -> None:
        begin = self.waits.running()
        super().step(gradient, read_at, scale)
        if self._background is not None:
            self.rounds.gradient_made()
        self.statistics.spent.computing += self.waits.running() - begin

    @property
    def shards(self) -> Self:
        if self._part is not None:
            name = self.job.strategy.name
            raise ConfigError(f"island: {name} keeps or shares model shards, which an island cannot; leave out island")
        return self

    # implementation

    def _compute(self, at: Tensor, is_mean: bool = False) -> Tensor:
        """Compute the gradient of the claimed mini-batch at the weights `at`, or the sync group's mean gradient."""
        begin, waited, flat = self.waits.running(), 0.0, self._flat
        if at is not self.replica.weights:
            flat.use_weights(at)
        try:
            if self._part is not None:
                before = self._part.island.seconds
                loss = self._compute_part(self._part)
                waited = self._part.island.seconds - before
            elif not is_mean or len(self.sync_group) == 1:
                loss = self.compute_gradient(flat.model, flat)
            else:
                loss = self._compute_mean(flat)
        finally:
            if at is not self.replica.weights:
                flat.use_weights(self.replica.weights)
        if self._has_delays:
            until = (now := self.waits.running()) + self.life.delays.after(now - begin - waited)
            while (left := until - self.waits.running()) > 0.0:
                time.sleep(left)
        now, stopped = self.waits.running_and_stopped()
        self.statistics.spent.computing += now - begin - waited
        self.statistics.spent.stopped += stopped
        self.statistics.spent.waiting_for_peers += waited
        self.report_step(loss)
        return flat.gradients

    def _compute_mean(self, flat: Model) -> float:
        """Compute the sync group's mean gradient, and return the loss of this learner's own mini-batch."""
        self.count_mean(flat.gradients.nbytes)
        reducing = self._reducing = self._reducing or self.reducing(flat.model)
        with self.naming_the_lost(MEAN_OF_GRADIENT), reducing.reducing():
            loss = self.compute_gradient(reducing.model, flat, reducing.model.no_sync, must_reach_all=True)
            self.await_device()
        return loss

    def _compute_part(self, part: IslandModel) -> float:
        """Compute this rank's part of the mean gradient of the island's mini-batches, and return the loss of this
        rank's own mini-batch."""
        with self.naming_the_lost(GATHERING), part.island.telling_failures():
            loss = self.compute_gradient(part.model, part)
        if self.unused:
            raise ConfigError(
                f"learner {self.peers.rank}: parameter {part.names[min(self.unused)]} took no part in "
                f"mini-batch {self.claimed()[0][0].step}, but an island needs a gradient of every parameter from "
                "every mini-batch; use it in each, freeze it, or leave out island"
            )
        return loss

    def _sum_over_island(self, number: float) -> float:
        with self.naming_the_lost("the norm of a gradient"):
            return number if self._part is None else self._part.island.sum(number)

    def _make_order(self, tell: Callable[[str], None]) -> Order:
        return self.order_of(self.life.script, tell)

    def _record_weights(self, position: Position, weights: Tensor) -> None:
        """Record the hash of `weights`. Raises `ReplayError` if the weights differ from those in the record that the
        learner follows."""
        super()._record_weights(position, weights)
        states: Sequence[tuple[int, str]] = () if self.life.script is None else self.life.script.states
        number, self._num_states = self._num_states, self._num_states + 1
        if states and not self.is_recorded_saving:  # only the first and the last state have all rounds in both runs
            number = {states[0][0]: 0, states[-1][0]: len(states) - 1}.get(position.num_done, len(states))
        if number >= len(states):
            return
        found = position.num_done, sha256_of(weights)
        if found != states[number]:
            raise ReplayError(
                f"learner {self.life.name}: its state number {number + 1}, after {found[0]} steps, has the hash "
                f"{found[1][:12]}, but its record has {states[number][1][:12]} after {states[number][0]} steps; the "
                "recipe, the data or the code differs"
            )

    def _add_barrier(self, number: int, signal_number: int) -> None:
        """Add a checkpoint barrier before portion `number`, which no learner has reached."""
        self._observer.on_event(self.life.name, "barrier", portion=number, stops=bool(signal_number))
        if signal_number:
            self.tickets.end_at(number)
        else:
            self.barriers.add(number)

    def _where(self) -> str:
        num_claimed = self.statistics.num_claimed
        return f"round {num_claimed}" if len(self.sync_group) == self.world else f"after {num_claimed} claims"


class ProcessBatches:
    """The `BatchSource` of a learner process. Its sync group claims portions of tickets through the store, and loading
    processes prepare mini-batches ahead. Unless all learners have the same model, the store records which tickets are
    done."""

    def __init__(self, learner: "ProcessLearner", loader: Loader, barrier: CheckpointBarrier) -> None:
        job, peers, num_workers = learner.job, learner.peers, learner.job.sync_groups(learner.peers.world).num_workers
        self._learner, self._peers, self._tickets, self._barrier = learner, peers, learner.tickets, barrier
        self._is_whole = len(learner.claimers) == peers.world
        self._given = None if learner.recorded is None else [number for number, _ in learner.recorded]
        self._member = peers.rank - learner.claimers.start
        per_batch = job.island.tensor
        self._part = (learner.life.name if per_batch == 1 else peers.rank // per_batch) % job.workload.num_parts
        # if all learners have the same model, the number of their mini-batches determines which tickets are done
        is_noting = peers.feed.is_watched and not job.strategy.has_one_model
        self._notes = DoneNotes(peers.store, peers.rank, num_workers) if is_noting else None
        self._drawn_ahead: set[int] = set()  # portions that this sync group has drawn and not yet claimed
        self._newest_drawn = 0
        self._draws = Draws(peers, learner.claimers)
        self._resumed_at: float | None = None  # when the last mini-batch was given out
        is_counted = job.budget.steps is not None or job.budget.epochs is not None
        self._loader, self._lookahead = loader, Lookahead(is_counted)
        self._batches = loader.load(self._drawn(), self._num_ahead)

    def next(self, claim: int) -> Sequence[Loaded] | None:
        begin = time.monotonic()
        with self._peers.waits.waiting("data") as wait:
            loaded = list(islice(self._batches, self._tickets.shares[self._member]))
        now = time.monotonic()
        self._learner.statistics.spent.waiting_for_data += wait.seconds
        if self._draws_nothing:
            return loaded or None
        if self._resumed_at is not None:
            spent = self._learner.job.budget.fraction(self._tickets.progress(self._newest_drawn, minutes=0.0))
            self._lookahead.began(self._draws.drawn_at, begin - self._resumed_at, spent)
        self._resumed_at = now
        if loaded:
            self._drawn_ahead.discard(self._tickets.number_of(loaded[0][0]))
            self._draw_ahead(now)
        return loaded or None

    def agreed_seconds(self, claim: int) -> float:
        """Return the time on the clock of the sync group's first learner, which is communicated through the store."""
        if len(self._learner.claimers) == 1:
            return self._learner.now()
        store, first, what = self._peers.store, self._learner.claimers.start, "agreeing on the time"
        key = f"clock/{first}/{{}}".format
        if self._member == 0:
            store.set(key(claim), repr(self._learner.now()))
            store.delete_key(key(claim - KEPT_TIMES))
        begin = self._peers.waits.running()
        with self._learner.naming_the_lost(what):
            self._peers.await_keys([key(claim)], what, [first])
            seconds = float(store.get(key(claim)))
        self._learner.statistics.spent.waiting_for_peers += self._peers.waits.running() - begin
        return seconds

    def reach(self, portion: int) -> None:
        """Wait until it is known whether there is a checkpoint barrier before `portion`."""
        self._barrier.reach(portion)

    def done(self, ticket: Ticket) -> None:
        if self._notes is not None:
            self._notes.add(ticket)

    def drawn_by_all(self) -> tuple[int, list[int]]:
        """Wait until all learners have made their last claims. Return the number of portions that all sync groups have
        drawn, and the portions that remain undone because they were drawn ahead when the time budget was spent."""
        if self._is_whole:
            return self._learner.statistics.num_claimed, []
        if self._given is not None:
            done = self._peers.gather_all("claimed", self._given, "collecting the last claims")
            numbers = {number for each in done for number in each}
            num_drawn = max(numbers, default=-1) + 1
            return num_drawn, sorted(set(range(num_drawn)) - numbers)
        undone = self._undone() if self._learner.is_worker and self._member == 0 else ()
        what = "collecting the last claims"
        with self._learner.naming_the_lost(what):
            found = self._peers.gather_all("claimed", sorted(undone), what)
        return int(self._peers.store.add("claims", 0)), sorted(number for each in found for number in each)

    def _drawn(self) -> Iterator[Ticket]:
        """Draw this learner's tickets."""
        numbers: Iterable[int] = count() if self._is_whole else iter(self._take, None)
        if self._given is not None:
            numbers = self._given
        for number in numbers if self._learner.is_worker else ():
            self.reach(number)
            if not (drawn := self._tickets.drawn(number, self._member)):
                return
            if not self._draws_nothing:
                self._drawn_ahead.add(number)
                self._newest_drawn = number
            for ticket in drawn:
                yield replace(ticket, part=self._part)

    def _take(self) -> int:
        """Draw a portion for this sync group, and return its number."""
        with self._learner.naming_the_lost(CLAIMING):
            return self._draws.take()

    def _draw_ahead(self, now: float) -> None:
        """Begin to draw the portions that will be needed after the mini-batch that is about to begin, so that training
        does not wait for the store."""
        num_more = 1 + self._loader.is_ahead
        if self._member == 0:
            num_more = self._lookahead.num(now, self._loader.load_seconds, 1 + self._loader.is_ahead)
            num_more -= len(self._drawn_ahead)
        for _ in range(num_more - self._draws.num_under_way):
            self._draws.begin()

    def _undone(self) -> set[int]:
        """Complete the draws that are under way, and return the portions that were drawn ahead and will not be
        claimed."""
        undone = set(self._drawn_ahead)
        for _ in range(self._draws.num_under_way):
            number = self._take()
            self.reach(number)
            if not self._tickets.is_beyond(number):
                undone.add(number)
        return undone

    def _num_ahead(self) -> int:
        """The number of portions that may be drawn ahead of the one that is about to begin."""
        if self._draws_nothing:
            return sys.maxsize  # no other learner would draw them
        if self._member == 0:
            return self._lookahead.num(time.monotonic(), self._loader.load_seconds)
        # only as far as the first learner has drawn: waiting for more would block the step that it is in
        return len(self._drawn_ahead) - 1 + self._draws.num_known

    @property
    def _draws_nothing(self) -> bool:
        """Whether the store does not determine the portions of this learner."""
        return self._is_whole or self._given is not None

    def close(self) -> None:
        """End the thread that draws."""
        self._draws.close()
