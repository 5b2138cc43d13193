"""`starling compare` for recipes, and `starling.compare` for any PyTorch model and data."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from starling.comparing.compare import run_comparison
from starling.comparing.grid import CompareConfig, Rate, chosen_arms, parse_section
from starling.comparing.results import Metric
from starling.comparing.subject import Comparable, JobSubject, RecipeSubject, Scorer, compared_by
from starling.comparing.table import Comparison
from starling.engines.virtual.cluster import Cluster
from starling.errors import ConfigError
from starling.experiment.packing import is_importing_script
from starling.experiment.task import task_of
from starling.extras import require
from starling.recipe.file import Tree, apply_overrides, read_recipe
from starling.recipe.problems import refused
from starling.reporting.progress import Say
from starling.training.job import Job


def load_comparison(
    path: Path,
    overrides: Sequence[str] = (),
    strategies: Sequence[str] = (),
    command: str = "starling compare",
    **options: Any,
) -> RecipeSubject:
    """The comparison of a recipe file with `key=value` overrides.

    `strategies` are arms of its `compare:` section, or strategies; of the other `options` of that section, those that
    are not None replace the recipe's. Raises one ConfigError that lists all problems.
    """
    tree: Tree = apply_overrides(read_recipe(path), overrides)
    task = task_of(tree)
    task.require(command)
    if not isinstance(task, Comparable):
        raise ConfigError(f"recipe {path}: its task has no comparison of recipes; use starling.compare in Python")
    given = {key: value for key, value in options.items() if value is not None}
    section = tree.get("compare")
    if strategies:
        given["arms"] = chosen_arms(section, strategies)
    if given:
        tree["compare"] = {**(section if isinstance(section, dict) else {}), **given}
    return task.comparison(tree, str(path))


def compare_recipe(subject: RecipeSubject, tell: Say, console: Console) -> Comparison:
    """Compare the arms of a recipe in its folder, `exp/<name>`."""
    tree = subject.tree | {"compare": subject.section.model_dump(mode="json", exclude_none=True)}
    description = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return run_comparison(subject, subject.base.folder, description, tell, console)


def compare(
    job: Job | Callable[[int], Job],
    strategies: Sequence[str] | Mapping[str, str | Mapping[str, Any]],
    learners: int | Sequence[int] = 4,
    *,
    rates: Sequence[Rate] = (),
    seeds: Sequence[int] = (1, 2, 3),
    validate: Scorer | None = None,
    test: Scorer | None = None,
    higher_is_better: bool = False,
    limits: tuple[float | None, float | None] = (None, None),
    cluster: Cluster | None = None,
    threads: int = 1,
    name: str = "compare",
    exp: Path | str = "exp",
    key: str = "",
    console: Console | None = None,
    **options: Any,
) -> Comparison:
    """Compare strategies on any job, each at its own best learning rate. The same call continues what was interrupted.

    Args:
        job: What to train; or a function that makes it for a seed, needed unless its workload is a `DataWorkload`.
        strategies: Names; or arms by label, each a name or a mapping with `strategy`, `learners`, `rates`, `seeds`,
            `summary` and fields of the job.
        learners: Numbers of learners.
        rates: The grid that each arm is tuned over: learning rates, or multiples of the job's (`"0.5x"`).
        seeds: Of the first weights, the order of the data and the times of the cluster.
        validate: Chooses rates: a function of the trained model, or a workload, for its mean loss.
        test: What arms are compared by, and nothing is chosen by; None: the validation result.
        higher_is_better: Whether larger results are better, as accuracies are.
        limits: Results at which everything is right, and wrong: arms there are not compared.
        cluster: How fast simulated machines and links are.
        threads: Of a simulated cell, or of each real learner.
        name: The folder inside `exp` that keeps every finished cell.
        exp: Where experiments are.
        key: What else results depend on, for changes that a job's settings, first losses and scores do not show.
        console: Where progress goes; None: standard error.
        options: `baseline`, `target`, `engine`, `jobs`, `tuning_seeds`, `bracket`, `by`, as in a recipe's section
            `compare`.

    Raises:
        ConfigError: for all settings that cannot work, before anything is computed.
        Stopped: after SIGINT or SIGTERM; finished cells are kept.

    Example:
        >>> table = starling.compare(job, ["allreduce", "adpsgd"], [4, 16], rates=["0.5x", 1, "2x"])  # doctest: +SKIP
        >>> pandas.DataFrame(table.rows())  # doctest: +SKIP
    """
    require("compare", "starling.compare")
    scored = "test" if test is not None else "validation" if validate is not None else "training loss"
    metric = Metric(name=scored, higher_is_better=higher_is_better, all_right=limits[0], all_wrong=limits[1])
    section = _section({"learners": learners, "rates": rates, "seeds": seeds, "arms": _arms(strategies), **options})
    metric = compared_by(section, metric)
    subject = JobSubject(job, section, metric, validate, test, cluster or Cluster(), threads, key)
    subject.check()
    description = yaml.safe_dump({"compare": section.model_dump(mode="json", fallback=str)}, sort_keys=False)
    return run_comparison(subject, Path(exp) / name, description, lambda line: None, console or Console(stderr=True))


def _section(given: Tree) -> CompareConfig:
    """Raises ConfigError, also where another process imports the script that makes the call."""
    if is_importing_script():
        raise ConfigError(
            "starling.compare was called while another process imported this script; put the call under "
            '`if __name__ == "__main__":`'
        )
    problems, section = parse_section(given)
    if section is None:
        raise refused([problem.removeprefix("compare.") for problem in problems], "starling.compare")
    return section


def _arms(strategies: Sequence[str] | Mapping[str, str | Mapping[str, Any]]) -> Tree:
    if not isinstance(strategies, Mapping):
        return chosen_arms(None, [strategies] if isinstance(strategies, str) else strategies)
    return {label: {"strategy": arm} if isinstance(arm, str) else dict(arm) for label, arm in strategies.items()}
