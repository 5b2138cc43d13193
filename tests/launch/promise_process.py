"""The program of a learner process whose run is out of the ordinary: `promise_process.py STRATEGY TROUBLE`.

A trouble is a budget that is tiny or timed, a learner that is slow, different, or dies at the very end.
"""

import json
import os
import signal
import sys
import time

import torch
from torch import Tensor, nn

from starling.budget import Budget
from starling.checkpoint.state import LearnerState
from starling.engines.processes.member import run_learner
from starling.launch.link import Link, reported_errors
from starling.launch.messages import Activity
from starling.launch.rendezvous import find_membership, find_place
from starling.strategies import find_strategy
from starling.training.job import EpochReport, Job, Observer, StepReport
from starling.training.speeds import Stragglers
from tests.contract.cases import sgd
from tests.contract.problems import Points, TinyRegression

NUM_STEPS = 60
SECONDS = 2.0
"""What runs with a timed budget take."""
STEP_SECONDS = 0.02
"""What a mini-batch takes that only sleeps, so that cores are not what learners share."""


class Sleeping(TinyRegression):
    """Takes its time, and no core."""

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        time.sleep(STEP_SECONDS)
        return super().loss(model, examples)


class Odd(TinyRegression):
    """A model of another size, or in another precision."""

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        super().__init__()
        self.dtype, self.width = dtype, width

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, self.width), nn.Linear(self.width, 1)).to(self.dtype)


class Counter(Observer):
    """Counts its learner's steps; may die when all is done but the farewell."""

    def __init__(self, link: Link | None, dies_at_the_end: bool) -> None:
        self.num_steps = 0
        self._link = link
        self._dies_at_the_end = dies_at_the_end

    def on_step(self, report: StepReport) -> None:
        self.num_steps += 1
        if self._link:
            self._link.send(Activity(f"step {report.ticket.step}", {"step": report.ticket.step}))

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        if self._dies_at_the_end and state.position.num_done >= NUM_STEPS:
            if self._link:
                self._link.send(Activity(values={"dies": True}))
            os.kill(os.getpid(), signal.SIGKILL)


def workload(trouble: str, rank: int) -> TinyRegression:
    if trouble in ("slow", "alike"):
        return Sleeping()
    if trouble == "sizes":
        return Odd(torch.float32, 3 + rank)
    if trouble == "dtypes":
        return Odd((torch.float32, torch.float64)[rank], 3)
    return TinyRegression(batches=7)  # which no number of learners here divides


def main(name: str, trouble: str, link: Link | None) -> None:
    torch.set_num_threads(1)
    place = find_place(timeout_seconds=30)
    strategy = find_strategy(name)
    is_timed = trouble in ("slow", "alike")
    counter = Counter(link, dies_at_the_end=trouble == "dies-at-the-end" and place.rank == 2)
    steps = {"zero": 0, "one": 1}.get(trouble, NUM_STEPS)
    job = Job(
        workload=workload(trouble, place.rank),
        strategy=strategy,
        options=strategy.options(),
        budget=Budget(minutes=SECONDS / 60.0) if is_timed else Budget(steps=steps),
        make_optimizer=sgd(0.01),
        stragglers=Stragglers.model_validate({"slow": {0: "10x"}} if trouble == "slow" else {}),
    )
    membership = find_membership(place, link)
    state = run_learner(job, place, torch.device("cpu"), "same", counter, timeout_seconds=30, membership=membership)
    num_done = -1 if state is None else state.position.num_done
    sys.stdout.write(json.dumps({"steps": counter.num_steps, "num_done": num_done}) + "\n")
    if link is not None:
        link.send(Activity(values={"num_done": num_done}))
    if trouble == "dies-after-the-end" and place.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    line = Link.from_environment()
    with reported_errors(line):
        main(sys.argv[1], sys.argv[2], line)
