"""The pictures of the documents are what the topologies and the virtual engine do, not what somebody drew."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

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
