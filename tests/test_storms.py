"""The page on storms has the tables of its file."""

import json
from pathlib import Path

from benchmarks.storms import RESULTS, tables

PAGE = Path(__file__).parents[1] / "docs" / "results" / "storms.md"


def test_the_page_has_the_tables_of_the_file() -> None:
    found = tables(json.loads(RESULTS.read_text(encoding="utf-8"))).split("\n\n")
    assert len(found) == 2
    assert all(each in PAGE.read_text(encoding="utf-8") for each in found)
