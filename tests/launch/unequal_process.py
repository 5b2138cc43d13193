"""The program of learners that are unequally fast: learner 0 takes ten times as long. `unequal_process.py WORKERS`

WORKERS is the number of loading processes of each learner.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from starling.budget import Budget
from starling.engines.processes import member
from starling.launch.link import Link, reported_errors
from starling.launch.messages import Activity
from starling.launch.rendezvous import find_place
from starling.strategies import STRATEGIES
from starling.training.job import ClaimReport, Job, Observer
from starling.training.loading import Loader
from starling.workload import Ticket
from tests.contract.cases import sgd
from tests.contract.problems import Points, TinyRegression

STEP_SECONDS, SLOWER = 0.03, 10
STEPS = 210


@dataclass(frozen=True)
class Traced(Points):
    """Tells which process loaded it."""

    ids: tuple[str, ...] = ()

    def to(self, device: torch.device) -> "Traced":
        return self


class Unequal(TinyRegression):
    """Takes as long as an emulated device."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def load(self, ticket: Ticket) -> Sequence[Points]:
        return [Traced(points.inputs, points.targets, (str(os.getpid()),)) for points in super().load(ticket)]

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        time.sleep(self.seconds)
        return super().loss(model, examples)


class ReadyLoader(Loader):
    """Has its processes from the beginning."""

    def __init__(self, *what: Any, **how: Any) -> None:
        super().__init__(*what, **how)
        while self._num_workers > 0 and not self.is_ahead:
            time.sleep(0.01)


class Reporter(Observer):
    """Tells the launcher about every step, and whether a loading process had loaded it."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def on_claim(self, report: ClaimReport) -> None:
        is_loaded_ahead = report.ids != (str(os.getpid()),)
        self._link.send(Activity(values={"step": report.ticket.step, "is_loaded_ahead": is_loaded_ahead}))


def main(num_workers: int, link: Link) -> None:
    torch.set_num_threads(1)
    place = find_place(timeout_seconds=60)
    member.Loader = ReadyLoader  # type: ignore[misc]
    job = Job(
        workload=Unequal(STEP_SECONDS * (1 if place.rank else SLOWER)),
        strategy=STRATEGIES["adpsgd"],
        options=STRATEGIES["adpsgd"].options(),
        budget=Budget(steps=STEPS),
        make_optimizer=sgd(0.01),
        num_workers=num_workers,
    )
    member.run_learner(job, place, torch.device("cpu"), "same", Reporter(link), timeout_seconds=60.0)


if __name__ == "__main__":
    from tests.launch import unequal_process  # loading processes know its classes under this name

    line = Link.from_environment()
    with reported_errors(line):
        if line is not None:
            unequal_process.main(int(sys.argv[1]), line)
