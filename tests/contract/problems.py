"""Small training problems with known answers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from starling.chance import derive_seed
from starling.workload import Ticket, Unit, Workload


@contextmanager
def seeded() -> Iterator[None]:
    """Models made in this context have the same weights. (`torch.manual_seed` takes milliseconds.)"""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        yield


@dataclass(frozen=True)
class Points:
    """Inputs `[B, D]` and targets `[B]`."""

    inputs: Tensor
    targets: Tensor

    num_frames = 0
    seconds = 0.0

    @property
    def num_examples(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device) -> Self:
        return type(self)(self.inputs.to(device), self.targets.to(device))


class TinyRegression(Workload[Points]):
    """A two-layer network on random points; with `same_data`, the learners of a round all get the same mini-batch."""

    def __init__(self, batches: int = 12, micro_batches: int = 1, same_data_for: int = 1, dropout: float = 0.0) -> None:
        self.batches = batches
        self.micro_batches = micro_batches
        self.same_data_for = same_data_for
        self.dropout = dropout

    def make_model(self) -> nn.Module:
        with seeded():
            return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(4, 1))

    def num_batches(self, epoch: int) -> int:
        return self.batches

    def load(self, ticket: Ticket) -> Sequence[Points]:
        generator = torch.Generator().manual_seed(
            derive_seed(3, "points", ticket.epoch, ticket.index // self.same_data_for)
        )
        return [
            Points(torch.randn(6, 5, generator=generator), torch.randn(6, generator=generator))
            for _ in range(self.micro_batches)
        ]

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        return ((model(examples.inputs).squeeze(1) - examples.targets) ** 2).mean()


class Uneven(TinyRegression):
    """Mini-batches of 3, 29, 11 or 6 points, whose frames are other numbers again."""

    def __init__(self, num_parts: int = 1) -> None:
        super().__init__()
        self.num_parts = num_parts

    def planned_size(self, ticket: Ticket, unit: Unit) -> float:
        place = (ticket.step + ticket.part) % 4
        return float((3, 29, 11, 6)[place] if unit == "utterances" else (700, 200, 90, 1000)[place])

    def load(self, ticket: Ticket) -> Sequence[Points]:
        generator = torch.Generator().manual_seed(derive_seed(3, "uneven", ticket.step, ticket.part))
        size = int(self.planned_size(ticket, "utterances"))
        return [Points(torch.randn(size, 5, generator=generator), torch.randn(size, generator=generator))]


class _Skipping(nn.Module):
    """Three layers, of which some are left out in training, as under LayerDrop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 1)
        self.between = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, inputs: Tensor, used: Sequence[bool]) -> Tensor:
        hidden = self.first(inputs)
        for layer, is_used in zip(self.between, used, strict=True):
            hidden = torch.tanh(layer(hidden)) if is_used else hidden
        result: Tensor = self.last(hidden)
        return result


class SkippingLayers(TinyRegression):
    """Each micro-batch leaves out some layers."""

    def make_model(self) -> nn.Module:
        with seeded():
            return _Skipping()

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        used = [float(each) > 0.6 for each in examples.inputs[0, :3]]
        return ((model(examples.inputs, used).squeeze(1) - examples.targets) ** 2).mean()


class Normalised(TinyRegression):
    """With batch normalisation, whose buffers follow what was computed."""

    def make_model(self) -> nn.Module:
        with seeded():
            return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


class ConstantGradient(Workload[Points]):
    """The loss is the sum of the weights: every gradient is 1 everywhere, so that the weights count the steps."""

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions

    def make_model(self) -> nn.Module:
        model = nn.Linear(self.dimensions, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def num_batches(self, epoch: int) -> int:
        return 10

    def load(self, ticket: Ticket) -> Sequence[Points]:
        return [Points(torch.zeros(1, 1), torch.zeros(1))]

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        (weight,) = model.parameters()
        return weight.sum()


class NoisyQuadratic(Workload[Points]):
    """f(w) = h/2 |w|^2 with additive gradient noise of variance 1 per coordinate: the gradient is h w + noise."""

    def __init__(self, dimensions: int, curvature: float) -> None:
        self.dimensions = dimensions
        self.curvature = curvature

    def make_model(self) -> nn.Module:
        model = nn.Linear(self.dimensions, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def num_batches(self, epoch: int) -> int:
        return 1 << 20

    def load(self, ticket: Ticket) -> Sequence[Points]:
        generator = torch.Generator().manual_seed(derive_seed(5, "noise", ticket.step))
        return [Points(torch.randn(1, self.dimensions, generator=generator), torch.zeros(1))]

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        (weight,) = model.parameters()
        return 0.5 * self.curvature * (weight * weight).sum() + model(examples.inputs).sum()
