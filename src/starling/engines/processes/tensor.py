"""An island on processes whose ranks compute one mini-batch together, with torch's tensor parallelism (DTensor).

The layers in the model's plan are cut, and each rank computes its part of them. All other layers are whole on all
ranks, and every rank computes them. Each weight nevertheless belongs to one of the n ranks: a rank's vector `[P']`
contains its part of every cut layer and 1/n of every other parameter, as with `sharded`. The optimizer updates this
vector, and the strategy averages it. Parameters that are not cut are gathered before each gradient. Therefore they
cannot differ between the ranks of an island, however asynchronous the strategy is, and norms, checkpoints and joins
work as with `sharded`.

DTensor's communication passes through `IslandGroup`, which a process group written in Python calls.
"""

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate, groupby
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.distributed.tensor.placement_types import Placement, Shard
from torch.nn import functional as F

from starling.checkpoint.cut import Cut, span_of
from starling.engines.processes.backend import communicating
from starling.engines.processes.island import IslandGroup, IslandModel, trainable_by_name
from starling.errors import ConfigError
from starling.training.flat import split
from starling.training.tensor_plan import tensor_plan

BACKEND = "starling-island"
GATHERED_TOGETHER = 1 << 20
"""Largest number of values of one rank that are gathered in one message. The number is limited because these values are
in memory twice."""


class TensorModel(IslandModel):
    """A model whose layers are cut by its plan."""

    def __init__(self, model: nn.Module, island: IslandGroup) -> None:
        whole = trainable_by_name(model)
        uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        _parallelize(model, island)
        self._computed = [model.get_parameter(name) for name in whole]
        self._dims = [_dim(parameter) for parameter in self._computed]
        if all(dim is None for dim in self._dims):
            raise ConfigError(f"island.tensor: the tensor_plan of {type(model).__name__} cuts no parameter")
        for (name, parameter), dim in zip(whole.items(), self._dims, strict=True):
            _check(name, parameter, dim, uses[id(parameter)], island.size)
        shapes = tuple(tuple(parameter.shape) for parameter in whole.values())
        super().__init__(model, island, whole, Cut(island.size, shapes, tuple(dim or 0 for dim in self._dims)))
        self._spans = [
            span_of(shape[dim], island.size, island.member) for shape, dim in zip(shapes, self.cut.dims, strict=True)
        ]
        whole_ones = [number for number, dim in enumerate(self._dims) if dim is None]
        ends = dict(
            zip(whole_ones, accumulate(math.prod(self.cut.local_shapes[each]) for each in whole_ones), strict=True)
        )
        self._gathered_together = [
            list(numbers) for _, numbers in groupby(whole_ones, lambda number: ends[number] // GATHERED_TOGETHER)
        ]
        for number, parameter in enumerate(self._computed):
            self._numbers[id(parameter)] = number
            parameter.register_post_accumulate_grad_hook(partial(self._collect, number))  # type: ignore[no-untyped-call]
        self.use_weights(self.weights)

    def use_weights(self, weights: Tensor) -> None:
        self.weights = weights
        for number, view in enumerate(split(weights, self.parameters)):
            dim = self._dims[number]
            if dim is not None:
                self._computed[number]._local_tensor = view.narrow(dim, 0, self._spans[number][1])  # type: ignore[attr-defined]

    def begin(self, num_parts: int) -> int:
        """Begin a gradient; see `Model.begin`. This method also gathers the parameters that are not cut from the ranks
        to which their parts belong."""
        parts = split(self.weights, self.parameters)
        with torch.no_grad():
            for numbers in self._gathered_together:
                self._gather([parts[number] for number in numbers], numbers)
        return super().begin(num_parts)

    def _gather(self, parts: Sequence[Tensor], numbers: Sequence[int]) -> None:
        own = torch.cat([part.reshape(-1) for part in parts])
        gathered = own.new_empty(self.cut.size, len(own))
        self.island.all_gather(gathered.view(-1), own)
        start = 0
        for number, part in zip(numbers, parts, strict=True):
            stop, shape = start + part.numel(), self.cut.shapes[number]
            _local(self._computed[number]).copy_(gathered[:, start:stop].reshape(-1, *shape[1:])[: shape[0]])
            start = stop

    def _collect(self, number: int, parameter: Tensor) -> None:
        """Add this rank's part of a parameter's gradient to `gradients`."""
        gradient, parameter.grad = cast(Tensor, parameter.grad), None
        if isinstance(gradient, DTensor) and gradient.placements != cast(DTensor, parameter).placements:
            gradient = gradient.redistribute(placements=cast(DTensor, parameter).placements)
        dim, (start, length), own = self._dims[number], self._spans[number], _local(gradient)
        if dim is None:
            own = own[start : start + length]
        self.gradients_of[number].narrow(dim or 0, 0, length).add_(own)
        self._reached.append(parameter)


def _parallelize(model: nn.Module, island: IslandGroup) -> None:
    """Cut the layers in a model's plan."""
    plan = tensor_plan(model)
    if not dist.is_backend_available(BACKEND):
        dist.Backend.register_backend(BACKEND, _Counted, devices="cpu")
    with communicating():
        group = dist.new_group(list(island.ranks), island.timeout, BACKEND, use_local_synchronization=True)
    cast(_Counted, group).island = island
    mesh = DeviceMesh.from_group(group, "cpu", mesh=torch.tensor(list(island.ranks)), mesh_dim_names=("tensor",))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DTensor random operators")  # none are used
        try:
            parallelize_module(model, mesh, plan, src_data_rank=None)
        except (NotImplementedError, TypeError) as error:
            raise ConfigError(f"island.tensor: the tensor_plan of {type(model).__name__}: {error}") from error


def _dim(parameter: Tensor) -> int | None:
    """Return the dimension along which a parameter is cut, or None if it is whole on all ranks."""
    placement: Placement | None = parameter.placements[0] if isinstance(parameter, DTensor) else None
    return placement.dim % parameter.dim() if isinstance(placement, Shard) else None


def _check(name: str, whole: Tensor, dim: int | None, num_uses: int, size: int) -> None:
    """Raise ConfigError if a parameter cannot be cut along `dim`."""
    if dim is None:
        return
    if num_uses > 1:
        raise ConfigError(
            f"island.tensor: {name} is shared by several modules, so that it cannot be cut; leave it whole"
        )
    if dim > 0 and whole.shape[dim] % size:
        raise ConfigError(
            f"island.tensor: {name} has {whole.shape[dim]} columns, which cannot be divided by {size}; choose a width "
            f"that is a multiple of {size}, or another size of islands"
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _finished(result: object) -> dist.Work:
    """Return work that is already finished, for which DTensor then waits."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return cast(dist.Work, _create_work_from_future(future))


class _Counted(dist.ProcessGroup):
    """A process group that performs DTensor's collectives with an `IslandGroup`, which counts bytes and waits and
    distinguishes the backend's errors from the model's."""

    island: IslandGroup

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return str(dist.distributed_c10d._world.pg_names[self])

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        for each in tensors:
            self.island.all_reduce(each, dist.ReduceOp.SUM if options is None else options.reduceOp)
        return _finished(tensors)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None
    ) -> dist.Work:
        for whole, own in zip(outputs, inputs, strict=True):
            self.island.all_gather(whole, own)
        return _finished(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None
    ) -> dist.Work:
        for own, whole in zip(outputs, inputs, strict=True):
            self.island.mean_of_parts(own, whole, is_sum=True)
        return _finished(outputs)

    def getBackendName(self) -> str:  # noqa: N802 - the name is torch's
        return BACKEND


class CutDropout(ParallelStyle):
    """Dropout of units that are cut along the last dimension. Each rank draws the same random numbers for all units as
    a whole model would draw, and applies its own part of them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Dropout):
            raise TypeError(f"CutDropout applies to nn.Dropout, not to {type(module).__name__}")
        size, member, dropout = device_mesh.size(), device_mesh.get_local_rank(), module

        def forward(units: torch.Tensor) -> torch.Tensor:
            if not dropout.training or dropout.p == 0.0:
                return units
            ones = torch.ones(*units.shape[:-1], size * units.shape[-1], device=units.device, dtype=units.dtype)
            return units * F.dropout(ones, dropout.p).chunk(size, -1)[member]

        module.forward = forward  # type: ignore[assignment,method-assign]
        return module
