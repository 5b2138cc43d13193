"""`starling check`: what is wrong with a corpus, as a table and a list, and what to leave out of it."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from starling.configuration import Config
from starling.errors import ConfigError, DataError
from starling.report.progress import Bars, Say
from starling.runs.recipe.overrides import apply_overrides
from starling.runs.recipe.problems import describe
from starling.runs.recipe.recipe import load_recipe
from starling.speech.check.collect import Source, prepared_sources
from starling.speech.check.config import KINDS, CheckConfig
from starling.speech.check.corpus import Training, check_corpus
from starling.speech.check.findings import Report, to_drop, write_report
from starling.speech.data import DataConfig, set_digest
from starling.speech.left_out import left_out_of, read_left_out, write_left_out

_DROPPED = "check-dropped.tsv"


class PreparedConfig(Config):
    """The keys of a recipe's `data:` that a prepared folder does not contain."""

    train: str = "train"
    valid: str | None = None
    test: tuple[str, ...] | None = None
    """None: all other sets of the folder."""
    check: CheckConfig = CheckConfig()


class _Keys(Config):
    data: PreparedConfig = PreparedConfig()


class Job(Config):
    """One corpus to check, and where its lists go."""

    folder: Path
    train: str
    check: CheckConfig
    training: Training
    leave_out: Path | None = None
    """What is left out already."""


def check(
    data: Path, overrides: Sequence[str], drop: bool, strict: bool, tell: Say, output: Console, console: Console
) -> None:
    """Check a recipe's corpus or a prepared folder, print what was found on `output`, and list it in check.tsv.

    With `drop`, also list what is to be left out. Progress is shown on `console`. Raises ConfigError for keys that
    are wrong, and DataError for a corpus that is not there; with `strict`, also when anything was found.
    """
    job, sources = _prepared(data, overrides) if data.is_dir() else _recipe(data, overrides)
    with Bars(console) as bars:
        report = check_corpus(sources, job.train, job.check, job.training, bars)
    path = write_report(job.folder, report)
    total = sum(each.utterances for each in report.sets)
    if report.findings:
        output.print(_table(report))
    tell(f"{len(report.findings) or 'nothing'} found in {total} utterances, listed in {path}")
    if drop:
        _drop(job, report, tell)
    if strict and report.findings:
        first = report.findings[0]
        raise DataError(
            f"{len(report.findings)} findings in {total} utterances, listed in {path}; the first: {first.kind}, "
            f"{first.id!r} in {first.set}; correct the corpus, leave them out with --drop, or choose data.check.kinds"
        )


def _recipe(path: Path, overrides: Sequence[str]) -> tuple[Job, list[Source]]:
    recipe = load_recipe(path, overrides)
    training = Training(tokens=recipe.tokens, features=recipe.features, augment=recipe.augment, model=recipe.model)
    data = recipe.data
    job = Job(
        folder=data.folder,
        train=data.train,
        check=data.check,
        training=training,
        leave_out=data.filter.leave_out,
    )
    return job, sources_of(data)


def sources_of(data: DataConfig) -> list[Source]:
    """The sets that a recipe uses, as its corpus has them."""
    limits = data.filter.model_copy(update={"on_bad": "skip", "max_skipped": 1.0})
    return [
        Source(
            name,
            partial(data.corpus.utterances, name),
            data.sampling_rate,
            data.text,
            limits,
            left_out_of(data.filter.leave_out, name),
            data.strings,
            set_digest(data, name),
        )
        for name in data.used_sets
    ]


def _prepared(folder: Path, overrides: Sequence[str]) -> tuple[Job, list[Source]]:
    tree = apply_overrides({}, overrides)
    try:
        data = _Keys.model_validate(tree).data
    except ValidationError as error:
        problems = "\n".join(f"  {problem}" for problem in describe(error, _Keys, tree))
        raise ConfigError(f"prepared folder {folder}: keys that do not fit\n{problems}") from None
    known = sorted(path.parent.name for path in folder.glob("*/summary.json"))
    if data.train not in known:
        hint = "give the folder above it" if (folder / "summary.json").is_file() else "set data.train to one of them"
        raise ConfigError(
            f"prepared folder {folder}: has no set {data.train!r}; its sets: {', '.join(known) or 'none'}; {hint}"
        )
    chosen = known if data.test is None else [*([data.valid] if data.valid else []), *data.test]
    names = dict.fromkeys([data.train, *chosen])
    job = Job(
        folder=folder,
        train=data.train,
        check=data.check,
        training=Training(),
        leave_out=dropped if (dropped := folder / _DROPPED).is_file() else None,  # prepared without those, perhaps
    )
    return job, prepared_sources(folder, names)


def _drop(job: Job, report: Report, tell: Say) -> None:
    path = job.folder / _DROPPED
    earlier = read_left_out(job.leave_out) if job.leave_out is not None else []
    items = to_drop(report, job.check, earlier)
    write_left_out(path, items)
    hours = sum(item.seconds for item in items) / 3600
    tell(f"{len(items)} utterances ({hours:.2f} h) to leave out; use it with data.filter.leave_out={path}")


def _table(report: Report) -> Table:
    """Findings by kind and set."""
    table = Table(title="found", title_justify="left")
    table.add_column("kind")
    for each in report.sets:
        role = "" if each.name == report.train else ", held out"
        table.add_column(f"{each.name}{role}\n{each.utterances} utt., {each.seconds / 3600:.2f} h", justify="right")
    for kind in KINDS:
        counts = [report.count(kind, each.name) for each in report.sets]
        if any(counts):
            table.add_row(kind, *(str(count) if count else "-" for count in counts))
    return table
