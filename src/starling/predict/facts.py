"""What a plan needs to know of a job: the size of its model, its mini-batches, and the operations of a gradient."""

import warnings

import torch
from torch.utils.flop_counter import FlopCounterMode

from starling.predict.costs import JobFacts
from starling.training.flat import trainable
from starling.training.job import Job
from starling.workload import Ticket


def facts_of(job: Job, counts_flops: bool = False) -> JobFacts:
    """What a plan needs to know of a job; with `counts_flops`, by computing one gradient on the CPU."""
    workload = job.workload
    model = workload.make_model()
    return JobFacts(
        trains=f"{type(workload).__module__}.{type(workload).__qualname__}",
        model_bytes=sum(parameter.nbytes for parameter in trainable(model)),
        batches_per_epoch=workload.num_batches(0),
        flops_per_gradient=_flops(job) if counts_flops else None,
    )


def _flops(job: Job) -> float | None:
    """Floating-point operations of the matrix products and convolutions of one gradient; None if there are none.

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
