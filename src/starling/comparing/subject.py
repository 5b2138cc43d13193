"""The subject of a comparison, which is the runs of a recipe, or any job."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import yaml
from torch import nn
from torch.optim import Optimizer

from starling.chance import one_thread
from starling.comparing.grid import Cell, CompareConfig, Metric, Row
from starling.configuration import digest, refused
from starling.engines.virtual.cluster import Cluster
from starling.errors import ConfigError, did_you_mean
from starling.recipe import Tree
from starling.recipe.run import strategy_problems
from starling.reporting.progress import Bars, Say
from starling.training.data import DataWorkload
from starling.training.job import Job
from starling.training.shards import MakeOptimizer
from starling.workload import Ticket, Workload, mean_loss

Scorer = Workload[Any] | Callable[[nn.Module], float]
"""Function that scores a trained model, or a workload, whose mean loss over its first epoch is the score."""


class Subject(Protocol):
    """The subject of a comparison. It converts a cell to a job, and scores the model. Processes that compute cells get
    a copy of it."""

    @property
    def section(self) -> CompareConfig:
        """The cells, and the way in which they are compared."""

    @property
    def metric(self) -> Metric:
        """The metric by which models are compared."""

    @property
    def folder(self) -> Path:
        """The folder that keeps every finished cell."""

    @property
    def described(self) -> str:
        """Description of the subject, as YAML."""

    def own_rate(self, row: Row) -> float:
        """Return the learning rate of a row before any tuning."""

    def digest(self, cell: Cell) -> str:
        """Return the digest of everything on which the result of a cell depends. If the digest differs from that of a
        finished cell, the cell is computed again."""

    def batches_key(self, cell: Cell) -> str:
        """Return a key that is equal for cells that load equal mini-batches."""

    def prepare(self, cells: Sequence[Cell], say: Say, bars: Bars) -> None:
        """Prepare the data that cells share."""

    def job(self, cell: Cell) -> Job:
        """Return the job of a cell."""

    def cluster(self, cell: Cell) -> Cluster:
        """Return the cluster that is simulated for a cell."""

    def engine(self, cell: Cell) -> Mapping[str, Any]:
        """Return the engine options of a cell's learners. For simulated learners, only `threads` has a meaning."""

    def score(self, cell: Cell, model: nn.Module) -> dict[str, Any]:
        """Return the fields of a result about the quality of a trained model."""


@runtime_checkable
class Comparable(Protocol):
    """A task whose recipes `starling compare` can compare."""

    def comparison(self, tree: Tree, where: str) -> Subject:
        """Return the subject of the comparison in a recipe with a section `compare`. `where` is the name of the recipe
        in the `ConfigError` that lists all problems."""


def compared_by(section: CompareConfig, score: Metric) -> Metric:
    """Return the metric of a comparison whose models are scored by `score`."""
    return Metric(name="training loss", of_loss=True, beside=score.name) if section.by == "loss" else score


def rated(parameters: list[nn.Parameter], make: MakeOptimizer, factor: float) -> Optimizer:
    """Return an optimizer whose learning rates are multiplied by a factor."""
    optimizer = make(parameters)
    for group in optimizer.param_groups:
        group["lr"] *= factor
    return optimizer


_OF_THE_CELL = {"workload", "strategy", "options", "make_optimizer", "seed"}
_ARM_KEYS = [each.name for each in fields(Job) if each.name not in _OF_THE_CELL]


@dataclass(frozen=True)
class JobSubject:
    """A subject that is any job, or a function that creates a job for a seed."""

    make: Job | Callable[[int], Job]
    section: CompareConfig
    metric: Metric
    folder: Path
    validate: Scorer | None = None
    test: Scorer | None = None
    on: Cluster = field(default_factory=Cluster)
    threads: int = 1
    key: str = ""
    _probes: dict[int, str] = field(default_factory=dict, repr=False, compare=False)
    _jobs: dict[int, Job] = field(default_factory=dict, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_jobs": {}}  # each process creates its own jobs

    @property
    def described(self) -> str:
        return yaml.safe_dump({"compare": self.section.model_dump(mode="json", fallback=str)}, sort_keys=False)

    def check(self) -> None:
        """Raise one ConfigError that lists all problems of the arms."""
        found = [f"arms.{row.arm}: {problem}" for row in self.section.rows for problem in self._problems(row)]
        tuned = [row for row in self.section.rows if len(self.section.rates_of(row, self.own_rate(row))) > 1]
        if tuned and self.validate is None and not self.metric.of_loss:
            found.append("validate: rates are chosen by a validation result; give a function or a workload")
        if found:
            raise refused(list(dict.fromkeys(found)), "starling.compare")

    def _problems(self, row: Row) -> Iterator[str]:
        for name in self._changes(row).keys() - set(_ARM_KEYS):
            yield f"a job has no {name!r} to change; {did_you_mean(name, _ARM_KEYS)}"
        if (choice := self.section.all_arms[row.arm].strategy) is not None:
            yield from strategy_problems(choice, row.learners)
            return
        try:
            self._job(self.section.seeds[0]).validate(row.learners)
        except ConfigError as error:
            yield str(error)

    def _changes(self, row: Row) -> dict[str, Any]:
        """Return the fields of the job, other than the strategy, that a row's setting and arm change."""
        return {**self.section.settings.get(row.setting, {}), **self.section.all_arms[row.arm].keys}

    def _job(self, seed: int) -> Job:
        if seed not in self._jobs:
            self._jobs[seed] = self._seeded(self.make, seed) if isinstance(self.make, Job) else self.make(seed)
        return self._jobs[seed]

    def _seeded(self, job: Job, seed: int) -> Job:
        workload = job.workload
        if isinstance(workload, DataWorkload):
            workload = workload.with_seed(seed)
        elif len(self.section.seeds) > 1:
            raise ConfigError(
                f"job: a {type(workload).__name__} does not say how to change its seed; give starling.compare a "
                "function that makes the job for a seed, or one seed"
            )
        return replace(job, workload=workload, seed=seed)

    def own_rate(self, row: Row) -> float:
        job = self._job(self.section.seeds[0])
        rate = float(job.make_optimizer([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"])
        if rate <= 0.0:
            raise ConfigError(f"job: the optimizer's learning rate is {rate:g}; it must be above 0 to be tuned")
        return rate

    def digest(self, cell: Cell) -> str:
        """Return the digest of the settings and of the weights, loss and scores of the model before training."""
        if cell.seed not in self._probes:
            self._probes[cell.seed] = self._probe(cell.seed)
        job = self.job(cell)
        settings = [repr(getattr(job, name)) for name in [*_ARM_KEYS, "options", "seed"]]
        where = [self.section.engine, cell.learners, cell.rate, self.on.model_dump(mode="json"), self.key]
        return digest([self._probes[cell.seed], job.strategy.name, settings, where])

    def _probe(self, seed: int) -> str:
        job = self._job(seed)
        workload, model = job.workload, job.workload.make_model()
        state = hashlib.sha256()
        for name, value in model.state_dict().items():
            state.update(name.encode() + value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        optimizer = job.make_optimizer(list(model.parameters()))
        with one_thread():
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(seed)
                losses = [float(workload.loss(model, each).detach()) for each in workload.load(Ticket(0, 0, 0))]
            scores = self._scores(workload.make_model())
        first = [workload.num_batches(0), losses, scores, type(optimizer).__name__, repr(optimizer.defaults)]
        return digest([state.hexdigest(), first])

    def batches_key(self, cell: Cell) -> str:
        return str(cell.seed)

    def prepare(self, cells: Sequence[Cell], say: Say, bars: Bars) -> None: ...

    def job(self, cell: Cell) -> Job:
        job, keys = self._job(cell.seed), self._changes(cell.row)
        if (choice := self.section.all_arms[cell.arm].strategy) is not None:
            keys |= {"strategy": choice.strategy, "options": choice.options}
        factor = cell.rate / self.own_rate(cell.row)
        return replace(job, make_optimizer=partial(rated, make=job.make_optimizer, factor=factor), **keys)

    def cluster(self, cell: Cell) -> Cluster:
        return self.on

    def engine(self, cell: Cell) -> Mapping[str, Any]:
        return {"threads": self.threads}

    def score(self, cell: Cell, model: nn.Module) -> dict[str, Any]:
        return self._scores(model)

    def _scores(self, model: nn.Module) -> dict[str, Any]:
        given = {"valid": self.validate, "test": self.test}
        with torch.no_grad():
            return {name: _scored(model.eval(), scorer) for name, scorer in given.items() if scorer is not None}


def _scored(model: nn.Module, scorer: Scorer) -> float:
    return mean_loss(model, scorer) if isinstance(scorer, Workload) else float(scorer(model))
