"""The command line. Each command that works with any recipe is one thin function; packages add further commands."""

import inspect
import os
import re
import shutil
import signal
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points, version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from starling.commands import Commands, Experiment, Overrides, RecipeArgument, TakesKeys, progress_console
from starling.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from starling.configuration import Config
    from starling.strategies import Strategy

PACKAGES = "starling.commands"
"""Group of entry points through which packages, including `starling.speech`, add typer applications with commands."""


app = Commands(
    help="Train speech recognisers with many learners, and choose how the learners agree.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

studies = Commands(help="Run a grid of simulations that answers one question.", no_args_is_help=True)
app.add_typer(studies, name="study", epilog="Example: [bold]starling study staleness[/bold]")

shipped = Commands(help="List the recipes that come with Starling, or copy one.")
app.add_typer(shipped, name="recipes", epilog="Example: [bold]starling recipes copy demo[/bold]")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"starling-asr {version('starling-asr')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that come before the command."""


@app.command(cls=TakesKeys, epilog="Example: [bold]starling train fsdd learners=2 strategy=delay-by-one[/bold]")
def train(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Train with several learner processes, and score the test sets.

    If RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, as under torchrun, this process is one learner.
    """
    from starling.experiment.train import train_recipe

    train_recipe(recipe, overrides or (), typer.echo, progress_console(), "starling train")


@app.command(epilog="Example: [bold]starling join exp/demo --learners 2[/bold]")
def join(
    experiment: Experiment, learners: Annotated[int, typer.Option(min=1, help="How many learners to add.")] = 1
) -> None:
    """Add learners to a running experiment. Lost learners are restarted first."""
    from starling.experiment.following import join as join_experiment

    join_experiment(experiment, learners, typer.echo)


@app.command(cls=TakesKeys, epilog="Example: [bold]starling simulate fsdd learners=64 strategy=delay-by-one[/bold]")
def simulate(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Train with virtual learners in this process, on a simulated cluster. The same seed gives the same events."""
    from starling.experiment.simulate import simulate_recipe
    from starling.experiment.task import load_recipe

    simulate_recipe(*load_recipe(recipe, overrides or (), command="starling simulate"), typer.echo, progress_console())


@app.command(cls=TakesKeys, epilog="Example: [bold]starling storm demo learners=4 strategy=adpsgd --real[/bold]")
def storm(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    faults_per_hour: Annotated[float, typer.Option(help="Kills and pauses in an hour, of all learners.", min=0)] = 70,
    pauses: Annotated[float, typer.Option(help="The fraction of faults that are pauses.", min=0, max=1)] = 0.25,
    cuts_per_hour: Annotated[float, typer.Option(help="Network cuts in an hour; in simulations only.", min=0)] = 0,
    away: Annotated[float, typer.Option(help="Seconds until a learner is back.", min=0.1)] = 10,
    slow: Annotated[float, typer.Option(help="How many times slower one learner is than the others.", min=1)] = 1,
    minutes: Annotated[float, typer.Option(help="The length of the storm, and of training.", min=0.01)] = 10,
    seed: Annotated[int, typer.Option(help="The seed of the storm.")] = 1,
    real: Annotated[bool, typer.Option("--real", help="Use real learners instead of a simulation.")] = False,
) -> None:
    """Train while learners are killed, paused, cut off and slow at random times, and print the goodput."""
    from starling.experiment.simulate import storm_recipe

    settings = {"faults_per_hour": faults_per_hour, "pauses": pauses, "cuts_per_hour": cuts_per_hour, "away": away}
    where = recipe, overrides or (), typer.echo, progress_console()
    storm_recipe(*where, minutes=minutes, slow=slow, seed=seed, is_real=real, settings=settings)


@app.command("profile", cls=TakesKeys, epilog="Example: [bold]starling profile demo --output profile.yaml[/bold]")
def measure(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("profile.yaml"),
) -> None:
    """Measure what a recipe costs on this machine: gradients, exchanges, means, memory. `starling plan` reads it."""
    from starling.experiment.planning import profile_recipe
    from starling.experiment.task import load_recipe

    given = load_recipe(recipe, overrides or (), command="starling profile")
    profile_recipe(*given, output, typer.echo, progress_console())


@app.command(cls=TakesKeys, epilog="Example: [bold]starling plan demo --profile profile.yaml --learners 4,16[/bold]")
def plan(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="A recipe, as for train.")] = None,
    overrides: Overrides = None,
    profile: Annotated[Path | None, typer.Option(help="The file that `starling profile` wrote.")] = None,
    preset: Annotated[str | None, typer.Option(help="Costs from data sheets, such as v100-2019, or a file.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="A YAML file with the keys of `cluster`.")] = None,
    learners: Annotated[
        str | None,
        typer.Option(help="Numbers of learners, such as 4,16,64. By default the recipe's, or, with --model, 1 and 64."),
    ] = None,
    strategies: Annotated[str | None, typer.Option(help="Names of strategies, such as allreduce,adpsgd.")] = None,
    price: Annotated[float | None, typer.Option(help="Price of one device for an hour.")] = None,
    model: Annotated[str | None, typer.Option(help="A published model in place of a recipe: ibm.")] = None,
    hours: Annotated[float, typer.Option(help="Hours of speech in an epoch of --model.", min=0.001)] = 2000.0,
    explain: Annotated[bool, typer.Option("--explain", help="Say what the columns mean and what is assumed.")] = False,
    crossings: Annotated[bool, typer.Option(help="Look for crossing points, which takes most of the time.")] = True,
    output: Annotated[Path | None, typer.Option(help="A CSV file for the table.")] = None,
    published: Annotated[bool, typer.Option("--published", help="Print published hours and predictions.")] = False,
) -> None:
    """Predict how long a recipe takes with each strategy and number of learners, and recommend one."""
    if published:
        from starling.predict.published import page

        typer.echo(page(), nl=False)
        return
    from starling.experiment.planning import numbers_of, plan_model, plan_recipe, show_plan
    from starling.experiment.task import load_recipe

    given: dict[str, Any] = {"preset": preset, "cluster": cluster, "price": price}
    given |= {"learners": learners, "strategies": strategies, "crossings": crossings}
    if model is not None:
        if ignored := [*filter(None, (recipe, profile)), *(overrides or ())]:
            raise ConfigError(
                f"plan --model: {ignored[0]} would have no effect; with a published model, give no recipe, keys or "
                "--profile, but describe the network in a file for --cluster, and the length of an epoch with --hours"
            )
        found = plan_model(model, hours, progress_console(), **given)
    elif recipe is None:
        raise ConfigError("plan: name a recipe, such as demo, or --model ibm, or ask for --published")
    else:
        most = [] if learners is None else [f"learners={max(numbers_of(learners))}"]  # whom stragglers may name
        loaded = load_recipe(Path(recipe), [*most, *(overrides or ())], command="starling plan")
        found = plan_recipe(*loaded, progress_console(), profile=profile, **given)
    show_plan(*found, typer.echo, explain, output, crossings)


@app.command(epilog="Example: [bold]starling audit exp/demo[/bold]")
def audit(experiment: Experiment) -> None:
    """Show how much of each epoch each learner saw, and whether every utterance was seen exactly once."""
    from rich.console import Console

    from starling.experiment.record import audit as show_audit

    show_audit(experiment, typer.echo, Console())


@app.command(epilog="Example: [bold]starling replay exp/demo --until 'gradient>100'[/bold]")
def replay(
    experiment: Experiment,
    until: Annotated[
        str | None, typer.Option(help="Stop at the gradient with this number, or where this holds: loss>9.")
    ] = None,
    learner: Annotated[int | None, typer.Option(help="The learner that --until means.")] = None,
    curves: Annotated[
        bool, typer.Option("--curves", help="Write TensorBoard curves with a point per gradient.")
    ] = False,
    watch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=EXPRESSION", help="One more figure for --until and --curves, such as largest=g.abs().max()."
        ),
    ] = None,
    what_if: Annotated[
        list[str] | None, typer.Option(help="Then replay with a different setting, such as optimizer.lr=1e-3.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--from", help="The checkpoint from which the newest run resumed: replay only that run."),
    ] = None,
) -> None:
    """Run an experiment again in the recorded order, and check that each learner has the same weights, bit for bit."""
    from rich.console import Console

    from starling.experiment.replay import Watching, replay_recipe

    if until is not None and what_if:
        raise ConfigError("--what-if compares whole runs; leave out --until")
    is_watched = until is not None or learner is not None or curves or watch
    watching = Watching(until, learner, curves, watch or ()) if is_watched else None
    replay_recipe(experiment, checkpoint, watching, what_if or (), Console())


@app.command(epilog="Example: [bold]starling status exp/demo --watch[/bold]")
def status(
    experiment: Experiment,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh the table until the run ends.")] = False,
) -> None:
    """Show the state of a running experiment: each learner and what it waits for, losses, the newest checkpoint."""
    from rich.console import Console

    from starling.experiment.following import status as show_status

    show_status(experiment, watch, Console())


@app.command(epilog="Example: [bold]starling report exp/demo --output demo.html[/bold]", needs="report")
def report(
    experiments: Annotated[list[Path], typer.Argument(metavar="EXP...", help="Experiments, such as exp/demo.")],
    output: Annotated[
        Path | None,
        typer.Option(help="The HTML file. Default: report.html in the experiment's folder, or here for several."),
    ] = None,
) -> None:
    """Write one HTML page about experiments: curves, timelines, scores with intervals, utterances with audio, events.

    Reading the page needs no network. Several experiments are drawn in the same figures. For a comparison, the page
    shows the losses.
    """
    from starling.experiment.report import write_report

    write_report(experiments, output, typer.echo)


@app.command(epilog="Example: [bold]starling strategies diloco[/bold]")
def strategies(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A strategy to describe, or module:name.")] = None,
) -> None:
    """List the strategies by which learners can agree, by family; or describe one: equation, options, references.

    Strategies of installed packages are included.
    """
    from starling.recipe.run import AUTO_STRATEGY, StrategyChoice
    from starling.strategies import find_strategy, strategy_names

    if name is not None:
        from rich.console import Console

        Console(highlight=False).print(*_described(StrategyChoice(name=name).strategy), sep="\n")
        return
    found = {name: find_strategy(name) for name in strategy_names()} | {AUTO_STRATEGY.name: AUTO_STRATEGY}
    width = max(map(len, found)) + 2
    for kind in dict.fromkeys(strategy.kind for strategy in found.values()):
        typer.echo(kind)
        _list({f"  {name}": each.summary for name, each in found.items() if each.kind == kind}, width)


def _list(found: Mapping[str, str], width: int = 0) -> None:
    """Print names, in a column of at least `width`, and their texts, which are wrapped beside it: at the terminal's
    width, or at `COLUMNS`. Without either, as in a pipe, each name has one line."""
    width, columns = max(width, *map(len, found)), shutil.get_terminal_size((10**6, 0)).columns
    for name, text in found.items():
        line, indent = f"{name:{width}}  {text}", " " * (width + 2)
        typer.echo(textwrap.fill(line, columns, subsequent_indent=indent, break_on_hyphens=False))


_PARTS = r"^(Waits|Use when|Args|References|Example):\n"


def _described(strategy: "Strategy") -> Iterator["RenderableType"]:
    """Yield the description of a strategy, which consists of the docstrings of its coroutine and of its options."""
    from rich.padding import Padding
    from rich.text import Text

    found = re.split(_PARTS, inspect.getdoc(strategy.run) or "", flags=re.MULTILINE)
    parts = dict(zip(["", *found[1::2]], map(inspect.cleandoc, found[::2]), strict=True))
    parts["Options"] = "\n\n".join(_options(strategy.options)) or "none"
    parts["References"] = re.sub(r"\.\n(?=[A-Z])", ".\n\n", parts.get("References", ""))
    yield Text(f"{strategy.name}: {strategy.summary}", "bold")
    for title in ("", "Waits", "Options", "Use when", "References"):
        if content := parts.get(title, "").strip():
            if title:
                yield Text(title, "bold")
            for each in re.split(r"\n\s*\n|\n(?=\* )", content):
                shown = each if each.startswith(" ") else " ".join(each.split()).replace("::", ":")  # or an equation
                yield Padding(Text(shown), (0, 0, 1, 2), expand=False)


def _options(kind: type["Config"]) -> Iterator[str]:
    """Yield one text for each option of a strategy, with its name, default and meaning."""
    from pydantic_core import to_json

    from starling.configuration import beneath_fields, owners

    for name, owner in owners(kind).items():
        field = owner.model_fields[name]
        default = "required" if field.is_required() else to_json(field.get_default(call_default_factory=True)).decode()
        meaning = field.description or beneath_fields(owner).get(name, "")
        yield f"{name} ({default.strip(chr(34))}): {meaning}"


@shipped.callback(invoke_without_command=True)
def recipes(context: typer.Context) -> None:
    """List the recipes that come with Starling; commands accept their names."""
    if context.invoked_subcommand is None:
        from starling.recipe import summaries

        _list(summaries())


@shipped.command(epilog="Example: [bold]starling recipes copy demo[/bold]")
def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A recipe, such as demo.")],
    to: Annotated[Path, typer.Argument(metavar="TO", help="The folder to copy it to.")] = Path(),
) -> None:
    """Copy a recipe, and the recipes that it builds on, to a folder."""
    from starling.recipe import copy_recipe

    for path in copy_recipe(name, to):
        typer.echo(path)


@app.command(cls=TakesKeys, epilog="Example: [bold]starling compare demo --strategies allreduce,adpsgd[/bold]")
def compare(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    strategies: Annotated[str | None, typer.Option(help="Arms of the recipe, or strategies: allreduce,adpsgd.")] = None,
    learners: Annotated[str | None, typer.Option(help="Numbers of learners: 4,16.")] = None,
    rates: Annotated[
        str | None, typer.Option(help="Learning rates to tune over, 1e-3,3e-3, or multiples: 0.5x,1x,2x.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds: 1,2,3.")] = None,
    bracket: Annotated[
        bool | None, typer.Option("--bracket", help="Grow a grid of rates while its best is at an end.")
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="The arm to compare with, instead of a single learner.")] = None,
    target: Annotated[float | None, typer.Option(help="A training loss; the time to reach it is measured.")] = None,
    engine: Annotated[str | None, typer.Option(help="The engine: virtual or processes.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Number of cells that are simulated at the same time.")] = None,
) -> None:
    """Compare strategies, each at its own best learning rate. Finished cells are not computed again.

    The section `compare` of the recipe can also say what to compare.
    """
    lists = {"learners": _listed(learners), "rates": _listed(rates), "seeds": _listed(seeds)}
    given = {"baseline": baseline, "target": target, "engine": engine, "jobs": jobs, "bracket": bracket}
    _compare(recipe, overrides or (), strategies.split(",") if strategies else (), **lists, **given)


def _listed(text: str | None) -> list[Any] | None:
    """Return the comma-separated values of an option, or None if the option is not given."""
    from starling.recipe import parse_yaml

    return None if text is None else [parse_yaml(each, "a list") for each in text.split(",")]


def _compare(recipe: Path, overrides: Sequence[str], strategies: Sequence[str] = (), **options: Any) -> None:
    from starling.comparing.compare import load_comparison, run_comparison

    run_comparison(load_comparison(recipe, overrides, strategies, **options), typer.echo, progress_console())


@studies.command(cls=TakesKeys, epilog="Example: [bold]starling study staleness compare.jobs=4[/bold]")
def staleness(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe with a section `compare`.")] = "staleness",
    overrides: Overrides = None,
) -> None:
    """Separate the effect of a larger batch from that of stale gradients. Finished cells are not computed again."""
    given = [recipe, *(overrides or ())]
    path = Path("staleness" if "=" in recipe else given.pop(0))
    _compare(path, given)


def main() -> None:
    """The entry point of `starling`."""
    signal.signal(signal.SIGINT, _interrupt)
    app(prog_name="starling")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End this process if Ctrl-C interrupts an import: modules written in C, such as torch, may discard the exception
    and continue without half of numpy. Otherwise, raise `KeyboardInterrupt`."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt


def _add_commands_of_packages() -> None:
    """Add the commands of all installed packages. If the commands of a package cannot be loaded, warn and continue."""
    for entry in entry_points(group=PACKAGES):
        try:
            app.add_typer(entry.load())
        except Exception as error:  # a package's own code may raise anything
            typer.echo(f"warning: the commands of {entry.value} cannot be loaded: {error}", err=True)


_add_commands_of_packages()
