"""`starling export`, which writes a trained model to its own folder, for use without its experiment."""

import re
import shutil
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from starling.checkpoint.files import partial_folder, publish, write_json
from starling.configuration import read_saved
from starling.errors import ConfigError, DataError, require
from starling.experiment.folder import ExperimentFolder
from starling.reporting.progress import Say
from starling.speech.commands.beam_search import LANGUAGE_FILES, SEARCH, TunedSearch
from starling.speech.decoding import DecodingConfig
from starling.speech.exporting.onnx import write_onnx
from starling.speech.models import count_parameters
from starling.speech.recipe import Recipe
from starling.speech.recogniser import Recogniser
from starling.speech.shards import read_summary
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


_WAYS = {"": "greedy", "beam": "beam search with lm.arpa", "ctc": "CTC, greedy", "decoder": "decoder, beam search"}
_WER = re.compile(r"%WER (\S+) \[.*\](?: 95% interval (\S+) - (\S+))?")
_CER = re.compile(r"%CER (\S+) \[")


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
    return "\n".join(
        [
            *("---", "license: unknown  # fill in", "tags: [automatic-speech-recognition, starling]", "---", ""),
            *(f"# {recipe.name}", "", f"A speech recogniser, trained with Starling {version('starling-asr')}.", ""),
            *("## Model", "", *_model(recipe, recogniser, which), ""),
            *("## Data", "", *_data(recipe), ""),
            *("## Word error rates", "", *_scores(experiment), ""),
            *("## Limits", "", *_limits(recogniser), ""),
            *("## Licence", "", "To be filled in: the model's licence, and what the licences of its data require.", ""),
            *("## Files", "", *(f"* `{name}`: {what}" for name, what in files), ""),
        ]
    )


def _model(recipe: Recipe, recogniser: Recogniser, which: str) -> Iterator[str]:
    model, features = recogniser.model_config, recogniser.features
    decoder = "" if model.decoder is None else f", with {model.decoder.kind} decoder"
    outputs = "tied states" if recogniser.states is not None else "CTC"
    yield f"* {model.name} ({model.preset}), {count_parameters(recogniser.model):,} parameters, {outputs}{decoder}"
    every = _ms(recogniser.output_seconds)
    yield f"* {recogniser.tokenizer.vocab_size} tokens ({recipe.tokens.kind}), an output every {every}"
    yield (
        f"* input: {features.sampling_rate} Hz, {features.num_bands} log-mel bands, windows of "
        f"{_ms(features.config.frame_length)} each {_ms(features.config.frame_shift)}, normalised: "
        f"{features.config.normalise}"
    )
    if recogniser.latency is None:
        yield "* needs whole recordings"
    elif model.chunk is not None:
        yield (
            f"* streaming, with an algorithmic latency of {_ms(recogniser.latency)} (chunks of "
            f"{model.chunk.seconds:g} s, {model.chunk.left} before)"
        )
    limits = ", ".join(f"{value} {name}" for name, value in recipe.budget.model_dump(exclude_none=True).items())
    yield (
        f"* training: {recipe.strategy.name}, {recipe.learners} learners, {recipe.optimizer.name}, {limits}, seed "
        f"{recipe.seed}"
    )
    yield f"* weights: {which}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g} ms"


def _data(recipe: Recipe) -> Iterator[str]:
    """Yield lines that describe the sets, by name and without paths."""
    yield f"Corpus of kind `{recipe.data.corpus.kind}`; text normaliser: `{recipe.data.text}`."
    yield ""
    for _, name in recipe.training_sets:
        try:
            summary = read_summary(recipe.set_folder(name))
        except (DataError, OSError):
            yield f"* trained on `{Path(name).name}`"
        else:
            yield (
                f"* trained on `{Path(name).name}`: {summary.utterances:,} utterances, {summary.hours:.2f} h, "
                f"{summary.speakers:,} speakers"
            )


def _scores(experiment: ExperimentFolder) -> Iterator[str]:
    """Yield the lines of a table of the scores that `starling evaluate` has written."""
    rows = []
    for path in sorted(experiment.decode.rglob("wer-summary-*.txt")):
        text = path.read_text(encoding="utf-8")
        wer, cer = _WER.search(text), _CER.search(text)
        if wer is None:
            continue
        folder = path.parent.relative_to(experiment.decode).as_posix().removeprefix(".")
        interval = f"{wer[2]} - {wer[3]}" if wer[2] else ""
        name = path.stem.removeprefix("wer-summary-")
        rows.append(f"| {name} | {_WAYS.get(folder, folder)} | {wer[1]} | {interval} | {cer[1] if cer else ''} |")
    if not rows:
        yield "No set was scored. Score the sets with `starling evaluate`, then export again."
        return
    yield "Per cent, from the last `starling evaluate`, with 95 % bootstrap intervals of the word error rate:"
    yield from ("", "| set | decoding | WER | interval | CER |", "|---|---|---|---|---|", *rows)


def _limits(recogniser: Recogniser) -> Iterator[str]:
    yield "* The model is less accurate for speakers, rooms, topics and languages that differ from its training data."
    yield "* Its texts contain only characters of the training texts, and have no confidence scores."
    if recogniser.latency is None:
        yield "* Memory and time grow with the length of a recording: cut long recordings at silence."
