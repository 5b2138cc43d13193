"""The program of a learner process whose strategy has servers or shared memory, and one of whom is killed."""

import json
import os
import sys
from collections.abc import Sequence

import torch
from torch.distributed.distributed_c10d import Store

from starling.budget import Budget
from starling.engines.processes.member import run_learner
from starling.launch.rendezvous import find_place
from starling.strategies import find_strategy
from starling.training.job import Job, Observer
from starling.workload import Ticket
from tests.contract.cases import adam
from tests.contract.problems import ConstantGradient, Points

KILLED_AT = 40
"""The mini-batch at whose loading the victim is killed."""


class Killing(ConstantGradient):
    """Whoever loads a certain mini-batch sends the victim a signal, were it itself."""

    def __init__(self, store: Store, victim: int, number: int) -> None:
        super().__init__(dimensions=1000)
        self._store, self._victim, self._number = store, victim, number

    def load(self, ticket: Ticket) -> Sequence[Points]:
        if ticket.step == KILLED_AT:
            self._store.set("fired", "")
            os.kill(int(self._store.get(f"pid/{self._victim}")), self._number)
        return super().load(ticket)


def main(strategy: str, options: str, victim: str, number: str = "9", timeout_seconds: str = "60") -> None:
    torch.set_num_threads(1)
    place = find_place()
    place.store.set(f"pid/{place.rank}", str(os.getpid()))
    chosen = find_strategy(strategy)
    checked = chosen.options.model_validate(json.loads(options))
    workload = Killing(place.store, int(victim), int(number))
    job = Job(workload, chosen, Budget(steps=5000), adam(0.01), options=checked)
    run_learner(job, place, torch.device("cpu"), "", Observer(), timeout_seconds=float(timeout_seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
