"""Fixtures shared by all tests."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.warm_start import Line


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one file share fixtures, and those of the contract one set of runs: each of these stays together where
    several processes test."""
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group(folder if folder == "contract" else item.path.stem))


@pytest.fixture(scope="session")
def shared_data() -> Path | None:
    """The folder of real recordings beside the checkout, or None where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session")
def warm_start() -> Iterator[Line]:
    """Starts learner processes, without a launcher, in no time."""
    with closing(Line()) as line:
        yield line
