"""What the machines of a run cost, measured by all of its learners together, before the run.

Unlike a profile, which one and two learners make on one machine, this finds slow learners and links that many share.
"""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median

import torch

from starling.errors import ConfigError
from starling.learner import Learner
from starling.strategies.hadpsgd import SideBySide
from starling.strategies.mixing import Compression, Mixing, MixingOptions, check_mixing
from starling.topology import Topology, find_topology

Seconds = float
SHARE = 0.03
"""Of the expected time of the run: what measuring may take, unless the least that it needs takes longer."""
MOST_GRADIENTS, FEWEST_GRADIENTS = 40, 2
MOST_REPEATS = 8
DRAWS = 3
"""Rounds of a random pattern, at least: they cross a slow link more or less often."""
CLEARLY = 0.5
"""Steps of `allreduce` are not measured where it would make less than this share of the gradients that the learners
make without waiting, even if a mean took no time."""
PROBE = 16
"""The probe of a message is this part of the model. Where the model would take too long, the probe is scaled up."""
SMALLEST = 256
"""Numbers of the smallest message."""
PATTERNS = ("ring", "random", "pairs")
INSIDE, ACROSS = "inside a node", "across nodes"


@dataclass
class AtHand:
    """What one learner measured, in seconds."""

    gradients: list[Seconds] = field(default_factory=list)
    """Each from its claim, loading included; the others compute, too."""
    steps: list[Seconds] = field(default_factory=list)
    """The copy of the weights, and the optimizer's step."""
    synchronous: list[Seconds] = field(default_factory=list)
    """Steps of `allreduce`: from the claim until the mean of all gradients is there. Empty where one takes too long, or
    `allreduce` would be slow anyway."""
    mean: Seconds = 0.0
    """Of all models."""
    exchanges: dict[str, Seconds] = field(default_factory=dict)
    """A round of averaging by pattern, while all others average, too. `INSIDE`: with the learners of the same node;
    `ACROSS`: a share of the model with the learners' counterparts on other nodes."""
    num_bytes: int = 0
    """Of the weights."""


@dataclass(frozen=True)
class Allowance:
    """How long measuring may take."""

    gradients: int | None
    """Mini-batches of the run; None: its budget is in minutes."""
    minutes: float | None
    most: Seconds

    def seconds(self, each: Sequence[Seconds]) -> Seconds:
        """For learners whose gradients take `each`."""
        limits = [self.minutes * 60.0] if self.minutes is not None else []
        if self.gradients is not None:
            limits.append(self.gradients / sum(1.0 / max(seconds, 1e-9) for seconds in each))
        return min(self.most, SHARE * min(limits, default=self.most / SHARE))


async def measure_at_hand(me: Learner, per_node: int, allowance: Allowance, found: AtHand) -> None:
    """Measure gradients, a mean, averaging rounds, and steps of `allreduce`, all learners at once.

    Args:
        me: The learner that measures. Its model is a copy, and is trained by the steps of `allreduce`.
        per_node: Learners of a node; 1: there are no nodes.
        allowance: How long it may take.
        found: Is filled in.
    """
    found.num_bytes = me.weights.nbytes
    await _gradient(me, found)
    every = await gather(me, found.gradients[0])
    box = allowance.seconds(every) / 3.0
    enough = max(
        box, (FEWEST_GRADIENTS - 1) * max(every)
    )  # fast learners keep a shared machine busy until the slow end
    for _ in range(max(FEWEST_GRADIENTS - 1, min(MOST_GRADIENTS, int(enough / every[me.rank])))):
        await _gradient(me, found)
    if len(found.gradients) > MOST_GRADIENTS // 4:
        del found.gradients[0], found.steps[0]  # the first one prepares
    patterns = topologies(me.world, per_node, me.seed)
    longest = box / (len(patterns) + 1), allowance.most / 3.0 / (len(patterns) + 1)
    tags = iter(range(1 << 30))
    for name, topology in patterns.items():
        fewest = DRAWS if name in ("random", "pairs") else 1
        exchange = partial(_exchange, me, topology, tags)
        found.exchanges[name] = await _timed(me, exchange, per_node if name == ACROSS else 1, fewest, *longest)
    found.mean = await _timed(me, partial(_mean, me), 1, 1, *longest)
    every = await gather(me, median(found.gradients))
    expected = max(every) + found.mean
    may_be_chosen = me.world / max(every) > CLEARLY * sum(1.0 / max(each, 1e-9) for each in every)
    if may_be_chosen and 2 * expected <= max(box, allowance.most / 3.0):
        await _synchronous_step(me, found)
        found.synchronous.clear()  # the first one prepares
        for _ in range(max(1, min(MOST_REPEATS, int(box / expected)))):
            await _synchronous_step(me, found)


def topologies(world: int, per_node: int, seed: int) -> Mapping[str, Topology]:
    """What is averaged with whom, by name: the patterns that differ for so many learners, and those of nodes."""
    found: dict[str, Topology] = {}
    for name in PATTERNS if world > 2 else PATTERNS[:1]:
        try:
            check_mixing(MixingOptions(pattern=name), world)
        except ConfigError:
            continue
        found[name] = find_topology(name, world, seed)
    if has_nodes(world, per_node):
        found[INSIDE] = _Inside(find_topology("ring", per_node, seed), world)
        found[ACROSS] = SideBySide(find_topology("ring", world // per_node, seed), per_node)
    return found


def has_nodes(world: int, per_node: int) -> bool:
    """Whether so many learners form several nodes of the same size."""
    return 1 < per_node < world and world % per_node == 0


class _Inside(Topology):
    """The topology of one node's learners, the same on all nodes."""

    def __init__(self, of_node: Topology, world: int) -> None:
        super().__init__(world)
        self._of_node = of_node

    def sources(self, k: int, rank: int) -> Mapping[int, float]:
        first, local = rank - rank % self._of_node.world, rank % self._of_node.world
        return {first + peer: weight for peer, weight in self._of_node.sources(k, local).items()}

    def targets(self, k: int, rank: int) -> Sequence[int]:
        first, local = rank - rank % self._of_node.world, rank % self._of_node.world
        return [first + peer for peer in self._of_node.targets(k, local)]


async def gather(me: Learner, value: float) -> list[float]:
    """Every learner's value, by rank; all of them wait for it. The mean is the one operation that joins all."""
    own = me.weights.new_zeros(min(me.world, len(me.weights)))
    if len(own) < me.world:
        return [value] * me.world  # a model of fewer weights than learners
    own[me.rank] = value
    return [float(each) * me.world for each in await me.mean(own)]


async def _gradient(me: Learner, found: AtHand) -> None:
    begin = _now(me)
    me.claim()
    gradient = await me.gradient(me.weights)
    found.gradients.append((computed := _now(me)) - begin)
    me.snapshot()
    me.step(gradient)
    found.steps.append(_now(me) - computed)


async def _synchronous_step(me: Learner, found: AtHand) -> None:
    begin = _now(me)
    me.claim()
    gradient = await me.mean(me.gradient(me.weights))
    found.synchronous.append(_now(me) - begin)
    me.step(gradient)


async def _exchange(me: Learner, topology: Topology, tags: Iterator[int], size: int) -> None:
    piece = slice(0, size)
    compression = Compression(MixingOptions(), me.weights, [])
    me.apply(await Mixing(me, topology, next(tags), piece, compression).delta(), piece)


async def _mean(me: Learner, size: int) -> None:
    await me.mean(me.snapshot()[:size])


async def _timed(
    me: Learner, work: Callable[[int], Awaitable[None]], share: int, fewest: int, box: Seconds, most: Seconds
) -> Seconds:
    """Seconds that `work` takes on 1 / `share` of the model, the mean over learners.

    It is repeated for about `box` seconds, and at least `fewest` times. A probe tells how often, and whether that would
    take more than `most`.
    """

    async def once(size: int) -> Seconds:
        begin = _now(me)
        await work(size)
        return _now(me) - begin

    size = max(1, len(me.weights) // share)
    probe = min(size, max(SMALLEST, size // PROBE))
    await once(probe)  # connects
    expected = max(await gather(me, await once(probe))) * size / probe
    if fewest * expected > most:
        return expected
    repeats = max(fewest, min(MOST_REPEATS, int(box / max(expected, 1e-9))))
    return fmean(await gather(me, fmean([await once(size) for _ in range(repeats)])))


def _now(me: Learner) -> Seconds:
    """The time, once the learner's device has done what was asked of it."""
    if me.weights.device.type == "cuda":
        torch.cuda.synchronize(me.weights.device)
    return time.monotonic()
