"""Pages of studies have the tables of their cells, and `starling plan` tells what the study of speed-up measured."""

import json

import pytest

from benchmarks import adaptation, by_nodes
from benchmarks.study_tables import PLAN, RESULTS, TABLES, cells, data_needs


@pytest.mark.parametrize("study", TABLES)
def test_a_page_has_the_tables_of_its_cells(study: str) -> None:
    page = (RESULTS / f"{study}.md").read_text(encoding="utf-8")
    tables = TABLES[study](cells(study))
    assert tables
    for table in tables:
        assert "\n".join(table) in page


def test_a_plan_tells_what_the_study_measured() -> None:
    assert json.loads(PLAN.read_text(encoding="utf-8")) == data_needs(cells("speed-up"))


def test_pictures_of_studies_exist() -> None:
    assert all((RESULTS / study / f"{study}.svg").exists() for study in TABLES)


def test_the_map_of_nodes_is_that_of_its_file() -> None:
    found = json.loads(by_nodes.RESULTS.read_text(encoding="utf-8"))
    assert by_nodes.tables(found) in (RESULTS / "topology.md").read_text(encoding="utf-8")


def test_the_table_of_adaptation_is_that_of_its_runs() -> None:
    page = (RESULTS.parent / "adapting.md").read_text(encoding="utf-8")
    assert adaptation.table(adaptation.read()) in page


def test_a_tenth_is_a_tenth() -> None:
    chosen = adaptation.tenth("theo")
    assert len(chosen) == len(set(chosen)) == 45
    assert {each[0] for each in chosen} == set("0123456789")
