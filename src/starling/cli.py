"""The command line: one thin function for each command."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from starling.errors import ConfigError, StarlingError
from starling.extras import require

if TYPE_CHECKING:
    from rich.console import Console


class TakesKeys(TyperCommand):
    """A command that accepts keys of a recipe. If a key is written as an option, the error shows the right form."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer does not export its exception for an unknown option
            if (option := getattr(error, "option_name", None)) is not None:
                error.message = f"{error.message}{_as_key(option, given)}"  # type: ignore[attr-defined]
            raise


def _as_key(option: str, arguments: Sequence[str]) -> str:
    """A hint that shows an option as a key of the recipe; empty if the option is not among the arguments."""
    place = next((place for place, each in enumerate(arguments) if each.partition("=")[0] == option), None)
    if place is None:
        return ""
    value = arguments[place].partition("=")[2] or next(iter(arguments[place + 1 :]), "VALUE")
    return f" Keys of the recipe are written without dashes: {option.lstrip('-').replace('-', '_')}={value}"


app = typer.Typer(
    help="Train speech recognisers with many learners, and choose how the learners agree.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

studies = typer.Typer(
    help="Run a grid of simulations that answers one question.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(studies, name="study", epilog="Example: [bold]starling study staleness[/bold]")

shipped = typer.Typer(help="List the recipes that come with Starling, or copy one.", rich_markup_mode="rich")
app.add_typer(shipped, name="recipes", epilog="Example: [bold]starling recipes copy demo[/bold]")

RecipeArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE", help="A YAML file, or a name that `starling recipes` lists, such as demo.", show_default=False
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Keys of the recipe to change, such as budget.epochs=3.", show_default=False
    ),
]
Experiment = Annotated[Path, typer.Argument(metavar="EXP", help="An experiment, such as exp/demo.", show_default=False)]
Best = Annotated[bool, typer.Option("--best", help="Use the model that scored best on the validation set.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"starling-asr {version('starling-asr')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that come before the command."""


@app.command(cls=TakesKeys, epilog="Example: [bold]starling prepare demo data.folder=corpora/demo jobs=4[/bold]")
def prepare(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace sets prepared with other settings.")] = False,
    debug: Debug = False,
) -> None:
    """Import, check and filter a recipe's corpus, and write it as shards. Existing sets are kept.

    jobs=N uses N processes, executor=ray the Ray cluster at launch.address; the result is the same.
    """
    with _errors(debug):
        require("speech", "starling prepare")
        from starling.speech.preparing import command as prepare

        prepare.prepare(recipe, overrides or (), typer.echo, _console(), overwrite)


@app.command(cls=TakesKeys, epilog="Example: [bold]starling check demo data.check.silence_db=-50[/bold]")
def check(
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="A recipe, or a folder prepared from one.", show_default=False),
    ],
    overrides: Overrides = None,
    drop: Annotated[bool, typer.Option("--drop", help="Also list what to leave out (data.filter.leave_out).")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 5 if anything is found.")] = False,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="EXP", help="Also find transcripts that do not fit what this model hears."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Find faults, duplicates, and overlap between the sets of a corpus, and list them in check.tsv.

    With --model, an experiment, a checkpoint or a recogniser's folder, also swapped and wrong transcripts.
    """
    with _errors(debug):
        require("speech", "starling check")
        from rich.console import Console

        from starling.speech.check import check

        check.check(data, overrides or (), drop, strict, typer.echo, Console(), _console(), model)


@app.command("bench-data", cls=TakesKeys, epilog="Example: [bold]starling bench-data demo[/bold]")
def bench_data(
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="A recipe, or a folder prepared from one.", show_default=False),
    ],
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Measure ways to store your audio, with a sample of it on your disk, and recommend one."""
    with _errors(debug):
        require("speech", "starling bench-data")
        from rich.console import Console

        from starling.speech import bench_data_command as bench_data

        bench_data.bench_data(data, overrides or (), typer.echo, Console(), _console())


@app.command(cls=TakesKeys, epilog="Example: [bold]starling train fsdd learners=2 strategy=delay-by-one[/bold]")
def train(recipe: RecipeArgument, overrides: Overrides = None, debug: Debug = False) -> None:
    """Train with several learner processes, and score the test sets.

    If RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, as under torchrun, this process is one learner.
    """
    with _errors(debug):
        require("speech", "starling train")
        _train(recipe, overrides or ())


@app.command(cls=TakesKeys, epilog="Example: [bold]starling demo learners=2[/bold]")
def demo(overrides: Overrides = None, debug: Debug = False) -> None:
    """Train the recipe `demo`, a recogniser of synthetic speech, in the current folder."""
    with _errors(debug):
        require("demo", "starling demo")
        _train(Path("demo"), overrides or ())


def _train(recipe: Path, overrides: Sequence[str]) -> None:
    from starling.speech.recipe import load_recipe
    from starling.speech.training import learner_process, train

    if learner_process.is_learner():
        learner_process.run(recipe, overrides, typer.echo, _console())
    else:
        train.train(load_recipe(recipe, overrides), typer.echo, _console())


@app.command(epilog="Example: [bold]starling join exp/demo --learners 2[/bold]")
def join(
    experiment: Experiment,
    learners: Annotated[int, typer.Option("--learners", min=1, help="How many learners to add.")] = 1,
    debug: Debug = False,
) -> None:
    """Add learners to a running experiment. Lost learners are restarted first."""
    with _errors(debug):
        from starling.experiment import join

        join.join(experiment, learners, typer.echo)


@app.command(cls=TakesKeys, epilog="Example: [bold]starling simulate fsdd learners=64 strategy=delay-by-one[/bold]")
def simulate(recipe: RecipeArgument, overrides: Overrides = None, debug: Debug = False) -> None:
    """Train with virtual learners in this process, on a simulated cluster. The same seed gives the same events."""
    with _errors(debug):
        require("speech", "starling simulate")
        from starling.speech.recipe import load_recipe
        from starling.speech.training import simulate

        simulate.simulate(load_recipe(recipe, overrides or ()), typer.echo, _console())


@app.command("profile", cls=TakesKeys, epilog="Example: [bold]starling profile demo --output profile.yaml[/bold]")
def measure(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option("--output", help="The file to write.")] = Path("profile.yaml"),
    debug: Debug = False,
) -> None:
    """Measure what a recipe costs on this machine: gradients, exchanges, means, memory. `starling plan` reads it."""
    with _errors(debug):
        require("speech", "starling profile")
        from starling.speech import predicting as commands
        from starling.speech.recipe import load_recipe

        commands.profile_recipe(load_recipe(recipe, overrides or ()), output, typer.echo, _console())


@app.command(cls=TakesKeys, epilog="Example: [bold]starling plan demo --profile profile.yaml --learners 4,16[/bold]")
def plan(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A recipe, as for train.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    profile: Annotated[Path | None, typer.Option("--profile", help="What `starling profile` wrote.")] = None,
    preset: Annotated[str | None, typer.Option("--preset", help="Data sheets, such as v100-2019, or a file.")] = None,
    cluster: Annotated[Path | None, typer.Option("--cluster", help="A YAML file with the keys of `cluster`.")] = None,
    learners: Annotated[str | None, typer.Option("--learners", help="Numbers of learners, such as 4,16,64.")] = None,
    strategies: Annotated[str | None, typer.Option("--strategies", help="Names, such as allreduce,adpsgd.")] = None,
    price: Annotated[float | None, typer.Option("--price", help="Of one device for an hour.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say what the columns mean and what is assumed.")] = False,
    output: Annotated[Path | None, typer.Option("--output", help="A CSV file for the table.")] = None,
    published: Annotated[bool, typer.Option("--published", help="Print published hours beside predictions.")] = False,
    debug: Debug = False,
) -> None:
    """Predict how long a recipe takes with each strategy and number of learners, and recommend one."""
    with _errors(debug):
        if published:
            from starling.predict.published import page, predictions

            typer.echo(page(predictions()), nl=False)
            return
        if recipe is None:
            raise ConfigError("plan: name a recipe, such as demo, or ask for --published")
        require("speech", "starling plan")
        from starling.speech import predicting as commands
        from starling.speech.recipe import load_recipe

        commands.plan_recipe(
            load_recipe(Path(recipe), overrides or ()),
            typer.echo,
            _console(),
            profile_file=profile,
            preset=preset,
            cluster=cluster,
            learners=learners,
            strategies=strategies,
            price=price,
            explain=explain,
            output=output,
        )


@app.command(epilog="Example: [bold]starling evaluate exp/demo --set test[/bold]")
def evaluate(
    experiment: Experiment,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="A set to score; may be repeated. Default: the test sets.")
    ] = None,
    best: Best = False,
    greedy: Annotated[bool, typer.Option("--greedy", help="Skip the beam search.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes for the beam search.")] = 1,
    conditions: Annotated[
        list[str] | None,
        typer.Option("--condition", help="Pass audio through a codec, such as telephone or opus-8; may be repeated."),
    ] = None,
    average: Annotated[
        int | None,
        typer.Option("--average", min=1, help="Average this many newest checkpoints. Default: the recipe's number."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Score sets with the newest model of an experiment, and list every error in its decode folder.

    A CTC model is scored by greedy decoding and by beam search with a language model, tuned on the validation set.
    A model with a decoder is also scored by the decoder's own searches.
    """
    with _errors(debug):
        require("speech", "starling evaluate")
        from starling.speech.scoring import evaluate

        given = conditions or ()
        evaluate.evaluate(experiment, sets, typer.echo, _console(), best, not greedy, jobs, given, average)


@app.command(epilog="Example: [bold]starling score exp/demo exp/demo-adpsgd --by speaker[/bold]")
def score(
    experiment: Annotated[
        Path,
        typer.Argument(metavar="A", help="An experiment that `starling evaluate` has scored.", show_default=False),
    ],
    other: Annotated[
        Path | None, typer.Argument(metavar="B", help="Another one, to compare with.", show_default=False)
    ] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="A set; may be repeated. Default: all.")] = None,
    by: Annotated[str | None, typer.Option("--by", help="A table by speaker, or by this column of a TSV.")] = None,
    table: Annotated[Path | None, typer.Option("--table", help="A TSV with a header; ids come first.")] = None,
    normalise: Annotated[
        list[str] | None,
        typer.Option("--normalise", help="numbers, punctuation or case; may be repeated. Default: none."),
    ] = None,
    language: Annotated[str, typer.Option("--language", help="In which numbers are written.")] = "en",
    debug: Debug = False,
) -> None:
    """Score decoded texts again, by speaker or column, normalised; test whether two experiments differ."""
    with _errors(debug):
        require("speech", "starling score")
        from rich.console import Console

        from starling.speech.scoring.compare import Grouping, score_texts

        if table is not None and by is None:
            raise ConfigError("score: --table needs --by, the column to group by")
        grouping = None if by is None else Grouping(by, table)
        experiments = [each for each in (experiment, other) if each is not None]
        score_texts(experiments, typer.echo, Console(), sets or (), grouping, normalise or (), language)


@app.command(epilog="Example: [bold]starling audit exp/demo[/bold]")
def audit(experiment: Experiment, debug: Debug = False) -> None:
    """Show how much of each epoch each learner saw, and whether every utterance was seen exactly once."""
    with _errors(debug):
        from rich.console import Console

        from starling.speech import audit

        audit.audit(experiment, typer.echo, Console())


@app.command(epilog="Example: [bold]starling status exp/demo --watch[/bold]")
def status(
    experiment: Experiment,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh the table until the run ends.")] = False,
    debug: Debug = False,
) -> None:
    """Show the state of a running experiment: each learner and what it waits for, losses, the newest checkpoint."""
    with _errors(debug):
        from rich.console import Console

        from starling.experiment import status

        status.status(experiment, watch, Console())


@app.command(epilog="Example: [bold]starling report exp/demo --output demo.html[/bold]")
def report(
    experiments: Annotated[
        list[Path], typer.Argument(metavar="EXP...", help="Experiments, such as exp/demo.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", help="The page. Default: report.html in the experiment's folder; of several, in this one."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write one HTML page about experiments: curves, timelines, scores with intervals, utterances with audio, events.

    It needs no network to be read. Several experiments are drawn over each other.
    """
    with _errors(debug):
        require("report", "starling report")
        from starling.experiment.report import write_report

        write_report(experiments, output, typer.echo)


@app.command(epilog="Example: [bold]starling transcribe exp/demo talk.flac --format srt --output talk.srt[/bold]")
def transcribe(
    experiment: Experiment,
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH", help="WAV, FLAC, MP3, Opus, of any length and rate; folders; - for standard input."
        ),
    ],
    form: Annotated[str, typer.Option("--format", help="txt, json, srt, vtt or ctm.")] = "txt",
    output: Annotated[
        Path | None,
        typer.Option("--output", help="A file; of several inputs, a folder. Default: the screen.", show_default=False),
    ] = None,
    raw_pcm: Annotated[
        int | None,
        typer.Option(
            "--raw-pcm",
            metavar="RATE",
            help="Standard input is raw PCM at this rate: 16 bits, little-endian, one channel.",
        ),
    ] = None,
    best: Best = False,
    beam: Annotated[bool, typer.Option("--beam", help="With the beam search that `evaluate` has tuned.")] = False,
    debug: Debug = False,
) -> None:
    """Transcribe audio with the newest model of an experiment.

    Files that cannot be transcribed are named at the end, and the exit code is then 5.
    """
    with _errors(debug):
        require("speech", "starling transcribe")
        from starling.speech.transcribing.files import checked_format
        from starling.speech.transcribing.files import transcribe as transcribe_paths

        transcribe_paths(experiment, paths, typer.echo, best, beam, _console(), checked_format(form), output, raw_pcm)


@app.command(epilog="Example: [bold]starling serve exp/demo[/bold]")
def serve(
    experiment: Experiment,
    host: Annotated[
        str, typer.Option("--host", help="The address to serve at. Others than loopback are open to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one.")] = 8000,
    max_megabytes: Annotated[float, typer.Option("--max-megabytes", min=0.001, help="Of an upload.")] = 500.0,
    max_minutes: Annotated[float, typer.Option("--max-minutes", min=0.01, help="Of audio in an upload.")] = 240.0,
    stall_seconds: Annotated[
        float, typer.Option("--stall-seconds", min=0.1, help="How long a client may send nothing.")
    ] = 30.0,
    best: Best = False,
    beam: Annotated[bool, typer.Option("--beam", help="With the beam search that `evaluate` has tuned.")] = False,
    debug: Debug = False,
) -> None:
    """Serve the newest model of an experiment: a web page, files over HTTP, and microphones over a WebSocket."""
    with _errors(debug):
        require("serve", "starling serve")
        from starling.speech.serving.guard import Limits
        from starling.speech.serving.serve import serve as serve_model

        limits = Limits(round(1e6 * max_megabytes), 60 * max_minutes, stall_seconds)
        serve_model(experiment, typer.echo, host, port, best, beam, limits)


@app.command(epilog="Example: [bold]starling export exp/demo demo-model --onnx[/bold]")
def export(
    experiment: Experiment,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.", show_default=False)],
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Also write ONNX, and a program that needs no Starling.")
    ] = False,
    best: Best = False,
    average: Annotated[
        int | None,
        typer.Option("--average", min=1, help="Average this many newest checkpoints. Default: the recipe's number."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write the newest model of an experiment to a folder: weights, tokens, language model, and a model card."""
    with _errors(debug):
        require("speech", "starling export")
        from starling.speech.exporting.export import export

        export(experiment, folder, typer.echo, onnx, best, average)


@app.command(epilog="Example: [bold]starling strategies[/bold]")
def strategies(debug: Debug = False) -> None:
    """List the strategies by which learners can agree, by family, those of installed packages included."""
    with _errors(debug):
        from starling.recipe.auto import AUTO_STRATEGY
        from starling.strategies import find_strategy, strategy_names

        found = {name: find_strategy(name) for name in strategy_names()} | {AUTO_STRATEGY.name: AUTO_STRATEGY}
        width = max(map(len, found))
        for kind in dict.fromkeys(strategy.kind for strategy in found.values()):
            typer.echo(kind)
            for name, strategy in found.items():
                if strategy.kind == kind:
                    typer.echo(f"  {name:{width}}  {strategy.summary}")


@shipped.callback(invoke_without_command=True)
def recipes(context: typer.Context) -> None:
    """List the recipes that come with Starling; commands accept their names."""
    if context.invoked_subcommand is None:
        from starling.recipe.shipped import summaries

        found = summaries()
        width = max(map(len, found))
        for name, summary in found.items():
            typer.echo(f"{name:{width}}  {summary}")


@shipped.command(epilog="Example: [bold]starling recipes copy demo[/bold]")
def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A recipe, such as demo.", show_default=False)],
    to: Annotated[Path, typer.Argument(metavar="TO", help="The folder to copy it to.")] = Path(),
    debug: Debug = False,
) -> None:
    """Copy a recipe, and the recipes that it builds on, to a folder."""
    with _errors(debug):
        from starling.recipe.shipped import copy_recipe

        for path in copy_recipe(name, to):
            typer.echo(path)


@app.command(cls=TakesKeys, epilog="Example: [bold]starling compare demo --strategies allreduce,adpsgd[/bold]")
def compare(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    strategies: Annotated[
        str | None, typer.Option("--strategies", help="Arms of the recipe, or strategies: allreduce,adpsgd.")
    ] = None,
    learners: Annotated[str | None, typer.Option("--learners", help="Numbers of learners: 4,16.")] = None,
    rates: Annotated[
        str | None, typer.Option("--rates", help="Learning rates to tune over, 1e-3,3e-3, or multiples: 0.5x,1x,2x.")
    ] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="Seeds: 1,2,3.")] = None,
    bracket: Annotated[
        bool | None, typer.Option("--bracket", help="Grow a grid of rates while its best is at an end.")
    ] = None,
    baseline: Annotated[str | None, typer.Option("--baseline", help="The arm to compare with, not a learner.")] = None,
    target: Annotated[
        float | None, typer.Option("--target", help="A training loss, to measure the time to it.")
    ] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="virtual, or processes.")] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", help="Simulated cells computed side by side.")] = None,
    debug: Debug = False,
) -> None:
    """Compare strategies, each at its own best learning rate. Finished cells are not computed again.

    What to compare may also stand in the recipe, as its section `compare`.
    """
    options = {"learners": _listed(learners), "rates": _listed(rates), "seeds": _listed(seeds)}
    given = {**options, "baseline": baseline, "target": target, "engine": engine, "jobs": jobs, "bracket": bracket}
    with _errors(debug):
        _compare(recipe, overrides or (), strategies.split(",") if strategies else (), **given)


def _listed(text: str | None) -> list[Any] | None:
    """The numbers in an option, and what is none as it is."""
    from starling.recipe.file import parse_yaml

    return None if text is None else [parse_yaml(each, "a list") for each in text.split(",")]


def _compare(recipe: Path, overrides: Sequence[str], strategies: Sequence[str] = (), **options: Any) -> None:
    require("speech", "starling compare")
    from starling.comparing.api import compare_recipe, load_comparison

    compare_recipe(load_comparison(recipe, overrides, strategies, **options), typer.echo, _console())


@studies.command(cls=TakesKeys, epilog="Example: [bold]starling study staleness compare.jobs=4[/bold]")
def staleness(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe with a section `compare`.")] = "staleness",
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Separate the effect of a larger batch from that of stale gradients. Finished cells are not computed again."""
    with _errors(debug):
        given = [recipe, *(overrides or ())]
        path = Path("staleness" if "=" in recipe else given.pop(0))
        _compare(path, given)


def main() -> None:
    """The entry point of `starling`."""
    app(prog_name="starling")


@contextmanager
def _errors(debug: bool) -> Generator[None, None, None]:
    """Print an error that Starling raised on purpose as one message, and exit with its code."""
    try:
        yield
    except StarlingError as error:
        if debug:
            raise
        for line in (f"error: {error}", *getattr(error, "__notes__", [])):
            typer.echo(line, err=True)
        raise typer.Exit(error.exit_code) from None


def _console() -> "Console":
    from rich.console import Console

    return Console(stderr=True)
