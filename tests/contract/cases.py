"""Short training runs, by name, so that a test and the learner processes it starts build the same."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from starling.budget import Budget, Schedule
from starling.engines.job import Job
from starling.learner import Learner
from starling.strategies import STRATEGIES, Strategy
from tests.contract.problems import Points, TinyRegression, Workload

MakeOptimizer = Callable[..., Optimizer]


def sgd(learning_rate: float) -> MakeOptimizer:
    return lambda parameters: torch.optim.SGD(parameters, lr=learning_rate)


def adam(learning_rate: float) -> MakeOptimizer:
    return lambda parameters: torch.optim.Adam(parameters, lr=learning_rate)


async def ring_of_exchanges(me: Learner) -> None:
    """A strategy of the tests: average with the right neighbour, then the left one, by exchanges alone."""
    round_number = 0
    while me.claim():
        gradient = await me.gradient(me.weights)
        if me.world > 1:
            for peer in {(me.rank + 1) % me.world, (me.rank - 1) % me.world} if me.world > 2 else {1 - me.rank}:
                theirs = await me.exchange(peer, me.weights, tag=round_number)
                me.apply((theirs - me.weights) / (2 * me.world))
        me.step(gradient)
        round_number += 1


EXCHANGES = Strategy("exchanges", "only in tests", ring_of_exchanges, synchronous=True)


@dataclass(frozen=True)
class Case:
    """A run to be made on both engines."""

    strategy: Strategy
    workload: Callable[[int], Workload[Points]]
    optimizer: MakeOptimizer
    steps: int = 24
    clip_norm: float | None = None
    schedule: Schedule = field(default_factory=lambda: Schedule(decay="constant"))
    num_workers: int = 0

    def job(self, world: int) -> Job:
        return Job(
            workload=self.workload(world),
            strategy=self.strategy,
            budget=Budget(steps=self.steps),
            make_optimizer=self.optimizer,
            schedule=self.schedule,
            clip_norm=self.clip_norm,
            num_workers=self.num_workers,
            seed=11,
        )


def plain(world: int) -> TinyRegression:
    return TinyRegression()


def same_data(world: int) -> TinyRegression:
    return TinyRegression(same_data_for=world)


def accumulated(world: int) -> TinyRegression:
    return TinyRegression(micro_batches=3, dropout=0.2)


def cases() -> dict[str, Case]:
    """Every registered strategy in every way that the contract asks about."""
    made = {}
    for name, strategy in {**STRATEGIES, EXCHANGES.name: EXCHANGES}.items():
        made[f"{name}/sgd"] = Case(strategy, plain, sgd(0.1))
        made[f"{name}/adam"] = Case(strategy, plain, adam(0.01), schedule=Schedule(warmup=0.2))
        made[f"{name}/still"] = Case(strategy, plain, sgd(0.0))
        made[f"{name}/same-data"] = Case(strategy, same_data, sgd(0.1))
        made[f"{name}/accumulated"] = Case(strategy, accumulated, sgd(0.1), clip_norm=0.05)
    made["allreduce/loaded-ahead"] = Case(STRATEGIES["allreduce"], plain, sgd(0.1), num_workers=1)
    return made
