"""The program of a learner process in the tests of joining: `joining_process.py MODE HURRY`.

A mode is a strategy, and what goes wrong with joiners, or with those of odd ids alone: `adpsgd`, `adpsgd/alien`,
`hadpsgd/half-shot`. `adpsgd+sharded` and `adpsgd+tensor` are those of islands of two. Mini-batches take their time
until there is a file HURRY.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from starling.budget import Budget
from starling.engines.processes.member import run_learner
from starling.errors import DataError
from starling.launch.link import Link, reported_errors
from starling.launch.messages import Activity
from starling.launch.rendezvous import find_membership, find_place, joins
from starling.strategies import find_strategy
from starling.strategies.islands import Island
from starling.training.job import Job
from starling.training.membership import Membership, MembershipFeed, Stage
from starling.workload import Ticket
from tests.contract.cases import sgd
from tests.contract.problems import Points
from tests.launch.learner_process import Planned, Reporter

NUM_MINI_BATCHES = 2000
OPTIONS = {"hadpsgd": {"per_node": 2}, "parameter-server": {"servers": "own"}}


class Unhurried(Planned):
    """Mini-batches that take their time until there is a file."""

    def __init__(self, hurry: Path) -> None:
        super().__init__()
        self._hurry = hurry

    def load(self, ticket: Ticket) -> list[Points]:
        if not self._hurry.exists():
            time.sleep(0.05)
        return list(super().load(ticket))


class Dying(Unhurried):
    """Its second mini-batch kills the process: the first one only warms up."""

    num_loaded = 0

    def load(self, ticket: Ticket) -> list[Points]:
        self.num_loaded += 1
        if self.num_loaded > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load(ticket)


def await_word(membership: MembershipFeed, word: Path, link: Link) -> None:
    """Be ready only when there is a file."""
    first = membership.first

    def late() -> Membership:
        link.send(Activity(values={"waits": True}))
        while not word.exists():
            time.sleep(0.001)
        return first()

    membership.first = late  # type: ignore[method-assign]


def on_arrival(membership: MembershipFeed, do: Callable[[], None]) -> None:
    """Do something before it is reported that this learner is about to connect to the others."""
    report = membership.report

    def reporting(stage: Stage, number: int) -> None:
        if stage == "arrived":
            do()
        report(stage, number)

    membership.report = reporting


def main(mode: str, hurry: Path, link: Link | None) -> None:
    torch.set_num_threads(1)
    place = find_place(timeout_seconds=60)
    name, _, trouble = mode.partition("/")
    is_half = trouble.startswith("half-")
    trouble = trouble.removeprefix("half-") if joins() and (place.rank % 2 == 1 or not is_half) else ""
    if trouble == "fails":
        raise DataError("the disk of this learner is gone")
    name, _, island = name.partition("+")
    strategy = find_strategy(name)
    job = Job(
        workload=(Dying if trouble == "dies" else Unhurried)(hurry),
        strategy=strategy,
        options=strategy.options(**OPTIONS.get(name, {})),
        budget=Budget(steps=NUM_MINI_BATCHES),
        make_optimizer=sgd(0.01),
        island=Island(**{island: 2} if island else {}),
    )
    membership = find_membership(place, link)
    if trouble == "stuck":  # ready, and then never seen where they meet
        on_arrival(membership, lambda: time.sleep(1000))
    if trouble == "shot":
        on_arrival(membership, lambda: os.kill(os.getpid(), signal.SIGKILL))
    if trouble == "late" and link is not None:
        await_word(membership, hurry.with_name("come"), link)
    state = run_learner(
        job,
        place,
        torch.device("cpu"),
        digest="another" if trouble == "alien" else "same",
        observer=Reporter(link, dies=False),
        timeout_seconds=60,
        membership=membership,
    )
    if link is not None:
        link.send(Activity(values={"left": True} if state is None else {"num_done": state.position.num_done}))


if __name__ == "__main__":
    line = Link.from_environment()
    with reported_errors(line):
        main(sys.argv[1], Path(sys.argv[2]), line)
