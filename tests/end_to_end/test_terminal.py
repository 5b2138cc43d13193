"""What commands print fits a terminal of 80 columns."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from starling.cli import app
from tests.end_to_end.test_train import Tree, starling, written

BORDERS = "│┃╎|"
CUT = re.compile(r"\w…(\s|$)")
"""A cell whose end is missing; an equation may have `1, 2, …, n`."""
COMMANDS = (
    "train songs.yaml budget.epochs=2",
    "status exp/songs",
    "audit exp/songs",
    "replay exp/songs",
    "report exp/songs",
    "evaluate exp/songs",
    "score exp/songs",
    "score exp/songs --by speaker",
    "simulate songs.yaml budget.steps=8 name=simulated",
    "profile songs.yaml --output profile.yaml",
    "plan songs.yaml --profile profile.yaml --learners 2,4 --strategies allreduce,adpsgd",
    "plan songs.yaml --preset v100-2019 --learners 2,4 --strategies allreduce,adpsgd --price 2.5 --explain",
    "compare songs.yaml --strategies allreduce,adpsgd --rates 1e-3,2e-3 --seeds 1,2 budget.steps=4 data.valid=test",
    "check songs.yaml",
    "strategies",
    "strategies streaming-diloco",
    "recipes",
)
"""In this order: later ones use what earlier ones have left. Each prints a table or a list."""


def too_wide(text: str) -> list[str]:
    """The lines that are cut off, and those of tables that do not fit. Prose may be longer: terminals wrap it."""
    lines = text.splitlines()
    return [line for line in lines if CUT.search(line) or (len(line) > 80 and line.strip()[:1] in BORDERS)]


@pytest.mark.wide
@pytest.mark.timeout(600)
def test_what_commands_print_is_neither_cut_off_nor_broken_in_80_columns(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    # `check` leaves its findings beside the data, where scores in other tests would use them
    tree["data"]["folder"] = str(tmp_path / "prepared")
    written(tree, tmp_path)
    for command in COMMANDS:
        done = starling(tmp_path, *command.split())
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert len(done.stdout + done.stderr) > 40, command
        assert too_wide(done.stdout + done.stderr) == [], command


def test_the_help_of_every_command_is_not_cut_off_in_80_columns() -> None:
    names = [each.name or each.callback.__name__ for each in app.registered_commands if each.callback]
    for name in names:
        shown = CliRunner().invoke(app, [name.replace("_", "-"), "--help"], env={"COLUMNS": "80"})
        assert shown.exit_code == 0, name
        assert too_wide(shown.stdout) == [], name


@pytest.mark.parametrize("command", ["recipes", "strategies"])
def test_a_list_keeps_its_columns_in_80_columns_and_has_a_line_for_each_name_in_a_pipe(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = CliRunner().invoke(app, [command], env={"COLUMNS": "80"}).stdout.splitlines()
    assert max(map(len, wrapped)) <= 80
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)
    listed = CliRunner().invoke(app, [command]).stdout.splitlines()
    assert max(map(len, listed)) > 80
    column = max(each.start(1) for each in map(re.compile(r" *\S+  +(\S)").match, listed) if each)
    later = [line for line in wrapped if line.startswith(" " * 10)]
    assert later and all(len(line) - len(line.lstrip()) == column for line in later)
    assert " ".join(" ".join(wrapped).split()) == " ".join(" ".join(listed).split())
