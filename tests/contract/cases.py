"""Short training runs, by name, so that a test and the learner processes it starts build the same."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch.optim import Optimizer

from starling.budget import Budget, Schedule
from starling.configuration import Config
from starling.learner import Learner
from starling.strategies import STRATEGIES, NoOptions, Strategy
from starling.strategies.ako import AkoOptions
from starling.strategies.allreduce import AllReduceOptions
from starling.strategies.decoupled_diloco import DecoupledOptions
from starling.strategies.delayed import DelayOptions
from starling.strategies.hadpsgd import HierarchicalOptions
from starling.strategies.hogwild import HogwildOptions
from starling.strategies.local_sgd import LocalSgdOptions
from starling.strategies.parts.rules import ServerOptions
from starling.strategies.qg_dsgdm import QgDsgdmOptions
from starling.strategies.sgp import PushSumOptions
from starling.topology import PATTERNS
from starling.training.faults import Fault, NotFinite
from starling.training.freezing import Freeze, Until
from starling.training.job import Job
from starling.training.speeds import BatchShares, Stragglers
from starling.workload import Weighting
from tests.contract.problems import ConstantGradient, Points, SkippingLayers, TinyRegression, Uneven, Workload

MakeOptimizer = Callable[..., Optimizer]


def sgd(learning_rate: float) -> MakeOptimizer:
    return lambda parameters: torch.optim.SGD(parameters, lr=learning_rate)


def adam(learning_rate: float) -> MakeOptimizer:
    return lambda parameters: torch.optim.Adam(parameters, lr=learning_rate)


def adamw(learning_rate: float) -> MakeOptimizer:
    """Its weight decay moves weights whose gradient is 0."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.5)


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


LEARNING_RATE = 2.0**-6
"""A power of 2, so that steps of this size are counted without rounding."""
NOT_FINITE = (NotFinite(nan=0, at_step=2), NotFinite(nan=0, at_step=5))
EXCHANGES = Strategy("exchanges", "only in tests", ring_of_exchanges)


@dataclass(frozen=True)
class Choice:
    """A registered strategy with options, as the contract runs it."""

    strategy: Strategy
    options: Callable[[int], Config] = lambda world: NoOptions()
    """From the number of learners."""
    counts_whole: bool = False
    """Whether each gradient moves the model by all of itself, rather than by its share of a mean."""

    def share(self, world: int) -> float:
        """By how much of itself each gradient moves the mean of `world` learners' weights."""
        return 1.0 if self.counts_whole else 1.0 / self.strategy.sync_groups(self.options(world), world).num_workers

    @property
    def is_synchronous(self) -> bool:
        """Whether all learners take their steps together, so that a run is the same however fast they are."""
        return self.strategy.sync_group_size(self.options(6), 6) == 6


def _allreduce(**options: Any) -> Choice:
    return Choice(STRATEGIES["allreduce"], lambda world: AllReduceOptions.model_validate(options))


def _gossip(name: str, **options: Any) -> Choice:
    strategy = STRATEGIES[name]
    return Choice(strategy, lambda world: strategy.options.model_validate(options))


def _quasi_global(world: int) -> QgDsgdmOptions:
    """A learner alone has no momentum."""
    return QgDsgdmOptions(beta=0.8 if world > 1 else 0.0, mu=0.2)


def _served(shards: int = 1, servers: str = "beside", **options: Any) -> Choice:
    def fitting(world: int) -> ServerOptions:
        alone = world == 1
        return ServerOptions(
            shards=1 if alone else shards,
            servers="beside" if alone else servers,
            **options | ({"overlap": False, "sum": 1} if alone and "sum" in options else {}),
        )

    return Choice(STRATEGIES["parameter-server"], fitting, counts_whole=options.get("update") != "hybrid")


def _served_periodically(name: str, world: int, shards: int = 1, **options: Any) -> Config:
    return STRATEGIES[name].options(shards=min(shards, world), **options)


PERIODIC: dict[str, dict[str, Any]] = {
    "local-sgd": {"every": 3},
    "post-local-sgd": {"every": 4, "warm_up": 3, "optimizer_state": "averaged"},
    "bmuf": {"every": 3, "warm_up": 0, "nesterov": False, "optimizer_state": "reset"},
    "slowmo": {"every": 2},
    "diloco": {"every": 3},
    "noloco": {"every": 3},
    "streaming-diloco": {"every": 6, "fragments": 3, "overlap": 2},
    "streaming-diloco-int4": {"every": 6, "fragments": 3, "overlap": 2, "compression": "int4"},
    "easgd": {"every": 2},
    "sparta": {"share": 0.2},
    "sparseloco": {"every": 3, "compression": {"top_k": 0.2, "bits": 2}},
}
"""The strategies that agree every few steps, with options that the contract's short runs can show."""
METHODS = {"streaming-diloco-int4": "streaming-diloco"}


def _periodic(name: str, options: dict[str, Any], world: int) -> Config:
    """With one learner, constants that make an agreement with oneself no change."""
    kind = STRATEGIES[METHODS.get(name, name)].options
    alone: dict[str, Any] = {"rate": 1.0, "momentum": 0.0, "overlap": 0, "blend": 0.0, "optimizer_state": "local"}
    chosen = options | (
        {name: value for name, value in alone.items() if name in kind.model_fields} if world == 1 else {}
    )
    return kind.model_validate(chosen)


def _hadpsgd(world: int) -> HierarchicalOptions:
    return HierarchicalOptions(per_node=2 if world % 2 == 0 else 1, pattern="pairs")


def choices() -> dict[str, Choice]:
    """Every registered strategy, in every pattern."""
    made = {"allreduce": _allreduce(), "allreduce-int8": _allreduce(compression="int8")}
    made["allreduce-low-rank"] = _allreduce(compression={"low_rank": 1})
    made["delay-by-one"] = Choice(STRATEGIES["delay-by-one"])
    for pattern in PATTERNS:
        made[f"dpsgd-{pattern}"] = _gossip("dpsgd", pattern=pattern)
        made[f"adpsgd-{pattern}"] = _gossip("adpsgd", pattern=pattern)
    made["adpsgd-bfloat16"] = _gossip("adpsgd", compression="bfloat16")
    made["dpsgd-int4"] = _gossip("choco", compression="int4", consensus_rate=0.75)
    made["gossip-pga"] = _gossip("gossip-pga", every=5)
    made["dpsgd-quasi-global"] = Choice(STRATEGIES["qg-dsgdm"], _quasi_global)
    made["dpsgd-d2"] = _gossip("d2")
    made["dpsgd-tracking"] = _gossip("gradient-tracking", pattern="pairs")
    made["sgp"] = Choice(STRATEGIES["sgp"], lambda world: PushSumOptions())
    made["sgp-overlap"] = Choice(STRATEGIES["sgp"], lambda world: PushSumOptions(overlap=True))
    made["adpsgd-int8"] = _gossip("adpsgd", pattern="ring", compression="int8")
    made["a2cid2"] = _gossip("a2cid2", acceleration={"rate": 0.3, "step": 1.2})
    made["adpsgd-in-pieces"] = _gossip("adpsgd", piece_megabytes=1e-4, period=0.5)
    made["adpsgd-all-averaged"] = _gossip("adpsgd", optimizer_state="averaged", pattern="pairs", period=2.0)
    made["hadpsgd"] = Choice(STRATEGIES["hadpsgd"], _hadpsgd)
    made["server-hybrid"] = _served(update="hybrid")
    made["server-asynchronous"] = _served(shards=2)
    made["server-summed"] = _served(update="summed", sum=2, overlap=True)
    made["server-synchronous"] = _served(update="synchronous", shards=2)
    made["server-bounded-own"] = _served(staleness_bound=1, servers="own")
    made["server-hybrid-own"] = _served(update="hybrid", servers="own")
    as_whole = {"rate": 1.0, "momentum": 0.0, "delay": 1, "every": 3, "shards": 2}
    made["server-async-diloco"] = Choice(
        STRATEGIES["async-diloco"], lambda world: _served_periodically("async-diloco", world, **as_whole), True
    )
    made["server-aeasgd"] = Choice(STRATEGIES["aeasgd"], lambda world: _served_periodically("aeasgd", world, every=2))
    made["decoupled-diloco"] = Choice(
        STRATEGIES["decoupled-diloco"],
        lambda world: DecoupledOptions(
            every=6, fragments=3, overlap=2 * (world > 1), rate=1.0, momentum=0.0, quorum=world
        ),
    )
    made["decoupled-diloco-int8"] = Choice(
        STRATEGIES["decoupled-diloco"],
        lambda world: DecoupledOptions(
            every=6, fragments=3, overlap=2 * (world > 1), rate=1.0, momentum=0.0, quorum=world, compression="int8"
        ),
    )
    made["hogwild"] = Choice(STRATEGIES["hogwild"], lambda world: HogwildOptions(piece_megabytes=1e-4), True)
    for name, options in PERIODIC.items():
        made[name] = Choice(STRATEGIES[METHODS.get(name, name)], partial(_periodic, name, options))
    made["ako"] = Choice(STRATEGIES["ako"], lambda world: AkoOptions(parts=3))
    made["ako-sum"] = Choice(STRATEGIES["ako"], lambda world: AkoOptions(parts=3, combine="sum"), counts_whole=True)
    made["delayed"] = Choice(STRATEGIES["delayed"], lambda world: DelayOptions(delay=0 if world == 1 else 2))
    assert {choice.strategy.name for choice in made.values()} == set(STRATEGIES)
    return made


CHOICES = choices()


@dataclass(frozen=True)
class Case:
    """A run to be made on both engines."""

    choice: Choice
    workload: Callable[[int], Workload[Points]]
    optimizer: MakeOptimizer
    steps: int = 24
    minutes: float | None = None
    clip_norm: float | None = None
    schedule: Schedule = field(default_factory=lambda: Schedule(decay="constant"))
    stragglers: Stragglers = field(default_factory=Stragglers)
    faults: tuple[Fault, ...] = ()
    weighting: Weighting = "batches"
    batch_shares: BatchShares = field(default_factory=dict)
    freeze: tuple[Freeze, ...] = ()

    def job(self, world: int) -> Job:
        return Job(
            workload=self.workload(world),
            strategy=self.choice.strategy,
            options=self.choice.options(world),
            budget=Budget(steps=self.steps, minutes=self.minutes),
            make_optimizer=self.optimizer,
            schedule=self.schedule,
            clip_norm=self.clip_norm,
            stragglers=self.stragglers,
            faults=self.faults,
            weighting=self.weighting,
            batch_shares=self.batch_shares,
            freeze=self.freeze,
            seed=11,
        )


def plain(world: int) -> TinyRegression:
    return TinyRegression()


def same_data(world: int) -> TinyRegression:
    return TinyRegression(same_data_for=world)


def counted(world: int) -> ConstantGradient:
    return ConstantGradient(dimensions=1_000)


def accumulated(world: int) -> TinyRegression:
    return TinyRegression(micro_batches=3, dropout=0.2)


def uneven(world: int) -> Uneven:
    return Uneven()


def skipping(world: int) -> SkippingLayers:
    return SkippingLayers(micro_batches=2)


THAWED = Freeze(parameters=("0",), until=Until(fraction=0.5))
"""The first layer of `TinyRegression`, for half of the budget."""
FROZEN = Freeze(parameters=("0",), until=Until(epochs=1000))
"""The same for longer than any case takes."""
NUM_FROZEN = 24
"""Weights of the first layer, which come first."""


SHARED = ("allreduce", "delay-by-one", "dpsgd-ring", "post-local-sgd")
"""What both engines run with batch shares."""


@cache
def cases() -> dict[str, Case]:
    """Every registered strategy in every way that the contract asks about."""
    made = {}
    for name, choice in {**CHOICES, EXCHANGES.name: Choice(EXCHANGES)}.items():
        made[f"{name}/sgd"] = Case(choice, plain, sgd(0.1))
        made[f"{name}/adam"] = Case(choice, plain, adam(0.01), schedule=Schedule(warmup=0.2))
        made[f"{name}/still"] = Case(choice, plain, sgd(0.0))
        made[f"{name}/same-data"] = Case(choice, same_data, sgd(0.1))
        made[f"{name}/accumulated"] = Case(choice, accumulated, sgd(0.1), clip_norm=0.05)
        made[f"{name}/counted"] = Case(choice, counted, sgd(LEARNING_RATE), steps=60)
        made[f"{name}/one-step"] = Case(choice, plain, sgd(0.1), steps=1)
        made[f"{name}/no-step"] = Case(choice, plain, sgd(0.1), steps=0)
        made[f"{name}/first-is-slow"] = Case(choice, plain, sgd(0.1), 9, stragglers=Stragglers(slow={0: 30.0}))
        slow_and_uneven = Stragglers(slow={1: 30.0}, jitter=2.0)
        made[f"{name}/last-is-slow"] = Case(choice, plain, sgd(0.1), 9, stragglers=slow_and_uneven)
        made[f"{name}/unused"] = Case(choice, skipping, adamw(0.01))
        made[f"{name}/thawed"] = Case(choice, plain, adamw(0.01), freeze=(THAWED,))
        made[f"{name}/frozen"] = Case(choice, plain, adamw(0.01), freeze=(FROZEN,))
        made[f"{name}/not-finite"] = Case(choice, plain, adamw(0.01), faults=NOT_FINITE)
    for name in ("allreduce", "server-hybrid"):
        made[f"{name}/weighted"] = Case(CHOICES[name], uneven, sgd(0.1), weighting="utterances")
    rare = Choice(STRATEGIES["local-sgd"], lambda world: LocalSgdOptions(every=12))
    one_slow = Stragglers(slow={1: 30.0})
    made["local-sgd/by-the-clock"] = Case(rare, plain, sgd(0.1), 10**6, minutes=0.01, stragglers=one_slow)
    one_slow = Stragglers(slow={1: 60.0})  # so that whatever else the machine does, shares are the largest
    made["allreduce/measured-shares"] = Case(
        CHOICES["allreduce"], plain, sgd(0.1), 34, stragglers=one_slow, batch_shares="auto"
    )
    corrected = _gossip("adpsgd", pattern="pairs", staleness="gap-aware", scale_by_staleness=True)
    made["adpsgd-pairs/corrected"] = Case(corrected, counted, sgd(LEARNING_RATE), steps=60)
    made["a2cid2/one-slow"] = Case(
        CHOICES["a2cid2"], counted, sgd(LEARNING_RATE), steps=60, stragglers=Stragglers(slow={0: 5.0})
    )
    made["a2cid2/descent"] = Case(CHOICES["a2cid2"], plain, sgd(0.1))
    for name in SHARED:
        made[f"{name}/shares"] = Case(CHOICES[name], plain, adam(0.01), batch_shares={0: 2})
    return made
