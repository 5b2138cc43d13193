"""What is the same for a learner on both engines: claiming, the gradient's arithmetic, reports."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from starling.chance import derive_seed
from starling.checkpoint.state import LearnerState
from starling.engines.flat import FlatModel
from starling.engines.job import EpochReport, Job, Observer, Spent, StepReport
from starling.engines.loading import Loaded
from starling.engines.replica import Replica
from starling.engines.tickets import TicketSequence
from starling.errors import CheckpointError, NonFiniteError, ProtocolError
from starling.learner import Learner
from starling.workload import Examples, Ticket

FIRST_TICKET = Ticket(epoch=0, index=0, step=0)


class EngineLearner(Learner):
    """A learner of a synchronous strategy on some engine; a subclass brings the clock, the batches and the peers."""

    def __init__(
        self,
        job: Job,
        rank: int,
        world: int,
        replica: Replica,
        observer: Observer,
        start: LearnerState | None,
    ) -> None:
        self.job = job
        self.replica = replica
        self.spent = Spent()
        self.sequence = TicketSequence(job.workload, start.position if start else FIRST_TICKET)
        self._rank, self._world = rank, world
        self._observer = observer
        self._minutes_before = start.minutes if start else 0.0
        self._next_step = start.position.step if start else 0  # the first ticket of the round to come
        self._ticket: Ticket | None = None
        self._batch: Sequence[Examples] = ()
        self._fraction = self._factor = 0.0
        self._epoch_steps, self._epoch_begin = 0, 0.0
        self._is_over = False
        if start is not None:
            if start.weights.shape != replica.weights.shape:
                raise CheckpointError(
                    f"learner {rank}: the checkpoint holds {start.weights.numel()} weights, the model has "
                    f"{replica.weights.numel()}; resume with the model that was trained"
                )
            replica.restore(start.weights.to(replica.weights.device), start.optimizer)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world(self) -> int:
        return self._world

    @property
    def weights(self) -> Tensor:
        return self.replica.weights

    def step(self, gradient: Tensor) -> None:
        self.replica.step(gradient, self._factor)

    def apply(self, delta: Tensor) -> None:
        self.replica.apply(delta)

    def replace(self, weights: Tensor) -> None:
        self.replica.replace(weights)

    def snapshot(self) -> Tensor:
        return self.replica.snapshot()

    @abstractmethod
    def now(self) -> float:
        """Seconds since the engine began, on its clock."""

    @abstractmethod
    def _agreed_seconds(self, step: int) -> float:
        """`now()` of the round that begins with ticket `step`, the same for every learner of it."""

    @abstractmethod
    def _next_batch(self) -> Loaded | None:
        """The next ticket of this learner with its mini-batch; None after the last."""

    @abstractmethod
    def _buffers(self) -> dict[str, Tensor]:
        """The model's buffers by name."""

    def claim(self) -> bool:
        if self._is_over:
            return False
        minutes = self._minutes_before
        if self.job.budget.minutes is not None:
            minutes += self._agreed_seconds(self._next_step) / 60.0
        progress = self.sequence.progress(self.sequence[self._next_step], minutes)
        loaded = None if self.job.budget.is_spent(progress) else self._next_batch()
        if self._ticket is not None and (loaded is None or loaded[0].epoch > self._ticket.epoch):
            self._end_epoch(self._ticket.epoch)
        elif loaded is None:
            self._end_epoch(self.sequence[self._next_step].epoch)
        if loaded is None:
            self._is_over = True
            return False
        self._ticket, self._batch = loaded
        self._next_step += self._world
        self._epoch_steps += 1
        self._fraction = self.job.budget.fraction(progress)
        self._factor = self.job.schedule.factor(self._fraction, progress.epochs)
        return True

    def state(self) -> LearnerState:
        """What this learner needs to go on later; valid between two mini-batches."""
        return LearnerState(
            rank=self._rank,
            world=self._world,
            position=self.sequence[self._next_step],
            minutes=self._minutes_before + self.now() / 60.0,
            weights=self.replica.weights.detach().cpu(),
            buffers={name: buffer.detach().cpu() for name, buffer in self._buffers().items()},
            optimizer=self.replica.optimizer.state_dict(),
        )

    def check_peer(self, peer: int) -> None:
        """`ProtocolError` unless `peer` is another learner."""
        if peer == self._rank or not 0 <= peer < self._world:
            raise ProtocolError(
                f"learner {self._rank} cannot exchange with learner {peer} among {self._world} learners"
            )

    def check_mean(self, vector: Tensor) -> None:
        """`ProtocolError` unless `vector` is `[P]`, of the weights' dtype; gloo would abort the whole process."""
        own = self.weights
        if vector.shape != own.shape or vector.dtype != own.dtype:
            raise ProtocolError(
                f"learner {self._rank} cannot average {vector.dtype} {list(vector.shape)}: "
                f"its weights are {own.dtype} {list(own.shape)}"
            )

    def changed_beneath(self) -> ProtocolError:
        """The error of a strategy that changes weights while it computes at them."""
        return ProtocolError(
            f"learner {self._rank}: its weights changed while a gradient at `weights` was under way; "
            "take the gradient at `snapshot()` instead"
        )

    def _end_epoch(self, epoch: int) -> None:
        seconds = self.now() - self._epoch_begin
        report = EpochReport(self._rank, epoch, self._epoch_steps, seconds, self.spent)
        self._observer.on_epoch(report, self.state())
        self.spent = Spent()
        self._epoch_steps, self._epoch_begin = 0, self.now()

    def _claimed(self) -> tuple[Ticket, Sequence[Examples]]:
        if self._ticket is None:
            raise ProtocolError(f"learner {self._rank} asked for a gradient before it claimed a mini-batch")
        return self._ticket, self._batch

    def compute_gradient(
        self,
        model: nn.Module,
        flat: FlatModel,
        before_last: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> float:
        """Leave the claimed mini-batch's gradient in `flat.gradients`; the loss.

        Every micro-batch but the last is computed inside `before_last()`.
        """
        ticket, batch = self._claimed()
        device = flat.weights.device
        flat.gradients.zero_()
        total = 0.0
        for place, examples in enumerate(batch):
            _seed(device, derive_seed(self.job.seed, "gradient", ticket.epoch, ticket.index, place))
            with nullcontext() if place == len(batch) - 1 else before_last():
                with torch.autocast(device.type, torch.bfloat16) if self.job.autocast else nullcontext():
                    loss = self.job.workload.loss(model, examples.to(device))
                (loss / len(batch)).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return self._finite(total / len(batch), ticket)

    def _finite(self, loss: float, ticket: Ticket) -> float:
        if loss - loss != 0.0:
            raise NonFiniteError(
                f"learner {self._rank}: the loss of mini-batch {ticket.index + 1} of epoch {ticket.epoch + 1} is "
                f"{loss}; lower the learning rate, clip gradients or warm up for longer"
            )
        return loss

    def report_step(self, loss: float) -> None:
        ticket, batch = self._claimed()
        self._observer.on_step(
            StepReport(
                rank=self._rank,
                ticket=ticket,
                num_batches=self.sequence.num_batches(ticket.epoch),
                fraction=self._fraction,
                minutes=self._minutes_before + self.now() / 60.0,
                loss=loss,
                learning_rate=self.replica.learning_rate(self._factor),
                num_examples=sum(examples.num_examples for examples in batch),
                num_frames=sum(examples.num_frames for examples in batch),
                audio_seconds=sum(examples.seconds for examples in batch),
            )
        )


def given_away(rank: int) -> ProtocolError:
    """The error of a strategy that awaits a gradient which `mean` has taken."""
    return ProtocolError(
        f"learner {rank} awaited a gradient that it had given to `mean`; await the mean, or the gradient before it"
    )


def _seed(device: torch.device, seed: int) -> None:
    """Seed what dropout draws from; `torch.manual_seed` takes a millisecond, for devices that are not there."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
