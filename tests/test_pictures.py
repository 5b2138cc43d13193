"""The pictures of the documents are what the topologies and the virtual engine do, not what somebody drew."""

import importlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
COMMITTED = sorted(PICTURES.glob("*.svg"))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all pictures, drawn anew."""
    folder = tmp_path_factory.mktemp("pictures")
    subprocess.run([sys.executable, str(PICTURES / "draw.py"), str(folder)], check=True, timeout=200)
    return folder


@pytest.mark.wide
def test_the_script_draws_the_committed_pictures_and_no_others(drawn: Path) -> None:
    """Who adds or renames a picture commits what the script draws."""
    assert {file.name for file in drawn.iterdir()} == {file.name for file in COMMITTED}


@pytest.mark.wide
@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_a_picture_is_byte_for_byte_what_the_script_draws(file: Path, drawn: Path) -> None:
    """A timeline is a run on the virtual engine, which is the same every time; after a change of a strategy, an engine
    or a topology run `python docs/pictures/draw.py` and look at the pictures."""
    assert file.read_bytes() == (drawn / file.name).read_bytes()


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_a_picture_is_small_and_says_what_it_shows(file: Path) -> None:
    """At most 30 KB of plain SVG with a title and a description, and nothing loaded from elsewhere."""
    assert file.stat().st_size <= 30_000
    text = file.read_text(encoding="utf-8")
    namespace = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(text)
    assert root.attrib["aria-labelledby"] == "title desc"
    for name in ("title", "desc"):
        element = root.find(namespace + name)
        assert element is not None and element.text
    for loaded in ("<script", "<image", "href", "url(http", "@import", "@font-face"):
        assert loaded not in text


@pytest.fixture(scope="module")
def interactive() -> Iterator[ModuleType]:
    """The script that writes the interactive page."""
    pytest.importorskip("jinja2", reason="the extra `report` is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PICTURES))
        yield importlib.import_module("interactive")


def test_the_interactive_page_is_what_the_script_makes_of_the_runs_in_it(interactive: ModuleType) -> None:
    """It shows all strategies in at most 0.6 MB. After a change of the template or of a docstring, run `python
    docs/pictures/interactive.py allreduce`, and after adding a strategy, with its name."""
    text = interactive.PAGE.read_text(encoding="utf-8")
    assert interactive.page(interactive.held(text)) == text
    assert len(text.encode()) <= 600_000
    pages = PICTURES.with_name("strategies").glob("[a-z]*.md")
    assert {strategy for strategy, _ in interactive.SHOWN.values()} == {page.stem for page in pages}


def test_the_runs_in_the_interactive_page_are_what_the_strategies_do(interactive: ModuleType) -> None:
    """In a setting of each strategy, another one for each."""
    held = interactive.held(interactive.PAGE.read_text(encoding="utf-8"))
    for number, name in enumerate(interactive.SHOWN):
        place = 7 * number % len(interactive.SETTINGS)
        columns = [column[place] for column in held.runs(name)]
        assert columns == interactive.run(name, *interactive.SETTINGS[place]), name
