"""`starling.profile`: the costs of a job, measured on the machine at hand with real learner processes."""

import io
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from rich.console import Console

from starling.budget import Budget
from starling.engines.processes.place import cores_here
from starling.engines.virtual.cluster import LinkModel
from starling.engines.virtual.timing import simulate_timing
from starling.errors import ConfigError
from starling.experiment.any_job import train
from starling.predict.costs import (
    JobFacts,
    MachineFacts,
    MeasuredLink,
    Profile,
    Validation,
)
from starling.predict.deciding import Arm
from starling.predict.facts import facts_of
from starling.predict.fits import fit_link, gradient_times
from starling.predict.measure import MEASURE, TIME, WARM_UP, Figures
from starling.predict.predict import Machines
from starling.strategies.islands import NO_ISLANDS
from starling.training.job import Job
from starling.training.stragglers import Stragglers

GRADIENTS = 40
"""Measured by the lone learner; each validation computes as many for each of its two learners."""
MEANS = 8
"""Means of gradients that two learners make."""
VALIDATED = ("allreduce", "adpsgd")
"""Strategies that two learners then train with, to see how far the predictions are off."""
SHORTEST = 1e-6
"""Seconds: the least that a mean of gradients is taken to add to a gradient, even where it overlaps completely."""
Say = Callable[[str], None]


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

    Learners are started as by `starling.train`, whose rules for scripts hold here, too: what the job refers to must be
    importable, and the call under `if __name__ == "__main__":`. Injected stragglers and faults of the job are left out.

    Args:
        job: What to measure; its strategy and budget do not matter.
        gradients: How many the lone learner measures; each validation computes as many for each of its two learners.
        engine: Options of a recipe's `engine` section, such as `device` and `threads`.
        validate: Whether to train for a moment with two learners afterwards, and compare predictions with that.
        command: The command that the profile records as its origin; None: this process's command line.
        facts: What a plan needs to know of the job; None: found out here.
        say: Is told what is being measured.

    Raises:
        ConfigError: if the job cannot be sent to learner processes, or too few gradients are asked for.
        StarlingError: whatever ends the learners.

    Example:
        >>> measured = starling.profile(job)  # doctest: +SKIP
        >>> starling.plan(job, profile=measured, learners=[4, 16]).reason  # doctest: +SKIP
    """
    if gradients < 2:
        raise ConfigError(
            f"gradients: {gradients} is too few for a distribution; measure at least 2, preferably {GRADIENTS}"
        )
    facts = facts or facts_of(job, counts_flops=True)
    bare = replace(job, stragglers=Stragglers(), faults=(), checkpoint_every=None, weighting="batches", batch_shares={})
    bare = replace(bare, island=NO_ISLANDS)
    say("one learner: gradients")
    (alone,) = _run(bare, 1, {"name": MEASURE}, gradients + WARM_UP, engine)
    say("two learners: exchanges and means")
    pair = _run(bare, 2, {"name": MEASURE}, 2 * (MEANS + WARM_UP), engine)
    found = profile_of(alone, pair, facts, command or " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]))
    if not validate:
        return found
    errors: dict[str, float] = {}
    for name in VALIDATED:
        say(f"two learners: validation with {name}")
        errors[name] = _error(found, bare, name, gradients, engine)
    worst = max(errors, key=lambda name: errors[name])
    against = f"two learners of this machine with {' and '.join(VALIDATED)}, {found.date}; the worst is {worst}"
    return found.model_copy(update={"validation": Validation(error=round(errors[worst], 4), against=against)})


def profile_of(alone: Figures, pair: Sequence[Figures], facts: JobFacts, command: str) -> Profile:
    """The profile made from the figures of a lone learner and those of two learners that ran together."""
    exchanges, means = ([getattr(each, name) for each in pair] for name in ("exchanges", "means"))
    halves = fit_link(_together(means))
    # a mean of two learners is simulated as two messages of half the bytes
    of_means = halves.model_copy(update={"latency": halves.latency / 2.0})
    longer = max(SHORTEST, fmean(median(each.gradients) for each in pair) - median(alone.gradients))
    of_gradients = LinkModel(latency=0.0, bandwidth=alone.num_bytes / longer)
    return Profile(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        command=command,
        machine=_machine(alone.device),
        job=facts.model_copy(update={"model_bytes": alone.num_bytes}),
        gradient=gradient_times(alone.gradients),
        step_seconds=fmean(alone.steps),
        mixing_bandwidth=alone.num_bytes / max(median(alone.applies), 1e-9),
        exchange=MeasuredLink(seconds_by_bytes=_together(exchanges), fitted=fit_link(_together(exchanges))),
        mean=MeasuredLink(seconds_by_bytes=_together(means), fitted=of_means),
        gradient_mean=MeasuredLink(seconds_by_bytes={alone.num_bytes: longer}, fitted=of_gradients),
        memory_per_learner_bytes=max(each.memory_bytes for each in (alone, *pair)),
    )


def _together(found: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The mean over learners, by bytes."""
    return {num_bytes: fmean(each[num_bytes] for each in found) for num_bytes in found[0]}


def _run(
    job: Job, learners: int, strategy: Mapping[str, Any], steps: int, engine: Mapping[str, Any] | None
) -> list[Figures]:
    """Train with a budget of `steps` in a temporary folder; return the figures that each learner noted."""
    with tempfile.TemporaryDirectory(prefix="starling-profile-") as name:
        folder = Path(name)
        train(
            replace(job, budget=Budget(steps=steps)),
            learners,
            strategy={**strategy, "folder": str(folder)},
            name="profile",
            exp=folder,
            checkpoints={"minutes": None},
            engine=engine,
            on_loss="stop",
            console=Console(file=io.StringIO()),
        )
        return [Figures.read(folder, rank) for rank in range(learners)]


def _error(found: Profile, job: Job, name: str, gradients: int, engine: Mapping[str, Any] | None) -> float:
    """|predicted / measured - 1| of the time that two learners take under a strategy."""
    arm, steps = Arm.of({"name": name}), 2 * gradients
    figures = _run(job, 2, {"name": TIME, "strategy": {"name": name}}, steps, engine)
    measured = max(each.seconds for each in figures)
    cluster = Machines(found.costs).cluster(arm, 2)
    num_bytes = found.job.model_bytes // 4 * 4
    predicted = simulate_timing(arm.strategy, arm.options, 2, cluster, num_bytes, steps).seconds
    return abs(predicted / measured - 1.0)


def _machine(device: str) -> MachineFacts:
    processor = platform.processor() or platform.machine()
    memory = 0
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
        memory = int(Path("/proc/meminfo").read_text(encoding="utf-8").split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # another system
    return MachineFacts(
        processor=processor,
        cores=cores_here(),
        memory_bytes=memory,
        device=processor if device == "cpu" else device,
        torch=torch.__version__,
        starling=version("starling-asr"),
    )
