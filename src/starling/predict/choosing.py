"""Which strategy `auto` chooses: the planner's predictions, and what a gradient is worth under each strategy."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np

from starling.configuration import Config
from starling.engines.virtual.cluster import ComputeModel, LinkModel
from starling.errors import ConfigError
from starling.predict.at_hand import ACROSS, INSIDE, has_nodes, topologies
from starling.predict.costs import SHORTEST, Costs, JobFacts, fit_compute, with_step
from starling.predict.deciding import TIE, Arm, Prediction, ranked, tried
from starling.predict.measure import Figures
from starling.predict.predict import AVERAGING, Machines, of_seeds, simulate_briefly
from starling.recipe.run import CANDIDATES, AutoOptions, StrategyChoice
from starling.reporting.lines import mean_staleness
from starling.training.stragglers import Stragglers
from starling.workload import Weighting

Seconds = float
LONGER = 1.5
"""Progress is the mean of that with rounds of averaging as measured, and that with rounds that take so many times as
long. A period too long costs little (`WORTH_OF_A_DOUBLING`), one too short makes learners wait; and rounds are not all
the same: random pairs cross a slow link more or less often, and others may use it later."""
LIKE = 1.05
"""Learners whose gradients take less than this many times those of the fastest count as equally fast."""
SIMULATED, MOST_ROUNDS, FEWEST_ROUNDS = 480, 32, 4
"""Gradients in a simulation, and the most and the fewest of each learner."""
CYCLES, MOST_TIMES = 4, 8
"""Rounds of averaging in a simulation, twice as many as a learner may be behind, unless that would take more than so
many times as many gradients."""
STEADY = 0.1
"""Standard deviation / mean up to which gradient times count as constant, for which one simulation is enough."""
NOTABLE = 0.1
"""The share of its time that a learner loses to rounds of averaging from which it is said."""
RESAMPLES = 1000


class Choice(Config):
    """What `auto` chose, and why."""

    strategy: StrategyChoice
    """The choice, for a recipe."""
    lines: tuple[str, ...]
    """What and why, and how far the second choice is behind."""
    notes: dict[str, Any]
    """The figures behind it, for people: how many learners, what was predicted and measured."""


LONE = Choice(
    strategy=StrategyChoice(name="allreduce"),
    lines=("strategy auto: allreduce, because a single learner has no other to agree with",),
    notes={"learners": 1, "predicted": [{"strategy": {"name": "allreduce"}}], "measured": {}},
)
"""One learner is plain SGD under every strategy."""


@dataclass(frozen=True)
class Surroundings:
    """The machines of a run, as the planner needs them: a simulated cluster, or what learners have measured."""

    learners: int
    per_node: int
    apart: Machines
    """The machines without what rounds of averaging do to them."""
    because: str = ""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """The figures for people; empty: everything is certain to be as the machines say."""
    gradients: Sequence[Seconds] = ()
    """By learner, without averaging."""
    lost: Sequence[float] = ()
    """By learner, the share of its time that a round of averaging costs it while it is under way."""
    rounds: Mapping[str, Seconds] = field(default_factory=dict)
    """How long a round of averaging takes, by pattern."""

    def link(self, pattern: str) -> LinkModel:
        """The link that rounds of a pattern meet."""
        num_bytes = self.apart.costs.job.model_bytes
        if pattern == ACROSS:  # each learner sent its share to every node that it averages with, all over one uplink
            num_bytes *= len(topologies(self.learners, self.per_node)[ACROSS].targets(0, 0))
        return LinkModel(latency=0.0, bandwidth=num_bytes / max(SHORTEST, self.rounds[pattern]))

    def machines(self, arm: Arm, longer: float = 1.0) -> Machines:
        """Those that a strategy meets if rounds of averaging take `longer` times as long."""
        costs, pattern = self.apart.costs, getattr(arm.options, "pattern", None)
        if arm.name == "hadpsgd" and ACROSS in self.rounds:
            nodes = {"inside": self.link(INSIDE), "devices_per_node": self.per_node}
            costs = costs.model_copy(update={"messages": self.link(ACROSS), **nodes})
        elif self.rounds and pattern is not None:
            costs = costs.model_copy(update={"messages": self.link(pattern if pattern in self.rounds else "ring")})
        found = replace(self.apart, costs=costs, stragglers=self._stragglers(arm, longer))
        return found if longer == 1.0 or arm.name in AVERAGING else found.with_bandwidth(1.0 / longer)

    def _stragglers(self, arm: Arm, longer: float) -> Stragglers:
        """How much slower than the fastest gradient those of each learner are, between and during rounds of averaging.

        Of a learner's time, a share u is spent with a round under way, in which it loses a share `lost`. With gradients
        of g seconds without averaging, those take g / (1 - lost u); with rounds of E seconds, one for each `period`
        gradients of the fastest learner, u = E / (period g) (1 - lost u), or 1 if rounds take longer than that.
        """
        pattern = ACROSS if arm.name == "hadpsgd" else getattr(arm.options, "pattern", None)
        if not any(self.lost) or pattern is None:
            return self.apart.stragglers
        seconds = longer * self.rounds.get(pattern, self.rounds.get("ring", 0.0))
        period = float(getattr(arm.options, "period", 1.0))
        ratios = [seconds / (period * gradient) for gradient in self.gradients]
        shares = [min(1.0, ratio / (1.0 + ratio * lost)) for ratio, lost in zip(ratios, self.lost, strict=True)]
        under_way, fastest = max(shares), min(self.gradients)
        times = [each / (1.0 - lost * under_way) for each, lost in zip(self.gradients, self.lost, strict=True)]
        return Stragglers(slow={rank: each / fastest for rank, each in enumerate(times) if each > LIKE * fastest})


def surroundings_of(figures: Sequence[Figures], per_node: int) -> Surroundings:
    """The machines of a run from what its learners measured, by rank."""
    world, num_bytes = len(figures), figures[0].num_bytes
    means = [fmean(each.gradients) for each in figures]
    base = min(means)
    slow = {rank: mean / base for rank, mean in enumerate(means) if mean > LIKE * base}
    relative = np.concatenate([np.asarray(each.gradients) / mean for each, mean in zip(figures, means, strict=True)])
    step = median(seconds for each in figures for seconds in each.steps)
    varies = len(relative) > 2 * world and float(relative.std()) > STEADY
    fitted = fit_compute(base * relative) if varies else ComputeModel(seconds=base)
    mean = max(SHORTEST, fmean(each.means[num_bytes] for each in figures))
    longer = mean
    if all(each.synchronous for each in figures):
        synchronous = fmean(median(each.synchronous) for each in figures)
        longer = max(SHORTEST, synchronous - _slowest_of_each_round(figures))
    rounds = {name: fmean(each.rounds[name] for each in figures) for name in figures[0].rounds}
    costs = Costs(
        job=JobFacts(trains="the run's model", model_bytes=num_bytes, batches_per_epoch=1),
        compute=with_step(fitted, step),
        messages=LinkModel(latency=0.0, bandwidth=num_bytes / max(SHORTEST, rounds["ring"])),
        means=_ring(mean, num_bytes, world),
        gradient_means=_ring(longer, num_bytes, world),
        holds_contention=True,
        source="what the learners of this run measured",
    )
    slowest = max(range(world), key=means.__getitem__)
    of_slowest = f" ({_seconds(means[slowest])} on learner {slowest})" if slow else ""
    because = (
        f"a gradient takes {_seconds(base)}{of_slowest}, averaging all gradients {_seconds(longer)} more, and "
        f"averaging {num_bytes / 1e6:.3g} MB of weights with neighbours {_seconds(rounds['ring'])}"
    )
    lost = [each.lost for each in figures]
    if max(lost) > NOTABLE:
        rank = max(range(world), key=lost.__getitem__)
        because += f", during which learner {rank} makes {lost[rank]:.0%} fewer gradients"
    measured = {
        "gradient_seconds": [round(each, 6) for each in means],
        "gradients_measured": [len(each.gradients) for each in figures],
        "step_seconds": round(step, 6),
        "mean_seconds": round(mean, 6),
        "mean_of_gradients_seconds": round(longer, 6),
        "exchange_seconds": {name: round(seconds, 6) for name, seconds in rounds.items()},
        "lost_to_exchanges": [round(each, 3) for each in lost],
        "model_bytes": num_bytes,
    }
    machines = Machines(costs, Stragglers(slow=slow))
    return Surroundings(world, per_node, machines, because, measured, means, lost, rounds)


def _slowest_of_each_round(figures: Sequence[Figures]) -> Seconds:
    """How long the slowest gradient of a round takes, expected from the distributions of all learners."""
    generator = np.random.default_rng(0)
    drawn = [generator.choice(np.asarray(each.gradients), RESAMPLES) for each in figures]
    return float(np.max(drawn, axis=0).mean())


def _ring(seconds: Seconds, num_bytes: int, world: int) -> LinkModel:
    """The link on which a ring all-reduce of so many learners takes this long."""
    messages = 2 * (world - 1)
    return LinkModel(latency=0.0, bandwidth=messages * -(-num_bytes // world) / seconds)


def choose(around: Surroundings, options: AutoOptions, weighting: Weighting = "batches") -> list[Prediction]:
    """The strategy that makes the most progress per second, and the others that were compared.

    Raises:
        ConfigError: None of `options.among` fits.
    """
    world = around.learners
    found: list[Prediction] = []
    notes: list[str] = []
    for name in (each for each in CANDIDATES if each in options.among):
        try:
            if name == "hadpsgd" and not has_nodes(world, around.per_node):
                raise ConfigError("hadpsgd: needs several nodes, each with the same number of learners, at least 2")
            found += tried(name, around.per_node, _patterns(around), partial(_predict, around, weighting))
        except ConfigError as error:
            notes.append(str(error))
    if not found:
        raise ConfigError(
            f"strategy auto: none of {', '.join(options.among)} fits {world} learners\n  " + "\n  ".join(notes)
        )
    return ranked(found)


def explained(found: Sequence[Prediction], around: Surroundings) -> Choice:
    """The first of the predictions as a choice, with its reasons."""
    predicted: list[dict[str, Any]] = [
        {
            "strategy": {"name": each.arm.name, **each.arm.given},
            "gradients_per_second": 1.0 / each.seconds_per_gradient,
            "cautious": each.caution / each.seconds_per_gradient,
            "worth": each.worth,
            "waiting": each.waiting,
            "staleness": mean_staleness(each.staleness),
        }
        for each in found
    ]
    strategy, lines = StrategyChoice.model_validate(predicted[0]["strategy"]), tuple(_reasons(found, around))
    notes = {"learners": around.learners, "predicted": predicted, "measured": dict(around.measured)}
    return Choice(strategy=strategy, lines=lines, notes=notes)


def _reasons(found: Sequence[Prediction], around: Surroundings) -> Iterator[str]:
    chosen = found[0]
    yield (
        f"strategy auto: {chosen.arm} for {chosen.learners} learners, {1.0 / chosen.seconds_per_gradient:.3g} "
        f"mini-batches/s predicted, {chosen.waiting:.0%} of the time waiting"
    )
    yield f"  because {around.because}"
    second = next((each for each in found if each.arm.name != chosen.arm.name), None)
    if second is None:
        yield "  no other strategy was compared"
        return
    longer = min(chosen.caution, second.caution) < 1.0 - TIE
    yield (
        f"  {second.arm} is the second choice: {1.0 / second.seconds_per_gradient:.3g} mini-batches/s, "
        f"{max(0.0, 1.0 - second.progress / chosen.progress):.0%} behind if its mini-batches count {second.worth:.2f} "
        f"and those of the first choice {chosen.worth:.2f}"
        + (f", and rounds may take {LONGER:g} times as long" if longer else "")
    )


def _patterns(around: Surroundings) -> Sequence[str]:
    """The patterns worth a try, that with the fewest messages first. A fixed ring is one only where its rounds are
    faster than those of pairs. Random rings send twice as many messages as pairs, and cannot be faster."""
    if around.learners == 2:
        return ["ring"]
    return ["pairs"] if around.rounds and around.rounds["ring"] > around.rounds["pairs"] else ["pairs", "ring"]


def _predict(around: Surroundings, weighting: Weighting, arm: Arm) -> Prediction:
    if problem := arm.strategy.weighting_problem(arm.options, weighting):
        raise ConfigError(problem)
    found = _simulated(arm, around)
    if around.measured and arm.name not in AVERAGING:
        longer = _simulated(arm, around, LONGER).seconds_per_gradient
        return replace(found, caution=fmean((1.0, found.seconds_per_gradient / longer)))
    return found


def _simulated(arm: Arm, around: Surroundings, longer: float = 1.0) -> Prediction:
    learners, machines = around.learners, around.machines(arm, longer)
    rounds = max(FEWEST_ROUNDS, min(MOST_ROUNDS, SIMULATED // learners))
    long_enough = CYCLES * int(getattr(arm.options, "period", 1.0))
    rounds = max(rounds, min(long_enough, MOST_TIMES * SIMULATED // learners))
    return of_seeds(partial(simulate_briefly, rounds=rounds), arm, learners, machines)


def _seconds(seconds: Seconds) -> str:
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{1000 * seconds:.3g} ms"
