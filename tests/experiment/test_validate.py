"""The valid set is scored beside the training, at the checkpoints whose turn it is."""

from typing import Any

import pytest
import torch

from starling.checkpoint.state import LearnerState
from starling.checkpoint.writer import CheckpointWriter
from starling.experiment.job import ModelWriter
from starling.experiment.recipe import check_recipe, fingerprints
from starling.experiment.setup import make_ready
from starling.experiment.validate import Validation
from starling.speech.models import count_parameters
from starling.speech.recogniser import Recogniser
from starling.workload import Standing, Ticket

Tree = dict[str, Any]


@pytest.mark.parametrize(
    ("position", "epochs", "beginning"),
    [
        (Ticket(2, 1, 9), 2, "after epoch 2, test: %WER "),
        (Ticket(1, 3, 7), None, "after 7 steps, test: %WER "),
        (Ticket(1, 0, 4), 1, None),
    ],
    ids=["its turn", "the budget ended in the middle of an epoch", "not its turn"],
)
def test_a_score_says_after_how_much_training(
    tree: Tree, position: Ticket, epochs: int | None, beginning: str | None
) -> None:
    """In epochs, or in steps where an epoch was not completed; every second epoch, if the recipe says so."""
    tree["data"]["valid"] = "test"
    recipe = check_recipe({**tree, "validate_every": 2}, "r.yaml")
    folder = make_ready(recipe, lambda line: None)
    weights = torch.zeros(count_parameters(Recogniser.load(folder.initial).model))
    writer = CheckpointWriter(folder.checkpoints, lambda name: 1, ModelWriter(folder.initial), fingerprints(recipe))
    saved = writer.save(LearnerState(0, 1, Standing(position), 0.0, weights, {}, {}, epochs_ended=epochs))
    assert saved is not None
    said: list[str] = []
    with Validation(recipe, folder.tensorboard, said.append) as validation:
        validation.saved(saved.folder)
    assert [line[: len(beginning or "")] for line in said] == ([beginning] if beginning else [])
