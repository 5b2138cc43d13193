"""Another service at MASTER_PORT is an error that names it, and not a wait without a word."""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from starling.errors import ProtocolError
from starling.launch import rendezvous
from starling.launch.coordinator import connect
from starling.launch.launcher import loopback_store
from starling.launch.rendezvous import await_store, check_store, find_place


@contextmanager
def http_server() -> Iterator[int]:
    """A web server, which waits for a whole line before it answers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.daemon_threads, server.block_on_close = True, False
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def silent_listener() -> Iterator[int]:
    """Something that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        yield int(listener.getsockname()[1])


@contextmanager
def greeter() -> Iterator[int]:
    """Something that speaks first, as an SSH server does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            line, _ = listener.accept()
            line.sendall(b"SSH-2.0-Other\r\n")

        threading.Thread(target=greet, daemon=True).start()
        yield int(listener.getsockname()[1])


SERVICES: dict[str, tuple[Callable[[], Any], str]] = {
    "http": (http_server, "is no store: it answered"),
    "silent": (silent_listener, "has not answered for .* s, as a store does"),
    "greets": (greeter, "is no store: it answered b'SSH-2.0-Other"),
}


@pytest.mark.parametrize(
    ("service", "how"),
    [
        ("http", "joined"),
        *(
            pytest.param(service, how, marks=pytest.mark.wide)
            for service in SERVICES
            for how in ("joined", "joined-first", "recipe")
            if (service, how) != ("http", "joined")
        ),
    ],
)
def test_another_service_at_the_port_is_named_within_the_time_out(
    service: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a loop joins, as the learner that starts the coordinator or another, or a launcher started a recipe."""
    monkeypatch.setattr(rendezvous, "USUAL_SECONDS", 0.3)
    open_service, answer = SERVICES[service]
    rank = int(how != "joined-first")
    with open_service() as port:
        place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        said = error_of(lambda: (find_place if how == "recipe" else connect)(1.5), within=5.0)
    assert re.search(f"learner {rank}: what listens at 127.0.0.1:{port} {answer}.*: choose another MASTER_PORT", said)


def error_of(call: Callable[[], object], within: float) -> str:
    """The ProtocolError of a call, which must come within so many seconds; the call may otherwise never return."""
    said: list[str] = []

    def run() -> None:
        try:
            call()
        except ProtocolError as error:
            said.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(within)
    assert not thread.is_alive(), f"no error within {within:g} s"
    assert said, "no error"
    return said[0]


def test_a_store_is_a_store() -> None:
    """Of either kind, whatever it holds; and the check leaves nothing in it."""
    for is_libuv in (True, False):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=is_libuv)
        for number in range(3):
            store.set(f"key-{number}", "")
        before = store.num_keys()
        check_store(1, "127.0.0.1", store.port, 5.0)
        assert store.num_keys() == before


def test_a_store_that_comes_late_is_awaited_and_one_that_never_comes_is_named() -> None:
    """As long as the learner's own time-out, and no longer."""
    with loopback_store() as port:
        assert 0.0 < await_store(1, "127.0.0.1", port, 5.0) <= 5.0
    with pytest.raises(ProtocolError, match=rf"learner 1 cannot reach the store at 127.0.0.1:{port} .* 0.3 s"):
        await_store(1, "127.0.0.1", port, 0.3)
