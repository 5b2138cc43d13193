"""The program of a learner whose model is another one on each learner. `resuming_process.py STRATEGY RATE`"""

import sys

import torch
from torch import nn

from starling.budget import Budget
from starling.engines.processes.member import run_learner
from starling.launch.rendezvous import find_place
from starling.strategies import STRATEGIES
from starling.training.job import Job, Observer
from tests.contract.cases import sgd
from tests.contract.problems import TinyRegression


class Unseeded(TinyRegression):
    """Learner r adds r times `by` to one weight."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def make_model(self) -> nn.Module:
        model = super().make_model()
        next(model.parameters()).data[0, 0] += self.by
        return model


def main(strategy: str, by: float) -> None:
    torch.set_num_threads(1)
    place = find_place(timeout_seconds=60)
    job = Job(Unseeded(place.rank * by), STRATEGIES[strategy], Budget(steps=9), sgd(0.01))
    run_learner(job, place, torch.device("cpu"), "same", Observer(), timeout_seconds=60.0)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
