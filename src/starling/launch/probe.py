"""Asks what listens at MASTER_PORT whether it is a store, because torch waits without a limit for its answer."""

import logging
import socket
import struct
import time

from starling.errors import ProtocolError

_QUESTION = struct.pack("<BIB", 0, 0x3C85F7CE, 7)
"""In the protocol of torch's TCPStore: the number with which each connection begins, and how many keys there are."""
_MOST_KEYS = 1 << 40
USUAL_SECONDS = 5.0
"""A store answers within milliseconds, once its process has loaded torch."""
_RETRY_SECONDS = 0.1
_LOG = logging.getLogger("starling")


def check_store(rank: int, address: str, port: int, seconds: float) -> None:
    """Ask what listens at an address whether it is a store.

    Raises `OSError` if nothing listens there or it hangs up, `ProtocolError` if something else answers, or nothing does
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
            _LOG.warning("%s does not answer as a store; waiting for %g s", where, seconds)
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


def await_store(rank: int, address: str, port: int, seconds: float) -> float:
    """Wait until a store answers at an address; the seconds that remain. Raises `ProtocolError`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            check_store(rank, address, port, max(0.01, deadline - time.monotonic()))
            return max(0.01, deadline - time.monotonic())
        except OSError as error:
            if time.monotonic() > deadline:
                raise ProtocolError(
                    f"learner {rank} cannot reach the store at {address}:{port} ({error.strerror or error}), after "
                    f"{seconds:g} s; is the process that owns it alive, and is the port free?"
                ) from error
        time.sleep(_RETRY_SECONDS)
