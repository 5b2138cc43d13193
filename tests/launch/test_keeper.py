"""What runs on a node of a cluster, and its connection to the launcher; without a cluster."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from starling.errors import ConfigError, ProtocolError
from starling.launch import on_ray
from starling.launch.link import knock, letting_in
from starling.launch.messages import Greeted, encode
from starling.launch.on_ray import Errand, Keeper
from starling.launch.process import Program
from starling.timeouts import NODE_SILENT, UNREACHABLE

LOOPBACK, TOKEN = "127.0.0.1", "the run's secret"
LEARNER = "import time; from starling.launch.link import Link; link = Link.from_environment(); time.sleep(600)"


@contextmanager
def door(token: str = TOKEN) -> Iterator[tuple[int, list[tuple[str, str, socket.socket]]]]:
    """A launcher's door: its port, and the connections that it has let in."""
    admitted: list[tuple[str, str, socket.socket]] = []
    with socket.create_server((LOOPBACK, 0)) as listener:

        def admit(who: tuple[str, ...], line: socket.socket, welcome: Greeted) -> None:
            name, node = who
            line.sendall(encode(welcome))
            admitted.append((name, node, line))

        with letting_in(listener, token, UNREACHABLE, admit):
            yield listener.getsockname()[1], admitted
        for _, _, line in admitted:
            line.close()


def come_in(port: int, token: str = TOKEN) -> socket.socket:
    return knock(LOOPBACK, port, token, UNREACHABLE, "first", "node-7")


def errand(folder: Path, port: int) -> Errand:
    program = Program((sys.executable, "-c", LEARNER), 1, folder, "", is_watched=False)
    return Errand(program, folder, folder / "run-token", LOOPBACK, port, 1, {"CPU": 1.0}, name="first")


CUT_CABLE = """
import socket, subprocess, time
from tests.launch.test_keeper import come_in, door
with door() as (port, admitted):
    line = come_in(port)
    while not admitted: time.sleep(0.01)
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    began = time.monotonic()
    line.sendall(b"a heartbeat")
    for side in (line, admitted[0][2]):
        try: print("heard", side.recv(1))
        except OSError: print("lost", time.monotonic() - began)
"""


@pytest.fixture(scope="module", autouse=True)
def cut_cable() -> "Iterator[subprocess.Popen[str] | None]":
    """A process that cuts a cable and waits, which takes seconds: it does so beside the tests of this file."""
    script = f'ip link set lo up && echo up && exec {sys.executable} -c "$1"'
    command = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", script, "sh", CUT_CABLE]
    try:
        process = subprocess.Popen(
            command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except FileNotFoundError:
        yield None
        return
    with process:
        yield process
        process.kill()


def _is_learner(process: psutil.Process) -> bool:
    return process.status() != psutil.STATUS_ZOMBIE and LEARNER in process.cmdline()


@pytest.fixture(autouse=True)
def one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray would say of the node."""
    monkeypatch.setattr(on_ray, "_this_node", lambda: ("node-7", LOOPBACK, 4.0))


def test_a_node_is_let_in_with_the_run_s_token_only() -> None:
    """And a node does not talk to a launcher that does not know the token, for that may be anything."""
    with door() as (port, admitted):
        come_in(port).close()
        deadline = time.monotonic() + 60.0
        while not admitted and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [(name, node) for name, node, _ in admitted] == [("first", "node-7")]
        with pytest.raises(ProtocolError, match="does not belong to this run: its run token is another one"):
            come_in(port, "another secret")
        assert len(admitted) == 1


def test_the_token_of_a_run_is_not_in_what_is_sent() -> None:
    """Whoever listens learns two proofs over random numbers."""
    with door() as (port, _), socket.create_server((LOOPBACK, 0)) as listener:
        heard = bytearray()

        def pass_on() -> None:
            client, _ = listener.accept()
            with client, socket.create_connection((LOOPBACK, port)) as server:
                for source, target in ((server, client), (client, server), (server, client)):
                    heard.extend(received := source.recv(4096))
                    target.sendall(received)

        between = threading.Thread(target=pass_on)
        between.start()
        come_in(listener.getsockname()[1]).close()
        between.join(5.0)
    assert b"node-7" in heard
    assert TOKEN.encode() not in heard


def test_a_node_that_does_not_see_the_experiment_says_so(tmp_path: Path) -> None:
    """One error with the node, the file, and what to do."""
    with pytest.raises(ConfigError, match=r"^node node-7 cannot read .*/run-token, which learner 0 needs") as raised:
        Keeper().keep(errand(tmp_path, 1))
    assert str(tmp_path / "run-token") in str(raised.value)
    assert "storage that all nodes share" in str(raised.value)


def test_a_node_that_cannot_reach_the_launcher_says_so(tmp_path: Path) -> None:
    """Such as behind a firewall."""
    (tmp_path / "run-token").write_text(TOKEN)
    with pytest.raises(ConfigError, match=f"^node node-7 cannot reach the launcher at {LOOPBACK}:1"):
        Keeper().keep(errand(tmp_path, 1))


@pytest.mark.wide
@pytest.mark.cold  # the learner is found as a child of this process
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_learner_on_a_node_ends_when_its_launcher_is_gone(is_stopped: bool, tmp_path: Path) -> None:
    """Within seconds, also if a signal has stopped it; its temporary files are removed."""
    (tmp_path / "run-token").write_text(TOKEN)
    with door() as (port, admitted):
        ended: list[int | None] = []
        kept = Keeper()
        thread = threading.Thread(target=lambda: ended.append(kept.keep(errand(tmp_path, port))))
        thread.start()
        deadline = time.monotonic() + 60.0
        while not (admitted and admitted[0][2].recv(1, socket.MSG_PEEK)) and time.monotonic() < deadline:
            time.sleep(0.01)
        (learner,) = [each for each in psutil.Process().children() if _is_learner(each)]
        scratch = Path(learner.environ()["TMPDIR"])
        assert scratch.is_dir()
        if is_stopped:
            os.kill(learner.pid, signal.SIGSTOP)
        admitted[0][2].shutdown(socket.SHUT_RDWR)
        thread.join(10.0)
    assert ended == [None]  # it is lost, as it would be if the launcher had noticed first
    assert not learner.is_running() or learner.status() == psutil.STATUS_ZOMBIE
    assert not scratch.exists()


@pytest.mark.wide
def test_both_sides_of_a_cut_cable_notice_it_within_seconds(cut_cable: "subprocess.Popen[str] | None") -> None:
    """In a network namespace of its own, whose only interface goes down: neither side hears from the other any more.

    So neither a launcher nor a learner waits for the other side of a partition.
    """
    if cut_cable is None:
        pytest.skip("no unshare here")
    said, complaints = cut_cable.communicate(timeout=60.0)
    if not said.startswith("up"):
        pytest.skip(f"no network namespace here: {complaints}")
    found = [line.split() for line in said.splitlines()[1:]]
    assert [what for what, _ in found] == ["lost", "lost"], said + complaints
    assert all(float(seconds) < UNREACHABLE + NODE_SILENT + 1.0 for _, seconds in found)
