"""How fast learners would be: a strategy's own text on the simulated clock, with the costs of a job."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, Literal, cast

from starling.configuration import Config
from starling.engines.virtual.cluster import Cluster, LinkModel, MemoryModel, NodeModel
from starling.engines.virtual.timing import TimingOutcome, simulate_timing
from starling.errors import ConfigError
from starling.predict.costs import Costs, Seconds
from starling.predict.deciding import Arm, Prediction
from starling.strategies.islands import NO_ISLANDS, Island
from starling.strategies.parts.means import is_compressed
from starling.training.job import Spent
from starling.training.stragglers import Stragglers
from starling.training.tensor_plan import Traffic

AVERAGING = (
    *("allreduce", "delay-by-one", "delayed", "local-sgd", "post-local-sgd"),
    *("bmuf", "slowmo", "diloco", "streaming-diloco"),
)
"""Strategies that exchange nothing but means. One from outside is simulated with the link of messages."""
MOST_BYTES_PER_SECOND = 1e18
"""Of the link with which a simulation shows what waiting is left without any exchange."""
GRADIENTS = 480
"""Simulated for each prediction, shared by the learners."""
FEWEST_ROUNDS, MOST_ROUNDS = 10, 40
"""Gradients of each learner in a simulation."""
SEEDS = 3
"""Simulations of each prediction, where times are drawn at random."""
CYCLES = 4
"""Rounds of averaging in a simulation, at least: twice as many as a learner may be behind."""

Sections = Mapping[str, Mapping[str, Any]]
"""Values by the section of a cluster and their key."""


@dataclass(frozen=True)
class Machines:
    """What a prediction is made for: costs, the slowness that is assumed, and what a user says of the cluster."""

    costs: Costs
    stragglers: Stragglers = field(default_factory=Stragglers)
    given: Mapping[str, Config] = field(default_factory=dict)
    """Sections of the cluster that replace what the costs say."""
    changes: tuple[Callable[[Cluster], Sections], ...] = ()
    """What else is different, one after the other, given what a cluster is so far."""
    island: Island = NO_ISLANDS
    """How learners form islands."""
    traffic: Traffic | None = None
    """What the ranks of a tensor island send each other."""

    def cluster(self, arm: Arm, learners: int) -> Cluster:
        """The simulated cluster of some learners under a strategy.

        A cluster has one kind of link between nodes, and one inside. Means and messages were measured apart, because
        they cost differently: learners that only average use the link of means, and super-learners use it inside.

        Messages queue at their node's link, unless the costs hold that wait already. Where nodes stand for sync groups
        only, each learner brings a link of its own.
        """
        costs, num_models = self.costs, learners // self.island.size
        group = arm.strategy.sync_groups(arm.options, num_models).size
        means_only = arm.name in AVERAGING
        link = costs.means if means_only else costs.messages
        if arm.strategy.averages_gradients(arm.options) and means_only and not is_compressed(arm.options):
            link = costs.gradient_means or costs.means  # encoded gradients are averaged after backward
        link = cast(LinkModel, self.given.get("link", link))
        size, inside = 1, cast(LinkModel | NodeModel, NodeModel())
        uplink: float | Literal["unlimited"] | None = "unlimited" if costs.holds_contention else None
        if costs.devices_per_node > 1 and costs.inside is not None:
            size, inside, uplink = costs.devices_per_node, costs.inside, costs.messages.bandwidth
        elif 1 < group < num_models and arm.strategy.averages_gradients(arm.options):
            size, inside = group * self.island.size, costs.gradient_means or costs.means
            uplink = uplink or size * link.bandwidth
        nodes = NodeModel(size=size, latency=inside.latency, bandwidth=inside.bandwidth, uplink=uplink)
        memory = MemoryModel() if costs.memory_bandwidth is None else MemoryModel(bandwidth=costs.memory_bandwidth)
        found = {"compute": costs.compute, "link": link, "nodes": nodes, "memory": memory}
        cluster = Cluster.model_validate(found | dict(self.given))
        for change in self.changes:
            sections = change(cluster)
            new = {name: getattr(cluster, name).model_copy(update=values) for name, values in sections.items()}
            cluster = cluster.model_copy(update=new)
        return cluster

    def with_bandwidth(self, factor: float) -> "Machines":
        """The same machines, with so many times the bandwidth between nodes."""
        return self._with(
            lambda each: {
                "link": {"bandwidth": each.link.bandwidth * factor},
                "nodes": {"uplink": each.uplink * factor if each.uplink else "unlimited"},
            }
        )

    def with_compute(self, factor: float) -> "Machines":
        """The same machines, whose gradients take so many times as long."""
        return self._with(lambda each: {"compute": {"seconds": each.compute.seconds * factor}})

    def without_exchange(self) -> "Machines":
        """The same machines, with links on which everything arrives at once."""
        at_once = {"latency": 0.0, "bandwidth": MOST_BYTES_PER_SECOND}
        return self._with(lambda each: {"link": at_once, "nodes": at_once | {"uplink": None}})

    def _with(self, change: Callable[[Cluster], Sections]) -> "Machines":
        return replace(self, changes=(*self.changes, change))

    def with_slow(self, rank: int, factor: float) -> "Machines":
        """The same machines, one of which takes `factor` times as long for its gradients."""
        slow = {**self.stragglers.slow, rank: factor}
        return replace(self, stragglers=self.stragglers.model_copy(update={"slow": slow}))


def simulate(arm: Arm, learners: int, machines: Machines, seed: int = 0, rounds: int | None = None) -> Prediction:
    """The steady speed of a strategy: what the second half of a simulation took.

    The beginning of a run, and its end, where learners wait for the last of them, are in both simulations, that of the
    first half and that of the whole, and cancel out. `rounds` is how many gradients each learner makes in a half, or
    a few more: a strategy that does something every H steps is simulated for whole periods. A warm-up is left out.
    """
    each = rounds or max(FEWEST_ROUNDS, min(MOST_ROUNDS, GRADIENTS // learners))
    each = max(each, CYCLES * int(getattr(arm.options, "period", 1)))
    if period := getattr(arm.options, "every", None):
        each = -(-each // period) * period
    half, whole = (run(arm, learners, machines, steps, seed) for steps in (each * learners, 2 * each * learners))
    num_gradients = whole.num_gradients - half.num_gradients
    seconds, bytes_sent = whole.seconds - half.seconds, whole.bytes_sent - half.bytes_sent
    if seconds <= 0.0:  # both end with the same gradient of the slowest learner
        return _paced(arm, whole)
    return _prediction(arm, whole, seconds / num_gradients, bytes_sent / num_gradients)


def simulate_briefly(arm: Arm, learners: int, machines: Machines, rounds: int, seed: int = 0) -> Prediction:
    """The speed of a strategy from one short simulation."""
    return _paced(arm, run(arm, learners, machines, rounds * learners, seed))


def _paced(arm: Arm, whole: TimingOutcome) -> Prediction:
    """The speed as the sum of the learners' own paces.

    A learner's pace ends with its last gradient. What the others then wait for the slowest, which would spoil a short
    simulation, does not count.
    """
    made = [(each.num_steps, each.spent) for each in whole.learners if each.num_steps]
    pace = sum(number / (spent.computing + _waiting(spent)) for number, spent in made)
    return _prediction(arm, whole, 1.0 / pace, whole.bytes_sent / whole.num_gradients)


def of_seeds(simulating: Callable[..., Prediction], arm: Arm, learners: int, machines: Machines) -> Prediction:
    """What simulations of several seeds found together, or the only one where no time is drawn at random."""
    cluster = machines.cluster(arm, learners)
    is_random = cluster.compute.distribution != "constant" or max(cluster.link.jitter, machines.stragglers.jitter) > 0.0
    found = [simulating(arm, learners, machines, seed=seed) for seed in range(SEEDS if is_random else 1)]
    return replace(
        found[0],
        seconds=tuple(each.seconds_per_gradient for each in found),
        waiting=fmean(each.waiting for each in found),
        staleness=sum((each.staleness for each in found), Counter[int]()),
    )


def _prediction(arm: Arm, found: TimingOutcome, seconds: Seconds, bytes_sent: float) -> Prediction:
    spent = [each.spent for each in found.learners if each.num_steps]
    waiting = sum(map(_waiting, spent))
    total = max(sum(each.computing for each in spent) + waiting, 1e-12)
    return Prediction(arm, len(found.learners), (seconds,), waiting / total, bytes_sent, found.staleness)


def _waiting(spent: Spent) -> Seconds:
    return spent.waiting_for_data + spent.waiting_for_peers


def run(arm: Arm, learners: int, machines: Machines, steps: int, seed: int = 0) -> TimingOutcome:
    """A simulation of so many gradients, without what a strategy does to warm up."""
    num_bytes, cluster = machines.costs.job.model_bytes // 4 * 4, machines.cluster(arm, learners)
    options, slowness, island, traffic = arm.options, machines.stragglers, machines.island, machines.traffic
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
    """The place between `low` and `high`, both positive, at which `holds` changes, within 3 %.

    `holds` must differ at the two ends; which of them it is true at does not matter.
    """
    at_low = holds(low)
    while max(high / low, low / high) > 1.03:
        middle = math.sqrt(low * high)
        if holds(middle) == at_low:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)
