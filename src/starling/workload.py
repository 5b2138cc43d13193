"""The interface of workloads: a model, its mini-batches and its loss, for speech recognition or any other task."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, Protocol, Self, TypeVar

from pydantic import Field

from starling.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Number = Annotated[int, Field(ge=0)]
Unit = Literal["utterances", "frames"]
"""The unit in which the size of a mini-batch is counted. "utterances" counts the examples of any task."""
Weighting = Literal["batches", Unit]
"""How mini-batches are weighted in the mean gradient of learners that step together: equally (`batches`), or in
proportion to their size in a unit."""


class Examples(Protocol):
    """A micro-batch: training examples that are ready for the model, together with their sizes, which are logged."""

    @property
    def num_examples(self) -> int: ...

    @property
    def num_frames(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    def to(self, device: torch.device) -> Self: ...


ExamplesT = TypeVar("ExamplesT", bound=Examples)


@dataclass(frozen=True)
class Ticket:
    """The right to compute one mini-batch. Every ticket is handed out exactly once.

    `epoch` and `index` identify the mini-batch; `step` is the number of earlier tickets in the run. `part` is the part
    of a divided data set from which the mini-batch is drawn.
    """

    epoch: Number
    """Number of the epoch, from 0."""
    index: Number
    """Number of the mini-batch in its epoch, from 0."""
    step: Number
    """Number of earlier tickets in the run."""
    part: Annotated[int, Field(exclude=True)] = 0
    """Number of the part of a divided data set; 0 if the data are not divided. It is not written to files."""


@dataclass(frozen=True)
class Position:
    """The data position of a run. Every ticket before `next_ticket` is completed, except the `outstanding` ones."""

    next_ticket: Ticket = Ticket(epoch=0, index=0, step=0)
    """The first ticket that has not been handed out yet."""
    outstanding: tuple[Ticket, ...] = ()
    """Tickets that were handed out but not completed, in order. A run that resumes from this position re-issues them
    first."""

    @property
    def num_done(self) -> int:
        """The number of mini-batches that the run has completed."""
        return self.next_ticket.step - len(self.outstanding)


class Workload(ABC, Generic[ExamplesT]):
    """A model, its loss and its data. The workload is the same on every learner. The content of a mini-batch depends
    only on its ticket, not on the number of learners or on the learner that computes it."""

    num_parts: int = 1
    """Number of parts into which the data are divided. Learner r draws from part `r % num_parts`. Studies of divided
    data use more than one part."""

    @abstractmethod
    def make_model(self) -> nn.Module:
        """Make a model on the CPU. Every call must return bit-identical weights."""

    @abstractmethod
    def num_batches(self, epoch: int) -> int:
        """Return the number of mini-batches in an epoch, which must be at least 1."""

    @abstractmethod
    def load(self, ticket: Ticket) -> Sequence[ExamplesT]:
        """Load the micro-batches of a ticket's mini-batch on the CPU. Learners may call this in a loading process."""

    @abstractmethod
    def loss(self, model: nn.Module, examples: ExamplesT) -> Tensor:
        """Return the scalar to minimise. It must be a mean over terms, whose number `weight` returns for the same
        `examples`."""

    def weight(self, examples: ExamplesT) -> float:
        """Return the weight of a micro-batch: the number of terms over which `loss` is a mean. By default, this is the
        number of examples.

        The loss of a mini-batch is the weighted mean of the losses of its micro-batches. It therefore equals the loss
        of the undivided mini-batch. A micro-batch of weight 0 is skipped.
        """
        return float(examples.num_examples)

    def planned_size(self, ticket: Ticket, unit: Unit) -> float:
        """Return the size of a ticket's mini-batch without loading the data. The result is the same on every learner.

        Learners use the sizes of each other's mini-batches to weight gradients without communicating. Raises
        ConfigError unless the workload overrides this method.
        """
        raise ConfigError(
            f"{type(self).__name__} does not know the {unit} of a mini-batch before it is loaded, but weighting: "
            f"{unit} needs them; define planned_size, or choose weighting: batches"
        )


def mean_loss(model: nn.Module, workload: Workload[Any]) -> float:
    """Return the mean loss of a model, on the CPU, over the mini-batches of the first epoch."""
    import torch

    batches = [each for index in range(workload.num_batches(0)) for each in workload.load(Ticket(0, index, index))]
    weights = [workload.weight(each) for each in batches]
    with torch.no_grad():
        losses = [weight * float(workload.loss(model, each)) for weight, each in zip(weights, batches, strict=True)]
    return math.fsum(losses) / math.fsum(weights)
