"""`starling.profile`: the costs of a job, measured on the machine at hand with real learner processes; also the output
of `starling profile` and `starling plan`.
"""

import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from starling.budget import Budget
from starling.errors import ConfigError
from starling.events import read_events
from starling.experiment.folder import ExperimentFolder
from starling.experiment.task import RecipeT, Task
from starling.experiment.train import train_quietly
from starling.files import replace_file, writing
from starling.predict.costs import JobFacts, Profile, Validation, dump, facts_of, memory_of
from starling.predict.measure import MEASURE, WARM_UP, Figures, bare, profile_of
from starling.predict.plan import NO_PERIODIC, TIE, Forecast, Plan, plan, short, unit_of, usual_strategies
from starling.predict.predict import Arm, Machines, run
from starling.predict.published import EPOCHS, job_of
from starling.recipe.run import RecipeConfig
from starling.reporting.progress import Say, say_on, wrapped
from starling.strategies.islands import NO_ISLANDS
from starling.training.job import Job
from starling.training.speeds import Stragglers

WIDE = 110
"""Columns of a terminal that shows the whole table of a plan."""
TELL_EVERY = 10.0
"""Seconds between two lines of progress without a terminal."""
POOR = 1.0
"""Relative error of the last validation above which a plan recommends nothing."""
NO_RECOMMENDATION = (
    "no strategy is recommended, because such predictions were far off; a profile of idle machines may be better"
)
GRADIENTS = 40
"""Number of gradients that the lone learner measures; each validation computes as many for each of its two learners."""
MEANS = 8
"""Number of means of gradients that two learners make."""
VALIDATED = ("allreduce", "adpsgd")
"""Strategies with which two learners then train, to find how far the predictions are off."""

PUBLISHED: tuple[str | Mapping[str, Any], ...] = (
    *("allreduce", "delay-by-one", "dpsgd", {"name": "adpsgd", "pattern": "random"}),
    *({"name": "adpsgd", "pattern": "pairs"}, {"name": "hadpsgd", "pattern": "ring"}),
)
"""Strategies with which a published model is planned if none is named."""


def profile(
    job: Job,
    *,
    gradients: int = GRADIENTS,
    engine: Mapping[str, Any] | None = None,
    validate: bool = True,
    command: str | None = None,
    facts: JobFacts | None = None,
    say: Say = lambda line: None,
) -> Profile:
    """Measure what a job costs on this machine, with one and with two learner processes.

    Learners are started as by `starling.train`, whose rules for scripts apply here, too: everything to which the job
    refers must be importable, and the call must be under `if __name__ == "__main__":`. Injected stragglers and faults
    of the job are ignored.

    Args:
        job: What to measure; its strategy and budget do not matter.
        gradients: How many gradients the lone learner measures; each validation computes as many for each of its two
            learners.
        engine: Options of a recipe's `engine` section, such as `device` and `threads`.
        validate: Whether to train for a moment with two learners afterwards, and compare predictions with that.
        command: The command that the profile records as its origin; None records this process's command line.
        facts: The facts that a plan needs about the job; None determines them here.
        say: Called with a line for each thing that is being measured.

    Raises:
        ConfigError: The job cannot be sent to learner processes, or `gradients` is too small.
        StarlingError: The error that ended the learners.

    Example:
        >>> measured = starling.profile(job)  # doctest: +SKIP
        >>> starling.plan(job, profile=measured, learners=[4, 16]).reason  # doctest: +SKIP
    """
    if gradients < 2:
        raise ConfigError(
            f"gradients: {gradients} is too few for a distribution; measure at least 2, preferably {GRADIENTS}"
        )
    facts = facts or facts_of(job, counts_flops=True)
    job = bare(job, stragglers=Stragglers(), island=NO_ISLANDS)
    say("one learner: gradients")
    (alone,) = _figures(job, 1, gradients + WARM_UP, engine)
    say("two learners: exchanges and means")
    pair = _figures(job, 2, 2 * (MEANS + WARM_UP), engine)
    found = profile_of(alone, pair, facts, command or " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]))
    if not validate:
        return found
    errors: dict[str, float] = {}
    for name in VALIDATED:
        say(f"two learners: validation with {name}")
        measured = _seconds(job, name, 2 * gradients, engine)
        predicted = run(Arm.of({"name": name}), 2, Machines(found.costs), 2 * gradients)
        errors[name] = abs(max(each.seconds for each in predicted.learners) / measured - 1.0)
    worst = max(errors, key=lambda name: errors[name])
    against = f"two learners of this machine with {' and '.join(VALIDATED)}, {found.date}; the worst is {worst}"
    return found.model_copy(update={"validation": Validation(error=round(errors[worst], 4), against=against)})


def _figures(job: Job, learners: int, steps: int, engine: Mapping[str, Any] | None) -> list[Figures]:
    """The figures of each learner that measures, with a budget of `steps`."""
    with tempfile.TemporaryDirectory(prefix="starling-profile-") as name:
        measuring = {"name": MEASURE, "folder": name}
        train_quietly(replace(job, budget=Budget(steps=steps)), learners, exp=name, engine=engine, strategy=measuring)
        return [Figures.read(Path(name), rank) for rank in range(learners)]


def _seconds(job: Job, strategy: str, steps: int, engine: Mapping[str, Any] | None) -> float:
    """Training time of two learners under a strategy."""
    with tempfile.TemporaryDirectory(prefix="starling-profile-") as name:
        run = train_quietly(replace(job, budget=Budget(steps=steps)), 2, exp=name, engine=engine, strategy=strategy)
        events = read_events(ExperimentFolder(run.folder).log / "events.jsonl")
    epochs = [event["learners"] for event in events if event["kind"] == "epoch"]
    return float(max(sum(epoch[rank]["seconds"] for epoch in epochs) for rank in epochs[0]))


def profile_recipe(task: Task[RecipeT], recipe: RecipeT, output: Path, tell: Say, console: Console) -> Profile:
    """Measure a recipe's job on this machine, and write the profile to `output`. For islands, it reports the memory
    that their ranks would need; times are those of learners with whole models."""
    say = say_on(console)
    with _job_of(task, recipe, say) as job, _telling(console, "measuring") as measuring:
        facts = facts_of(job, counts_flops=True).model_copy(update={"trains": f"the recipe {recipe.name}"})
        found = profile(
            job,
            engine=recipe.engine.model_dump(mode="json"),
            facts=facts,
            say=measuring,
        )
        memory = memory_of(job) if job.island.size > 1 else None
    comment = (
        "What a job costs on a machine, measured; `starling plan RECIPE --profile` reads it. Times are in seconds."
    )
    with writing(f"output {output}", "write to another file"):
        replace_file(output, dump(found, comment))
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
    task: Task[RecipeT], recipe: RecipeT, console: Console, learners: str | None, strategies: str | None, **given: Any
) -> tuple[Plan, Budget]:
    """The plan of a recipe's job, and its budget. `given` are further arguments of `plan`."""
    numbers = [recipe.learners] if learners is None else numbers_of(learners)
    needs_job = given["preset"] is not None or recipe.island.size > 1  # otherwise a profile has what a plan needs
    own = _job_of(task, recipe, say_on(console)) if needs_job else nullcontext()
    with own as job, _telling(console, "simulating") as say:
        found = plan(
            job,
            learners=numbers,
            strategies=_choices(recipe, strategies),
            budget=recipe.budget,
            stragglers=recipe.stragglers,
            say=say,
            **given,
        )
    if not strategies:
        found = replace(found, notes=(NO_PERIODIC, *found.notes))
    return found, recipe.budget


def plan_model(
    model: str, hours: float, console: Console, learners: str | None, strategies: str | None, **given: Any
) -> tuple[Plan, Budget]:
    """The plan of a published model for `hours` hours of speech, without a corpus, and its budget. `given` are further
    arguments of `plan`. Raises `ConfigError` if the model is unknown."""
    if model != "ibm":
        raise ConfigError(f"--model: {model!r} is unknown; the only published model is ibm, SWB2000's acoustic model")
    named: Sequence[str | Mapping[str, Any]] = strategies.split(",") if strategies else PUBLISHED
    budget = Budget(epochs=EPOCHS)
    numbers = numbers_of(learners or "1,64")
    with _telling(console, "simulating") as say:
        job = job_of(hours=hours)
        found = plan(job, learners=numbers, strategies=named, budget=budget, say=say, **given)
    return found, budget


def show_plan(
    found: Plan, budget: Budget, tell: Say, explain: bool, output: Path | None, crossings: bool = True
) -> None:
    """Print a plan, and write its table to `output`. On a terminal, lines are wrapped."""
    output_console = Console()
    if output_console.is_terminal:
        say, tell = tell, lambda line: say(wrapped(line, output_console.width))
    is_trusted = found.error is None or found.error <= POOR
    is_choice = len({str(row) for row in found.rows}) > 1 and found.recommended.learners > 1
    if is_choice:
        tell(f"recommended: {found.recommended}" if is_trusted else NO_RECOMMENDATION)
    for line in found.reason if is_trusted or not is_choice else found.reason[-1:]:
        tell(f"{'  ' * is_choice}{line}")
    output_console.print(table := plan_table(found, budget, output_console.width, is_trusted))
    shown = {str(each.header) for each in table.columns}
    if hidden := [name for name in ("data", "wait", "exchange", "MB/s", "stale") if name not in shown]:
        tell(f"left out for want of room: {', '.join(hidden)}")
    for line in _lines(found, explain, crossings):
        tell(line)
    if output is not None:
        found.write_csv(output)
        tell(f"written to {output}")


@contextmanager
def _telling(console: Console, doing: str) -> Iterator[Say]:
    """A context with a function that shows what is being done. Without a terminal, it prints a line now and then."""
    told_at, say = time.monotonic(), say_on(console)
    with console.status(doing) as status:

        def tell(what: str) -> None:
            nonlocal told_at
            status.update(f"{doing} {what}")
            if not console.is_terminal and time.monotonic() - told_at > TELL_EVERY:
                told_at = time.monotonic()
                say(f"{doing} {what}")

        yield tell


def _choices(recipe: RecipeConfig, strategies: str | None) -> list[str | Mapping[str, Any]]:
    """The strategies that were named, or else those that are planned by default; the recipe's own strategy has its
    options."""
    own = recipe.strategy
    names = [name.strip() for name in strategies.split(",")] if strategies else usual_strategies(own.name)
    if not (strategies or own.is_auto or own.name in names):
        names.append(own.name)
    return [own.model_dump() if name == own.name and own.model_extra else name for name in names]


def numbers_of(text: str) -> list[int]:
    """A text such as `4,16` as a list of numbers."""
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"--learners: {text!r} is no list of numbers; write it as 4,16,64") from None


@contextmanager
def _job_of(task: Task[RecipeT], recipe: RecipeT, say: Say) -> Iterator[Job]:
    """The job of a recipe, set up in a folder that is removed after the context; its data stay in their usual place."""
    with tempfile.TemporaryDirectory(prefix="starling-plan-") as name:
        folder = ExperimentFolder(Path(name))
        task.set_up(recipe, folder, say)
        yield task.make_job(recipe, folder)


def plan_table(plan: Plan, budget: Budget, width: int, is_trusted: bool) -> Table:
    """The rows of a plan as a table, with fewer columns on a narrow terminal. With a budget in minutes, all runs take
    as long, so the table has the number of their epochs."""
    rows, is_wide = plan.rows, width >= WIDE
    unit, per_hour = unit_of(max(row.hours for row in rows))
    columns: dict[str, Callable[[Forecast], str]] = {"strategy": str, "learners": lambda row: str(row.learners)}
    if is_wide:
        columns[f"epoch, {unit}"] = lambda row: short(per_hour * row.hours_per_epoch)
    if budget.minutes is not None and budget.epochs is None and budget.steps is None:
        columns["epochs"] = lambda row: f"{row.hours / row.hours_per_epoch:,.1f}"
    else:
        whole = "run" if budget.epochs in (None, 1) else f"{budget.epochs:g} epochs"
        columns[f"{whole}, {unit}"] = lambda row: short(per_hour * row.hours)
        columns["interval"] = lambda row: f"{short(per_hour * row.hours_low)} to {short(per_hour * row.hours_high)}"
    if any(row.data is not None for row in rows):
        columns["data"] = lambda row: "" if row.data is None else str(row.data) if is_wide else row.data.short
    columns |= {
        "compute": lambda row: f"{row.computing:.0%}",
        "wait": lambda row: f"{row.waiting:.0%}",
        "exchange": lambda row: f"{row.exchanging:.0%}",
    }
    if is_wide:
        columns["MB/s"] = lambda row: short(row.megabytes_per_second)
    columns["stale"] = lambda row: f"{row.staleness_mean:.2g}" + f" (≤ {row.staleness_95})" * is_wide
    if any(row.memory_gigabytes is not None for row in rows):
        columns["memory"] = lambda row: "" if row.memory_gigabytes is None else f"{row.memory_gigabytes:.2g} GB"
    if any(row.cost is not None for row in rows):
        columns["cost"] = lambda row: "" if row.cost is None else f"{row.cost:,.2f}"
    cells = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    words = [[name] if is_wide else re.split("(?<=,) ", name) for name in cells]
    widths = {name: max(map(len, [*own, *cells[name]])) for name, own in zip(cells, words, strict=True)}
    longest, widths["strategy"] = widths["strategy"], 16
    for name in ("memory", "exchange", "stale", "wait", "data"):
        if sum(widths.values()) + 2 * len(widths) > width:
            widths.pop(name, None)
    spare = max(0, width - sum(widths.values()) - 2 * len(widths))
    widths["strategy"] = min(widths["strategy"] + spare, longest)
    headers = (Column(name, overflow="fold", width=width) for name, width in widths.items())
    table = Table(*headers, box=None)
    for place, row in enumerate(rows):
        style = "bold" if is_trusted and row == plan.recommended else None
        table.add_row(*(cells[name][place] for name in widths), style=style)
    return table


def _lines(plan: Plan, explains: bool, crossings: bool = True) -> Iterator[str]:
    """The lines below the table; with `explains`, also what the columns mean and what was assumed."""
    if plan.crossings:
        yield f"crossing points (another strategy makes more progress, by more than {TIE:.0%}):"
        yield from (f"  {crossing}" for crossing in plan.crossings)
    elif crossings and plan.recommended.learners > 1:
        yield "crossing points: none within 1,000 times the bandwidth and 100 times the slowness"
    if not explains:
        yield from (f"note: {note}" for note in plan.notes if re.search("left out|rank of|^warning", note))
        return
    yield "assumptions and columns:"
    yield from (f"  {note}" for note in plan.notes)
    yield from (f"  {line}" for line in _EXPLANATIONS)


_EXPLANATIONS = (
    "times: the steady speed of the strategy's own code on the simulated clock, the median of 3 seeds",
    "interval: these seeds, the 95 % interval of the gradient time, and the error of the last validation",
    "wait: the waiting that remains if every message arrives at once; exchange: what a faster link would end",
    "data: mini-batches of all learners for the same early loss, relative to one learner, in the study of speed-up "
    "(docs/results/speed-up.md), whose mini-batches are small; ~: the study has fewer learners, or other options",
    "MB/s: megabytes that a learner sends per second of the run, inside its node and to others together; stale: mean "
    "staleness, and the 95 % quantile",
    "recommended: the most progress, which is speed times the worth of a mini-batch, or, within 5 % of that, the "
    "strategy whose mini-batches are worth most",
)
