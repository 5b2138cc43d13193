"""What Starling 0.2 wrote, later versions read: a recipe, prepared data and an experiment are kept in tests/data.

They were made by `python tests/data/make_kept.py FOLDER`. Do not make them again: a change that cannot read them breaks
what users have.
"""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from starling.checkpoint.reader import latest, load
from starling.cli import app
from starling.configuration import differing
from starling.errors import ConfigError
from starling.experiment.record import audit
from starling.speech.check.findings import HEARD, KINDS
from starling.speech.recipe import check_recipe, load_recipe, load_resolved
from starling.speech.recogniser import Recogniser
from starling.speech.store import SpeechSet


def starling(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_a_kept_recipe_loads(kept: Path) -> None:
    """And is what the experiment was trained with, every key but those whose defaults have changed since."""
    recipe = load_recipe(kept / "kept.yaml")
    resolved = load_resolved(kept / "exp" / "kept" / "config.yaml")
    changed = list(differing(recipe.model_dump(mode="json"), resolved.model_dump(mode="json")))
    before = tuple(each for each in KINDS if each not in HEARD)  # kinds that need a model are new
    assert sorted(key for key, _, _ in changed) == ["data.check.drop", "data.check.kinds", "data.filter.on_bad"]
    assert ("data.filter.on_bad", "skip", "fail") in changed
    assert resolved.data.check.kinds == before
    assert set(recipe.data.check.drop) - set(resolved.data.check.drop) == set(HEARD)
    assert (resolved.format, resolved.learners, resolved.strategy.name) == (2, 2, "adpsgd")


def test_a_kept_checkpoint_loads(kept: Path) -> None:
    """Every learner's state, for as many learners and for others; by the version that is written in it.

    Version 0.2 did not write with which strategy it trained, so all learners begin from the consensus.
    """
    checkpoint = load(latest(kept / "exp" / "kept"))
    assert (checkpoint.manifest.format, checkpoint.manifest.starling) == (6, "0.2.0")
    assert checkpoint.manifest.learners == 2
    strategy = load_resolved(kept / "exp" / "kept" / "config.yaml").strategy.described
    states = [checkpoint.start(rank, world, strategy) for world in (2, 3) for rank in range(world)]
    assert all(torch.equal(state.weights, checkpoint.consensus()) for state in states)
    assert bool(torch.isfinite(checkpoint.consensus()).all())
    assert "does not say under which strategy" in checkpoint.what_changed(2, strategy)
    states = [checkpoint.learner(rank) for rank in range(2)]
    assert all(bool(torch.isfinite(state.weights).all()) for state in states)


def test_a_kept_model_hears_what_it_heard(kept: Path) -> None:
    """The texts that it recognised when it was kept, to the letter."""
    recogniser = Recogniser.load(load(latest(kept / "exp" / "kept")).model_folder)
    heard = json.loads((kept / "heard.json").read_text(encoding="utf-8"))
    assert heard
    assert recogniser.recognise(SpeechSet.open(kept / "data" / "test")) == heard


def test_kept_data_need_no_new_preparation(kept: Path) -> None:
    """The digest of their settings is what it was."""
    code, said, errors = starling("prepare", str(kept / "kept.yaml"))
    assert code == 0, errors
    assert said.count(", kept") == 2 and "written" not in said


def test_a_kept_experiment_can_be_audited_and_scored(kept: Path) -> None:
    """By the commands that read it."""
    code, said, errors = starling("audit", "exp/kept")
    assert code == 0, errors
    assert "exactly once" in said
    code, said, errors = starling("evaluate", "exp/kept")
    assert code == 0, errors
    assert "%WER" in said


def test_a_kept_experiment_can_be_scored_through_codecs(kept: Path) -> None:
    """As sets of their own, beside the clean one: a rate that holds one of the two tones makes it deaf to the other."""
    assert starling("evaluate", "exp/kept", "--greedy")[0] == 0
    code, said, errors = starling(
        "evaluate", "exp/kept", "--greedy", "--condition", "rate-1000", "--condition", "rate-4000"
    )
    assert code == 0, errors
    assert [line for line in said.splitlines() if line.startswith("test")] == ["test@rate-1000", "test@rate-4000"]
    code, said, errors = starling("score", "exp/kept", "--by", "speaker")
    assert code == 0, errors
    lines = said.splitlines()
    rates = {name: lines[lines.index(name) + 3] for name in ("test", "test@rate-1000", "test@rate-4000")}
    assert rates["test"] == rates["test@rate-4000"] != rates["test@rate-1000"]
    assert "all by set" in said
    code, _, errors = starling("evaluate", "exp/kept", "--condition", "telefone")
    assert code == 2 and "--condition: 'telefone' is not a codec; known are telephone, gsm" in errors


def test_an_experiment_of_an_older_version_is_refused_by_name(kept: Path) -> None:
    """With what to do; nothing before 0.2 was released."""
    config = kept / "exp" / "kept" / "config.yaml"
    config.write_text(config.read_text(encoding="utf-8").replace("format: 2\n", "", 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.yaml: written before Starling 0\.2.*train the experiment again"):
        audit(kept / "exp" / "kept", print, None)  # type: ignore[arg-type]
    assert starling("evaluate", "exp/kept")[0] == 2


@pytest.mark.parametrize("number", [1, 3, "2", [2]])
def test_a_recipe_of_another_format_is_refused_by_name(kept: Path, number: object) -> None:
    """Before its keys are looked at."""
    with pytest.raises(ConfigError, match=r"recipe r\.yaml: format .*this version reads format 2; write its keys"):
        check_recipe({"format": number, "nonsense": 1}, "r.yaml")
