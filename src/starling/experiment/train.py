"""`starling.train` and `starling.simulate`: train any PyTorch model and data with all features of a recipe's run."""

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from starling.checkpoint.manifest import MODEL
from starling.checkpoint.reader import latest
from starling.checkpoint.writer import mean_of_buffers
from starling.configuration import digest
from starling.consensus import consensus
from starling.engines.processes.place import Place
from starling.engines.virtual.cluster import Cluster
from starling.engines.virtual.engine import Outcome, VirtualEngine
from starling.errors import ConfigError, Stopped
from starling.experiment.auto import choose_before, choose_together, kept, with_choice
from starling.experiment.claim import checkpoint_to_resume, claim_folder
from starling.experiment.cores import cores_here
from starling.experiment.folder import ExperimentFolder
from starling.experiment.following import Following
from starling.experiment.launching import check_engine, check_not_running, crowding_warning, resumable, run_learners
from starling.experiment.learning import Task, learn
from starling.experiment.machines import shared_folder
from starling.experiment.packing import JobConfig, is_importing_script, pack
from starling.launch.link import Link
from starling.launch.process import signal_name
from starling.launch.rendezvous import find_place, is_learner
from starling.recipe.run import EngineConfig, RunConfig, check_run
from starling.reporting.progress import Display, say_on
from starling.timeouts import SET_UP
from starling.training.flat import load_buffers, split, trainable
from starling.training.job import Job

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Trained:
    """The result of `starling.train`."""

    job: Job
    """The job that was trained."""
    folder: Path
    """The experiment's folder."""
    checkpoint: Path
    """The newest checkpoint, with the consensus model and the state of every learner."""

    def model(self) -> nn.Module:
        """The consensus model, in evaluation mode, on the CPU."""
        model = self.job.workload.make_model()
        model.load_state_dict(load_file(self.checkpoint / MODEL / WEIGHTS))
        return model.eval()


@dataclass(frozen=True)
class Simulated:
    """The result of `starling.simulate`."""

    job: Job
    """The job that was simulated."""
    outcome: Outcome
    """Everything that the virtual engine recorded: states, events and times."""

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
        _fill(model, weights, means)
        return model.eval()


def train(
    job: Job,
    learners: int = 1,
    *,
    strategy: str | Mapping[str, Any] | None = None,
    name: str = "run",
    exp: Path | str = "exp",
    resume: Path | str | None = None,
    overwrite: bool = False,
    on_loss: str = "continue",
    checkpoints: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    launch: str | Mapping[str, Any] = "local",
    console: Console | None = None,
) -> Trained:
    """Train a job with `learners` processes, on this machine or on a Ray cluster.

    Every mini-batch of an epoch is computed exactly once, whatever the learners' speeds. Checkpoints, resuming, lost
    and joining learners, faults on purpose, `starling status` and `starling join` work as they do for a recipe.

    Learners receive a pickled copy of the job and import this script. Everything the job refers to must therefore be
    defined at the top level of a module or of the script, and this call must be under `if __name__ == "__main__":`.
    Under `torchrun` or Slurm, every process makes the same call, and `learners` is ignored: each process is a learner.

    Args:
        job: What to train, how, and for how long.
        learners: The number of processes.
        strategy: A name that `starling strategies` lists, `module:name`, or a mapping with `name` and options; `auto`:
            chosen by measuring this machine first; None: the job's strategy.
        name: The experiment's folder inside `exp`. An earlier run there is moved aside.
        exp: The folder of all experiments.
        resume: An experiment or a checkpoint to resume from.
        overwrite: Remove an earlier run instead of moving it aside.
        on_loss: What happens when a learner is lost: `continue` without it, `replace` it, or `stop`.
        checkpoints: Options of a recipe's `checkpoints` section: `minutes`, `epochs`, `every`, `keep`.
        engine: Options of a recipe's `engine` section: `device`, `threads`, `timeout_seconds`, `explain_seconds`.
        launch: Where the learners run: `local`, `ray`, or a mapping as in a recipe's `launch` section.
        console: Where progress is shown; None: standard error.

    Raises:
        ConfigError: The settings cannot be used; raised before any process starts.
        StarlingError: The error that ended the run; its notes say how to resume.

    Example:
        >>> trained = starling.train(job, learners=4, strategy="adpsgd", name="digits")  # doctest: +SKIP
        >>> model = trained.model()  # doctest: +SKIP
    """
    if is_importing_script():
        raise ConfigError(
            "starling.train was called while a learner imported this script; put the call under "
            '`if __name__ == "__main__":`'
        )
    sections = {"strategy": strategy, "checkpoints": checkpoints, "engine": engine, "launch": launch}
    run = _settings(job, learners, name, exp, resume, overwrite, on_loss, **sections)
    return _run(job_of(job, run), run, console or Console(stderr=True))


def _settings(
    job: Job,
    learners: int,
    name: str,
    exp: Path | str,
    resume: Path | str | None,
    overwrite: bool,
    on_loss: str,
    strategy: Any,
    checkpoints: Any,
    engine: Any,
    launch: Any,
) -> JobConfig:
    """The settings of a run, checked all at once."""
    given = {
        "name": name,
        "seed": job.seed,
        "learners": learners,
        "strategy": strategy or {"name": job.strategy.name, **job.options.model_dump(mode="json")},
        "island": job.island,
        "batch_shares": job.batch_shares,
        "budget": job.budget,
        "engine": engine or EngineConfig(),
        "launch": launch,
        "stragglers": job.stragglers,
        "faults": job.faults,
        "on_loss": on_loss,
        "checkpoints": {"every": job.checkpoint_every, **(checkpoints or {})},
        "resume": resume,
        "overwrite": overwrite,
        "exp": exp,
        "trains": f"{type(job.workload).__module__}.{type(job.workload).__qualname__}",
    }
    return check_run(JobConfig, given, "starling.train")


def _run(job: Job, run: JobConfig, console: Console) -> Trained:
    """Start the learners of a job, or train as one that torchrun or Slurm started."""
    if is_learner():
        return _train_under_another_launcher(job, run, console)
    run = kept(_resolved(job, run), say_on(console))
    job = job_of(job, run)
    check_engine(run)
    check_not_running(run)
    packed = pack(job, run)
    if run.launch.kind == "local" and (line := crowding_warning(run.learners, cores_here())):
        say_on(console)(line)
    folder = claim_folder(run, say_on(console))
    if run.strategy.is_auto:
        run = with_choice(run, choose_before(run, job, folder, say_on(console)), folder)
        job = job_of(job, run)
        packed = pack(job, run)
    title = f"{run.name}: {run.learners} learners, {run.strategy.name}"
    with (
        tempfile.TemporaryDirectory(prefix=".starling-job-", dir=shared_folder(run, folder)) as scratch,
        Following(run, folder, console) as following,
        Display(title, run.learners, console, following.events) as display,
    ):
        file = Path(scratch) / "job"
        file.write_bytes(packed)
        command = [sys.executable, "-m", "starling.experiment.job_process", str(file)]
        run_learners(run, folder, command, following, display, how_to_resume(folder))
    with following.scoring():
        return Trained(job, folder.path, latest(folder.path))


def simulate(job: Job, learners: int, cluster: Cluster | None = None) -> Simulated:
    """Train a job with `learners` virtual learners in this process, on a simulated cluster and clock.

    The gradients are real, and the same seed gives the same run. The job's functions need not be importable, and no
    file is written.

    Args:
        job: What to train, how, and for how long.
        learners: The number of virtual learners.
        cluster: The speeds of machines and links; None: the default of `starling.Cluster`.

    Raises:
        Deadlock: All learners wait for each other.
        PeerLost: The job cannot continue without the learners that its faults kill.

    Example:
        >>> starling.simulate(job, learners=64).seconds  # doctest: +SKIP
    """
    return Simulated(job, VirtualEngine(job, learners, cluster).run())


def job_of(job: Job, run: RunConfig) -> Job:
    """The job with the strategy and the other settings of a run."""
    return replace(
        job,
        strategy=run.strategy.strategy,
        options=run.strategy.options,
        island=run.island,
        checkpoint_every=run.checkpoints.every,
        autocast=job.autocast or run.engine.autocast == "bf16",
    )


def how_to_resume(folder: ExperimentFolder) -> str:
    """The call that resumes a run from its newest checkpoint."""
    return f"starling.train(job, ..., resume={str(folder.path)!r})"


def learn_job(job: Job, run: JobConfig, place: Place, link: Link | None) -> int | None:
    """Train as a learner of a job; see `learn`."""
    folder = ExperimentFolder(run.folder)
    task = Task(
        make_job=lambda: job,
        write_model=WeightsWriter(job.workload.make_model()),
        digest=digest(run.model_dump(mode="json", exclude={"overwrite"})),
        fingerprints=fingerprints(job),
    )
    return learn(run, task, folder, place, link)


def fingerprints(job: Job) -> dict[str, str]:
    """Digests of what a resumed run may not change: the model's tensors, the number of mini-batches, and the seed."""
    model = job.workload.make_model()
    shapes = {key: [list(value.shape), str(value.dtype)] for key, value in model.state_dict().items()}
    return {"model": digest(shapes), "data": digest([job.workload.num_batches(0), job.seed])}


class WeightsWriter:
    """Writes a model's state with given weights `[P]` and buffers as `model.safetensors`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, folder: Path, weights: Tensor, buffers: dict[str, Tensor]) -> None:
        _fill(self._model, weights, buffers)
        folder.mkdir(parents=True, exist_ok=True)
        state = {key: value.detach().clone().contiguous() for key, value in self._model.state_dict().items()}
        save_file(state, folder / WEIGHTS)


def _fill(model: nn.Module, weights: Tensor, buffers: Mapping[str, Tensor]) -> None:
    """Copy flat weights `[P]` and buffers into a model."""
    parameters = trainable(model)
    with torch.no_grad():
        for parameter, values in zip(parameters, split(weights, parameters), strict=True):
            parameter.copy_(values)
        load_buffers(model, buffers)


def _resolved(job: Job, run: JobConfig) -> JobConfig:
    """The settings, with `resume` replaced by the checkpoint that it names. Raises if that does not fit the job."""
    if run.resume is None:
        return run
    return run.model_copy(update={"resume": checkpoint_to_resume(run, fingerprints(job))})


def _train_under_another_launcher(job: Job, run: JobConfig, console: Console) -> Trained:
    """Train as a learner that torchrun or Slurm started; learner 0 claims the folder."""
    place = find_place(run.engine.timeout_seconds)
    run = run.model_copy(update={"learners": place.world})
    job = job_of(job, run)
    key = "set up"
    if place.rank == 0:
        run = kept(_resolved(job, run), say_on(console))
        check_engine(run)
        claim_folder(run, say_on(console))
        place.store.set(key, str(run.resume or ""))
    else:
        place.store.wait([key], timedelta(seconds=SET_UP))
        resume = place.store.get(key).decode()
        run = kept(run.model_copy(update={"resume": Path(resume) if resume else None}), lambda line: None)
    folder = ExperimentFolder(run.folder)
    if run.strategy.is_auto:
        choice = choose_together(run, job, place, folder, say_on(console))
        run = with_choice(run, choice, folder, writes=place.rank == 0)
    job = job_of(job, run)
    stopped_by = learn_job(job, run, place, None)
    if stopped_by is not None:
        stopped = Stopped(f"stopped by {signal_name(stopped_by)}", stopped_by, has_saved=True)
        raise resumable(stopped, folder, how_to_resume(folder))
    return Trained(job, folder.path, latest(folder.path))
