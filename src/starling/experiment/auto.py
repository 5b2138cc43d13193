"""`strategy: auto`: the learners of a run measure the machines together, and learner 0 asks the planner.

Starling's launcher starts the learners twice, first to measure. Those of torchrun or Slurm measure, and then train.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import yaml
from pydantic import TypeAdapter, ValidationError
from torch.distributed.distributed_c10d import PrefixStore

from starling.budget import Budget
from starling.engines.processes.member import run_learner
from starling.engines.processes.place import Place, choose_device
from starling.engines.virtual.cluster import Cluster
from starling.errors import ConfigError
from starling.experiment.folder import ExperimentFolder
from starling.experiment.launching import machines_of
from starling.experiment.packing import packed_command
from starling.experiment.task import RunT, Task
from starling.files import replace_file, writing
from starling.launch.joiners import Changes
from starling.launch.launcher import launch
from starling.predict.at_hand import Allowance, Measuring
from starling.predict.choosing import LONE, Choice, Surroundings, choose, explained, surroundings_of
from starling.predict.costs import Costs
from starling.predict.deciding import Arm
from starling.predict.facts import facts_of
from starling.predict.measure import Figures, bare
from starling.predict.predict import Machines
from starling.recipe.file import parse_yaml
from starling.recipe.run import AutoOptions, RunConfig, StrategyChoice, dump_recipe
from starling.reporting.progress import Say
from starling.strategies import NoOptions, Strategy
from starling.strategies.base import one_learner
from starling.timeouts import SET_UP
from starling.training.job import Job, Observer

_FIGURES, _CHOICE = "auto/figures/{}", "auto/choice"
_MORE_THAN_ENOUGH = 1 << 40
"""Mini-batches of the budget while measuring, which ends earlier."""


def kept(run: RunT, say: Say) -> RunT:
    """A run that resumes, with the strategy that was chosen when it began. Any other is returned as it is."""
    if run.resume is None or not run.strategy.is_auto:
        return run
    config = ExperimentFolder(run.resume.parent.parent).config
    try:
        tree = parse_yaml(config.read_text(encoding="utf-8"), str(config))
        choice = StrategyChoice.model_validate(tree["strategy"])
    except (OSError, KeyError, TypeError, ValidationError) as error:
        raise ConfigError(
            f"strategy auto: a resumed run keeps its strategy, but {config} does not tell it ({error}); name the "
            "strategy"
        ) from None
    if choice.is_auto:
        raise ConfigError(f"strategy auto: {config} was written before a strategy was chosen; name one to resume")
    try:
        choice.check_for(run.learners)
    except ConfigError as error:
        raise ConfigError(
            f"strategy auto: a resumed run keeps its strategy, {choice.name}, which does not fit {run.learners} "
            f"learners ({error}); resume with as many as before, or name a strategy"
        ) from None
    say(f"strategy auto: the run resumes with {Arm.of(choice)}, as before")
    return run.model_copy(update={"strategy": choice})


def settled(
    task: Task[RunT],
    run: RunT,
    folder: ExperimentFolder,
    learners_here: int | None,
    say: Say | None,
    choose: Callable[[Job], Choice],
) -> RunT:
    """The run, with the strategy that is chosen for its job if it is to be chosen: say why, note it in the claimed
    folder, and write it in place of `auto` into the experiment's config.yaml; without `say`, another learner does."""
    if not run.strategy.is_auto:
        return run
    job = task.make_job(run, folder, learners_here)
    begin = time.monotonic()
    choice = LONE if run.learners == 1 else choose(job)
    found = run.model_copy(update={"strategy": choice.strategy})
    if say is None:
        return found
    seconds = time.monotonic() - begin
    lines = "\n".join(choice.lines) + (f"; choosing took {seconds:.1f} s" if run.learners > 1 else "")
    for line in lines.splitlines():
        say(line)
    tree = {"why": [line.strip() for line in lines.splitlines()], "seconds": round(seconds, 2), **choice.notes}
    notes = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    for file, text in ((folder.auto, notes), (folder.config, dump_recipe(found))):
        with writing(file):
            replace_file(file, text)
    return found


def launched_choice(run: RunConfig, folder: ExperimentFolder, say: Say, job: Job) -> Choice:
    """Start the learners of a run to measure, and return what they choose."""
    where = "this machine" if run.launch.kind == "local" else "the cluster"
    say(f"strategy auto: {run.learners} learners measure {where}")
    with packed_command(job, run, folder) as command:
        found = Path(command[-1]).with_name("choice.json")
        changes, machines = Changes(silence_seconds=run.engine.timeout_seconds), machines_of(run, say)
        launch([*command, str(found)], run.learners, folder.log / "auto", changes=changes, machines=machines)
        return Choice.model_validate_json(found.read_text(encoding="utf-8"))


def simulated_choice(run: RunConfig, cluster: Cluster, job: Job) -> Choice:
    """What is chosen for a simulated cluster, which needs no measuring."""
    costs = Costs(
        job=facts_of(job), compute=cluster.compute, messages=cluster.link, means=cluster.link, source="cluster"
    )
    slow = run.stragglers.slow
    because = (
        f"a gradient takes {1000 * cluster.compute.seconds:.3g} ms"
        + (f" ({max(slow.values()):g} times as long on the slowest learner)" if slow else "")
        + f", and a link carries {cluster.link.bandwidth * 8 / 1e9:.3g} Gbit/s, on the simulated cluster"
    )
    stragglers = run.stragglers.model_copy(update={"pauses": ()})
    around = Surroundings(run.learners, cluster.nodes.size, Machines(costs, stragglers, dict(cluster)), because)
    return explained(choose(around, cast(AutoOptions, run.strategy.options), job.weighting), around)


def measured_choice(run: RunConfig, place: Place, job: Job) -> Choice:
    """What the learners of a run choose after measuring; all of them call this, and get the same."""
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
    store.set(_FIGURES.format(place.rank), TypeAdapter(Figures).dump_json(found).decode())
    if place.rank == 0:
        keys = [_FIGURES.format(rank) for rank in range(place.world)]
        store.wait(keys, timedelta(seconds=seconds))
        figures = [TypeAdapter(Figures).validate_json(store.get(key)) for key in keys]
        measured = time.monotonic()
        around = surroundings_of(figures, per_node)
        choice = explained(choose(around, options, job.weighting), around)
        choice.notes["measured"] |= {
            "measuring_seconds": round(measured - begin, 2),
            "planning_seconds": round(time.monotonic() - measured, 2),
        }
        store.set(_CHOICE, choice.model_dump_json())
    store.wait([_CHOICE], timedelta(seconds=SET_UP))
    return Choice.model_validate_json(store.get(_CHOICE))
