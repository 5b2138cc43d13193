"""The program of a learner process that saves what it has, by the clock and when it is asked to stop.

    python -m tests.launch.stopping_process RUN

RUN is a `Run` as JSON. Checkpoints go to `FOLDER/checkpoints`; what a learner noted to `FOLDER/noted-<rank>.json`.
"""

import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from starling.budget import Budget
from starling.checkpoint.reader import load
from starling.checkpoint.state import LearnerState
from starling.checkpoint.writer import BackgroundWriter, CheckpointWriter
from starling.engines.processes.member import run_learner
from starling.experiment.folder import ExperimentFolder
from starling.experiment.learning import Regrouping, SharedCounts
from starling.experiment.observers import Recorder
from starling.launch.link import Link, reported_errors
from starling.launch.messages import Activity
from starling.launch.rendezvous import find_membership, find_place, save_requests_of
from starling.strategies import find_strategy
from starling.training.job import EpochReport, Job, Observer, StepReport
from starling.training.speeds import Pause, Stragglers
from tests.contract.cases import adam
from tests.contract.problems import TinyRegression


@dataclass(frozen=True)
class Run:
    """What the learners of a run do."""

    folder: str
    strategy: str = "allreduce"
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 1_000_000
    resume: str | None = None
    minutes: float | None = None
    """Between two checkpoints."""
    workers: int = 0
    """Loading processes."""
    pause: dict[str, Any] | None = None
    """Of one learner."""
    signals: dict[int, int] = field(default_factory=dict)
    """Which signal a learner, by rank, sends itself."""
    at_step: int = 100
    """The mini-batch at which it does, or a later one."""
    at_barrier: int = 0
    """How many barriers it has passed before."""

    @classmethod
    def from_json(cls, text: str) -> "Run":
        read = json.loads(text)
        return cls(**{**read, "signals": {int(rank): number for rank, number in read["signals"].items()}})

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.launch.stopping_process", json.dumps(asdict(self))]


class Keeping(Observer):
    """Saves at every barrier and at the end; notes which mini-batches it computed, and how many were done by then."""

    def __init__(self, writer: CheckpointWriter, run: Run, rank: int, link: Link | None) -> None:
        self.seen: list[int] = []
        self.steps_at: list[float] = []
        self.barriers: list[int] = []
        self._background = BackgroundWriter(writer)
        self._run, self._rank, self._link = run, rank, link

    def on_step(self, report: StepReport) -> None:
        self._background.check()
        self.seen.append(report.ticket.step)
        self.steps_at.append(time.monotonic())
        if self._link is not None:
            self._link.send(Activity(f"step {report.ticket.step}", {"step": report.ticket.step}))
        is_far_enough = report.ticket.step >= self._run.at_step and len(self.barriers) >= self._run.at_barrier
        if is_far_enough and self._rank in self._run.signals:
            os.kill(os.getpid(), self._run.signals.pop(self._rank))

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self._background.save(state, lambda checkpoint: None)

    def on_barrier(self, state: LearnerState) -> None:
        self.barriers.append(state.position.num_done)
        self._background.save(state, lambda checkpoint: None)

    def close(self) -> None:
        self._background.close()


def write_model(folder: Path, weights: Tensor, buffers: dict[str, Tensor]) -> None:
    folder.mkdir()
    save_file({"weights": weights}, folder / "model.safetensors")


def main(run: Run, link: Link | None) -> None:
    torch.set_num_threads(1)
    place = find_place(timeout_seconds=30)
    strategy = find_strategy(run.strategy)
    options = strategy.options.model_validate(run.options)
    job = Job(
        workload=TinyRegression(batches=1_000_000),
        strategy=strategy,
        options=options,
        budget=Budget(steps=run.steps),
        make_optimizer=adam(0.01),
        num_workers=run.workers,
        stragglers=Stragglers(pauses=(Pause(**run.pause),) if run.pause else ()),
    )
    folder = ExperimentFolder(Path(run.folder))
    counts = SharedCounts(place)
    writer = CheckpointWriter(folder.checkpoints, counts.arrive, write_model, {}, keep=1000)
    keeping = Keeping(writer, run, place.rank, link)
    recorder = Recorder(folder.seen)
    regrouping = Regrouping(folder, recorder, lambda membership, line: None, counts, keeping)  # type: ignore[arg-type]
    with save_requests_of(link, run.minutes) as save_requests:
        state = run_learner(
            job,
            place,
            torch.device("cpu"),
            "same",
            keeping,
            load(Path(run.resume)).start(place.rank, place.world, job.strategy.described(job.options))
            if run.resume
            else None,
            30.0,
            find_membership(place, link),
            regrouping,
            save_requests,
        )
    position = state.position if state is not None else None
    noted = {
        "seen": keeping.seen,
        "steps_at": keeping.steps_at,
        "barriers": keeping.barriers,
        "num_done": position.num_done if position else None,
        "outstanding": [ticket.step for ticket in position.outstanding] if position else None,
        "stopped_by": save_requests.stopped_by,
    }
    (folder.path / f"noted-{place.rank}.json").write_text(json.dumps(noted), encoding="utf-8")
    if link is None and save_requests.stopped_by is not None:
        raise SystemExit(128 + save_requests.stopped_by)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as a shell starts a program
    line = Link.from_environment()
    with reported_errors(line):
        main(Run.from_json(sys.argv[1]), line)
