"""`starling prepare`: converts a recipe's corpus to prepared sets, in one or several processes."""

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from starling.errors import ConfigError
from starling.report.progress import Bars, Say
from starling.runs.recipe.overrides import apply_overrides
from starling.runs.recipe.recipe import load_recipe
from starling.runs.training_set import prepare_all
from starling.speech.preparing.executors import Executor, InThisProcess, Processes

MAX_JOBS = 1024
_PLACE = re.compile(r"dask://(?P<place>\[?[A-Za-z0-9._:-]+\]?:\d{1,5})")


def prepare(recipe: Path, arguments: Sequence[str], tell: Say, console: Console, overwrite: bool = False) -> None:
    """Prepare the sets of a recipe.

    Of the arguments, `jobs` and `executor` say which processes do the work; the others change the recipe. With
    `overwrite`, sets that were prepared with other settings are replaced.

    Raises:
        ConfigError: An argument or the recipe is wrong; lists all problems.
        DataError: The corpus cannot be used.
    """
    own = [each for each in arguments if each.partition("=")[0].strip() in ("jobs", "executor")]
    problems = []
    try:
        executor = executor_of(own)
    except ConfigError as error:
        problems.append(str(error))
    try:
        loaded = load_recipe(recipe, [each for each in arguments if each not in own])
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    with executor, Bars(console) as bars:
        described = prepare_all(loaded, bars, executor, overwrite)
    tell(described)


def executor_of(arguments: Sequence[str]) -> Executor:
    """The executor that `jobs=...` and `executor=...` select; it is not started yet.

    Raises:
        ConfigError: A value is wrong, the two contradict each other, or Dask is not installed.
    """
    given = apply_overrides({}, arguments)
    jobs, name = given.get("jobs"), given.get("executor")
    problems = []
    if "jobs" in given and (isinstance(jobs, bool) or not isinstance(jobs, int) or not 1 <= jobs <= MAX_JOBS):
        problems.append(f"jobs: must be a whole number from 1 to {MAX_JOBS}, got {jobs!r}")
    place = _PLACE.fullmatch(name) if isinstance(name, str) else None
    if "executor" in given and name != "dask" and place is None:
        problems.append(
            f"executor: must be dask (a cluster of `jobs` processes on this machine) or dask://HOST:PORT (the "
            f"scheduler of a cluster), got {name!r}; without it, `jobs` processes are started on this machine"
        )
    if place is not None and "jobs" in given:
        problems.append(f"jobs: the cluster at {name} has its own number of workers; remove jobs or executor")
    if problems:
        raise ConfigError("\n".join(problems))
    if name is not None:
        from starling.speech.preparing.dask import Dask

        return Dask(place["place"] if place else None, jobs or 1)
    return Processes(jobs) if jobs is not None and jobs > 1 else InThisProcess()
