"""Servers and shared memory among real processes: who is lost is named, and soon."""

import json
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Barrier, local
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.optim import SGD

from starling.engines.processes import links
from starling.engines.processes.handshake import Peers
from starling.engines.processes.learner import ProcessLearner
from starling.engines.processes.place import Place
from starling.engines.processes.threads import Release
from starling.errors import ConfigError, PeerLost
from starling.launch.launcher import launch
from starling.training.job import Statistics
from starling.training.replica import Replica
from tests.warm_start import start_learners

CASES = {
    "own server": ("parameter-server", {"servers": "own"}, 2),
    "server of two": ("parameter-server", {"shards": 2}, 1),
    "worker of asynchronous": ("parameter-server", {}, 2),
    "worker of hybrid": ("parameter-server", {"update": "hybrid", "shards": 2}, 2),
    "worker under a bound": ("parameter-server", {"staleness_bound": 1, "servers": "own"}, 0),
    "hogwild": ("hogwild", {}, 1),
}


def command(strategy: str, options: dict[str, Any], victim: int) -> list[str]:
    return [sys.executable, "-m", "tests.engines.served_process", strategy, json.dumps(options), str(victim)]


@pytest.mark.wide
def test_survivors_of_a_server_or_a_worker_name_it_and_end(tmp_path: Path) -> None:
    """kill -9 without a launcher that would end the others: they end by themselves, and the time-out plays no part.

    Three cases run at a time: they mostly wait.
    """

    def killed(case: str) -> tuple[float, list[tuple[int, str]]]:
        folder = tmp_path / case
        folder.mkdir()
        with start_learners(command(*CASES[case]), 3, folder) as learners:
            store = TCPStore("127.0.0.1", learners.port, is_master=False, timeout=timedelta(seconds=100))
            store.wait(["fired"])
            fired = time.monotonic()
            ends = [learners.end(rank) for rank in range(3)]
        return time.monotonic() - fired, ends

    with ThreadPoolExecutor(3) as pool:
        found = dict(zip(CASES, pool.map(killed, CASES), strict=True))
    for case, (taken, ends) in found.items():
        victim = CASES[case][2]
        assert taken < 45.0, case
        assert ends[victim][0] == -9, case
        for rank in {0, 1, 2} - {victim}:
            code, said = ends[rank]
            assert code == 1, case
            assert f"PeerLost: learner {rank} lost learner {victim}" in said, said


@pytest.mark.wide
def test_a_learner_paused_beyond_the_time_out_is_named_and_no_process_is_left(tmp_path: Path) -> None:
    """SIGSTOP, to a worker and to a server: all others end, servers included, and the blame does not fall on who waited
    for it, too."""

    def paused(options: dict[str, Any], victim: int) -> dict[int, tuple[int, str]]:
        folder = tmp_path / str(victim)
        folder.mkdir()
        stopping = [*command("parameter-server", options, victim), str(int(signal.SIGSTOP)), "5"]
        with start_learners(stopping, 3, folder) as learners:
            ends = {rank: learners.end(rank) for rank in {0, 1, 2} - {victim}}
            assert learners.is_running(victim)
        return ends

    cases: dict[int, dict[str, Any]] = {1: {"servers": "own", "staleness_bound": 1}, 0: {"update": "hybrid"}}
    with ThreadPoolExecutor(len(cases)) as pool:
        found = dict(zip(cases, pool.map(paused, cases.values(), cases), strict=True))
    for victim, ends in found.items():
        for rank, (code, said) in ends.items():
            assert code == 1
            assert f"PeerLost: learner {rank} lost learner {victim}" in said, said


def test_under_the_launcher_the_cause_is_the_death(tmp_path: Path) -> None:
    """One message for the run: who was killed, by what."""
    with pytest.raises(PeerLost, match="learner 1 was killed by SIGKILL"):
        launch(command("parameter-server", {"servers": "own"}, 1), 2, tmp_path)


def unconnected(rank: int, store: HashStore, seconds: float) -> ProcessLearner:
    """One of two learners, which can only share its weights."""
    learner = ProcessLearner.__new__(ProcessLearner)
    learner.release, learner.peers = Release(), Peers(Place(rank, 2, rank, 2, store), seconds)
    learner.rank, learner.world, learner._place = rank, 2, learner.peers.place
    learner.statistics, learner.sync_group = Statistics(), range(rank, rank + 1)
    weights = torch.full((3,), float(rank))
    learner.replica = Replica(weights, weights.clone(), [nn.Parameter(weights)], lambda given: SGD(given, lr=1.0), None)
    return learner


def test_all_learners_have_the_memory_of_learner_0() -> None:
    """Its weights are in it, and what one writes is there for the other."""
    store, met = HashStore(), Barrier(2)

    def share(rank: int) -> list[float]:
        weights, counts = unconnected(rank, store, 30.0)._shared_model(1)
        assert weights.tolist() == [0.0, 0.0, 0.0]
        met.wait(30.0)
        weights[rank], counts[0, rank] = rank + 1.0, rank + 1
        met.wait(30.0)
        return [*weights.tolist(), *counts[0].tolist()]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(share, range(2))) == [[1.0, 2.0, 0.0, 1, 2]] * 2


def test_memory_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By both learners, at once."""
    of_thread = local()
    monkeypatch.setattr(links, "_machine", lambda: of_thread.machine)
    store = HashStore()

    def share(rank: int) -> str:
        of_thread.machine = f"machine {rank}"
        with pytest.raises(ConfigError) as refused:
            unconnected(rank, store, 30.0)._shared_model(1)
        return str(refused.value)

    with ThreadPoolExecutor(2) as pool:
        for rank, said in enumerate(pool.map(share, range(2))):
            assert f"learner {rank} cannot share memory with learner {1 - rank}; all learners must run on one" in said


def test_a_learner_that_never_opens_the_memory_is_named() -> None:
    """Not a hang."""
    with pytest.raises(PeerLost, match=r"learner 0 lost learner 1 in sharing a model's memory"):
        unconnected(0, HashStore(), 0.2)._shared_model(1)
