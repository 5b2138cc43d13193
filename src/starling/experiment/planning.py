"""`starling profile` and `starling plan`: from a recipe and options to what they print and write."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from starling.errors import ConfigError
from starling.experiment.folder import ExperimentFolder
from starling.experiment.profile import profile
from starling.experiment.task import RecipeT, Task
from starling.files import replace_file
from starling.predict.costs import Profile, dump
from starling.predict.deciding import TIE
from starling.predict.facts import facts_of
from starling.predict.memory import memory_of
from starling.predict.plan import NOT_PLANNED, Forecast, Plan, plan
from starling.recipe.run import RecipeConfig
from starling.reporting.progress import Say, say_on
from starling.strategies import STRATEGIES
from starling.training.job import Job


def profile_recipe(task: Task[RecipeT], recipe: RecipeT, output: Path, tell: Say, console: Console) -> Profile:
    """Measure a recipe's job on this machine, and write what was found to `output`. Of islands, it tells what memory
    their ranks would need; times are those of learners with whole models."""
    say = say_on(console)
    with _job_of(task, recipe, say) as job, console.status("measuring") as status:
        facts = facts_of(job, counts_flops=True).model_copy(update={"trains": f"the recipe {recipe.name}"})
        found = profile(
            job,
            engine=recipe.engine.model_dump(mode="json"),
            facts=facts,
            say=lambda what: status.update(f"measuring {what}"),
        )
        memory = memory_of(job) if job.island.size > 1 else None
    comments = [
        "What a job costs on a machine, measured; `starling plan RECIPE --profile` reads it. Times are in seconds."
    ]
    try:
        replace_file(output, dump(found, comments))
    except OSError as error:
        raise ConfigError(f"output {output}: cannot be written ({error})") from None
    gradient, validation = found.gradient, found.validation
    tell(
        f"gradient: {1000 * gradient.seconds:.4g} ms ({1000 * gradient.low:.4g} to {1000 * gradient.high:.4g}), "
        f"standard deviation {gradient.jitter:.1%}, {gradient.fitted.distribution}; "
        f"{1000 * found.step_seconds:.3g} ms more for each step"
    )
    for name, link in (("exchange with a neighbour", found.exchange), ("mean of two learners", found.mean)):
        num_bytes, seconds = max(link.seconds_by_bytes.items())
        tell(f"{name}: {1000 * seconds:.3g} ms for {num_bytes / 1e6:.3g} MB")
    tell(
        f"memory of a learner: {found.memory_per_learner_bytes / 1e9:.2g} GB; "
        f"changing weights: {found.mixing_bandwidth / 1e9:.3g} GB/s"
    )
    if memory is not None:
        tell(f"predicted memory of a rank of an island of {recipe.island.size}: {memory}")
    if validation is not None:
        tell(f"validation: predictions were at most {validation.error:.0%} off ({validation.against})")
    tell(f"written to {output}")
    return found


def plan_recipe(
    task: Task[RecipeT],
    recipe: RecipeT,
    tell: Say,
    console: Console,
    *,
    profile_file: Path | None,
    preset: str | None,
    cluster: Path | None,
    learners: str | None,
    strategies: str | None,
    price: float | None,
    explain: bool,
    output: Path | None,
) -> None:
    """Print the plan of a recipe's job, and write its table to `output`."""
    numbers = [recipe.learners] if learners is None else _numbers(learners)
    needs_job = preset is not None or recipe.island.size > 1  # otherwise a profile has what a plan needs
    own = _job_of(task, recipe, say_on(console)) if needs_job else nullcontext()
    with own as job, console.status("simulating") as status:
        found = plan(
            job,
            profile=profile_file,
            preset=preset,
            cluster=cluster,
            learners=numbers,
            strategies=_choices(recipe, strategies),
            price=price,
            budget=recipe.budget,
            stragglers=recipe.stragglers,
            say=lambda what: status.update(f"simulating {what}"),
        )
    Console().print(_table(found))
    for line in _lines(found, explain):
        tell(line)
    if output is not None:
        found.write_csv(output)
        tell(f"written to {output}")


def _choices(recipe: RecipeConfig, strategies: str | None) -> list[str | Mapping[str, Any]]:
    """The strategies that were named, or all that are planned; the recipe's own with its options."""
    names = [name.strip() for name in strategies.split(",")] if strategies is not None else None
    names = names or [name for name in STRATEGIES if name not in NOT_PLANNED]
    own = recipe.strategy
    if strategies is None and not own.is_auto and own.name not in names:
        names.append(own.name)
    return [own.model_dump() if name == own.name and own.model_extra else name for name in names]


def _numbers(text: str) -> list[int]:
    """`4,16` as numbers."""
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"--learners: {text!r} is no list of numbers; write it as 4,16,64") from None


@contextmanager
def _job_of(task: Task[RecipeT], recipe: RecipeT, say: Say) -> Iterator[Job]:
    """The job of a recipe, set up in a folder that is gone after the context; its data stay where they belong."""
    with tempfile.TemporaryDirectory(prefix="starling-plan-") as name:
        folder = ExperimentFolder(Path(name))
        task.set_up(recipe, folder, say)
        yield task.make_job(recipe, folder)


_COLUMNS: Mapping[str, Callable[[Forecast], str]] = {
    "strategy": str,
    "learners": lambda row: str(row.learners),
    "h/epoch": lambda row: f"{row.hours_per_epoch:.3g}",
    "h/run": lambda row: f"{row.hours:.3g}",
    "interval": lambda row: f"{row.hours_low:.3g} to {row.hours_high:.3g}",
    "compute": lambda row: f"{row.computing:.0%}",
    "wait": lambda row: f"{row.waiting:.0%}",
    "exchange": lambda row: f"{row.exchanging:.0%}",
    "MB/s": lambda row: f"{row.megabytes_per_second:.3g}",
    "stale": lambda row: f"{row.staleness_mean:.2g} (≤ {row.staleness_95})",
    "memory": lambda row: "" if row.memory_gigabytes is None else f"{row.memory_gigabytes:.2g} GB",
    "cost": lambda row: "" if row.cost is None else f"{row.cost:,.2f}",
}


def _table(plan: Plan) -> Table:
    """The rows of a plan; the recommended one is bold."""
    made = Table(*_COLUMNS, title="Predicted")
    for row in plan.rows:
        made.add_row(*(cell(row) for cell in _COLUMNS.values()), style="bold" if row == plan.recommended else None)
    return made


def _lines(plan: Plan, explains: bool) -> Iterator[str]:
    """What stands below the table; with `explains`, also what the columns mean and what was assumed."""
    yield f"recommended: {plan.recommended}"
    yield from (f"  {line}" for line in plan.reason)
    if plan.crossings:
        yield f"crossing points (another strategy makes more progress, by more than {TIE:.0%}):"
        yield from (f"  {crossing}" for crossing in plan.crossings)
    else:
        yield "crossing points: none within 1,000 times the bandwidth and 100 times the slowness, or none asked for"
    if not explains:
        yield from (f"note: {note}" for note in plan.notes if "left out" in note or "rank of" in note)
        return
    yield "what this rests on:"
    yield from (f"  {note}" for note in plan.notes)
    yield from (f"  {line}" for line in _EXPLANATIONS)


_EXPLANATIONS = (
    "hours: the steady speed of the strategy's own text on the simulated clock, the median of 3 seeds",
    "interval: these seeds, the 95 % interval of the gradient time, and the error of the last validation",
    "wait: what is left of the waiting where every message arrives at once; exchange: what a faster link would end",
    "MB/s: what a learner sends in a second of the run; stale: mean staleness, and the 95 % quantile",
    "recommended: the most progress, which is speed times what a mini-batch is worth, or, within 5 % of that, the "
    "strategy whose mini-batches are worth most",
)
