"""The program of a learner process in the launcher's tests: `learner_process.py MODE`.

A mode is a strategy, and what goes wrong: `adpsgd`, `delay-by-one/dies`. `adpsgd+sharded` and `adpsgd+tensor` are those
of islands of two.
"""

import os
import signal
import sys
from typing import Any

import torch
from torch import nn

from starling.budget import Budget
from starling.checkpoint.state import LearnerState
from starling.engines.processes import communicator
from starling.engines.processes.member import run_learner
from starling.engines.processes.place import choose_device
from starling.engines.processes.run_token import VARIABLE
from starling.errors import DataError
from starling.launch.link import Link, reported_errors
from starling.launch.messages import Activity
from starling.launch.rendezvous import find_membership, find_place
from starling.strategies import find_strategy
from starling.strategies.islands import Island
from starling.training.job import EpochReport, Job, Observer, StepReport
from starling.training.membership import MembershipFeed
from starling.workload import Ticket
from tests.contract.cases import sgd
from tests.contract.problems import Points, TinyRegression

ENDS = {"sharded": 600, "tensor": 300}
"""The budget of a run that ends, by the kind of its islands."""


class Reporter(Observer):
    """Tells the launcher, where there is one, about every step; `dies` once it is far enough."""

    def __init__(self, link: Link | None, dies: bool) -> None:
        self._link = link
        self._dies = dies

    def on_step(self, report: StepReport) -> None:
        if self._dies and report.ticket.step >= 30:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._link:
            self._link.send(Activity(f"step {report.ticket.step}", {"step": report.ticket.step}))

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        if self._link:
            self._link.send(Activity(values={"weights": state.weights.tolist()}))


class Stopping(Reporter):
    """Learner 0 stops, as SIGSTOP does, in the middle of the run."""

    def on_step(self, report: StepReport) -> None:
        if report.rank == 0 and report.ticket.step >= 30:
            if self._link:
                self._link.send(Activity("stopping", {"step": report.ticket.step, "stops": True}))
            os.kill(os.getpid(), signal.SIGSTOP)
        super().on_step(report)


class Planned(TinyRegression):
    """Its first layer can be cut."""

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.tensor_plan = _plan
        return model


def _plan() -> dict[str, Any]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel

    return {"0": ColwiseParallel(output_layouts=Replicate())}


class Failing(TinyRegression):
    """Cannot load mini-batch 21."""

    def load(self, ticket: Ticket) -> list[Points]:
        if ticket.step == 21:
            raise DataError("utterance u21: 0.0 s of audio")
        return list(super().load(ticket))


def die_in_the_next_membership(membership: MembershipFeed) -> None:
    """Be killed when this learner is connected to the others, and they are being linked for the second membership."""
    links = communicator.MemoryLinks

    def shot(*what: Any, **how: Any) -> Any:
        if membership.latest.number > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return links(*what, **how)

    communicator.MemoryLinks = shot


def main(mode: str, link: Link | None) -> None:
    torch.set_num_threads(1)
    place = find_place(timeout_seconds=30)
    if mode.endswith("/tokens"):
        os.environ[VARIABLE] = f"secret-of-{place.rank}"
    name, _, trouble = mode.partition("/")
    if trouble == "strategies" and place.rank:
        name = "delay-by-one"
    name, _, island = name.partition("+")
    strategy = find_strategy(name)
    job = Job(
        workload=Failing() if trouble == "failing" else Planned(),
        strategy=strategy,
        options=strategy.options(**({"per_node": 2} if name == "hadpsgd" else {})),
        budget=Budget(
            steps={"short": 40, "failing": 40, "ends": ENDS.get(island, 3000), "between": 3000}.get(trouble, 1_000_000)
        ),
        make_optimizer=sgd(0.01),
        island=Island(**{island: 2} if island else {}),
        num_workers=1 if trouble == "loading" else 0,
    )
    stops = trouble == "stops"
    reporter = Stopping(link, dies=False) if stops else Reporter(link, dies=trouble == "dies" and place.rank == 2)
    membership = find_membership(place, link)
    if trouble == "between" and place.rank == 2:
        die_in_the_next_membership(membership)
    state = run_learner(
        job,
        place,
        choose_device(os.environ.get("STARLING_TEST_DEVICE", "cpu"), place),
        digest=f"seed {place.rank}" if trouble == "digests" else "same",
        observer=reporter,
        timeout_seconds={"stops": 2.0, "between": 600.0}.get(trouble, 30.0),
        membership=membership,
    )
    if link is not None and trouble in ("ends", "between"):
        link.send(Activity(values={"left": True} if state is None else {"num_done": state.position.num_done}))


if __name__ == "__main__":
    line = Link.from_environment()
    with reported_errors(line):
        main(sys.argv[1], line)
