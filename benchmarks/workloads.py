"""Small workloads: one whose gradients take time but no processor, as on a separate device, and one that computes."""

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
"""Number of parameters in one block of an emulated model: a megabyte."""
BATCH_SIZE = 32
NUM_BATCHES = 64
"""Number of different mini-batches of the computing workload; they are drawn once, so that neither side spends time on
drawing."""


@dataclass(frozen=True)
class Batch:
    """A mini-batch of inputs `[B, D]` and targets `[B, E]`."""

    inputs: Tensor
    targets: Tensor

    num_frames = 0
    seconds = 0.0

    @property
    def num_examples(self) -> int:
        return len(self.inputs)

    def to(self, device: torch.device) -> Self:
        return type(self)(self.inputs.to(device), self.targets.to(device))


class _Device:
    """Keeps the time of a device that computes beside the processor: it starts when it is given work, and continues
    from one piece of work to the next without a gap, however late the processor notices."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def begin(self) -> None:
        """Begin a gradient."""
        self._free_at = time.monotonic()

    def work(self, seconds: float) -> None:
        """Return when the device has worked for `seconds`."""
        self._free_at += seconds
        time.sleep(max(0.0, self._free_at - time.monotonic()))


class _Work(torch.autograd.Function):
    """The identity; the device works in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: _Device, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.device, ctx.seconds = device, backward_seconds
        device.work(forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.device.work(ctx.seconds)
        return gradients[0], None, None, None


class _Block(nn.Module):
    """Parameters of an emulated model's block; backward takes twice as long as forward, as it usually does."""

    def __init__(self, size: int, device: _Device, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self._device, self._seconds = device, seconds

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Work.apply(x + self.weight.sum(), self._device, self._seconds / 3, self._seconds * 2 / 3)
        return found


class _Model(nn.Module):
    """An emulated model: blocks, one after another."""

    def __init__(self, num_blocks: int, size: int, seconds: float) -> None:
        super().__init__()
        self._device = _Device()
        self.blocks = nn.Sequential(*(_Block(size, self._device, seconds) for _ in range(num_blocks)))

    def forward(self, x: Tensor) -> Tensor:
        self._device.begin()
        found: Tensor = self.blocks(x)
        return found


class Watched(Workload[Batch]):
    """A workload that keeps the first model it made, which is the learner's own."""

    model: nn.Module | None = None

    def keep(self, made: nn.Module) -> nn.Module:
        self.model = self.model or made
        return made


class EmulatedDevice(Watched):
    """Gradients of `num_parameters` that take `seconds`, in consecutive blocks: what follows a block's backward can
    overlap with that of the blocks before it."""

    def __init__(self, num_parameters: int, seconds: float) -> None:
        self._num_blocks = max(1, num_parameters // BLOCK_SIZE)
        self._size, self._seconds = num_parameters // self._num_blocks, seconds / self._num_blocks

    def make_model(self) -> nn.Module:
        return self.keep(_Model(self._num_blocks, self._size, self._seconds))

    def num_batches(self, epoch: int) -> int:
        return 1 << 30

    def load(self, ticket: Ticket) -> Sequence[Batch]:
        return [Batch(torch.zeros(1, 1), torch.zeros(1, 1))]

    def loss(self, model: nn.Module, examples: Batch) -> Tensor:
        found: Tensor = model(examples.inputs).sum()
        return found


class Computing(Watched):
    """A perceptron on random points that is really computed; each loss takes `seconds` longer."""

    def __init__(self, widths: Sequence[int], seconds: float = 0.0, batch_size: int = BATCH_SIZE) -> None:
        self._widths, self._batch_size = widths, batch_size
        self._seconds = seconds

    @cached_property
    def _batches(self) -> list[Batch]:
        generator = torch.Generator().manual_seed(3)
        return [
            Batch(
                torch.randn(self._batch_size, self._widths[0], generator=generator),
                torch.randn(self._batch_size, self._widths[-1], generator=generator),
            )
            for _ in range(NUM_BATCHES)
        ]

    def make_model(self) -> nn.Module:
        return self.keep(perceptron(self._widths))

    def num_batches(self, epoch: int) -> int:
        return 1 << 30

    def load(self, ticket: Ticket) -> Sequence[Batch]:
        return [self._batches[ticket.step % NUM_BATCHES]]

    def loss(self, model: nn.Module, examples: Batch) -> Tensor:
        if self._seconds > 0.0:
            time.sleep(self._seconds)
        return nn.functional.mse_loss(model(examples.inputs), examples.targets)
