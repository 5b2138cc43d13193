"""A Ray cluster of several raylets on this machine's loopback interface, and what it leaves behind.

Ray reads the variables below when it is imported, so this module sets them first.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray then keeps loopback addresses
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 * 2**20
SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
    "worker_niceness": 0,
}
"""By default, Ray needs some 15 s to notice a lost node, and until then gives it actors; and it gives its workers a
niceness of 15, so that other programs of a machine come first."""


class RayCluster:
    """Raylets that are started and killed one by one."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._has_head = False

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, num_cpus: int, **resources: float) -> Any:
        """Start a raylet with so many virtual CPUs."""
        head = {} if self._has_head else {"_system_config": SYSTEM_CONFIG}
        self._has_head = True
        return self._cluster.add_node(
            wait=True,
            **head,
            node_ip_address=LOOPBACK,
            num_cpus=num_cpus,
            resources=resources or None,
            include_dashboard=False,
            include_log_monitor=False,
            no_monitor=True,
            object_store_memory=OBJECT_STORE_BYTES,
        )

    def kill(self, node: Any) -> None:
        """Kill a raylet with SIGKILL; its workers end because of that."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """Stop everything, and remove the cluster's files."""
        head = self._cluster.head_node
        session = None if head is None else Path(head.get_session_dir_path())
        self._cluster.shutdown()
        if session is not None:
            shutil.rmtree(session, ignore_errors=True)


def ray_processes() -> dict[int, str]:
    """The processes of Ray that this process or its descendants have started, and learners on its nodes."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            found[process.pid] = " ".join(process.cmdline())[:120]
        except psutil.Error:  # it has ended meanwhile
            continue
    return found


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """A cluster without nodes. At the end, none of its processes may be left, and its files are removed."""
    before = set(ray_processes())
    cluster = RayCluster()
    try:
        yield cluster
    finally:
        cluster.close()
        deadline = time.monotonic() + 20.0
        while (left := {pid: what for pid, what in ray_processes().items() if pid not in before}) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.1)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert not left, left
