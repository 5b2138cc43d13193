"""The coordinator of joined loops: whom it lets in, whom it sends away, and what it does when it can open no file."""

import errno
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from starling.engines.processes.run_token import VARIABLE, proof
from starling.launch.coordinator import OVER, Coordinator
from starling.launch.link import read_line
from starling.launch.messages import Ended, Greeted, Hello, NewMembership, Reached, decode_from_launcher, encode

TOKEN = "a secret of this test"
Answer = Greeted | NewMembership


class FullListener(socket.socket):
    """A listener in a process that can open no more files."""

    num_tries = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.num_tries += 1
        raise OSError(errno.EMFILE, "Too many open files")


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a coordinator that ends with its last learner."""
    monkeypatch.setenv(VARIABLE, TOKEN)
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener, theirs:
        thread = threading.Thread(target=Coordinator(listener, theirs).serve, daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        ours.close()
        thread.join(30.0)
        assert not thread.is_alive()


class Line:
    """A learner's connection to the coordinator."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10.0)
        self.challenge = read_line(self.socket).decode()

    def greet(self, rank: int, world: int) -> Hello:
        who = (str(rank), str(world), "20.0", "1")
        hello = Hello(who, "own", proof(TOKEN, "guest", self.challenge, "own", *who))
        self.socket.sendall(encode(hello))
        return hello

    def hear(self) -> Answer:
        answer = decode_from_launcher(_line_of(self.socket))
        assert isinstance(answer, Greeted | NewMembership)
        return answer


def welcome(rank: int, world: int) -> Greeted:
    return Greeted(proof=proof(TOKEN, "host", "own", str(rank), str(world), "20.0", "1"))


def _line_of(line: socket.socket) -> bytes:
    content = b""
    while not content.endswith(b"\n"):
        received = line.recv(1)
        assert received, "the coordinator closed the connection"
        content += received
    return content


@pytest.mark.parametrize("comes", ["before", "after"])
def test_a_joiner_that_no_learner_is_left_to_continue_with_hears_so_at_once(comes: str, port: int) -> None:
    """Whether it comes before the run's end or after it; it would wait for its whole time-out."""
    member = Line(port)
    member.greet(0, 1)
    assert member.hear() == welcome(0, 1)
    member.socket.sendall(encode(Reached("ready", -1)))
    assert isinstance(member.hear(), NewMembership)
    joiner = Line(port)
    if comes == "before":
        joiner.greet(1, 1)
        assert joiner.hear() == welcome(1, 1)
        member.socket.sendall(encode(Ended(0)))
    else:
        other = Line(port)
        other.greet(2, 1)
        assert other.hear() == welcome(2, 1)
        member.socket.sendall(encode(Ended(0)))
        assert other.hear() == Greeted(OVER)  # now all that the member has said was heard
        joiner.greet(1, 1)
    assert joiner.hear() == Greeted(OVER)
    member.socket.close()


def test_what_a_learner_has_said_lets_no_other_process_in(port: int) -> None:
    """A recorded greeting is over a random number of another connection."""
    member = Line(port)
    recorded = member.greet(0, 1)
    assert member.hear() == welcome(0, 1)
    stranger = Line(port)
    stranger.socket.sendall(encode(recorded))
    answer = stranger.hear()
    assert isinstance(answer, Greeted) and "it does not belong to this run" in answer.refused
    assert TOKEN not in json.dumps(answer.refused)
    member.socket.close()


def test_a_coordinator_that_can_open_no_more_files_does_not_spin() -> None:
    """The connection stays in the queue, and it tries again now and then."""
    with FullListener(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ours, theirs = socket.socketpair()
        with socket.create_connection(listener.getsockname()), theirs:
            begin = time.process_time()
            threading.Timer(1.0, ours.close).start()
            Coordinator(listener, theirs).serve()
            assert time.process_time() - begin < 0.5
            assert 1 <= listener.num_tries <= 20
