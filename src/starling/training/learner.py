"""What is the same for a learner of a job on both engines: claiming, the gradient's arithmetic, reports."""

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from starling.budget import Progress
from starling.chance import derive_seed
from starling.checkpoint.state import LearnerState
from starling.errors import CheckpointError, NonFiniteError, ProtocolError
from starling.training.faults import Fault, FaultsOf, NotFinite
from starling.training.flat import NO_GRADIENT, FlatModel
from starling.training.job import Averaging, EpochReport, Job, Observer, Spent, StepReport
from starling.training.loading import Loaded
from starling.training.replica import Replica
from starling.training.replica_learner import ReplicaLearner
from starling.training.stragglers import Delays
from starling.training.tickets import Marks, SyncGroupTickets
from starling.workload import Examples, Position, Ticket


@dataclass(frozen=True)
class Tally:
    """What a learner has counted since its last epoch ended."""

    num_steps: int
    seconds: float
    spent: Spent
    averaging: Averaging
    num_not_finite: int


class TrainingLearner(ReplicaLearner):
    """A learner of a job on some engine; a subclass brings the clock, the batches and the peers."""

    def __init__(
        self, job: Job, rank: int, world: int, replica: Replica, observer: Observer, start: LearnerState | None
    ) -> None:
        job.validate(world)
        super().__init__(rank, world, job.seed, job.sync_groups(world), replica)
        self.job = job
        self.tickets = SyncGroupTickets(
            job.workload, start.position if start else Position(), job.budget, job.sync_group_size(world)
        )
        self.marks = Marks(self.tickets, job.checkpoint_every)
        self.num_claimed = 0  # portions that this learner's team has claimed
        self.num_done = 0  # mini-batches of this learner
        self.delays = Delays(job.stragglers, job.seed, rank)
        self.faults = FaultsOf(job.faults, rank)
        self.part = rank % job.workload.num_parts
        self._observer = observer
        self._minutes_before = start.minutes if start else 0.0
        self._loss = 0.0  # of the newest gradient
        self._num_not_finite = self._num_not_finite_in_a_row = 0
        self._open: deque[Ticket] = deque()  # claimed and not done
        self._ticket: Ticket | None = None
        self._batch: Sequence[Examples] = ()
        self._fraction = self._factor = 0.0
        self._portion = 0
        self._epoch_steps, self._epoch_begin = 0, 0.0
        self._last_end: int | None = None  # the portion before which an epoch ended last
        self._run_end: int | None = None  # the portion before which the run ends
        self._over_at: float | None = None
        self._spent_when_over = Spent()
        if start is not None:
            if start.weights.shape != replica.weights.shape:
                raise CheckpointError(
                    f"learner {rank}: the checkpoint holds {start.weights.numel()} weights, the model has "
                    f"{replica.weights.numel()}; resume with the model that was trained"
                )
            replica.restore(start.weights.to(replica.weights.device), start.optimizer)
            self.saved_shards = {(shard.start, shard.stop): shard for shard in start.shards}

    @abstractmethod
    def now(self) -> float:
        """Seconds since the engine began, on its clock."""

    @abstractmethod
    def _agreed_seconds(self) -> float:
        """`now()` of the claim to come, the same for every learner of the team."""

    @abstractmethod
    def _next_batch(self) -> Loaded | None:
        """The next ticket of this learner with its mini-batch; None after the last."""

    @abstractmethod
    def _buffers(self) -> dict[str, Tensor]:
        """The model's buffers by name."""

    @abstractmethod
    def _consensus_distance(self) -> float | None:
        """(1/L) sum_l |w_l - mean|^2, if the engine knows it."""

    @property
    def step_metadata(self) -> Tensor:
        return torch.tensor([self._factor, self._portion], dtype=torch.float64)

    @property
    def num_gradients(self) -> int:
        return self.num_claimed

    def set_rates(self, optimizer: Optimizer, peaks: Sequence[float], step_metadata: Tensor, scale: float) -> None:
        factor, portion = step_metadata.tolist()
        if not self.is_worker:  # nothing else tells it how far the run has come
            self._pass_marks(int(portion))
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor * scale

    def _step(self, gradient: Tensor) -> None:
        self._look_at_gradient(self.replica.step(gradient, self._factor))
        if self.job.strategy.steps_itself:
            self._finish_ticket()

    def _look_at_gradient(self, is_finite: bool) -> None:
        """Count gradients that were not finite, and so did nothing. Raises NonFiniteError after many in a row."""
        self._num_not_finite_in_a_row = 0 if is_finite else self._num_not_finite_in_a_row + 1
        self._num_not_finite += not is_finite
        if self._num_not_finite_in_a_row == self.job.most_not_finite:
            ticket, _ = self._claimed()
            number = f"mini-batch {ticket.index + 1} of epoch {ticket.epoch + 1}"
            what = f"the gradient of {number} is not finite"
            if not math.isfinite(self._loss):
                what = f"the loss of {number} is {self._loss}"
            raise NonFiniteError(
                f"learner {self._rank}: {what}, as was every gradient of its last {self.job.most_not_finite}; lower "
                "the learning rate, clip gradients or warm up for longer, and resume from a checkpoint before this"
            )

    def _finish_ticket(self) -> None:
        if self._open:
            self.num_done += 1
            self._note_done(self._open.popleft())

    def _note_done(self, ticket: Ticket) -> None:
        """This learner has done a mini-batch: its gradient is where the strategy brings it."""

    def claim(self) -> bool:
        if not self.job.strategy.steps_itself:
            self._finish_ticket()
        if self._over_at is not None or not self.is_worker:
            return False
        self.saved_shards.clear()  # who keeps some has taken them
        minutes, loaded = self._minutes_before, None
        if self.job.budget.minutes is not None:
            minutes += self._agreed_seconds() / 60.0
        if not self.job.budget.is_spent(Progress(0, 0.0, minutes)):
            loaded = self._next_batch()
        if loaded is None:
            self._over_at, self._spent_when_over = self.now(), self.spent
            self.spent = Spent()  # what comes now is not training
            return False
        ticket, _ = self._ticket, self._batch = loaded
        self._open.append(ticket)
        self.num_claimed += 1
        self._portion = self.tickets.number_of(ticket)
        self._pass_marks(self._portion)
        self._epoch_steps += 1
        progress = self.tickets.progress(self._portion, minutes)
        self._fraction = self.job.budget.fraction(progress)
        following = self.tickets.progress(self._portion + 1, minutes)
        self._factor = self.job.schedule.at(progress, self.job.budget, following)
        return True

    def tally(self) -> Tally:
        """What this learner has counted in the epoch that it is in."""
        with self.counting:
            seconds = self.now() - self._epoch_begin
            return Tally(self._epoch_steps, seconds, self.spent, self.averaging, self._num_not_finite)

    def count_on(self, tally: Tally) -> None:
        """Go on counting where another had stopped."""
        self._epoch_steps, self._num_not_finite = tally.num_steps, tally.num_not_finite
        self._epoch_begin = self.now() - tally.seconds
        self.spent, self.averaging = tally.spent, tally.averaging

    def finish(self, num_portions: int, undone: Collection[int] = ()) -> LearnerState:
        """Report the end of the run, when all learners together were handed out `num_portions` and did all but
        `undone` ones; the final state."""
        self.marks.end_at(num_portions)
        self._run_end = num_portions
        self._pass_marks(min([num_portions, *undone]))
        state = self.state(self.tickets.position(num_portions, undone))
        if undone or self._last_end != num_portions:
            self._end_epoch(self.marks.epoch, state, is_last=True)
        return state

    def state(self, position: Position, epochs_ended: int | None = None) -> LearnerState:
        """What this learner needs to go on from `standing` later; valid between two mini-batches."""
        weights, shards = self.replica.on_host(), tuple(shard.state() for shard in self.shards)
        if shards:
            weights = weights.clone()
            for shard in shards:
                weights[shard.start : shard.stop] = shard.weights
        return LearnerState(
            rank=self._rank,
            world=self._world,
            position=position,
            epochs_ended=epochs_ended,
            minutes=self._minutes_before + self.now() / 60.0,
            weights=weights,
            buffers={name: buffer.detach().cpu() for name, buffer in self._buffers().items()},
            optimizer=self.replica.optimizer.state_dict(),
            shards=shards,
            is_worker=self.is_worker,
        )

    def _pass_marks(self, portion: int) -> None:
        """Pass the marks up to a portion; a slow learner may have had no mini-batch between some of them."""
        for mark in self.marks.until(portion):
            position = self.tickets.position(mark.number)
            if not mark.ended:
                self._observer.on_mark(self.state(position))
                continue
            state = self.state(position, epochs_ended=mark.ended[-1] + 1)
            for epoch in mark.ended:
                self._end_epoch(epoch, state, is_last=mark.number == self._run_end)
            self._last_end = mark.number

    def _end_epoch(self, epoch: int, state: LearnerState, is_last: bool) -> None:
        now, spent = self.now(), self.spent
        if self._over_at is not None:
            now, spent = self._over_at, self._spent_when_over
            self._spent_when_over = Spent()
        with self.counting:
            averaging, self.averaging = self.averaging, Averaging()
        report = EpochReport(
            rank=self._rank,
            epoch=epoch,
            num_steps=self._epoch_steps,
            seconds=now - self._epoch_begin,
            spent=spent,
            averaging=averaging,
            consensus_distance=self._consensus_distance(),
            num_not_finite=self._num_not_finite,
            is_last=is_last,
        )
        self._num_not_finite = 0
        self._observer.on_epoch(report, state)
        self.spent = Spent()
        self._epoch_steps, self._epoch_begin = 0, now

    def _claimed(self) -> tuple[Ticket, Sequence[Examples]]:
        if self._ticket is None:
            raise ProtocolError(f"learner {self._rank} asked for a gradient before it claimed a mini-batch")
        return self._ticket, self._batch

    def compute_gradient(
        self,
        model: nn.Module,
        flat: FlatModel,
        before_last: Callable[[], AbstractContextManager[Any]] = nullcontext,
        must_reach_all: bool = False,
    ) -> float:
        """Leave the claimed mini-batch's gradient in `flat.gradients`; the loss.

        Both are the mean over all micro-batches, each with its weight; those of weight 0 are not computed. The gradient
        is also multiplied by what the job's weighting says. A parameter that got no gradient has NO_GRADIENT there.
        Every micro-batch but the last is computed inside `before_last()`; with `must_reach_all` its backward reaches
        every parameter, for what waits for each (DDP).
        """
        ticket, batch = self._claimed()
        device = flat.weights.device
        flat.gradients.zero_()
        weights = [self.job.workload.weight(examples) for examples in batch]
        parts = [place for place, weight in enumerate(weights) if weight > 0.0] or [0]
        shares = [weights[place] / weights[parts[0]] if weights[place] else 1.0 for place in parts]
        total, whole, factor = 0.0, sum(shares), self._factor_in_sync_group()
        for fault in self.faults.next():
            if isinstance(fault, NotFinite):
                whole = math.nan
            else:
                self._suffer(fault)
        flat.reached()
        used: set[int] = set()
        for place, share in zip(parts, shares, strict=True):
            is_last = place == parts[-1]
            _seed(device, derive_seed(self.job.seed, "gradient", ticket.epoch, ticket.index, place))
            with nullcontext() if is_last else before_last():
                with torch.autocast(device.type, torch.bfloat16) if self.job.autocast else nullcontext():
                    loss = self.job.workload.loss(model, batch[place].to(device))
                (loss / (whole / share / factor if factor else math.inf)).backward()  # type: ignore[no-untyped-call]
                reached = flat.reached()
                used |= reached
                if is_last:
                    self._leave_out_unused(flat, used, reached, must_reach_all)
            total += share * float(loss.detach())
        return total / whole

    def _factor_in_sync_group(self) -> float:
        """What this learner's gradient is multiplied by, so that the team's plain mean is the weighted one.

        Every member knows which tickets the others have, and their sizes from the plan: none has to be sent.
        """
        unit = self.job.weighting
        if unit == "batches" or len(self.sync_group) == 1:
            return 1.0
        tickets = [self._ticket_of(self._portion, member) for member in range(len(self.sync_group))]
        sizes = [self.job.workload.planned_size(ticket, unit) for ticket in tickets]
        whole = sum(sizes)
        return len(sizes) * sizes[self.place_in_sync_group] / whole if whole else 1.0

    def _ticket_of(self, portion: int, member: int) -> Ticket:
        """The ticket of a member of this team, with the part of the data that this member sees."""
        part = (self.sync_group.start + member) % self.job.workload.num_parts
        return replace(self.tickets.ticket(portion, member), part=part)

    def _leave_out_unused(self, flat: FlatModel, used: set[int], reached: set[int], must_reach_all: bool) -> None:
        """Let the gradient say which parameters were not used; `reached` are those that the last backward reached."""
        if len(reached) == len(flat.parameters):
            return
        unused = set(range(len(flat.parameters))) - used
        self.replica.sometimes_unused |= unused
        for number in unused:
            flat.gradients_of[number].fill_(NO_GRADIENT)
        if must_reach_all:
            left = [parameter for number, parameter in enumerate(flat.parameters) if number not in reached]
            torch.autograd.backward(left, [each.new_full((), NO_GRADIENT).expand_as(each) for each in left])
            flat.reached()

    def _suffer(self, fault: Fault) -> None:
        """Let a fault on purpose happen to this learner."""

    def report_step(self, loss: float) -> None:
        ticket, batch = self._claimed()
        self._loss = loss
        self._observer.on_step(
            StepReport(
                rank=self._rank,
                ticket=ticket,
                num_batches=self.tickets.sequence.num_batches(ticket.epoch),
                fraction=self._fraction,
                minutes=self._minutes_before + self.now() / 60.0,
                loss=loss,
                learning_rate=self.replica.learning_rate(self._factor),
                num_examples=sum(examples.num_examples for examples in batch),
                num_frames=sum(examples.num_frames for examples in batch),
                audio_seconds=sum(examples.seconds for examples in batch),
                ids=tuple(name for examples in batch for name in getattr(examples, "ids", ())),
                skipped=tuple(each for examples in batch for each in getattr(examples, "skipped", ())),
            )
        )


def _seed(device: torch.device, seed: int) -> None:
    """Seed what dropout draws from; `torch.manual_seed` takes a millisecond, for devices that are not there."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
