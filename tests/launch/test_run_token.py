"""Which processes belong to a run, and which may listen."""

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from starling.engines.processes.handshake import Handshake, shake_hands
from starling.engines.processes.run_token import VARIABLE, new_token, sign, verified
from starling.errors import PeerLost, ProtocolError
from starling.launch.launcher import launch
from starling.launch.messages import values_of
from starling.launch.rendezvous import find_place

MINE = Handshake(world=2, strategy="allreduce", num_parameters=3, dtype="torch.float32", configuration="same")


def test_a_learner_with_another_token_is_refused_and_no_token_is_shown(tmp_path: Path) -> None:
    """A run of real processes ends with ProtocolError's exit code; neither the message nor a log holds a token."""
    command = [sys.executable, "-m", "tests.launch.learner_process", "allreduce/tokens"]
    with pytest.raises(ProtocolError, match=r"learner [01] and learner [01] differ in their run token") as refused:
        launch(command, 2, tmp_path)
    assert refused.value.exit_code == 7
    logs = [path.read_text(encoding="utf-8") for path in tmp_path.iterdir()]
    assert len(logs) == 2 and "ProtocolError" in "".join(logs)
    for said in (str(refused.value), *logs):
        assert "secret-of-" not in said


PROGRAM = f"""
import hashlib, os
from starling.launch.link import Link
from starling.launch.messages import Activity
token = os.environ[{VARIABLE!r}].encode()
told = {{"length": len(token), "digest": hashlib.sha256(token).hexdigest()}}
Link.from_environment().send(Activity(values=told))
"""


def test_each_run_has_a_new_token_that_its_learners_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher makes 256 random bits, whatever its own environment holds."""
    monkeypatch.setenv(VARIABLE, "mine")
    runs: list[list[dict[str, Any]]] = [[], []]
    for run in runs:
        launch(
            [sys.executable, "-c", PROGRAM], 2, tmp_path, lambda rank, said, run=run: run.append(dict(values_of(said)))
        )
    runs = [[said for said in run if said] for run in runs]
    digests = [{said["digest"] for said in run} for run in runs]
    assert [said["length"] for run in runs for said in run] == [64] * 4
    assert [len(each) for each in digests] == [1, 1] and digests[0] != digests[1]


@pytest.mark.parametrize(("mine", "theirs"), [("a", "b"), ("a", None), (None, "b")])
def test_all_learners_have_the_same_token_or_none(
    mine: str | None, theirs: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another token, or one where this learner has none, is a ProtocolError that says how to set it."""
    message = _signed_with(theirs, monkeypatch)
    _signed_with(mine, monkeypatch)
    with pytest.raises(ProtocolError, match=rf"learner 0 and learner 1 differ in their run token .*{VARIABLE}"):
        verified(0, 1, message)


@pytest.mark.parametrize("token", [None, "a", "0123456789abcdef" * 4])
def test_learners_of_one_run_understand_each_other(token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same token, or without any."""
    assert verified(0, 1, _signed_with(token, monkeypatch)) == "hello"


def _signed_with(token: str | None, monkeypatch: pytest.MonkeyPatch) -> bytes:
    if token is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, token)
    return sign(1, "hello").encode()


@pytest.mark.parametrize(
    "message", [b"", b"{}", b"0" * 64, b"\xff" * 200, b"[" * 100_000, json.dumps({"world": 2}).encode()]
)
def test_a_stranger_is_refused_before_anything_it_says_is_read(message: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever bytes are in a learner's place, the greeting ends with a ProtocolError."""
    monkeypatch.setenv(VARIABLE, new_token())
    store = HashStore()
    store.set("handshake/1", message)
    with pytest.raises(ProtocolError, match="run token"):
        shake_hands(store, 0, MINE, timeout_seconds=5)


def test_a_greeting_cannot_be_repeated_under_another_rank_or_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that only listens to the store learns nothing with which to shake hands."""
    monkeypatch.setenv(VARIABLE, new_token())
    said = sign(0, "hello").encode()
    assert verified(1, 0, said) == "hello"
    for rank, message in ((1, said), (0, said[:-1] + b"O"), (0, b"0" + said[1:-1])):
        with pytest.raises(ProtocolError):
            verified(1, rank, message)


def test_a_token_is_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a learner puts into the store does not contain it."""
    token = new_token()
    monkeypatch.setenv(VARIABLE, token)
    store = HashStore()
    with pytest.raises(PeerLost):
        shake_hands(store, 0, MINE, timeout_seconds=0.1)
    said = store.get("handshake/0")
    assert b"allreduce" in said and token.encode() not in said


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of one learner whose store is its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    for name in ("GLOO_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "")  # so that it is as before when the test is over
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("address", "interface", "warning"),
    [
        ("127.0.0.1", None, ""),
        ("localhost", None, ""),
        ("0.0.0.0", None, "warning: MASTER_ADDR is 0.0.0.0, not this machine's loopback: "),
        ("127.0.0.1", "eth7", "warning: GLOO_SOCKET_IFNAME is eth7, not this machine's loopback: "),
    ],
)
@pytest.mark.usefixtures("alone")
def test_learners_that_others_can_reach_are_told_in_one_line(
    address: str,
    interface: str | None,
    warning: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Under torchrun and Slurm another address than loopback is a choice, and a warning that names SECURITY.md."""
    monkeypatch.setenv("MASTER_ADDR", address)
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    find_place(timeout_seconds=20)
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning: " in line]
    if not warning:
        assert not lines
        return
    (line,) = lines
    assert line.startswith(warning) and line.endswith("see SECURITY.md")
