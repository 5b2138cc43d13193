"""A process's place among the learners, its memberships, and its requests for checkpoints. The place follows from the
environment variables that Starling's launcher, torchrun and Slurm scripts set. Memberships and requests go through the
launcher, if there is one."""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from starling.engines.processes.forks import own_connections
from starling.engines.processes.place import Place
from starling.errors import ConfigError, ProtocolError
from starling.launch.link import JOINS, WATCHED, Link
from starling.launch.messages import CanStop, NewMembership, Reached, Signalled, Stop
from starling.launch.process import end_now, on_stop_signal
from starling.timeouts import CONNECT
from starling.training.membership import Membership, MembershipFeed

if TYPE_CHECKING:
    from starling.engines.processes.checkpoint_barrier import SaveRequests

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
AGENT = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable: True if learner 0 does not own the store."""
OWN_DEVICE = "STARLING_OWN_DEVICE"
"""Environment variable: 1 if the learner sees one CUDA device, which no other learner uses."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_newest_world: list[str] = []


def loopback_interface() -> str:
    """Return the name of this machine's loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def is_learner() -> bool:
    """Return whether this process was started as one learner among several.

    The answer stays the same if another library deletes WORLD_SIZE, as Lightning does after a fit. Raises `ConfigError`
    if RANK is set but other variables are missing, because each process would otherwise silently train alone.
    """
    if "RANK" not in os.environ:
        return False
    if _newest_world and "WORLD_SIZE" not in os.environ:
        os.environ["WORLD_SIZE"] = _newest_world[0]
    missing = [name for name in REQUIRED if name not in os.environ]
    if not missing:
        _newest_world[:] = [os.environ["WORLD_SIZE"]]
    elif os.environ.get("WORLD_SIZE") != "1":
        raise ConfigError(
            f"environment: RANK is set without {' and '.join(missing)}; set all of {', '.join(REQUIRED)}, as torchrun "
            "does, or none of them to train alone"
        )
    return not missing


def number_of_learners() -> int:
    """Return the number of learners that were started, including this one."""
    return _number("WORLD_SIZE") if is_learner() else 1


def is_first() -> bool:
    """Return whether this process is learner 0."""
    return _number("RANK") == 0


def joins() -> bool:
    """Return whether this process joins a running experiment."""
    return os.environ.get(JOINS) == "1"


def find_place(timeout_seconds: float = CONNECT) -> Place:
    """Return this process's place, after connecting to the store.

    Raises `ConfigError` for an invalid environment variable, and `ProtocolError` if the store does not answer.
    """
    own, address = place_of_environment(joins()), os.environ["MASTER_ADDR"]
    rank = own.rank
    if rank != 0 or os.environ.get(AGENT) == "True":  # otherwise it starts the store
        timeout_seconds = await_store(rank, address, _number("MASTER_PORT"), timeout_seconds)
    try:
        with own_connections():
            store, _, _ = next(rendezvous("env://", rank, own.world, timeout=timedelta(seconds=timeout_seconds)))
    except (RuntimeError, OSError) as error:
        raise _unreachable(rank, address, _number("MASTER_PORT"), f": {str(error).splitlines()[0]}") from error
    return replace(own, store=store)


def place_of_environment(may_join: bool) -> Place:
    """Return this process's place, with a separate store. The function also keeps gloo on the loopback interface if
    MASTER_ADDR is a loopback address, and warns of any other address.

    Raises `ConfigError` for an invalid variable. A rank that `may_join` later may be any number from 0.
    """
    rank, world, _ = _number("RANK"), _number("WORLD_SIZE"), _number("MASTER_PORT")
    local_rank, local_world = _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", world)
    if rank < 0 or (rank >= world and not may_join):
        raise ConfigError(f"environment: RANK is {rank}, but must be in [0, WORLD_SIZE), which is {world}")
    address = os.environ["MASTER_ADDR"]
    if address in LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    if rank == 0:
        _warn_if_exposed(address)
    return Place(rank, world, local_rank, local_world, HashStore(), os.environ.get(OWN_DEVICE) == "1")


def _warn_if_exposed(address: str) -> None:
    """Warn if other machines can reach learners whose store is at `address`."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if address in LOOPBACK and interface == loopback_interface():
        return
    where = f"MASTER_ADDR is {address}" if address not in LOOPBACK else f"GLOO_SOCKET_IFNAME is {interface}"
    sys.stderr.write(
        f"warning: {where}, not this machine's loopback: any process that reaches the learners' ports can read or "
        "disturb this run; use a private network, and see SECURITY.md\n"
    )
    sys.stderr.flush()


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment: {name} must be a whole number, found {text!r}") from None


_QUESTION = struct.pack("<BIB", 0, 0x3C85F7CE, 7)
"""Bytes in the protocol of torch's TCPStore: the number with which each connection begins, and a request for the number
of keys."""
_MOST_KEYS = 1 << 40
USUAL_SECONDS = 5.0
"""Time within which a store answers, once its process has loaded torch: usually milliseconds."""
_RETRY_SECONDS = 0.1
_LOG = logging.getLogger("starling")


def check_store(rank: int, address: str, port: int, seconds: float) -> None:
    """Check whether the service that listens at an address is a store.

    Raises `OSError` if nothing listens there or it hangs up, and `ProtocolError` if it is no store or does not answer
    within `seconds`.
    """
    where, deadline = f"learner {rank}: what listens at {address}:{port}", time.monotonic() + seconds
    remedy = "another service may use that port: choose another MASTER_PORT, the same for all learners"
    with socket.create_connection((address, port), timeout=seconds) as line:
        line.sendall(_QUESTION)
        line.settimeout(min(seconds, USUAL_SECONDS))
        try:
            answer = line.recv(64)
        except TimeoutError:
            _LOG.warning("%s has not answered yet; learner 0 may be starting; waiting for %g s", where, seconds)
            try:
                line.sendall(b"\r\n\r\n")  # many servers wait for the end of a line
                line.settimeout(max(0.01, deadline - time.monotonic()))
                answer = line.recv(64)
            except TimeoutError:
                raise ProtocolError(f"{where} has not answered for {seconds:g} s, as a store does; {remedy}") from None
    if not answer:
        raise ConnectionResetError("what listens there closed the connection")
    if len(answer) < 8 or int.from_bytes(answer[:8], "little") > _MOST_KEYS:
        raise ProtocolError(f"{where} is no store: it answered {answer[:40]!r}; {remedy}")


def _unreachable(rank: int, address: str, port: int, why: str) -> ProtocolError:
    remedy = "is the process that owns it alive, and is the port free?"
    return ProtocolError(f"learner {rank} cannot reach the store at {address}:{port}{why}; {remedy}")


def await_store(rank: int, address: str, port: int, seconds: float) -> float:
    """Wait until a store answers at an address, and return the remaining seconds. Raises `ProtocolError`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            check_store(rank, address, port, max(0.01, deadline - time.monotonic()))
            return max(0.01, deadline - time.monotonic())
        except OSError as error:
            if time.monotonic() > deadline:
                why = f" ({error.strerror or error}), after {seconds:g} s"
                raise _unreachable(rank, address, port, why) from error
        time.sleep(_RETRY_SECONDS)


def find_membership(place: Place, link: Link | None) -> MembershipFeed:
    """Return the memberships that Starling's launcher announces or, without such a launcher, only the first
    membership."""
    first = None if joins() else Membership(0, tuple(range(place.world)))
    if link is None or os.environ.get(WATCHED) != "1":
        return MembershipFeed(place.rank, first)
    feed = MembershipFeed(place.rank, first, is_watched=True, report=lambda *reached: link.send(Reached(*reached)))
    link.listen(NewMembership, lambda message: feed.announce(message.membership))
    return feed


@contextmanager
def save_requests_of(link: Link | None, minutes: float | None) -> Generator[SaveRequests, None, None]:
    """Within this context, this learner process requests a checkpoint every `minutes` minutes, and a stop after a
    signal.

    Starling's launcher receives a signal and tells its learners. Learners may receive it too: systemd and Slurm may
    signal all processes, and torchrun forwards signals. A learner then tells the launcher, or without one the others.
    """
    from starling.engines.processes.checkpoint_barrier import SaveRequests

    save_requests = SaveRequests(minutes)
    if link is not None:
        save_requests.on_ready = lambda: link.send(CanStop())
        link.listen(Stop, lambda message: save_requests.stop(message.signal_number))

    def stop(number: int) -> None:
        if not save_requests.is_ready:  # there is nothing to save
            end_now(number)
        if link is None:
            save_requests.stop(number)
        else:
            with suppress(OSError):  # the launcher is gone, so the link's thread ends this process
                link.send(Signalled(number))

    with on_stop_signal(stop):
        yield save_requests
