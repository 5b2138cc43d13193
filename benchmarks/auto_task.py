"""A small task that is really learned on emulated devices: a perceptron learns another one's classification of
points."""

import time
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from benchmarks.perceptron import perceptron
from benchmarks.workloads import Batch, Watched
from starling.chance import derive_seed
from starling.workload import Ticket

WIDTHS = (64, 160, 160, 10)
TEACHER = (64, 32, 10)
BATCH_SIZE = 32
NUM_VALIDATION = 2048


class Imitation(Watched):
    """Cross-entropy of the teacher's choice among ten classes; each gradient takes `seconds` longer than it needs
    here."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @cached_property
    def _teacher(self) -> nn.Module:
        return perceptron(TEACHER).requires_grad_(requires_grad=False)

    def make_model(self) -> nn.Module:
        return self.keep(perceptron(WIDTHS))

    def num_batches(self, epoch: int) -> int:
        return 1 << 20

    def load(self, ticket: Ticket) -> Sequence[Batch]:
        return [self._points(derive_seed(3, "points", ticket.epoch, ticket.index), BATCH_SIZE)]

    def loss(self, model: nn.Module, examples: Batch) -> Tensor:
        if self.seconds > 0.0:
            time.sleep(self.seconds)
        return nn.functional.cross_entropy(model(examples.inputs), examples.targets)

    @cached_property
    def _validation(self) -> Batch:
        return self._points(derive_seed(3, "validation"), NUM_VALIDATION)

    def validation_loss(self, model: nn.Module) -> float:
        """The loss on points that are not trained on."""
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(self._validation.inputs), self._validation.targets))

    def _points(self, seed: int, number: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(number, WIDTHS[0], generator=generator)
        return Batch(inputs, self._teacher(inputs).argmax(dim=1))
