"""How fast learners would be: a strategy's own text on the simulated clock, with the costs of a job."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from starling.configuration import Config
from starling.engines.virtual.cluster import Cluster, LinkModel
from starling.engines.virtual.timing import TimingOutcome, simulate_timing
from starling.runs.planning.costs import Costs, Seconds
from starling.strategies import Strategy
from starling.training.stragglers import Stragglers

MOST_BYTES_PER_SECOND = 1e18
"""Of the link with which a simulation shows what waiting is left without any exchange."""
GRADIENTS = 480
"""Simulated for each prediction, shared by the learners."""
FEWEST_ROUNDS, MOST_ROUNDS = 10, 40
"""Gradients of each learner in a simulation."""


@dataclass(frozen=True)
class Arm:
    """A strategy with its options."""

    strategy: Strategy
    options: Config

    @property
    def name(self) -> str:
        """The strategy's name."""
        return self.strategy.name


@dataclass(frozen=True)
class Machines:
    """What a prediction is made for: costs, the cluster they give, and the slowness that is assumed."""

    costs: Costs
    cluster: Cluster
    stragglers: Stragglers = field(default_factory=Stragglers)

    @property
    def is_random(self) -> bool:
        """Whether times are drawn at random."""
        drawn = self.cluster.compute.distribution != "constant"
        return drawn or self.stragglers.jitter > 0.0 or self.cluster.link.jitter > 0.0

    def with_link(self, change: Callable[[LinkModel], LinkModel]) -> "Machines":
        """The same machines with other links between them."""
        return replace(self, cluster=change_links(self.cluster, change))

    def with_slow(self, rank: int, factor: float) -> "Machines":
        """The same machines, one of which takes `factor` times as long for its gradients."""
        slow = {**self.stragglers.slow, rank: factor}
        return replace(self, stragglers=self.stragglers.model_copy(update={"slow": slow}))


@dataclass(frozen=True)
class Speed:
    """What a simulation of some learners found, per gradient of all of them together."""

    seconds_per_gradient: Seconds
    """Of the run: the time from one gradient of any learner to the next."""
    computing: float
    """The share of a learner's time."""
    waiting: float
    """Waiting for data or peers, exchanges included."""
    bytes_sent: float
    """By all learners, for each gradient."""
    staleness: Counter[int]


def simulate(arm: Arm, learners: int, machines: Machines, seed: int = 0, rounds: int | None = None) -> Speed:
    """The steady speed of a strategy: what the second half of a simulation took.

    The beginning of a run, and its end, where learners wait for the last of them, are in both simulations, that of the
    first half and that of the whole, and cancel out. `rounds` is how many gradients each learner makes in a half.
    """
    each = rounds or max(FEWEST_ROUNDS, min(MOST_ROUNDS, GRADIENTS // learners))
    half, whole = (_run(arm, learners, machines, steps, seed) for steps in (each * learners, 2 * each * learners))
    num_gradients = whole.num_gradients - half.num_gradients
    spent = [learner.spent for learner in whole.learners if learner.num_gradients]
    computing = sum(each.computing for each in spent)
    waiting = sum(each.waiting_for_data + each.waiting_for_peers for each in spent)
    total = max(computing + waiting, 1e-12)
    return Speed(
        seconds_per_gradient=(whole.seconds - half.seconds) / num_gradients,
        computing=computing / total,
        waiting=waiting / total,
        bytes_sent=(whole.bytes_sent - half.bytes_sent) / num_gradients,
        staleness=whole.staleness,
    )


def _run(arm: Arm, learners: int, machines: Machines, steps: int, seed: int) -> TimingOutcome:
    num_bytes = machines.costs.job.model_bytes // 4 * 4
    stragglers = machines.stragglers
    return simulate_timing(
        arm.strategy, arm.options, learners, machines.cluster, num_bytes, steps, seed=seed, stragglers=stragglers
    )


def without_exchange(machines: Machines) -> Machines:
    """The same machines, with links on which everything arrives at once."""
    return machines.with_link(lambda link: link.model_copy(update={"latency": 0.0, "bandwidth": MOST_BYTES_PER_SECOND}))


def change_links(cluster: Cluster, change: Callable[[LinkModel], LinkModel]) -> Cluster:
    """A cluster with other links between its machines."""
    return cluster.model_copy(update={"link": change(cluster.link)})


def bisect(holds: Callable[[float], bool], low: float, high: float, tolerance: float = 0.03) -> float:
    """The place between `low` and `high`, both positive, at which `holds` changes, to a relative `tolerance`.

    `holds` must differ at the two ends; which of them it is true at does not matter.
    """
    at_low = holds(low)
    while max(high / low, low / high) > 1.0 + tolerance:
        middle = math.sqrt(low * high)
        if holds(middle) == at_low:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def median_speed(speeds: Sequence[Speed]) -> Seconds:
    """The median over seeds."""
    return statistics.median(speed.seconds_per_gradient for speed in speeds)
