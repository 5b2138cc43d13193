"""A Ray actor that runs one learner's process on a node of the cluster.

The learner is an ordinary child process, started as on the launcher's machine, and not code inside the actor: it has
its own signals, threads, log and exit code, and a crash of its libraries is an exit code, too. The actor connects to
the launcher over TCP, and the learner inherits that connection. A lost launcher thus ends the learner, as it does on
one machine; so does a lost actor, because the launcher then hangs up.
"""

import fcntl
import select
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from starling.engines.processes.place import NODE_CPUS
from starling.errors import ConfigError, ProtocolError
from starling.launch.link import ORPHANED, knock
from starling.launch.process import LocalProcess, Program, end_loaders, scratch_folder, start
from starling.launch.rendezvous import OWN_DEVICE, loopback_interface
from starling.timeouts import READ, TERMINATION, UNREACHABLE

_ADDRESS_OF = 0x8915
"""Linux's SIOCGIFADDR, a request for the address of an interface."""


@dataclass(frozen=True)
class Errand:
    """A keeper's order to start a learner. It travels through Ray, and therefore holds no secret: the run's token is in
    a file."""

    program: Program
    """Program to start, with an empty token. The node's own Python executes its command."""
    folder: Path
    """Launcher's current folder, from which relative paths start."""
    token_file: Path
    """Path of a file in the experiment's folder that holds the run's token."""
    address: str
    """Address of the launcher's machine."""
    door: int
    """Port on which the launcher waits for keepers."""
    store: int
    """Port of the store."""
    resources: Mapping[str, float]
    """Resources that Ray reserves for each learner."""
    learner_id: int = 0
    joins: bool = False
    name: str = ""
    """Identifier of this start of the learner."""


class Keeper:
    """The actor. `keep` runs for as long as the learner does; other threads call the other methods meanwhile."""

    def __init__(self) -> None:
        self._process: Future[LocalProcess] = Future()
        self._scratch: Path | None = None

    def keep(self, errand: Errand) -> int | None:
        """Run a learner to its end; return its exit code, or None if this method ended the learner, because the
        launcher could no longer be reached. Raises ConfigError if the learner cannot be started on this node."""
        node, address, num_cpus = _this_node()
        try:
            token = errand.token_file.read_text(encoding="utf-8").strip()
            errand.folder.stat()
        except OSError as error:
            raise ConfigError(
                f"node {node} cannot read {error.filename}, which learner {errand.learner_id} needs "
                f"({error.strerror}): the experiment's folder and the current one must be on storage that all nodes "
                "share, under the same paths; set exp to such a folder, and start there"
            ) from None
        try:
            line = knock(errand.address, errand.door, token, UNREACHABLE, errand.name, node)
        except (OSError, ProtocolError) as error:
            raise ConfigError(
                f"node {node} cannot reach the launcher at {errand.address}:{errand.door} ({error}): the nodes of the "
                "cluster must be able to connect to the driver's machine"
            ) from None
        has_device = errand.resources.get("GPU", 0.0) >= 1.0
        here = max(1, min(errand.program.world, int(num_cpus // (errand.resources.get("CPU") or 1))))
        place: dict[str, object] = {
            "LOCAL_RANK": 0 if has_device else errand.learner_id % here,
            "LOCAL_WORLD_SIZE": here,
            "MASTER_ADDR": errand.address,
            "MASTER_PORT": errand.store,
            "GLOO_SOCKET_IFNAME": interface_of(address),
            OWN_DEVICE: int(has_device),
            NODE_CPUS: max(1, int(num_cpus)),
        }
        program = replace(errand.program, token=token, command=(sys.executable, *errand.program.command[1:]))
        with line:
            self._scratch = scratch_folder()
            process = start(program, errand.learner_id, errand.joins, self._scratch, place, line, errand.folder)
            self._process.set_result(process)
            hung_up = select.poll()
            hung_up.register(line, select.POLLRDHUP)
            while process.is_running and not hung_up.poll(1000.0 * READ):
                pass
            if process.is_running or process.exit_code == ORPHANED:  # the launcher cannot be reached
                process.signal(signal.SIGCONT)
                if not process.wait(TERMINATION):  # a learner notices, too, unless it is stuck
                    process.kill()
                self.clear()
                return None
        return process.exit_code or 0

    def signal(self, number: int) -> None:
        """Send the learner a signal: at once, or as soon as it has been started."""
        self._process.result().signal(number)

    def clear(self) -> None:
        """End the loading processes that the learner left, and remove its temporary files."""
        if self._process.done():
            end_loaders([self._process.result()])
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _this_node() -> tuple[str, str, float]:
    """The name, the address and the number of CPUs of the node on which this actor runs."""
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    node = next(each for each in ray.nodes() if each["NodeID"] == node_id)
    address = str(node["NodeManagerAddress"])
    return f"{address} ({node_id[:8]})", address, float(node["Resources"].get("CPU", 0.0))


def interface_of(address: str) -> str:
    """The name of the network interface that has this IPv4 address. Raises ProtocolError if there is none."""
    if address.startswith("127."):
        return loopback_interface()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(any_socket, _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    raise ProtocolError(f"no network interface of this machine has the address {address} by which Ray knows it")
