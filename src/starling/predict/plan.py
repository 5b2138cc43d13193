"""`starling.plan`: predictions for each strategy and number of learners, and the choice among strategies, which
`strategy: auto` also uses.

Strategies are compared by progress, which is the number of mini-batches per second times the worth of a mini-batch.
Among strategies that predictions cannot distinguish, the one whose mini-batches are worth most is chosen, and among
equals the plainest one (decision 0019).
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np

from starling.budget import Budget
from starling.configuration import Config, refused
from starling.engines.virtual.cluster import Cluster, LinkModel
from starling.errors import ConfigError
from starling.files import writing
from starling.predict.costs import Costs, JobFacts, Preset, Profile, find_costs, loaded, memory_of
from starling.predict.measure import has_nodes
from starling.predict.predict import WORTH, Arm, DataNeed, Machines, Prediction, bisect, data_need, predict, simulate
from starling.recipe.run import StrategyChoice, strategy_problems
from starling.reporting.epochs import mean_staleness
from starling.reporting.progress import Say
from starling.strategies import STRATEGIES
from starling.strategies.islands import NO_ISLANDS, between_islands
from starling.training.job import Job
from starling.training.speeds import Stragglers
from starling.training.tensor_plan import traffic_of

TIE = 0.05
"""Share of the most progress within which progress counts as equal. In one setting, predictions were 2.9 and 2.5 % off
for two of these strategies (docs/planning.md), so they do not show differences of less than about 5 %."""
PERIODS = (2, 4, 8, 16)
"""Averaging periods, in addition to 1, that are tried one after the other as long as the progress grows."""


def is_clearly_ahead(progress: float, of: float) -> bool:
    """Return whether `progress` exceeds the progress `of` by more than predictions leave open."""
    return of < (1.0 - TIE) * progress


def ranked(found: Sequence[Prediction]) -> list[Prediction]:
    """Return the predictions with the chosen one first, and the others by decreasing progress. In `found`, the plainest
    strategies come first."""
    most = max(each.progress for each in found)
    near = [each for each in found if not is_clearly_ahead(most, each.progress)]
    best = max(near, key=lambda each: each.worth)  # the first of those that are worth as much
    return [best, *sorted((each for each in found if each is not best), key=lambda each: -each.progress)]


@dataclass(frozen=True)
class Decision:
    """Predictions for a number of learners, and the choice that follows from them."""

    tried: Sequence[Sequence[Prediction]]
    """Predictions of each strategy that fits, with all options that were tried, in the order in which the strategies
    were named."""
    notes: Sequence[str]
    """Reasons why other strategies were left out."""

    @cached_property
    def best(self) -> Sequence[Prediction]:
        """Prediction of each strategy with the options that the rule prefers."""
        return [ranked(each)[0] for each in self.tried]

    @cached_property
    def chosen(self) -> Prediction:
        """The chosen prediction."""
        return ranked(self.best)[0]

    @property
    def second(self) -> Prediction | None:
        """The second choice, which is a different strategy and not the same strategy with other options; None if there
        is none."""
        return next(iter(ranked(self.best)[1:]), None)

    @property
    def predictions(self) -> Sequence[Prediction]:
        """All predictions: the choice first, then by decreasing progress."""
        others = [each for each in chain(*self.tried) if each is not self.chosen]
        return [self.chosen, *sorted(others, key=lambda each: -each.progress)]


def choose(
    machines: Machines,
    learners: int,
    choices: Sequence[StrategyChoice],
    job: Job | None = None,
    say: Say = lambda line: None,
) -> Decision:
    """Predict each strategy, with its options or with those that are worth a try, and choose one.

    Args:
        machines: The machines on which the learners run.
        learners: The number of learners.
        choices: The strategies to compare, with the plainest first.
        job: The job. Its weighting limits the choice, and its own strategy keeps its options.
        say: A function that is called with a line for each simulation.

    Raises:
        ConfigError: The options of a choice are wrong.
    """
    tried, notes = [], []
    for choice in choices:
        ladders = _ladders(choice, machines, learners, job)
        try:
            _check(ladders[0][0], machines, learners, job)
        except ConfigError as error:
            notes.append(f"{choice.name} with {learners} learners is left out: {error}")
            continue
        tried.append([found for ladder in ladders for found in _climbed(ladder, machines, learners, say)])
    return Decision(tried, notes)


def _ladders(choice: StrategyChoice, machines: Machines, learners: int, job: Job | None) -> list[list[Arm]]:
    """Return a strategy with the options that are worth trying: for each pattern, longer and longer periods. If the
    choice already has options, only these are returned. Raises `ConfigError` for wrong options."""
    strategy, given = choice.strategy, dict(choice.model_extra or {})
    fields = strategy.options.model_fields
    if not given and job is not None and job.strategy.name == strategy.name:
        return [[Arm(strategy, job.options)]]
    options = {"per_node": max(2, machines.per_node)} | given if "per_node" in fields else given
    if problems := strategy_problems(StrategyChoice(name=choice.name, **options)):
        raise refused(problems, f"strategy {choice.name}")
    if given:
        return [[Arm(strategy, strategy.options.model_validate(options), given)]]
    sets = [options]
    if learners == 1:
        return [[Arm.of({"name": choice.name, **options})]]
    if {"pattern", "period"} <= fields.keys() and "per_node" not in fields:
        sets = [{"pattern": pattern} for pattern in machines.patterns(learners)]
    periods = [{}, *({"period": period} for period in PERIODS if "period" in fields)]
    return [[Arm.of({"name": choice.name, **own, **period}) for period in periods] for own in sets]


def _check(arm: Arm, machines: Machines, learners: int, job: Job | None) -> None:
    """Raise `ConfigError` if a strategy does not fit the number of learners, the machines, or the job's weighting."""
    between_islands(arm.strategy, machines.island).validate(arm.options, learners)
    if job is not None and (problem := arm.strategy.weighting_problem(arm.options, job.weighting)):
        raise ConfigError(problem)
    is_measured = machines.costs.measured is not None
    if is_measured and hasattr(arm.options, "per_node") and not has_nodes(learners, machines.per_node):
        raise ConfigError(f"{arm.name}: needs several nodes, each with the same number of learners, at least 2")


def _climbed(ladder: Sequence[Arm], machines: Machines, learners: int, say: Say) -> list[Prediction]:
    """Return the predictions for longer and longer periods, up to the first period with less progress."""
    found: list[Prediction] = []
    for arm in ladder:
        say(f"{arm} with {learners} learners")
        found.append(predict(arm, learners, machines))
        if len(found) > 1 and found[-1].progress < found[-2].progress:
            break
    return found


SECONDS_PER_HOUR = 3600.0
LEAST_GRADIENT = 5e-3
"""Seconds of a gradient below which data sheets predict too short a time: a kernel takes some microseconds to start,
and a recurrent layer starts some for each frame."""
CROSSING_ROUNDS = 12
"""Number of gradients of each learner in half a simulation that looks for a crossing point."""
NOT_PLANNED = ("hogwild", "delayed", "gossip-pga", "choco", "qg-dsgdm", "d2", "gradient-tracking", "a2cid2")
"""Strategies that are left out unless they are requested: one needs a single machine, one is for studies, and the
others differ from `dpsgd` and `adpsgd` in the worth of a gradient, which a plan does not know."""
NO_PERIODIC = (
    "the periodic strategies are left out unless they are named: the longer their periods, the faster they are, but "
    "a plan does not know the worth of an epoch then"
)
SLOWEST, BANDWIDTHS = (1.5, 4.0, 10.0, 100.0), (10.0, 100.0, 1000.0)
"""Limits of the search for crossing points: factors by which one learner is slower, and by which links are slower or
faster."""


@dataclass(frozen=True)
class Forecast:
    """The prediction for a strategy and a number of learners."""

    strategy: str
    learners: int
    hours_per_epoch: float
    hours: float
    """Hours of the whole run."""
    hours_low: float
    """Lower end of the range of hours; `hours_high` is the upper end. The range covers the seeds, the interval of the
    gradient time and the error of the last validation."""
    hours_high: float
    computing: float
    """Share of a learner's time spent computing; `computing`, `waiting` and `exchanging` sum to 1."""
    waiting: float
    """Share of a learner's time spent waiting for data or for slower learners, which remains if messages arrive at
    once."""
    exchanging: float
    """Share of a learner's time spent in waits that only a faster link would end."""
    gigabytes_per_link: float
    """Data that a learner sends in an epoch, in units of 10^9 bytes, as a mean over learners."""
    megabytes_per_second: float
    """Data that a learner sends in a second of the run, in units of 10^6 bytes. This is the load of its link."""
    staleness_mean: float
    staleness_median: int
    staleness_95: int
    """95 % quantile of the staleness of gradients."""
    staleness_max: int
    memory_gigabytes: float | None
    """Memory of a learner, as measured, or of a rank of an island, as predicted; None if nothing was measured."""
    cost: float | None
    """Price per device and hour x learners x hours; None without a price."""
    worth: float = 1.0
    """Worth of a mini-batch in the recommendation, relative to one of `allreduce`."""
    options: str = ""
    """Options of the strategy that were given, or the best ones, if several sets were tried."""
    data: DataNeed | None = None
    """Mini-batches for the same early loss, relative to one learner; None if no study has the strategy."""

    def __str__(self) -> str:
        return f"{self.strategy} ({self.options})" if self.options else self.strategy


@dataclass(frozen=True)
class Crossing:
    """A value beyond which another strategy makes more progress than the recommended one, by more than a tie."""

    what: str
    """Quantity that is varied: `bandwidth`, in bytes per second, or `slowness`, a factor of the time of one learner's
    gradients."""
    learners: int
    value: float
    now: float
    chosen: str
    faster: str
    """Strategy that makes more progress beyond `value`."""

    def __str__(self) -> str:
        if self.what == "slowness":
            many = f"one of {self.learners} learners is {self.value:.2g} times slower"
            return f"{self.faster} makes more progress than {self.chosen} once {many}"
        side = "below" if self.value < self.now else "above"
        return (
            f"{self.faster} makes more progress than {self.chosen} {side} {gigabits(self.value)} between "
            f"{self.learners} learners (now {gigabits(self.now)})"
        )


@dataclass(frozen=True)
class Plan:
    """The result of `starling.plan`. `pandas.DataFrame(plan.rows)` is its table."""

    rows: tuple[Forecast, ...]
    """Predictions, one for each strategy and number of learners."""
    recommended: Forecast
    """Row that is recommended."""
    reason: tuple[str, ...]
    """Lines that give the choice with its reason, the distance of the second choice, if there is one, the choices for
    other numbers of learners, and the reliability of the prediction."""
    crossings: tuple[Crossing, ...]
    """Points at which one strategy becomes faster than another."""
    notes: tuple[str, ...]
    """Strategies that were left out, and assumptions."""
    error: float | None = None
    """The largest relative error of a prediction at the last validation; None if nothing was validated."""

    def records(self) -> list[dict[str, Any]]:
        """Return the rows as dictionaries. The parts of `data` have keys of their own, such as `data_mean`."""
        needs = [{} if row.data is None else asdict(row.data) for row in self.rows]
        parts = [field.name for field in fields(DataNeed)]
        rows = [{key: value for key, value in asdict(row).items() if key != "data"} for row in self.rows]
        return [row | {f"data_{part}": need.get(part) for part in parts} for row, need in zip(rows, needs, strict=True)]

    def write_csv(self, path: Path) -> None:
        """Write the rows as a table that spreadsheets and `pandas.read_csv` can read. Raises `ConfigError` if the file
        cannot be written."""
        with writing(f"output {path}", "write to another file"), path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(self.records()[0]))
            writer.writeheader()
            writer.writerows(self.records())


def plan(
    job: Job | JobFacts | None = None,
    *,
    profile: Profile | Path | str | None = None,
    preset: Preset | str | None = None,
    cluster: Path | str | Mapping[str, Any] | None = None,
    learners: Sequence[int] = (4,),
    strategies: Sequence[str | Mapping[str, Any]] | None = None,
    price: float | None = None,
    budget: Budget | None = None,
    stragglers: Stragglers | None = None,
    crossings: bool = True,
    say: Say = lambda line: None,
) -> Plan:
    """Predict how long a job takes with each strategy and number of learners, and recommend one.

    The strategies' own code runs on the simulated clock, without gradients, with the costs that a profile measured or
    that a preset takes from data sheets. Predictions are times. The recommendation also takes the worth of a mini-batch
    into account, by the rule of `strategy: auto`. If a strategy is given without options, the options that `auto` would
    try are tried.

    Args:
        job: The job to train. A profile includes its job; with a profile, None plans that job.
        profile: The result of `starling.profile`, or the file that `starling profile` wrote.
        preset: The name of a preset, its file, or a `Preset`, in place of a profile.
        cluster: The network of the machines, if it differs from the measured one. It is a file or a mapping with the
            keys of a recipe's `cluster` section. Missing keys keep the measured values.
        learners: The numbers of learners.
        strategies: Names of strategies, or mappings with `name` and options. None plans all strategies that run on
            several machines, except the periodic ones.
        price: The price of one device for an hour, in your currency.
        budget: The run's budget. None uses the job's budget, or one epoch if there is only a profile.
        stragglers: The slowness to assume. None uses the job's stragglers, if any.
        crossings: Whether to look for crossing points, which takes most of the time.
        say: A function that is called with a line for each simulation.

    Raises:
        ConfigError: An argument does not fit. The message says which one.

    Example:
        >>> import pandas
        >>> found = starling.plan(profile="profile.yaml", learners=[4, 16])  # doctest: +SKIP
        >>> pandas.DataFrame(found.rows)  # doctest: +SKIP
    """
    own = job if isinstance(job, Job) else None
    stragglers = stragglers or (own.stragglers if own else Stragglers())
    machines = Machines(find_costs(job, profile, preset), stragglers, read_cluster(cluster))
    if not learners or min(learners) < 1:
        raise ConfigError(f"learners: {list(learners)}; give at least one number, each at least 1")
    if price is not None and price < 0.0:
        raise ConfigError(f"price: {price} is below 0; give that of one device for an hour")
    notes = []
    if strategies is None:
        notes.append(NO_PERIODIC)
        strategies = usual_strategies(between_islands(own.strategy, NO_ISLANDS).name if own else None)
    if own is not None and own.island.size > 1:
        memory, traffic = memory_of(own), traffic_of(own.workload) if own.island.tensor > 1 else None
        costs = machines.costs.model_copy(update={"memory_bytes": memory.total})
        machines = replace(machines, costs=costs, island=own.island, traffic=traffic)
        notes.append(f"a rank of an island of {own.island.size} is predicted to hold {memory}")
        if traffic is not None:
            notes.append("a rank of a tensor island is taken to compute as long as a lone learner")
    if preset is not None and (gradient := machines.costs.compute.seconds) < LEAST_GRADIENT:
        notes.append(
            f"warning: by its data sheet, the device computes a gradient in {1000 * gradient:.2g} ms; below "
            f"{1000 * LEAST_GRADIENT:g} ms, starting operations takes longer than they do: use a profile"
        )
    choices = [StrategyChoice.model_validate(each) for each in strategies]
    decisions = [choose(machines, world, choices, own, say) for world in dict.fromkeys(learners)]
    notes += [note for each in decisions for note in each.notes]
    budget = budget or (own.budget if own else Budget(epochs=1))
    rows = {each: _row(each, machines, budget, price) for decision in decisions for each in decision.best}
    if not rows:
        raise ConfigError("plan: no strategy fits these numbers of learners\n  " + "\n  ".join(notes))
    largest = max((each for each in decisions if each.tried), key=lambda each: each.chosen.learners)
    chosen, second = largest.chosen, largest.second
    return Plan(
        tuple(rows.values()),
        rows[chosen],
        _reason(
            rows[chosen],
            rows[second] if second else None,
            [rows[each.chosen] for each in decisions if each.tried and each is not largest],
            machines.costs,
        ),
        tuple(_crossings(machines, largest, say)) if crossings else (),
        (*notes, *_assumptions(machines)),
        None if machines.costs.validation is None else machines.costs.validation.error,
    )


def usual_strategies(own: str | None) -> list[str]:
    """Return the strategies that are planned if none is named. They include the job's own strategy."""
    planned = [name for name, each in STRATEGIES.items() if name not in NOT_PLANNED and each.kind != "periodic"]
    return [name for name in STRATEGIES if name in (own, *planned)]


def _row(found: Prediction, machines: Machines, budget: Budget, price: float | None) -> Forecast:
    """Convert a prediction to hours, shares of time and cost."""
    arm, world, seconds, costs = found.arm, found.learners, found.seconds_per_gradient, machines.costs
    batches_per_epoch, simulated = costs.job.batches_per_epoch, partial(simulate, arm, world)

    def hours(seconds_per_gradient: float) -> float:
        return budget.seconds(batches_per_epoch, seconds_per_gradient) / SECONDS_PER_HOUR

    at_once = simulated(replace(machines, at_once=True)).seconds_per_gradient
    exchanging = min(found.waiting, max(0.0, 1.0 - at_once / seconds))
    others = [replace(machines, compute=factor) for factor in costs.uncertainty if factor != 1.0]
    every = [*found.seconds, *(simulated(each).seconds_per_gradient for each in others)]
    error = costs.validation.error if costs.validation else 0.0
    staleness = sorted(found.staleness.elements()) or [0]
    median, most = np.quantile(staleness, (0.5, 0.95), method="inverted_cdf")
    return Forecast(
        strategy=arm.name,
        learners=world,
        hours_per_epoch=seconds * batches_per_epoch / SECONDS_PER_HOUR,
        hours=hours(seconds),
        hours_low=hours(min(every) / (1.0 + error)),
        hours_high=hours(max(every) / (1.0 - min(error, 0.9))),
        computing=1.0 - found.waiting,
        waiting=found.waiting - exchanging,
        exchanging=exchanging,
        gigabytes_per_link=found.bytes_sent * batches_per_epoch / world / 1e9,
        megabytes_per_second=found.bytes_sent / seconds / world / 1e6,
        staleness_mean=mean_staleness(found.staleness),
        staleness_median=int(median),
        staleness_95=int(most),
        staleness_max=staleness[-1],
        memory_gigabytes=None if costs.memory_bytes is None else costs.memory_bytes / 1e9,
        cost=None if price is None else price * world * hours(seconds),
        worth=found.worth,
        options=arm.words,
        data=data_need(arm, world),
    )


def _crossings(machines: Machines, decision: Decision, say: Say) -> Iterator[Crossing]:
    """Yield the points at which a different strategy makes more progress than the recommended one."""
    chosen = decision.chosen
    others, world = [each.arm for each in decision.best if each is not chosen], chosen.learners
    if world == 1 or not others:
        return
    bandwidth = _link(machines).bandwidth

    def faster_links(factor: float) -> Machines:
        return replace(machines, bandwidth=factor)

    for name, values, make, now in (
        ("bandwidth", [1.0 / each for each in BANDWIDTHS], faster_links, bandwidth),
        ("bandwidth", BANDWIDTHS, faster_links, bandwidth),
        ("slowness", SLOWEST, partial(machines.with_slow, 0), 1.0),
    ):
        say(f"crossing points of {name} with {world} learners")
        for before, value in pairwise((1.0, *values)):
            if (faster := _ahead(others, chosen, make, value)) is not None:
                crossed = bisect(partial(_ahead, [faster], chosen, make), before, value)
                yield Crossing(name, world, crossed * now, now, chosen.arm.name, faster.name)
                break


def _link(machines: Machines) -> LinkModel:
    """Return the link between nodes."""
    return cast(LinkModel, machines.given.get("link", machines.costs.messages))


def _assumptions(machines: Machines) -> Iterator[str]:
    """Yield the assumptions of a plan."""
    costs, job = machines.costs, machines.costs.job
    where = ", but for the cluster as given below" if machines.given else ""
    yield f"costs are those of {costs.source}{where}; {job.trains}, {job.model_bytes / 1e6:.3g} MB"
    send, gradient = _link(machines).send_seconds(job.model_bytes), costs.compute.seconds
    yield (
        f"sending the model to another node takes {1000 * send:.3g} ms, or {send / gradient:.2g} gradients of "
        f"{1000 * gradient:.3g} ms"
    )
    if costs.kept_per_doubling < 1.0:
        yield f"devices of a node keep {costs.kept_per_doubling:.0%} of their speed when twice as many of them compute"
    if costs.gradient_means is None:
        yield "averaging begins when a gradient is complete; overlap with backward is not simulated"
    yield (
        f"hours are for as many mini-batches under each strategy; the recommendation counts one {WORTH:g} where "
        "gradients are stale or models differ, as was measured to one loss with 16 learners and three strategies"
    )
    for key, value in sorted(machines.given.items()):
        yield f"cluster.{key} is as given: {value}"


def _ahead(others: Sequence[Arm], chosen: Prediction, make: Callable[[float], Machines], factor: float) -> Arm | None:
    """Return the strategy that is clearly ahead of the chosen one on the machines that `make` creates for a factor, or
    None if there is none."""
    predict = partial(simulate, learners=chosen.learners, machines=make(factor), rounds=CROSSING_ROUNDS)
    best = max(map(predict, others), key=lambda each: each.progress)
    return best.arm if is_clearly_ahead(best.progress, predict(chosen.arm).progress) else None


def read_cluster(cluster: Path | str | Mapping[str, Any] | None) -> dict[str, Config]:
    """Return the sections of a cluster in a file or a mapping. Raises `ConfigError` for any other content."""
    if cluster is None:
        return {}
    advice = "give keys of a recipe's section, such as `link: {bandwidth: 1.25e9}`"
    found = loaded(Cluster, Path(cluster) if isinstance(cluster, str) else cluster, "cluster", advice)
    return {name: getattr(found, name) for name in found.model_fields_set}


def gigabits(bytes_per_second: float) -> str:
    """Return a bandwidth as text."""
    return f"{bytes_per_second * 8 / 1e9:.3g} Gbit/s"


def unit_of(hours: float) -> tuple[str, float]:
    """The unit for a time, and how many of it an hour has."""
    return ("h", 1.0) if hours >= 1.0 else ("min", 60.0) if hours >= 1.0 / 60.0 else ("s", SECONDS_PER_HOUR)


def short(number: float) -> str:
    """Return a number in three digits, or in more if it is large."""
    return f"{number:.3g}" if number < 1000.0 else f"{number:,.0f}"


def _reason(chosen: Forecast, second: Forecast | None, others: Sequence[Forecast], costs: Costs) -> tuple[str, ...]:
    """Return the reason for the choice in lines. `others` are the choices for other numbers of learners."""
    unit, per_hour = unit_of(chosen.hours)
    hours, low, high = (short(per_hour * each) for each in (chosen.hours, chosen.hours_low, chosen.hours_high))
    interval = f" ({low} to {high} {unit})" if chosen.hours_low < chosen.hours_high else ""
    first = (
        f"{chosen} with {chosen.learners} learner{'s' * (chosen.learners > 1)}: {hours} {unit}{interval}; learners "
        f"compute {chosen.computing:.0%} of the time, mean staleness {chosen.staleness_mean:.2g}"
    )
    if second is None or chosen.learners == 1:
        behind = ""
    else:
        ratio = second.hours_per_epoch / chosen.hours_per_epoch
        behind = (
            f"{second} is the second choice and takes {ratio:.2f} times as long for as many mini-batches, which count "
            f"{second.worth:.2f} where those of the first choice count {chosen.worth:.2f} (both progress equally if "
            f"they count {ratio * chosen.worth:.2f}): it waits {second.waiting:.0%} and exchanges "
            f"{second.exchanging:.0%} of the time, mean staleness {second.staleness_mean:.2g}"
        )
    elsewhere = [f"{each} with {each.learners} ({short(per_hour * each.hours)} {unit})" for each in others]
    if costs.validation is None:
        trust = (
            "these predictions have not been validated on these machines; `starling profile` does so, and `starling "
            "plan --profile` reads what it writes"
        )
    else:
        error, against = costs.validation.error, costs.validation.against
        when = "at the last validation, " if costs.measured is not None else "with this preset, "
        trust = f"{when}predictions were at most {error:.0%} off ({against})"
    fewer = f"for other numbers of learners: {', '.join(elsewhere)}" if elsewhere else ""
    return tuple(line for line in (first, behind, fewer, trust) if line)
