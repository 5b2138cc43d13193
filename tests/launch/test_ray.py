"""Learners on a Ray cluster of several raylets, every one on this machine's loopback interface."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

import starling
from benchmarks.ray_cluster import RayCluster, ray_cluster
from starling.checkpoint.reader import latest, load
from starling.errors import ConfigError, MissingExtraError, StarlingError
from starling.launch.messages import Status, decode_status
from starling.runs.experiment.seen import read_seen
from tests.launch.ray_job import BATCHES, EPOCHS, make_job

PATIENCE = 150.0


@pytest.fixture(autouse=True)
def without_main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners import the script that called `starling.train`, which here would be pytest."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    with ray_cluster() as started:
        yield started


class Run:
    """A run in a thread of its own, so that the test can change the cluster meanwhile."""

    def __init__(self, folder: Path, learners: int, address: str, **how: Any) -> None:
        self.experiment = folder / "exp" / "toy"
        self.slow = folder / "slow"
        self.slow.touch()
        self.said = StringIO()
        self.error: BaseException | None = None
        options = {"launch": {"kind": "ray", "address": address}, "engine": {"threads": 1}, **how}
        self._thread = threading.Thread(target=self._train, args=[folder, learners, options], daemon=True)
        self._thread.start()

    def _train(self, folder: Path, learners: int, options: dict[str, Any]) -> None:
        try:
            job = make_job(self.slow)
            starling.train(job, learners, name="toy", exp=folder / "exp", console=Console(file=self.said), **options)
        except StarlingError as error:
            self.error = error

    def wait_until(self, holds: Callable[[Status], bool]) -> Status:
        """Wait until the run's status is as wanted."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self._thread.is_alive():
            file = self.experiment / "status.json"
            if file.exists() and holds(status := decode_status(file.read_bytes())):
                return status
            time.sleep(0.1)
        raise AssertionError(f"{self.error}; the run said:\n{self.said.getvalue()}")

    def end(self) -> None:
        self.slow.unlink(missing_ok=True)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), self.said.getvalue()


def num_training(status: Status) -> int:
    return sum(each.num_steps >= 2 for each in status.learners)


def test_a_lost_node_s_learner_comes_back_on_a_new_node_and_everything_is_seen_once(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """One of two raylets is killed half-way, and another one is added: its learner joins there, and the run ends well.

    Nothing is left: neither processes nor the file with the run's token.
    """
    cluster.add(num_cpus=1)
    lost = cluster.add(num_cpus=1)
    run = Run(tmp_path, 2, cluster.address, on_loss="replace")
    run.wait_until(lambda status: num_training(status) == 2)
    assert (run.experiment / "log" / "run-token").stat().st_mode & 0o777 == 0o600
    cluster.kill(lost)
    status = run.wait_until(lambda status: bool(status.losses))
    assert "was lost with its actor on node 127.0.0.1" in status.losses[0]
    cluster.add(num_cpus=1)
    run.wait_until(lambda status: status.generation == 2)
    run.end()
    assert run.error is None, run.said.getvalue()
    assert "has joined; 2 learners train now" in run.said.getvalue()
    manifest = load(latest(run.experiment)).manifest
    assert (manifest.position.num_done, manifest.world) == (EPOCHS * BATCHES, 2)
    seen = Counter(sight.ticket.step for sight in read_seen(run.experiment / "seen", manifest.position))
    assert seen == Counter(range(EPOCHS * BATCHES))
    logs = sorted(path.name for path in (run.experiment / "log").glob("learner-*"))
    assert logs == ["learner-0.log", "learner-1.log"]
    assert not (run.experiment / "log" / "run-token").exists()
    assert not list(run.experiment.glob(".starling-job-*"))


def test_without_a_cluster_there_is_one_error_that_says_what_to_do(tmp_path: Path) -> None:
    """Before anything is written."""
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    launch = {"kind": "ray", "address": "127.0.0.1:1"}
    with pytest.raises(ConfigError, match=r"no Ray cluster at 127.0.0.1:1 to connect to .*ray start --head"):
        starling.train(make_job(tmp_path / "slow"), 2, exp=tmp_path / "exp", launch=launch)
    assert not (tmp_path / "exp").exists()


def test_without_ray_there_is_one_error_that_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not an ImportError."""
    monkeypatch.setattr("starling.extras.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"launch: ray needs ray: pip install 'starling-asr\[ray\]'"):
        starling.train(make_job(tmp_path / "slow"), 2, exp=tmp_path / "exp", launch="ray")


def test_a_group_of_learners_on_a_node_holds_whole_super_learners(tmp_path: Path) -> None:
    """Otherwise a super-learner's all-reduce would cross nodes."""
    strategy = {"name": "hadpsgd", "per_node": 2}
    launch = {"kind": "ray", "learners_per_node": 3}
    with pytest.raises(ConfigError, match=r"learners_per_node: 3 is not a multiple of 2, the size of a super-learner"):
        starling.train(make_job(tmp_path / "slow"), 6, exp=tmp_path / "exp", strategy=strategy, launch=launch)
