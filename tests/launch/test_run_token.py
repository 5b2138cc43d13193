"""Which processes belong to a run, and which may listen."""

import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from starling.engines.processes.handshake import Handshake, Peers
from starling.engines.processes.place import Place
from starling.engines.processes.run_token import VARIABLE, new_challenge, new_token, sign, verified
from starling.errors import ConfigError, ProtocolError
from starling.launch.launcher import launch
from starling.launch.messages import values_of
from starling.launch.rendezvous import find_place, is_learner, number_of_learners

MINE = Handshake(world=2, strategy="allreduce", num_parameters=3, dtype="torch.float32", configuration="same")


class Recorder:
    """A learner's connection to a store; keeps all that the learner says."""

    def __init__(self, store: HashStore) -> None:
        self._store, self.said = store, dict[str, str]()

    def set(self, key: str, value: str) -> None:
        self.said[key] = value
        self._store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def peers(store: Any, rank: int) -> Peers:
    return Peers(Place(rank, 2, rank, 2, store), timeout_seconds=20.0)


def recorded() -> list[dict[str, str]]:
    """All that each of two learners says in a handshake that ends well."""
    store = HashStore()
    recorders = [Recorder(store) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rank: peers(recorders[rank], rank).shake_hands(MINE), range(2)))
    return [recorder.said for recorder in recorders]


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
        verified(0, 1, "challenges", message)


@pytest.mark.parametrize("token", [None, "a", "0123456789abcdef" * 4])
def test_learners_of_one_run_understand_each_other(token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same token, or without any."""
    assert verified(0, 1, "challenges", _signed_with(token, monkeypatch)) == "hello"


def _signed_with(token: str | None, monkeypatch: pytest.MonkeyPatch) -> bytes:
    if token is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, token)
    return sign(1, "challenges", "hello").encode()


@pytest.mark.parametrize(
    "message", [b"", b"{}", b"0" * 64, b"\xff" * 200, b"[" * 100_000, json.dumps({"world": 2}).encode()]
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_stranger_is_refused_before_anything_it_says_is_read(
    message: bytes, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever bytes are in a learner's place, the greeting ends with a ProtocolError."""
    monkeypatch.setenv(VARIABLE, new_token())
    store = HashStore()
    store.set("handshake/1", message if is_first else new_challenge())
    store.set("signed/1", message)
    with pytest.raises(ProtocolError, match="does not understand learner 1" if is_first else "run token"):
        peers(store, 0).shake_hands(MINE)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_learner_whose_version_has_no_challenge_is_named_at_once(rank: int) -> None:
    """It has put its whole handshake, or learner 0's result, where the others look for challenges."""
    store, said = HashStore(), sign(1 - rank, "", json.dumps(asdict(MINE)))
    for key in ("handshake/1", "handshake/all"):
        store.set(key, said)
    with pytest.raises(ProtocolError, match=f"does not understand learner {1 - rank}, which has another version"):
        peers(store, rank).shake_hands(MINE)


def test_a_greeting_cannot_be_repeated_under_another_rank_or_challenge_or_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that only listens to the store learns nothing with which to shake hands."""
    monkeypatch.setenv(VARIABLE, new_token())
    said = sign(0, "challenges", "hello").encode()
    assert verified(1, 0, "challenges", said) == "hello"
    changed = said[:-1] + b"O", b"0" + said[1:-1]
    for rank, challenge, message in (
        (1, "challenges", said),
        (0, "others", said),
        *((0, "challenges", each) for each in changed),
    ):
        with pytest.raises(ProtocolError):
            verified(1, rank, challenge, message)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_handshake_recorded_in_an_earlier_run_is_refused(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the token is the same: a process that replays another learner's part does not know it."""
    monkeypatch.setenv(VARIABLE, new_token())
    store, said = HashStore(), recorded()[1 - rank]
    for key, value in said.items():
        store.set(key, value)
    with pytest.raises(ProtocolError, match="of an earlier run"):
        peers(store, rank).shake_hands(MINE)


def test_a_token_is_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What learners put into the store does not contain it."""
    token = new_token()
    monkeypatch.setenv(VARIABLE, token)
    said = json.dumps(recorded())
    assert "allreduce" in said and token not in said


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


@pytest.mark.usefixtures("alone")
def test_a_learner_remains_one_when_another_library_deletes_the_number_of_learners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert is_learner() and number_of_learners() == 3
    monkeypatch.delenv("WORLD_SIZE")
    assert number_of_learners() == 3 and is_learner()


@pytest.mark.parametrize("missing", [("MASTER_ADDR",), ("MASTER_PORT",), ("MASTER_ADDR", "MASTER_PORT")])
@pytest.mark.usefixtures("alone")
def test_a_learner_without_an_address_does_not_train_alone_in_silence(
    missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in missing:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=f"RANK is set without {' and '.join(missing)}"):
        is_learner()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not is_learner(), "a container's RANK=0 and WORLD_SIZE=1"


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
