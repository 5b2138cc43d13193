"""The runs of the general tests: every method in every encoding, what happens to it, and how it is resumed.

All of it is drawn from seeds, so that a cell of the grid is the same run each time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from starling.budget import Budget
from starling.checkpoint.reader import Checkpoint
from starling.checkpoint.state import LearnerState
from starling.checkpoint.writer import CheckpointWriter
from starling.configuration import Config
from starling.engines.virtual.cluster import Cluster, ComputeModel, WatchModel
from starling.engines.virtual.engine import Outcome, VirtualEngine
from starling.errors import ConfigError, PeerLost
from starling.strategies import STRATEGIES, Strategy
from starling.strategies.parts.means import is_compressed
from starling.training.faults import Fault, Join, Kill
from starling.training.job import ClaimReport, Job, Observer
from starling.training.membership import Membership, MembershipObserver
from starling.training.speeds import Stragglers
from starling.workload import Position, Workload
from tests.contract.cases import CHOICES, MakeOptimizer
from tests.contract.problems import Points

KINDS = ("kill", "join", "resume", "several")
"""What happens: a learner is lost; one joins; the run is resumed, with as many learners or others; all of it."""
SPEEDS = ("even", "uneven")
WORLDS = range(1, 6)
ENCODINGS: dict[str, Any] = {
    "none": "none",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "int4": "int4",
    "int2": "int2",
    "top_k": {"top_k": 0.1},
    "top_k_bits": {"top_k": 0.1, "bits": 2},
    "low_rank": {"low_rank": 1},
}
UNEVEN = 1.3
"""How much longer a gradient of learner 1 takes where speeds are uneven."""
_WATCH = WatchModel(notice=0.02, regroup=0.1, silence=5.0)
CLUSTERS = {
    "even": Cluster(compute=ComputeModel(seconds=0.1), watch=_WATCH),
    "uneven": Cluster(compute=ComputeModel(distribution="log-normal", seconds=0.1, spread=0.2), watch=_WATCH),
}


@dataclass(frozen=True, eq=False)
class Method:
    """A registered strategy with options, in one encoding."""

    name: str
    strategy: Strategy
    make_options: Callable[[int], Config]
    """From the number of learners."""
    changes: tuple[tuple[str, Any], ...] = ()
    """Options that differ from those, where the strategy has them."""

    def options(self, world: int) -> Config:
        """The options for so many learners."""
        base = self.make_options(world)
        chosen = {name: value for name, value in self.changes if name in type(base).model_fields}
        return type(base).model_validate(base.model_dump() | chosen)

    def using(self, **changes: Any) -> Method:
        """The same with other values of those options that its strategy has."""
        return replace(self, changes=(*self.changes, *changes.items()))

    @property
    def is_lossy(self) -> bool:
        """Whether anything that it sends is encoded."""
        return is_compressed(self.options(4))

    def fits(self, world: int, options: Config | None = None) -> bool:
        """Whether so many learners can use it."""
        try:
            self.strategy.validate(options or self.options(world), world)
        except ConfigError:
            return False
        return True

    def job(
        self,
        workload: Workload[Points],
        optimizer: MakeOptimizer,
        steps: int,
        world: int,
        speed: str = "even",
        faults: Sequence[Fault] = (),
        checkpoint_every: int | None = None,
        seed: int = 1,
    ) -> Job:
        """A run of `steps` mini-batches."""
        return Job(
            workload,
            self.strategy,
            Budget(steps=steps),
            optimizer,
            options=self.options(world),
            stragglers=Stragglers(slow={1: UNEVEN} if speed == "uneven" and world > 1 else {}),
            faults=tuple(faults),
            checkpoint_every=checkpoint_every,
            seed=seed,
        )


_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "hadpsgd-ring": ("hadpsgd", {"per_node": 1, "pattern": "ring"}),
    "hadpsgd-last-piece": ("hadpsgd", {"per_node": 2, "pattern": "ring", "piece_megabytes": 28 * 4 / 2**20}),
    "adpsgd-gap-aware": ("adpsgd", {"staleness": "gap-aware"}),
    "adpsgd-compensated": ("adpsgd", {"staleness": {"delay_compensation": 0.04, "mean_square": 0.9}}),
    "server-gap-aware": ("parameter-server", {"staleness": "gap-aware"}),
    "server-compensated": ("parameter-server", {"staleness": {"delay_compensation": 0.04, "mean_square": 0.9}}),
    "server-delayed-nesterov": ("async-diloco", {"every": 3, "momentum": 0.5, "rate": 0.5}),
    "dpsgd-adapt-first": ("dpsgd", {"order": "adapt-first"}),
    "noloco-pull": ("noloco", {"every": 3, "pull": 0.5}),
}
"""Options that the contract does not run, as strategy and options."""


def _plain(strategy: Strategy, options: dict[str, Any]) -> Callable[[int], Config]:
    return lambda world: strategy.options.model_validate(options)


@cache
def methods() -> dict[str, Method]:
    """Every choice of the contract, and a few more, in every encoding that it accepts; by name, such as
    `diloco/int8`."""
    bases = {name: Method(name, choice.strategy, choice.options) for name, choice in CHOICES.items()}
    for name, (strategy, options) in _MORE.items():
        bases[name] = Method(name, STRATEGIES[strategy], _plain(STRATEGIES[strategy], options))
    made, seen = {}, set()
    for name, base in bases.items():
        for encoding, compression in ENCODINGS.items():
            method = replace(base, name=f"{name}/{encoding}")
            if "compression" in type(base.options(4)).model_fields:
                method = method.using(compression=compression)
            elif encoding != "none":
                continue
            try:
                key = method.strategy.name, *(method.options(world).model_dump_json() for world in (3, 4))
                if key in seen or not method.fits(4):
                    continue
            except ValidationError:
                continue
            seen.add(key)
            made[method.name] = method
    return made


class Watch(Observer, MembershipObserver):
    """What a run is seen to do: its checkpoints, who computed each mini-batch, and how it changed its members."""

    def __init__(self) -> None:
        self.engine: VirtualEngine | None = None
        self.by: dict[int, int] = {}
        """The learner that computed each mini-batch last, by the mini-batch's number."""
        self.members: list[tuple[int, ...]] = []
        """The members of each membership after the first."""
        self.apart: list[Tensor] = []
        """How far the weights of the learners were apart at each membership change, those of a lost one included."""
        self._states: dict[Any, list[LearnerState]] = {}

    def on_claim(self, report: ClaimReport) -> None:
        self.by[report.ticket.step] = report.rank

    def on_barrier(self, state: LearnerState) -> None:
        self._states.setdefault((state.world, state.position), []).append(state.copy())

    def pause(self) -> None:
        assert self.engine is not None
        self.apart.append(apart([each.weights for each in self.engine._current.learners]))

    def begin(self, membership: Membership, position: Position, is_first: bool) -> None:
        self.members.append(membership.members)

    @property
    def worlds(self) -> list[int]:
        """The number of learners of each membership after the first."""
        return [len(members) for members in self.members]

    @property
    def lost(self) -> set[int]:
        """The mini-batches that a learner computed which is no member at the end."""
        return {step for step, name in self.by.items() if self.members and name not in self.members[-1]}

    @property
    def complete(self) -> list[list[LearnerState]]:
        """The checkpoints to which every learner has come, in order."""
        found = [states for (world, _), states in self._states.items() if len(states) == world]
        return [sorted(states, key=lambda state: state.rank) for states in found]


def apart(weights: Sequence[Tensor]) -> Tensor:
    """How far the weights of learners are apart, `[P]`."""
    together = torch.stack(list(weights))
    return together.max(dim=0).values - together.min(dim=0).values


_NUMBERS = count()


def resumed(states: Sequence[LearnerState], folder: Path, job: Job, world: int) -> list[LearnerState]:
    """What `world` learners of `job` resume from, after the states of all learners have been written and read."""
    num_written = count(1)
    (folder / "checkpoints").mkdir(exist_ok=True, parents=True)
    writer = CheckpointWriter(
        folder / f"checkpoints/{next(_NUMBERS)}",
        lambda name: next(num_written),
        lambda path, weights, buffers: path.mkdir(),
        {},
    )
    checkpoint: Checkpoint | None = None
    for state in states:
        checkpoint = writer.save(state)
    assert checkpoint is not None
    strategy = job.strategy.described(job.options)
    return [checkpoint.start(rank, world, strategy) for rank in range(world)]


@dataclass(frozen=True)
class Cell:
    """One run: a method, what happens to it, how fast the learners are, how many they are, and which draw of the
    moments it is."""

    method: Method
    kind: str
    speed: str
    world: int
    draw: int = 0

    @property
    def name(self) -> str:
        """How a message names it."""
        return f"{self.method.name} {self.kind} {self.speed} L={self.world} draw {self.draw}"

    @cached_property
    def random(self) -> random.Random:
        """Its own random numbers."""
        return random.Random(self.name)

    @property
    def is_possible(self) -> bool:
        """Whether so many learners can use the method, and can bear what happens."""
        if not self.method.fits(self.world):
            return False
        if self.kind == "join":
            return self.joiners > 0
        return self.kind == "resume" or bool(self.victims)

    @cached_property
    def victims(self) -> list[int]:
        """The learners that the others can do without."""
        method, world, members = self.method, self.world, range(self.world)
        found = []
        for victim in members:
            try:
                left = method.strategy.successors(method.options(world), members, [victim])
            except (PeerLost, ConfigError):
                continue
            found += [victim] if left else []
        return found

    @cached_property
    def joiners(self) -> int:
        """How many learners have to come at once; 0: none can."""
        fits, options = self.method.fits, self.method.options(self.world)
        return next((num for num in (1, 2) if fits(self.world + num, options)), 0)


class NothingHappened(Exception):  # noqa: N818 - the test is at fault
    """A fault that a test injects did not happen. No expected failure may hide this."""


def check_happened(cell: Cell, has_happened: bool) -> None:
    """Raise unless what should happen to a cell did."""
    if not has_happened:
        raise NothingHappened(cell.name)


@dataclass(frozen=True)
class Run:
    """What a cell's run, or its two runs around a resume, came to."""

    outcome: Outcome
    worlds: tuple[int, ...]
    """The number of learners of each membership."""
    apart: Tensor
    """How far the weights of the learners were apart where something happened, the sum over all such moments, `[P]`."""
    lost: set[int]
    """The mini-batches that a learner computed which was lost."""
    is_resumed_otherwise: bool = False
    """Whether it was resumed with another number of learners."""

    @property
    def weights(self) -> list[Tensor]:
        """Those of the learners that compute."""
        return [state.weights for state in self.outcome.states if state.is_worker]


def run_cell(
    cell: Cell,
    workload: Workload[Points],
    optimizer: MakeOptimizer,
    steps_each: int,
    folder: Path,
    between: tuple[float, float] = (0.0, 0.95),
    fewest: int = 1,
) -> Run:
    """Run a cell, with `steps_each` mini-batches for each learner; the first that happens lies `between` two shares of
    the run. No more are lost, and no fewer resume, than `fewest`. Raises `NothingHappened` unless it happened."""
    steps, world, draw = steps_each * cell.world, cell.world, cell.random

    def shards(world: int) -> object:
        return getattr(cell.method.options(world), "shards", None)

    def run(faults: Sequence[Fault], world: int, saves: bool = False, start: Any = None) -> tuple[Outcome, Job, Watch]:
        watch, every = Watch(), world if saves else None
        job = cell.method.job(workload, optimizer, steps, world, cell.speed, faults, every)
        engine = watch.engine = VirtualEngine(job, world, CLUSTERS[cell.speed], watch, start, changes=watch)
        return engine.run(), job, watch

    moment, faults = draw.uniform(*between), []
    if cell.kind != "resume":
        whole = undisturbed(cell.method, workload, optimizer, steps, world, cell.speed)
        if cell.kind == "join":
            faults += [Join(join=world + number, at_seconds=moment * whole.seconds) for number in range(cell.joiners)]
        else:
            faults += [Kill(kill=draw.choice(cell.victims), at_event=1 + int(moment * (whole.num_events - 1)))]
    outcome, _, watch = run(faults, world, saves=cell.kind in ("resume", "several"))
    check_happened(cell, len(outcome.losses) == (cell.kind in ("kill", "several")))
    check_happened(cell, (outcome.num_memberships >= 2) == (cell.kind != "resume"))
    if cell.kind in ("kill", "join"):
        return Run(outcome, (world, *watch.worlds), torch.stack(watch.apart).sum(dim=0), watch.lost)
    saved = watch.complete
    check_happened(cell, len(saved) > 0)
    latest = 0.5 if cell.kind == "several" else 1.0
    chosen = saved[int(latest * draw.uniform(*between) * len(saved))]
    among = [each for each in (len(chosen), len(chosen) - 1, len(chosen) + 1) if fewest <= each <= max(WORLDS)]
    among = [each for each in among if cell.method.fits(each) and shards(each) == shards(len(chosen))]
    again = replace(cell, world=among[cell.random.randrange(len(among))])
    start = resumed(chosen, folder, cell.method.job(workload, optimizer, steps, again.world), again.world)
    faults = []
    if cell.kind == "several":
        at = draw.uniform(0.05, 0.3)
        if again.victims and again.world > fewest:
            faults.append(Kill(kill=draw.choice(again.victims), at_event=draw.randrange(3, 15)))
        faults += [Join(join=again.world + number, at_seconds=at) for number in range(again.joiners)]
    outcome, _, after = run(faults, again.world, start=start)
    check_happened(cell, (outcome.num_memberships >= 2) == bool(faults))
    worlds = (world, *watch.worlds, again.world, *after.worlds)
    distance = torch.stack(
        [*watch.apart, apart([each.weights for each in chosen if each.is_worker]), *after.apart]
    ).sum(dim=0)
    return Run(outcome, worlds, distance, watch.lost | after.lost, again.world != len(chosen))


@cache
def undisturbed(
    method: Method, workload: Workload[Points], optimizer: MakeOptimizer, steps: int, world: int, speed: str
) -> Outcome:
    """The run in which nothing happens."""
    return VirtualEngine(method.job(workload, optimizer, steps, world, speed), world, CLUSTERS[speed]).run()


def named(name: str, *values: Any) -> Any:
    """A parameter set with a name."""
    return pytest.param(*values, id=name.replace(" ", "-"))


FEW = ("allreduce", "adpsgd", "diloco", "parameter-server")
"""What `make test` has of all strategies: one in step, one that gossips, one that agrees now and then, one served."""


def tiered(method: Method, name: str, *values: Any) -> Any:
    """A parameter set with a name, which only `make test-all` has unless its strategy is one of a few."""
    return pytest.param(
        *values, id=name.replace(" ", "-"), marks=() if method.strategy.name in FEW else pytest.mark.wide
    )


def representatives() -> Iterator[Method]:
    """One method of each registered strategy, where there are several the first."""
    seen = set()
    for method in methods().values():
        if method.strategy.name not in seen:
            seen.add(method.strategy.name)
            yield method


def same_bits(vectors: Sequence[Tensor]) -> bool:
    """Whether all vectors are equal, to the bit."""
    return all(torch.equal(each, vectors[0]) for each in vectors)


def counted(items: Sequence[str]) -> str:
    """How often each item occurs, for a message."""
    return ", ".join(f"{item} ({num})" for item, num in Counter(items).items())
