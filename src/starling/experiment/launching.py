"""The launcher of a run: starts the learners, shows their progress, and cleans up the experiment's folder.

A job that is given as an object is pickled for the learners, which import the user's script before they unpickle it.
"""

import io
import pickle
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import current_process, spawn
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from rich.console import Console

from starling.checkpoint.files import remove_partial
from starling.checkpoint.reader import checkpoints_in
from starling.errors import ConfigError, StarlingError, Stopped, require
from starling.experiment.folder import ExperimentFolder
from starling.experiment.following import Following
from starling.experiment.replay import check_follow
from starling.experiment.task import RunT, Task
from starling.launch.joiners import Changes, launcher_id, taking_requests
from starling.launch.launcher import launch, this_machine
from starling.launch.messages import LearnerMessage
from starling.launch.on_ray import RayMachines, connected
from starling.launch.process import Machines
from starling.launch.rendezvous import LOOPBACK
from starling.launch.roster import Roster
from starling.recipe.run import RunConfig
from starling.reporting.metrics import Metrics, sending, serving
from starling.reporting.progress import Display, Say
from starling.training.faults import at_times, only_simulated
from starling.training.job import Job

MAX_LEARNERS_PER_CORE = 4
"""Number of learners per core above which a warning is shown, because more are likely a mistake."""


def run_learners(task: Task[RunT], run: RunT, folder: ExperimentFolder, console: Console, following: Following) -> None:
    """Run the learners of `run`, each a process of the task's command, until all have exited.

    Their messages are shown and then passed to the task's scoring, which may let them save and end early. Raises the
    error that ended the run; if there is a checkpoint, with a note on how to resume.
    """
    title = f"{run.name}: {run.learners} learners, {run.strategy.name}"
    strategy, options = run.between, run.strategy.options
    with (
        task.learner_command(run, folder) as command,
        Display(title, following.roster, console, following.events) as display,
        task.scoring(run, folder, display.say, display.scored) as scoring,
    ):
        following.on_look = display.tick
        roster = following.roster

        def hear(learner_id: int, message: LearnerMessage) -> None:
            display.hear(message)
            scoring.hear(message)

        try:
            with taking_requests(folder.joins) as requests, _monitoring(run, roster, display):
                losses = launch(
                    command,
                    run.learners,
                    folder.log,
                    hear,
                    Changes(
                        on_loss=run.on_loss,
                        silence_seconds=run.engine.timeout_seconds,
                        succession=lambda members, lost, joining: strategy.successors(options, members, lost, joining),
                        faults=at_times(run.faults),
                        requests=requests,
                        is_enough=scoring.is_enough,
                        say=display.say,
                        on_lost=lambda loss: display.lost(loss.learner, loss.reason),
                        on_join=display.joined,
                        on_left_out=display.left_out,
                    ),
                    roster,
                    machines_of(run, display.say, task.preload),
                )
        except StarlingError as error:
            raise resumable(error, folder, task.how_to_resume(folder)) from None
        finally:
            with suppress(OSError):
                remove_partial(folder.checkpoints)  # all learners have exited
        for loss in losses:
            if loss.learner not in roster.members:
                display.say(f"{run.name} ended without learner {loss.learner}: {loss.reason}")


@contextmanager
def _monitoring(run: RunConfig, roster: Roster, display: Display) -> Generator[None, None, None]:
    """Within this context, the metrics of a run are served and sent if it requests them."""
    address, metrics = run.launch.metrics_address, Metrics(roster, run.name, run.strategy.name)
    with ExitStack() as stack:
        if run.launch.opentelemetry:
            stack.enter_context(sending(metrics))
        if run.launch.metrics_port is not None:
            port = stack.enter_context(serving(metrics, address, run.launch.metrics_port))
            host = f"[{address}]" if ":" in address else address
            display.say(f"metrics for Prometheus: http://{host}:{port}/metrics")
            if address not in LOOPBACK:
                display.say(
                    f"warning: launch.metrics_address is {address}, not this machine's loopback: any process that "
                    "reaches this port can read the run's figures; use a private network, and see SECURITY.md"
                )
        yield


def crowding_warning(learners: int, cores: int) -> str | None:
    """A warning if this machine has far fewer cores than learners, else None."""
    if learners <= MAX_LEARNERS_PER_CORE * cores:
        return None
    return (
        f"warning: {learners} learners share {cores} cores and slow each other down; use at most {cores} for speed, or "
        "`starling simulate` to study more"
    )


def check_engine(run: RunConfig) -> None:
    """Raise ConfigError for settings that real processes cannot have: CUDA without a device, simulated faults, an
    unreachable cluster, a folder that another run is using, or a record that learners cannot keep to."""
    if problems := list(only_simulated(run.faults)):
        raise ConfigError("\n".join(problems))
    if run.launch.kind == "ray":
        with connected(run.launch.address):
            pass
    if run.launch.metrics_port is not None:
        require("monitoring", "launch.metrics_port")
    if run.launch.opentelemetry:
        require("opentelemetry", "launch.opentelemetry")
    if run.launch.kind == "local" and run.engine.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device: cuda, but torch finds no CUDA device; use engine.device=auto or cpu")
    if run.follow is not None:
        check_follow(run)
    if launcher_id(ExperimentFolder(run.folder).joins) is not None:
        raise ConfigError(
            f"{run.folder}: another run writes here; wait for its end, stop it, or set name to another one"
        )


def resumable(error: StarlingError, folder: ExperimentFolder, how_to_resume: str) -> StarlingError:
    """The error that ended a run, with the newest checkpoint and a note on how to resume from it."""
    found = checkpoints_in(folder.checkpoints)
    if isinstance(error, Stopped):
        saved = "; there is no checkpoint"
        if found:
            saved = f", saved {found[-1]}" if error.has_saved else f"; the newest checkpoint is {found[-1]}"
        error = Stopped(f"{error}{saved}", error.signal_number)
    if found:
        error.add_note(f"resume with: {how_to_resume}")
    return error


def machines_of(run: RunConfig, say: Say, preload: Sequence[str] = ()) -> Machines:
    """The machines on which the learners run; on this machine, they find the modules in `preload` imported."""
    if run.launch.kind == "local":
        return partial(this_machine, preload=preload)
    resources = {"CPU": 1.0} | ({"GPU": 1.0} if run.engine.device == "cuda" else {}) | run.launch.resources
    size = run.super_learner_size
    return RayMachines(run.launch.address, run.launch.learners_per_node or size, size, resources, say)


def pack(job: Job, run: RunConfig) -> bytes:
    """Pickle everything that a learner needs: how to import this script, the settings, and the job.

    Raises ConfigError for a job that cannot be pickled.
    """
    preparation = spawn.get_preparation_data("starling-learner")
    preparation.pop("authkey", None)
    script = preparation.get("init_main_from_path")
    if script is not None and not Path(script).exists():
        raise ConfigError(
            f"job: learner processes import the script that calls starling.train, but {Path(script).name} is no file; "
            "save the script in a file, and start that instead of reading it from standard input"
        )
    buffer = io.BytesIO()
    pickle.dump(preparation, buffer)
    has_script = "init_main_from_name" in preparation or script is not None
    try:  # not multiprocessing's pickler, whose shared memory would end with this process
        (pickle.Pickler if has_script else _WithoutScript)(buffer).dump((job, run))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"job: cannot be sent to learner processes ({error}); define its functions and classes at the top level of "
            "a module or of the script, and bind their arguments with functools.partial"
        ) from error
    return buffer.getvalue()


class _WithoutScript(pickle.Pickler):
    """The pickler in a notebook or an interactive session, whose functions and classes no other process can import."""

    def reducer_override(self, thing: Any) -> Any:
        if getattr(thing, "__module__", None) == "__main__" and isinstance(thing, (type, FunctionType)):
            raise ConfigError(
                f"job: {thing.__qualname__} is defined in a notebook or an interactive session, from which learner "
                "processes cannot import it; put the job's functions and classes into a file (in a notebook, with "
                "%%writefile my_job.py as the first line of their cell), and import them from my_job"
            )
        return NotImplemented


@contextmanager
def packed_command(job: Job, run: RunConfig, folder: ExperimentFolder) -> Generator[list[str], None, None]:
    """The command of a learner that reads a packed job. Its last argument is the job's file, which exists within this
    context."""
    shared = None if run.launch.kind == "local" else folder.path  # where learners on other machines find it
    with tempfile.TemporaryDirectory(prefix=".starling-job-", dir=shared) as scratch:
        file = Path(scratch) / "job"
        file.write_bytes(pack(job, run))
        yield [sys.executable, "-m", "starling.experiment.job_process", str(file)]


def unpack(packed: bytes) -> tuple[Job, RunConfig]:
    """The inverse of `pack`; call it only with bytes from this process's own launcher."""
    buffer = io.BytesIO(packed)
    preparation = pickle.load(buffer)  # noqa: S301 - written by this learner's own launcher
    process = current_process()
    process._inheriting = True  # type: ignore[attr-defined]  # multiprocessing's flag while the script is imported
    try:
        spawn.prepare(preparation)
        job, run = pickle.load(buffer)  # noqa: S301 - as above
    except (AttributeError, ImportError) as error:
        raise ConfigError(
            f"job: a learner cannot import a function or class of it ({error}); define it at the top level of a module "
            "or of the script, not under `if __name__`"
        ) from error
    finally:
        del process._inheriting  # type: ignore[attr-defined]
    return job, run


def refuse_if_importing(caller: str) -> None:
    """Raise ConfigError if a learner, or a process that computes cells, is importing the script that makes the call."""
    if getattr(current_process(), "_inheriting", False):
        raise ConfigError(
            f"{caller} was called while another process imported this script; put the call under "
            '`if __name__ == "__main__":`'
        )
