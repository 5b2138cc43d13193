"""Predictions of the speed of learners and of the worth of their mini-batches. A strategy's own code runs on the
simulated clock with the costs of a job.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, cast

import numpy as np

from starling.configuration import Config
from starling.engines.virtual.cluster import Cluster, LinkModel, MemoryModel, NodeModel
from starling.engines.virtual.timing import TimingOutcome, simulate_timing
from starling.errors import ConfigError
from starling.predict.costs import SHORTEST, Costs
from starling.predict.measure import ACROSS, INSIDE
from starling.recipe.run import StrategyChoice
from starling.reporting.epochs import mean_staleness
from starling.strategies import Strategy
from starling.strategies.islands import NO_ISLANDS, Island
from starling.strategies.parts.means import is_compressed
from starling.training.speeds import Stragglers
from starling.training.tensor_plan import Traffic

Seconds = float
AVERAGING = (
    *("allreduce", "delay-by-one", "delayed", "local-sgd", "post-local-sgd"),
    *("bmuf", "slowmo", "diloco", "streaming-diloco"),
)
"""Strategies that exchange only means. A strategy from a different package is simulated with the link of messages."""
MOST_BYTES_PER_SECOND = 1e18
"""Bandwidth of the links in a simulation in which everything arrives at once."""
GRADIENTS = 480
"""Number of gradients that are simulated for each prediction, shared by the learners."""
FEWEST_ROUNDS, MOST_ROUNDS = 10, 40
"""Smallest and largest number of gradients of each learner in a simulation."""
SEEDS = 3
"""Number of simulations for each prediction, if times are drawn at random."""
CYCLES = 4
"""Smallest number of averaging rounds in a simulation: twice as many as a learner may be behind."""
LONGER = 1.5
"""Factor by which averaging rounds may last longer than measured. A period that is too long costs little
(`WORTH_OF_A_DOUBLING`), while a period that is too short makes learners wait. Moreover, rounds differ: random pairs
cross a slow link more or less often, and other traffic may use the link later."""
LIKE = 1.05
"""Factor of the fastest learner's gradient time below which learners count as equally fast."""

WORTH = 0.6
"""Worth of a mini-batch relative to one of `allreduce`, if gradients are stale or learners' models differ.

It was measured up to one early loss with 16 equal learners: 465 mini-batches under `allreduce`, 791 under `adpsgd` in
random order, which gives 0.59, 739 under `delay-by-one` and 824 under `dpsgd` (docs/results/stragglers.md). The
intervals of the three overlap, and nothing like it was measured for other strategies: one number is used for all.
"""
WORTH_OF_A_DOUBLING = 0.98
"""Factor of `WORTH` for each doubling of the averaging period. It was not measured; its purpose is to select the
shortest of equally fast periods."""


@dataclass(frozen=True)
class Arm:
    """A strategy with its options."""

    strategy: Strategy
    options: Config
    given: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Options that are named in texts."""

    @classmethod
    def of(cls, given: StrategyChoice | Mapping[str, Any]) -> "Arm":
        """Return the strategy that a recipe names, with the options that the recipe gives."""
        choice = StrategyChoice.model_validate(given)
        return cls(choice.strategy, choice.options, choice.model_extra or {})

    @property
    def name(self) -> str:
        """The strategy's name."""
        return self.strategy.name

    @property
    def words(self) -> str:
        """The options that were given as text, such as `pattern: ring, period: 4`."""
        return ", ".join(f"{key}: {value}" for key, value in self.given.items())

    def __str__(self) -> str:
        return f"{self.name} ({self.words})" if self.given else self.name


@dataclass(frozen=True)
class DataNeed:
    """Mini-batches that all learners together need for an early loss, as a multiple of those of one learner. The study
    of speed-up measured them (docs/results/speed-up.md); `low` to `high` is the 95 % interval."""

    mean: float
    low: float
    high: float
    is_extrapolated: bool
    """Whether the study has other options of the strategy, or fewer learners."""

    @property
    def short(self) -> str:
        """The mean, as `2.1` or, if it is extrapolated, `~2.1`."""
        return "~" * self.is_extrapolated + f"{self.mean:.2g}"

    def __str__(self) -> str:
        return f"{self.short} ({self.low:.2g} to {self.high:.2g})"


def data_need(arm: Arm, learners: int) -> DataNeed | None:
    """Return what a strategy needs, interpolated between the numbers of learners of the study; None if the study lacks
    the strategy."""
    study = json.loads(Path(__file__).with_name("data_need.json").read_text(encoding="utf-8"))
    own = [each for each in study if each["strategy"]["name"] == arm.name]
    if not own:
        return None
    alike = [each for each in own if _sizeless(Arm.of(each["strategy"]).options) == _sizeless(arm.options)]
    needs = {1: (1.0, 1.0, 1.0)} | {int(each): need for each, need in (alike or own)[-1]["needs"].items()}
    logs = np.log([*needs]), np.log([*needs.values()])
    mean, low, high = (math.exp(np.interp(math.log(learners), logs[0], each)) for each in logs[1].T)
    return DataNeed(mean, low, high, is_extrapolated=not alike or learners > max(needs))


def _sizeless(options: Config) -> Config:
    """Return options with the same number of servers, and of learners in a super-learner, as those of other arms."""
    return options.model_copy(update=dict.fromkeys({"shards", "per_node"} & type(options).model_fields.keys(), 1))


@dataclass(frozen=True, eq=False)
class Prediction:
    """The results of simulations of some learners under a strategy, which is a candidate for the choice."""

    arm: Arm
    learners: int
    seconds: tuple[Seconds, ...]
    """Time of the run from one gradient of any learner to the next, for each seed."""
    waiting: float
    """Share of a learner's time in which it waits for data or peers, including exchanges."""
    bytes_sent: float
    """Number of bytes that all learners together send for each gradient."""
    staleness: Counter[int]
    caution: float = 1.0
    """Fraction of the speed that counts. It is below 1 because averaging rounds may take longer than in the
    simulation."""

    @property
    def seconds_per_gradient(self) -> Seconds:
        """The median of all seeds."""
        return median(self.seconds)

    @property
    def worth(self) -> float:
        """The worth of a mini-batch relative to `allreduce`. It is 1 if all gradients are averaged and none is
        stale."""
        strategy, options = self.arm.strategy, self.arm.options
        in_parts = 1 < strategy.sync_groups(options, self.learners).size < self.learners
        is_fresh = mean_staleness(self.staleness) == 0.0 and strategy.averages_gradients(options) and not in_parts
        if self.learners == 1 or is_fresh:
            return 1.0
        period = float(getattr(options, "period", 1.0))
        return WORTH * float(WORTH_OF_A_DOUBLING ** max(0.0, math.log2(period)))

    @property
    def progress(self) -> float:
        """Number of mini-batches per second, with caution and weighted by their worth. This quantity is compared."""
        return self.caution * self.worth / self.seconds_per_gradient


@dataclass(frozen=True)
class Machines:
    """The machines for which predictions are made: costs, the assumed slowness, and the user's settings of the
    cluster."""

    costs: Costs
    stragglers: Stragglers = field(default_factory=Stragglers)
    """Assumed slowness of learners beyond the costs, if the learners of a run have not measured it."""
    given: Mapping[str, Config] = field(default_factory=dict)
    """Sections of the cluster that replace the costs' own."""
    bandwidth: float = 1.0
    """Factor by which links between nodes are assumed to be faster."""
    compute: float = 1.0
    """Factor by which gradients are assumed to last longer."""
    at_once: bool = False
    """Whether all messages are assumed to arrive at once."""
    longer: float = 1.0
    """Factor by which measured averaging rounds are assumed to last longer."""
    island: Island = NO_ISLANDS
    """Size and kind of the islands that learners form."""
    traffic: Traffic | None = None
    """Traffic between the ranks of a tensor island."""

    @property
    def per_node(self) -> int:
        """Number of learners on a node."""
        nodes = self.given.get("nodes")
        return nodes.size if isinstance(nodes, NodeModel) else self.costs.devices_per_node

    def patterns(self, learners: int) -> Sequence[str]:
        """Return the patterns of `adpsgd` that are worth trying, with the pattern that sends the fewest messages first.
        A fixed ring is worth trying only if its rounds are faster than those of pairs. Random rings send twice as many
        messages as pairs, and cannot be faster."""
        if learners <= 2:
            return ["ring"]
        rounds = self.costs.measured.exchange_seconds if self.costs.measured else {}
        return ["pairs"] if rounds and rounds["ring"] > rounds["pairs"] else ["pairs", "ring"]

    def cluster(self, arm: Arm, learners: int) -> Cluster:
        """Return the simulated cluster of some learners under a strategy.

        A cluster has one kind of link between nodes, and one kind inside nodes. Means and messages were measured
        separately, because their costs differ. Learners that only average use the link of means; super-learners use
        that link inside.

        Messages queue at their node's link, unless the measurements already include that wait. If nodes only represent
        sync groups, each learner has a separate link.
        """
        costs, num_models = self.costs, learners // self.island.size
        group = arm.strategy.sync_groups(arm.options, num_models).size
        averages = arm.strategy.averages_gradients(arm.options)  # all learners', or those of a group
        messages, inside = self._messages(arm, learners)
        link = messages
        if arm.name in AVERAGING:
            encodes = is_compressed(arm.options)  # encoded gradients are averaged after backward
            link = (averages and not encodes and costs.gradient_means) or costs.means
        link = cast(LinkModel, self.given.get("link", link))
        size, uplink = 1, cast(float | Literal["unlimited"] | None, "unlimited" if costs.measured else None)
        if costs.devices_per_node > 1 and inside is not None:
            size, uplink = costs.devices_per_node, messages.bandwidth
        elif 1 < group < num_models and averages:
            size, inside = group * self.island.size, costs.gradient_means or costs.means
            uplink = uplink or size * link.bandwidth
        nodes = NodeModel(size=size, uplink=uplink)
        if inside is not None:
            nodes = nodes.model_copy(update={"latency": inside.latency, "bandwidth": inside.bandwidth})
        memory = MemoryModel() if costs.memory_bandwidth is None else MemoryModel(bandwidth=costs.memory_bandwidth)
        found = {"compute": costs.beside(min(learners, self.per_node)), "link": link, "nodes": nodes, "memory": memory}
        return self._assumed(Cluster.model_validate(found | dict(self.given)))

    def _assumed(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the assumptions about its links and gradients."""
        link: dict[str, Any] = {"bandwidth": cluster.link.bandwidth * self.bandwidth}
        nodes: dict[str, Any] = {"uplink": cluster.uplink * self.bandwidth if cluster.uplink else "unlimited"}
        if self.at_once:
            link = {"latency": 0.0, "bandwidth": MOST_BYTES_PER_SECOND}
            nodes = link | {"uplink": None}
        sections = {"link": link, "nodes": nodes, "compute": {"seconds": cluster.compute.seconds * self.compute}}
        new = {name: getattr(cluster, name).model_copy(update=values) for name, values in sections.items()}
        return cluster.model_copy(update=new)

    def _messages(self, arm: Arm, learners: int) -> tuple[LinkModel, LinkModel | None]:
        """Return the link of messages between nodes and, if it differs, the link inside nodes. If the learners of a run
        have measured averaging rounds of the strategy's own pattern, the links follow from these rounds."""
        costs, measured = self.costs, self.costs.measured
        if measured is None or (pattern := self._pattern(arm)) is None:
            return costs.messages, None if measured else costs.inside
        num_bytes, seconds = measured.model_bytes, measured.exchange_seconds
        if pattern != ACROSS:
            return _link(num_bytes, self.longer * seconds[pattern]), None
        # each learner sent its share to every node with which it averages, and all shares used one uplink
        num_bytes *= min(2, learners // costs.devices_per_node - 1)
        return _link(num_bytes, self.longer * seconds[pattern]), _link(measured.model_bytes, seconds[INSIDE])

    def _pattern(self, arm: Arm) -> str | None:
        """Return the measured pattern that is most similar to a strategy's own pattern, or None if there is none."""
        pattern = ACROSS if arm.name == "hadpsgd" else getattr(arm.options, "pattern", None)
        if self.costs.measured is None or pattern is None:
            return None
        return pattern if pattern in self.costs.measured.exchange_seconds else "ring"

    def slowness(self, arm: Arm) -> Stragglers:
        """Return the factors by which each learner's gradients are slower than the fastest learner's gradients, between
        and during averaging rounds.

        A round is under way for a share u of a learner's time, in which the learner loses a share `lost`. Gradients
        that take g seconds without averaging then take g / (1 - lost u); with rounds of E seconds, one for each
        `period` gradients of the fastest learner, u = E / (period g) (1 - lost u), or 1 if rounds take longer than
        that.
        """
        measured, pattern = self.costs.measured, self._pattern(arm)
        if measured is None:
            return self.stragglers.model_copy(update={"pauses": ()})  # pauses do not change a steady speed
        seconds = 0.0 if pattern is None else self.longer * measured.exchange_seconds[pattern]
        period = float(getattr(arm.options, "period", 1.0))
        alone, every_lost = measured.gradient_seconds, measured.lost_to_exchanges
        ratios = [seconds / (period * gradient) for gradient in alone]
        shares = [min(1.0, ratio / (1.0 + ratio * lost)) for ratio, lost in zip(ratios, every_lost, strict=True)]
        under_way, fastest = max(shares), min(alone)
        times = [each / (1.0 - lost * under_way) for each, lost in zip(alone, every_lost, strict=True)]
        return Stragglers(slow={rank: each / fastest for rank, each in enumerate(times) if each > LIKE * fastest})

    def with_slow(self, rank: int, factor: float) -> "Machines":
        """Return the same machines, except that learner `rank` takes `factor` times as long for its gradients."""
        slow = {**self.stragglers.slow, rank: factor}
        return replace(self, stragglers=self.stragglers.model_copy(update={"slow": slow}))


def _link(num_bytes: int, seconds: Seconds) -> LinkModel:
    """Return the link that carries `num_bytes` in `seconds`."""
    return LinkModel(latency=0.0, bandwidth=num_bytes / max(SHORTEST, seconds))


def predict(arm: Arm, learners: int, machines: Machines) -> Prediction:
    """Return the results of simulations of a strategy, with several seeds if times are drawn at random.

    If the learners of a run have measured rounds, the progress is the mean of two simulations, one with rounds as
    measured and one with longer rounds, because measuring is short and rounds differ.
    """
    cluster, jitter = machines.cluster(arm, learners), machines.slowness(arm).jitter
    is_random = cluster.compute.distribution != "constant" or max(cluster.link.jitter, jitter) > 0.0
    found = [simulate(arm, learners, machines, seed) for seed in range(SEEDS if is_random else 1)]
    together = replace(
        found[0],
        seconds=tuple(each.seconds_per_gradient for each in found),
        waiting=fmean(each.waiting for each in found),
        staleness=sum((each.staleness for each in found), Counter[int]()),
    )
    if machines.costs.measured is None or machines.longer > 1.0 or arm.name in AVERAGING:
        return together
    longer = predict(arm, learners, replace(machines, longer=LONGER)).seconds_per_gradient
    return replace(together, caution=fmean((1.0, together.seconds_per_gradient / longer)))


def simulate(arm: Arm, learners: int, machines: Machines, seed: int = 0, rounds: int | None = None) -> Prediction:
    """Return the steady speed of a strategy, which is the speed in the second half of a simulation.

    Two simulations are run, one of the first half and one of the whole. Both contain the beginning of a run and its
    end, where learners wait for the last learner, so that these cancel out. If both simulations end with the same
    gradient of the slowest learner, the speed is the sum of the learners' own paces. `rounds` is the number of
    gradients that each learner computes in a half. It may be increased slightly, because a strategy that acts every H
    steps is simulated for whole periods. A warm-up is left out.
    """
    each = rounds or max(FEWEST_ROUNDS, min(MOST_ROUNDS, GRADIENTS // learners))
    each = max(each, CYCLES * int(getattr(arm.options, "period", 1)))
    if period := getattr(arm.options, "every", None):
        each = -(-each // period) * period
    half, whole = (run(arm, learners, machines, steps, seed) for steps in (each * learners, 2 * each * learners))
    num_gradients, seconds = whole.num_gradients - half.num_gradients, whole.seconds - half.seconds
    if seconds <= 0.0:
        seconds = num_gradients / sum(len(times) / times[-1] for times in whole.gradients_at.values())
    spent = [learner.spent for learner in whole.learners if learner.num_steps]
    waiting = sum(each.waiting_for_data + each.waiting_for_peers for each in spent)
    return Prediction(
        arm,
        learners,
        (seconds / num_gradients,),
        waiting / max(waiting + sum(each.computing for each in spent), 1e-12),
        (whole.bytes_sent - half.bytes_sent) / num_gradients,
        whole.staleness,
    )


def run(arm: Arm, learners: int, machines: Machines, steps: int, seed: int = 0) -> TimingOutcome:
    """Run a simulation of `steps` gradients without the warm-up of a strategy."""
    num_bytes, cluster = machines.costs.job.model_bytes // 4 * 4, machines.cluster(arm, learners)
    options, slowness, island, traffic = arm.options, machines.slowness(arm), machines.island, machines.traffic
    if getattr(options, "warm_up", 0):
        options = options.model_copy(update={"warm_up": 0})
    timing = partial(simulate_timing, seed=seed, stragglers=slowness, island=island, traffic=traffic)
    try:
        return timing(arm.strategy, options, learners, cluster, num_bytes, steps)
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error).lower():
            raise
        raise ConfigError(
            f"strategy {arm.name}: cannot be planned, because it looks at the values of weights, which a simulation of "
            "time alone does not have; leave it out, or simulate it with `starling simulate`"
        ) from error


def bisect(holds: Callable[[float], object], low: float, high: float) -> float:
    """Return the value between `low` and `high`, both positive, at which `holds` changes, within 3 %.

    `holds` must differ at the two ends. It may be true at either end.
    """
    at_low = holds(low)
    while max(high / low, low / high) > 1.03:
        middle = math.sqrt(low * high)
        if holds(middle) == at_low:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)
