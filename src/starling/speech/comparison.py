"""Comparisons of recipes that train speech recognisers: prepares the files that cells share, and scores their
models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from starling.comparing.grid import Cell, CompareConfig, Metric, Row
from starling.comparing.subject import compared_by
from starling.configuration import checked, digest, refused
from starling.engines.virtual.cluster import Cluster
from starling.errors import ConfigError
from starling.experiment.folder import ExperimentFolder
from starling.recipe import Tree, merge
from starling.reporting.progress import Bars, Say
from starling.speech.recipe import Recipe, check_recipe
from starling.speech.recogniser import Recogniser
from starling.speech.trained import recognised
from starling.speech.training.set_up import make_job, set_up, set_up_like
from starling.speech.training.workload import Batch, SpeechWorkload
from starling.strategies.islands import NO_ISLANDS
from starling.training.job import Job
from starling.training.speeds import Stragglers
from starling.workload import Ticket

_WORD_ERRORS = Metric(name="WER %", all_right=0.0, all_wrong=95.0, diverged=100.0)
_MAX_BYTES = 512 * 2**20
"""Maximum size, in bytes, of the mini-batches that a process keeps in memory."""
_BY_LEARNER = {"batch_shares", "stragglers", "faults"}
"""Sections that name learners, which are checked with each row's number of learners."""
_NO_RESULT_DEPENDS_ON = {"name", "exp", "overwrite", "resume", "checkpoints", "validate_every"}


@dataclass(frozen=True)
class SpeechComparison:
    """The runs of a recipe with a `compare:` section. The folder `ready` contains the files that the runs share."""

    tree: Tree
    """The recipe without its `compare:` section."""
    section: CompareConfig
    where: str
    base: Recipe
    metric: Metric = _WORD_ERRORS
    _recipes: dict[Row | Cell, Recipe] = field(default_factory=dict, repr=False, compare=False)
    _prepared: dict[str, list[Path]] = field(default_factory=dict, repr=False, compare=False)
    """The folders that this process has prepared, by a digest of the settings that cells with the same folder share."""
    _loaded: dict[str, dict[Ticket, Sequence[Batch]]] = field(default_factory=dict, repr=False, compare=False)
    """The mini-batches that this process has loaded for the last `batches_key`."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loaded": {}}  # each process loads its own mini-batches

    @property
    def folder(self) -> Path:
        return self.base.folder

    @property
    def described(self) -> str:
        tree = self.tree | {"compare": self.section.model_dump(mode="json", exclude_none=True)}
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)

    def recipe(self, what: Row | Cell) -> Recipe:
        """The complete recipe of a cell, or of a row before any tuning. Raises ConfigError with its problems."""
        if what in self._recipes:
            return self._recipes[what]
        arm = self.section.all_arms[what.arm]
        tree = merge(merge(self.tree, self.section.settings.get(what.setting, {})), arm.keys)
        tree |= {"learners": what.learners}
        if what.arm not in self.section.arms and "stragglers" in tree:  # the baseline that is added
            given = checked(Stragglers, tree["stragglers"], "recipe", "stragglers.")
            tree["stragglers"] = given.among(what.learners).model_dump(mode="json")
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
        """The digest of everything on which the result of a cell depends. A result with a different digest is computed
        again."""
        recipe = self.recipe(cell).model_dump(mode="json", exclude=_NO_RESULT_DEPENDS_ON)
        if self.recipe(cell).island == NO_ISLANDS:
            del recipe["island"]  # results older than islands remain valid
        elif self.recipe(cell).island.tensor == 1:
            del recipe["island"]["tensor"]
        if not recipe["batch_shares"]:
            del recipe["batch_shares"]
        del recipe["data"]["cache"]
        return digest([recipe, self.section.engine])

    def batches_key(self, cell: Cell) -> str:
        """A key that is the same for all cells that load the same mini-batches."""
        recipe = self.recipe(cell)
        sections = {"seed", "data", "mixture", "partition", "tokens", "features", "augment", "batches"}
        content = recipe.model_dump(mode="json", include=sections)
        content["parts"] = recipe.num_workers if recipe.partition != "identical" else 1
        content["too short for"] = recipe.model.subsampling  # determines which utterances CTC leaves out
        return digest(content)

    def prepare(self, cells: Sequence[Cell], say: Say, bars: Bars) -> None:
        """Prepare the data and the models before training that the cells share."""
        seeded: dict[Path, list[Cell]] = {}
        for cell in cells:
            seeded.setdefault(self._ready(cell).path, []).append(cell)
        for path, own in seeded.items():
            folder, recipe = ExperimentFolder(path), self.recipe(max(own, key=lambda cell: cell.learners))
            # Folders are made from one another where possible. With CTC, the model determines which utterances are too
            # short and left out; alignments are shared by all models.
            done = self._prepared.setdefault(self._digest(own[0], with_model=recipe.loss != "frames"), [])
            if path in done:
                continue
            path.mkdir(parents=True, exist_ok=True)
            if done:
                set_up_like(recipe, ExperimentFolder(done[0]), folder)
            else:
                set_up(recipe, folder, say if len(self._prepared) == 1 else lambda line: None, bars)
            done.append(path)

    def _digest(self, cell: Cell, with_model: bool) -> str:
        sections = {"data", "mixture", "tokens", "features", "augment", "warm_start"}
        sections |= {"loss", "states", "alignment", "decoding"} | ({"model"} if with_model else set())
        return digest(self.recipe(cell).model_dump(mode="json", include=sections))[:12]

    def _ready(self, cell: Cell) -> ExperimentFolder:
        """The folder of cells that start from the same model and train on the same data."""
        return ExperimentFolder(self.base.folder / "ready" / f"{self._digest(cell, with_model=True)}-seed{cell.seed}")

    def job(self, cell: Cell) -> Job:
        recipe = self.recipe(cell)
        if self.section.engine == "processes":
            return make_job(recipe, self._ready(cell), cell.learners)
        job = make_job(recipe, self._ready(cell))
        if isinstance(job.workload, SpeechWorkload):  # other workloads load prepared frames from disk
            key = self.batches_key(cell)
            kept = self._loaded.get(key, {})
            self._loaded.clear()
            self._loaded[key] = kept
            return replace(job, workload=Remembered(job.workload, kept))
        return job

    def cluster(self, cell: Cell) -> Cluster:
        return self.recipe(cell).cluster

    def engine(self, cell: Cell) -> Mapping[str, Any]:
        """The engine options for learners in real processes."""
        return self.recipe(cell).engine.model_dump()

    def score(self, cell: Cell, model: nn.Module) -> dict[str, Any]:
        """The fields of a result that contain the scores of a trained model."""
        recipe = self.recipe(cell)
        recogniser = Recogniser.load(self._ready(cell).initial)
        recogniser.model.load_state_dict(model.state_dict())

        def count(name: str) -> tuple[int, int]:
            words = recognised(recogniser, recipe.data.set_folder(name)).words
            return words.errors, words.reference

        found: dict[str, Any] = {}
        if recipe.data.valid is not None:
            errors, words = count(recipe.data.valid)
            found["valid"] = 100.0 * errors / max(1, words)
        if recipe.data.test:
            errors, words = (sum(each) for each in zip(*map(count, recipe.data.test), strict=True))
            found |= {"test": 100.0 * errors / max(1, words), "errors": errors, "words": words}
        return found


class Remembered(SpeechWorkload):
    """A workload that keeps the mini-batches that it loads, up to 512 MiB, in addition to those in `kept`."""

    def __init__(self, workload: SpeechWorkload, kept: dict[Ticket, Sequence[Batch]]) -> None:
        super().__init__(workload.plan, workload.initial)
        self._kept = kept
        self._room = _MAX_BYTES - sum(batch.features.nbytes for batches in kept.values() for batch in batches)

    def load(self, ticket: Ticket) -> Sequence[Batch]:
        if ticket in self._kept:
            return self._kept[ticket]
        loaded = super().load(ticket)
        num_bytes = sum(batch.features.nbytes for batch in loaded)
        if num_bytes <= self._room:
            self._kept[ticket] = loaded
            self._room -= num_bytes
        return loaded


def check_comparison(tree: Tree, where: str) -> SpeechComparison:
    """The comparison in a recipe's tree. `where` names the tree in the ConfigError that lists all problems."""
    tree = dict(tree)
    given, problems, section, base = tree.pop("compare", None), [], None, None
    try:
        section = checked(CompareConfig, given, where, prefix="compare.")
    except ConfigError as error:
        missing = ["compare: missing; say which `arms` to compare, or give --strategies"]
        problems += missing if given is None else _lines(error)
    try:
        base = check_recipe({key: tree[key] for key in tree if key not in _BY_LEARNER}, where)
    except ConfigError as error:
        problems += _lines(error)
    if base is not None and section is not None:
        subject = SpeechComparison(tree, section, where, base, compared_by(section, _WORD_ERRORS))
        problems += _row_problems(subject)
        if not problems:
            return subject
    raise refused(problems, f"comparison {where}")


def _row_problems(subject: SpeechComparison) -> list[str]:
    """Problems with single arms, and with the sets that the comparison and its tuning need."""
    section, data = subject.section, subject.base.data
    found: dict[str, None] = {}
    for row in section.rows:
        try:
            rates = section.rates_of(row, subject.own_rate(row))
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
