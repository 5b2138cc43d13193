"""Published encoders: miniature ones with random weights, as `transformers` writes them; nothing is downloaded."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console

from starling.errors import ConfigError
from starling.runs.experiment.claim import claim_folder
from starling.runs.recipe.recipe import check_recipe
from starling.runs.setup import load_workload, set_up, set_up_like
from starling.runs.simulate import simulate
from starling.speech.recogniser import Recogniser
from starling.workload import Ticket

Tree = dict[str, Any]


def miniature(folder: Path, norm: str = "layer") -> transformers.Wav2Vec2Model:
    """A wav2vec 2.0 of two layers in a folder."""
    torch.manual_seed(5)
    config = transformers.Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8, 8),
        conv_kernel=(10, 4, 4),
        conv_stride=(5, 4, 4),
        num_feat_extract_layers=3,
        feat_extract_norm=norm,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
    )
    model = transformers.Wav2Vec2Model(config).eval()
    model.save_pretrained(folder)
    return model


def published(tree: Tree, folder: Path, **model: Any) -> Tree:
    """The recipe with the model in a folder."""
    return tree | {
        "model": {"name": "wav2vec2", "checkpoint": str(folder), **model},
        "features": {"kind": "raw"},
        "augment": {"spec_augment": None, "speed": [1.0]},
        "freeze": ["wav2vec2.feature_extractor"],
    }


@pytest.mark.parametrize("norm", ["layer", "group"])
def test_an_encoder_gives_what_it_gives_in_transformers(norm: str, tree: Tree, tmp_path: Path) -> None:
    """To 1e-5 in a batch with padding; what is saved needs the checkpoint no more, and learns what is not frozen."""
    theirs = miniature(tmp_path / "published", norm)
    recipe = check_recipe(published(tree, tmp_path / "published"), "r.yaml")
    folder = claim_folder(recipe, print)
    said: list[str] = []
    set_up(recipe, folder, said.append)
    assert any(line.startswith("checkpoint ") for line in said)
    other = claim_folder(recipe.model_copy(update={"name": "other"}), print)
    set_up_like(recipe.model_copy(update={"seed": 7}), folder, other)
    again, first = (Recogniser.load(each.initial).model.state_dict() for each in (other, folder))
    assert [name for name in first if not torch.equal(first[name], again[name])] == ["output.weight", "output.bias"]
    (tmp_path / "published").rename(tmp_path / "gone")
    recogniser = Recogniser.load(folder.initial)
    assert recogniser.model_config.checkpoint is None
    lengths = torch.tensor([3000, 1700])
    samples = torch.randn(2, 3000).masked_fill(torch.arange(3000) >= lengths[:, None], 0.0)
    mask = (torch.arange(3000) < lengths[:, None]).long() if norm == "layer" else None
    with recogniser.evaluating():
        frames, ends = recogniser.model.encode(samples[:, :, None], lengths)
        expected = theirs(samples, attention_mask=mask).last_hidden_state
    assert ends.tolist() == [recogniser.model_config.encoder_frames(length) for length in lengths.tolist()]
    assert ends.tolist() == theirs._get_feat_extract_output_lengths(lengths).tolist()
    for row, end in enumerate(ends.tolist()):
        torch.testing.assert_close(frames[row, :end], expected[row, :end], atol=1e-5, rtol=0)
    assert recogniser.output_seconds == pytest.approx(80 / 8000)
    workload = load_workload(recipe, folder)
    model = workload.make_model()
    (batch,) = workload.load(Ticket(0, 0, 0))
    workload.loss(model, batch).backward()
    moved = {name for name, each in model.named_parameters() if each.grad is not None and bool(each.grad.any())}
    assert any(name.startswith("wav2vec2.encoder.layers.1.") for name in moved)
    assert not any(name.startswith("wav2vec2.feature_extractor") for name in moved)


@pytest.mark.soak
def test_a_published_encoder_trains(tree: Tree, tmp_path: Path) -> None:
    """Through an engine, to a checkpoint that transcribes."""
    miniature(tmp_path / "published")
    recipe = check_recipe(published(tree, tmp_path / "published") | {"budget": {"steps": 2}}, "r.yaml")
    lines: list[str] = []
    simulate(recipe, lines.append, Console(file=io.StringIO()))
    assert any("%WER" in line for line in lines)


def test_what_does_not_fit_is_an_error(tree: Tree, tmp_path: Path) -> None:
    """That names the key, and no name of a hub is looked up."""
    miniature(tmp_path / "published")
    fitting = published(tree, tmp_path / "published")
    wrong = {
        "downloads nothing": published(tree, Path("facebook/wav2vec2-base")),
        "needs raw": fitting | {"features": {"kind": "log-mel"}},
        "spec_augment": fitting | {"augment": {}},
        "needs one": fitting | {"model": {"name": "wav2vec2"}},
        "no other model": fitting | {"model": {"name": "blstm", "checkpoint": str(tmp_path / "published")}},
    }
    for message, each in wrong.items():
        with pytest.raises(ConfigError, match=message):
            check_recipe(each, "r.yaml")
    (tmp_path / "published" / "model.safetensors").unlink()
    recipe = check_recipe(fitting, "r.yaml")
    with pytest.raises(ConfigError, match=r"model\.checkpoint"):
        set_up(recipe, claim_folder(recipe, print), print)
