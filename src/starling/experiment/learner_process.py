"""The process of one learner: whatever ends it, the launcher hears of it."""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from starling.errors import StarlingError
from starling.experiment.recipe import load_recipe
from starling.experiment.train import train_as_learner
from starling.launch import rendezvous
from starling.launch.link import Link
from starling.report.progress import Say


def is_learner() -> bool:
    """Whether this process was started as one learner among several."""
    return rendezvous.is_learner()


def run(recipe: Path, overrides: Sequence[str], tell: Say, console: Console) -> None:
    """Train as a learner. Errors are sent to the launcher, if there is one, with where they came from in the log."""
    link = Link.from_environment()
    try:
        train_as_learner(load_recipe(recipe, overrides), link, tell, console)
    except Exception as error:
        if link is None:
            raise
        traceback.print_exc()
        link.send({"error": type(error).__name__, "message": str(error)})
        sys.exit(error.exit_code if isinstance(error, StarlingError) else 1)
