"""What a recipe says reaches the engines."""

from pathlib import Path
from typing import Any

import pytest
import torch

from starling.engines.flat import FlatModel
from starling.experiment.job import ModelWriter, make_job
from starling.experiment.recipe import check_recipe
from starling.experiment.setup import make_ready
from starling.speech.recogniser import Recogniser

Tree = dict[str, Any]


def test_stragglers_of_the_recipe_are_those_of_the_job(tree: Tree) -> None:
    """On both engines, which run the same job."""
    tree["stragglers"] = {"slow": {1: "10x"}, "jitter": 0.1, "pauses": [{"learner": 0, "after": 2, "seconds": 3}]}
    recipe = check_recipe(tree, "r.yaml")
    job = make_job(recipe, make_ready(recipe, lambda line: None))
    assert job.stragglers == recipe.stragglers
    assert job.stragglers.slow == {1: 10.0}


def test_models_are_written_beside_the_training_without_a_trace_in_it(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making a network seeds the generators that a mini-batch draws dropout from at the same time, so none is made."""
    folder = make_ready(check_recipe(tree, "r.yaml"), lambda line: None)
    write = ModelWriter(folder.initial)
    flat = FlatModel(Recogniser.load(folder.initial).model, torch.device("cpu"))
    buffers = dict(flat.model.named_buffers())
    before = torch.get_rng_state()
    with monkeypatch.context() as patched:
        for place, name in ((torch, "manual_seed"), (torch, "set_rng_state"), (Recogniser, "create")):
            patched.setattr(place, name, lambda *args, name=name: pytest.fail(f"{name} was called"))
        for number in range(2):
            write(tmp_path / str(number), flat.weights + number, buffers)
    assert torch.equal(torch.get_rng_state(), before)
    for number in range(2):
        written = FlatModel(Recogniser.load(tmp_path / str(number)).model, torch.device("cpu"))
        assert torch.equal(written.weights, flat.weights + number)
