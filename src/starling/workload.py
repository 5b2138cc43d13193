"""What learners train: a model, its mini-batches and its loss. Speech recognition is one; any PyTorch loop may be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, Protocol, Self, TypeVar

from starling.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Unit = Literal["utterances", "frames"]
"""What the size of a mini-batch is counted in; an utterance is an example."""
Weighting = Literal["batches", Unit]
"""How the mini-batches of learners that step together count: each alike, or in proportion to their size."""


class Examples(Protocol):
    """Some training examples, ready for the model; what the logs want to know about them."""

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
    """The right to compute one mini-batch; every ticket is handed out exactly once.

    `epoch` and `index` say which mini-batch; `step` counts the tickets before it since the beginning of the run.
    `part` is the part of a divided data set that it is computed on.
    """

    epoch: int
    index: int
    step: int
    part: int = 0


@dataclass(frozen=True)
class Position:
    """What all learners together have done: every ticket before `next_ticket`, except the `outstanding` ones."""

    next_ticket: Ticket = Ticket(epoch=0, index=0, step=0)
    """The first ticket that was never handed out."""
    outstanding: tuple[Ticket, ...] = ()
    """Tickets that were handed out and not done, in order; a run that continues from here issues them first."""

    @property
    def num_done(self) -> int:
        """Mini-batches done since the beginning of the run."""
        return self.next_ticket.step - len(self.outstanding)


class Workload(ABC, Generic[ExamplesT]):
    """A training problem, the same on every learner. What a mini-batch holds depends on its ticket alone, not on how
    many learners there are or who computes it."""

    num_parts: int = 1
    """Parts that the data are divided into, for studies: learner r takes its mini-batches from part r modulo this."""

    @abstractmethod
    def make_model(self) -> nn.Module:
        """A new model on the CPU, the same bits at every call."""

    @abstractmethod
    def num_batches(self, epoch: int) -> int:
        """Mini-batches in an epoch, at least 1."""

    @abstractmethod
    def load(self, ticket: Ticket) -> Sequence[ExamplesT]:
        """The micro-batches of a ticket's mini-batch, on the CPU; may run in a loading process."""

    @abstractmethod
    def loss(self, model: nn.Module, examples: ExamplesT) -> Tensor:
        """The scalar to minimise: the mean over `examples`, by what `weight` counts of them."""

    def weight(self, examples: ExamplesT) -> float:
        """How much of a mini-batch a micro-batch is: the number of what `loss` is the mean over, by default examples.

        The loss of a mini-batch is the mean of those of its micro-batches by weight, as if it were computed at once. A
        micro-batch of weight 0 is left out.
        """
        return float(examples.num_examples)

    def planned_size(self, ticket: Ticket, unit: Unit) -> float:
        """How large a ticket's mini-batch is, without loading it; the same on every learner.

        Learners ask for the sizes of each other's mini-batches, so that they can weigh gradients without a word. Raises
        ConfigError unless a workload defines it.
        """
        raise ConfigError(
            f"{type(self).__name__} does not know the {unit} of a mini-batch before it is loaded, which weighting: "
            f"{unit} needs; define its planned_size, or choose weighting: batches"
        )
