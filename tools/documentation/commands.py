"""Every command with its arguments and options, read from the Typer app, and every exit code, read from the errors."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from starling import errors
from starling.cli import app
from starling.errors import StarlingError

_VALUES = {str: "TEXT", int: "N", float: "NUMBER", Path: "PATH"}


@dataclass(frozen=True)
class Command:
    """A command of `starling`; with an empty name, `starling` itself."""

    name: str
    help: str
    example: str
    parameters: tuple[Any, ...]
    """The parameters of the Typer command that its help lists."""
    is_group: bool


def commands() -> list[Command]:
    """All commands, with groups before their members."""
    return list(_commands(typer.main.get_command(app), ""))


def _commands(command: Any, name: str) -> Iterator[Command]:
    example = re.sub(r"\[/?bold\]", "", command.epilog or "").removeprefix("Example: ")
    members = getattr(command, "commands", {})
    yield Command(name, inspect.cleandoc(command.help or ""), example, tuple(command.params), bool(members))
    for inner, each in members.items():
        yield from _commands(each, f"{name} {inner}".strip())


def exit_codes() -> dict[str, str]:
    """The exit codes with their meanings."""
    own = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, StarlingError)]
    kinds = [each for each in own if "exit_code" in vars(each)]
    said = {str(kind.exit_code): f"`{kind.__name__}`: {_first_line(kind)}" for kind in kinds}
    said["1"] = "Any other error."
    said["2"] += " Or the command line is wrong."
    return {"0": "Success.", **said, "130, 143": f"`Stopped`: {_first_line(errors.Stopped)}"}


def _first_line(kind: type) -> str:
    return inspect.cleandoc(kind.__doc__ or "").partition("\n")[0]


def page() -> str:
    """The tables of the page of commands as Markdown."""
    return "\n".join([_index(), *map(_described, commands()), _exit_codes()])


def _index() -> str:
    rows = [
        f"| [`starling {each.name}`](#{_anchor(each.name)}) | {each.help.partition(chr(10))[0]} |"
        for each in commands()
        if each.name
    ]
    return "## All commands\n\n| command | what it does |\n|---|---|\n" + "\n".join(rows) + "\n"


def _anchor(name: str) -> str:
    return f"starling-{name}".replace(" ", "-")


def _described(command: Command) -> str:
    arguments = [each for each in command.parameters if each.param_type_name == "argument"]
    title = f"starling {command.name}".strip()
    last = ["COMMAND"] if command.is_group else []
    usage = " ".join([title, "[OPTIONS]", *map(_usage, arguments), *last])
    parts = [f"## {title}\n", f"{command.help}\n", f"```text\n{usage}\n```\n"]
    if command.parameters:
        parts.append("| argument or option | default | meaning |\n|---|---|---|")
        parts[-1] += "".join(f"\n{_row(each)}" for each in command.parameters) + "\n"
    if command.example:
        parts.append(f"Example:\n\n```sh\n{command.example}\n```\n")
    return "\n".join(parts)


def _usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    name = f"{name}..." if argument.nargs == -1 and not name.endswith("...") else name
    return name if argument.required else f"[{name}]"


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = f"`{_usage(parameter)}`"
    elif parameter.is_flag:
        name = f"`{parameter.opts[0]}`"
    else:
        annotation = parameter.type_descriptor.annotation
        name = f"`{parameter.opts[0]} {_VALUES.get(annotation, 'TEXT')}`"
    shown = parameter.default not in (None, False, ())
    default = f"`{parameter.default}`" if shown else "required" if parameter.required else ""
    return f"| {name} | {default} | {(parameter.help or '').replace('|', chr(92) + '|')} |"


def _exit_codes() -> str:
    rows = [f"| {code} | {meaning} |" for code, meaning in exit_codes().items()]
    return "## Exit codes\n\n| exit code | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"
