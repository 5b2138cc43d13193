"""The parts that all commands share: arguments, the option --debug, error messages, and the console for progress."""

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from starling.errors import StarlingError, require

if TYPE_CHECKING:
    from rich.console import Console

Function = Callable[..., None]


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
    """Return a hint that rewrites an option as a key of the recipe, or "" if `arguments` do not contain the option."""
    place = next((place for place, each in enumerate(arguments) if each.partition("=")[0] == option), None)
    if place is None:
        return ""
    value = arguments[place].partition("=")[2] or next(iter(arguments[place + 1 :]), "VALUE")
    return f" Keys of the recipe are written without dashes: {option.lstrip('-').replace('-', '_')}={value}"


RecipeArgument = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A YAML file, or a name that `starling recipes` lists, such as demo.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys of the recipe to change, such as budget.epochs=3.")
]
Experiment = Annotated[Path, typer.Argument(metavar="EXP", help="An experiment, such as exp/demo.")]
Best = Annotated[bool, typer.Option("--best", help="Use the model that scored best on the validation set.")]


class Commands(typer.Typer):
    """An application whose commands have the option --debug. Without this option, a `StarlingError` is printed as one
    message, and the process exits with the error's exit code.

    `needs` names the optional dependency group that the commands need. A command may override it with its own `needs`.
    """

    def __init__(self, *, needs: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._needs = needs

    def command(  # type: ignore[override]
        self, *given: Any, needs: str | None = None, **options: Any
    ) -> Callable[[Function], Function]:
        add = super().command(*given, **options)
        return lambda function: add(_with_debug(function, needs or self._needs))


def _with_debug(function: Function, extra: str | None) -> Function:
    @wraps(function)
    def run(*given: Any, debug: bool, **options: Any) -> None:
        try:
            if extra is not None:
                require(extra, f"starling {function.__name__}")
            function(*given, **options)
        except StarlingError as error:
            if debug:
                raise
            for line in (f"error: {error}", *getattr(error, "__notes__", [])):
                typer.echo(line, err=True)
            raise typer.Exit(error.exit_code) from None

    kind = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
    own = signature(function)
    last = Parameter("debug", Parameter.KEYWORD_ONLY, default=False, annotation=kind)
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), last])  # type: ignore[attr-defined]
    run.__annotations__ = {**function.__annotations__, "debug": kind}
    return run


def progress_console() -> "Console":
    """Return a console that writes to standard error, where commands show their progress."""
    from rich.console import Console

    return Console(stderr=True)
