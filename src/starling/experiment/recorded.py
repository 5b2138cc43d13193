"""Reads the record of an experiment for a replay, or for the learners of a run with `follow`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from starling.checkpoint.files import read_manifest
from starling.errors import ConfigError, ReplayError
from starling.experiment.folder import ExperimentFolder, existing
from starling.experiment.record import events_in, segments
from starling.recipe.run import RunConfig
from starling.strategies.islands import NO_ISLANDS, Island
from starling.training.job import Job
from starling.training.order import NO_BATCH, RACES, Script
from starling.training.succession import MembershipStart


@dataclass(frozen=True)
class Run:
    """The record of a run from one start or resume to the next."""

    segments: Sequence[Path]
    """Folder of the record of each membership."""
    memberships: Sequence[Sequence[Script]]
    """Records of the learners, by membership and rank."""

    @property
    def plan(self) -> MembershipStart:
        """The plan with which the run began."""
        return MembershipStart.decode(self.memberships[0][0].plan)

    @property
    def scripts(self) -> list[Script]:
        """The records of all learners in all memberships."""
        return [script for each in self.memberships for script in each]


def check_job(job: Job) -> None:
    """Raise ConfigError if the job cannot be replayed."""
    _check_strategy(job.strategy.name, job.island)


def _check_strategy(name: str, island: Island) -> None:
    if name in RACES:
        raise ConfigError(
            f"{name} cannot be replayed: its learners change single numbers of one memory at the same "
            "time, which no order of events describes"
        )
    if island != NO_ISLANDS:
        raise ConfigError(
            "a run with islands cannot be replayed: torch sums what their ranks exchange, in its own order"
        )


def check_follow(run: RunConfig) -> None:
    """Raise ConfigError or ReplayError if the learners of a run cannot keep to the order in `follow`."""
    path = cast(Path, run.follow)
    if path.resolve() == run.folder.resolve():
        raise ConfigError(f"follow: {path} is the folder of this run itself; set name to another one")
    _check_strategy(run.strategy.name, run.island)
    scripts = _scripts_for(run)
    if len(scripts) != run.learners:
        raise ConfigError(f"follow: {path} has the record of {len(scripts)} learners; set learners to as many")
    for script in scripts:
        if NO_BATCH not in script.turns:
            raise ReplayError(f"follow: the record of learner {script.learner} in {path} ends before its run did")


def script_to_follow(run: RunConfig, learner: int) -> Script | None:
    """The record of a learner that the run follows; None if the run follows none."""
    return None if run.follow is None else _scripts_for(run)[learner]


def _scripts_for(run: RunConfig) -> Sequence[Script]:
    """The records, in `follow`, of the learners of the run that began where this one begins."""
    path, done = cast(Path, run.follow), 0
    if run.resume is not None:
        done = read_manifest(run.resume).position.num_done
    found = next((each for each in read_runs(existing(path)) if each.plan.position.num_done == done), None)
    if found is None:
        raise ConfigError(f"follow: no run recorded in {path} resumed after {done} mini-batches, as this one does")
    if len(found.memberships) > 1:
        raise ConfigError(
            f"follow: learners of {path} were lost or joined; learners can only keep to the order of a run without "
            "this, but `starling replay` replays any run"
        )
    return found.scripts


def job_as_recorded(job: Job, script: Script, device: torch.device) -> Job:
    """The job with the batch shares that the recorded learners measured. Raises ReplayError if this process computes
    other bits."""
    script.check_arithmetic(device)
    if job.batch_shares != "auto":
        return job
    return replace(job, batch_shares=dict(enumerate(MembershipStart.decode(script.plan).shares)))


def read_runs(folder: ExperimentFolder) -> list[Run]:
    """The recorded runs. Raises ConfigError if there are none, ReplayError if the record is damaged or has gaps."""
    found = segments(folder.seen)
    if not found:
        raise ConfigError(f"{folder.path}: nothing was recorded here; train with this version of Starling first")
    runs: list[Run] = []
    for place, segment in enumerate(found):
        scripts, num_missing = _scripts_in(segment)
        if not scripts:  # its learners were lost before they began
            continue
        if scripts[0].number == 0:
            runs.append(Run([segment], [scripts]))
        elif not runs:
            raise ReplayError(
                f"{segment}: the record begins with membership {scripts[0].number}; earlier ones are lost"
            )
        else:
            before = runs[-1]
            runs[-1] = Run([*before.segments, segment], [*before.memberships, scripts])
        if num_missing and place + 1 == len(found):
            raise ReplayError(f"{segment}: no record of {num_missing} of {len(scripts)} learners")
    if not runs:
        raise ReplayError(f"{found[0]}: no learner recorded its membership; the record is of an earlier version")
    return runs


def _scripts_in(segment: Path) -> tuple[list[Script], int]:
    """The records of the learners of a segment's membership, by rank, and the number of learners without a record."""
    scripts: dict[int, Script] = {}
    for learner, place, event in events_in(segment):
        script = scripts.setdefault(learner, Script(learner))
        script.add(event, place)
    begun = next((script for script in scripts.values() if script.members), None)
    if begun is None:
        return [], 0
    missing = [learner for learner in begun.members if learner not in scripts]
    scripts |= {learner: begun.without_events(learner) for learner in missing}
    return [scripts[learner] for learner in begun.members], len(missing)
