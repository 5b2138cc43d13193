"""What the machines of a run cost, measured by all of its learners together, before the run.

Unlike a profile, which one and two learners make on one machine, this finds slow learners and links that many share.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import fmean, median

from starling.learner import Learner
from starling.predict.measure import exchange, now
from starling.strategies.hadpsgd import SideBySide
from starling.topology import Topology, find_topology

Seconds = float
SHARE = 0.03
"""Of the expected time of the run: what measuring may take, unless the least that it needs takes longer."""
MOST_GRADIENTS, FEWEST_GRADIENTS = 40, 2
MOST_REPEATS = 8
PARTS = 5
"""The share of a third of the allowance that a mean of the model takes, as one pattern of four does."""
DRAWS = 3
"""Rounds of pairs, at least: they cross a slow link more or less often."""
TELLING = 4.0
"""Rounds tell how they slow a learner down if they last as long as so many of its gradients."""
MOST_LOST = 0.95
CLEARLY = 0.5
"""Steps of `allreduce` are not measured where it would make less than this share of the gradients that the learners
make without waiting, even if as much of a mean as possible were hidden behind the gradient."""
PROBE = 16
"""The probe of a message is this part of the model. Where the model would take too long, the probe is scaled up."""
SMALLEST = 256
"""Numbers of the smallest message."""
PATTERNS = ("ring", "pairs")
"""Random rings send twice as many messages as pairs over the same links, and cannot be faster."""
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
    """A round of averaging by pattern, while all learners average, and compute gradients. `INSIDE`: with the learners
    of the same node; `ACROSS`: a share of the model with the learners' counterparts on other nodes."""
    num_bytes: int = 0
    """Of the weights."""
    lost: float = 0.0
    """The share of its time that this learner loses while a round is under way: its gradients wait for processor,
    memory and links, claims for answers behind the weights."""


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


async def measure_apart(me: Learner, per_node: int, allowance: Allowance, found: AtHand) -> None:
    """Measure gradients, and averaging rounds while gradients are computed, all learners at once.

    Args:
        me: The learner that measures. Its model is a copy, and is trained meanwhile. It is a sync group alone, so that
            it claims as it does under an asynchronous strategy: by asking the store.
        per_node: Learners of a node; 1: there are no nodes.
        allowance: How long it may take.
        found: Is filled in.
    """
    found.num_bytes = me.weights.nbytes
    tags = count()
    await _measured_gradient(me, found)
    every = await gather(me, found.gradients[0], tags)
    box = allowance.seconds(every) / 3.0
    enough = max(
        box, (FEWEST_GRADIENTS - 1) * max(every)
    )  # fast learners keep a shared machine busy until the slow end
    for _ in range(max(FEWEST_GRADIENTS - 1, min(MOST_GRADIENTS, int(enough / every[me.rank])))):
        await _measured_gradient(me, found)
    if len(found.gradients) > MOST_GRADIENTS // 4:
        del found.gradients[0], found.steps[0]  # the first one prepares
    patterns = topologies(me.world, per_node)
    longest = box / (len(patterns) + 1), allowance.most / 3.0 / (len(patterns) + 1)
    await _measure_rounds(me, patterns, per_node, longest, tags, found)


async def measure_together(me: Learner, allowance: Allowance, found: AtHand) -> None:
    """Measure a mean of the model, and steps of `allreduce` where they may be worth it.

    Args:
        me: The learner that measures. All learners are one sync group, as under `allreduce`.
        allowance: How long it may take.
        found: What `measure_apart` has found; is filled in.
    """
    tags = count()
    every = await gather(me, median(found.gradients), tags)
    box, most = allowance.seconds(every) / 3.0, allowance.most / 3.0
    found.mean = await _timed(me, partial(_mean, me), 1, 1, box / PARTS, most / PARTS, tags)
    expected = max(every) + found.mean
    may_be_chosen = me.world / max(*every, found.mean) > CLEARLY * sum(1.0 / max(each, 1e-9) for each in every)
    if may_be_chosen and 2 * expected <= max(box, most):
        await _synchronous_step(me, found)
        found.synchronous.clear()  # the first one prepares
        for _ in range(max(1, min(MOST_REPEATS, int(box / expected)))):
            await _synchronous_step(me, found)


async def _measure_rounds(
    me: Learner,
    patterns: Mapping[str, Topology],
    per_node: int,
    longest: tuple[Seconds, Seconds],
    tags: Iterator[int],
    found: AtHand,
) -> None:
    """Time the rounds of each pattern in the background while this learner computes gradients, as in a run, and find
    what the rounds cost the gradients."""
    under_way: list[Seconds] = []
    """What each round took."""
    is_done = False

    async def average() -> None:
        nonlocal is_done
        try:
            await gather(me, 0.0, tags)  # all begin together
            for name, topology in patterns.items():
                exchanging = partial(exchange, me, topology, tags)
                share, fewest = (per_node if name == ACROSS else 1), (DRAWS if name == "pairs" else 1)
                found.exchanges[name] = await _timed(me, exchanging, share, fewest, *longest, tags, under_way)
        finally:
            is_done = True

    alone = fmean(found.gradients) + fmean(found.steps)
    begin, made = now(me), 0
    me.background(average())
    while not is_done:
        await _gradient(me)
        made += 1
    if sum(under_way) >= TELLING * alone:
        found.lost = min(MOST_LOST, max(0.0, now(me) - begin - made * alone) / sum(under_way))


def topologies(world: int, per_node: int) -> Mapping[str, Topology]:
    """What is averaged with whom, by name: the patterns that differ for so many learners, and those of nodes."""
    found: dict[str, Topology] = {"ring": find_topology("ring", world, 0)}
    if world > 2:
        found["pairs"] = _Tournament(world)
    if has_nodes(world, per_node):
        found[INSIDE] = _Inside(find_topology("ring", per_node, 0), world)
        found[ACROSS] = SideBySide(find_topology("ring", world // per_node, 0), per_node)
    return found


def has_nodes(world: int, per_node: int) -> bool:
    """Whether so many learners form several nodes of the same size."""
    return 1 < per_node < world and world % per_node == 0


class _Tournament(Topology):
    """Pairs in which all learners meet each other once before any meet again: a few rounds of it cross a slow link as
    often as random pairs do on average, and all of them exactly as often."""

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.period = world - 1 + world % 2

    def sources(self, k: int, rank: int) -> Mapping[int, float]:
        return dict.fromkeys(self.targets(k, rank), 0.5)

    def targets(self, k: int, rank: int) -> Sequence[int]:
        # on a circle of `period` places, those whose places add up to k meet; the one that would meet itself meets the
        # last learner, which has no place there, or has no partner if their number is odd
        places = self.period or 1
        twice = k % places
        middle = (twice if twice % 2 == 0 else twice + places) // 2
        if rank == places:
            return [middle]
        partner = (k - rank) % places
        if partner != rank:
            return [partner]
        return [places] if places < self.world else []


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


async def gather(me: Learner, value: float, tags: Iterator[int]) -> list[float]:
    """Every learner's value, by rank; all of them wait for it."""
    own, tag = me.weights.new_full((1,), value), next(tags)
    others = [peer for peer in range(me.world) if peer != me.rank]
    receiving = {peer: me.receive(peer, own, tag) for peer in others}
    sending = [me.send(peer, own, tag) for peer in others]
    found = [float(await receiving[rank]) if rank in receiving else float(own) for rank in range(me.world)]
    for each in sending:
        await each
    return found


async def _measured_gradient(me: Learner, found: AtHand) -> None:
    gradient, step = await _gradient(me)
    found.gradients.append(gradient)
    found.steps.append(step)


async def _gradient(me: Learner) -> tuple[Seconds, Seconds]:
    """Claim, compute and apply a gradient. Seconds of the first two, and of the rest with the copy of the weights."""
    begin = now(me)
    me.claim()
    claimed = now(me)
    weights = me.snapshot()
    copied = now(me)
    gradient = await me.gradient(weights)
    computed = now(me)
    me.step(gradient)
    return claimed - begin + computed - copied, copied - claimed + now(me) - computed


async def _synchronous_step(me: Learner, found: AtHand) -> None:
    begin = now(me)
    me.claim()
    gradient = await me.mean(me.gradient(me.weights))
    found.synchronous.append(now(me) - begin)
    me.step(gradient)


async def _mean(me: Learner, size: int) -> None:
    await me.mean(me.snapshot()[:size])


async def _timed(
    me: Learner,
    work: Callable[[int], Awaitable[None]],
    share: int,
    fewest: int,
    box: Seconds,
    most: Seconds,
    tags: Iterator[int],
    times: list[Seconds] | None = None,
) -> Seconds:
    """Seconds that `work` takes on 1 / `share` of the model, the mean over learners.

    It is repeated for about `box` seconds, and at least `fewest` times. A probe tells how often, and whether that would
    take more than `most`. All seconds are appended to `times`.
    """

    async def once(size: int) -> Seconds:
        begin = now(me)
        await work(size)
        seconds = now(me) - begin
        if times is not None:
            times.append(seconds)
        return seconds

    size = max(1, len(me.weights) // share)
    probe = min(size, max(SMALLEST, size // PROBE))

    async def probed() -> Seconds:
        found = fmean([await once(probe) for _ in range(fewest)])
        return max(await gather(me, found, tags)) * size / probe

    await once(probe)  # connects
    expected = await probed()
    if fewest * expected > most:
        expected = min(expected, await probed())  # unless a single delay has been scaled up
    if fewest * expected > most:
        return expected
    repeats = max(fewest, min(MOST_REPEATS, int(box / max(expected, 1e-9))))
    return fmean(await gather(me, fmean([await once(size) for _ in range(repeats - repeats % fewest)]), tags))
