"""One island on processes. The ranks of an island hold one model together, and each learner sees its own part of it.

With `sharded` this part is a model shard of torch's FSDP2; `tensor.py` contains tensor parallelism. On each rank, FSDP2
keeps a padded part of the rows of every parameter. Here these parts are views into one vector `[P']`, so that weights,
gradients and optimizer work as for any other learner. FSDP2's collectives go through `IslandGroup`, which distinguishes
the backend's errors from the model's and adds in rank order.

FSDP2 has no public way to place its parts in given memory. Therefore `use_weights` sets two of its attributes, which
`_parts` checks.
"""

import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from starling.checkpoint.cut import Cut, ShardOfIsland
from starling.checkpoint.state import LearnerState
from starling.consensus import rank_ordered_mean
from starling.engines.processes.backend import PassWithBackend, local_group
from starling.engines.processes.handshake import Peers
from starling.errors import CheckpointError, ConfigError
from starling.strategies.islands import Island
from starling.training.flat import Model, split, trainable
from starling.training.job import Statistics
from starling.training.shards import MakeOptimizer

GATHERING = "gathering its island's model"
SMALLEST_UNIT = 1 << 20
"""Number of weights below which a block is gathered and freed together with the block around it."""
ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
"""Optimizers of `torch.optim` that update each weight separately, so that the steps of all shards together equal the
step of the whole model."""


class IslandGroup(PassWithBackend):
    """The communication within one island. Only the foreground uses it. All processes create their groups together."""

    def __init__(self, peers: Peers, size: int, statistics: Statistics) -> None:
        super().__init__()
        first = peers.rank - peers.rank % size
        self.ranks, self.size = range(first, first + size), size
        self.member = peers.rank - first
        self.timeout = timedelta(seconds=peers.timeout_seconds)
        self.statistics = statistics
        self.seconds = 0.0
        """Time spent in communication so far."""
        self._waits = peers.waits
        self.group: ProcessGroup = local_group(self.ranks, peers.timeout_seconds)

    def all_gather(self, whole: Tensor, own: Tensor) -> None:
        """Fill `whole` `[n P']` with the ranks' vectors; `own` `[P']` may be a part of it."""
        with self._communicating((self.size - 1) * own.nbytes):
            dist.all_gather_single(whole, own, group=self.group)

    def mean_of_parts(self, own: Tensor, whole: Tensor, is_sum: bool) -> None:
        """Set `own` `[P']` to the mean or sum of this rank's part of all `whole` `[n P']`, added in rank order."""
        theirs = torch.empty_like(whole)
        with self._communicating((self.size - 1) * own.nbytes):
            dist.all_to_all_single(theirs, whole, group=self.group)
        mean = rank_ordered_mean(theirs.chunk(self.size))
        torch.mul(mean, self.size, out=own) if is_sum else own.copy_(mean)

    def all_reduce(self, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        """Set `tensor` to the sum of all ranks' tensors. The sum is bit-identical on all ranks."""
        with self._communicating(2 * (self.size - 1) * tensor.nbytes // self.size):
            dist.all_reduce(tensor, operation, group=self.group)

    def gathered(self, number: float) -> list[float]:
        """Return the numbers that all ranks pass, in rank order."""
        found = torch.empty(self.size, dtype=torch.float64)
        with self._communicating(0):
            dist.all_gather_single(found, torch.tensor([number], dtype=torch.float64), group=self.group)
        return [float(each) for each in found]

    def sum(self, number: float) -> float:
        """Return the sum of a number over the ranks. The sum is bit-identical on all ranks."""
        return sum(self.gathered(number))

    @contextmanager
    def _communicating(self, num_bytes: int) -> Generator[None, None, None]:
        begin = time.monotonic()
        self.statistics.averaging.bytes_sent += num_bytes
        try:
            with self._waits.waiting(GATHERING, self.ranks, is_group=True), self.communicating():
                yield
        finally:
            self.seconds += time.monotonic() - begin


class IslandModel(Model):
    """One rank's part of a model that its island holds. It takes the place of the `FlatModel` of a lone learner.

    `weights` and `gradients` `[P']` hold this rank's part of every parameter. `whole` contains the parameters of the
    uncut model, by name.
    """

    def __init__(self, model: nn.Module, island: IslandGroup, whole: Mapping[str, Tensor], cut: Cut) -> None:
        self.cut, self.island = cut, island
        self.names = list(whole)
        """The parameters' names in the model."""
        every = torch.cat([parameter.detach().reshape(-1) for parameter in whole.values()])
        weights = cut.part(every, island.member)
        shapes = [torch.empty(shape, device="meta") for shape in cut.local_shapes]
        parameters = [nn.Parameter(view) for view in split(weights, shapes)]
        super().__init__(model, parameters, weights, torch.zeros_like(weights))

    def begin(self, num_parts: int) -> int:
        # the number must be the same on all ranks, because they communicate in each part
        return int(max(self.island.gathered(super().begin(num_parts))))

    def own_part(self, state: LearnerState, make_optimizer: MakeOptimizer) -> LearnerState:
        """Return this rank's part of the state of a whole model. A state that is already such a part is returned
        unchanged."""
        cut, member = self.cut, self.island.member
        if state.shard_of_island is not None:
            if state.shard_of_island.cut != cut:
                raise CheckpointError(
                    f"island: rank {member} of {cut.size}: the checkpoint has another model, or one that was cut in "
                    "another way; resume with the model that was trained, and its tensor_plan"
                )
            return state
        order = self._order(make_optimizer(self.parameters))
        optimizer = cut.part_of_optimizer(state.optimizer, member, order)
        return replace(state, weights=cut.part(state.weights, member), optimizer=optimizer)

    def shard_of_island(self, optimizer: Optimizer) -> ShardOfIsland:
        """The part of the model that this rank holds."""
        return ShardOfIsland(self.cut, self.island.member, self._order(optimizer))

    def _order(self, optimizer: Optimizer) -> tuple[int, ...]:
        """Return the parameters' numbers in the order in which an optimizer lists the parameters."""
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        return tuple(numbers[id(each)] for group in optimizer.param_groups for each in group["params"])


class ShardedModel(IslandModel):
    """A model that FSDP2 has cut into shards."""

    def __init__(self, model: nn.Module, island: IslandGroup) -> None:
        whole = trainable_by_name(model)
        cut = Cut(island.size, tuple(tuple(parameter.shape) for parameter in whole.values()))
        super().__init__(model, island, whole, cut)
        units = _shard(model, island)
        parts = _parts(units)
        self._fsdp = [parts[name] for name in self.names]
        for part, view in zip(self._fsdp, self.gradients_of, strict=True):
            part.sharded_param.grad = part.to_sharded_dtensor(view[: part.sharded_size[0]])
        self._notice_gradients(units)
        self.use_weights(self.weights)

    def use_weights(self, weights: Tensor) -> None:
        self.weights = weights
        with torch.no_grad():
            for part, view in zip(self._fsdp, split(weights, self.parameters), strict=True):
                part._sharded_param_data = view.view(-1)
                part.sharded_param._local_tensor = view[: part.sharded_size[0]]

    def _notice_gradients(self, units: Sequence[nn.Module]) -> None:
        """Record which parameters receive a gradient in this rank's backward. FSDP2 creates the parameters that
        backward reaches when their unit is first called."""
        numbers = {id(part): number for number, part in enumerate(self._fsdp)}
        for unit in units:
            within = [part for group in _groups([unit]) for part in group.fsdp_params]

            def look(*_: object, within: list[Any] = within) -> None:
                while within:
                    part = within.pop()
                    self.notice(numbers[id(part)], part._unsharded_param)

            unit.register_forward_pre_hook(look)


def check_island(island: Island, device: torch.device) -> None:
    """Raise ConfigError if a learner on `device` cannot be a rank of an island."""
    if island.size > 1 and not hasattr(dist, "all_gather_single"):
        raise ConfigError(f"island: needs torch 2.13 or later, but this is torch {torch.__version__}; update torch")
    if island.size > 1 and device.type != "cpu":
        raise ConfigError(f"island: computed on the CPU only so far, not on {device.type}; set engine.device: cpu")


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise `ConfigError` unless the optimizer updates each weight separately."""
    if type(optimizer).__name__ not in ELEMENTWISE or type(optimizer).__module__.partition(".")[0] != "torch":
        raise ConfigError(
            f"island: {type(optimizer).__name__} does not treat each weight alone, so it would step differently on a "
            f"part of a model; choose one of {', '.join(ELEMENTWISE)}, or leave out island"
        )


def trainable_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a model, by name, in the order of its weights. Raises `ConfigError` if a
    parameter cannot be cut."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {names[id(parameter)]: parameter for parameter in trainable(model)}
    for name, parameter in found.items():
        if parameter.dim() == 0:
            raise ConfigError(
                f"island: parameter {name} is a single number, which cannot be cut; give it the shape "
                "[1], or leave out island"
            )
    return found


def _shard(model: nn.Module, island: IslandGroup) -> list[nn.Module]:
    """Shard a model with FSDP2: its large blocks first, then the rest of the model. Return the modules in that
    order."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = DeviceMesh.from_group(island.group, "cpu", mesh=torch.tensor(list(island.ranks)), mesh_dim_names=("shard",))
    frozen = {each for each in model.parameters() if not each.requires_grad}
    units = [*blocks_of(model), model]
    gather, reduce = _comms(island)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=frozen)
        sharded = cast(FSDPModule, unit)
        if _groups([unit]):
            sharded.set_custom_all_gather(gather)
            sharded.set_custom_reduce_scatter(reduce)
        sharded.set_reduce_scatter_unused_params(True, recurse=False)  # otherwise ranks that differ wait for ever
    return units


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the large blocks of a model that are gathered and freed one by one, inner blocks first. Candidates are the
    members of lists and sequences, and the model's own children, because these are called as modules. A block must not
    share parameters with other modules."""
    containers = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    found: list[nn.Module] = []
    uses = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))

    def look(module: nn.Module, is_called: bool) -> None:
        inside = isinstance(module, containers) or module is model
        for child in module.children():
            look(child, inside)
        within = Counter(id(each) for part in module.modules() for each in part.parameters(recurse=False))
        is_own = all(uses[each] == count for each, count in within.items())
        has_forward = not isinstance(module, nn.ModuleList | nn.ModuleDict)
        size = sum(parameter.numel() for parameter in module.parameters())
        if is_called and module is not model and has_forward and is_own and size >= SMALLEST_UNIT:
            found.append(module)

    look(model, False)
    return found


def _comms(island: IslandGroup) -> tuple[Any, Any]:
    """Return the communication objects with which FSDP2 gathers and reduces."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

    class Allocates:
        def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

    class Gather(Allocates, AllGather):
        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
            island.all_gather(output_tensor, input_tensor)

    class Reduce(Allocates, ReduceScatter):
        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
        ) -> None:
            island.mean_of_parts(output_tensor, input_tensor, is_sum=op == dist.ReduceOp.SUM)

    return Gather(), Reduce()


def _groups(units: Sequence[nn.Module]) -> list[Any]:
    """Return FSDP2's parameter groups."""
    from torch.distributed.fsdp import fully_shard

    states = [fully_shard.state(unit) for unit in units]  # type: ignore[attr-defined]
    return [group for state in states for group in state._fsdp_param_groups]


def _parts(units: Sequence[nn.Module]) -> dict[str, Any]:
    """Return FSDP2's record of each parameter, by the parameter's name in the model. The model is the last unit."""
    places = {id(module): name for name, module in units[-1].named_modules()}
    found = {}
    for group in _groups(units):
        for part in group.fsdp_params:
            if not hasattr(part, "_sharded_param_data") or not hasattr(part.sharded_param, "_local_tensor"):
                raise ConfigError(
                    f"island: torch {torch.__version__} keeps shards in another way; use 2.13, or leave out island"
                )
            info = part._module_info
            for module, name in [
                (info.module, info.param_name),
                *zip(info.shared_modules, info.shared_param_names, strict=True),
            ]:
                prefix = places[id(module)]
                found[f"{prefix}.{name}" if prefix else name] = part
    return found
