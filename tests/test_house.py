"""The size figures of the source measure what they state."""

from pathlib import Path

import pytest

from tools import house
from tools.house import Ceilings, Figure, Source

LEARNER = '''"""What a strategy sees."""

from abc import abstractmethod


class Learner:
    """Two lines
    of prose."""

    world: int
    """A string below an attribute."""

    def __init__(self, first, second, *, third): ...

    @abstractmethod
    def claim(self): ...  # not all of this line is a comment

    def step(self): ...
'''
RECORD = """import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Rows:
    a: int
    b: int
    c: int


@dataclass
class Record:
    name: str
    value: int

    # a comment
    def shown(self):
        return f"{self.name} is {self.value}"
"""


@pytest.fixture
def source(tmp_path: Path) -> Source:
    folder = tmp_path / "small"
    files = {
        "__init__.py": "",
        "learner.py": LEARNER,
        "record.py": RECORD,
        "large.py": "from small.record import Record\n" * 121,
        "speech/__init__.py": "from small import large, learner\n",
        "speech/plug.py": "REGISTRY.register(3)\n",
        "speech/both.py": "from small.learner import Learner\nfrom small.speech import plug\n",
    }
    for name, text in files.items():
        (path := folder / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Source(folder)


def test_figures_are_those_of_the_source(source: Source) -> None:
    """Prose is not code; a file is small and alone if a single other file imports it; rows without methods may have
    many fields."""
    assert {each.key: (each.value, each.where) for each in source.figures()} == {
        "code_lines": (145, ". 141, speech 4"),
        "code_lines_outside_speech": (141, ""),
        "files": (7, ""),
        "small_files": (1, "record.py"),
        "constructor_arguments": (3, "learner.py: Learner"),
        "dataclass_fields": (2, "record.py: Record"),
        "learner_abstract": (1, ""),
    }


@pytest.fixture
def ceilings(tmp_path: Path) -> Ceilings:
    (path := tmp_path / "house.toml").write_text("# why\nfiles = 10\nfiles_of_speech = 20\n", encoding="utf-8")
    return Ceilings(path)


FIGURES = [Figure("files", "files", 11), Figure("files_of_speech", "files of speech", 19)]


def test_a_ceiling_is_exceeded_above_itself(ceilings: Ceilings) -> None:
    assert ceilings.exceeded(FIGURES) == FIGURES[:1]
    assert ceilings.exceeded([Figure("files", "files", 10)]) == []


def test_ceilings_are_only_lowered(ceilings: Ceilings, tmp_path: Path) -> None:
    """An exceeded ceiling stays exceeded, and comments in the file stay in it."""
    ceilings.lower(FIGURES)
    assert (tmp_path / "house.toml").read_text(encoding="utf-8") == "# why\nfiles = 10\nfiles_of_speech = 19\n"
    assert ceilings.exceeded(FIGURES) == FIGURES[:1]


@pytest.mark.parametrize(("value", "code"), [(10, 0), (11, 1)])
def test_the_program_fails_if_a_figure_exceeds_its_ceiling(
    value: int, code: int, ceilings: Ceilings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house, "CEILINGS", tmp_path / "house.toml")
    monkeypatch.setattr(house, "runs", lambda: iter([Figure("files", "files", value)]))
    assert house.main(["--runs"]) == code


@pytest.mark.wide
def test_a_mini_batch_passes_no_more_files_than_allowed() -> None:
    """`make lint` compares the figures that are read from the source; this test compares those of traced runs."""
    assert house.main(["--runs"]) == 0
