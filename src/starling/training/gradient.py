"""The gradient of one mini-batch. It is a function of the weights and the claimed tickets, and is the same on all
engines."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from starling.chance import derive_seed
from starling.training.flat import NO_GRADIENT, Model
from starling.training.freezing import Freeze
from starling.training.job import Job
from starling.workload import Examples, Ticket, Workload

Seconds = float
LEAST_PASSES, LEAST_SECONDS = 3, 0.5
"""Smallest number of measurements of a gradient, and their shortest total time. A fast gradient is measured many times,
because other programs disturb single measurements."""


@dataclass(frozen=True)
class GradientTask:
    """The inputs of a gradient other than weights, buffers and the mini-batches of its tickets."""

    tickets: tuple[Ticket, ...]
    sizes: tuple[float, ...] = (1.0,)
    """Weight of the mini-batch of each ticket in the gradient."""
    factor: float = 1.0
    """Factor of the gradient; see the job's weighting."""
    is_spoilt: bool = False
    """Whether a fault makes loss and gradient not finite."""
    frozen: tuple[Freeze, ...] = ()
    """Parameters that are not thawed yet and therefore get no gradient."""


class Computed(NamedTuple):
    """The by-products of a gradient."""

    loss: float
    unused: frozenset[int] = frozenset()
    """Numbers of the parameters that had no gradient."""
    losses: tuple[float, ...] = ()
    """Losses of the tickets' mini-batches, if there are several."""


def compute_gradient(
    job: Job,
    task: GradientTask,
    batches: Sequence[Sequence[Examples]],
    model: nn.Module,
    flat: Model,
    before_last: Callable[[], AbstractContextManager[Any]] = nullcontext,
    must_reach_all: bool = False,
) -> Computed:
    """Compute the gradient of the mini-batches of a task's tickets in `flat.gradients`.

    Loss and gradient are weighted means over all micro-batches; micro-batches of weight 0 are not computed. Parameters
    without a gradient get NO_GRADIENT. All micro-batches except the last are computed inside `before_last()`. With
    `must_reach_all`, the last backward reaches every parameter, because DDP waits for all of them.
    """
    device = flat.weights.device
    flat.gradients.zero_()
    batch = [examples for each in batches for examples in each]
    places = [(number, place) for number, each in enumerate(batches) for place in range(len(each))]
    weights = _weights(job, task, batches)
    parts = [place for place, weight in enumerate(weights) if weight > 0.0] or [0]
    shares = [weights[place] / weights[parts[0]] if weights[place] else 1.0 for place in parts]
    summed, counted = [0.0] * len(batches), [0.0] * len(batches)
    total, whole = 0.0, math.nan if task.is_spoilt else sum(shares)
    num_more = flat.begin(len(parts)) - len(parts)
    parts, shares = parts + parts[-1:] * num_more, shares + [0.0] * num_more
    used: set[int] = set()
    unused: frozenset[int] = frozenset()
    for number, (place, share) in enumerate(zip(parts, shares, strict=True), start=1):
        is_last = number == len(parts)
        of, place_in_batch = places[place]
        ticket = task.tickets[of]
        _seed(device, derive_seed(job.seed, "gradient", ticket.epoch, ticket.index, place_in_batch))
        with nullcontext() if is_last else before_last():
            with _without_gradients(flat, task.frozen):
                with torch.autocast(device.type, torch.bfloat16) if job.autocast else nullcontext():
                    loss = job.workload.loss(model, batch[place].to(device))
                (loss / (whole / share / task.factor if task.factor and share else math.inf)).backward()  # type: ignore[no-untyped-call]
            reached = flat.reached()
            used |= reached
            if is_last:
                unused = _leave_out_unused(flat, used, reached, must_reach_all)
        if share:
            found = share * float(loss.detach())
            total += found
            summed[of] += found
            counted[of] += share
    each_own = [sum_of / count if count else 0.0 for sum_of, count in zip(summed, counted, strict=True)]
    return Computed(total / whole, unused, tuple(each_own) if len(batches) > 1 and not task.is_spoilt else ())


def _weights(job: Job, task: GradientTask, batches: Sequence[Sequence[Examples]]) -> list[float]:
    """Return the weight of each micro-batch. Within a mini-batch, micro-batches are weighted by their numbers of terms;
    mini-batches are weighted by their sizes."""
    own = [[job.workload.weight(examples) for examples in batch] for batch in batches]
    if len(own) == 1:
        return own[0]
    own = [each if any(each) else [1.0, *each[1:]] for each in own]
    return [size * weight / sum(each) for size, each in zip(task.sizes, own, strict=True) for weight in each]


@contextmanager
def _without_gradients(flat: Model, frozen: tuple[Freeze, ...]) -> Iterator[None]:
    """Within this context, frozen parameters get no gradient, and no gradient is computed for them."""
    parameters = [flat.parameters[number] for number in flat.numbers_of(frozen)] if frozen else []
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def _leave_out_unused(flat: Model, used: set[int], reached: set[int], must_reach_all: bool) -> frozenset[int]:
    """Mark unused parameters in the gradient, and return their numbers. `reached` are the parameters that the last
    backward has reached."""
    if len(reached) == len(flat.parameters):
        return frozenset()
    unused = frozenset(range(len(flat.parameters))) - used
    for number in unused:
        flat.gradients_of[number].fill_(NO_GRADIENT)
    if must_reach_all:
        left = [parameter for number, parameter in enumerate(flat.parameters) if number not in reached]
        torch.autograd.backward(left, [each.new_full((), NO_GRADIENT).expand_as(each) for each in left])
        flat.reached()
    return unused


def _seed(device: torch.device, seed: int) -> None:
    """Seed the random generator that dropout uses. `torch.manual_seed` would take a millisecond, because it also
    handles devices that are absent."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


def measured_seconds(workload: Workload[Any], model: nn.Module, device: torch.device) -> Seconds:
    """Return the time that the gradient of the first mini-batch takes on this device. It is the median of several
    measurements after a first computation. `model` does not change."""
    batch = [examples.to(device) for examples in workload.load(Ticket(0, 0, 0))]
    model = copy.deepcopy(model)
    found: list[Seconds] = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        while len(found) <= LEAST_PASSES or sum(found) < LEAST_SECONDS:
            begin = time.perf_counter()
            for examples in batch:
                workload.loss(model, examples).backward()  # type: ignore[no-untyped-call]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.append(time.perf_counter() - begin)
    return max(1e-9, median(found[1:]))
