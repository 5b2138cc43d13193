"""Servers and shared memory among real processes: who is lost is named, and soon."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from starling.engines.shared_memory import share_memory
from starling.errors import ConfigError, PeerLost
from starling.launch.launcher import launch, loopback_store

CASES = {
    "own server": ("parameter-server", {"servers": "own"}, 2),
    "server of two": ("parameter-server", {"shards": 2}, 1),
    "worker of asynchronous": ("parameter-server", {}, 2),
    "worker of hybrid": ("parameter-server", {"update": "hybrid", "shards": 2}, 2),
    "worker under a bound": ("parameter-server", {"staleness_bound": 1, "servers": "own"}, 0),
    "hogwild": ("hogwild", {}, 1),
}
LONG = ("server of two", "worker of asynchronous", "worker under a bound")
"""Left to `make soak`: each starts three processes."""
every_case = pytest.mark.parametrize(
    ("strategy", "options", "victim"),
    [pytest.param(*case, id=name, marks=[pytest.mark.soak] if name in LONG else []) for name, case in CASES.items()],
)


def command(strategy: str, options: dict[str, Any], victim: int) -> list[str]:
    return [sys.executable, "-m", "tests.engines.served_process", strategy, json.dumps(options), str(victim)]


@every_case
def test_survivors_of_a_server_or_a_worker_name_it_and_end(strategy: str, options: dict[str, Any], victim: int) -> None:
    """kill -9 without a launcher that would end the others: they end by themselves, and the time-out plays no part."""
    with loopback_store() as port:
        place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        learners = [
            subprocess.Popen(
                command(strategy, options, victim),
                env={**os.environ, **place, "RANK": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "True"},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(3)
        ]
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=100))
        store.wait(["fired"])
        fired = time.monotonic()
        logs = [process.communicate(timeout=100)[1] for process in learners]
    assert time.monotonic() - fired < 45.0
    assert learners[victim].returncode == -9
    for rank in {0, 1, 2} - {victim}:
        assert learners[rank].returncode == 1
        assert f"PeerLost: learner {rank} lost learner {victim}" in logs[rank], logs[rank]


@pytest.mark.parametrize(
    ("options", "victim"),
    [({"servers": "own", "staleness_bound": 1}, 1), ({"update": "hybrid"}, 0)],
    ids=["worker", "server"],
)
def test_one_that_stands_still_beyond_the_time_out_is_named_and_nobody_is_left(
    options: dict[str, Any], victim: int
) -> None:
    """SIGSTOP: all others end, servers included, and the blame does not fall on who waited for it, too."""
    with loopback_store() as port:
        place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        learners = [
            subprocess.Popen(
                [*command("parameter-server", options, victim), str(int(signal.SIGSTOP)), "5"],
                env={**os.environ, **place, "RANK": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "True"},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(3)
        ]
        try:
            logs = {rank: learners[rank].communicate(timeout=60)[1] for rank in {0, 1, 2} - {victim}}
            assert learners[victim].poll() is None
        finally:
            for learner in learners:
                learner.kill()
                learner.wait()
    for rank, log in logs.items():
        assert learners[rank].returncode == 1
        assert f"PeerLost: learner {rank} lost learner {victim}" in log, log


def test_under_the_launcher_the_cause_is_the_death(tmp_path: Path) -> None:
    """One message for the run: who was killed, by what."""
    strategy, options, victim = CASES["own server"]
    with pytest.raises(PeerLost, match="learner 2 was killed by SIGKILL"):
        launch(command(strategy, options, victim), 3, tmp_path)


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
