"""Documents tell the truth: commands run, recipes are recipes, links lead somewhere, and promises have tests."""

import os
import re
import shlex
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import yaml

from starling.speech.recipe import check_recipe
from tests.code_blocks import code_blocks
from tests.sessions import run_to_end

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "docs/running.md",
    "docs/reports.md",
    "docs/your-own-loop.md",
    "docs/data.md",
    "docs/comparing.md",
    "docs/decoding.md",
    "docs/planning.md",
]
"""The pages whose commands are run, in their order: a later page may use what an earlier one has left."""
DEMO_SETS = "{train: 1600, dev: 100, test: 200}"
REACHES = {
    "--nproc-per-node 2 examples/classifier.py": r"accuracy (0\.9\d+|1\.0+) with 2 learners under adpsgd",
    "python examples/classifier.py": r"accuracy (0\.9\d+|1\.0+) with 1 learners under adpsgd",
    "examples/four_processes.sh": r"(?s)kill -9\n.*accuracy (0\.9\d+|1\.0+) with 4 learners under adpsgd",
}
"""What a command must say, by a part of it."""


def blocks(page: str, language: str) -> list[str]:
    """The blocks of a page that are marked with a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


COMMANDS = [
    (page, line)
    for page in PAGES
    for block in code_blocks(ROOT / page)
    if block.language == "sh" and not block.reason
    for line in block.text.splitlines()
]
MAKE = [command for _, command in COMMANDS if command.startswith("make ")]


def shown() -> list[object]:
    """The commands to run, with their pages. `make test` runs those of the README, `make soak` all."""
    return [
        pytest.param(page, line, marks=[] if page == "README.md" else pytest.mark.soak)
        for page, line in COMMANDS
        if line not in MAKE
    ]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout in which `make demo` was run, to the commands of the documents.

    The corpus is a tenth of the demo's, and the run of the demo ends after a few steps.
    """
    folder = tmp_path_factory.mktemp("readme")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "recipes").mkdir()
    recipe = (ROOT / "recipes" / "demo.yaml").read_text(encoding="utf-8")
    assert DEMO_SETS in recipe
    smaller = recipe.replace(DEMO_SETS, "{train: 160, dev: 10, test: 20}")
    (folder / "recipes" / "demo.yaml").write_text(smaller, encoding="utf-8")
    code, said, _ = run_to_end(["starling", "train", "recipes/demo.yaml", "budget.steps=8"], folder, environment())
    assert code == 0, said
    return folder


WITHOUT_EXTRAS = """
import importlib.machinery

find_spec = importlib.machinery.PathFinder.find_spec

def find_others(name, path=None, target=None):
    return None if name.partition(".")[0] in {!r} else find_spec(name, path, target)

importlib.machinery.PathFinder.find_spec = staticmethod(find_others)
"""
"""A `sitecustomize` module with which Python finds no package of the extras."""


def extras() -> set[str]:
    """The packages that only extras install, as they are imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [
        line
        for name, lines in project["optional-dependencies"].items()
        if name not in ("dev", "docs")
        for line in lines
    ]
    names = {re.split(r"[\[<>=!~ ]", line)[0].replace("-", "_") for line in listed}
    return names - {"starling_asr"}


def environment() -> dict[str, str]:
    """The variables of a user who has activated the virtual environment."""
    return {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


@pytest.mark.wide
def test_the_script_of_the_readme_trains_on_real_processes_survives_a_kill_and_is_simulated(tmp_path: Path) -> None:
    """Any model and data, in under 30 lines, from the README's own text, with what the package installs by default."""
    (script,) = [block for block in blocks("README.md", "python") if "starling.train(" in block]
    assert len([line for line in script.splitlines() if line.strip()]) < 30
    (tmp_path / "quadrants.py").write_text(script, encoding="utf-8")
    without_extras = tmp_path / "without-extras"
    without_extras.mkdir()
    (without_extras / "sitecustomize.py").write_text(WITHOUT_EXTRAS.format(extras()), encoding="utf-8")
    paths = [str(without_extras), *filter(None, [os.environ.get("PYTHONPATH")])]
    bare = {**environment(), "PYTHONPATH": os.pathsep.join(paths)}
    code, said, left = run_to_end([sys.executable, "quadrants.py"], tmp_path, bare)
    assert code == 0, said
    assert not left
    assert "learner 1 was killed by SIGKILL" in said
    (accuracy,) = re.findall(r"checkpoints/step-\d+ tensor\((0\.\d+)\)", said)
    assert float(accuracy) > 0.9
    assert re.search(r"[\d.]+ simulated seconds", said)


def test_the_two_make_commands_are_what_ci_runs() -> None:
    """`make demo` and `make test` take minutes and install things: the CI script runs them, and no test does.

    It runs the tests as a part of `make test-all`.
    """
    assert MAKE == ["make demo", "make test"]
    ci_lines = [line.strip() for line in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()]
    assert {"make demo", "make test-all"} <= set(ci_lines)


@pytest.mark.wide
@pytest.mark.parametrize(("page", "command"), shown())
def test_every_command_of_the_documents_runs(page: str, command: str, workplace: Path) -> None:
    """In the documents' order, in one folder, with the installed `starling` and what `make demo` leaves.

    Trainings start warm; tests/end_to_end/test_train.py has a cold one.
    CI runs `make demo`, the same recipe with its whole corpus.
    """
    code, said, left = run_to_end(shlex.split(command), workplace, environment())
    assert code == 0, f"{page}: {said}"
    assert not left
    for part, pattern in REACHES.items():
        assert part not in command or re.search(pattern, said), said


def test_the_readme_is_short() -> None:
    """At most 200 lines; the rest is in docs/."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_every_recipe_in_the_documents_is_one() -> None:
    """Complete, with keys that exist."""
    recipes = [text for page in PAGES for text in blocks(page, "yaml") if text.startswith("name:")]
    assert recipes
    for text in recipes:
        check_recipe(yaml.safe_load(text), "in a document")


def test_every_promise_names_a_test_that_exists() -> None:
    """docs/guarantees.md cannot promise what no test shows."""
    page = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    file = ""
    shown = re.findall(r"`([\w/.…]+)::(test_\w+)`", page)
    assert len(shown) >= 10
    for named, test in shown:
        file = file if named == "…" else named
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"


def test_every_promise_has_its_number_and_a_test() -> None:
    """No number is missing or used twice; in a section they ascend. The tests of a promise follow it."""
    page = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    sections = [[int(each) for each in re.findall(r"^\*\*(\d+)\.\*\* ", part, re.M)] for part in page.split("\n## ")]
    assert all(numbers == sorted(numbers) for numbers in sections)
    assert sorted(chain.from_iterable(sections)) == list(range(1, 1 + sum(map(len, sections))))
    tests = re.findall(r"\n\n<details markdown><summary>Tests</summary>\n\n(.+)\n\n</details>\n", page)
    assert len(tests) == page.count("<details") >= 100
    assert all("::test_" in shown for shown in tests)


def test_every_link_of_the_documents_leads_somewhere() -> None:
    """Links inside the repository name files that exist."""
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
