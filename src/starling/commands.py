"""What commands share: their arguments, how they show errors, and where they show progress."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from starling.errors import StarlingError

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


@contextmanager
def shown_errors(debug: bool) -> Generator[None, None, None]:
    """Print an error that Starling raised on purpose as one message, and exit with its code."""
    try:
        yield
    except StarlingError as error:
        if debug:
            raise
        for line in (f"error: {error}", *getattr(error, "__notes__", [])):
            typer.echo(line, err=True)
        raise typer.Exit(error.exit_code) from None


def progress_console() -> "Console":
    """Where progress is shown: standard error."""
    from rich.console import Console

    return Console(stderr=True)
