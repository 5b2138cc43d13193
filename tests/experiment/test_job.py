"""What a recipe says reaches the engines."""

from typing import Any

from starling.experiment.job import make_job
from starling.experiment.recipe import check_recipe
from starling.experiment.setup import make_ready

Tree = dict[str, Any]


def test_stragglers_of_the_recipe_are_those_of_the_job(tree: Tree) -> None:
    """On both engines, which run the same job."""
    tree["stragglers"] = {"slow": {1: "10x"}, "jitter": 0.1, "pauses": [{"learner": 0, "after": 2, "seconds": 3}]}
    recipe = check_recipe(tree, "r.yaml")
    job = make_job(recipe, make_ready(recipe, lambda line: None))
    assert job.stragglers == recipe.stragglers
    assert job.stragglers.slow == {1: 10.0}
