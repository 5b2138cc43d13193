"""The measurements that learners make of their machines.

For a profile, one and two learners run a strategy that measures. For `strategy: auto`, all learners of a run measure
together, which reveals slow learners and shared links. The distributions and lines that fit the measurements best
become the costs that simulations use.

Learners are started, connected and watched as in any run, so that the measured costs are those of training.
"""

import math
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel
from torch import Tensor

from starling.budget import Budget
from starling.configuration import Config
from starling.engines.processes.place import cores_here
from starling.engines.virtual.cluster import ComputeModel, LinkModel
from starling.learner import Learner
from starling.predict import costs
from starling.predict.costs import Seconds
from starling.strategies import Strategy
from starling.strategies.hadpsgd import SideBySide
from starling.strategies.parts.mixing import Encoder, Mixing
from starling.topology import Alike, Topology, find_topology
from starling.training.job import Job

MEASURE = f"{__name__}:MEASURING"
"""Name of the profile's strategy, `MEASURING`."""
WARM_UP = 3
"""Number of measurements of each kind that a profile makes first and does not count."""
REPEATS = 15
"""Number of exchanges and means of each size in a profile."""
SHARES = (0.0, 1 / 16, 1 / 4, 1.0)
"""Sizes of a profile's exchanges, as fractions of the model. Each has at least `SMALLEST` numbers."""
SMALLEST = 256
SHARE = 0.03
"""Share of a run's expected time that measuring may take, unless the necessary minimum takes longer."""
MOST_GRADIENTS, FEWEST_GRADIENTS = 40, 2
MOST_REPEATS = 8
PARTS = 5
"""Number of parts into which a third of the allowance is divided. A mean of the model takes one part, and each of four
patterns takes one part."""
DRAWS = 3
"""Smallest number of rounds of pairs. Several are needed because rounds cross a slow link more or less often."""
TELLING = 4.0
"""Number of gradients for which rounds must last to show how they slow a learner down."""
MOST_LOST = 0.95
CLEARLY = 0.5
"""Steps of `allreduce` are not measured if it would make less than this share of the gradients that learners make
without waiting, even with as much of a mean as possible hidden behind the gradient."""
PROBE = 16
"""Divisor of the model's size that gives the size of a message's probe. If the whole model would take too long, the
probe is scaled up."""
INSIDE, ACROSS = "inside a node", "across nodes"
"""Names of two patterns: rounds with the learners of the same node, and rounds of a share of the model with the
learners' counterparts on other nodes."""


class Figures(BaseModel):
    """The measurements of one learner, in seconds."""

    gradients: list[Seconds] = []
    """Times of gradients from their claims, including loading."""
    steps: list[Seconds] = []
    """Times of the copy of the weights and the optimizer's step."""
    synchronous: list[Seconds] = []
    """Times of `allreduce` steps, from the claim until the mean of all gradients has arrived. The list is empty if no
    step was made, because a step takes too long, or because `allreduce` would be slow anyway."""
    applies: list[Seconds] = []
    """Times of changing the whole model by a vector."""
    exchanges: dict[int, Seconds] = {}
    """Median time to send a part of the weights to a neighbour, receive the neighbour's part, mix and apply, by
    bytes."""
    means: dict[int, Seconds] = {}
    """Time of a mean of all learners, by bytes."""
    rounds: dict[str, Seconds] = {}
    """Time of an averaging round while all learners average and compute gradients, by pattern."""
    num_bytes: int = 0
    """Size of the weights in bytes."""
    lost: float = 0.0
    """Fraction of its time that this learner loses while a round is under way, because its gradients wait for
    processor, memory and links, and the answers to its claims queue after weights."""
    memory_bytes: int = 0
    device: str = "cpu"

    @classmethod
    def file(cls, folder: Path, rank: int) -> Path:
        """Return the file in which learner `rank` writes its figures for the process that requested them."""
        return folder / f"figures-{rank}.json"

    @classmethod
    def read(cls, folder: Path, rank: int) -> "Figures":
        """Return the figures that learner `rank` has written."""
        return cls.model_validate_json(cls.file(folder, rank).read_bytes())


class MeasureOptions(Config):
    """The options of the strategy that measures."""

    folder: Path
    """Folder in which each learner writes its figures."""


async def measure(me: Learner, options: MeasureOptions) -> None:
    """Measure exchanges and means with one other learner, if there is one, and then every gradient of the budget,
    or the mean of both learners' gradients.

    Args:
        me: The learner that measures. Its model is trained with plain local steps during the measurement.
        options: The folder for the figures.
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
    Figures.file(options.folder, me.rank).write_text(figures.model_dump_json(), encoding="utf-8")


def bare(job: Job, **changes: Any) -> Job:
    """Return a job in the form in which it is measured: without faults, checkpoints within an epoch, weights of
    mini-batches or batch shares."""
    return replace(job, faults=(), checkpoint_every=None, weighting="batches", batch_shares={}, **changes)


async def timed_step(
    me: Learner, compute: Callable[[Tensor], Awaitable[Tensor]], gradients: list[Seconds], steps: list[Seconds]
) -> bool:
    """Claim, compute a gradient with a copy of the weights, and apply it. Return False if the budget is spent.

    The seconds of the claim and the gradient are appended to `gradients`; those of the copy and the rest of the step
    are appended to `steps`.
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
    """Return the seconds of each of `repeats` repetitions of `work`."""
    found = []
    for _ in range(repeats):
        begin = now(me)
        await work()
        found.append(now(me) - begin)
    return found


async def exchange(me: Learner, topology: Topology, tags: Iterator[int], size: int) -> None:
    """Average the first `size` weights with neighbours, once."""
    piece = slice(0, size)
    me.apply(await Mixing(me, topology, next(tags), piece, Encoder()).delta(), piece)


async def _medians(me: Learner, work: Callable[[int], Awaitable[object]]) -> dict[int, Seconds]:
    """Return the median seconds of `work` on parts of the weights, by bytes."""
    number, item = len(me.weights), me.weights.element_size()
    sizes = sorted({min(number, max(SMALLEST, int(share * number))) for share in SHARES})
    return {size * item: median((await timed(me, partial(work, size), WARM_UP + REPEATS))[WARM_UP:]) for size in sizes}


def now(me: Learner) -> Seconds:
    """Wait until the learner's device has finished its pending work, and return the time."""
    if me.weights.device.type == "cuda":
        torch.cuda.synchronize(me.weights.device)
    return time.monotonic()


def _note_memory(me: Learner, figures: Figures) -> None:
    """Record the learner's device, and the peak memory of the device or of this process."""
    device = me.weights.device
    if device.type == "cuda":
        figures.device = torch.cuda.get_device_name(device)
        figures.memory_bytes = torch.cuda.max_memory_allocated(device)
    else:
        figures.memory_bytes = peak_memory()


def peak_memory() -> int:
    """Return the peak memory of this process in bytes. On Linux, `getrusage` would include the peak memory of the
    parent process."""
    with suppress(OSError, StopIteration), Path("/proc/self/status").open(encoding="ascii", errors="replace") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True)
class Allowance:
    """The time that measuring may take."""

    budget: Budget
    """Budget of the run."""
    batches_per_epoch: int
    most: Seconds

    def seconds(self, each: Sequence[Seconds]) -> Seconds:
        """Return the allowance in seconds for learners whose gradients take `each` seconds."""
        per_gradient = 1.0 / sum(1.0 / max(seconds, 1e-9) for seconds in each)
        return min(self.most, SHARE * self.budget.seconds(self.batches_per_epoch, per_gradient))


class Measuring:
    """Measures the costs of the machines with a learner, in step with all others, and fills in `found`."""

    def __init__(self, me: Learner, allowance: Allowance, found: Figures) -> None:
        self._me, self._allowance, self._found = me, allowance, found
        self._tags = count()

    async def apart(self, per_node: int) -> None:
        """Measure gradients, and averaging rounds while gradients are computed.

        The learner's model is a copy, and is trained during the measurement. The learner alone forms a sync group, so
        that it claims through the store, as under an asynchronous strategy. A node has `per_node` learners; with 1
        there are no nodes.
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
            del found.gradients[0], found.steps[0]  # the first measurement includes preparations
        patterns = topologies(me.world, per_node)
        await self._measure_rounds(patterns, per_node, box / (len(patterns) + 1))

    async def together(self) -> None:
        """Measure a mean of the model, and steps of `allreduce` if they may be worth it. All learners are one sync
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
            del found.synchronous[0]  # the first measurement includes preparations

    async def _measure_rounds(self, patterns: Mapping[str, Topology], per_node: int, box: Seconds) -> None:
        """Time the rounds of each pattern in the background while this learner computes gradients, as in a run, and
        find the cost of the rounds for the gradients."""
        me, found, most = self._me, self._found, self._allowance.most / 3.0 / (len(patterns) + 1)
        under_way: list[Seconds] = []
        """Duration of each round."""
        is_done = False

        async def average() -> None:
            nonlocal is_done
            try:
                await self._gather(0.0)  # so that all learners begin together
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
        """Return every learner's value, by rank. All learners wait for the values."""
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
        """Return the seconds of `work` on 1 / `share` of the model, as a mean over learners.

        `work` is repeated for about `box` seconds, and at least `fewest` times. A probe determines the number of
        repetitions, and whether they would take more than `most` seconds. All times are appended to `times`.
        """

        async def mean_of(size: int, repeats: int) -> Seconds:
            times.extend(await timed(self._me, partial(work, size), repeats))
            return fmean(times[-repeats:])

        size = max(1, len(self._me.weights) // share)
        probe = min(size, max(SMALLEST, size // PROBE))

        async def probed() -> Seconds:
            return max(await self._gather(await mean_of(probe, fewest))) * size / probe

        await mean_of(probe, 1)  # creates the connections
        expected = await probed()
        if fewest * expected > most:
            expected = min(expected, await probed())  # unless a single delay has been scaled up
        if fewest * expected > most:
            return expected
        repeats = max(fewest, min(MOST_REPEATS, int(box / max(expected, 1e-9))))
        return fmean(await self._gather(await mean_of(size, repeats - repeats % fewest)))


def topologies(world: int, per_node: int) -> Mapping[str, Topology]:
    """Return the topologies to measure, by name. They are the patterns that differ for this number of learners, and the
    patterns of nodes."""
    found: dict[str, Topology] = {"ring": find_topology("ring", world, 0)}
    if world > 2:
        found["pairs"] = Alike(world, _on_a_circle, period=_places(world))
    if has_nodes(world, per_node):
        found[INSIDE] = Alike(world, partial(_inside, per_node))
        found[ACROSS] = SideBySide(find_topology("ring", world // per_node, 0), per_node)
    return found


def has_nodes(world: int, per_node: int) -> bool:
    """Return whether the learners form several nodes of the same size."""
    return 1 < per_node < world and world % per_node == 0


def _places(world: int) -> int:
    """Return the number of places on the circle, which is odd."""
    return world - 1 + world % 2


def _on_a_circle(k: int, rank: int, world: int, seed: int) -> Sequence[int]:
    """Return the partner of a learner for pairs in which all learners meet each other once before any two meet again. A
    few rounds cross a slow link about as often as random pairs do on average, and all rounds together cross it exactly
    as often.

    Learners whose places on a circle add up to `k` meet. The learner that would meet itself meets the last learner,
    which has no place on the circle, or has no partner if the number of learners is odd.
    """
    places = _places(world)
    alone = k * (places + 1) // 2 % places
    partner = alone if rank == places else (k - rank) % places
    return [places] if rank == alone and places < world else [partner]


def _inside(per_node: int, k: int, rank: int, world: int, seed: int) -> Sequence[int]:
    """Return the neighbours of a learner in a ring of the learners on its node."""
    first, local = rank - rank % per_node, rank % per_node
    return [first + (local + step) % per_node for step in (-1, 1)]


MEASURING = Strategy(MEASURE, "measure gradients, exchanges and means", measure, options=MeasureOptions)


RESAMPLES = 2000
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
HARDLY_ANY = 0.002
"""Standard deviation / mean below which the gradient times of a profile are assumed to be constant."""
STEADY = 0.1
"""Standard deviation / mean up to which the few gradient times of a run are assumed to be constant, so that one
simulation is enough."""
DRAWS_OF_A_ROUND = 1000


def profile_of(alone: Figures, pair: Sequence[Figures], facts: costs.JobFacts, command: str) -> costs.Profile:
    """Return the profile that follows from the figures of a lone learner and of two learners that ran together."""
    exchanges, means = (
        {num_bytes: fmean(getattr(each, name)[num_bytes] for each in pair) for num_bytes in getattr(pair[0], name)}
        for name in ("exchanges", "means")
    )
    halves = fit_link(means)
    # a mean of two learners is simulated as two messages of half the bytes
    of_means = halves.model_copy(update={"latency": halves.latency / 2.0})
    longer = max(costs.SHORTEST, fmean(median(each.synchronous) for each in pair) - median(alone.gradients))
    of_gradients = LinkModel(latency=0.0, bandwidth=alone.num_bytes / longer)
    return costs.Profile(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        command=command,
        machine=_machine(alone.device),
        job=facts.model_copy(update={"model_bytes": alone.num_bytes}),
        gradient=gradient_times(alone.gradients),
        step_seconds=fmean(alone.steps),
        mixing_bandwidth=alone.num_bytes / max(median(alone.applies), 1e-9),
        exchange=costs.MeasuredLink(seconds_by_bytes=exchanges, fitted=fit_link(exchanges)),
        mean=costs.MeasuredLink(seconds_by_bytes=means, fitted=of_means),
        gradient_mean=costs.MeasuredLink(seconds_by_bytes={alone.num_bytes: longer}, fitted=of_gradients),
        memory_per_learner_bytes=max(each.memory_bytes for each in (alone, *pair)),
    )


def _machine(device: str) -> costs.MachineFacts:
    try:
        named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:  # not a Linux system
        named = None
    processor = named[1] if named else platform.processor() or platform.machine()
    return costs.MachineFacts(
        processor=processor,
        cores=cores_here(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        device=processor if device == "cpu" else device,
        torch=torch.__version__,
        starling=version("starling-asr"),
    )


def costs_of(figures: Sequence[Figures], per_node: int) -> costs.Costs:
    """Return the costs of a run, given the figures of all its learners by rank. A node has `per_node` learners."""
    world, num_bytes = len(figures), figures[0].num_bytes
    means = [fmean(each.gradients) for each in figures]
    relative = np.concatenate([np.asarray(each.gradients) / mean for each, mean in zip(figures, means, strict=True)])
    varies = len(relative) > 2 * world and float(relative.std()) > STEADY
    gradient = fit_compute(min(means) * relative) if varies else ComputeModel(seconds=min(means))
    longer = mean = max(costs.SHORTEST, fmean(each.means[num_bytes] for each in figures))
    if all(each.synchronous for each in figures):
        synchronous = fmean(median(each.synchronous) for each in figures)
        longer = max(costs.SHORTEST, synchronous - _slowest_of_a_round(figures))
    measured = costs.MeasuredRun(
        gradient_seconds=tuple(means),
        gradients_measured=tuple(len(each.gradients) for each in figures),
        step_seconds=median(seconds for each in figures for seconds in each.steps),
        mean_seconds=mean,
        mean_of_gradients_seconds=longer,
        exchange_seconds={name: fmean(each.rounds[name] for each in figures) for name in figures[0].rounds},
        lost_to_exchanges=tuple(each.lost for each in figures),
        model_bytes=num_bytes,
    )
    return costs.Costs(
        job=costs.JobFacts(trains="the run's model", model_bytes=num_bytes, batches_per_epoch=1),
        compute=costs.with_step(gradient, measured.step_seconds),
        messages=LinkModel(latency=0.0, bandwidth=num_bytes / max(costs.SHORTEST, measured.exchange_seconds["ring"])),
        means=_ring(mean, num_bytes, world),
        gradient_means=_ring(longer, num_bytes, world),
        devices_per_node=per_node,
        measured=measured,
        source="what the learners of this run measured",
    )


def _slowest_of_a_round(figures: Sequence[Figures]) -> Seconds:
    """Return the expected time of the slowest gradient of a round, given the distributions of all learners."""
    generator = np.random.default_rng(0)
    drawn = [generator.choice(np.asarray(each.gradients), DRAWS_OF_A_ROUND) for each in figures]
    return float(np.max(drawn, axis=0).mean())


def _ring(seconds: Seconds, num_bytes: int, world: int) -> LinkModel:
    """Return the link on which a ring all-reduce of `world` learners takes `seconds`."""
    messages = 2 * (world - 1)
    return LinkModel(latency=0.0, bandwidth=messages * -(-num_bytes // world) / seconds)


def gradient_times(seconds: Sequence[float]) -> costs.GradientTimes:
    """Return the mean, its interval, quantiles and the best-fitting distribution of gradient times."""
    times = np.asarray(seconds, dtype=np.float64)
    generator = np.random.default_rng(0)
    means = generator.choice(times, (RESAMPLES, len(times))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return costs.GradientTimes(
        num_measured=len(times),
        seconds=float(times.mean()),
        low=float(low),
        high=float(high),
        jitter=float(times.std() / times.mean()),
        quantiles={f"{share:g}": float(np.quantile(times, share)) for share in QUANTILES},
        fitted=fit_compute(times),
    )


def fit_compute(times: NDArray[np.float64]) -> ComputeModel:
    """Return the distribution, among those with the mean and standard deviation of `times`, whose distribution function
    is nearest to that of `times`."""
    mean, relative = float(times.mean()), float(times.std() / times.mean())
    if relative < HARDLY_ANY:
        return ComputeModel(seconds=mean)
    spread = math.sqrt(math.log1p(relative**2))
    candidates = [ComputeModel(distribution="log-normal", seconds=mean, spread=spread)]
    if (half_width := math.sqrt(3.0) * relative) < 1.0:
        candidates.append(ComputeModel(distribution="uniform", seconds=mean, spread=half_width))
    return min(candidates, key=lambda model: _distance(np.sort(times), model))


def _distance(times: NDArray[np.float64], model: ComputeModel) -> float:
    """Return the Kolmogorov distance between a distribution and the empirical distribution of `times`, which must be in
    ascending order."""
    if model.distribution == "uniform":
        expected = np.clip((times / model.seconds - (1.0 - model.spread)) / (2.0 * model.spread), 0.0, 1.0)
    else:
        normal = NormalDist(math.log(model.seconds) - 0.5 * model.spread**2, model.spread)
        expected = np.array([normal.cdf(math.log(each)) for each in times])
    steps = np.arange(len(times) + 1) / len(times)
    return float(max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max()))


def fit_link(seconds_by_bytes: Mapping[int, float]) -> LinkModel:
    """Return the line seconds = latency + bytes / bandwidth that fits best, with latency and bandwidth at least 0.

    Each squared error is weighted by 1 / seconds, which is a compromise. With equal weights, the largest message would
    determine the line; with 1 / seconds**2, a few slow small messages would distort the bandwidth.
    """
    sizes, seconds = (np.array(list(each), dtype=np.float64) for each in (seconds_by_bytes, seconds_by_bytes.values()))
    if len(sizes) > 1:
        per_byte, latency = np.polyfit(sizes, seconds, 1, w=seconds**-0.5)
        if latency < 0.0 < per_byte:
            latency, per_byte = 0.0, float(sizes.sum() / (sizes**2 / seconds).sum())
        if per_byte > 0.0:
            return LinkModel(latency=float(latency), bandwidth=float(1.0 / per_byte))
    return LinkModel(latency=float(seconds.min()), bandwidth=1e15)
