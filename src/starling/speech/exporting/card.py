"""The model card: what a model is, what it was trained on, and how well it does."""

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from starling.errors import DataError
from starling.experiment.folder import ExperimentFolder
from starling.speech.models import count_parameters
from starling.speech.recipe import Recipe
from starling.speech.recogniser import Recogniser
from starling.speech.set_summary import read_summary

_WAYS = {"": "greedy", "beam": "beam search with lm.arpa", "ctc": "CTC, greedy", "decoder": "decoder, beam search"}
_WER = re.compile(r"%WER (\S+) \[.*\](?: 95% interval (\S+) - (\S+))?")
_CER = re.compile(r"%CER (\S+) \[")


def model_card(
    recipe: Recipe, experiment: ExperimentFolder, recogniser: Recogniser, which: str, files: Sequence[tuple[str, str]]
) -> str:
    """The card in Markdown. `which` says which of the experiment's models it is; `files` are names and contents."""
    return "\n".join(
        [
            *("---", "license: unknown  # fill in", "tags: [automatic-speech-recognition, starling]", "---", ""),
            *(f"# {recipe.name}", "", f"A speech recogniser, trained with Starling {version('starling-asr')}.", ""),
            *("## Model", "", *_model(recipe, recogniser, which), ""),
            *("## Data", "", *_data(recipe), ""),
            *("## Word error rates", "", *_scores(experiment), ""),
            *("## Limits", "", *_limits(recogniser), ""),
            *("## Licence", "", "To be filled in: of the model, and what the licences of its data require.", ""),
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
    """The sets by name, without paths."""
    names = [recipe.data.train] if recipe.mixture is None else list(recipe.mixture.sets)
    yield f"Corpus of kind `{recipe.data.corpus.kind}`; text normaliser: `{recipe.data.text}`."
    yield ""
    for name in names:
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
    """A table of what `starling evaluate` has left."""
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
        yield "None: no set was scored. `starling evaluate` scores them; then export again."
        return
    yield "In per cent, as `starling evaluate` found them last, with 95 % bootstrap intervals of the word error rate:"
    yield ""
    yield "| set | decoding | WER | interval | CER |"
    yield "|---|---|---|---|---|"
    yield from rows


def _limits(recogniser: Recogniser) -> Iterator[str]:
    yield "* It knows speech like that of its training data: other speakers, rooms, topics and languages cost accuracy."
    yield "* Its texts have the characters of the training texts alone, and no confidence is attached to them."
    if recogniser.latency is None:
        yield "* Memory and time grow with the length of a recording: cut long ones at silence."
