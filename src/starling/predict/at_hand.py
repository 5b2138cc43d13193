"""What the machines of a run cost, measured by all of its learners together, before the run.

Unlike a profile, which one and two learners make on one machine, this finds slow learners and links that many share.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import fmean, median

from starling.budget import Budget
from starling.learner import Learner
from starling.predict.measure import SMALLEST, Figures, exchange, now, timed, timed_step
from starling.strategies.hadpsgd import SideBySide
from starling.topology import Alike, Topology, find_topology

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
INSIDE, ACROSS = "inside a node", "across nodes"
"""Rounds with the learners of the same node; of a share of the model with the learners' counterparts on other nodes."""


@dataclass(frozen=True)
class Allowance:
    """How long measuring may take."""

    budget: Budget
    """Of the run."""
    batches_per_epoch: int
    most: Seconds

    def seconds(self, each: Sequence[Seconds]) -> Seconds:
        """For learners whose gradients take `each`."""
        per_gradient = 1.0 / sum(1.0 / max(seconds, 1e-9) for seconds in each)
        return min(self.most, SHARE * self.budget.seconds(self.batches_per_epoch, per_gradient))


class Measuring:
    """Measures with a learner, in step with all others, what the machines cost, and fills in `found`."""

    def __init__(self, me: Learner, allowance: Allowance, found: Figures) -> None:
        self._me, self._allowance, self._found = me, allowance, found
        self._tags = count()

    async def apart(self, per_node: int) -> None:
        """Measure gradients, and averaging rounds while gradients are computed.

        The learner's model is a copy, and is trained meanwhile. It is a sync group alone, so that it claims as it does
        under an asynchronous strategy: by asking the store. A node has `per_node` learners; 1: there are no nodes.
        """
        me, found = self._me, self._found
        found.num_bytes = me.weights.nbytes
        await timed_step(me, me.gradient, found.gradients, found.steps)
        every = await self._gather(found.gradients[0])
        box = self._allowance.seconds(every) / 3.0
        # fast learners keep a shared machine busy until the slow end
        enough = max(box, (FEWEST_GRADIENTS - 1) * max(every))
        for _ in range(max(FEWEST_GRADIENTS - 1, min(MOST_GRADIENTS, int(enough / every[me.rank])))):
            await timed_step(me, me.gradient, found.gradients, found.steps)
        if len(found.gradients) > MOST_GRADIENTS // 4:
            del found.gradients[0], found.steps[0]  # the first one prepares
        patterns = topologies(me.world, per_node)
        await self._measure_rounds(patterns, per_node, box / (len(patterns) + 1))

    async def together(self) -> None:
        """Measure a mean of the model, and steps of `allreduce` where they may be worth it. All learners are one sync
        group, as under `allreduce`."""
        me, found = self._me, self._found
        every = await self._gather(median(found.gradients))
        box, most = self._allowance.seconds(every) / 3.0, self._allowance.most / 3.0

        async def mean(size: int) -> None:
            await me.mean(me.snapshot()[:size])

        found.means[found.num_bytes] = took = await self._timed(mean, 1, 1, box / PARTS, most / PARTS, [])
        expected = max(every) + took
        may_be_chosen = me.world / max(*every, took) > CLEARLY * sum(1.0 / max(each, 1e-9) for each in every)
        if may_be_chosen and 2 * expected <= max(box, most):
            for _ in range(1 + max(1, min(MOST_REPEATS, int(box / expected)))):
                await timed_step(me, lambda _: me.mean(me.gradient(me.weights)), found.synchronous, [])
            del found.synchronous[0]  # the first one prepares

    async def _measure_rounds(self, patterns: Mapping[str, Topology], per_node: int, box: Seconds) -> None:
        """Time the rounds of each pattern in the background while this learner computes gradients, as in a run, and
        find what the rounds cost the gradients."""
        me, found, most = self._me, self._found, self._allowance.most / 3.0 / (len(patterns) + 1)
        under_way: list[Seconds] = []
        """What each round took."""
        is_done = False

        async def average() -> None:
            nonlocal is_done
            try:
                await self._gather(0.0)  # all begin together
                for name, topology in patterns.items():
                    exchanging = partial(exchange, me, topology, self._tags)
                    share, fewest = (per_node if name == ACROSS else 1), (DRAWS if name == "pairs" else 1)
                    found.rounds[name] = await self._timed(exchanging, share, fewest, box, most, under_way)
            finally:
                is_done = True

        alone = fmean(found.gradients) + fmean(found.steps)
        begin, made = now(me), list[Seconds]()
        me.background.start(average())
        while not is_done:
            await timed_step(me, me.gradient, made, [])
        if sum(under_way) >= TELLING * alone:
            found.lost = min(MOST_LOST, max(0.0, now(me) - begin - len(made) * alone) / sum(under_way))

    async def _gather(self, value: float) -> list[float]:
        """Every learner's value, by rank; all of them wait for it."""
        me, tag = self._me, next(self._tags)
        own = me.weights.new_full((1,), value)
        others = {peer: me.exchange(peer, own, tag) for peer in range(me.world) if peer != me.rank}
        return [float(await others[rank]) if rank in others else float(own) for rank in range(me.world)]

    async def _timed(
        self,
        work: Callable[[int], Awaitable[None]],
        share: int,
        fewest: int,
        box: Seconds,
        most: Seconds,
        times: list[Seconds],
    ) -> Seconds:
        """Seconds that `work` takes on 1 / `share` of the model, the mean over learners.

        It is repeated for about `box` seconds, and at least `fewest` times. A probe tells how often, and whether that
        would take more than `most`. All seconds are appended to `times`.
        """

        async def mean_of(size: int, repeats: int) -> Seconds:
            times.extend(await timed(self._me, partial(work, size), repeats))
            return fmean(times[-repeats:])

        size = max(1, len(self._me.weights) // share)
        probe = min(size, max(SMALLEST, size // PROBE))

        async def probed() -> Seconds:
            return max(await self._gather(await mean_of(probe, fewest))) * size / probe

        await mean_of(probe, 1)  # connects
        expected = await probed()
        if fewest * expected > most:
            expected = min(expected, await probed())  # unless a single delay has been scaled up
        if fewest * expected > most:
            return expected
        repeats = max(fewest, min(MOST_REPEATS, int(box / max(expected, 1e-9))))
        return fmean(await self._gather(await mean_of(size, repeats - repeats % fewest)))


def topologies(world: int, per_node: int) -> Mapping[str, Topology]:
    """What is averaged with whom, by name: the patterns that differ for so many learners, and those of nodes."""
    found: dict[str, Topology] = {"ring": find_topology("ring", world, 0)}
    if world > 2:
        found["pairs"] = Alike(world, _on_a_circle, period=_places(world))
    if has_nodes(world, per_node):
        found[INSIDE] = Alike(world, partial(_inside, per_node))
        found[ACROSS] = SideBySide(find_topology("ring", world // per_node, 0), per_node)
    return found


def has_nodes(world: int, per_node: int) -> bool:
    """Whether so many learners form several nodes of the same size."""
    return 1 < per_node < world and world % per_node == 0


def _places(world: int) -> int:
    """Of the circle: an odd number."""
    return world - 1 + world % 2


def _on_a_circle(k: int, rank: int, world: int, seed: int) -> Sequence[int]:
    """Pairs in which all learners meet each other once before any meet again: a few rounds of it cross a slow link as
    often as random pairs do on average, and all of them exactly as often.

    Those whose places on a circle add up to `k` meet. The one that would meet itself meets the last learner, which
    has no place there, or has no partner if their number is odd.
    """
    places = _places(world)
    alone = k * (places + 1) // 2 % places
    partner = alone if rank == places else (k - rank) % places
    return [places] if rank == alone and places < world else [partner]


def _inside(per_node: int, k: int, rank: int, world: int, seed: int) -> Sequence[int]:
    """A ring of each node's learners."""
    first, local = rank - rank % per_node, rank % per_node
    return [first + (local + step) % per_node for step in (-1, 1)]
