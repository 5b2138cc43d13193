"""Learners on the nodes of a running Ray cluster. Each learner is a process that a `Keeper` actor starts and watches.

Ray places the actors, gives them CPUs and GPUs, and reports when an actor is lost. Otherwise the run works as on one
machine: the launcher runs the store and receives the learners' messages, over one TCP connection for each learner.

The learner does not run inside the actor. It is an ordinary child process that is started as on the launcher's machine,
with its own signals, threads, log and exit code; a crash of its libraries also gives an exit code. The actor connects
to the launcher over TCP, and the learner inherits that connection. The loss of the launcher thus ends the learner, as
on one machine. The loss of the actor ends it, too, because the launcher then hangs up.
"""

import fcntl
import os
import secrets
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from starling.engines.processes.place import NODE_CPUS
from starling.errors import ConfigError, ProtocolError, StarlingError, require
from starling.launch.launcher import loopback_store
from starling.launch.link import ORPHANED, knock, letting_in
from starling.launch.messages import Greeted, encode
from starling.launch.process import STOP_SIGNALS, LearnerProcess, Program, Site, end_loaders, scratch_folder, start
from starling.launch.rendezvous import OWN_DEVICE, loopback_interface
from starling.timeouts import DOOR, LOADERS, NODE_SILENT, READ, ROOM, TERMINATION, UNREACHABLE, Seconds

_ADDRESS_OF = 0x8915
"""Linux's SIOCGIFADDR, a request for the address of an interface."""


@dataclass(frozen=True)
class Errand:
    """A request to a keeper to start a learner. It is sent through Ray and therefore contains no secret; the run's
    token is in a file."""

    program: Program
    """Program to start, with an empty token. The node's own Python executes its command."""
    folder: Path
    """Current folder of the launcher, to which paths are relative."""
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
    """The Ray actor that starts a learner on a node and watches it.

    `keep` runs as long as the learner does; other threads call the other methods during this time.
    """

    def __init__(self) -> None:
        self._process: Future[LearnerProcess] = Future()
        self._scratch: Path | None = None

    def keep(self, errand: Errand) -> int | None:
        """Run a learner to its end, and return its exit code, or None if it ended, or was ended, because the launcher
        could no longer be reached. Raises `ConfigError` if the learner cannot be started on this node."""
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
        """Send the learner a signal at once, or as soon as it has been started."""
        self._process.result().signal(number)

    def clear(self) -> None:
        """End the loading processes that the learner left, and remove its temporary files."""
        if self._process.done():
            end_loaders([self._process.result()])
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _this_node() -> tuple[str, str, float]:
    """Return the name, the address and the number of CPUs of the node on which this actor runs."""
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    node = next(each for each in ray.nodes() if each["NodeID"] == node_id)
    address = str(node["NodeManagerAddress"])
    return f"{address} ({node_id[:8]})", address, float(node["Resources"].get("CPU", 0.0))


def interface_of(address: str) -> str:
    """Return the name of the network interface that has this IPv4 address. Raises `ProtocolError` if there is none."""
    if address.startswith("127."):
        return loopback_interface()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(any_socket, _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    raise ProtocolError(f"no network interface of this machine has the address {address} by which Ray knows it")


TOKEN_FILE = "run-token"
MOST_PLACES = 20
"""Number of successive actors that may be lost before they start a learner. Such losses happen until Ray has noticed
that a node is dead, which takes half a minute by default."""
_LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable: with 0, Ray keeps loopback addresses instead of using the machine's outward address."""


@dataclass(frozen=True)
class RayMachines:
    """The nodes of a running Ray cluster."""

    address: str = "auto"
    """Address of the cluster, `HOST:PORT`; auto: the cluster to which this machine belongs, or `RAY_ADDRESS`."""
    per_node: int = 1
    """Size of the groups of learners with successive ids that share a node, if they start with the run."""
    super_learner: int = 1
    """Size of the groups in which later joiners share a node."""
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    """Resources that Ray reserves for each learner."""
    say: Callable[[str], None] = lambda line: None

    @contextmanager
    def __call__(self, program: Program) -> Generator[Site, None, None]:
        """Connect to the cluster, and run the store on this machine."""
        with connected(self.address) as ray:
            address = _own_address(ray)
            if not address.startswith("127."):
                self.say(
                    f"warning: the run's store and its launcher listen on {address}: any process that reaches their "
                    "ports can disturb the run; use a private network, and see SECURITY.md"
                )
            logs = program.log_folder.resolve()
            with loopback_store(address) as store, socket.create_server((address, 0), backlog=128) as listener:
                errand = Errand(
                    program=replace(program, token="", log_folder=logs),
                    folder=Path.cwd(),
                    token_file=logs / TOKEN_FILE,
                    address=address,
                    door=int(listener.getsockname()[1]),
                    store=store,
                    resources=dict(self.resources),
                )
                nodes = _Nodes(self, ray, errand)
                door = letting_in(listener, program.token, UNREACHABLE, nodes.admit, nodes.look_after_waiting)
                with closing(nodes), door:
                    _write_secret(errand.token_file, program.token)
                    yield Site(nodes.start, partial(errand.token_file.unlink, missing_ok=True))


class _Process(LearnerProcess):
    """A learner's process on a node of the cluster."""

    def __init__(self, log: Path, errand: Errand) -> None:
        super().__init__(log)
        self.errand = errand
        self.why_again = ""
        """Reason why the last actor was lost before it started the learner; empty while there is an actor, which may
        still wait for room in the cluster."""
        self._num_places = 0
        self._actor: Any = None
        self._is_killed = self._is_removed = False
        self.started_at = time.monotonic()
        self.num_said = 0
        """Number of times that the run has reported that the learner waits for room in the cluster."""
        self._ended: Future[tuple[int, float]] = Future()
        """Exit code of the learner, and the time at which it was known."""
        self.clearing: Any = None
        """Ray's reference to the removal of the learner's leftovers."""

    def give_place(self, actor: Any) -> None:
        """Let a new actor start the learner. It is the first actor, or it replaces an actor that was lost before it
        could start the learner."""
        self._actor, self.why_again = actor, ""
        self._num_places += 1
        actor.keep.remote(self.errand).future().add_done_callback(self._on_end)

    @property
    def has_begun(self) -> bool:
        """Whether the learner's keeper has connected."""
        return self.line.connection is not None

    @property
    def exit_code(self) -> int | None:
        now, closed_at = time.monotonic(), self.line.closed_at
        if not self._ended.done():
            if not closed_at or now - closed_at < NODE_SILENT:
                return None
            self._lose()
        code, at = self._ended.result()
        # its last messages come before the end of the connection
        return None if self.has_begun and not closed_at and now - at < NODE_SILENT else code

    def signal(self, number: int) -> None:
        self._is_killed = self._is_killed or number in (signal.SIGKILL, signal.SIGTERM)
        if self.why_again:
            self._end(-number)
        elif self._is_killed and not self.has_begun:  # it has not been started yet
            self.remove_actor()
        else:
            self._actor.signal.remote(number)

    def wait(self, seconds: Seconds) -> bool:
        return bool(wait([self._ended], seconds).done)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if not self.wait(NODE_SILENT):
            self.remove_actor()
        if not self.wait(NODE_SILENT):
            self._lose()
        self.line.close()

    def forget(self) -> None:  # its keeper ends its loading processes
        if self.lost:
            self.remove_actor()
        elif self.clearing is None and self.has_begun:
            self.clearing = self._actor.clear.remote()

    def remove_actor(self) -> None:
        """Give the learner's CPUs and devices back to the cluster, also for a restart of the learner."""
        import ray

        if not self._is_removed:
            self._is_removed = True
            ray.kill(self._actor)

    def _on_end(self, ended: "Future[int | None]") -> None:
        """Record how the actor's work ended. A thread of Ray calls this method."""
        from ray.exceptions import RayTaskError

        error = ended.exception()
        if isinstance(error, RayTaskError):
            other = StarlingError(f"the learner could not be started: {error.cause or error}")
            self.error = error.cause if isinstance(error.cause, StarlingError) else other
            self._end(1)
        elif error is not None and not self.has_begun and not self._is_killed:
            self.why_again = (str(error).splitlines() or [type(error).__name__])[0]
            if self._num_places >= MOST_PLACES:
                self.error = StarlingError(
                    f"{MOST_PLACES} Ray actors in succession could not start it; the last: {error}"
                )
                self._end(1)
        elif error is not None:
            self._lose()
        elif (code := ended.result()) is None:  # a cable was cut, and the node noticed it first
            self._lose(f"was ended by node {self.node}, which could not reach the launcher")
        else:
            self._end(code)

    def _lose(self, how: str = "") -> None:
        where = f"was lost with its actor on node {self.node}" if self.node else "was removed before it had a node"
        self.lost = self.lost or how or where
        self.line.hang_up()  # a learner that has lost its keeper ends
        self._end(-signal.SIGKILL)

    def _end(self, code: int) -> None:
        with suppress(InvalidStateError):  # the end is already known
            self._ended.set_result((code, time.monotonic()))


class _Nodes:
    """The processes of one run on a cluster."""

    def __init__(self, machines: RayMachines, ray: Any, errand: Errand) -> None:
        self._machines, self._ray, self._errand = machines, ray, errand
        self._processes: dict[str, _Process] = {}
        self._groups: dict[tuple[int, ...], Any] = {}
        more = dict(machines.resources)
        amounts = {"num_cpus": more.pop("CPU", 0.0), "num_gpus": more.pop("GPU", 0.0), "resources": more or None}
        self._keeper = ray.remote(**amounts, max_concurrency=4, max_restarts=0)(Keeper)

    def start(self, learner_id: int, joins: bool) -> LearnerProcess:
        errand = replace(self._errand, learner_id=learner_id, joins=joins, name=secrets.token_hex(8))
        process = _Process(self._errand.program.log(learner_id), errand)
        process.log.touch()
        self._processes[errand.name] = process
        self._begin(process)
        return process

    def _begin(self, process: _Process) -> None:
        place = self._place(process.errand.learner_id)
        process.give_place(self._keeper.options(scheduling_strategy=place).remote())

    def close(self) -> None:
        """Wait until the keepers have cleared up, and give everything back to the cluster."""
        clearing = [each.clearing for each in self._processes.values() if each.clearing is not None]
        if clearing:
            self._ray.wait(clearing, num_returns=len(clearing), timeout=LOADERS + DOOR)
        for process in self._processes.values():
            process.remove_actor()
        for group in self._groups.values():
            self._ray.util.remove_placement_group(group)

    def _place(self, learner_id: int) -> Any:
        """Ray's scheduling strategy for a learner."""
        world, machines = self._errand.program.world, self._machines
        size, begin = (machines.per_node, 0) if learner_id < world else (machines.super_learner, world)
        if size == 1:
            return "SPREAD"
        first = begin + (learner_id - begin) // size * size
        ids = tuple(range(first, first + size if begin else min(first + size, world)))
        if ids not in self._groups:
            bundles = [dict(self._machines.resources) for _ in ids]
            self._groups[ids] = self._ray.util.placement_group(bundles, strategy="STRICT_PACK")
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        return strategy(self._groups[ids], placement_group_bundle_index=learner_id - first)

    def admit(self, who: tuple[str, ...], connection: socket.socket, welcome: Greeted) -> None:
        """Use the connection that a keeper has made. A different thread calls this method."""
        name, node = who
        connection.sendall(encode(welcome))  # before anything that the launcher tells the learner
        process = self._processes[name]
        process.node, process.line.connection = node, connection

    def look_after_waiting(self) -> None:
        """Let new actors start the learners whose actors were lost before they could, and report which learners wait
        for room."""
        due = []
        for process in list(self._processes.values()):
            if process.clearing is not None and self._ray.wait([process.clearing], timeout=0)[0]:
                process.remove_actor()
            if process.has_begun or process.exit_code is not None:
                continue
            if process.why_again:
                how = f"its Ray actor was lost before it began ({process.why_again})"
                self._machines.say(f"learner {process.errand.learner_id}: {how}; trying again")
                self._begin(process)
            if time.monotonic() - process.started_at > ROOM * 10**process.num_said:
                process.num_said += 1
                due.append(process.errand.learner_id)
        if due:
            asked = ", ".join(f"{name}: {amount:g}" for name, amount in self._machines.resources.items())
            self._machines.say(
                f"learner {', '.join(map(str, sorted(due)))} waits for room in the Ray cluster, with {{{asked}}} for "
                "each learner; `ray status` shows what is free"
            )


@contextmanager
def connected(
    address: str, what: str = "launch: ray", otherwise: str = "launch=local needs none"
) -> Generator[Any, None, None]:
    """A context within which Ray is connected to a running cluster. The context ends the connection unless it existed
    before.

    Args:
        address: The cluster's address, `HOST:PORT`, or `auto`.
        what: The setting that needs the cluster, for errors.
        otherwise: The setting that needs no cluster, for errors.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: There is no such cluster.
    """
    require("ray", what)
    if address.startswith("ray://"):
        raise ConfigError(
            f"launch.address: {address} is Ray Client's; run on a machine of the cluster, with its address HOST:PORT"
        )
    known = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if "ray" not in sys.modules:
        _keep_loopback(known)
    import ray
    import ray.util.scheduling_strategies

    if ray.is_initialized():
        yield ray
        return
    advice = (
        "start one with `ray start --head` here and `ray start --address=HOST:PORT` on the other machines, or set "
        f"launch.address; {otherwise}"
    )
    _check_answers(known, what, advice)
    with _own_signals():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # Ray has no class of its own for this
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            where = "" if address == "auto" else f" at {address}"
            raise ConfigError(f"{what}: no Ray cluster{where} to connect to ({reason}); {advice}") from None
    try:
        yield ray
    finally:
        with _own_signals():
            ray.shutdown()


def _keep_loopback(address: str) -> None:
    """Prevent Ray from replacing a cluster's loopback address by this machine's outward one."""
    if not address:
        with suppress(OSError):
            address = Path("/tmp/ray/ray_current_cluster").read_text(encoding="utf-8").strip()
    if address.startswith(("127.", "localhost:")):
        os.environ.setdefault(_LOOPBACK_SWITCH, "0")


def _check_answers(address: str, what: str, advice: str) -> None:
    """Raise `ConfigError` if nothing listens at the address. Otherwise Ray would try for minutes, and then end this
    process."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=DOOR).close()
    except OSError as error:
        raise ConfigError(f"{what}: no Ray cluster at {address} to connect to ({error}); {advice}") from None


@contextmanager
def _own_signals() -> Generator[None, None, None]:
    """Undo what Ray does to the signals of this process within this context."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _own_address(ray: Any) -> str:
    """Return the address by which the cluster's nodes know this machine."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    own_id = ray.get_runtime_context().get_node_id()
    own = next(str(node["NodeManagerAddress"]) for node in nodes if node["NodeID"] == own_id)
    others = sorted({str(node["NodeManagerAddress"]) for node in nodes})
    if own.startswith("127.") and not all(each.startswith("127.") for each in others):
        raise ConfigError(
            f"launch: the cluster knows this machine as {own}, which its other nodes ({', '.join(others)}) cannot "
            "reach; start Ray here with `ray start --node-ip-address` and an address that they can reach"
        )
    return own


def _write_secret(path: Path, content: str) -> None:
    """Write a file that only this user can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
        file.write(content + "\n")
