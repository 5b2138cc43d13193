"""Two network namespaces of Linux, joined by a link that is really throttled."""

import secrets
import subprocess
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

INTERFACE = "bench0"
"""The link's name at either end."""
Execute = Callable[[Sequence[str]], None]


class NoNamespacesError(Exception):
    """This machine, or this user, cannot have network namespaces with a throttled link."""


@dataclass(frozen=True)
class Namespace:
    """One end of the link."""

    name: str
    address: str

    def inside(self, command: Sequence[str]) -> list[str]:
        """`command`, to be run in this namespace."""
        return ["ip", "netns", "exec", self.name, *command]


@dataclass(frozen=True)
class Throttle:
    """A token bucket: `rate` and `burst` in the units of `tc`, and the time that a packet may wait before it is
    dropped."""

    rate: str
    burst: str
    latency: str
    congestion_control: str | None = None
    """TCP's congestion control; None takes this machine's default."""


def execute(command: Sequence[str]) -> None:
    """Run a command of iproute2. Raises `NoNamespacesError` with its error message."""
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoNamespacesError(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise NoNamespacesError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def joined_namespaces(throttle: Throttle, run: Execute = execute) -> Generator[list[Namespace], None, None]:
    """A context with two namespaces whose only connection is a link to each other, throttled in both directions.

    Raises `NoNamespacesError` if they are not allowed.
    """
    number = secrets.token_hex(4)
    ends = [Namespace(f"starling-bench-{number}-{side}", f"10.77.0.{side + 1}") for side in range(2)]
    first, second = ends
    made: list[Namespace] = []
    try:
        for end in ends:
            run(["ip", "netns", "add", end.name])
            made.append(end)
        # made inside, so that neither end is ever seen beside this machine's own interfaces
        link = ["link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", second.name]
        run(["ip", "-n", first.name, *link])
        for end in ends:
            run(["ip", "-n", end.name, "address", "add", f"{end.address}/24", "dev", INTERFACE])
            run(["ip", "-n", end.name, "link", "set", "lo", "up"])
            run(["ip", "-n", end.name, "link", "set", INTERFACE, "up"])
            bucket = ["rate", throttle.rate, "burst", throttle.burst, "latency", throttle.latency]
            run(["tc", "-n", end.name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *bucket])
            if throttle.congestion_control is not None:
                route = ["10.77.0.0/24", "dev", INTERFACE, "src", end.address, "congctl", throttle.congestion_control]
                run(["ip", "-n", end.name, "route", "replace", *route, "proto", "kernel", "scope", "link"])
        yield ends
    finally:
        _remove(made, run)


def _remove(namespaces: Sequence[Namespace], run: Execute) -> None:
    """Remove all namespaces, even if removing one fails; the link is removed with its ends."""
    errors = []
    for namespace in namespaces:
        try:
            run(["ip", "netns", "delete", namespace.name])
        except NoNamespacesError as error:
            errors.append(error)
    if errors:
        raise errors[0]
