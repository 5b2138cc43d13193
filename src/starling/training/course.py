"""The training of one learner, which is the same on every engine: claims, gradients, epochs, checkpoint barriers and
reports."""

import math
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from starling.checkpoint.cut import ShardOfIsland
from starling.checkpoint.state import LearnerState, counted
from starling.errors import CheckpointError, ProtocolError
from starling.learner import Shard
from starling.training.faults import Fault, NotFinite
from starling.training.flat import Model
from starling.training.gradient import Computed, GradientTask, compute_gradient
from starling.training.job import Averaging, ClaimReport, EpochReport, Job, Observer, Spent, StepReport
from starling.training.loading import Loaded
from starling.training.membership import Membership
from starling.training.order import Order, RecordedOrder, arithmetic, sha256_of
from starling.training.pace import Rounds
from starling.training.replica import ReplicaLearner
from starling.training.shards import HeldShards, MakeOptimizer
from starling.training.succession import CutAgreement, Cuts, Life, MembershipStart, Past
from starling.training.tickets import Barrier, Barriers, SyncGroupTickets
from starling.workload import Examples, Position, Ticket, Unit


class BatchSource(Protocol):
    """The source of one learner's mini-batches. Claims are numbered from 0."""

    def next(self, claim: int) -> Sequence[Loaded] | None:
        """Return the tickets of this learner in its next portion, with their mini-batches, or None once the budget in
        steps or epochs is spent."""

    def agreed_seconds(self, claim: int) -> float:
        """Return the time of a claim on the engine's clock. It is the same for all learners of the sync group."""

    def reach(self, portion: int) -> None:
        """Wait until it is known whether there is a checkpoint barrier before `portion`. Any thread may call this
        method."""

    def done(self, ticket: Ticket) -> None:
        """Record that a mini-batch is done, which means that the strategy has used its gradient."""


class CourseLearner(ReplicaLearner):
    """A learner that trains on the tickets of a workload, from its first claim to the end of a membership, on every
    engine. It begins in the state of its `life`.

    An engine's learner first sets the attributes below. Its `rank` and `world` are those that the strategy sees. The
    constructor takes the rank among all learners of the membership, and their number; with islands, these differ from
    `rank` and `world`.
    """

    batches: BatchSource
    rounds: Rounds
    cut_agreement: CutAgreement
    """Agreement on cuts. A state at a checkpoint barrier is saved once the states of all learners include the same
    averaging rounds."""
    shard_of_island: ShardOfIsland | None = None
    """Part of the model that the learner's weights hold; None if they hold the whole model."""
    now: Callable[[], float]
    """Seconds since the membership began, on the engine's clock."""

    def __init__(
        self, job: Job, rank: int, world: int, life: Life, tickets: SyncGroupTickets, observer: Observer
    ) -> None:
        start, replica = life.state, self.replica
        job.validate(world)
        self.job, self.life, self.tickets, self.most_not_finite = job, life, tickets, job.most_not_finite
        self.barriers = Barriers(tickets, job.checkpoint_every)
        self._ahead: deque[Barrier] = deque()  # barriers that another learner's push has reached, but not passed here
        self._reaching = threading.Lock()
        self.num_done = 0  # number of this learner's claims that are done
        self.newest_claim: Sequence[Loaded] = ()  # the claimed tickets with their mini-batches
        self.unused: frozenset[int] = frozenset()  # the numbers of the parameters that the newest gradient left out
        self.is_recorded_saving = life.script is None or life.script.saves
        """Whether the copying of states takes turns in the learner's order."""
        self.recorded = None if life.script is None else life.script.claimed(tickets)
        """The portions that the learner claims if it follows a record, each with the training time of its claim."""
        self._observer = observer
        if observer.records:
            tell = partial(observer.on_event, life.name, "turns")
            replica.order = self._make_order(lambda turns: tell(turns=turns))
        self.own_shards = HeldShards(self, self._set_rates, start.shards if start else ())
        sync_groups = job.sync_groups(world)
        self.is_worker = rank < sync_groups.num_workers
        self.claimers = sync_groups.of(rank)  # the learners that claim mini-batches together
        self._rank, self._world = rank, world
        self._weight = tickets.weight(rank - self.claimers.start)
        self._is_reporting = rank % job.island.tensor == 0  # for all learners that compute its mini-batches
        # learners save at once if the model is in memory that they share or on a server that adds gradients
        is_cut = job.strategy.steps_itself and observer.saves and not replica.weights.is_meta
        is_cut = is_cut and sync_groups.size < sync_groups.num_workers
        self.cuts = self.rounds.cuts = Cuts(replica, self.cut_agreement, self.is_recorded_saving) if is_cut else None
        """States at checkpoint barriers that have not been saved yet."""
        if self.cuts is not None:
            self.cuts.on_cut = lambda barrier, cut, turn: observer.on_event(
                life.name, "cut", barrier=barrier, round=cut, turn=turn
            )
        self.is_served = job.strategy.is_served
        self.has_common_state = job.strategy.has_common_state(job.options)
        if job.strategy.compresses_gradients(job.options):
            replica.sometimes_unused.update(range(len(replica.parameters)))
        self._minutes_before = start.minutes if start else 0.0
        self._loss = 0.0  # loss of the newest gradient
        self._losses: tuple[float, ...] = ()  # losses of its mini-batches, if there are several
        self._open: deque[Sequence[Loaded]] = deque()  # claimed tickets that are not done
        self._epochs = self._fraction = 0.0
        self._rate = (
            0.0  # the learning rate of the claimed mini-batch, in units of its peak; before that, of the newest step
        )
        self._portion = 0
        self.statistics.num_claimed = self.statistics.not_finite_in_a_row = 0
        self._epoch_begin = self.now() - self.statistics.seconds
        self._last_end: int | None = None  # the portion before which an epoch ended last
        self._run_end: int | None = None  # the portion before which the run ends
        self._over: tuple[float, Spent] | None = None  # when its last claim was done, and the time spent until then
        if start is not None:
            if start.weights.shape != replica.weights.shape:
                raise CheckpointError(
                    f"learner {rank}: the checkpoint holds {start.weights.numel()} weights, the model has "
                    f"{replica.weights.numel()}; resume with the model that was trained"
                )
            replica.restore(start.weights.to(replica.weights.device), start.optimizer, start.strategy)
            self._rate = replica.newest_factor

    def record_membership(self, membership: Membership, plan: MembershipStart) -> None:
        """Record the membership that begins, the arithmetic of this learner's device, and the weights with which it
        begins."""
        self._observer.on_event(
            self.life.name,
            "membership",
            number=membership.number,
            members=membership.members,
            plan=asdict(plan),
            saves=self._observer.saves,
            ordered=self.sums_in_order,
            **arithmetic(self.replica.weights.device),
        )
        self._record_weights(plan.position, self.replica.weights.detach())

    @property
    def sums_in_order(self) -> bool:
        """Whether the learners' gradients are added in rank order. A backend may add them in a different order."""
        return True

    @property
    @abstractmethod
    def is_behind(self) -> bool:
        """Whether the caller is the learner's background."""

    @abstractmethod
    def named_buffers(self) -> dict[str, Tensor]:
        """Return the model's buffers by name."""

    @abstractmethod
    def suffer(self, fault: Fault) -> None:
        """Carry out an injected fault."""

    def consensus_distance(self) -> float | None:
        """Return (1/L) sum_l |w_l - mean|^2, or None if the engine does not know it, because it requires the weights of
        all learners."""
        return None

    @property
    def _minutes(self) -> float:
        """Training time so far."""
        return self._minutes_before + self.now() / 60.0

    @property
    def step_metadata(self) -> Tensor:
        """The learning-rate factor and the portion of the claimed mini-batch."""
        return torch.tensor([self._rate, self._portion], dtype=torch.float64)

    def _set_rates(self, optimizer: Optimizer, peaks: Sequence[float], step_metadata: Tensor, scale: float) -> None:
        """Set the learning rates of a model shard's optimizer."""
        factor, portion = step_metadata.tolist()
        if self.cuts is not None:
            self.batches.reach(int(portion))
            self._reach(int(portion))
        if not self.is_worker:  # a server learns the progress of the run only from step metadata
            self._pass_barriers(int(portion))
        for group, peak in zip(optimizer.param_groups if peaks else (), peaks, strict=True):
            group["lr"] = peak * factor * scale

    def learning_rate(self, piece: slice | None = None) -> float | Tensor:
        return self._rate

    def step(self, gradient: Tensor, read_at: int | None = None, scale: float = 1.0) -> None:
        when = self.gradient_version if read_at is None else read_at
        self.statistics.averaging.staleness[self.replica.version - when] += 1
        rate = self._rate * scale
        if self._weight != 1.0 and self._is_own(gradient):
            gradient, rate = gradient / self._weight, rate * self._weight
        self.count_finite(self.replica.step(gradient, rate))
        self.statistics.unshared.num_steps += 1
        if self.job.strategy.steps_itself:
            self._finish_ticket()

    def _is_own(self, gradient: Tensor) -> bool:
        """Return whether this is the newest gradient of this learner alone, and not a mean. With batch shares, the step
        is then scaled by the learner's share, because an optimizer such as Adam ignores a gradient's scale."""
        is_mean = self.is_averaged or self.job.strategy.averages_gradients(self.job.options)
        return not is_mean and gradient.data_ptr() == self.replica.gradients.data_ptr()

    def not_finite(self) -> str:
        ticket, _ = self.claimed()[0]
        number = f"mini-batch {ticket.index + 1} of epoch {ticket.epoch + 1}"
        what = f"the gradient of {number} is not finite"
        if not math.isfinite(self._loss):
            what = f"the loss of {number} is {self._loss}"
        return (
            f"learner {self._rank}: {what}, and its last {self.most_not_finite} gradients were not finite; lower the "
            "learning rate, clip gradients or use a longer warm-up, and resume from an earlier checkpoint"
        )

    def _finish_ticket(self) -> None:
        if self._open:
            self.num_done += 1
            for ticket, _ in self._open.popleft():
                self.batches.done(ticket)

    def mini_batch(self, worker: int, step_metadata: Tensor) -> int | None:
        return self.tickets.ticket(int(step_metadata[1]), worker % len(self.tickets.places)).step

    def keep(self, piece: slice, make_optimizer: MakeOptimizer | None = None) -> Shard:
        return self.own_shards.keep(piece, make_optimizer)

    def claim(self) -> bool:
        if not self.job.strategy.steps_itself:
            self._finish_ticket()
        if self._over is not None or not self.is_worker:
            return False
        if self.statistics.num_claimed == 0:
            self.own_shards.forget_saved()
        minutes, loaded = self.minutes_of_claim(), None
        if minutes is None or minutes < (self.job.budget.minutes or 0.0):
            loaded = self.batches.next(self.statistics.num_claimed)
        if loaded is None:
            self.order.ended()
            self._over = self.now(), self.statistics.spent
            self.statistics.spent = Spent()  # time after the last claim is not training time
            return False
        self.newest_claim = loaded
        self._open.append(loaded)
        self.statistics.num_claimed += 1
        self._portion = self.tickets.number_of(loaded[0][0])
        self._pass_barriers(self._portion)
        self.statistics.num_steps += self._is_reporting
        progress, following = self.tickets.around(self._portion, self._minutes_before if minutes is None else minutes)
        self._epochs, self._fraction = progress.epochs, self.job.budget.fraction(progress)
        self._rate = self.job.schedule.at(progress, self.job.budget, following)
        if (order := self.replica.order).turns:
            order.flush()
        for ticket, batch in loaded if self._is_reporting else ():
            ids = tuple(name for examples in batch for name in getattr(examples, "ids", ()))
            skipped = tuple(each for examples in batch for each in getattr(examples, "skipped", ()))
            self._observer.on_claim(ClaimReport(self.life.name, ticket, ids, skipped, minutes))
        return True

    def _make_order(self, tell: Callable[[str], None]) -> Order:
        """Create the order of the learner's activities. The order passes its turns to `tell`."""
        return RecordedOrder(lambda: self.is_behind, tell)

    def minutes_of_claim(self) -> float | None:
        """Return the training time of the claim that is under way, or None if no budget depends on time. The time is
        the same for all learners of the sync group."""
        if self.job.budget.minutes is None:
            return None
        if self.recorded is not None:
            number = self.statistics.num_claimed
            return self.recorded[number][1] if number < len(self.recorded) else None
        return self._minutes_before + self.batches.agreed_seconds(self.statistics.num_claimed) / 60.0

    def begin_gradient(self) -> Sequence[Loaded]:
        """Begin a gradient of the claimed mini-batches at the present weights."""
        self.gradient_version, self.is_averaged = self.replica.version, False
        return self.claimed()

    def claimed(self) -> Sequence[Loaded]:
        """Return the claimed tickets and their mini-batches. There is one ticket unless learners have batch shares."""
        if not self.newest_claim:
            raise ProtocolError(f"learner {self._rank} asked for a gradient before it claimed a mini-batch")
        return self.newest_claim

    def end_membership(self, membership: int) -> None:
        """Save in the learner's `Life` the state that it needs in the next membership, after membership number
        `membership` has ended."""
        self.order.left()
        self.life.past = Past(membership, self.num_done, self._minutes, counted(self.replica.strategy_state))
        self.life.state = self.state(Position()).copy()
        self.statistics.seconds = self.now() - self._epoch_begin

    def finish(self, num_portions: int, undone: Collection[int] = ()) -> LearnerState:
        """Report the end of the run, and return the final state. Of the `num_portions` portions that all learners
        claimed, all except those in `undone` are done."""
        self.order.flush()
        self.barriers.end_at(num_portions)
        self._run_end = num_portions
        if self.cuts is not None:
            self.cuts.save(is_over=True)
        self._pass_barriers(min([num_portions, *undone]))
        state = self.state(self.tickets.position(num_portions, undone))
        if undone or self._last_end != num_portions:
            epoch = next((each.ended[0] for each in self._ahead if each.ended), self.barriers.epoch)
            self._end_epoch(epoch, state, is_last=True)
        return state

    def state(self, position: Position, epochs_ended: int | None = None) -> LearnerState:
        """Return this learner's state for continuing from `position`. The state shares memory with the learner. Call
        this method between two mini-batches."""
        state = LearnerState(
            rank=self._rank,
            world=self._world,
            position=position,
            epochs_ended=epochs_ended,
            minutes=self._minutes,
            weights=self.replica.on_host(),
            buffers={name: buffer.detach().cpu() for name, buffer in self.named_buffers().items()},
            optimizer=self.replica.optimizer.state_dict(),
            strategy=dict(self.replica.strategy_state),
            shard_of_island=self.shard_of_island,
            of_strategy=self.job.strategy.described(self.job.options),
            is_worker=self.is_worker,
        )
        return self.own_shards.added_to(state, self.is_worker and self.job.strategy.steps_itself)

    def _pass_barriers(self, portion: int) -> None:
        """Pass all checkpoint barriers up to `portion`. There are several if this learner had no mini-batch between
        them. Save the states that are now complete."""
        if not self.is_worker:  # a worker has already waited when the portion was drawn
            self.batches.reach(portion)
        self._reach(portion)
        while self._ahead and self._ahead[0].number <= portion:
            barrier = self._ahead.popleft()
            ended = barrier.ended[-1] + 1 if barrier.ended else None
            state = self._save(self.state(self.tickets.position(barrier.number), ended), barrier)
            for epoch in barrier.ended:
                self._end_epoch(epoch, state, is_last=barrier.number == self._run_end)
                self._last_end = barrier.number
        if self.cuts is not None:
            self.cuts.save()

    def _save(self, state: LearnerState, barrier: Barrier) -> LearnerState:
        """Save the state at a barrier within an epoch, or a state that is completed only later. Return the state."""
        cuts, number = self.cuts, barrier.number

        def save(complete: LearnerState) -> None:
            self._record_weights(complete.position, complete.weights)
            self._observer.on_barrier(complete)

        forks = None
        if cuts is not None and self.job.strategy.is_served:
            forks = partial(self.own_shards.with_forks, portion=number)
        if cuts is not None and self._run_end is None:
            cuts.add(state, save, forks)
            return replace(state, is_complete=False)
        if forks is not None:  # at the end of a run all rounds and pushes have already arrived
            state = forks(state)
        if not barrier.ended:
            save(state)
        return state

    def _reach(self, portion: int) -> None:
        """Find the barriers up to `portion`. At each barrier a server copies its model shards before it applies a push
        from after the barrier. Both the foreground and the background call this method."""
        if self.cuts is None or not self.job.strategy.is_served:
            with self._reaching:
                self._ahead.extend(self.barriers.until(portion))
            return
        with self.own_shards.in_turn(), self._reaching:
            for barrier in self.barriers.until(portion):
                self.own_shards.fork(barrier.number)
                self._ahead.append(barrier)

    def _end_epoch(self, epoch: int, state: LearnerState, is_last: bool) -> None:
        statistics = self.statistics
        now, spent = self._over or (self.now(), statistics.spent)
        self._over = self._over and (now, Spent())
        with statistics.lock:
            averaging, statistics.averaging = statistics.averaging, Averaging()
        report = EpochReport(
            rank=self.life.name,
            epoch=epoch,
            num_steps=statistics.num_steps,
            seconds=now - self._epoch_begin,
            spent=spent,
            averaging=averaging,
            consensus_distance=self.consensus_distance(),
            num_not_finite=statistics.num_not_finite,
            is_last=is_last,
        )
        statistics.num_not_finite = 0
        if state.is_complete:
            self._record_weights(state.position, state.weights)
        self._observer.on_epoch(report, state)
        statistics.spent, statistics.num_steps, self._epoch_begin = Spent(), 0, now

    def _record_weights(self, position: Position, weights: Tensor) -> None:
        """Record the hash of `weights`, with which a replay is checked."""
        if self._observer.records and not weights.is_meta:
            self.replica.order.flush()  # a learner may be killed before it sends anything
            self._observer.on_event(self.life.name, "state", step=position.num_done, sha256=sha256_of(weights))

    def gradient_task(self) -> tuple[GradientTask, list[Sequence[Examples]]]:
        """Carry out injected faults, and return the task of the gradient of the claimed mini-batches, and these
        mini-batches."""
        tickets, batches = zip(*self.claimed(), strict=True)
        faults = next(self.life.faults)
        for fault in faults:
            if not isinstance(fault, NotFinite):
                self.suffer(fault)
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
    ) -> float:
        """Compute the gradient of the claimed mini-batches in `flat.gradients`, and return its loss; see
        `starling.training.gradient`."""
        task, batches = self.gradient_task()
        computed = compute_gradient(self.job, task, batches, model, flat, before_last, must_reach_all)
        self.computed(computed)
        return computed.loss

    def computed(self, computed: Computed) -> None:
        """Record the by-products of a gradient of this learner."""
        self.unused, self._losses = computed.unused, computed.losses
        self.replica.sometimes_unused |= computed.unused

    def _sizes_and_factor(self) -> tuple[tuple[float, ...], float]:
        """Return the weight of each claimed mini-batch in this learner's gradient, and the factor of this gradient.
        With this factor, the unweighted mean over the sync group equals the weighted mean over all mini-batches of the
        portion.

        No communication is needed, because every member knows the others' tickets, and their sizes from the plan.
        """
        unit, member, shares = self.job.weighting, self._rank - self.claimers.start, self.tickets.shares
        sizes = [(1.0,) * share for share in shares]
        if unit != "batches" and self.tickets.portion_size > 1:
            planned = [self._sizes_of(other, unit) for other in range(len(shares))]
            sizes = planned if any(map(any, planned)) else sizes
        return sizes[member], len(sizes) * sum(sizes[member]) / sum(map(sum, sizes))

    def _sizes_of(self, member: int, unit: Unit) -> tuple[float, ...]:
        """Return the planned sizes of a member's mini-batches in this portion. These come from that member's part of
        the data."""
        tickets = self.tickets.tickets(self._portion, member)
        parts = self.tickets.parts(self.claimers.start + member)
        of_parts = [replace(ticket, part=part) for ticket, part in zip(tickets, parts, strict=False)]
        return tuple(self.job.workload.planned_size(ticket, unit) for ticket in of_parts)

    def report_step(self, loss: float) -> None:
        """Report the claimed mini-batches and their loss."""
        self._loss = loss
        claimed = self.claimed()
        losses = self._losses or (loss,) * len(claimed)
        for (ticket, batch), own in zip(claimed, losses, strict=True) if self._is_reporting else ():
            report = StepReport(
                rank=self.life.name,
                ticket=ticket,
                num_batches=self.tickets.sequence.num_batches(ticket.epoch),
                fraction=self._fraction,
                minutes=self._minutes,
                loss=own,
                learning_rate=self.replica.learning_rate(self._rate),
                num_examples=sum(examples.num_examples for examples in batch),
                num_frames=sum(examples.num_frames for examples in batch),
                audio_seconds=sum(examples.seconds for examples in batch),
                spent=self.statistics.spent_now(),
                unshared=None if self.job.strategy.has_one_model else self.statistics.unshared,
            )
            self._observer.on_step(report)
