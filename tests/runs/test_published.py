"""Published encoders: miniature models with random weights in the format of `transformers`; nothing is downloaded."""

import io
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from rich.console import Console

from starling.errors import ConfigError, DataError
from starling.experiment.claim import claim_folder
from starling.experiment.simulate import simulate_recipe
from starling.speech.recipe import check_recipe
from starling.speech.recogniser import Recogniser
from starling.speech.task import SPEECH
from starling.speech.training.set_up import load_workload, set_up, set_up_like
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


def miniature_whisper(folder: Path) -> transformers.WhisperModel:
    """A Whisper of two layers, which hears 1 s, in a folder."""
    torch.manual_seed(5)
    config = transformers.WhisperConfig(
        d_model=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=32, decoder_layers=1,
        decoder_attention_heads=2, decoder_ffn_dim=16, num_mel_bins=20, max_source_positions=50, vocab_size=20,
        max_target_positions=10, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    return model.model


def published(tree: Tree, folder: Path, **model: Any) -> Tree:
    """The recipe with the model in a folder."""
    return tree | {
        "model": {"name": "wav2vec2", "checkpoint": str(folder), **model},
        "features": {"kind": "raw"},
        "augment": {"spec_augment": None, "speed": [1.0]},
        "freeze": ["wav2vec2.feature_extractor"],
    }


def published_whisper(tree: Tree, folder: Path) -> Tree:
    """The recipe with a Whisper in a folder."""
    return published(tree, folder, name="whisper") | {
        "features": {"kind": "raw", "normalise": "none"},
        "freeze": ["whisper.conv1", "whisper.embed_positions"],
    }


@pytest.mark.parametrize("norm", ["layer", "group"])
def test_an_encoder_gives_what_it_gives_in_transformers(norm: str, tree: Tree, tmp_path: Path) -> None:
    """They agree to 1e-5 in a batch with padding; a saved model no longer needs the checkpoint, and trains what is not
    frozen."""
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


def test_a_whisper_gives_what_it_gives_in_transformers(tree: Tree, tmp_path: Path) -> None:
    """They agree to 1e-5, with its front end, for the length for which it was made. A shorter utterance does not hear
    the padding of its batch. A saved model no longer needs the checkpoint, and trains what is not frozen."""
    theirs = miniature_whisper(tmp_path / "published")
    recipe = check_recipe(published_whisper(tree, tmp_path / "published"), "r.yaml")
    folder = claim_folder(recipe, print)
    set_up(recipe, folder, print)
    (tmp_path / "published").rename(tmp_path / "gone")
    recogniser = Recogniser.load(folder.initial)
    samples = torch.randn(3, 16_000, generator=torch.Generator().manual_seed(1)) * 0.1
    samples[:, 12_800:] = 0.0
    lengths = torch.tensor([16_000, 9_000, 200])
    front_end = transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=1)
    mel = front_end(samples[0].numpy(), sampling_rate=16_000, return_tensors="pt").input_features
    with recogniser.evaluating():
        expected = theirs.encoder(mel).last_hidden_state
        together, ends = recogniser.model.encode(samples[:, :, None], lengths)
        torch.testing.assert_close(together[0], expected[0], atol=1e-5, rtol=0)
        for row, (length, end) in enumerate(zip(lengths.tolist(), ends.tolist(), strict=True)):
            assert end == recogniser.model_config.encoder_frames(length)
            alone, _ = recogniser.model.encode(samples[row : row + 1, :length, None], lengths[row : row + 1])
            torch.testing.assert_close(together[row, :end], alone[0], atol=1e-5, rtol=0)
        with pytest.raises(DataError, match="longer than the 1 s that this Whisper model accepts"):
            recogniser.model.encode(torch.zeros(1, 17_000, 1), torch.tensor([17_000]))
    workload = load_workload(recipe, folder)
    model = workload.make_model()
    for each in model.parameters():
        each.grad = None
    model.eval()
    log_probs, _ = model(samples[:, :, None], lengths)
    log_probs[0, 0, 0].backward()
    moved = {name for name, each in model.named_parameters() if each.grad is not None and bool(each.grad.any())}
    assert any(name.startswith("whisper.layers.1.") for name in moved)
    assert not any(name.startswith(("whisper.conv1", "whisper.embed_positions")) for name in moved)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["wav2vec2", "whisper"])
def test_a_published_encoder_trains(name: str, tree: Tree, tmp_path: Path) -> None:
    """It trains through an engine, to a checkpoint that transcribes."""
    make, recipe_of = (miniature, published) if name == "wav2vec2" else (miniature_whisper, published_whisper)
    make(tmp_path / "published")
    recipe = check_recipe(recipe_of(tree, tmp_path / "published") | {"budget": {"steps": 2}}, "r.yaml")
    lines: list[str] = []
    simulate_recipe(SPEECH, recipe, lines.append, Console(file=io.StringIO()))
    assert any("%WER" in line for line in lines)


def test_a_model_of_the_hub_comes_from_its_cache(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no network: a model that is not in the cache is one error."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    kept = tmp_path / "hub" / "models--somebody--tiny"
    miniature(kept / "snapshots" / "0123")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0123")
    recipe = check_recipe(published(tree, Path("somebody/tiny")), "r.yaml")
    said: list[str] = []
    set_up(recipe, claim_folder(recipe, print), said.append)
    assert any(line.startswith("checkpoint somebody/tiny: ") for line in said)
    with pytest.raises(
        ConfigError, match=r"facebook/wav2vec2-base is not a folder .*, and the hub .* `hf download NAME`"
    ):
        check_recipe(published(tree, Path("facebook/wav2vec2-base")), "r.yaml")


def test_a_model_that_does_not_fit_is_an_error(tree: Tree, tmp_path: Path) -> None:
    """The error names the key; a path is never looked up on the hub."""
    miniature(tmp_path / "published")
    miniature_whisper(tmp_path / "whisper")
    fitting = published(tree, tmp_path / "published")
    wrong = {
        "hf download": published(tree, tmp_path / "absent"),
        "normalise": published_whisper(tree, tmp_path / "whisper") | {"features": {"kind": "raw"}},
        "needs raw": fitting | {"features": {"kind": "log-mel"}},
        "spec_augment": fitting | {"augment": {}},
        "needs one": fitting | {"model": {"name": "wav2vec2"}},
        "only for name: wav2vec2, whisper": fitting
        | {"model": {"name": "blstm", "checkpoint": str(tmp_path / "published")}},
    }
    for message, each in wrong.items():
        with pytest.raises(ConfigError, match=message):
            check_recipe(each, "r.yaml")
    (tmp_path / "published" / "model.safetensors").unlink()
    recipe = check_recipe(fitting, "r.yaml")
    with pytest.raises(ConfigError, match=r"model\.checkpoint"):
        set_up(recipe, claim_folder(recipe, print), print)
