"""What is compared: the runs of a recipe, or any job."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from starling.comparing.grid import Cell, CompareConfig, Row, parse_section
from starling.comparing.memory import Memory, Remembered
from starling.comparing.results import Metric
from starling.configuration import digest
from starling.engines.virtual.cluster import Cluster
from starling.errors import ConfigError, did_you_mean
from starling.experiment.folder import ExperimentFolder
from starling.recipe.file import Tree, merge
from starling.recipe.run import strategy_problems
from starling.reporting.progress import Bars, Say
from starling.speech.recipe import Recipe, check_recipe
from starling.strategies.islands import NO_ISLANDS
from starling.training.data import DataWorkload
from starling.training.job import Job
from starling.workload import Ticket, Workload

Scorer = Workload[Any] | Callable[[nn.Module], float]
"""What a trained model is scored by: a function, or a workload, for its mean loss over that workload's first epoch."""


_WORD_ERRORS = Metric(name="WER %", all_right=0.0, all_wrong=95.0, diverged=100.0)
_NO_RESULT_DEPENDS_ON = {"name", "exp", "overwrite", "resume", "checkpoints", "validate_every"}


@dataclass(frozen=True)
class RecipeSubject:
    """The runs of a recipe with a `compare:` section. What they share is in the folder `ready`."""

    tree: Tree
    """The recipe without its section."""
    section: CompareConfig
    where: str
    base: Recipe
    metric: Metric = _WORD_ERRORS
    _recipes: dict[Row | Cell, Recipe] = field(default_factory=dict, repr=False, compare=False)
    _prepared: dict[str, list[Path]] = field(default_factory=dict, repr=False, compare=False)
    """The folders that this process has made ready, by what they share."""

    @property
    def threads(self) -> int:
        return self.base.engine.threads or 1

    def recipe(self, what: Row | Cell) -> Recipe:
        """The complete recipe of a cell, or of a row before any tuning. Raises ConfigError with its problems."""
        if what in self._recipes:
            return self._recipes[what]
        arm = self.section.all_arms[what.arm]
        tree = merge(merge(self.tree, self.section.settings.get(what.setting, {})), arm.keys)
        tree |= {"learners": what.learners}
        if arm.strategy is not None:
            tree["strategy"] = arm.strategy.model_dump(mode="json")
        if isinstance(what, Cell):
            tree |= {"seed": what.seed, "optimizer": {**(tree.get("optimizer") or {}), "lr": what.rate}}
        self._recipes[what] = check_recipe(tree, f"of {what.arm}")
        return self._recipes[what]

    def own_rate(self, row: Row) -> float:
        """The learning rate of a row before any tuning."""
        return self.recipe(row).optimizer.lr

    def digest(self, cell: Cell) -> str:
        """Of all that the result of a cell depends on: a result with another digest is computed again."""
        recipe = self.recipe(cell).model_dump(mode="json", exclude=_NO_RESULT_DEPENDS_ON)
        if self.recipe(cell).island == NO_ISLANDS:
            del recipe["island"]  # results from before there were islands are still valid
        elif self.recipe(cell).island.tensor == 1:
            del recipe["island"]["tensor"]
        if not recipe["batch_shares"]:
            del recipe["batch_shares"]
        del recipe["data"]["cache"]
        return digest([recipe, self.section.engine])

    def batches_key(self, cell: Cell) -> str:
        """Equal for cells that load equal mini-batches."""
        recipe = self.recipe(cell)
        sections = {"seed", "data", "mixture", "partition", "tokens", "features", "augment", "batches"}
        content = recipe.model_dump(mode="json", include=sections)
        content["parts"] = recipe.num_workers if recipe.partition != "identical" else 1
        content["too short for"] = recipe.model.shape.subsampling  # decides which utterances CTC leaves out
        return digest(content)

    def prepare(self, cells: Sequence[Cell], say: Say, bars: Bars) -> None:
        """Make ready what cells share: data, and the model before training."""
        from starling.speech.training.set_up import set_up, set_up_like

        seeded: dict[Path, list[Cell]] = {}
        for cell in cells:
            seeded.setdefault(self._ready(cell).path, []).append(cell)
        for path, own in seeded.items():
            folder, recipe = ExperimentFolder(path), self.recipe(max(own, key=lambda cell: cell.learners))
            done = self._prepared.setdefault(self._alike(own[0]), [])
            if path in done:
                continue
            path.mkdir(parents=True, exist_ok=True)
            if done:
                set_up_like(recipe, ExperimentFolder(done[0]), folder)
            else:
                set_up(recipe, folder, say if len(self._prepared) == 1 else lambda line: None, bars)
            done.append(path)

    def _shared(self, cell: Cell) -> str:
        """Equal for cells whose models before training differ in the seed alone."""
        return self._digest(cell, {"model"})

    def _alike(self, cell: Cell) -> str:
        """Equal for cells whose folders `set_up_like` makes from one another: CTC leaves out other utterances for
        another model; an alignment serves them all."""
        return self._digest(cell, set() if self.recipe(cell).loss == "frames" else {"model"})

    def _digest(self, cell: Cell, more: set[str]) -> str:
        sections = {"data", "mixture", "tokens", "features", "augment", "warm_start", *more}
        sections |= {"loss", "states", "alignment", "decoding"}
        return digest(self.recipe(cell).model_dump(mode="json", include=sections))[:12]

    def _ready(self, cell: Cell) -> ExperimentFolder:
        """The folder of cells that begin with the same model and train on the same data."""
        return ExperimentFolder(self.base.folder / "ready" / f"{self._shared(cell)}-seed{cell.seed}")

    def job(self, cell: Cell, memory: Memory) -> Job:
        from starling.speech.training.job import make_job
        from starling.speech.training.workload import SpeechWorkload

        recipe = self.recipe(cell)
        if self.section.engine == "processes":
            return make_job(recipe, self._ready(cell), cell.learners)
        job = make_job(recipe, self._ready(cell))
        if isinstance(job.workload, SpeechWorkload):  # what other workloads load is ready on the disk
            return replace(job, workload=Remembered(job.workload, memory, self.batches_key(cell)))
        return job

    def cluster(self, cell: Cell) -> Cluster:
        return self.recipe(cell).cluster

    def engine(self, cell: Cell) -> Mapping[str, Any]:
        """The engine options of real learners."""
        return self.recipe(cell).engine.model_dump()

    def score(self, cell: Cell, model: nn.Module) -> dict[str, Any]:
        """The fields of a result that say how good a trained model is."""
        from starling.speech.recogniser import Recogniser
        from starling.speech.scoring.score import score
        from starling.speech.store import SpeechSet

        recipe = self.recipe(cell)
        recogniser = Recogniser.load(self._ready(cell).initial)
        recogniser.model.load_state_dict(model.state_dict())

        def count(name: str) -> tuple[int, int]:
            speech_set = SpeechSet.open(recipe.data.set_folder(name))
            references = {speech_set.id(index): speech_set.text(index) for index in range(len(speech_set))}
            words = score(references, recogniser.recognise(speech_set)).words
            return words.errors, words.reference

        found: dict[str, Any] = {}
        if recipe.data.valid is not None:
            errors, words = count(recipe.data.valid)
            found["valid"] = 100.0 * errors / max(1, words)
        if recipe.data.test:
            errors, words = (sum(each) for each in zip(*map(count, recipe.data.test), strict=True))
            found |= {"test": 100.0 * errors / max(1, words), "errors": errors, "words": words}
        return found


def compared_by(section: CompareConfig, score: Metric) -> Metric:
    """What a comparison is by, where models are scored by `score`."""
    return Metric(name="training loss", of_loss=True, beside=score.name) if section.by == "loss" else score


def check_comparison(tree: Tree, where: str) -> RecipeSubject:
    """The comparison of a recipe's tree; `where` names it in the ConfigError that lists all problems."""
    tree = dict(tree)
    problems, section = parse_section(tree.pop("compare", None))
    base = None
    try:
        base = check_recipe(tree, where)
    except ConfigError as error:
        problems += _lines(error)
    if base is not None and section is not None:
        subject = RecipeSubject(tree, section, where, base, compared_by(section, _WORD_ERRORS))
        problems += _row_problems(subject)
        if not problems:
            return subject
    raise refused(problems, f"comparison {where}")


def _row_problems(subject: RecipeSubject) -> list[str]:
    """What is wrong with single arms, and with sets that are needed to compare and to tune."""
    section, data = subject.section, subject.base.data
    found: dict[str, None] = {}
    for row in section.rows:
        try:
            rates = section.rates_of(section.all_arms[row.arm], subject.own_rate(row))
        except ConfigError as error:
            found |= {f"compare.arms.{row.arm}: {line}": None for line in _lines(error)}
            continue
        if len(rates) > 1 and data.valid is None and not subject.metric.of_loss:
            found["data.valid: rates are chosen on a validation set, and this recipe names none"] = None
    if not data.test and data.valid is None:
        found["data.test: a comparison needs a test set or a validation set, and this recipe names none"] = None
    return list(found)


def _lines(error: ConfigError) -> list[str]:
    """The problems in an error, without its first line."""
    return [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]


def refused(problems: Sequence[str], where: str) -> ConfigError:
    """The error that lists problems."""
    count = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
    return ConfigError(f"{where}: {count}\n" + "\n".join(f"  {problem}" for problem in problems))


@dataclass(frozen=True)
class Rated:
    """Makes an optimizer with its learning rates multiplied by a factor."""

    make: Callable[[list[nn.Parameter]], Optimizer]
    factor: float

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        optimizer = self.make(parameters)
        for group in optimizer.param_groups:
            group["lr"] *= self.factor
        return optimizer


_OF_THE_CELL = {"workload", "strategy", "options", "make_optimizer", "seed"}
_ARM_KEYS = [each.name for each in fields(Job) if each.name not in _OF_THE_CELL]


@dataclass(frozen=True)
class JobSubject:
    """Any job, or a function that makes one for a seed."""

    make: Job | Callable[[int], Job]
    section: CompareConfig
    metric: Metric
    validate: Scorer | None = None
    test: Scorer | None = None
    on: Cluster = field(default_factory=Cluster)
    threads: int = 1
    key: str = ""
    _probes: dict[int, str] = field(default_factory=dict, repr=False, compare=False)
    _jobs: dict[int, Job] = field(default_factory=dict, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_jobs": {}}  # each process makes its own

    def check(self) -> None:
        """Raises one ConfigError that lists all problems of the arms."""
        found: dict[str, None] = {}
        for row in self.section.rows:
            arm, where = self.section.all_arms[row.arm], f"arms.{row.arm}"
            keys = {**self.section.settings.get(row.setting, {}), **arm.keys}
            for name in keys.keys() - set(_ARM_KEYS):
                found[f"{where}: a job has no {name!r} to change; {did_you_mean(name, _ARM_KEYS)}"] = None
            choice = None if arm.strategy is None else arm.strategy.model_dump()
            found |= {f"{where}: {problem}": None for problem in strategy_problems(choice, row.learners)}
            if choice is None:
                try:
                    self._job(self.section.seeds[0]).validate(row.learners)
                except ConfigError as error:
                    found[f"{where}: {error}"] = None
            if (
                self.validate is None
                and not self.metric.of_loss
                and len(self.section.rates_of(arm, self.own_rate(row))) > 1
            ):
                found["validate: rates are chosen by a validation result; give a function or a workload"] = None
        if found:
            raise refused(list(found), "starling.compare")

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
        """Of settings, and of what a job does first: weights, loss and scores of the model before training."""
        if cell.seed not in self._probes:
            self._probes[cell.seed] = self._probe(cell.seed)
        job = self.job(cell, Memory())
        settings = [repr(getattr(job, name)) for name in [*_ARM_KEYS, "options", "seed"]]
        where = [self.section.engine, cell.learners, cell.rate, self.on.model_dump(mode="json"), self.key]
        return digest([self._probes[cell.seed], job.strategy.name, settings, where])

    def _probe(self, seed: int) -> str:
        job = self._job(seed)
        workload, model, threads = job.workload, job.workload.make_model(), torch.get_num_threads()
        state = hashlib.sha256()
        for name, value in model.state_dict().items():
            state.update(name.encode() + value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        optimizer = job.make_optimizer(list(model.parameters()))
        torch.set_num_threads(1)  # sums must not depend on the number of threads
        try:
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(seed)
                losses = [float(workload.loss(model, each).detach()) for each in workload.load(Ticket(0, 0, 0))]
            scores = self._scores(workload.make_model())
        finally:
            torch.set_num_threads(threads)
        first = [workload.num_batches(0), losses, scores, type(optimizer).__name__, repr(optimizer.defaults)]
        return digest([state.hexdigest(), first])

    def batches_key(self, cell: Cell) -> str:
        return str(cell.seed)

    def prepare(self, cells: Sequence[Cell], say: Say, bars: Bars) -> None: ...

    def job(self, cell: Cell, memory: Memory) -> Job:
        job, arm = self._job(cell.seed), self.section.all_arms[cell.arm]
        keys = {**self.section.settings.get(cell.setting, {}), **arm.keys}
        if arm.strategy is not None:
            keys |= {"strategy": arm.strategy.strategy, "options": arm.strategy.options}
        factor = cell.rate / self.own_rate(cell.row)
        return replace(job, make_optimizer=Rated(job.make_optimizer, factor), **keys)

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
    if not isinstance(scorer, Workload):
        return float(scorer(model))
    batches = [each for index in range(scorer.num_batches(0)) for each in scorer.load(Ticket(0, index, index))]
    weights = [scorer.weight(each) for each in batches]
    losses = [weight * float(scorer.loss(model, each)) for weight, each in zip(weights, batches, strict=True)]
    return math.fsum(losses) / math.fsum(weights)


Subject = RecipeSubject | JobSubject
"""What is compared: it turns a cell into a job, and scores the model. Processes that compute cells get a copy."""
