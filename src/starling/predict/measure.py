"""What a profile measures, as strategies that learners run: gradients, exchanges and means, and whole strategies.

Learners are started, connected and watched as in any run, so that what is measured is what training will pay.
"""

import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import torch
from pydantic import Field, TypeAdapter

from starling.configuration import Config
from starling.learner import Learner
from starling.recipe.run import StrategyChoice
from starling.strategies import Strategy, SyncGroups
from starling.strategies.mixing import Encoder, Mixing, MixingOptions
from starling.topology import Topology, find_topology

Seconds = float
MEASURE, TIME = f"{__name__}:MEASURING", f"{__name__}:TIMING"
"""How a run names the strategies below."""
WARM_UP = 3
"""Of whatever is measured, so many are made first and not counted."""
REPEATS = 15
"""Exchanges and means of each size."""
SHARES = (0.0, 1 / 16, 1 / 4, 1.0)
"""The sizes of what is exchanged, as shares of the model; at least `SMALLEST` numbers."""
SMALLEST = 256


@dataclass
class Figures:
    """What one learner measured."""

    gradients: list[Seconds] = field(default_factory=list)
    """Each from its claim, loading included, until it is there; of two learners, until its mean is there."""
    steps: list[Seconds] = field(default_factory=list)
    """The copy of the weights and the optimizer's step."""
    applies: list[Seconds] = field(default_factory=list)
    """Changing the whole model by a vector."""
    exchanges: dict[int, Seconds] = field(default_factory=dict)
    """By bytes: a part of the weights to a neighbour and from it, mixed and applied; medians."""
    means: dict[int, Seconds] = field(default_factory=dict)
    """By bytes; medians."""
    num_bytes: int = 0
    """Of the weights."""
    memory_bytes: int = 0
    device: str = "cpu"
    seconds: Seconds = 0.0
    """Of `TIME`: from the first line of the strategy's text to its last."""

    def write(self, folder: Path, rank: int) -> None:
        """For the process that asked."""
        (folder / f"figures-{rank}.json").write_bytes(TypeAdapter(Figures).dump_json(self))

    @classmethod
    def read(cls, folder: Path, rank: int) -> "Figures":
        """What learner `rank` wrote."""
        return TypeAdapter(cls).validate_json((folder / f"figures-{rank}.json").read_bytes())


class MeasureOptions(Config):
    """The options of the strategy that measures."""

    folder: Path
    """Where each learner writes its figures."""
    repeats: int = Field(default=REPEATS, ge=1)


async def measure(me: Learner, options: MeasureOptions) -> None:
    """Measure exchanges and means with one other learner, if there is one, and then every gradient of the budget,
    or the mean of both learners' gradients.

    Args:
        me: The learner that measures. Its model is trained meanwhile, by plain local steps.
        options: Where the figures go.
    """
    figures = Figures(num_bytes=me.weights.nbytes)
    if me.world == 2:
        exchanging = partial(exchange, me, find_topology("ring", 2, me.seed), count())
        vector = me.snapshot()
        figures.exchanges = await _medians(me, options.repeats, exchanging)
        figures.means = await _medians(me, options.repeats, lambda size: me.mean(vector[:size]))
    change = torch.zeros_like(me.weights)
    for _ in range(WARM_UP + options.repeats):
        begin = now(me)
        me.apply(change)
        figures.applies.append(now(me) - begin)
    begin = now(me)
    while me.claim():
        gradient = await (me.gradient(me.weights) if me.world == 1 else me.mean(me.gradient(me.weights)))
        computed = now(me)
        me.snapshot()
        me.step(gradient)
        stepped = now(me)
        figures.gradients.append(computed - begin)
        figures.steps.append(stepped - computed)
        begin = stepped
    del figures.applies[:WARM_UP], figures.gradients[:WARM_UP], figures.steps[:WARM_UP]
    _note_memory(me, figures)
    figures.write(options.folder, me.rank)


async def exchange(me: Learner, topology: Topology, tags: Iterator[int], size: int) -> None:
    """Average so many weights with neighbours, once."""
    piece = slice(0, size)
    compression = Encoder(MixingOptions(), me.weights, [])
    me.apply(await Mixing(me, topology, next(tags), piece, compression).delta(), piece)


async def _medians(me: Learner, repeats: int, work: Callable[[int], Awaitable[object]]) -> dict[int, Seconds]:
    """The seconds that `work` takes on parts of the weights, by bytes."""
    medians = {}
    for size in _sizes(me):
        found = []
        for _ in range(WARM_UP + repeats):
            begin = now(me)
            await work(size)
            found.append(now(me) - begin)
        medians[size * me.weights.element_size()] = median(found[WARM_UP:])
    return medians


def _sizes(me: Learner) -> list[int]:
    """How many weights are exchanged, ascending."""
    number = len(me.weights)
    return sorted({min(number, max(SMALLEST, int(share * number))) for share in SHARES})


def now(me: Learner) -> Seconds:
    """The time, once the learner's device has done what was asked of it."""
    if me.weights.device.type == "cuda":
        torch.cuda.synchronize(me.weights.device)
    return time.monotonic()


def _note_memory(me: Learner, figures: Figures) -> None:
    """The learner's device, and the most memory that it or this process has used."""
    device = me.weights.device
    if device.type == "cuda":
        figures.device = torch.cuda.get_device_name(device)
        figures.memory_bytes = torch.cuda.max_memory_allocated(device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        figures.memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class TimeOptions(Config):
    """The options of the strategy that times another one."""

    folder: Path
    strategy: StrategyChoice
    """The other one."""


async def time_strategy(me: Learner, options: TimeOptions) -> None:
    """Run another strategy's text, and note how long it took.

    Args:
        me: The learner that runs it.
        options: The strategy, and where the figure goes.
    """
    begin = now(me)
    await options.strategy.strategy.start(me, options.strategy.options)
    Figures(seconds=now(me) - begin).write(options.folder, me.rank)


MEASURING = Strategy(MEASURE, "measure gradients, exchanges and means", measure, options=MeasureOptions)


class TimingStrategy(Strategy):
    """Learners claim mini-batches as under the other strategy."""

    def sync_groups(self, options: TimeOptions, world: int) -> SyncGroups:
        return options.strategy.strategy.sync_groups(options.strategy.options, world)


TIMING = TimingStrategy(TIME, "time another strategy", time_strategy, options=TimeOptions)
