"""A learner process that reports how much memory training takes beyond weights and gradients."""

import sys
from collections.abc import Sequence
from dataclasses import replace

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore

from starling.budget import Budget
from starling.engines.processes.member import run_learner
from starling.launch.link import Link, reported_errors
from starling.launch.messages import Activity
from starling.launch.rendezvous import find_place
from starling.strategies import STRATEGIES
from starling.strategies.adpsgd import AsynchronousOptions
from starling.training.job import Job, Observer, StepReport
from starling.workload import Ticket
from tests.contract.cases import sgd
from tests.contract.problems import ConstantGradient, Points

SIZE = 16_000_000


class Large(ConstantGradient):
    """Many weights; the memory in use is looked at while a gradient is being computed, the busiest moment."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.seen: list[int] = []

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        self.seen.append(psutil.Process().memory_info().rss)
        return super().loss(model, examples)

    def load(self, ticket: Ticket) -> Sequence[Points]:
        self.seen.append(psutil.Process().memory_info().rss)
        return super().load(ticket)


class Watcher(Observer):
    """Looks at the memory in use after each gradient, while the background averages."""

    def __init__(self, workload: Large) -> None:
        self._workload = workload

    def on_step(self, report: StepReport) -> None:
        self._workload.seen.append(psutil.Process().memory_info().rss)


def main(compressions: Sequence[str], link: Link | None) -> None:
    torch.set_num_threads(1)
    place = find_place()
    sgd(0.01)([nn.Parameter(torch.ones(1))])  # brings torch's compiler into memory, which is not what is measured
    for compression in compressions:
        own = replace(place, store=PrefixStore(compression, place.store))
        workload = Large()
        before = psutil.Process().memory_info().rss
        job = Job(
            workload=workload,
            strategy=STRATEGIES["adpsgd"],
            options=AsynchronousOptions.model_validate({"compression": compression, "piece_megabytes": 1.0}),
            budget=Budget(steps=24),
            make_optimizer=sgd(0.01),
        )
        run_learner(job, own, torch.device("cpu"), "memory", Watcher(workload))
        steady = workload.seen[len(workload.seen) // 3 :]  # the first gradients make what stays
        if link is not None:
            link.send(Activity(values={"compression": compression, "copies": (max(steady) - before) / (4 * SIZE)}))


if __name__ == "__main__":
    line = Link.from_environment()
    with reported_errors(line):
        main(sys.argv[1:], line)
