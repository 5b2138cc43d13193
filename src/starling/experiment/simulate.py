"""`starling simulate` and `starling.simulate`: train any number of learners in one process, on a simulated clock.

Also `starling storm`, in which learners are killed and replaced, paused, and cut off from the others at random times.
"""

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from starling.checkpoint.reader import load
from starling.checkpoint.state import LearnerState
from starling.checkpoint.writer import mean_of_buffers
from starling.configuration import checked
from starling.consensus import consensus
from starling.engines.virtual.cluster import Cluster
from starling.engines.virtual.engine import Outcome, VirtualEngine
from starling.errors import ConfigError, Stopped
from starling.events import Events
from starling.experiment.auto import kept, settled, simulated_choice
from starling.experiment.claim import resolve_resume, set_up_and_claim
from starling.experiment.folder import ExperimentFolder
from starling.experiment.following import read_record, recorded, unusable
from starling.experiment.learning import Regrouping, checkpoint_writer, recording
from starling.experiment.observers import Recorder, Skips, Together
from starling.experiment.record import segments
from starling.experiment.task import RecipeT, Task, load_recipe
from starling.launch.messages import Progress
from starling.launch.process import on_stop_signal, signal_name
from starling.launch.roster import LearnerRecord, Roster
from starling.reporting.epochs import duration
from starling.reporting.goodput import goodput_of
from starling.reporting.progress import Bars, Display, Say, say_on
from starling.training.faults import Fault, Join, Kill, Pause, Split
from starling.training.flat import fill
from starling.training.job import EpochReport, Job, Observer, StepReport
from starling.training.membership import Membership
from starling.workload import mean_loss


@dataclass(frozen=True)
class LearnerStats:
    """The counters of one simulated learner, over all epochs that it has ended. Times are on the simulated clock."""

    steps: int
    """Number of mini-batches, including those with a non-finite gradient."""
    steps_skipped: int
    """Number of non-finite gradients, which are skipped."""
    rounds: int
    """Number of averaging rounds in the learner's background."""
    staleness: dict[int, int]
    """Number of gradients with each staleness, which is the number of changes to the weights between reading them and
    applying the gradient."""
    bytes_sent: int
    """Number of bytes that the learner has sent to other learners."""
    seconds_computing: float
    """Time spent on gradients and steps."""
    seconds_waiting: float
    """Time spent waiting for other learners."""


@dataclass(frozen=True, repr=False)
class Simulated:
    """The result of `starling.simulate`."""

    job: Job
    """The job that was simulated."""
    outcome: Outcome
    """Everything that the virtual engine recorded: states, events and times."""
    reports: Sequence[EpochReport] = ()
    """Each learner's report of each epoch."""

    def __repr__(self) -> str:
        return f"<{self.job.strategy.name}, {len(self.outcome.states)} learners, {self.seconds:.4g} simulated seconds>"

    def stats(self) -> dict[int, LearnerStats]:
        """The counters of each learner, by its number."""
        of: dict[int, list[EpochReport]] = {}
        for report in self.reports:
            of.setdefault(report.rank, []).append(report)
        return {
            learner: LearnerStats(
                steps=sum(each.num_steps for each in epochs),
                steps_skipped=sum(each.num_not_finite for each in epochs),
                rounds=sum(each.averaging.rounds for each in epochs),
                staleness=dict(sorted(sum((each.averaging.staleness for each in epochs), Counter[int]()).items())),
                bytes_sent=sum(each.averaging.bytes_sent for each in epochs),
                seconds_computing=sum(each.spent.computing for each in epochs),
                seconds_waiting=sum(each.spent.waiting_for_peers for each in epochs),
            )
            for learner, epochs in sorted(of.items())
        }

    @property
    def seconds(self) -> float:
        """The simulated time."""
        return self.outcome.seconds

    def model(self) -> nn.Module:
        """The consensus model, in evaluation mode, on the CPU."""
        states = self.outcome.states
        model = self.job.workload.make_model()
        weights = consensus((state.weights for state in states), [state.kept for state in states])
        means = mean_of_buffers([state.buffers for state in states if state.is_worker])
        fill(model, weights, means)
        return model.eval()

    def loss(self, digits: int = 2) -> float:
        """The mean loss of the consensus model over the mini-batches of the first epoch, to `digits` significant
        digits: further ones may differ between machines."""
        return float(f"{mean_loss(self.model(), self.job.workload):.{digits}g}")


def simulate(
    job: Job, learners: int, cluster: Cluster | Mapping[str, Any] | None = None, threads: int = 1
) -> Simulated:
    """Train a job with `learners` virtual learners in this process, on a simulated cluster and clock.

    The gradients are real, and the same seed gives the same run. The job's functions need not be importable, and no
    file is written.

    Args:
        job: What to train, how, and for how long.
        learners: The number of virtual learners.
        cluster: The speeds of machines and links, also as a mapping with the keys of a recipe's `cluster` section; None
            uses the default of `starling.Cluster`.
        threads: The number of threads with which torch computes. More help only with large models on an idle machine,
            and may change the last digits of the results.

    Raises:
        ConfigError: The job names learners that do not exist, or the cluster is wrong.
        Deadlock: All learners wait for each other.
        PeerLost: The job cannot continue without the learners that its faults kill.

    Example:
        >>> from starling.toy import regression
        >>> run = starling.simulate(regression("adpsgd"), learners=4)
        >>> run.loss(), run.stats()[0].steps
        (0.01, 24)
    """
    shares = () if job.batch_shares == "auto" else job.batch_shares
    named = {*job.stragglers.slow, *shares, *(each.learner for each in job.stragglers.pauses)}
    named |= {each.learner for each in job.faults if not isinstance(each, Split)}
    if unknown := named - {*range(learners), *(each.join for each in job.faults if isinstance(each, Join))}:
        raise ConfigError(f"simulate: there is no learner {max(unknown)}; the {learners} learners count from 0")
    if isinstance(cluster, Mapping):
        cluster = checked(Cluster, cluster, "simulate", "cluster.")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        observer = _Reports()
        return Simulated(job, VirtualEngine(job, learners, cluster, observer).run(), observer.reports)
    finally:
        torch.set_num_threads(before)


class _Reports(Observer):
    """Collects the reports of all learners."""

    def __init__(self) -> None:
        self.reports: list[EpochReport] = []

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self.reports.append(report)


def simulate_recipe(task: Task[RecipeT], recipe: RecipeT, tell: Say, console: Console) -> None:
    """Train with `learners` virtual learners on the recipe's cluster, then score the model.

    Scores, the simulated time and the event hash go to `tell`, everything else to `console`. The experiment is
    `<name>-virtual`. Its checkpoint has only the final consensus model, so the run cannot be resumed.
    """
    say = say_on(console)
    recipe = kept(resolve_resume(task, recipe.model_copy(update={"name": f"{recipe.name}-virtual"})), say)
    parts = recipe.cluster.model_dump(mode="json", exclude_defaults=True).items()
    changed = [f"{part}.{key}={value}" for part, values in parts for key, value in values.items()]
    say(
        f"{recipe.learners} virtual learners in {recipe.folder}, on the default cluster"
        f"{' but for ' * bool(changed)}{', '.join(changed)}; change it with cluster.KEY=VALUE"
    )
    with Bars(console) as bars:
        folder = set_up_and_claim(task, recipe, say, bars)
    recipe = settled(task, recipe, folder, None, say, partial(simulated_choice, recipe, recipe.cluster))
    torch.set_num_threads(recipe.engine.threads or 1)  # the hash must not depend on the number of cores
    folder.log.mkdir(exist_ok=True)
    with recorded(recipe, folder, say) as events:
        outcome = _train(task, recipe, folder, events, console)
        writer = checkpoint_writer(task, recipe, folder, lambda name: 1, task.model_writer(recipe, folder))
        writer.save_consensus(outcome.states)
        if (verdict := task.score(recipe, folder, tell, console)) is not None:
            events.judge(verdict, say)
    tell(f"simulated time: {duration(outcome.seconds)}, {outcome.num_events} events")
    tell(f"event hash: {outcome.event_hash}")


def _train(task: Task[RecipeT], recipe: RecipeT, folder: ExperimentFolder, events: Events, console: Console) -> Outcome:
    title = f"{recipe.name}: {recipe.learners} virtual learners, {recipe.strategy.name}"
    checkpoint = load(recipe.resume) if recipe.resume else None
    strategy, learners = recipe.strategy.described, recipe.learners
    start = [checkpoint.start(rank, learners, strategy) for rank in range(learners)] if checkpoint else None
    roster = Roster(learners, clock=lambda: 0.0)
    with (
        (folder.log / "virtual.log").open("w", encoding="utf-8") as log,
        Display(title, roster, console, events) as display,
    ):
        job = task.make_job(recipe, folder)
        stop, skips = _Stop(), Skips(HashStore().add, task.max_skipped(recipe, job), display.say)
        recorder = Recorder(
            segments(folder.seen)[-1], skips, learners, None, lambda path, error: display.say(unusable(path, error))
        )

        def hear(progress: Progress) -> None:
            roster.hear(progress.learner_id, progress)
            display.hear(progress)

        def began(record: LearnerRecord) -> None:
            record.attempt.started_at -= recipe.cluster.watch.start
            record.entering += recipe.cluster.watch.start

        for each in roster.learners.values():
            began(each)

        def regrouped(membership: Membership, line: str) -> None:
            for name in roster.members:
                roster.learners[name].attempt.num_unshared = recorder.num_unshared(name)
            for joined in {*membership.members} - {*roster.members}:
                began(roster.start(joined))
            roster.announce(membership)
            display.tell_epochs()
            display.say(f"{membership.reason}; {line}")

        with recording(recorder, folder, learners, log, hear), on_stop_signal(stop.ask):
            engine = VirtualEngine(
                job,
                learners,
                recipe.cluster,
                Together([recorder, stop]),
                start,
                survives_losses=recipe.on_loss != "stop",
                changes=Regrouping(folder, recorder, regrouped),
            )
            roster.clock = lambda: engine.now
            outcome = engine.run()
        for loss in outcome.losses:
            roster.learners[loss.learner].stopped += loss.stopped
            if loss.learner not in roster.members:
                display.say(f"{recipe.name} ended without learner {loss.learner}: {loss.reason}")
    counts = read_record(folder.seen, segments(folder.seen)[0].name)
    if (goodput := goodput_of(roster, counts.num_computed)) is not None:
        events.write("goodput", ratio=goodput.ratio, **asdict(goodput))
        say_on(console)(str(goodput))
    return outcome


class _Stop(Observer):
    """An observer that ends a simulation between two steps after a signal."""

    def __init__(self) -> None:
        self._number: int | None = None

    def ask(self, number: int) -> None:
        """Stop at the next step; may be called from any thread."""
        self._number = number

    def on_step(self, report: StepReport) -> None:
        if self._number is not None:
            raise Stopped(
                f"stopped by {signal_name(self._number)}; a simulation saves only at its end: start it again",
                self._number,
            )


Seconds = float
PER_HOUR = 3600.0


def storm_recipe(
    path: Path,
    overrides: Sequence[str],
    tell: Say,
    console: Console,
    *,
    minutes: float,
    slow: float,
    seed: int,
    is_real: bool,
    settings: Mapping[str, float],
) -> None:
    """Train the recipe in a file through a storm of `minutes` minutes, with real learners or in a simulation. One
    learner, which the seed chooses, is `slow` times slower than the others. `settings` are those of `storm`."""
    _, recipe = load_recipe(path, overrides)
    faults = storm(recipe.learners, 60.0 * minutes, seed=seed, **settings)
    listed = [fault.model_dump(mode="json", exclude_none=True) for fault in faults]
    name = [] if any(each.startswith("name=") for each in overrides) else [f"name={recipe.name}-storm"]
    budget = f"budget={{epochs: null, steps: null, minutes: {minutes}}}"
    slowest = random.Random(seed).randrange(recipe.learners)
    slowed = [f"stragglers.slow={{{slowest}: {slow}}}"] if slow > 1.0 else []
    changed = [*overrides, *name, budget, "on_loss=continue", *slowed, f"faults={json.dumps(listed)}"]
    counts = ", ".join(
        f"{sum(isinstance(fault, kind) for fault in faults)} {word}"
        for kind, word in ((Kill, "kills"), (Pause, "pauses"), (Split, "cuts"))
    )
    if not faults:
        tell("warning: the storm has no faults; it needs at least two learners, and more faults in an hour or minutes")
    tell(f"storm of seed {seed}, {minutes:g} minutes, {recipe.learners} learners: {counts}")
    if is_real:
        from starling.experiment.train import train_recipe

        train_recipe(path, changed, tell, console, "starling storm")
    else:
        simulate_recipe(*load_recipe(path, changed, command="starling storm"), tell, console)


def storm(
    learners: int,
    seconds: Seconds,
    *,
    faults_per_hour: float = 70.0,
    pauses: float = 0.25,
    cuts_per_hour: float = 0.0,
    away: Seconds = 10.0,
    seed: int = 1,
) -> tuple[Fault, ...]:
    """Return the faults of a storm, in the order of their times. The same arguments give the same faults.

    Faults and cuts come at random, as in two Poisson processes. Each hits one of the learners that work then; at least
    one learner is always spared.

    Args:
        learners: The number of learners.
        seconds: The length of the storm.
        faults_per_hour: The mean number of kills and pauses in an hour, of all learners together.
        pauses: The fraction of faults that are pauses.
        cuts_per_hour: The mean number of times in an hour that the network cuts one learner off; in simulations only.
        away: The time after which a killed learner is started again, and the length of a pause or a cut.
        seed: The seed of the storm.
    """
    chance, now, per_second = random.Random(seed), 0.0, (faults_per_hour + cuts_per_hour) / PER_HOUR
    works_from, found = [0.0] * learners, list[Fault]()
    while per_second > 0.0 and (now := now + chance.expovariate(per_second)) < seconds:
        is_cut = chance.random() * (faults_per_hour + cuts_per_hour) < cuts_per_hour
        is_pause, at = chance.random() < pauses, round(now, 1)
        working = [learner for learner, since in enumerate(works_from) if since <= now]
        if len(working) < 2:
            continue
        works_from[hit := chance.choice(working)] = now + away
        if is_cut:
            found.append(Split(split=(hit,), at_seconds=at, seconds=away))
        elif is_pause:
            found.append(Pause(pause=hit, at_seconds=at, seconds=away))
        else:
            found += [Kill(kill=hit, at_seconds=at), Join(join=hit, at_seconds=round(now + away, 1))]
    return tuple(found)
