"""What NCCL waits for on a device is ended by aborting, as far as that can be shown where there is no device."""

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from starling.engines.processes import communicator
from starling.engines.processes import process_group as membership_group
from starling.engines.processes.handshake import Peers
from starling.engines.processes.learner import ProcessLearner
from starling.engines.processes.place import Place
from starling.engines.processes.process_group import Connections, process_group
from starling.engines.processes.threads import Release
from starling.training.membership import Membership, MembershipFeed


class PeerGoneError(Exception):
    """Why a membership ended."""


class Group:
    """A process group whose backend on CUDA says that it is NCCL, or another one."""

    def __init__(self, name: str, backend: str | None = "nccl", meeting: threading.Barrier | None = None) -> None:
        self.group_name = name
        self.num_aborts = 0
        self._backend, self._meeting = backend, meeting

    def _get_backend(self, device: torch.device) -> "Group":
        if self._backend is None:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    def name(self) -> str:
        return str(self._backend)

    def abort(self) -> None:
        self.num_aborts += 1
        if self._meeting is not None:
            self._meeting.wait(30.0)


def known(monkeypatch: pytest.MonkeyPatch, *groups: Group) -> None:
    """Let these be all groups that torch knows."""
    monkeypatch.setattr(membership_group, "_world", type("World", (), {"pg_names": dict.fromkeys(groups)}))


@pytest.fixture
def alone() -> Iterator[Place]:
    place = Place(0, 1, 0, 1, HashStore())
    yield place
    assert not dist.is_initialized()


def test_only_groups_on_nccl_are_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of gloo, and those that have nothing on CUDA, end when their connections are cut."""
    groups = [Group("0"), Group("1", "gloo"), Group("2", None)]
    known(monkeypatch, *groups)
    assert membership_group.abort() == {"0"}
    assert [group.num_aborts for group in groups] == [1, 0, 0]


def test_all_communicators_are_aborted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One abort may wait until the others have ended their kernels: one after the other they would wait for ever."""
    meeting = threading.Barrier(3)
    groups = [Group(str(number), meeting=meeting) for number in range(3)]
    known(monkeypatch, *groups)
    assert membership_group.abort() == {"0", "1", "2"}
    assert [group.num_aborts for group in groups] == [1, 1, 1]
    assert not meeting.broken


def test_an_abort_that_fails_is_a_warning_and_the_others_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever cuts connections has others to end."""
    failing, other = Group("0"), Group("1")
    monkeypatch.setattr(failing, "abort", lambda: (_ for _ in ()).throw(RuntimeError("timed out")))
    known(monkeypatch, failing, other)
    with pytest.warns(UserWarning, match="did not abort group 0: timed out"):
        membership_group.abort()
    assert other.num_aborts == 1


def test_cutting_connections_aborts_each_communicator_once_and_still_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are made between two cuts."""
    groups = [Group("0"), Group("1", "gloo")]
    known(monkeypatch, *groups)
    connections = Connections()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        theirs, _ = server.accept()
        with theirs:
            connections.cut()
            assert mine.recv(1) == b""
    late = Group("2")
    known(monkeypatch, *groups, late)
    connections.cut()
    assert [group.num_aborts for group in (*groups, late)] == [1, 0, 1]


def test_a_group_on_gloo_is_left_as_it_is(alone: Place) -> None:
    """What says that it is gloo works on."""
    with process_group(Peers(alone, 30.0), torch.device("cpu")):
        assert membership_group.abort() == set()
        ones = torch.ones(2)
        dist.all_reduce(ones)
        assert ones.tolist() == [1.0, 1.0]


def test_the_watchdog_is_told_to_let_survivors_live_before_a_group_is_made(
    alone: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only where somebody watches the learners: elsewhere the watchdog is what ends a wait."""
    for name in membership_group.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")  # the user's own
    seen: list[dict[str, str | None]] = []

    def make_group(backend: str, **how: Any) -> None:
        assert backend == "cpu:gloo,cuda:nccl"
        seen.append({name: os.environ.get(name) for name in membership_group.SETTINGS})

    monkeypatch.setattr(Place, "has_own_device", lambda place, device: True)
    monkeypatch.setattr(dist, "init_process_group", make_group)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    for outlives_losses in (False, True):
        feed = MembershipFeed(0, Membership(0, (0,)), is_watched=outlives_losses)
        with process_group(Peers(alone, 30.0, feed=feed), torch.device("cpu")):
            pass
    unset = dict.fromkeys(membership_group.SETTINGS)
    own = {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    assert seen == [unset | own, membership_group.SETTINGS | own]


def test_what_an_aborted_collective_leaves_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean that was aborted looks complete; the learner raises what ended it before it takes the result."""
    unconnected = ProcessLearner.__new__(ProcessLearner)
    unconnected._by_nccl, unconnected._device, unconnected.release = True, torch.device("cpu"), Release()
    unconnected.await_device()
    # another thread aborts while this one waits for its stream
    monkeypatch.setattr(communicator, "synchronize", lambda device: unconnected.release.fail(PeerGoneError()))
    with pytest.raises(PeerGoneError):
        unconnected.await_device()
