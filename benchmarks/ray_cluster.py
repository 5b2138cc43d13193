"""A Ray cluster of several raylets on this machine's loopback interface, and a check of what it leaves behind.

Ray reads the variables below when it is imported, so this module sets them first.
"""

import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray then keeps loopback addresses
LOOPBACK = "127.0.0.1"
MARK = "STARLING_RAY_CLUSTER"
OBJECT_STORE_BYTES = 80 * 2**20
LONGEST_END = 20.0
"""Seconds within which the processes of a killed node must have ended."""
SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
    "worker_niceness": 0,
}
"""Settings of Ray. By default, it needs some 15 s to notice a lost node, and gives it actors until then; it also gives
its workers a niceness of 15, so that other programs on a machine come first."""


class RayCluster:
    """Raylets that are started and killed one by one."""

    def __init__(self, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        """The processes of all nodes get the variables of `environment`."""
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._environment = dict(environment)
        self._has_head = False
        self.mark = secrets.token_hex(8)
        """A value of the environment variable `MARK`, which all processes of the nodes to be added inherit."""

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def logs(self) -> Path:
        """The folder to which all nodes and workers write."""
        return Path(self._cluster.head_node.get_session_dir_path()) / "logs"

    def add(self, num_cpus: int, **resources: float) -> Any:
        """Start a raylet with `num_cpus` virtual CPUs.

        The SIGTERM handler that Ray installs is replaced by the previous one: forks of this process would inherit it,
        and drain the node instead of exiting.
        """
        head = {} if self._has_head else {"_system_config": SYSTEM_CONFIG}
        self._has_head = True
        with _same_handler(signal.SIGTERM), _variables({**self._environment, MARK: self.mark}):
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
        """Kill a raylet with SIGKILL, which ends its workers."""
        self._cluster.remove_node(node, allow_graceful=False)

    @contextmanager
    def more_nodes(self) -> Iterator["RayCluster"]:
        """A context at whose end raylets added inside it are killed; none of their processes may be left."""
        own, mark = set(self._cluster.worker_nodes), self.mark
        self.mark = secrets.token_hex(8)
        try:
            yield self
        finally:
            for node in set(self._cluster.worker_nodes) - own:
                self.kill(node)
            self.mark, ended = mark, self.mark
            left = _end(ended)
        assert not left, left

    def close(self) -> None:
        """Stop everything, and remove the cluster's files."""
        head = self._cluster.head_node
        session = None if head is None else Path(head.get_session_dir_path())
        self._cluster.shutdown()
        if session is not None:
            shutil.rmtree(session, ignore_errors=True)


def _end(mark: str) -> dict[int, str]:
    """Wait for the processes of nodes with a mark, and for learners on them; kill those that are left, and return
    them."""
    deadline = time.monotonic() + LONGEST_END
    while (left := dict(_marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def _marked(mark: str) -> Iterator[tuple[int, str]]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended meanwhile
            if process.environ().get(MARK) == mark:
                yield process.pid, " ".join(process.cmdline())[:120]


@contextmanager
def _same_handler(number: int) -> Iterator[None]:
    """A context that restores the handler of a signal at its end."""
    handler = signal.getsignal(number)
    try:
        yield
    finally:
        signal.signal(number, handler)


@contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    """A context in which started processes have these environment variables."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def ray_cluster(environment: Mapping[str, str] = MappingProxyType({})) -> Iterator[RayCluster]:
    """A cluster without nodes. At the end, none of its processes may be left, and its files are removed."""
    cluster = RayCluster(environment)
    try:
        yield cluster
    finally:
        cluster.close()
        left = _end(cluster.mark)
    assert not left, left
