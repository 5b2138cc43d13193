"""`starling export`: a folder that transcribes without Starling and torch, or an error that says why not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import soundfile
import torch
from typer.testing import CliRunner

from starling.cli import app
from starling.errors import ConfigError
from starling.recipe.run import dump_recipe
from starling.speech import exporting
from starling.speech.exporting import write_onnx
from starling.speech.exporting.standalone import Transcriber, resample
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.models import model_config
from starling.speech.recipe import check_recipe
from starling.speech.recogniser import Recogniser
from starling.speech.resampling import resampled
from starling.speech.tokens import CharacterTokenizer, TokenConfig, Tokenizer, make_tokenizer
from tests.speech.tones import RATE, sing

Tree = dict[str, Any]
CHUNK = {"seconds": 0.24, "left": 2}
MODELS: dict[str, Tree] = {
    "blstm": {"name": "blstm", "bottleneck": 8},
    "blstm with convolutions over frequency": {
        "name": "blstm",
        "conv2d_channels": 3,
        "layer_norm": True,
        "subsampling": 4,
    },
    "deep-speech": {"name": "deep-speech"},
    "transformer": {"name": "transformer", "positions": "sinusoidal", "span": 5, "layers": 1},
    "zipformer": {
        "name": "zipformer",
        "stack_rates": [1, 2],
        "stack_layers": [1, 1],
        "stack_widths": [8, 12],
        "heads": 1,
    },
    "conformer": {"name": "conformer", "positions": "relative", "layers": 1},
    "streaming lstm": {"name": "lstm", "layers": 2, "chunk": CHUNK},
    "streaming transformer": {"name": "transformer", "layers": 1, "chunk": CHUNK},
    "streaming conformer": {"name": "conformer", "layers": 1, "subsampling": 2, "chunk": CHUNK},
}


def recogniser_of(
    model: Tree, features: str | Tree = "global", tokenizer: Tokenizer | None = None, rate: int = RATE
) -> Recogniser:
    """A recogniser with random weights whose outputs change from frame to frame."""
    chosen = {"normalise": features} if isinstance(features, str) else features
    layer = LogMel(FeatureConfig.model_validate({**chosen, "num_mels": 20}), rate)
    if features == "global":
        layer.statistics = {"mean": torch.full((20,), -7.0), "deviation": torch.full((20,), 3.0)}
    config = model_config(**{"preset": "tiny", **model})
    recogniser = Recogniser.create(config, layer, tokenizer or CharacterTokenizer(" ADEFIMOR"), seed=2)
    sung = recogniser.waveform(sing(["DO", "RE", "MI", "FA"], np.random.default_rng(0), rate), rate)
    with torch.no_grad():
        output = recogniser.model.get_submodule("output")
        output.weight.mul_(30.0)
        output.bias.sub_(recogniser.listen([sung]).log_probs.mean((0, 1)))
    return recogniser


@pytest.mark.wide
@pytest.mark.parametrize("name", MODELS)
def test_onnx_agrees_with_torch(name: str, tmp_path: Path) -> None:
    """They agree to 1e-4 for any number of utterances of any length, and also chunk by chunk, from the program's own
    features."""
    recogniser = recogniser_of(MODELS[name])
    write_onnx(recogniser, tmp_path)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    for lengths in ([64], [1, 99], [40, 3, 250]):
        features = torch.randn(len(lengths), max(lengths), 20)
        with recogniser.evaluating():
            expected, ends = recogniser.model(features, torch.tensor(lengths))
        found, found_ends = session.run(None, {"features": features.numpy(), "lengths": np.array(lengths)})
        assert found_ends.tolist() == ends.tolist()
        for row, end in enumerate(ends.tolist()):
            np.testing.assert_allclose(found[row, :end], expected[row, :end], atol=1e-4, rtol=0)
    if not name.startswith("streaming"):
        assert not (tmp_path / "streaming.onnx").exists()
        return
    transcriber = Transcriber(tmp_path)
    for length in (200, 73, 5):
        matrix = torch.randn(length, 20)
        whole = recogniser.hear([matrix]).log_probs
        chunks = list(transcriber.chunks(matrix.numpy()))
        np.testing.assert_allclose(np.concatenate(chunks), whole[0], atol=1e-4, rtol=0)


@pytest.mark.wide
@pytest.mark.parametrize("features", ["utterance", "speech", "global", "none", {"normalise": "active", "pauses": 0.1}])
def test_the_programs_features_are_those_of_training(features: str | Tree, tmp_path: Path) -> None:
    """They agree to 1e-3 of their own size, in NumPy; its resampling equals ours."""
    recogniser = recogniser_of({"name": "lstm"}, features)
    write_onnx(recogniser, tmp_path)
    transcriber = Transcriber(tmp_path)
    waveform = sing(["DO", "RE"], np.random.default_rng(0))
    for samples in (waveform, waveform[:200], waveform[:1999]):
        mine = transcriber.features(samples, RATE)
        np.testing.assert_allclose(mine, recogniser.features(recogniser.waveform(samples, RATE)), atol=2e-3, rtol=0)
    for rate in (44100, 16000, 6000):
        expected = resampled(torch.from_numpy(waveform)[None], rate, RATE)[0]
        np.testing.assert_allclose(resample(waveform, rate, RATE), expected, atol=1e-5, rtol=0)


@pytest.fixture
def experiment(tree: Tree, tmp_path: Path) -> Path:
    """A streaming conformer, as `starling train` leaves it, with a scored set and a language model."""
    tree |= {
        "model": {"preset": "tiny", "name": "conformer", "layers": 1, "chunk": CHUNK},
        "features": {"normalise": "global"},
    }
    recipe = check_recipe(tree, "r.yaml")
    folder = tmp_path / "exp" / "songs"
    beam = folder / "decode" / "beam"
    beam.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    for score in ("%WER 12.34 [ 10 / 81, 1 ins, 2 del, 7 sub ] 95% interval 8.00 - 17.50", "%WER 50.00 [ 1 / 2 ]"):
        home = beam if "50.00" in score else beam.parent
        (home / "wer-summary-test.txt").write_text(f"set test\n{score}\n%CER 3.21 [ 1 / 2 ]\n", encoding="utf-8")
    (beam / "tokens.arpa").write_text("\\data\\\n", encoding="utf-8")
    weights = {"lm_weight": 0.5, "word_penalty": 0.0, "beam": 8}
    tuned = {"of": "x", "vocabulary": "open", "num_words": 0, "order": 6, "weights": weights, "tuned_on": None}
    (beam / "search.json").write_text(json.dumps({**tuned, "num_utterances": 0, "trials": []}), encoding="utf-8")
    recogniser_of(tree["model"]).save(folder / "best" / "step-00000001")
    (folder / "best" / "step-00000001" / "score.json").write_text('{"wer": 12.0, "epochs": 1.0}', encoding="utf-8")
    return folder


WITHOUT = """
import runpy, sys
for name in ("torch", "starling", "lhotse", "scipy", "safetensors"):
    sys.modules[name] = None  # importing it is an ImportError
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_folder_works_without_starling(experiment: Path, tmp_path: Path) -> None:
    """Its program gives the same texts as Starling, for whole files and in chunks, at another rate and with two
    channels."""
    folder = tmp_path / "new" / "model"
    result = CliRunner().invoke(app, ["export", str(experiment), str(folder), "--onnx", "--best"])
    assert result.exit_code == 0, result.output
    recogniser = Recogniser.load(folder)
    generator = np.random.default_rng(3)
    audio = {"a.wav": (sing(["DO", "FA", "RE"], generator), RATE)}
    audio["b.flac"] = (np.stack([sing(["MI", "MI"], generator, 22050)] * 2, axis=1), 22050)
    for name, (samples, rate) in audio.items():
        soundfile.write(tmp_path / name, samples, rate)
    (tmp_path / "c.wav").write_bytes(b"no audio")
    command = [sys.executable, "-I", "-c", WITHOUT, str(folder / "transcribe.py"), *audio, "c.wav"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert said.returncode == 1
    assert said.stderr.startswith("error: c.wav: ")
    assert len(said.stderr.splitlines()) == 1
    read = {name: soundfile.read(tmp_path / name, dtype="float32") for name in audio}
    texts = {name: recogniser.transcribe(samples.T, rate) for name, (samples, rate) in read.items()}
    assert all(len(set(text)) > 1 for text in texts.values())
    assert said.stdout == "".join(f"{name}\t{text}\n" for name, text in texts.items())
    transcriber = Transcriber(folder)
    for name, (samples, rate) in read.items():
        partial = list(transcriber.stream(samples, rate))
        assert partial[-1] == texts[name]
        assert len(partial) > 3


def test_the_folder_describes_its_contents(experiment: Path, tmp_path: Path) -> None:
    """It has a card with data, scores and latency, without a path of this machine; the language model; and no ONNX."""
    folder = tmp_path / "model"
    result = CliRunner().invoke(app, ["export", str(experiment), str(folder), "--best"])
    assert result.exit_code == 0, result.output
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "| test | greedy | 12.34 | 8.00 - 17.50 | 3.21 |" in card
    assert "| test | beam search with lm.arpa | 50.00 |  | 3.21 |" in card
    assert "algorithmic latency of 277.5 ms" in card
    assert "trained on `train`" in card
    assert "To be filled in" in card
    assert "the best on the validation set" in card
    assert str(tmp_path) not in card + result.output.replace(str(folder), "")
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("README.md", "config.json", "decoding.json", "lm.arpa", "model.safetensors", "tokens.json", "tokens.txt")
    }
    assert (folder / "tokens.txt").read_text(encoding="utf-8").startswith("<blk> 0\n▁ 1\nA 2\n")
    assert all(f"`{name}`" in card for name in names - {"README.md"})


def test_an_export_is_complete_or_absent(experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is not overwritten, and a failure leaves nothing."""
    folder = tmp_path / "out" / "model"
    folder.mkdir(parents=True)
    with pytest.raises(ConfigError, match="exists"):
        exporting.export(experiment, folder, print, is_best=True)
    assert list(folder.iterdir()) == []
    folder.rmdir()

    def fail(recogniser: Recogniser, into: Path) -> None:
        assert (into / "model.safetensors").exists()
        raise OSError("disk full")

    monkeypatch.setattr(exporting, "write_onnx", fail)
    with pytest.raises(ConfigError, match="disk full"):
        exporting.export(experiment, folder, print, with_onnx=True, is_best=True)
    assert list(folder.parent.iterdir()) == []


def test_a_model_that_onnx_cannot_represent_is_one_error(tmp_path: Path) -> None:
    """The error says what to do."""
    decoder = {"kind": "transducer", "width": 8}
    with pytest.raises(ConfigError, match="decoder; export it without --onnx"):
        write_onnx(recogniser_of({"name": "blstm", "decoder": decoder}), tmp_path)

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = torch.nn.Linear(20, 10)

        def forward(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.special.i0e(self.output(features)), lengths  # ONNX has no such operator

    recogniser = recogniser_of({"name": "lstm"})
    recogniser.model = Odd()
    with pytest.raises(ConfigError, match="cannot be written as ONNX"):
        write_onnx(recogniser, tmp_path)


def test_pieces_become_words_in_the_program(tmp_path: Path) -> None:
    """SentencePiece joins them in the same way."""
    texts = ["DO RE MI", "FA DO", "MI RE DO FA", "RE RE"]
    tokenizer = make_tokenizer(TokenConfig(kind="sentencepiece", vocab_size=16), texts)
    write_onnx(recogniser_of({"name": "lstm"}, tokenizer=tokenizer), tmp_path)
    transcriber = Transcriber(tmp_path)
    for text in texts:
        tokens = tokenizer.encode(text)
        frames = [frame for token in tokens for frame in (token, token, 0)]
        assert transcriber.text(np.array(frames)) == text
