"""The plan by which tensor parallelism cuts a model. The model declares it as `tensor_plan`.

A plan has the form that torch's `parallelize_module` expects: it maps names of modules, with wildcards, to the styles
in which they are cut. `tensor_plan` is such a mapping, or a method that returns one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from starling.errors import ConfigError
from starling.training.flat import trainable
from starling.workload import Ticket, Workload

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def tensor_plan(model: nn.Module) -> dict[str, "ParallelStyle"]:
    """Return the plan by which a model is cut. Raises `ConfigError` if the model declares no plan, or if the plan names
    modules that the model does not have."""
    declared = getattr(model, "tensor_plan", None)
    plan = declared() if callable(declared) else declared
    if not isinstance(plan, Mapping) or not plan:
        raise ConfigError(
            f"island.tensor: {type(model).__name__} does not say which layers can be cut; give it a method tensor_plan "
            'that returns a plan of torch.distributed.tensor.parallel, such as {"output": '
            "ColwiseParallel(output_layouts=Replicate())}, or use island.sharded"
        )
    for key in plan:
        if not modules_of(model, key):
            raise ConfigError(f"island.tensor: tensor_plan names {key}, which {type(model).__name__} does not have")
    return dict(plan)


def modules_of(model: nn.Module, key: str) -> list[nn.Module]:
    """Return the modules that a key of a plan names."""
    wanted = key.split(".")
    return [
        module
        for name, module in model.named_modules()
        if bool(name) == bool(key) and len(parts := name.split(".")) == len(wanted) and all(map(fnmatch, parts, wanted))
    ]


def cut_dims(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return the parameters that a model's plan cuts, each with the dimension along which it is cut. Only layers that
    are cut by columns or rows are included."""
    from torch.distributed.tensor.parallel import RowwiseParallel

    found = {}
    for module, style in _cut_modules(model):
        by_rows = isinstance(style, RowwiseParallel)
        for name, parameter in module.named_parameters():
            if isinstance(module, nn.Embedding):
                found[parameter] = 0 if by_rows else 1
            elif not (by_rows and name == "bias"):
                found[parameter] = 1 if by_rows else 0
    return found


def _cut_modules(model: nn.Module) -> Iterator[tuple[nn.Module, "ParallelStyle"]]:
    """Yield the modules that a model's plan cuts by columns or rows, each with its style."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    for key, style in tensor_plan(model).items():
        if isinstance(style, ColwiseParallel | RowwiseParallel):
            yield from ((module, style) for module in modules_of(model, key))


@dataclass(frozen=True)
class Traffic:
    """The messages that the ranks of an island send each other for one mini-batch, in bytes of whole tensors."""

    whole_bytes: int
    """Size of the parameters that are not cut, which are gathered before each gradient."""
    gathers: tuple[int, ...]
    """Sizes of the all-gathers of activations."""
    reductions: tuple[int, ...]
    """Sizes of the all-reduces of activations and, in backward, of gradients."""


def traffic_of(workload: Workload[Any]) -> Traffic:
    """Return the traffic of a workload's first mini-batch. The workload may state it (`traffic`); otherwise it is
    measured in a forward pass. Styles other than `ColwiseParallel` and `RowwiseParallel` are assumed to send
    nothing."""
    from torch.distributed.tensor.parallel import ColwiseParallel

    if isinstance(said := getattr(workload, "traffic", None), Traffic):
        return said

    model = workload.make_model()
    gathers: list[int] = []
    reductions: list[int] = []

    def look(module: nn.Module, inputs: Any, output: Tensor, style: Any) -> None:
        is_whole = all(each.is_replicate() for each in style.output_layouts)
        if isinstance(style, ColwiseParallel):
            gathers.extend([output.nbytes] if is_whole else [])
            reductions.extend([inputs[0].nbytes] if inputs[0].requires_grad else [])
        elif is_whole:
            reductions.append(output.nbytes)

    for module, style in _cut_modules(model):
        module.register_forward_hook(partial(look, style=style))
    with torch.random.fork_rng(devices=[]):
        for examples in workload.load(Ticket(0, 0, 0)):
            workload.loss(model, examples)
    cut = cut_dims(model)
    whole = sum(parameter.nbytes for parameter in trainable(model) if parameter not in cut)
    return Traffic(whole, tuple(gathers), tuple(reductions))
