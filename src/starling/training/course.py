"""One learner's training, the same on every engine: claims, gradients, epochs, checkpoint barriers, reports."""

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from starling.checkpoint.cut import ShardOfIsland
from starling.checkpoint.state import LearnerState
from starling.errors import CheckpointError, NonFiniteError, ProtocolError
from starling.training.cuts import CutAgreement, Cuts
from starling.training.faults import Fault, NotFinite
from starling.training.flat import Model
from starling.training.gradient import Computed, GradientTask, compute_gradient
from starling.training.job import (
    Averaging,
    ClaimReport,
    EpochReport,
    Job,
    Observer,
    Spent,
    StepReport,
    Tally,
)
from starling.training.loading import Loaded
from starling.training.replica import ReplicaLearner
from starling.training.shards import ShardHost, Shards
from starling.training.succession import Life, Past
from starling.training.tickets import Barrier, Barriers, SyncGroupTickets
from starling.workload import Examples, Position, Ticket, Unit


class BatchSource(Protocol):
    """The source of one learner's mini-batches. Claims are numbered from 0."""

    def next(self, claim: int) -> Sequence[Loaded] | None:
        """The tickets of this learner in its next portion with their mini-batches; None once the budget in steps or
        epochs is spent."""

    def agreed_seconds(self, claim: int) -> float:
        """The time of a claim on the engine's clock, the same for all learners of the sync group."""

    def reach(self, portion: int) -> None:
        """Wait until it is known whether there is a checkpoint barrier before `portion`. Called by learners without
        mini-batches of their own."""

    def done(self, ticket: Ticket) -> None:
        """Record that a mini-batch is done: the strategy has used its gradient."""


class Host(ShardHost, Protocol):
    """The learner whose training a `Course` is, as its engine has made it."""

    @property
    def batches(self) -> BatchSource: ...

    @property
    def shard_of_island(self) -> ShardOfIsland | None:
        """Which part of the model its weights are; None: all of it."""

    @property
    def cut_agreement(self) -> CutAgreement:
        """States at checkpoint barriers are saved once all learners' have the same averaging rounds."""

    def now(self) -> float:
        """Seconds since the membership began, on the engine's clock."""

    def named_buffers(self) -> dict[str, Tensor]:
        """The model's buffers."""

    def suffer(self, fault: Fault) -> None:
        """Carry out an injected fault."""

    def consensus_distance(self) -> float | None:
        """(1/L) sum_l |w_l - mean|^2, or None where the engine does not know it."""


class Course:
    """One learner's training, from its first claim to the end of a membership. It begins in the state of its `life`.

    `rank` and `world` count the learners of the membership; to a strategy between islands, `host` may have others.
    """

    def __init__(
        self, job: Job, host: Host, rank: int, world: int, life: Life, tickets: SyncGroupTickets, observer: Observer
    ) -> None:
        start = life.state
        job.validate(world)
        self.job, self.tickets = job, tickets
        self.barriers = Barriers(tickets, job.checkpoint_every)
        self._barriers_of_pushes = Barriers(tickets, job.checkpoint_every)
        self._forking = threading.Lock()
        self.num_done = 0  # claims of this learner
        self.newest_claim: Sequence[Loaded] = ()  # the claimed tickets with their mini-batches
        self.gradient_version = 0  # the version of the weights at which the newest gradient is taken
        self.is_averaged = False  # whether a mean of the newest gradient has begun
        self.unused: frozenset[int] = frozenset()  # the numbers of the parameters that the newest gradient left out
        self._host, self._life, self._observer = host, life, observer
        self._replica, self._statistics, self._batches = host.replica, host.statistics, host.batches
        kept = start.shards if start else ()
        self.shards = Shards(host, self._set_rates, kept)
        sync_groups = job.sync_groups(world)
        self._is_worker = rank < sync_groups.num_workers
        self._sync_group = sync_groups.of(rank)
        self._rank, self._world = rank, world
        self._weight = tickets.weight(rank - self._sync_group.start)
        self._is_reporting = rank % job.island.tensor == 0  # for all that compute the same mini-batches
        # learners save at once if the model is in memory that they share or on a server that adds gradients
        is_cut = job.strategy.steps_itself and observer.saves and not host.replica.weights.is_meta
        is_cut = is_cut and sync_groups.size < sync_groups.num_workers
        self.cuts = Cuts(host.replica, host.cut_agreement) if is_cut else None
        """The states at checkpoint barriers that are not saved yet."""
        self._minutes_before = start.minutes if start else 0.0
        self._loss = 0.0  # of the newest gradient
        self._losses: tuple[float, ...] = ()  # of its mini-batches, where there are several
        self._num_not_finite = self._num_not_finite_in_a_row = 0
        self._open: deque[Sequence[Loaded]] = deque()  # claimed and not done
        self._epochs = self._fraction = 0.0
        self.learning_rate = 0.0  # of the claimed mini-batch, in units of its peak
        self._portion = 0
        self._epoch_steps, self._epoch_begin = 0, 0.0
        self._last_end: int | None = None  # the portion before which an epoch ended last
        self._run_end: int | None = None  # the portion before which the run ends
        self._over_at: float | None = None
        self._spent_when_over = Spent()
        if start is not None:
            self._restore(start)
        if (tally := life.tally) is not None:  # continue counting from that of the previous membership
            self._epoch_steps, self._num_not_finite = tally.num_steps, tally.num_not_finite
            self._epoch_begin = host.now() - tally.seconds
            host.statistics.spent, host.statistics.averaging = tally.spent, tally.averaging

    @property
    def _minutes(self) -> float:
        """Training time so far."""
        return self._minutes_before + self._host.now() / 60.0

    def _restore(self, start: LearnerState) -> None:
        replica = self._replica
        if start.weights.shape != replica.weights.shape:
            raise CheckpointError(
                f"learner {self._rank}: the checkpoint holds {start.weights.numel()} weights, the model has "
                f"{replica.weights.numel()}; resume with the model that was trained"
            )
        replica.restore(start.weights.to(replica.weights.device), start.optimizer, start.strategy)

    @property
    def step_metadata(self) -> Tensor:
        """The learning-rate factor and the portion of the claimed mini-batch."""
        return torch.tensor([self.learning_rate, self._portion], dtype=torch.float64)

    def _set_rates(self, optimizer: Optimizer, peaks: Sequence[float], step_metadata: Tensor, scale: float) -> None:
        """Set the learning rates of a shard's optimizer."""
        factor, portion = step_metadata.tolist()
        if self.cuts is not None:
            self._fork_shards(int(portion))
        if not self._is_worker:  # a server learns the progress of the run only from step metadata
            self._pass_barriers(int(portion))
            self._save_complete()
        for group, peak in zip(optimizer.param_groups if peaks else (), peaks, strict=True):
            group["lr"] = peak * factor * scale

    @property
    def staleness(self) -> int:
        """See `Learner.staleness`."""
        return self._replica.version - self.gradient_version

    def step(self, gradient: Tensor, read_at: int | None = None, scale: float = 1.0) -> None:
        """See `Learner.step`."""
        replica = self._replica
        when = self.gradient_version if read_at is None else read_at
        self._statistics.averaging.staleness[replica.version - when] += 1
        rate = self.learning_rate * scale
        if self._weight != 1.0 and self._is_own(gradient):
            gradient, rate = gradient / self._weight, rate * self._weight
        self._count_not_finite(replica.step(gradient, rate))
        if self.job.strategy.steps_itself:
            self._finish_ticket()

    def _is_own(self, gradient: Tensor) -> bool:
        """Whether this is the newest gradient of this learner, and of no other. With batch shares, it is then the step
        that counts as much as its mini-batches: an optimizer such as Adam takes no notice of a gradient's scale."""
        is_mean = self.is_averaged or self.job.strategy.averages_gradients(self.job.options)
        return not is_mean and gradient.data_ptr() == self._replica.gradients.data_ptr()

    def clip(self, gradient: Tensor) -> Tensor | None:
        """See `Learner.clip`."""
        is_finite = math.isfinite(self._replica.clip(gradient))
        self._count_not_finite(is_finite)
        return gradient if is_finite else None

    def _count_not_finite(self, is_finite: bool) -> None:
        """Count non-finite gradients, which are skipped. Raises NonFiniteError after many in a row."""
        self._num_not_finite_in_a_row = 0 if is_finite else self._num_not_finite_in_a_row + 1
        self._num_not_finite += not is_finite
        if self._num_not_finite_in_a_row == self.job.most_not_finite:
            ticket, _ = self.claimed()[0]
            number = f"mini-batch {ticket.index + 1} of epoch {ticket.epoch + 1}"
            what = f"the gradient of {number} is not finite"
            if not math.isfinite(self._loss):
                what = f"the loss of {number} is {self._loss}"
            raise NonFiniteError(
                f"learner {self._rank}: {what}, and its last {self.job.most_not_finite} gradients were not finite; "
                "lower the learning rate, clip gradients or use a longer warm-up, and resume from an earlier checkpoint"
            )

    def _finish_ticket(self) -> None:
        if self._open:
            self.num_done += 1
            for ticket, _ in self._open.popleft():
                self._batches.done(ticket)

    def claim(self) -> bool:
        """See `Learner.claim`."""
        if not self.job.strategy.steps_itself:
            self._finish_ticket()
        if self._over_at is not None or not self._is_worker:
            return False
        if self._statistics.num_claimed == 0:
            self.shards.forget_saved()
        minutes, loaded = self._minutes_before, None
        if (most := self.job.budget.minutes) is not None:
            minutes += self._batches.agreed_seconds(self._statistics.num_claimed) / 60.0
        if most is None or minutes < most:
            loaded = self._batches.next(self._statistics.num_claimed)
        if loaded is None:
            self._over_at, self._spent_when_over = self._host.now(), self._statistics.spent
            self._statistics.spent = Spent()  # time after the last claim is not training time
            return False
        self.newest_claim = loaded
        self._open.append(loaded)
        self._statistics.num_claimed += 1
        self._portion = self.tickets.number_of(loaded[0][0])
        self._pass_barriers(self._portion)
        self._save_complete()
        self._epoch_steps += self._is_reporting
        progress = self.tickets.progress(self._portion, minutes)
        self._epochs, self._fraction = progress.epochs, self.job.budget.fraction(progress)
        following = self.tickets.progress(self._portion + 1, minutes)
        self.learning_rate = self.job.schedule.at(progress, self.job.budget, following)
        for ticket, batch in loaded if self._is_reporting else ():
            self._observer.on_claim(ClaimReport.of(self._life.name, ticket, batch))
        return True

    def begin_gradient(self) -> Sequence[Loaded]:
        """A gradient of the claimed mini-batches at the present weights begins."""
        self.gradient_version, self.is_averaged = self._replica.version, False
        return self.claimed()

    def claimed(self) -> Sequence[Loaded]:
        """The claimed tickets and their mini-batches: one unless learners have batch shares."""
        if not self.newest_claim:
            raise ProtocolError(f"learner {self._rank} asked for a gradient before it claimed a mini-batch")
        return self.newest_claim

    def add_barrier(self, number: int) -> None:
        """Add a checkpoint barrier before portion `number`, which no learner has claimed. May be called by any
        thread."""
        self.barriers.add(number)
        self._barriers_of_pushes.add(number)

    def leave(self, membership: int) -> None:
        """Membership number `membership` has ended: save in the learner's `Life` what it needs in the next one."""
        life, statistics = self._life, self._statistics
        life.past = Past(membership, self.num_done, self._minutes)
        life.state = self.state(Position()).copy()
        with statistics.lock:
            seconds = self._host.now() - self._epoch_begin
            life.tally = Tally(self._epoch_steps, seconds, statistics.spent, statistics.averaging, self._num_not_finite)

    def finish(self, num_portions: int, undone: Collection[int] = ()) -> LearnerState:
        """Report the end of the run, and return the final state. Of the `num_portions` that all learners claimed, all
        except the `undone` ones are done."""
        self.barriers.end_at(num_portions)
        self._barriers_of_pushes.end_at(num_portions)
        self._run_end = num_portions
        if self.cuts is not None:
            self.cuts.save(is_over=True)
        self._pass_barriers(min([num_portions, *undone]))
        state = self.state(self.tickets.position(num_portions, undone))
        if undone or self._last_end != num_portions:
            self._end_epoch(self.barriers.epoch, state, is_last=True)
        return state

    def state(self, position: Position, epochs_ended: int | None = None) -> LearnerState:
        """This learner's state for continuing from `position`. Call between two mini-batches; it shares memory with the
        learner."""
        weights, shards = self._replica.on_host(), tuple(shard.state() for shard in self.shards.held)
        under_shards = None
        if shards:
            if self._is_worker and self.job.strategy.steps_itself:  # its weights are more than a copy of the shards'
                under_shards = torch.cat([weights[shard.start : shard.stop] for shard in shards])
            weights = weights.clone()
            for shard in shards:
                weights[shard.start : shard.stop] = shard.weights
        return LearnerState(
            rank=self._rank,
            world=self._world,
            position=position,
            epochs_ended=epochs_ended,
            minutes=self._minutes,
            weights=weights,
            buffers={name: buffer.detach().cpu() for name, buffer in self._host.named_buffers().items()},
            optimizer=self._replica.optimizer.state_dict(),
            strategy=dict(self._replica.strategy_state),
            shards=shards,
            shard_of_island=self._host.shard_of_island,
            of_strategy=self.job.strategy.described(self.job.options),
            under_shards=under_shards,
            is_worker=self._is_worker,
        )

    def _pass_barriers(self, portion: int) -> None:
        """Pass all checkpoint barriers up to `portion`: several if this learner had no mini-batch between them."""
        if not self._is_worker:  # a worker has waited for this when the portion was drawn
            self._batches.reach(portion)
        for barrier in self.barriers.until(portion):
            ended = barrier.ended[-1] + 1 if barrier.ended else None
            state = self._save(self.state(self.tickets.position(barrier.number), ended), barrier)
            for epoch in barrier.ended:
                self._end_epoch(epoch, state, is_last=barrier.number == self._run_end)
                self._last_end = barrier.number

    def _save(self, state: LearnerState, barrier: Barrier) -> LearnerState:
        """Save the state at a barrier within an epoch, or one that is complete only later. Returns it."""
        cuts, number, save = self.cuts, barrier.number, self._observer.on_barrier
        forks = None
        if cuts is not None and self.job.strategy.is_served:
            self._fork_shards(number)
            forks = partial(self.shards.with_forks, portion=number)
        if cuts is not None and self._run_end is None:
            cuts.add(state, save, forks)
            return replace(state, is_complete=False)
        if forks is not None:  # at the end of a run all rounds and pushes have come
            state = forks(state)
        if not barrier.ended:
            save(state)
        return state

    def _save_complete(self) -> None:
        if self.cuts is not None:
            self.cuts.save()

    def _fork_shards(self, portion: int) -> None:
        """Copy the shards at the barriers up to `portion`, before they take a push from after these. Called by the
        foreground and the background."""
        self._batches.reach(portion)
        with self._forking:
            for barrier in self._barriers_of_pushes.until(portion):
                self.shards.fork(barrier.number)

    def _end_epoch(self, epoch: int, state: LearnerState, is_last: bool) -> None:
        now, statistics = self._host.now(), self._statistics
        spent = statistics.spent
        if self._over_at is not None:
            now, spent = self._over_at, self._spent_when_over
            self._spent_when_over = Spent()
        with statistics.lock:
            averaging, statistics.averaging = statistics.averaging, Averaging()
        report = EpochReport(
            rank=self._life.name,
            epoch=epoch,
            num_steps=self._epoch_steps,
            seconds=now - self._epoch_begin,
            spent=spent,
            averaging=averaging,
            consensus_distance=self._host.consensus_distance(),
            num_not_finite=self._num_not_finite,
            is_last=is_last,
        )
        self._num_not_finite = 0
        self._observer.on_epoch(report, state)
        statistics.spent = Spent()
        self._epoch_steps, self._epoch_begin = 0, now

    def gradient_task(self) -> tuple[GradientTask, list[Sequence[Examples]]]:
        """What the gradient of the claimed mini-batches depends on, and these; injected faults are carried out."""
        tickets, batches = zip(*self.claimed(), strict=True)
        faults = next(self._life.faults)
        for fault in faults:
            if not isinstance(fault, NotFinite):
                self._host.suffer(fault)
        is_spoilt = any(isinstance(each, NotFinite) for each in faults)
        sizes, factor = self._sizes_and_factor()
        not_thawed = tuple(
            each
            for each in self.job.freeze
            if each.until is not None and not each.until.is_over(self._epochs, self._fraction)
        )
        return GradientTask(tickets, sizes, factor, is_spoilt, not_thawed), list(batches)

    def compute_gradient(
        self,
        model: nn.Module,
        flat: Model,
        before_last: Callable[[], AbstractContextManager[Any]] = nullcontext,
        must_reach_all: bool = False,
        num_passes: Callable[[int], int] | None = None,
    ) -> float:
        """Compute the gradient of the claimed mini-batches in `flat.gradients`, and return its loss; see
        `starling.training.gradient`."""
        task, batches = self.gradient_task()
        computed = compute_gradient(self.job, task, batches, model, flat, before_last, must_reach_all, num_passes)
        self.computed(computed)
        return computed.loss

    def computed(self, computed: Computed) -> None:
        """Note what a gradient of this learner has left."""
        self.unused, self._losses = computed.unused, computed.losses
        self._replica.sometimes_unused |= computed.unused

    def _sizes_and_factor(self) -> tuple[tuple[float, ...], float]:
        """How much each claimed mini-batch counts in this learner's gradient, and the factor for this gradient that
        makes the sync group's plain mean the weighted mean over all mini-batches of the portion.

        No communication is needed: every member knows the others' tickets, and their sizes from the plan.
        """
        unit, member, shares = self.job.weighting, self._rank - self._sync_group.start, self.tickets.shares
        sizes = [(1.0,) * share for share in shares]
        if unit != "batches" and self.tickets.portion_size > 1:
            planned = [self._sizes_of(other, unit) for other in range(len(shares))]
            sizes = planned if any(map(any, planned)) else sizes
        return sizes[member], len(sizes) * sum(sizes[member]) / sum(map(sum, sizes))

    def _sizes_of(self, member: int, unit: Unit) -> tuple[float, ...]:
        """The planned sizes of a member's mini-batches in this portion, which are of that member's part of the data."""
        workload, per_batch = self.job.workload, self.job.island.tensor
        part = (self._sync_group.start + member) // per_batch % workload.num_parts
        tickets = (replace(ticket, part=part) for ticket in self.tickets.tickets(self._portion, member))
        return tuple(workload.planned_size(ticket, unit) for ticket in tickets)

    def report_step(self, loss: float) -> None:
        """Report the claimed mini-batches and their loss."""
        self._loss = loss
        claimed = self.claimed()
        losses = self._losses or (loss,) * len(claimed)
        for (ticket, batch), own in zip(claimed, losses, strict=True) if self._is_reporting else ():
            report = StepReport(
                rank=self._life.name,
                ticket=ticket,
                num_batches=self.tickets.sequence.num_batches(ticket.epoch),
                fraction=self._fraction,
                minutes=self._minutes,
                loss=own,
                learning_rate=self._replica.learning_rate(self.learning_rate),
                num_examples=sum(examples.num_examples for examples in batch),
                num_frames=sum(examples.num_frames for examples in batch),
                audio_seconds=sum(examples.seconds for examples in batch),
                spent=self._statistics.spent_now(),
            )
            self._observer.on_step(report)


class CourseLearner(ReplicaLearner):
    """What all learners whose training is a `Course` leave to it, on every engine."""

    course: Course

    @property
    def step_metadata(self) -> Tensor:
        return self.course.step_metadata

    def learning_rate(self, piece: slice | None = None) -> float | Tensor:
        return self.course.learning_rate

    def clip(self, gradient: Tensor) -> Tensor | None:
        return self.course.clip(gradient)

    @property
    def staleness(self) -> int:
        return self.course.staleness
