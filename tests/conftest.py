"""Fixtures shared by all tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from starling.launch import process
from tests import warm_start


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "ByFile":
    """Where several processes test, each takes whole files."""
    return ByFile(config, log)


class ByFile(LoadScopeScheduling):
    """Tests of one file share fixtures, and those of the contract one set of runs: these stay together."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.partition("::")[0])
        return str(file.parent if file.parent.name == "contract" else file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The commands of the README come first: they are the longest chain of tests, which only one process can run."""
    items.sort(key=lambda item: item.path.name != "test_documents.py")


@pytest.fixture(scope="session")
def shared_data() -> Path | None:
    """The folder of real recordings beside the checkout, or None where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session")
def warm_launches() -> Iterator[None]:
    """Ends the process that becomes learners."""
    yield
    warm_start.WarmPopen.close()


@pytest.fixture(autouse=True)
def learners_start_warm(request: pytest.FixtureRequest, warm_launches: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners that a test's own process launches need not load torch, unless it is marked `cold`, or `soak`."""
    if not {"cold", "soak"} & {mark.name for mark in request.node.iter_markers()}:
        monkeypatch.setattr(process, "Popen", warm_start.start)
    warm_start.WarmPopen.started.clear()
