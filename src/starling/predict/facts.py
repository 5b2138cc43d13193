"""The facts that a plan needs about a job: its model, mini-batches and operations, and the memory that a learner needs.

Weights, gradients and optimizer are computed from the model; activations and operations are measured on one mini-batch.
"""

import warnings
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from starling.checkpoint.cut import Cut
from starling.engines.processes.island import blocks_of
from starling.predict.costs import JobFacts
from starling.training.flat import trainable
from starling.training.job import Job
from starling.training.tensor_plan import cut_dims
from starling.workload import Ticket


def facts_of(job: Job, counts_flops: bool = False) -> JobFacts:
    """The facts that a plan needs about a job; `counts_flops` counts operations by computing one gradient on the
    CPU."""
    workload = job.workload
    model = workload.make_model()
    return JobFacts(
        trains=f"{type(workload).__module__}.{type(workload).__qualname__}",
        model_bytes=sum(parameter.nbytes for parameter in trainable(model)),
        batches_per_epoch=workload.num_batches(0),
        flops_per_gradient=_flops(job) if counts_flops else None,
    )


def _flops(job: Job) -> float | None:
    """Number of floating-point operations of the matrix products and convolutions of one gradient; None if there are
    none.

    Recurrent layers are computed in steps here, because the counter does not see into the libraries' own.
    """
    workload = job.workload
    model = workload.make_model()
    counter = FlopCounterMode(display=False)
    with warnings.catch_warnings(), counter:
        warnings.simplefilter("ignore", UserWarning)  # of oneDNN, about Intel's GPUs
        with torch.backends.mkldnn.flags(enabled=False):
            for examples in workload.load(Ticket(0, 0, 0)):
                workload.loss(model, examples).backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops()) or None


@dataclass(frozen=True)
class LearnerMemory:
    """The memory of one learner, or of one rank of an island, in bytes, without copies that a strategy makes and
    without the libraries of the process."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    """Parameters of other ranks that are held while this rank computes: in a sharded island, parameters in no block,
    and the largest block with its gradient; in a tensor island, parameters that are not cut."""
    activations: int
    """Tensors that backward needs for the largest micro-batch of the first mini-batch, measured with a whole model."""

    @property
    def total(self) -> int:
        """The sum of all fields."""
        return sum(astuple(self))

    def __str__(self) -> str:
        sizes = {each.name: getattr(self, each.name) for each in fields(self)}
        listed = ", ".join(f"{name} {size / 1e6:.3g} MB" for name, size in sizes.items() if size)
        return f"{self.total / 1e6:.3g} MB: {listed}"


def memory_of(job: Job) -> LearnerMemory:
    """The memory of a learner of a job, from its model, its optimizer, its island, and a forward pass."""
    model, island = job.workload.make_model(), job.island
    parameters = trainable(model)
    shapes, item = tuple(tuple(each.shape) for each in parameters), parameters[0].itemsize
    whole, gathered, dims = sum(each.nbytes for each in parameters), 0, (0,) * len(parameters)
    if island.tensor > 1:
        cut = cut_dims(model)
        dims = tuple(cut.get(each, 0) for each in parameters)
        gathered = whole - sum(each.nbytes for each in parameters if each in cut)
    elif island.sharded > 1:
        seen: set[nn.Parameter] = set()
        blocks = [_bytes_in(block, seen) for block in blocks_of(model)]
        gathered = whole - sum(blocks) + 2 * max(blocks, default=0)
    own = item * Cut(island.size, shapes, dims).local_numbers
    return LearnerMemory(own, own, own * _vectors(job), gathered, _activations(job, model))


def _bytes_in(block: nn.Module, seen: set[nn.Parameter]) -> int:
    """The bytes of a block's parameters that were in no earlier block; an earlier block may be a part of this one."""
    own = [each for each in block.parameters() if each.requires_grad and each not in seen]
    seen.update(own)
    return sum(each.nbytes for each in own)


def _vectors(job: Job) -> int:
    """The number of values that the optimizer keeps for each weight."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    optimizer = job.make_optimizer([parameter])
    optimizer.step()
    state = optimizer.state[parameter].values()
    return sum(isinstance(each, Tensor) and each.shape == parameter.shape for each in state)


def _activations(job: Job, model: nn.Module) -> int:
    """The bytes of the tensors that backward needs from a forward pass, besides parameters and buffers."""
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    most = 0
    for examples in job.workload.load(Ticket(0, 0, 0)):
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
            loss = job.workload.loss(model, examples)
        most = max(most, sum(kept.values()))
        del loss
    return most
