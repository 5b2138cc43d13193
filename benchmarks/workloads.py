"""Small workloads: one whose gradients take time but no processor, as on a device of its own, and one that computes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from benchmarks.perceptron import perceptron
from starling.workload import Ticket, Workload

BLOCK_SIZE = 1 << 18
"""Parameters of one block of an emulated model: a megabyte."""
BATCH_SIZE = 32
NUM_BATCHES = 8
"""Different mini-batches of the computing workload; they are drawn once, so that drawing costs neither side time."""


@dataclass(frozen=True)
class Batch:
    """Inputs `[B, D]` and targets `[B, E]`."""

    inputs: Tensor
    targets: Tensor

    num_frames = 0
    seconds = 0.0

    @property
    def num_examples(self) -> int:
        return len(self.inputs)

    def to(self, device: torch.device) -> Self:
        return type(self)(self.inputs.to(device), self.targets.to(device))


class _Busy(torch.autograd.Function):
    """The identity; forward and backward take their time as if a device were computing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        time.sleep(forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class _Block(nn.Module):
    """Some parameters of an emulated model; backward takes twice as long as forward, as it usually does."""

    def __init__(self, size: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Busy.apply(x + self.weight.sum(), self._seconds / 3, self._seconds * 2 / 3)
        return found


class EmulatedDevice(Workload[Batch]):
    """Gradients of `num_parameters` that take `seconds`, in blocks one after the other: what follows a block's backward
    can overlap with that of the blocks before it."""

    def __init__(self, num_parameters: int, seconds: float) -> None:
        self._num_blocks = max(1, num_parameters // BLOCK_SIZE)
        self._size, self._seconds = num_parameters // self._num_blocks, seconds / self._num_blocks

    def make_model(self) -> nn.Module:
        return nn.Sequential(*(_Block(self._size, self._seconds) for _ in range(self._num_blocks)))

    def num_batches(self, epoch: int) -> int:
        return 1 << 30

    def load(self, ticket: Ticket) -> Sequence[Batch]:
        return [Batch(torch.zeros(1, 1), torch.zeros(1, 1))]

    def loss(self, model: nn.Module, examples: Batch) -> Tensor:
        found: Tensor = model(examples.inputs).sum()
        return found


class Computing(Workload[Batch]):
    """A perceptron on random points, computed for real."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = widths

    @cached_property
    def _batches(self) -> list[Batch]:
        generator = torch.Generator().manual_seed(3)
        return [
            Batch(
                torch.randn(BATCH_SIZE, self._widths[0], generator=generator),
                torch.randn(BATCH_SIZE, self._widths[-1], generator=generator),
            )
            for _ in range(NUM_BATCHES)
        ]

    def make_model(self) -> nn.Module:
        return perceptron(self._widths)

    def num_batches(self, epoch: int) -> int:
        return 1 << 30

    def load(self, ticket: Ticket) -> Sequence[Batch]:
        return [self._batches[ticket.step % NUM_BATCHES]]

    def loss(self, model: nn.Module, examples: Batch) -> Tensor:
        return nn.functional.mse_loss(model(examples.inputs), examples.targets)
