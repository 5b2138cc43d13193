"""Documents tell the truth: every command of the README runs, and every promise names a test that exists."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from starling.experiment.recipe import check_recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines() if line.strip()
]
MAKE = [command for command in COMMANDS if command.startswith("make ")]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout to the README's commands."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("recipes", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_the_two_make_commands_are_what_ci_runs() -> None:
    """`make demo` and `make test` take minutes and install things: the CI script runs them, and no test does."""
    assert MAKE == ["make demo", "make test"]
    ci_lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert set(MAKE) <= set(ci_lines)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in MAKE])
def test_every_command_of_the_readme_runs(command: str, workplace: Path) -> None:
    """In the README's order, in one folder, with the installed `starling` and nothing else set up."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        shlex.split(command),
        cwd=workplace,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_recipe_in_the_readme_is_one() -> None:
    """Complete, with keys that exist."""
    recipes = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert recipes
    for text in recipes:
        check_recipe(yaml.safe_load(text), "README.md")


def test_every_promise_names_a_test_that_exists() -> None:
    """docs/guarantees.md cannot promise what no test shows."""
    page = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    file = ""
    shown = re.findall(r"`([\w/.…]+)::(test_\w+)`", page)
    assert len(shown) >= 10
    for named, test in shown:
        file = file if named == "…" else named
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"


def test_every_link_of_the_documents_leads_somewhere() -> None:
    """Links inside the repository name files that exist."""
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
