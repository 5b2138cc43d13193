"""What travels between a launcher, its learners and other commands arrives as it was, or is refused."""

import math
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from starling.engines.processes.stalls import Stall
from starling.errors import DataError, ProtocolError
from starling.launch.launcher import launch
from starling.launch.messages import (
    Activity,
    CanStop,
    Ended,
    Failed,
    Heartbeat,
    JoinAnswer,
    JoinRequest,
    LauncherMessage,
    LearnerMessage,
    ModelSaved,
    NewMembership,
    Progress,
    Reached,
    Said,
    Saved,
    Signalled,
    Stop,
    Stretch,
    decode_file,
    decode_from_launcher,
    decode_from_learner,
    encode,
    encode_file,
    values_of,
)
from starling.training.membership import Membership

STRETCH = Stretch(3, 90.0, 9.5, 15, 5, 40, 200, 300.0, 12.5, 8.0, 1.0, 0.5)
FROM_LEARNER: list[LearnerMessage] = [
    Heartbeat(),
    Heartbeat(7, Stall("a mean", (0, 2), True, False, 3.5, 0.2, 11)),
    Reached("ready", -1),
    Reached("arrived", 1),
    Reached("entered", 1),
    CanStop(),
    Signalled(15),
    Failed("DataError", "utterance u21: 0.0 s of audio\nand more"),
    Ended(40),
    Progress(3, STRETCH, STRETCH, 1, 5, 10, 0.01, 0.75),
    Progress(3, Stretch(3, rounds=2, staleness=Counter({1: 4, 300: 1})), STRETCH, ended_at=9, consensus_distance=0.5),
    Saved("exp/demo/checkpoints/step-1", "barrier", 0.25),
    ModelSaved("exp/demo/validation/step-1"),
    Said("läuft"),
    Activity("step 3", {"step": 3, "weights": [1.0, 2.5], "more": {"nothing": None}}),
]
FROM_LAUNCHER: list[LauncherMessage] = [NewMembership(Membership(2, (0, 3, 1), "learner 2 was killed")), Stop(2)]


@pytest.mark.parametrize("message", FROM_LEARNER, ids=lambda message: type(message).__name__)
def test_a_message_of_a_learner_arrives_as_it_was(message: LearnerMessage) -> None:
    """As one line of JSON."""
    line = encode(message)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert decode_from_learner(line, 0) == message


@pytest.mark.parametrize("message", FROM_LAUNCHER, ids=lambda message: type(message).__name__)
def test_a_message_of_the_launcher_arrives_as_it_was(message: LauncherMessage) -> None:
    """As one line of JSON."""
    assert decode_from_launcher(encode(message)) == message


def test_a_number_that_is_not_finite_arrives_as_it_was() -> None:
    """JSON has no name for it, Python's does."""
    sent = Progress(0, Stretch(losses=math.nan), Stretch(), ended_at=1, consensus_distance=math.inf)
    read = decode_from_learner(encode(sent), 0)
    assert isinstance(read, Progress)
    assert math.isnan(read.new.losses) and read.consensus_distance == math.inf


def test_requests_and_answers_are_read_as_they_were_written() -> None:
    """Other commands write and read them as files."""
    answer = JoinAnswer("", (2, 3), ("learner 4: no memory",), 4)
    assert decode_file(JoinAnswer, encode_file(answer).encode()) == answer
    assert decode_file(JoinRequest, encode_file(JoinRequest(2, "a")).encode()) == JoinRequest(2, "a")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"nonsense", "Invalid JSON"),
        (b"[]", "object"),
        (b"{}", "kind"),
        (b'{"kind": "greeting"}', "'greeting'"),
        (b'{"kind": "reached", "stage": "entered"}', "reached.generation"),
        (
            b'{"kind": "reached", "stage": "entered", "generation": "1"}',
            "reached.generation: Input should be a valid integer",
        ),
        (b'{"kind": "reached", "stage": "entered", "generation": 1, "speed": 3}', "reached.speed"),
        (b'{"kind": "heartbeat", "num_steps": 1, "stall": {"what": "a mean"}}', "heartbeat.stall.whom"),
        (b'{"kind": "saved", "folder": "a", "moment": "now"}', "saved.moment"),
        (b'{"kind": "saved", "folder": "a", "moment": "end", "consensus_distance": "far"}', "saved.consensus_distance"),
        (b'{"kind": "progress", "speed": 3}', "progress.learner_id"),
    ],
)
def test_a_message_of_another_version_is_one_clear_error(line: bytes, problem: str) -> None:
    """The sender, what is wrong, and how the message begins."""
    with pytest.raises(
        ProtocolError, match=r"^learner 3 sent a message that this version does not understand"
    ) as error:
        decode_from_learner(line, 3)
    assert problem in str(error.value)
    assert line[:40].decode() in str(error.value)


def test_only_what_a_program_sends_of_its_own_has_values() -> None:
    """Nothing is read out of Starling's own messages by name."""
    assert values_of(Activity("", {"step": 3})) == {"step": 3}
    assert values_of(Reached("entered", 3)) == {}


@pytest.mark.parametrize(
    ("sent", "error", "text"),
    [
        ('b"{\\"kind\\": \\"reached\\"}\\n"', ProtocolError, "learner 0 sent a message .* reached.stage"),
        ('encode(Failed("DataError", "no audio"))', DataError, "no audio"),
    ],
)
def test_a_launcher_raises_what_a_learner_sends(sent: str, error: type[Exception], text: str, tmp_path: Path) -> None:
    """An error of its own, or what was malformed; no process is left."""
    program = (
        "import os, socket, sys; from starling.launch.link import VARIABLE\n"
        "from starling.launch.messages import Failed, encode\n"
        f"socket.socket(fileno=int(os.environ[VARIABLE])).sendall({sent})\n"
        "sys.exit(5)\n"
    )
    with pytest.raises(error, match=text):
        launch([sys.executable, "-c", program], 1, tmp_path)


def test_a_learner_ends_at_a_message_that_it_does_not_understand(tmp_path: Path) -> None:
    """With the exit code of its kind and a line in its log, where a thread that died would leave it waiting."""
    program = "from starling.launch.link import Link\nimport signal\nLink.from_environment()\nsignal.pause()\n"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "STARLING_LINK_FD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        ours.sendall(b'{"kind": "stop"}\n')
        _, said = process.communicate(timeout=60)
    assert process.returncode == ProtocolError.exit_code
    assert "the launcher sent a message that this version does not understand: stop.signal_number" in said
