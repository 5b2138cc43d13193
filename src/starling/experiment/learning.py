"""A learner of a run, for any workload: trains, records, saves and reports. Each membership has its own record of what
was seen."""

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from rich.console import Console
from torch.distributed import DistError

from starling.checkpoint.files import remove_partial
from starling.checkpoint.reader import load
from starling.checkpoint.state import LearnerState
from starling.checkpoint.writer import CheckpointWriter, WriteModel
from starling.engines.processes.forks import clone_store
from starling.engines.processes.member import run_learner
from starling.engines.processes.place import Place, choose_device
from starling.engines.processes.stalls import Stall, Waits
from starling.errors import PeerLost
from starling.experiment.folder import ExperimentFolder
from starling.experiment.observers import Listener, Log, Paced, Recorder, Saver, Skips, Together, save_choice
from starling.experiment.record import begin_segment, segments
from starling.experiment.replay import job_as_recorded, script_to_follow
from starling.experiment.task import RunT, Task
from starling.launch.link import Link
from starling.launch.messages import Ended, Heartbeat, LearnerMessage, Said
from starling.launch.rendezvous import find_membership, joins, save_requests_of
from starling.recipe.run import RunConfig, recipe_digest
from starling.reporting.metrics import Curves
from starling.reporting.progress import TIMES_AS_LONG, own_line, resumed_line, say_on
from starling.timeouts import CURVES_EVERY, HEARTBEAT_EVERY, LOG_EVERY, SEND_EVERY, SHORT_WAIT, Seconds
from starling.training.job import Job
from starling.training.membership import Membership, MembershipObserver
from starling.workload import Position


def learn(task: Task[RunT], run: RunT, place: Place, link: Link | None) -> int | None:
    """Train as a learner until the run ends; return the signal if one stopped the run early, else None."""
    place = replace(place, sums_in_order=run.engine.reduce == "ordered")
    script = script_to_follow(run, place.rank)
    place.use_threads(run.engine.threads if script is None else script.arithmetic["threads"])
    tell: Callable[[LearnerMessage], None] = (lambda message: None) if link is None else link.send
    counts, folder = SharedCounts(place), ExperimentFolder(run.folder)
    job, device = task.make_job(run, folder, place.local_world), choose_device(run.engine.device, place)
    if script is not None:
        job = job_as_recorded(job, script, device)
    write_model = task.model_writer(run, folder)
    validate_every = task.validate_every(run) if link is not None else None
    # models for scoring are removed by the launcher, after scoring
    models = CheckpointWriter(
        folder.validation, lambda name: counts.arrive(f"validation/{name}"), write_model, {}, 1000, run.sync_group_size
    )
    saver = Saver(
        checkpoint_writer(task, run, folder, counts.arrive, write_model),
        tell,
        folder.tensorboard,
        save_choice(run.checkpoints.epochs, validate_every, folder, counts.agree),
        models,
    )

    def warn(path: Path, error: Exception) -> None:
        tell(Said(f"{path} cannot be written ({error})"))

    skips = Skips(counts.count, task.max_skipped(run, job), lambda line: tell(Said(line)))
    recorder = Recorder(segments(folder.seen)[-1], skips, warn=warn)
    world = max(place.world, place.rank + 1)  # the id of a joiner may exceed the number of learners at the start
    waits = Waits()
    write = say_on(Console(file=sys.stdout))
    heartbeat = HeartbeatSource(place.rank, recorder, write, waits, run.engine.explain_seconds)
    with (
        recording(recorder, folder, world, sys.stdout, tell),
        beating(heartbeat, link),
        save_requests_of(link, run.checkpoints.minutes) as save_requests,
        saver,
    ):
        run_learner(
            job,
            place,
            device,
            recipe_digest(run),
            Together([recorder, saver]),
            _start(run, job, place),
            run.engine.timeout_seconds,
            find_membership(place, link),
            Regrouping(folder, recorder, lambda membership, line: tell(Said(line)), counts, saver),
            save_requests if script is None else None,
            waits,
            script,
        )
        return save_requests.stopped_by


def checkpoint_writer(
    task: Task[RunT], run: RunT, folder: ExperimentFolder, arrive: Callable[[str], int], write_model: WriteModel
) -> CheckpointWriter:
    """The writer of a run's checkpoints."""
    has_one_model, size = run.strategy.strategy.has_one_model, run.sync_group_size
    keep, fingerprints = run.checkpoints.keep, task.fingerprints(run)
    return CheckpointWriter(folder.checkpoints, arrive, write_model, fingerprints, keep, size, has_one_model)


@contextmanager
def recording(
    recorder: Recorder, folder: ExperimentFolder, world: int, log: TextIO, pass_on: Listener
) -> Generator[None, None, None]:
    """A context in which `recorder` also writes a log and curves, and passes on the progress of learners. At the end,
    all files are closed."""
    with closing(Curves(folder.tensorboard)) as curves, closing(recorder):
        recorder.readers = Paced(Log(log, world), LOG_EVERY), Paced(curves, CURVES_EVERY), Paced(pass_on, SEND_EVERY)
        yield


def _start(run: RunConfig, job: Job, place: Place) -> LearnerState | None:
    """The state from which this learner resumes; None if it begins, or joins a running experiment."""
    if not run.resume or joins():
        return None
    return load(run.resume).start(place.rank, place.world, job.strategy.described(job.options), run.island)


@dataclass(eq=False)
class HeartbeatSource:
    """Makes heartbeats, with the number of mini-batches that `recorder` has counted.

    `write` writes a line to this learner's log. `waits` are the learner's waits; one that lasts longer than
    `long_seconds`, and much longer than usual, is logged as a stall.
    """

    learner_id: int
    recorder: Recorder
    write: Callable[[str], None]
    waits: Waits
    long_seconds: Seconds = 10.0
    _last: Stall | None = None
    """Stall that was logged last."""
    _again_at: Seconds = 0.0

    def __post_init__(self) -> None:
        self.waits.beat()

    def beat(self) -> Heartbeat:
        """Make a heartbeat and log stalls; call this every `HEARTBEAT_EVERY` seconds."""
        if stopped := self.waits.beat():
            self.write(
                f"learner {self.learner_id} did not run for {stopped:.1f} s: it was stopped or got no processor time"
            )
        wait = self.waits.longest(SHORT_WAIT)
        self._log(wait)
        return Heartbeat(self.recorder.num_steps, wait, self.recorder.num_unshared(self.learner_id))

    def _log(self, wait: Stall | None) -> None:
        if self._last is not None and (wait is None or wait.number != self._last.number):
            self.write(resumed_line([self.learner_id], self._last.seconds))
            self._last = None
        if wait is None or not wait.is_unusual(self.long_seconds, TIMES_AS_LONG):
            return
        if self._last is None or wait.seconds >= self._again_at:
            self.write(own_line(self.learner_id, wait))
            self._again_at = 2.0 * wait.seconds
        self._last = wait


@contextmanager
def beating(source: HeartbeatSource, link: Link | None) -> Generator[None, None, None]:
    """Send heartbeats inside the context; without a launcher, only log stalls."""
    if link is not None:
        link.heartbeat = source.beat
        yield
        link.send(Ended(source.recorder.num_steps))
        return
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(HEARTBEAT_EVERY):
            source.beat()

    threading.Thread(target=beat, name="starling-heart", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


class SharedCounts:
    """Counts that the learners of a membership share, in the run's store."""

    def __init__(self, place: Place) -> None:
        self._place = place
        # for the saving thread, because a store's connection serves one request at a time
        self._background_store = clone_store(place.store)
        self.membership = Membership(0, ())

    def count(self, name: str, number: int) -> int:
        """Add to a counter that all learners of this membership share, and return the sum."""
        return int(self._place.store.add(self._key(name), number))

    def agree(self, name: str, own: str) -> str:
        """Return the value `own` of the first learner of this membership that called this method with `name`. All
        learners get the same result."""
        return self._place.store.compare_set(self._key(name), "", own).decode()

    def arrive(self, name: str) -> int:
        """Count this learner's part of a checkpoint, and return how many parts are written. Called by the saving
        thread."""
        try:
            return int(self._background_store.add(self._key(f"checkpoint/{name}"), 1))
        except DistError as error:
            raise PeerLost(
                f"learner {self._place.rank} lost its connection to the store while saving {name}"
            ) from error

    def _key(self, name: str) -> str:
        return f"{self.membership.key}/{name}"


@dataclass(eq=False)
class Regrouping(MembershipObserver):
    """Carries the record, counts and checkpoints of one learner, or of all learners of a simulation, from one
    membership to the next. Checkpoints that the previous membership has not completed are dropped.

    On one learner, `tell` is called with each new membership but the first, and a line about it.
    """

    folder: ExperimentFolder
    recorder: Recorder
    tell: Callable[[Membership, str], None]
    counts: SharedCounts | None = None
    saver: Saver | None = None

    def pause(self) -> None:
        self.end()
        self.recorder.close()

    def begin(self, membership: Membership, position: Position, is_first: bool) -> None:
        if membership.number == 0:
            return
        if self.counts is not None:
            self.counts.membership = membership
        if is_first:
            remove_partial(self.folder.checkpoints)
            remove_partial(self.folder.validation)
            begin_segment(self.folder.seen, position)
            line = f"learners {', '.join(map(str, membership.members))} continue after {position.num_done} mini-batches"
            if position.outstanding:
                line += f"; {len(position.outstanding)} outstanding tickets are re-issued"
            self.tell(membership, line)
        self.recorder.continue_in(segments(self.folder.seen)[-1])

    def end(self) -> None:
        if self.saver is not None:
            self.saver.close()
