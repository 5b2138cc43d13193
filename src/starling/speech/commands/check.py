"""`starling check`, which finds problems in a corpus, prints them as a table, and lists the utterances to leave out."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from starling.configuration import Config, checked
from starling.errors import ConfigError, DataError
from starling.recipe import apply_overrides
from starling.reporting.epochs import duration
from starling.reporting.progress import Bars
from starling.speech.check.corpus import Training, check_corpus
from starling.speech.check.findings import HEARD, HEARD_LIST, KINDS, CheckConfig, Report, to_drop, write_report
from starling.speech.check.recordings import prepared_sources
from starling.speech.data import DataConfig, source_of
from starling.speech.recipe import Recipe, load_recipe
from starling.speech.trained import load_recogniser, recipe_around
from starling.speech.usable import Source, read_left_out, write_left_out

_POOR = 0.5
"""Character error rate, as a fraction, above which a model can find little more than swapped transcripts."""
_BY_HEART = 3.0
"""A model that makes this many times fewer errors on its training set than on others has memorised it."""


_CAPTION = """\
near-text: nearly the same text occurs earlier in the set. overlap-…: the same audio, text or speaker occurs in
training. Equal texts are normal for digits and commands; equal audio is not. docs/data.md explains all kinds."""
_DROPPED = "check-dropped.tsv"
_SHOWN = 20


class PreparedConfig(Config):
    """The keys of a recipe's `data:` that may be given for a prepared folder."""

    train: str = "train"
    valid: str | None = None
    test: tuple[str, ...] | None = None
    """Sets to test on; None selects all other sets of the folder."""
    check: CheckConfig = CheckConfig()


class _Keys(Config):
    data: PreparedConfig = PreparedConfig()


def check(data: Path, overrides: Sequence[str], drop: bool, strict: bool, console: Console, model: Path | None) -> None:
    """Check a recipe's corpus or a prepared folder, print the findings, and list them in check.tsv.

    With `drop`, also write the list of utterances to leave out. With `model` (an experiment, a checkpoint or a
    recogniser's folder), transcripts that do not match their audio are also reported. Progress is shown on `console`.
    Raises ConfigError for invalid keys, CheckpointError for a model that cannot be loaded, and DataError for a missing
    corpus. With `strict`, also raises DataError if there are findings.
    """
    recogniser = None if model is None else load_recogniser(model)
    if recogniser is not None and recogniser.states is not None:
        raise ConfigError(f"--model {model}: the model was trained with loss: frames; give a model trained with CTC")
    keys: PreparedConfig | DataConfig
    if data.is_dir():
        folder, training = data, Training()
        keys, sources = _prepared(data, overrides)
        dropped = folder / _DROPPED
        left_out = dropped if dropped.is_file() else None  # the folder may have been prepared with this list
    else:
        recipe = load_recipe(data, overrides)
        training = Training.model_validate({key: getattr(recipe, key) for key in Training.model_fields})
        keys, sources = recipe.data, sources_of(recipe.data)
        folder, left_out = recipe.data.folder, recipe.data.filter.leave_out
    with Bars(console) as bars:
        report = check_corpus(sources, keys.train, keys.check, training, bars, recogniser)
    path = write_report(folder, report)
    total = sum(each.utterances for each in report.sets)
    if report.findings:
        Console().print(_table(report))
    if model is not None:
        _show_heard(report)
        trainer = recipe_around(model)
        trained = [] if trainer is None else _trained_on(trainer, folder, keys, [each.name for each in report.heard])
        for line in _remarks(report, trained):
            typer.echo(line)
        typer.echo(f"the texts that the model hears, with the worst fit first: {folder / HEARD_LIST}")
    number = f"{len(report.findings)} findings" if report.findings else "nothing found"
    typer.echo(f"{number} in {total} utterances, listed in {path}")
    if drop:
        items = to_drop(report, keys.check, [] if left_out is None else read_left_out(left_out))
        write_left_out(folder / _DROPPED, items)
        typer.echo(
            f"{len(items)} utterances ({duration(sum(item.seconds for item in items))}) to leave out; use it with "
            f"data.filter.leave_out={folder / _DROPPED}"
        )
    if strict and report.findings:
        first = report.findings[0]
        raise DataError(
            f"{len(report.findings)} findings in {total} utterances, listed in {path}; the first: {first.kind}, "
            f"{first.id!r} in {first.set}; correct the corpus, leave them out with --drop, or choose data.check.kinds"
        )


def sources_of(data: DataConfig) -> list[Source]:
    """The sets that a recipe uses, read from its corpus."""
    limits = data.filter.model_copy(update={"on_bad": "skip", "max_skipped": 1.0})
    return [source_of(data.model_copy(update={"filter": limits}), name) for name in data.used_sets]


def _prepared(folder: Path, overrides: Sequence[str]) -> tuple[PreparedConfig, list[Source]]:
    data = checked(_Keys, apply_overrides({}, overrides), f"prepared folder {folder}").data
    known = sorted(path.parent.name for path in folder.glob("*/summary.json"))
    if data.train not in known:
        hint = "give the folder above it" if (folder / "summary.json").is_file() else "set data.train to one of them"
        raise ConfigError(
            f"prepared folder {folder}: has no set {data.train!r}; its sets: {', '.join(known) or 'none'}; {hint}"
        )
    chosen = known if data.test is None else [*([data.valid] if data.valid else []), *data.test]
    return data, prepared_sources(folder, dict.fromkeys([data.train, *chosen]))


def _show_heard(report: Report) -> None:
    """Show the transcripts that do not match their audio, and the texts that the model heard instead."""
    found = [each for each in report.findings if each.kind in HEARD]
    if not found:
        return
    folded = [Column(name, overflow="fold") for name in ("set", "utterance", "transcript", "heard")]
    title = "transcripts that do not fit"
    table = Table(*folded, Column("score", justify="right"), "fits", title=title, title_justify="left")
    texts = {(each.set, each.id): each for whole in report.heard for each in whole.heard}
    for each in found[:_SHOWN]:
        own = texts[each.set, each.id]
        fits = f"that of {each.other_id}" if each.other_id else ""
        table.add_row(each.set, each.id, escape(own.text), escape(own.heard), f"{own.score:.2f}", fits)
    Console().print(table)
    if len(found) > _SHOWN:
        Console().print(f"and {len(found) - _SHOWN} more")


def _table(report: Report) -> Table:
    """A table of the number of findings by kind and set."""
    table = Table("kind", title="findings", title_justify="left", caption=_CAPTION, caption_justify="left")
    for each in report.sets:
        role = ", for training" if each.name == report.train else ""
        table.add_column(f"{each.name}{role}\n{each.utterances} utt., {duration(each.seconds)}", justify="right")
    for kind in KINDS:
        own = Counter(each.set for each in report.findings if each.kind == kind)
        if own:
            table.add_row(kind, *(str(own[each.name] or "-") for each in report.sets))
    return table


def _remarks(report: Report, trained: Collection[str]) -> Iterator[str]:
    """Yield remarks on what the error rates mean for the findings, and on sets that the model was `trained` on."""
    others = [each for each in report.heard if each.name not in trained and each.heard]
    elsewhere = sum(each.errors * each.characters for each in others) / max(sum(each.characters for each in others), 1)
    for each in report.heard:
        if each.skipped:
            name, reason = each.skipped[0]
            yield (
                f"{each.name}: {len(each.skipped)} utterances could not be compared with the model; the first, "
                f"{name!r}: {reason}"
            )
        if not each.heard:
            continue
        yield f"{each.name}: the model hears {each.errors:.1%} of the characters wrong; limit {each.limit:.2f}"
        if each.errors > _POOR:
            yield f"{each.name}: with so many errors, it finds little but swaps; use a better model"
        if each.name in trained:
            line = f"{each.name}: the model was trained on these transcripts, and may have memorised wrong ones"
            if elsewhere > _BY_HEART * each.errors:
                line += f": it hears {elsewhere:.1%} of the characters wrong in sets that it was not trained on"
            yield f"{line}; check with an early checkpoint, or with models trained on folds (data.hold_out)"


def _trained_on(recipe: Recipe, folder: Path, keys: PreparedConfig | DataConfig, names: Iterable[str]) -> list[str]:
    """The sets of a recipe's data, or of a prepared `folder`, that were used at least in part to train the model of
    `recipe`."""
    used, own = [name for _, name in recipe.training_sets], recipe.data
    if isinstance(keys, PreparedConfig):
        folders = [recipe.set_folder(each).resolve() for each in used]
        return [name for name in names if (folder / name).resolve() in folders]
    if own.corpus != keys.corpus:
        return []
    if own.hold_out == keys.hold_out:
        return [name for name in names if name in used]
    sources = [own.source(each) for each in used]
    return [name for name in names if keys.source(name) in sources]
