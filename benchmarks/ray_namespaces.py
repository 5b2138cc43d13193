"""A Ray cluster whose nodes have separate network namespaces, so that cables can be cut, as between machines.

Each node also has its own `/tmp/ray`, where Ray keeps the files of one machine. All nodes share the other files.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.namespaces import INTERFACE, NoNamespacesError, execute
from benchmarks.ray_cluster import OBJECT_STORE_BYTES, SYSTEM_CONFIG

RAY = str(Path(sys.executable).parent / "ray")
BRIDGE, PORT = "bridge", 6379
STARTS = 3
"""Number of attempts to start a node: Ray ends one that takes half a minute, as it may on a busy machine."""
_OWN_FILES = 'mount -t tmpfs none /tmp/ray && exec "$@"'


def environment() -> dict[str, str]:
    """Environment variables for these machines, whose addresses are not loopback addresses."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"}


@dataclass
class Machine:
    """A machine of the cluster; the first machine has the control plane, and a driver."""

    namespace: str
    address: str
    process: "subprocess.Popen[bytes] | None" = None
    """The process of `ray start`, which ends with its node."""

    def inside(self, command: Sequence[str], folder: Path) -> list[str]:
        """`command`, to be run in a folder of this machine while its node runs."""
        if self.process is None:
            raise NoNamespacesError(f"no node runs in {self.namespace}")
        go = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder)]  # not by --wd, which keeps the outer mount
        return ["nsenter", "--target", str(self.process.pid), "--net", "--mount", *go, *command]

    def processes(self) -> list[psutil.Process]:
        """All processes on this machine."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        living = []
        for pid in map(int, found.stdout.split()):
            with suppress(psutil.Error):
                living.append(psutil.Process(pid))
        return living


class Machines:
    """The machines of a cluster. The first runs a node with one CPU; `start` and `kill` are for the others."""

    def __init__(self, number: int, log: Path) -> None:
        name, self._log = f"starling-ray-{secrets.token_hex(3)}", log
        self.all = [Machine(f"{name}-{each}", f"10.78.0.{each + 1}") for each in range(number)]

    @property
    def address(self) -> str:
        """The cluster's address."""
        return f"{self.all[0].address}:{PORT}"

    def lay_cables(self) -> None:
        """Make the namespaces, with a bridge in the first one, to which all others are connected."""
        hub = self.all[0]
        for machine in self.all:
            execute(["ip", "netns", "add", machine.namespace])
            execute(["ip", "-n", machine.namespace, "link", "set", "lo", "up"])
        execute(["ip", "-n", hub.namespace, "link", "add", BRIDGE, "type", "bridge"])
        execute(["ip", "-n", hub.namespace, "address", "add", f"{hub.address}/24", "dev", BRIDGE])
        execute(["ip", "-n", hub.namespace, "link", "set", BRIDGE, "up"])
        for number, machine in enumerate(self.all[1:], 1):
            ends = ["name", INTERFACE, "type", "veth", "peer", "name", f"port{number}", "netns", hub.namespace]
            execute(["ip", "-n", machine.namespace, "link", "add", *ends])
            execute(["ip", "-n", hub.namespace, "link", "set", f"port{number}", "master", BRIDGE, "up"])
            execute(["ip", "-n", machine.namespace, "address", "add", f"{machine.address}/24", "dev", INTERFACE])
            execute(["ip", "-n", machine.namespace, "link", "set", INTERFACE, "up"])

    def start(self, machine: Machine) -> None:
        """Start a node with one CPU, and wait until it has joined the cluster."""
        place = [f"--node-ip-address={machine.address}"]
        if machine is self.all[0]:
            settings = json.dumps(SYSTEM_CONFIG)
            place += ["--head", f"--port={PORT}", "--include-dashboard=false", f"--system-config={settings}"]
        else:
            place += [f"--address={self.address}"]
        ray = [RAY, "start", "--block", "--num-cpus=1", f"--object-store-memory={OBJECT_STORE_BYTES}", *place]
        own = ["ip", "netns", "exec", machine.namespace, "unshare", "--mount", "sh", "-c", _OWN_FILES, "sh", *ray]
        log = self._log / f"ray-{machine.address}.log"
        for _ in range(STARTS):
            with log.open("wb") as output:
                machine.process = subprocess.Popen(
                    own, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment()
                )
            while machine.process.poll() is None:
                if b"will now block" in log.read_bytes():
                    return
                time.sleep(0.1)
            self.kill(machine)
        raise RuntimeError(f"no node on {machine.address}: {log.read_text(errors='replace')[-2000:]}")

    def kill(self, machine: Machine) -> int:
        """Kill everything that runs on a machine at once; returns the number of killed processes."""
        living = machine.processes()
        for process in living:
            with suppress(psutil.Error):
                process.suspend()  # so that none sees another one die
        for process in living:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(living, timeout=10.0)
        if machine.process is not None:
            machine.process.wait()
            machine.process = None
        return len(living)

    def plug(self, machine: Machine, is_in: bool) -> None:
        """Put a machine's cable in, or pull it out."""
        execute(["ip", "-n", machine.namespace, "link", "set", INTERFACE, "up" if is_in else "down"])

    def remove(self) -> list[str]:
        """Kill everything and remove the namespaces; returns what was left on machines that had been killed."""
        left = [
            " ".join(each.cmdline()) for machine in self.all if machine.process is None for each in machine.processes()
        ]
        for machine in reversed(self.all):
            self.kill(machine)
            execute(["ip", "netns", "delete", machine.namespace])
        return left


@contextmanager
def machines(number: int, log: Path) -> Generator[Machines, None, None]:
    """A context with `number` machines, of which the first runs a node.

    Raises `NoNamespacesError` if namespaces are not allowed.
    """
    execute(["unshare", "--mount", "true"])
    Path("/tmp/ray").mkdir(exist_ok=True)
    cluster = Machines(number, log)
    try:
        cluster.lay_cables()
        cluster.start(cluster.all[0])
        yield cluster
    finally:
        made = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout.split()
        cluster.all = [machine for machine in cluster.all if machine.namespace in made]
        left = cluster.remove()
    if left:
        raise RuntimeError(f"left behind: {left}")
