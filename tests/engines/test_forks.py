"""What a forked child holds of its parent's connections, and a process that can open no more files."""

import os
import resource
import socket
from collections.abc import Iterator

import pytest

from starling.engines.processes.backend import check_files
from starling.engines.processes.forks import identity, own_connections, owned
from starling.errors import StarlingError


@pytest.fixture
def full() -> Iterator[None]:
    """Within it, this process can open no more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def held_by_a_child(*lines: socket.socket) -> list[bool]:
    """Which of these sockets a forked child holds."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writing, bytes(identity(line.fileno()) is not None for line in lines))
        os._exit(0)
    os.close(writing)
    said = os.read(reading, 64)
    os.close(reading)
    os.waitpid(pid, 0)
    return [bool(each) for each in said]


def test_a_child_holds_no_connection_of_the_run_and_all_of_the_users() -> None:
    """Those that appeared within the context, those that were named, and those accepted later at a port of the run."""
    users, _other = socket.socketpair()
    with own_connections():
        own, _peer = socket.socketpair()
        store = socket.create_server(("127.0.0.1", 0))
    named, _far = socket.socketpair()
    owned(named)
    client = socket.create_connection(store.getsockname())
    accepted, _ = store.accept()
    assert held_by_a_child(users, client, own, store, named, accepted) == [True, True, False, False, False, False]
    assert not os.get_inheritable(own.fileno())
    for line in (users, _other, own, _peer, store, named, _far, client, accepted):
        line.close()


def test_a_closed_connection_whose_number_is_used_again_is_the_users() -> None:
    """The number of a descriptor says nothing; the socket does."""
    with own_connections():
        own, peer = socket.socketpair()
    number = own.fileno()
    own.close()
    users = socket.socket()
    assert users.fileno() == number
    assert held_by_a_child(users) == [True]
    users.close()
    peer.close()


@pytest.mark.usefixtures("full")
def test_a_process_without_files_says_so_and_accuses_no_peer() -> None:
    """With its limit and the remedy."""
    with pytest.raises(
        StarlingError, match=r"learner 3: this process can open no more files .* limit is \d+\): .*ulimit"
    ):
        check_files(3)


def test_a_process_with_files_accuses_itself_of_nothing() -> None:
    """Then a lost connection is that of a peer."""
    check_files(3)
