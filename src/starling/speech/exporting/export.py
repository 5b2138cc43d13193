"""`starling export`: a trained model in a folder of its own, for use without its experiment."""

import shutil
from pathlib import Path

from pydantic import ValidationError

from starling.checkpoint.files import partial_folder, publish, write_json
from starling.errors import ConfigError
from starling.experiment.folder import ExperimentFolder, existing
from starling.extras import require
from starling.reporting.progress import Say
from starling.speech.commands.beam_search import LANGUAGE_FILES, SEARCH, TunedSearch
from starling.speech.commands.recognisers import load_recogniser
from starling.speech.exporting.card import model_card
from starling.speech.exporting.onnx import check_exportable, write_onnx
from starling.speech.recipe import Recipe, load_resolved
from starling.speech.recogniser import Recogniser

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
    "streaming.onnx": "one step of it, with its caches as inputs and outputs",
    "onnx.json": "features, tokens and sizes, for programs that use ONNX",
    "frontend.npz": "the window, the mel bank and the statistics of the features, for such programs",
    "transcribe.py": "`python transcribe.py hello.wav` needs numpy, onnxruntime and soundfile alone",
}


def export(
    experiment: Path,
    folder: Path,
    tell: Say,
    with_onnx: bool = False,
    is_best: bool = False,
    average: int | None = None,
) -> None:
    """Write the model that `starling evaluate` would score with the same options to a new `folder`, complete or not at
    all.

    `with_onnx` adds ONNX, and a program that transcribes with it. Raises ConfigError if the folder exists, and for a
    model that cannot be written as ONNX; CheckpointError if there is no model.
    """
    if with_onnx:
        require("export", "starling export --onnx", ("onnx", "onnxruntime"))
    if folder.exists():
        raise ConfigError(f"{folder} exists, and is not overwritten: remove it, or choose another folder")
    source = existing(experiment)
    recipe = load_resolved(source.config)
    recogniser = load_recogniser(experiment, recipe, is_best, average)
    recogniser.model.cpu()
    if with_onnx:
        check_exportable(recogniser)
    partial = partial_folder(folder)
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    try:
        recogniser.save(partial)
        _write_tokens(recogniser, partial)
        _write_language(source, recipe, partial)
        if with_onnx:
            write_onnx(recogniser, partial)
        files = [(path.name, _CONTENTS.get(path.name, "")) for path in sorted(partial.iterdir())]
        count = recipe.average if average is None else average
        which = "the best on the validation set" if is_best else "the newest"
        which = f"the mean of the {count} newest checkpoints" if count > 1 and not is_best else which
        (partial / "README.md").write_text(model_card(recipe, source, recogniser, which, files), encoding="utf-8")
        publish(partial, folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for name, what in (*files, ("README.md", "the model card; fill in the licence")):
        tell(f"{folder / name}: {what}")
    if recogniser.decoder is not None:
        tell("the decoder is in model.safetensors; only Starling runs it")


def _write_tokens(recogniser: Recogniser, folder: Path) -> None:
    """`tokens.txt`, as other toolkits have it: a token and its number on each line."""
    names = recogniser.tokenizer.names
    lines = [f"{name or '<blk>'} {number}\n" for number, name in enumerate(names)]
    (folder / "tokens.txt").write_text("".join(lines), encoding="utf-8")


def _write_language(experiment: ExperimentFolder, recipe: Recipe, folder: Path) -> None:
    """Copy the language model of the tuned beam search, if `starling evaluate` has tuned one."""
    home = experiment.decode / "beam"
    try:
        tuned = TunedSearch.model_validate_json((home / SEARCH).read_bytes())
    except FileNotFoundError:
        return
    except (ValueError, ValidationError) as error:
        raise ConfigError(f"{home / SEARCH} cannot be read: {error}; run `starling evaluate` again") from error
    given = recipe.decoding.lm if recipe.decoding is not None and tuned.vocabulary == "closed" else None
    shutil.copyfile(given or home / LANGUAGE_FILES[tuned.vocabulary], folder / "lm.arpa")
    if recipe.decoding is not None and recipe.decoding.word_list is not None and tuned.vocabulary == "closed":
        shutil.copyfile(recipe.decoding.word_list, folder / "words.txt")
    write_json(folder / "decoding.json", tuned.model_dump(mode="json", exclude={"trials", "of"}))
