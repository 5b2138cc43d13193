"""Training may begin with another experiment's weights."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from starling.consensus import consensus
from starling.engines.virtual.engine import VirtualEngine
from starling.errors import CheckpointError, ConfigError
from starling.experiment.claim import set_up_and_claim
from starling.experiment.folder import ExperimentFolder
from starling.speech.recipe import Recipe, check_recipe, fingerprints
from starling.speech.recogniser import Recogniser
from starling.speech.task import SPEECH
from starling.speech.training.set_up import ModelWriter, load_workload, make_job, set_up

Tree = dict[str, Any]


def ready(tree: Tree, **changes: Any) -> tuple[Recipe, dict[str, torch.Tensor], list[str]]:
    """A prepared recipe, the initial weights of training, and the messages."""
    recipe = check_recipe({**tree, **changes}, "r.yaml")
    said: list[str] = []
    folder = set_up_and_claim(SPEECH, recipe, said.append)
    return recipe, load_workload(recipe, folder).make_model().state_dict(), said


def test_training_begins_with_the_other_weights(tree: Tree) -> None:
    """All weights are taken if the tokens are the same, whatever the seed."""
    first, weights, _ = ready(tree, name="first")
    _, fresh, _ = ready(tree, name="fresh", seed=2)
    _, warm, said = ready(tree, name="warm", seed=2, warm_start=str(first.folder / "initial"))
    assert all(torch.equal(warm[name], weights[name]) for name in weights)
    assert not all(torch.equal(fresh[name], weights[name]) for name in weights)
    assert any("numbers" in line and line.startswith("warm start from") for line in said)


def test_tokens_that_both_have_keep_their_rows(tree: Tree) -> None:
    """These are the blank and the letters of the songs; the rows of new letters are new, and all lower layers are taken
    over."""
    first, weights, _ = ready(tree, name="first")
    own = Recogniser.load(first.folder / "initial").tokenizer.names
    alphabet = " ABCDEFGHIJKLMNOPQRSTUVWXYZ'ÄÖÜ"
    tokens = {"alphabet": alphabet}
    start = str(first.folder / "initial")
    recipe, warm, said = ready(tree, name="warm", tokens=tokens, warm_start=start, seed=2)
    _, fresh, _ = ready(tree, name="fresh", tokens=tokens, seed=2)
    names = Recogniser.load(recipe.folder / "initial").tokenizer.names
    assert own != names
    for row, name in enumerate(names):
        source = weights["output.weight"][own.index(name)] if name in own else fresh["output.weight"][row]
        assert torch.equal(warm["output.weight"][row], source)
    assert all(torch.equal(warm[name], weights[name]) for name in weights if not name.startswith("output."))
    kept = f"in the output layer {len(own) - 1} of {len(alphabet)} tokens keep their rows; new: 'B', 'C', "
    assert any(kept in line for line in said)


def test_a_model_of_other_sizes_is_refused_with_what_differs(tree: Tree) -> None:
    """It is refused before any process starts; nothing is left behind."""
    first, _, _ = ready(tree, name="first")
    with pytest.raises(ConfigError, match=r"warm_start: .* only the outputs may differ, .*\[.*\] here, \[.*\] there"):
        ready(tree, name="wide", model={"preset": "small"}, warm_start=str(first.folder / "initial"))
    assert not (first.exp / "wide").exists()


def test_an_experiment_without_a_model_is_refused(tree: Tree, tmp_path: Path) -> None:
    """The error names it."""
    with pytest.raises(CheckpointError, match="nothing-here"):
        ready(tree, warm_start=str(tmp_path / "nothing-here"))


def test_tokens_match_by_their_text_and_not_by_their_number(tree: Tree) -> None:
    """As many tokens in another order: each row moves to its token's place."""
    first, weights, _ = ready(tree, name="first", tokens={"alphabet": " ADEFIMOR"})
    start = str(first.folder / "initial")
    _, warm, _ = ready(tree, name="warm", tokens={"alphabet": " RADEFIMO"}, warm_start=start, seed=2)
    order = [0, *(1 + " ADEFIMOR".index(letter) for letter in " RADEFIMO")]
    for name in ("output.weight", "output.bias"):
        assert torch.equal(warm[name], weights[name][order])


def _outputs(folder: Path) -> torch.Tensor:
    """Log-probabilities for some noise."""
    features = torch.randn(2, 60, 40, generator=torch.Generator().manual_seed(1))
    model = Recogniser.load(folder).model.eval()
    with torch.no_grad():
        log_probs: torch.Tensor = model(features, torch.tensor([60, 41]))[0]
    return log_probs


@pytest.mark.wide
@pytest.mark.parametrize(
    ("model", "wider"),
    [
        ({"name": "blstm", "preset": "tiny", "layers": 2}, {"hidden": 48}),
        ({"name": "lstm", "preset": "tiny", "layers": 2, "bottleneck": 8}, {"hidden": 40, "bottleneck": 12}),
        ({"name": "transformer", "preset": "tiny"}, {"feed_forward": 300}),
    ],
    ids=["blstm", "lstm", "transformer"],
)
def test_a_wider_model_begins_with_the_outputs_of_the_narrow_one(
    tree: Tree, model: dict[str, Any], wider: dict[str, Any]
) -> None:
    """New units have weights, but no old unit hears them yet; the lines report what was taken in part."""
    first, _, _ = ready(tree, name="first", model=model)
    start = {"experiment": str(first.folder / "initial"), "sizes": "partial"}
    recipe, warm, said = ready(tree, name="wide", model=model | wider, warm_start=start, seed=2)
    narrow = _outputs(first.folder / "initial")
    torch.testing.assert_close(_outputs(recipe.folder / "initial"), narrow, rtol=0.0, atol=1e-5)
    assert any(line.startswith("taken in part: ") and "] of [" in line for line in said)
    assert not any(line.startswith(("new: ", "not used: ")) for line in said)
    _, fresh, _ = ready(tree, name="fresh", model=model | wider, seed=2)
    assert not torch.equal(warm["output.weight"], fresh["output.weight"])


def test_a_deeper_a_narrower_and_a_shallower_model_take_what_fits(tree: Tree) -> None:
    """Layers match by name: those that only one of them has are new or not used."""
    model = {"name": "lstm", "preset": "tiny", "layers": 2}
    first, weights, _ = ready(tree, name="first", model=model)
    start = {"experiment": str(first.folder / "initial"), "sizes": "partial"}
    _, deeper, said = ready(tree, name="deep", model=model | {"layers": 3}, warm_start=start, seed=2)
    assert all(torch.equal(deeper[name], weights[name]) for name in weights)
    assert any(line.startswith("new: layers.2.weight_ih_l0") for line in said)
    _, shallow, said = ready(tree, name="shallow", model=model | {"layers": 1, "hidden": 20}, warm_start=start, seed=2)
    assert any(line.startswith("not used: layers.1.") for line in said)
    gates = weights["layers.0.weight_hh_l0"].view(4, 32, 32)[:, :20, :20]
    assert torch.equal(shallow["layers.0.weight_hh_l0"].view(4, 20, 20), gates)


def test_other_features_leave_the_first_layer_new_and_sizes_are_strict_or_partial(tree: Tree) -> None:
    """The columns of 60 bands differ in meaning from those of 40."""
    first, weights, _ = ready(tree, name="first")
    start = {"experiment": str(first.folder / "initial"), "sizes": "partial"}
    _, warm, said = ready(tree, name="warm", features={"num_mels": 60}, warm_start=start, seed=2)
    assert any(line == "new: subsampling.convolutions.0.weight" for line in said)
    assert torch.equal(warm["layers.0.onward.weight_hh_l0"], weights["layers.0.onward.weight_hh_l0"])
    with pytest.raises(ConfigError, match=r"warm_start\.sizes.*input should be 'strict' or 'partial'"):
        ready(tree, warm_start=start | {"sizes": "some"})


def test_a_strict_warm_start_is_written_as_its_path(tree: Tree) -> None:
    """Experiments and finished cells of earlier versions therefore stay the same."""
    given = check_recipe({**tree, "warm_start": "exp/other"}, "r.yaml")
    assert given.model_dump(mode="json")["warm_start"] == "exp/other"
    mapping = {"experiment": "exp/other", "sizes": "partial"}
    assert check_recipe({**tree, "warm_start": mapping}, "r.yaml").model_dump(mode="json")["warm_start"] == mapping
    assert check_recipe(tree, "r.yaml").model_dump(mode="json")["warm_start"] is None


def test_a_recipe_freezes_for_the_whole_run_and_until_then(tree: Tree, tmp_path: Path) -> None:
    """Three learners under `adpsgd`, whose means would round: what is frozen keeps its bits in the model that is saved,
    and is no part of what learners exchange. The lines say what is frozen."""
    freeze = ["subsampling", {"parameters": "layers", "until": {"epochs": 5}}]
    changes = {"freeze": freeze, "learners": 3, "strategy": "adpsgd", "budget": {"steps": 9}}
    recipe, before, said = ready(tree, name="frozen", **changes)
    assert any(line.startswith("frozen for the whole run: subsampling, ") for line in said)
    assert any(line.startswith("frozen until 5 epochs: layers, ") for line in said)
    folder = ExperimentFolder(recipe.folder)
    states = VirtualEngine(make_job(recipe, folder), 3).run().states
    weights = consensus([state.weights for state in states], [state.kept for state in states])
    frozen = sum(value.numel() for name, value in before.items() if name.startswith("subsampling."))
    assert len(weights) == sum(value.numel() for value in before.values()) - frozen
    ModelWriter(folder.initial, recipe.freeze)(tmp_path / "model", weights, {})
    after = Recogniser.load(tmp_path / "model").model.state_dict()
    for name, value in after.items():
        if name.startswith("subsampling."):
            assert torch.equal(value, before[name])
        elif name.startswith("layers."):
            torch.testing.assert_close(value, before[name], rtol=1e-6, atol=0.0)  # the mean of three rounds
        else:
            assert not torch.equal(value, before[name])


def test_what_is_frozen_for_good_is_a_part_of_the_model_that_a_resume_keeps(tree: Tree) -> None:
    """What is thawed later may be changed; a string is a list of one; unknown names are refused in set-up."""
    plain, thawed, frozen = (
        check_recipe({**tree, "freeze": each}, "r.yaml")
        for each in ([], {"parameters": "layers", "until": {"fraction": 0.3}}, "layers")
    )
    ready(tree, name="prepared")
    assert fingerprints(plain) == fingerprints(thawed)
    assert fingerprints(plain)["model"] != fingerprints(frozen)["model"]
    with pytest.raises(ConfigError, match=r"freeze: 'layer' fits no parameter; the model's modules: subsampling\."):
        ready(tree, freeze="layer")


def test_phones_that_both_have_keep_their_rows(tree: Tree, tmp_path: Path) -> None:
    """They match by name, whatever their number; a source without phones gives the rest."""
    models = []
    for name, lines in (("old", "DO  d o\nRE  r e\nMI  m i\n"), ("new", "DO  d o\nRE  a e\nMI  m i\n")):
        path = tmp_path / f"{name}.txt"
        path.write_text(lines, encoding="utf-8")
        models.append({"preset": "tiny", "phones": {"lexicon": str(path)}})
    first, weights, said = ready(tree, name="first", model=models[0])
    assert "6 phones of 3 words" in said
    assert any(
        "1 of 4 words have no known phones (FA); utterances with such words are left out" in line for line in said
    )
    plain, _, _ = ready(tree, name="plain", model={"preset": "tiny"})
    start = {"warm_start": str(first.folder / "initial"), "seed": 2}
    recipe, warm, _ = ready(tree, name="warm", model=models[1], **start)
    _, fresh, _ = ready(tree, name="fresh", model=models[1], seed=2)
    old, new = (Recogniser.load(each.folder / "initial").phones for each in (first, recipe))
    assert old is not None
    assert new is not None
    row = "phones.output.weight"
    for number, name in enumerate(new.outputs):
        source = weights[row][old.outputs.index(name)] if name in old.outputs else fresh[row][number]
        assert torch.equal(warm[row][number], source)
    assert not torch.equal(warm[row], fresh[row])
    _, warm, said = ready(tree, name="other", model=models[1], warm_start=str(plain.folder / "initial"), seed=2)
    assert torch.equal(warm[row], fresh[row])
    assert any(line.startswith("new: phones.") for line in said)


def test_a_resumed_run_keeps_its_phones(tree: Tree, tmp_path: Path) -> None:
    """It does so whatever the lexicon says now, because the rows of its outputs mean these."""
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text("DO  d o\nRE  r e\nMI  m i\n", encoding="utf-8")
    first, _, _ = ready(tree, name="first", model={"preset": "tiny", "phones": {"lexicon": str(lexicon)}})
    shutil.copytree(first.folder / "initial", tmp_path / "before" / "initial")
    lexicon.write_text("DO  t o\n", encoding="utf-8")
    again = first.model_copy(update={"resume": tmp_path / "before" / "checkpoints" / "step-00000001"})
    set_up(again, ExperimentFolder(tmp_path / "again"), lambda line: None)
    old, new = (Recogniser.load(each / "initial").phones for each in (first.folder, tmp_path / "again"))
    assert old is not None
    assert new is not None
    assert (new.names, new.encode("DO RE MI")) == (old.names, old.encode("DO RE MI"))
