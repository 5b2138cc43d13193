"""The valid set is scored during training, at the ends of selected epochs, and the best model is kept."""

import json
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from starling.checkpoint.state import LearnerState
from starling.checkpoint.writer import CheckpointWriter
from starling.experiment.claim import set_up_and_claim
from starling.experiment.folder import ExperimentFolder
from starling.experiment.observers import save_choice
from starling.reporting.epochs import Score
from starling.speech.models import count_parameters
from starling.speech.recipe import Recipe, check_recipe, fingerprints
from starling.speech.recogniser import Recogniser
from starling.speech.scoring import ErrorCounts, ErrorRates
from starling.speech.task import SPEECH
from starling.speech.trained import load_recogniser
from starling.speech.training import validate
from starling.speech.training.set_up import ModelWriter
from starling.speech.training.validate import Validation, best_model
from starling.training.job import EpochReport, Spent
from starling.workload import Position, Ticket

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
    """It is given in epochs, or in steps if an epoch was not completed; every second epoch, if the recipe says so."""
    tree["data"]["valid"] = "test"
    recipe = check_recipe({**tree, "validate_every": 2}, "r.yaml")
    folder = set_up_and_claim(SPEECH, recipe, lambda line: None)
    weights = torch.zeros(count_parameters(Recogniser.load(folder.initial).model))
    writer = CheckpointWriter(folder.checkpoints, lambda name: 1, ModelWriter(folder.initial), fingerprints(recipe))
    saved = writer.save(LearnerState(0, 1, Position(position), 0.0, weights, {}, {}, epochs_ended=epochs))
    assert saved is not None
    said: list[str] = []
    with Validation(recipe, folder, said.append, lambda score: said.append(score.told)) as validation:
        validation.saved(saved.folder)
    assert [line[: len(beginning or "")] for line in said] == ([beginning] if beginning else [])


def test_a_checkpoint_that_is_gone_before_it_is_scored_is_told_without_an_error_of_the_system(
    tree: Tree,
) -> None:
    """Short epochs may replace it while another model is being scored."""
    tree["data"]["valid"] = "test"
    recipe = check_recipe(tree, "r.yaml")
    folder, said = set_up_and_claim(SPEECH, recipe, lambda line: None), list[str]()
    with Validation(recipe, folder, said.append, lambda score: None) as validation:
        validation.saved(folder.checkpoints / "step-00000018", is_last=True)
    assert said == ["validation of step-00000018 was skipped: newer checkpoints replaced it before it could be scored"]


def test_the_final_model_has_its_turn_and_the_test_sets_the_last_word(tree: Tree) -> None:
    """A verdict on an older model must not replace its own."""
    tree["data"]["valid"] = "test"
    recipe = check_recipe({**tree, "validate_every": 5}, "r.yaml")
    folder, scores = set_up_and_claim(SPEECH, recipe, lambda line: None), list[Score]()
    with Validation(recipe, folder, print, scores.append) as validation:
        validation.saved(write(folder, epoch=1), is_last=True)
    assert [score.epochs for score in scores] == [1]
    assert validate.verdict_on_test(recipe, folder, {}) is None
    assert validate.verdict_on_test(recipe, folder, {"test": 100.0, "other": 20.0}) == ""


def write(folder: ExperimentFolder, epoch: int) -> Path:
    """Write a model to be scored, from the end of an epoch of four mini-batches."""
    weights = torch.zeros(count_parameters(Recogniser.load(folder.initial).model))
    writer = CheckpointWriter(folder.validation, lambda name: 1, ModelWriter(folder.initial), {}, 1000, 1)
    saved = writer.save(
        LearnerState(0, 1, Position(Ticket(epoch, 0, 4 * epoch)), 0.0, weights, {}, {}, epochs_ended=epoch)
    )
    assert saved is not None
    return saved.folder


def ready(tree: Tree) -> tuple[Recipe, ExperimentFolder]:
    """A prepared recipe with a valid set."""
    tree["data"]["valid"] = "test"
    recipe = check_recipe(tree, "r.yaml")
    return recipe, set_up_and_claim(SPEECH, recipe, lambda line: None)


def scored(wer: int) -> ErrorRates:
    """Rates of 100 words with one character each."""
    counts = ErrorCounts(0, wer, 0, 100)
    return ErrorRates(counts, counts, 1, 1, None, ())


def test_the_best_model_is_kept_also_across_a_resume(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a recogniser with its score, ready for use; a model that is not better does not replace it."""
    recipe, folder = ready(tree)
    rates: Iterator[int] = iter([50, 40, 60, 45])
    monkeypatch.setattr(validate, "recognised", lambda recogniser, folder: scored(next(rates)))
    for epoch, best in ((1, "step-00000004"), (2, "step-00000008"), (3, "step-00000008"), (4, "step-00000008")):
        with Validation(recipe, folder, lambda line: None, lambda score: None) as validation:
            validation.saved(write(folder, epoch))
        kept = best_model(folder)
        assert kept is not None
        assert [path.name for path in folder.best.iterdir()] == [kept.name] == [best]
    assert json.loads((kept / "score.json").read_text()) == {"set": "test", "wer": 40.0, "steps": 8, "epochs": 2}
    Recogniser.load(kept)


def test_training_ends_when_the_error_has_not_fallen_for_as_long_as_patience_allows(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs count since the last lower error; an error of 100 %, with which training begins, may persist for longer. A
    resumed run counts from the best model of the previous run."""
    recipe, folder = ready({**tree, "patience": 3})
    rates = {1: 100, 5: 100, 6: 50, 8: 50, 9: 40, 11: 45, 12: 41}
    of_score = iter(rates.values())
    monkeypatch.setattr(validate, "recognised", lambda recogniser, folder: scored(next(of_score)))
    enough = {}
    for epoch in rates:
        with Validation(recipe, folder, lambda line: None, lambda score: None) as validation:
            assert not validation.is_enough()
            validation.saved(write(folder, epoch))
        enough[epoch] = validation.is_enough()
    assert [epoch for epoch, is_enough in enough.items() if is_enough] == [12]


def test_without_patience_only_the_budget_ends_a_run(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds however long the error has not fallen."""
    recipe, folder = ready(tree)
    monkeypatch.setattr(validate, "recognised", lambda recogniser, folder: scored(50))
    for epoch in (1, 1000):
        with Validation(recipe, folder, lambda line: None, lambda score: None) as validation:
            validation.saved(write(folder, epoch))
    assert not validation.is_enough()


@pytest.mark.wide
@pytest.mark.parametrize(("number", "mean"), [(None, 5.0), (1, 7.0), (2, 6.0), (9, 4.0)])
def test_the_mean_of_the_newest_checkpoints_is_scored(tree: Tree, number: int | None, mean: float) -> None:
    """The mean covers as many as the recipe says, or as requested; all, if there are fewer."""
    recipe, folder = ready({**tree, "average": 3, "checkpoints": {"keep": 5}})
    model = Recogniser.load(folder.initial).model
    writer = CheckpointWriter(
        folder.checkpoints, lambda name: 1, ModelWriter(folder.initial), fingerprints(recipe), keep=5
    )
    for step, weight in enumerate((1.0, 3.0, 5.0, 7.0), 1):
        weights = torch.full((count_parameters(model),), weight)
        writer.save(LearnerState(0, 1, Position(Ticket(step, 0, 4 * step)), 0.0, weights, {}, {}, epochs_ended=step))
    found = load_recogniser(folder.path, average=number)
    assert {float(each) for each in torch.cat([each.detach().flatten() for each in found.model.parameters()])} == {mean}


def test_scoring_takes_a_twentieth_of_the_time_at_most(tree: Tree) -> None:
    """After a scoring that took 100 s, none begins for 1,900 s: the model stays, so that learners write no other, and
    one that comes all the same goes unscored; only that of the end is scored. A run does not wait for that time."""
    recipe, folder = ready(tree)
    lines = SimpleQueue[str]()
    times = iter(range(0, 10_000, 100))
    choice = save_choice(None, 1, folder, lambda name, own: own)
    second_end = EpochReport(0, 1, 4, 1.0, Spent())

    def put(score: Score) -> None:
        lines.put(score.told)

    with Validation(recipe, folder, lines.put, put, lambda: float(next(times))) as validation:
        assert choice(second_end) == "model"
        first = write(folder, 1)
        validation.saved(first)
        assert lines.get(timeout=60).startswith("after epoch 1, test: %WER")
        assert lines.get(timeout=60) == "scoring test took 1 min 40 s, so it is not scored for the next 31 min 40 s"
        assert first.is_dir()
        assert choice(second_end) == ""
        second = write(folder, 2)
        validation.saved(second)
        assert not second.exists()
        validation.saved(write(folder, 3), is_last=True)
    assert lines.get(timeout=60).startswith("after epoch 3, test: %WER")
    assert lines.empty()
    assert not folder.validation.exists()


def test_learners_agree_on_what_is_kept_of_an_epoch(tree: Tree) -> None:
    """The answer of the first learner applies to all, however the folder looks to the others by then; the end of the
    run, and every third epoch if the recipe says so, is a checkpoint."""
    _, folder = ready(tree)
    said: dict[str, str] = {}
    early, late = (save_choice(3, 1, folder, said.setdefault) for _ in range(2))
    ends = [EpochReport(0, epoch, 4, 1.0, Spent(), is_last=epoch == 4) for epoch in range(5)]
    kept = [early(ends[0])]
    write(folder, 1)
    kept += [early(end) for end in ends[1:]]
    assert kept == ["model", "", "checkpoint", "", "checkpoint"]
    assert [late(end) for end in ends] == kept
    assert [save_choice(None, None, folder, said.setdefault)(end) for end in ends] == ["", "", "", "", "checkpoint"]


def test_a_failed_search_for_the_cause_costs_no_score(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run and its scores are worth more than the reason why a model does not work."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("nothing there")

    monkeypatch.setattr(validate, "look", fail)
    recipe, folder = ready(tree)
    scores: list[Score] = []
    with Validation(recipe, folder, print, scores.append) as validation:
        validation.saved(write(folder, epoch=1))
    (score,) = scores
    assert score.wer == 100.0
    assert "does not work: an error rate of 100.0 % on test after 1 epoch " in score.verdict
    assert (
        "cause: unknown, as looking for it failed (ZeroDivisionError: nothing there); remedy: `starling check "
        in score.verdict
    )
