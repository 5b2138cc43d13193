"""`starling prepare`: converts a recipe's corpus to prepared sets, in one or several processes."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from starling.errors import ConfigError
from starling.extras import require
from starling.launch.on_ray import connected
from starling.recipe.file import apply_overrides
from starling.reporting.progress import Bars, Say
from starling.speech.prepare import prepare_all
from starling.speech.preparing.executors import Executor, Processes
from starling.speech.preparing.on_ray import OnRay
from starling.speech.recipe import load_recipe

MAX_JOBS = 1024


def prepare(recipe: Path, arguments: Sequence[str], tell: Say, console: Console, overwrite: bool = False) -> None:
    """Prepare the sets of a recipe.

    Of the arguments, `jobs` and `executor` say which processes do the work; the others change the recipe. With
    `overwrite`, sets that were prepared with other settings are replaced.

    Raises:
        ConfigError: An argument or the recipe is wrong; lists all problems.
        DataError: The corpus cannot be used.
    """
    own = [each for each in arguments if each.partition("=")[0].strip() in ("jobs", "executor")]
    problems, address = [], "auto"
    try:
        loaded = load_recipe(recipe, [each for each in arguments if each not in own])
        address = loaded.launch.address
    except ConfigError as error:
        problems.append(str(error))
    try:
        executor = executor_of(own, address)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    with executor, Bars(console) as bars:
        described = prepare_all(loaded, bars, executor, overwrite)
    tell(described)


def executor_of(arguments: Sequence[str], address: str = "auto") -> Executor:
    """The executor that `jobs=...` and `executor=...` select; it is not started yet. `address` is that of the Ray
    cluster.

    Raises:
        ConfigError: A value is wrong, or the two contradict each other.
        MissingExtraError: Ray is not installed.
    """
    given = apply_overrides({}, arguments)
    jobs, name = given.get("jobs"), given.get("executor")
    problems = []
    if "jobs" in given and (isinstance(jobs, bool) or not isinstance(jobs, int) or not 1 <= jobs <= MAX_JOBS):
        problems.append(f"jobs: must be a whole number from 1 to {MAX_JOBS}, got {jobs!r}")
    if "executor" in given and name != "ray":
        problems.append(
            f"executor: must be ray (the Ray cluster at launch.address), got {name!r}; without it, `jobs` processes "
            "are started on this machine"
        )
    if "jobs" in given and name == "ray":
        problems.append("jobs: executor=ray uses all CPUs of the cluster; remove jobs or executor")
    if problems:
        raise ConfigError("\n".join(problems))
    if name == "ray":
        require("ray", "executor=ray")
        return OnRay(partial(connected, address, "executor=ray", "jobs=N needs none"))
    return Processes(jobs) if jobs is not None and jobs > 1 else Executor()
