"""The comparison of strategies on some machines, and the choice among them: the common rule of `starling plan` and of
`strategy: auto`.

Strategies are compared by progress, mini-batches per second times the worth of a mini-batch. Of those that predictions
cannot tell apart, the one whose mini-batches are worth most is chosen, and of these the plainest (decision 0019).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from starling.errors import ConfigError
from starling.predict.measure import has_nodes
from starling.predict.predict import Arm, Machines, Prediction, predict
from starling.problems import refused
from starling.recipe.run import StrategyChoice, strategy_problems
from starling.reporting.progress import Say
from starling.strategies.islands import between_islands
from starling.training.job import Job

TIE = 0.05
"""Share of the most progress within which progress counts as equal. In one setting, predictions were 2.9 and 2.5 % off
for two of these strategies (docs/planning.md), so they do not show differences of less than about 5 %."""
PERIODS = (2, 4, 8, 16)
"""Averaging periods, in addition to 1, that are tried one after the other as long as the progress grows."""


def is_clearly_ahead(progress: float, of: float) -> bool:
    """Whether predictions can tell the first progress from the second."""
    return of < (1.0 - TIE) * progress


def ranked(found: Sequence[Prediction]) -> list[Prediction]:
    """The predictions with the choice first, and then by decreasing progress. `found` has the plainest strategies
    first."""
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
        """Each strategy with the options that the rule prefers."""
        return [ranked(each)[0] for each in self.tried]

    @cached_property
    def chosen(self) -> Prediction:
        """The chosen prediction."""
        return ranked(self.best)[0]

    @property
    def second(self) -> Prediction | None:
        """The second choice: another strategy, not the same with other options; None if there is none."""
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
        machines: Where the learners run.
        learners: How many learners there are.
        choices: The strategies to compare, the plainest first.
        job: The job. Its weighting limits the choice, and its own strategy keeps its options.
        say: Called with a line for each simulation.

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
    """A strategy with the options that are worth a try, unless it has some: for each pattern, longer and longer
    periods. Raises ConfigError for wrong options."""
    strategy, given = choice.strategy, dict(choice.model_extra or {})
    fields = strategy.options.model_fields
    if not given and job is not None and job.strategy.name == strategy.name:
        return [[Arm(strategy, job.options)]]
    options = {"per_node": max(2, machines.per_node)} | given if "per_node" in fields else given
    if problems := strategy_problems(StrategyChoice(name=choice.name, **options)):
        raise refused(problems, f"strategy {choice.name}")
    if given:
        return [[Arm(strategy, strategy.options.model_validate(options))]]
    sets = [options]
    if {"pattern", "period"} <= fields.keys() and "per_node" not in fields:
        sets = [{"pattern": pattern} for pattern in machines.patterns(learners)]
    periods = [{}, *({"period": period} for period in PERIODS if "period" in fields)]
    return [[Arm.of({"name": choice.name, **own, **period}) for period in periods] for own in sets]


def _check(arm: Arm, machines: Machines, learners: int, job: Job | None) -> None:
    """Raise ConfigError if a strategy does not fit so many learners, the machines, or the job's weighting."""
    between_islands(arm.strategy, machines.island).validate(arm.options, learners)
    if job is not None and (problem := arm.strategy.weighting_problem(arm.options, job.weighting)):
        raise ConfigError(problem)
    is_measured = machines.costs.measured is not None
    if is_measured and hasattr(arm.options, "per_node") and not has_nodes(learners, machines.per_node):
        raise ConfigError(f"{arm.name}: needs several nodes, each with the same number of learners, at least 2")


def _climbed(ladder: Sequence[Arm], machines: Machines, learners: int, say: Say) -> list[Prediction]:
    """The predictions for longer and longer periods, up to the first that makes less progress."""
    found: list[Prediction] = []
    for arm in ladder:
        say(f"{arm} with {learners} learners")
        found.append(predict(arm, learners, machines))
        if len(found) > 1 and found[-1].progress < found[-2].progress:
            break
    return found
