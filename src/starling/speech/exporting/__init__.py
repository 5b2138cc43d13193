"""`starling export`, which writes a trained model to its own folder, for use without its experiment.

The model can also be written as ONNX: the network for whole utterances, and one step of a streaming network.

    model.onnx        features [B, T, F], lengths [B] -> log_probs [B, T', V], log_prob_lengths [B]
    streaming.onnx    window [B, N, F], inside [B, N], caches -> log_probs [B, C, V], next caches
    onnx.json         the features, the tokens, and the sizes of a step
    frontend.npz      the window, the mel bank, and the statistics of features.normalise: global
    transcribe.py     a program that needs only numpy, onnxruntime and soundfile

T, T' and B vary; the N feature frames of a window and the C encoder frames of a chunk are fixed.
"""

import inspect
import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, StrictUndefined
from torch import nn

from starling.checkpoint.files import partial_folder, publish, write_json
from starling.configuration import read_saved
from starling.errors import ConfigError, DataError, require
from starling.experiment.folder import ExperimentFolder
from starling.reporting.progress import Say
from starling.speech import levels
from starling.speech.commands.beam_search import LANGUAGE_FILES, SEARCH, TunedSearch
from starling.speech.decoding import DecodingConfig
from starling.speech.models import count_parameters
from starling.speech.models.network import StreamingNetwork
from starling.speech.recipe import Recipe
from starling.speech.recogniser import Recogniser
from starling.speech.shards import SetSummary, read_summary
from starling.speech.tokens import CharacterTokenizer
from starling.speech.trained import load_recogniser, open_experiment

_CONTENTS = {
    "config.json": "model, features and tokens, with the SHA-256 of the other files that Starling reads",
    "model.safetensors": "the weights, and the statistics of the features",
    "tokens.json": "the characters",
    "tokens.model": "the pieces, for SentencePiece",
    "tokens.txt": "each token and its number",
    "states.json": "the tied states",
    "phones.json": "the words of the training texts with their phones, which only training uses",
    "lm.arpa": "the language model of the beam search",
    "decoding.json": "the weights of the beam search, as tuned by `starling evaluate`",
    "words.txt": "the words that the beam search may use",
    "model.onnx": "the network for whole utterances: features [B, T, F], lengths [B]",
    "streaming.onnx": "one step of the network, with its caches as inputs and outputs",
    "onnx.json": "features, tokens and sizes, for programs that use ONNX",
    "frontend.npz": "the window, the mel bank and the statistics of the features, for programs that use ONNX",
    "transcribe.py": "`python transcribe.py hello.wav` needs only numpy, onnxruntime and soundfile",
}


_CARD = Path(__file__).parent / "card.md.jinja"
_WAYS = {"": "greedy", "beam": "beam search with lm.arpa", "ctc": "CTC, greedy", "decoder": "decoder, beam search"}
_WER = re.compile(r"%WER (\S+) \[.*\](?: 95% interval (\S+) - (\S+))?")
_CER = re.compile(r"%CER (\S+) \[")
MODEL, STREAMING = "model.onnx", "streaming.onnx"
_OPSET = 18
_TOLERANCE = 1e-4
"""Largest accepted difference between onnxruntime's and torch's log-probabilities."""


def export(
    experiment: Path,
    folder: Path,
    tell: Say,
    with_onnx: bool = False,
    is_best: bool = False,
    average: int | None = None,
) -> None:
    """Write the model that `starling evaluate` would score with the same options to a new `folder`. The folder is
    written either completely or not at all.

    `with_onnx` adds ONNX graphs, and a program that transcribes with them. Raises ConfigError if the folder exists or
    the model cannot be written as ONNX, and CheckpointError if there is no model.
    """
    if with_onnx:
        require("export", "starling export --onnx", ("onnx", "onnxruntime"))
    if folder.exists():
        raise ConfigError(f"{folder} exists and is not overwritten: remove it, or choose another folder")
    source, recipe = open_experiment(experiment)
    recogniser = load_recogniser(experiment, is_best, average)
    recogniser.model.cpu()
    partial = partial_folder(folder)
    shutil.rmtree(partial, ignore_errors=True)  # left by an export that was killed
    try:
        recogniser.save(partial)
        names = [name or "<blk>" for name in recogniser.tokenizer.names]  # as other toolkits write the names
        lines = "".join(f"{name} {number}\n" for number, name in enumerate(names))
        (partial / "tokens.txt").write_text(lines, encoding="utf-8")
        _write_language(source, recipe, partial)
        if with_onnx:
            write_onnx(recogniser, partial)
        files = [(path.name, _CONTENTS.get(path.name, "")) for path in sorted(partial.iterdir())]
        count = recipe.average if average is None else average
        newest = "the newest" if count == 1 else f"the mean of the {count} newest checkpoints"
        which = "the best on the validation set" if is_best else newest
        (partial / "README.md").write_text(_card(recipe, source, recogniser, which, files), encoding="utf-8")
        publish(partial, folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for name, what in (*files, ("README.md", "the model card; fill in the licence")):
        tell(f"{folder / name}: {what}")
    if recogniser.decoder is not None:
        tell("the decoder is in model.safetensors; only Starling can run it")


def _write_language(experiment: ExperimentFolder, recipe: Recipe, folder: Path) -> None:
    """Copy the language model of the tuned beam search, if `starling evaluate` has tuned one."""
    home = experiment.decode / "beam"
    if not (home / SEARCH).is_file():
        return
    tuned = read_saved(TunedSearch, home / SEARCH)
    given = recipe.decoding if recipe.decoding is not None and tuned.vocabulary == "closed" else DecodingConfig()
    shutil.copyfile(given.lm or home / LANGUAGE_FILES[tuned.vocabulary], folder / "lm.arpa")
    if given.word_list is not None:
        shutil.copyfile(given.word_list, folder / "words.txt")
    write_json(folder / "decoding.json", tuned.model_dump(mode="json", exclude={"trials", "of"}))


def _card(
    recipe: Recipe, experiment: ExperimentFolder, recogniser: Recogniser, which: str, files: Sequence[tuple[str, str]]
) -> str:
    """The model card in Markdown. `which` says which of the experiment's models the card describes; `files` are the
    names of the files and descriptions of their contents."""
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["ms"] = lambda seconds: f"{1000 * seconds:.4g} ms"
    return environment.from_string(_CARD.read_text(encoding="utf-8")).render(
        recipe=recipe,
        recogniser=recogniser,
        model=recogniser.model_config,
        features=recogniser.features,
        num_parameters=count_parameters(recogniser.model),
        limits=", ".join(f"{value} {name}" for name, value in recipe.budget.model_dump(exclude_none=True).items()),
        which=which,
        sets=list(_sets(recipe)),
        scores=list(_scores(experiment)),
        files=files,
        version=version("starling-asr"),
    )


def _sets(recipe: Recipe) -> Iterator[tuple[str, SetSummary | None]]:
    """Yield the names of the training sets, without paths, and their summaries, where these can be read."""
    for _, name in recipe.training_sets:
        try:
            yield Path(name).name, read_summary(recipe.set_folder(name))
        except (DataError, OSError):
            yield Path(name).name, None


def _scores(experiment: ExperimentFolder) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table of the scores that `starling evaluate` has written."""
    for path in sorted(experiment.decode.rglob("wer-summary-*.txt")):
        text = path.read_text(encoding="utf-8")
        wer, cer = _WER.search(text), _CER.search(text)
        if wer is not None:
            folder = path.parent.relative_to(experiment.decode).as_posix().removeprefix(".")
            interval = f"{wer[2]} - {wer[3]}" if wer[2] else ""
            name = path.stem.removeprefix("wer-summary-")
            yield name, _WAYS.get(folder, folder), wer[1], interval, cer[1] if cer else ""


class _Step(nn.Module):
    """A module that computes one chunk of a streaming network."""

    def __init__(self, network: StreamingNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, window: torch.Tensor, inside: torch.Tensor, *caches: torch.Tensor) -> tuple[torch.Tensor, ...]:
        frames, caches = self.network.encode_chunk(window, inside, caches)
        return self.network.log_probs(frames), *caches


def write_onnx(recogniser: Recogniser, folder: Path) -> None:
    """Write the files that the module's docstring lists, and compare the outputs of the graphs with torch's. Raises
    ConfigError if the recogniser needs more than an encoder with CTC, or if the network cannot be exported or the
    outputs differ."""
    for only, is_other, other in (
        ("CTC", recogniser.states is not None, "was trained with loss: frames"),
        ("log-mel features", recogniser.features.config.kind == "raw", "hears samples"),
        ("encoders with CTC alone", recogniser.decoder is not None, "has a decoder"),
    ):
        if is_other:
            raise ConfigError(f"--onnx is for {only}, and this model {other}; export it without --onnx")
    network, num_features = recogniser.model, recogniser.features.num_features
    generator = torch.Generator().manual_seed(0)
    with recogniser.evaluating():
        inputs = torch.randn(2, 131, num_features, generator=generator), torch.tensor([131, 90])
        _write(network, inputs, folder / MODEL, ["features", "lengths"], ["log_probs", "log_prob_lengths"])
        others = torch.randn(3, 201, num_features, generator=generator), torch.tensor([201, 7, 60])
        _compare(network, others, folder / MODEL)
        streaming = None
        if isinstance(network, StreamingNetwork) and network.chunks is not None:
            streaming = _write_step(network, network.caches(2, network.chunks), num_features, folder / STREAMING)
    _write_frontend(recogniser, streaming, folder)
    program = Path(__file__).with_name("standalone.py").read_text(encoding="utf-8")
    before, after = re.split(r"^from starling\.speech\.levels import .*$", program, flags=re.MULTILINE)
    (folder / "transcribe.py").write_text(before + inspect.getsource(levels) + after, encoding="utf-8")


def _write_step(
    network: StreamingNetwork, caches: Sequence[torch.Tensor], num_features: int, path: Path
) -> dict[str, Any]:
    """Write one step of the network, traced with two streams whose initial caches are given. Returns a description of
    the step."""
    size, hop = network.window()
    names = network.cache_names
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, size, num_features, generator=generator), torch.ones(2, size, dtype=torch.bool), *caches]
    inputs[1][:, : network.subsampling.reach] = False
    outputs = ["log_probs", *(f"next_{name}" for name in names)]
    _write(_Step(network), inputs, path, ["window", "inside", *names], outputs)
    _, *later = _Step(network)(*inputs)
    later_inputs = [torch.randn(2, size, num_features, generator=generator), inputs[1].clone(), *later]
    later_inputs[1][0], later_inputs[1][1] = True, torch.arange(size) < size // 2
    _compare(_Step(network), later_inputs, path)
    return {
        "window": size,
        "hop": hop,
        "reach": network.subsampling.reach,
        "subsampling": network.subsampling.rate,
        "caches": {
            name: {"shape": list(each.shape[1:]), "type": "bool" if each.dtype == torch.bool else "float32"}
            for name, each in zip(names, caches, strict=True)
        },
    }


def _write(
    module: nn.Module, inputs: Sequence[torch.Tensor], path: Path, names: Sequence[str], outputs: Sequence[str]
) -> None:
    """Trace a module and write its graph. The number of utterances is variable and, for whole utterances, so is the
    number of frames."""
    axes: dict[str, Mapping[int, str]] = {name: {0: "batch"} for name in (*names, *outputs)}
    if "features" in names:
        axes |= {"features": {0: "batch", 1: "frames"}, "log_probs": {0: "batch", 1: "outputs"}}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about tracing and the older exporter
            torch.onnx.export(
                module.eval(),
                tuple(inputs),
                str(path),
                input_names=list(names),
                output_names=list(outputs),
                dynamic_axes=axes,
                opset_version=_OPSET,
                dynamo=False,
            )
    except (RuntimeError, TypeError, ValueError, NotImplementedError, torch.onnx.errors.OnnxExporterError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"the network cannot be written as ONNX ({reason}); export it without --onnx") from error


def _compare(module: nn.Module, inputs: Sequence[torch.Tensor], path: Path) -> None:
    """Raise ConfigError if onnxruntime's log-probabilities differ from those of torch."""
    from starling.speech.exporting.standalone import session_of

    session = session_of(path)
    named = {each.name: value.numpy() for each, value in zip(session.get_inputs(), inputs, strict=True)}
    found, *rest = session.run(None, named)
    expected, *others = module(*inputs)
    lengths = others[0].tolist() if path.name == MODEL else [expected.shape[1]] * len(expected)
    worst = max(
        float(np.abs(ours[:length] - theirs[:length]).max())
        for ours, theirs, length in zip(found, expected.numpy(), lengths, strict=True)
    )
    if not worst <= _TOLERANCE or (path.name == MODEL and rest[0].tolist() != lengths):
        raise ConfigError(
            f"the outputs of {path.name} differ from the network's by up to {worst:.2g}; export it without --onnx"
        )


def _write_frontend(recogniser: Recogniser, streaming: dict[str, Any] | None, folder: Path) -> None:
    features, tokenizer = recogniser.features, recogniser.tokenizer
    window, bank = features.window, features.bank
    arrays = {"window": window, "bank": bank, **features.statistics}
    np.savez(folder / "frontend.npz", allow_pickle=False, **{name: each.numpy() for name, each in arrays.items()})
    characters = ["", *tokenizer.alphabet] if isinstance(tokenizer, CharacterTokenizer) else None
    description = {
        "format": 1,
        "sampling_rate": features.sampling_rate,
        "shift": features.shift,
        "fft_length": 2 * (bank.shape[0] - 1),
        "floor": features.floor,
        "normalise": features.config.normalise,
        "pauses": features.longest_pause,
        "output_seconds": recogniser.output_seconds,
        "tokens": characters or tokenizer.names,
        "has_pieces": characters is None,
        "streaming": streaming,
    }
    (folder / "onnx.json").write_text(json.dumps(description, indent=1, ensure_ascii=False), encoding="utf-8")
