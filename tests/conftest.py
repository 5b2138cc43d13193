"""Fixtures shared by all tests."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from starling.launch import launcher, process
from starling.launch.process import preloading
from tests import warm_start

if TYPE_CHECKING:
    from benchmarks.ray_cluster import RayCluster


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "ByFile":
    """Where several processes test, each takes whole files."""
    return ByFile(config, log)


_ON_RAY = {"test_ray.py", "test_prepare_parallel.py"}
"""Files whose tests share one Ray cluster."""


class ByFile(LoadScopeScheduling):
    """Tests of one file share fixtures, those of the contract one set of runs, those on Ray a cluster, and those of
    other libraries the process that has loaded them: these stay together."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.partition("::")[0])
        if file.name in _ON_RAY:
            return "on Ray"
        return str(file.parent if file.parent.name in ("contract", "integrations") else file)


_WIDE_FIXTURES = {"ray_head", "outcome", "browser"}
"""What takes long to start: a Ray cluster, all cases with other libraries, a browser."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The commands of the README come first: they are the longest chain of tests, which only one process can run."""
    items.sort(key=lambda item: item.path.name != "test_documents.py")
    for item in items:
        if _WIDE_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.wide)
        if item.path.parent.name == "contract":
            item.add_marker(pytest.mark.timeout(1200))  # the first of them runs the cases of all


@pytest.fixture(scope="session")
def shared_data() -> Path | None:
    """The folder of real recordings beside the checkout, or None where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    return folder if folder.is_dir() else None


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what Starling 0.2 wrote, in which paths are relative to the current folder."""
    folder = tmp_path / "kept-0.2"
    shutil.copytree(Path(__file__).parent / "data" / "kept-0.2", folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="session")
def ray_head(warm_launches: None) -> "Iterator[RayCluster]":
    """A Ray cluster of one node with one CPU, whose learners start warm; see `RayCluster.more_nodes`."""
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    from benchmarks.ray_cluster import ray_cluster

    environment = {
        "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "tests.warm_start.use_in_this_process",
        warm_start.ADDRESS: str(warm_start.WarmPopen.open()),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    with ray_cluster(environment) as started:
        started.add(num_cpus=1)
        yield started


@pytest.fixture(scope="session", autouse=True)
def warm_launches() -> Iterator[None]:
    """Learners start warm, those of fixtures that several tests share included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "Popen", warm_start.start)
        patch.setattr(launcher, "preloading", lambda modules: nullcontext())
        yield
    warm_start.WarmPopen.close()


@pytest.fixture(autouse=True)
def learners_start_warm(request: pytest.FixtureRequest, warm_launches: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners that a test's own process launches need not load torch, unless it is marked `cold`, or `soak`."""
    if {"cold", "soak"} & {mark.name for mark in request.node.iter_markers()}:
        monkeypatch.setattr(process, "Popen", subprocess.Popen)
        monkeypatch.setattr(launcher, "preloading", preloading)
    warm_start.WarmPopen.started.clear()
