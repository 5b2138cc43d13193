"""Settings of a recipe reach the engines."""

from pathlib import Path
from typing import Any

import pytest
import torch

from starling.errors import ConfigError
from starling.experiment.claim import set_up_and_claim
from starling.speech.recipe import check_recipe
from starling.speech.recogniser import Recogniser
from starling.speech.task import SPEECH
from starling.speech.training.set_up import ModelWriter, loading_processes, make_job
from starling.training.flat import FlatModel

Tree = dict[str, Any]


def test_stragglers_of_the_recipe_are_those_of_the_job(tree: Tree) -> None:
    """This holds on both engines, which run the same job."""
    tree["stragglers"] = {"slow": {1: "10x"}, "jitter": 0.1, "pauses": [{"learner": 0, "after": 2, "seconds": 3}]}
    recipe = check_recipe(tree, "r.yaml")
    job = make_job(recipe, set_up_and_claim(SPEECH, recipe, lambda line: None))
    assert job.stragglers == recipe.stragglers
    assert job.stragglers.slow == {1: 10.0}


def test_batch_shares_of_the_recipe_are_those_of_the_job_and_wrong_ones_are_listed(tree: Tree) -> None:
    """They are given by learner, like stragglers."""
    tree |= {"learners": 2, "strategy": "local-sgd", "batch_shares": {0: 3}}
    recipe = check_recipe(tree, "r.yaml")
    assert make_job(recipe, set_up_and_claim(SPEECH, recipe, lambda line: None)).batch_shares == {0: 3}
    for changes, message in (
        ({"batch_shares": {2: 3}}, r"batch_shares.2: there is no learner 2 among 2; the last is learner 1"),
        ({"batch_shares": {0: 0}}, r"batch_shares.0"),
        ({"strategy": "adpsgd"}, r"batch_shares: only where all learners step together; under adpsgd"),
        ({"strategy": "auto"}, r"batch_shares: strategy auto chooses for learners with equal shares"),
        ({"island": {"sharded": 2}}, r"batch_shares: the ranks of an island"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_recipe(tree | changes, "r.yaml")


def test_the_weighting_of_the_recipe_is_that_of_the_job(tree: Tree) -> None:
    """By default there is none."""
    recipe = check_recipe(tree | {"batches": {"max_duration": 5, "weighting": "utterances"}}, "r.yaml")
    assert make_job(recipe, set_up_and_claim(SPEECH, recipe, lambda line: None)).weighting == "utterances"
    assert check_recipe(tree, "r.yaml").batches.weighting == "batches"


def test_models_are_written_beside_the_training_without_a_trace_in_it(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making a network seeds the generators that a mini-batch draws dropout from at the same time, so none is made."""
    folder = set_up_and_claim(SPEECH, check_recipe(tree, "r.yaml"), lambda line: None)
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


@pytest.mark.parametrize(
    ("change", "cores", "expected"),
    [
        ({}, 2, 1),
        ({}, 64, 1),
        ({}, 1, 0),
        ({"learners": 64}, 2, 0),
        ({"budget": {"epochs": 1}}, 2, 0),
        ({"budget": {"minutes": 30}}, 2, 1),
        ({"budget": {"minutes": 0.1}}, 2, 0),
        ({"budget": {"epochs": 100, "steps": 20}}, 2, 0),
    ],
    ids=["a core each", "many cores", "half a core each", "64 learners", "one epoch", "30 min", "6 s", "20 steps"],
)
def test_loading_processes_are_chosen_from_cores_learners_and_budget(
    tree: Tree, change: Tree, cores: int, expected: int
) -> None:
    """Each learner gets one if it has a core and the run is long enough; here an epoch has 48 minutes of audio."""
    recipe = check_recipe({**tree, "budget": {"epochs": 10}} | change, "r.yaml")
    assert recipe.batches.num_workers == "auto"
    assert loading_processes(recipe, recipe.learners, cores, epoch=2880.0) == expected


def test_learners_of_an_object_store_get_what_cores_there_are(tree: Tree) -> None:
    """Its answers take long, but no core."""
    tree["data"]["remote"] = "s3://bucket/songs"
    recipe = check_recipe({**tree, "budget": {"epochs": 10}}, "r.yaml")
    assert [loading_processes(recipe, 2, cores, 2880.0) for cores in (1, 2, 6, 64)] == [0, 1, 2, 4]
