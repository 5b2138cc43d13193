"""The process of one learner of a recipe; errors are reported to the launcher."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from starling.launch import rendezvous
from starling.launch.link import Link, reported_errors
from starling.recipe.file import read_recipe
from starling.recipe.overrides import apply_overrides
from starling.reporting.progress import Say
from starling.speech.recipe import load_recipe
from starling.speech.training.train import train_as_learner


def is_learner() -> bool:
    """Whether this process was started as one learner among several."""
    return rendezvous.is_learner()


def run(recipe: Path, overrides: Sequence[str], tell: Say, console: Console) -> None:
    """Train as a learner."""
    link = Link.from_environment()
    with reported_errors(link):
        learners = rendezvous.number_of_learners()
        asked = apply_overrides(read_recipe(recipe), overrides).get("learners", learners)
        if asked != learners and rendezvous.is_first():
            console.print(f"{learners} learners were started; the recipe's learners={asked} is ignored")
        train_as_learner(load_recipe(recipe, overrides, learners), link, tell, console)
