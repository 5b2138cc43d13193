"""`strategy: auto`: the learners of a run measure the machines together, and learner 0 asks the planner.

Starling's launcher starts the learners twice, first to measure. Learners of torchrun or Slurm measure, and then train.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from pydantic import ValidationError
from torch.distributed.distributed_c10d import PrefixStore

from starling.budget import Budget
from starling.configuration import Config
from starling.engines.processes.member import run_learner
from starling.engines.processes.place import Place, choose_device
from starling.engines.virtual.cluster import Cluster
from starling.errors import ConfigError
from starling.experiment.folder import ExperimentFolder
from starling.experiment.launching import machines_of, packed_command
from starling.experiment.task import RunT, Task
from starling.files import replace_file, writing
from starling.launch.joiners import Changes
from starling.launch.launcher import launch
from starling.predict.costs import Costs, facts_of
from starling.predict.measure import Allowance, Figures, Measuring, bare, costs_of
from starling.predict.plan import TIE, Decision, choose, gigabits
from starling.predict.predict import LIKE, LONGER, Arm, Machines, Seconds
from starling.recipe import parse_yaml
from starling.recipe.run import CANDIDATES, AutoOptions, RunConfig, StrategyChoice, dump_recipe
from starling.reporting.epochs import mean_staleness
from starling.reporting.progress import Say
from starling.strategies import NoOptions, Strategy
from starling.strategies.base import one_learner
from starling.timeouts import SET_UP
from starling.training.job import Job, Observer

_FIGURES, _CHOICE = "auto/figures/{}", "auto/choice"
_MORE_THAN_ENOUGH = 1 << 40
"""Number of mini-batches in the budget while measuring, which ends earlier."""
_NOTABLE = 0.1
"""Share of a learner's time lost to averaging rounds above which the reasons mention it."""


class Choice(Config):
    """The choice of `auto`, with its reasons."""

    strategy: StrategyChoice
    """Chosen strategy with its options, as in a recipe."""
    lines: tuple[str, ...]
    """Lines that say what was chosen and why, and how far the second choice is behind."""
    notes: dict[str, Any]
    """Figures behind the choice, for people: the number of learners, the predictions and the measurements."""


_LONE = Choice(
    strategy=StrategyChoice(name="allreduce"),
    lines=("strategy auto: allreduce, because a single learner has no other to agree with",),
    notes={"learners": 1, "predicted": [{"strategy": {"name": "allreduce"}}], "measured": {}},
)
"""Choice for one learner, which is plain SGD under every strategy."""


def kept(run: RunT, say: Say) -> RunT:
    """A resuming run, with the strategy that was chosen when it began. Any other run is returned as it is."""
    if run.resume is None or not run.strategy.is_auto:
        return run
    config = ExperimentFolder(run.resume.parent.parent).config
    try:
        tree = parse_yaml(config.read_text(encoding="utf-8"), str(config))
        choice = StrategyChoice.model_validate(tree["strategy"])
    except (OSError, KeyError, TypeError, ValidationError) as error:
        raise ConfigError(
            f"strategy auto: a resumed run keeps its strategy, but {config} does not name it ({error}); name the "
            "strategy"
        ) from None
    if choice.is_auto:
        raise ConfigError(f"strategy auto: {config} was written before a strategy was chosen; name one to resume")
    try:
        choice.check_for(run.learners)
    except ConfigError as error:
        raise ConfigError(
            f"strategy auto: a resumed run keeps its strategy, {choice.name}, which does not fit {run.learners} "
            f"learners ({error}); resume with as many learners as before, or name a strategy"
        ) from None
    say(f"strategy auto: the run resumes with {Arm.of(choice)}, as before")
    return run.model_copy(update={"strategy": choice})


def settled(
    task: Task[RunT],
    run: RunT,
    folder: ExperimentFolder,
    learners_here: int | None,
    say: Say | None,
    decide: Callable[[Job], Choice],
) -> RunT:
    """The run, with the strategy that `decide` chooses if it is `auto`. The reasons go to `say`, and into the claimed
    folder, where the choice also replaces `auto` in config.yaml; without `say`, another learner does both."""
    if not run.strategy.is_auto:
        return run
    job = task.make_job(run, folder, learners_here)
    begin = time.monotonic()
    chosen = _LONE if run.learners == 1 else decide(job)
    found = run.model_copy(update={"strategy": chosen.strategy})
    if say is None:
        return found
    seconds = time.monotonic() - begin
    lines = "\n".join(chosen.lines) + (f"; choosing took {seconds:.1f} s" if run.learners > 1 else "")
    for line in lines.splitlines():
        say(line)
    tree = {"why": [line.strip() for line in lines.splitlines()], "seconds": round(seconds, 2), **chosen.notes}
    notes = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    for file, text in ((folder.auto, notes), (folder.config, dump_recipe(found))):
        with writing(file):
            replace_file(file, text)
    return found


def launched_choice(run: RunConfig, folder: ExperimentFolder, say: Say, job: Job) -> Choice:
    """Start the learners of a run to measure, and return their choice."""
    where = "this machine" if run.launch.kind == "local" else "the cluster"
    say(f"strategy auto: {run.learners} learners measure {where}")
    with packed_command(job, run, folder) as command:
        found = Path(command[-1]).with_name("choice.json")
        changes, machines = Changes(silence_seconds=run.engine.timeout_seconds), machines_of(run, say)
        launch([*command, str(found)], run.learners, folder.log / "auto", changes=changes, machines=machines)
        return Choice.model_validate_json(found.read_text(encoding="utf-8"))


def simulated_choice(run: RunConfig, cluster: Cluster, job: Job) -> Choice:
    """The choice for a simulated cluster, which needs no measuring."""
    costs = Costs(
        job=facts_of(job), compute=cluster.compute, messages=cluster.link, means=cluster.link, source="cluster"
    )
    return choice(Machines(costs, run.stragglers, dict(cluster)), run, job)


def measured_choice(run: RunConfig, place: Place, job: Job) -> Choice:
    """The choice of a run's learners after measuring; all of them call this, and get the same result."""
    options = cast(AutoOptions, run.strategy.options)
    place.use_threads(run.engine.threads)
    per_node = place.local_world if place.local_world < place.world else 1
    found, allowance = Figures(), Allowance(job.budget, job.workload.num_batches(0), options.seconds)
    stragglers, budget = job.stragglers.model_copy(update={"pauses": ()}), Budget(steps=_MORE_THAN_ENOUGH)
    measuring = (
        Strategy("auto/apart", "", lambda me: Measuring(me, allowance, found).apart(per_node), one_learner),
        Strategy("auto/together", "", lambda me: Measuring(me, allowance, found).together()),
    )
    store, seconds = place.store, run.engine.timeout_seconds
    device, begin = choose_device(run.engine.device, place), time.monotonic()
    with torch.random.fork_rng():
        for each in measuring:
            measured_job = bare(job, strategy=each, options=NoOptions(), budget=budget, stragglers=stragglers)
            own = replace(place, store=PrefixStore(each.name, store))
            run_learner(measured_job, own, device, each.name, Observer(), timeout_seconds=seconds)
    store.set(_FIGURES.format(place.rank), found.model_dump_json())
    if place.rank == 0:
        keys = [_FIGURES.format(rank) for rank in range(place.world)]
        store.wait(keys, timedelta(seconds=seconds))
        figures = [Figures.model_validate_json(store.get(key)) for key in keys]
        measured = time.monotonic()
        chosen = choice(Machines(costs_of(figures, per_node)), run, job)
        chosen.notes["measured"] |= {
            "measuring_seconds": round(measured - begin, 2),
            "planning_seconds": round(time.monotonic() - measured, 2),
        }
        store.set(_CHOICE, chosen.model_dump_json())
    store.wait([_CHOICE], timedelta(seconds=SET_UP))
    return Choice.model_validate_json(store.get(_CHOICE))


def choice(machines: Machines, run: RunConfig, job: Job) -> Choice:
    """The choice for a run on some machines, with its reasons. Raises ConfigError if none of the candidates fits."""
    among = cast(AutoOptions, run.strategy.options).among
    candidates = [StrategyChoice(name=name) for name in CANDIDATES if name in among]
    decision = choose(machines, run.learners, candidates, job)
    if not decision.tried:
        raise ConfigError(
            f"strategy auto: none of {', '.join(among)} fits {run.learners} learners\n  " + "\n  ".join(decision.notes)
        )
    predicted: list[dict[str, Any]] = [
        {
            "strategy": {"name": each.arm.name, **each.arm.given},
            "gradients_per_second": 1.0 / each.seconds_per_gradient,
            "cautious": each.caution / each.seconds_per_gradient,
            "worth": each.worth,
            "waiting": each.waiting,
            "staleness": mean_staleness(each.staleness),
        }
        for each in decision.predictions
    ]
    measured = machines.costs.measured
    return Choice(
        strategy=StrategyChoice.model_validate(predicted[0]["strategy"]),
        lines=tuple(_reasons(decision, machines)),
        notes={
            "learners": run.learners,
            "predicted": predicted,
            "measured": measured.model_dump(mode="json") if measured else {},
        },
    )


def _reasons(decision: Decision, machines: Machines) -> Iterator[str]:
    """Lines that say what was chosen and why, and how far the second choice is behind."""
    chosen, second = decision.chosen, decision.second
    yield (
        f"strategy auto: {chosen.arm} for {chosen.learners} learners, {1.0 / chosen.seconds_per_gradient:.3g} "
        f"mini-batches/s predicted, {chosen.waiting:.0%} of the time waiting"
    )
    yield f"  because {_because(machines)}"
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


def _because(machines: Machines) -> str:
    """The measurements, or the properties of the simulated cluster, in words."""
    costs, measured, slow = machines.costs, machines.costs.measured, machines.stragglers.slow
    if measured is None:
        times = f" ({max(slow.values()):g} times as long on the slowest learner)" if slow else ""
        return (
            f"a gradient takes {1000 * costs.compute.seconds:.3g} ms{times}, and a link carries "
            f"{gigabits(costs.messages.bandwidth)}, on the simulated cluster"
        )
    gradients, lost = measured.gradient_seconds, measured.lost_to_exchanges
    fastest, slowest = min(gradients), max(gradients)
    of_slowest = f" ({_seconds(slowest)} on learner {gradients.index(slowest)})" if slowest > LIKE * fastest else ""
    during = f", during which learner {lost.index(max(lost))} makes {max(lost):.0%} fewer gradients"
    return (
        f"a gradient takes {_seconds(fastest)}{of_slowest}, averaging all gradients "
        f"{_seconds(measured.mean_of_gradients_seconds)} more, and averaging {measured.model_bytes / 1e6:.3g} MB of "
        f"weights with neighbours {_seconds(measured.exchange_seconds['ring'])}{during if max(lost) > _NOTABLE else ''}"
    )


def _seconds(seconds: Seconds) -> str:
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{1000 * seconds:.3g} ms"
