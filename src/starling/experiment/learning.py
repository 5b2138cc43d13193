"""A learner of a run, for any workload: trains, records, saves and reports."""

import sys

from rich.console import Console

from starling.checkpoint.reader import load
from starling.checkpoint.state import LearnerState
from starling.checkpoint.writer import CheckpointWriter
from starling.engines.processes.member import run_learner
from starling.engines.processes.place import Place, choose_device
from starling.engines.processes.stalls import Waits
from starling.experiment.cores import use_threads
from starling.experiment.folder import ExperimentFolder
from starling.experiment.heartbeat import HeartbeatSource, beating
from starling.experiment.keeping import SaveChoice, model_writer
from starling.experiment.observers import CurvesByRank, Log, Messages, Metered, Saver, Together
from starling.experiment.regrouping import Regrouping
from starling.experiment.seen import Seen, segments
from starling.experiment.task import RunT, Task
from starling.experiment.timeline import Timeline
from starling.launch.link import Link
from starling.launch.messages import LearnerMessage, Said
from starling.launch.rendezvous import find_membership, joins
from starling.launch.stopping import save_requests_of
from starling.recipe.run import RunConfig, recipe_digest
from starling.reporting.curves import Curves
from starling.reporting.progress import say_on
from starling.timeouts import CURVES_EVERY, LOG_EVERY, SEND_EVERY
from starling.training.job import Job


def learn(task: Task[RunT], run: RunT, folder: ExperimentFolder, place: Place, link: Link | None) -> int | None:
    """Train as a learner until the run ends; return the signal if one stopped the run early, else None."""
    use_threads(run, place.local_world)

    def tell(message: LearnerMessage) -> None:
        if link is not None:
            link.send(message)

    regrouping = Regrouping(folder, place, tell)
    curves = CurvesByRank(lambda rank: Curves(folder.tensorboard / f"learner-{rank}"))
    sync_group_size = run.sync_group_size
    job = task.make_job(run, folder, place.local_world)
    write_model = task.model_writer(run, folder)
    writer = CheckpointWriter(
        folder.checkpoints,
        regrouping.arrive,
        write_model,
        task.fingerprints(run),
        run.checkpoints.keep,
        sync_group_size,
        job.strategy.has_one_model,
    )
    validate_every = task.validate_every(run) if link is not None else None
    saver = Saver(
        writer,
        tell,
        lambda: Curves(folder.tensorboard / "consensus"),
        SaveChoice(run.checkpoints.epochs, validate_every, folder, regrouping.agree),
        model_writer(folder, lambda name: regrouping.arrive(f"validation/{name}"), write_model, sync_group_size),
    )
    seen = Seen(segments(folder.seen)[-1], regrouping.count, task.max_skipped(run, job), lambda line: tell(Said(line)))
    timeline = Timeline(
        segments(folder.seen)[-1], warn=lambda path, error: tell(Said(f"{path} cannot be written ({error})"))
    )
    regrouping.watch((seen, timeline), saver)
    world = max(place.world, place.rank + 1)  # the id of a joiner may exceed the number of learners at the start
    listeners = [Metered(Log(sys.stdout), world, LOG_EVERY), Metered(curves, world, CURVES_EVERY)]
    if link is not None:
        listeners.append(Metered(Messages(tell), world, SEND_EVERY))
    waits = Waits()
    heartbeat = HeartbeatSource(place.rank, say_on(Console(file=sys.stdout)), waits, run.engine.explain_seconds)
    try:
        with beating(heartbeat, link), save_requests_of(link, run.checkpoints.minutes) as save_requests, saver:
            run_learner(
                job,
                place,
                choose_device(run.engine.device, place),
                recipe_digest(run),
                Together([timeline, heartbeat, *listeners, seen, saver]),
                _start(run, job, place),
                run.engine.timeout_seconds,
                find_membership(place, link),
                regrouping,
                save_requests,
                waits,
            )
            return save_requests.stopped_by
    finally:
        curves.close()
        timeline.close()
        seen.close()


def _start(run: RunConfig, job: Job, place: Place) -> LearnerState | None:
    """The state from which this learner resumes; None: it begins, or joins a running experiment."""
    if not run.resume or joins():
        return None
    strategy, is_tensor = job.strategy.described(job.options), run.island.tensor > 1
    return load(run.resume).start(place.rank, place.world, strategy, run.island.size, is_tensor)
