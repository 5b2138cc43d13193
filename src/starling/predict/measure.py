"""What learners measure of their machines, and what a profile measures, as a strategy that learners run.

Learners are started, connected and watched as in any run, so that what is measured is what training will pay.
"""

import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from starling.configuration import Config
from starling.learner import Learner
from starling.strategies import Strategy
from starling.strategies.parts.mixing import Encoder, Mixing
from starling.topology import Topology, find_topology
from starling.training.job import Job

Seconds = float
MEASURE = f"{__name__}:MEASURING"
"""How a run names the strategy below."""
WARM_UP = 3
"""Of whatever is measured, so many are made first and not counted."""
REPEATS = 15
"""Exchanges and means of each size."""
SHARES = (0.0, 1 / 16, 1 / 4, 1.0)
"""The sizes of what is exchanged, as shares of the model; at least `SMALLEST` numbers."""
SMALLEST = 256


@dataclass
class Figures:
    """What one learner measured, in seconds."""

    gradients: list[Seconds] = field(default_factory=list)
    """Each from its claim, loading included."""
    steps: list[Seconds] = field(default_factory=list)
    """The copy of the weights and the optimizer's step."""
    synchronous: list[Seconds] = field(default_factory=list)
    """Steps of `allreduce`: from the claim until the mean of all gradients is there. Empty where none was made, because
    one takes too long, or `allreduce` would be slow anyway."""
    applies: list[Seconds] = field(default_factory=list)
    """Changing the whole model by a vector."""
    exchanges: dict[int, Seconds] = field(default_factory=dict)
    """By bytes: a part of the weights to a neighbour and from it, mixed and applied; medians."""
    means: dict[int, Seconds] = field(default_factory=dict)
    """Of all learners, by bytes."""
    rounds: dict[str, Seconds] = field(default_factory=dict)
    """A round of averaging by pattern, while all learners average and compute gradients."""
    num_bytes: int = 0
    """Of the weights."""
    lost: float = 0.0
    """The share of its time that this learner loses while a round is under way: its gradients wait for processor,
    memory and links, claims for answers behind the weights."""
    memory_bytes: int = 0
    device: str = "cpu"

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
        figures.exchanges = await _medians(me, exchanging)
        figures.means = await _medians(me, lambda size: me.mean(vector[:size]))
    change, gradients = torch.zeros_like(me.weights), figures.gradients if me.world == 1 else figures.synchronous

    async def apply() -> None:
        me.apply(change)

    figures.applies = (await timed(me, apply, WARM_UP + REPEATS))[WARM_UP:]
    own = partial(me.gradient, me.weights)
    while await timed_step(me, lambda _: own() if me.world == 1 else me.mean(own()), gradients, figures.steps):
        pass
    del gradients[:WARM_UP], figures.steps[:WARM_UP]
    _note_memory(me, figures)
    figures.write(options.folder, me.rank)


def bare(job: Job, **changes: Any) -> Job:
    """A job as it is measured: without faults, checkpoints within an epoch, and weights or shares of mini-batches."""
    return replace(job, faults=(), checkpoint_every=None, weighting="batches", batch_shares={}, **changes)


async def timed_step(
    me: Learner, compute: Callable[[Tensor], Awaitable[Tensor]], gradients: list[Seconds], steps: list[Seconds]
) -> bool:
    """Claim, compute a gradient with a copy of the weights, and apply it; False if the budget is spent.

    The seconds of the first two are appended to `gradients`, those of the rest and of the copy to `steps`.
    """
    begin = now(me)
    if not me.claim():
        return False
    claimed = now(me)
    weights = me.snapshot()
    copied = now(me)
    gradient = await compute(weights)
    computed = now(me)
    me.step(gradient)
    gradients.append(claimed - begin + computed - copied)
    steps.append(copied - claimed + now(me) - computed)
    return True


async def timed(me: Learner, work: Callable[[], Awaitable[object]], repeats: int) -> list[Seconds]:
    """The seconds that `work` takes each time."""
    found = []
    for _ in range(repeats):
        begin = now(me)
        await work()
        found.append(now(me) - begin)
    return found


async def exchange(me: Learner, topology: Topology, tags: Iterator[int], size: int) -> None:
    """Average so many weights with neighbours, once."""
    piece = slice(0, size)
    me.apply(await Mixing(me, topology, next(tags), piece, Encoder()).delta(), piece)


async def _medians(me: Learner, work: Callable[[int], Awaitable[object]]) -> dict[int, Seconds]:
    """The seconds that `work` takes on parts of the weights, by bytes."""
    number, item = len(me.weights), me.weights.element_size()
    sizes = sorted({min(number, max(SMALLEST, int(share * number))) for share in SHARES})
    return {size * item: median((await timed(me, partial(work, size), WARM_UP + REPEATS))[WARM_UP:]) for size in sizes}


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
        figures.memory_bytes = peak_memory()


def peak_memory() -> int:
    """The most memory that this process has used, in bytes. On Linux, `getrusage` would also count what the process
    that started it had used."""
    with suppress(OSError, StopIteration), Path("/proc/self/status").open(encoding="ascii", errors="replace") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


MEASURING = Strategy(MEASURE, "measure gradients, exchanges and means", measure, options=MeasureOptions)
