"""Servers and shared memory among real processes: who is lost is named, and soon."""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from starling.engines.processes.shared_memory import share_memory
from starling.errors import ConfigError, PeerLost
from starling.launch.launcher import launch
from tests.warm_start import start_learners

CASES = {
    "own server": ("parameter-server", {"servers": "own"}, 2),
    "server of two": ("parameter-server", {"shards": 2}, 1),
    "worker of asynchronous": ("parameter-server", {}, 2),
    "worker of hybrid": ("parameter-server", {"update": "hybrid", "shards": 2}, 2),
    "worker under a bound": ("parameter-server", {"staleness_bound": 1, "servers": "own"}, 0),
    "hogwild": ("hogwild", {}, 1),
}
every_case = pytest.mark.parametrize(("strategy", "options", "victim"), CASES.values(), ids=CASES)


def command(strategy: str, options: dict[str, Any], victim: int) -> list[str]:
    return [sys.executable, "-m", "tests.engines.served_process", strategy, json.dumps(options), str(victim)]


@every_case
def test_survivors_of_a_server_or_a_worker_name_it_and_end(
    strategy: str, options: dict[str, Any], victim: int, tmp_path: Path
) -> None:
    """kill -9 without a launcher that would end the others: they end by themselves, and the time-out plays no part."""
    with start_learners(command(strategy, options, victim), 3, tmp_path) as learners:
        store = TCPStore("127.0.0.1", learners.port, is_master=False, timeout=timedelta(seconds=100))
        store.wait(["fired"])
        fired = time.monotonic()
        ends = [learners.end(rank) for rank in range(3)]
    assert time.monotonic() - fired < 45.0
    assert ends[victim][0] == -9
    for rank in {0, 1, 2} - {victim}:
        code, said = ends[rank]
        assert code == 1
        assert f"PeerLost: learner {rank} lost learner {victim}" in said, said


@pytest.mark.parametrize(
    ("options", "victim"),
    [({"servers": "own", "staleness_bound": 1}, 1), ({"update": "hybrid"}, 0)],
    ids=["worker", "server"],
)
def test_a_learner_paused_beyond_the_time_out_is_named_and_no_process_is_left(
    options: dict[str, Any], victim: int, tmp_path: Path
) -> None:
    """SIGSTOP: all others end, servers included, and the blame does not fall on who waited for it, too."""
    stopping = [*command("parameter-server", options, victim), str(int(signal.SIGSTOP)), "5"]
    with start_learners(stopping, 3, tmp_path) as learners:
        ends = {rank: learners.end(rank) for rank in {0, 1, 2} - {victim}}
        assert learners.is_running(victim)
    for rank, (code, said) in ends.items():
        assert code == 1
        assert f"PeerLost: learner {rank} lost learner {victim}" in said, said


def test_under_the_launcher_the_cause_is_the_death(tmp_path: Path) -> None:
    """One message for the run: who was killed, by what."""
    with pytest.raises(PeerLost, match="learner 1 was killed by SIGKILL"):
        launch(command("parameter-server", {"servers": "own"}, 1), 2, tmp_path)


def test_memory_of_another_machine_is_refused() -> None:
    """A process of the same number, or none, does not hold what learner 0 wrote into its memory."""
    for holder in (os.getpid(), 2**22 - 1):
        store = HashStore()
        store.set("shared memory", json.dumps([holder, 0, "0" * 64]))
        with pytest.raises(ConfigError, match=r"learner 1 cannot share the memory of learner 0 .* on one machine"):
            share_memory(store, 1, 2, 64, timeout_seconds=1.0)


def test_a_learner_that_never_opens_the_memory_is_named() -> None:
    """Not a hang."""
    with pytest.raises(PeerLost, match=r"learner 0 waited 0.2 s for learner 1 to open the shared memory"):
        share_memory(HashStore(), 0, 2, 64, timeout_seconds=0.2)
