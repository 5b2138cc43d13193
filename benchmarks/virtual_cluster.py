"""The cost of the virtual engine beyond the gradients that it computes."""

import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.measuring import Bar
from benchmarks.training import job_for
from starling.engines.virtual.cluster import Cluster, ComputeModel
from starling.engines.virtual.engine import VirtualEngine
from starling.training.job import Job
from starling.workload import Ticket

WORLD, STEPS, ROUNDS = 64, 512, 5


def measure(folder: Path, device: torch.device) -> list[Bar]:
    """The engine's overhead over the gradients alone with 64 learners, and its own time per 1,000 events."""
    job = job_for(folder, learners=WORLD, steps=STEPS, strategy="delay-by-one")
    cluster = Cluster(compute=ComputeModel(distribution="log-normal", spread=0.3))
    overheads, per_event, seconds = [], [], []
    for number in range(ROUNDS):
        alone = gradients_alone(job, device) if number % 2 else 0.0
        begin = time.perf_counter()
        outcome = VirtualEngine(job, WORLD, cluster, computation=device).run()
        engine = time.perf_counter() - begin
        alone = alone or gradients_alone(job, device)
        seconds.append((engine, alone))
        overheads.append((engine - alone) / alone)
        per_event.append(1000.0 * engine / outcome.num_events)
    whole, gradients = (median(column) for column in zip(*seconds, strict=True))
    detail = f"{whole:.2f} s, of which {gradients:.2f} s are {STEPS} gradients alone"
    return [
        Bar.at_most("virtual engine, 64 learners: overhead / gradients' own time", median(overheads), 0.20, detail),
        Bar.at_most("virtual engine, 64 learners: seconds per 1,000 events", median(per_event), 60.0, detail),
    ]


def gradients_alone(job: Job, device: torch.device) -> float:
    """Seconds for the same gradients in a plain loop that only loads and computes forward and backward passes."""
    model = job.workload.make_model().to(device)
    num_batches = job.workload.num_batches(0)
    begin = time.perf_counter()
    for step in range(STEPS):
        (batch,) = job.workload.load(Ticket(step // num_batches, step % num_batches, step))
        model.zero_grad()
        loss = job.workload.loss(model, batch.to(device))
        loss.backward()
        loss.item()
    return time.perf_counter() - begin
