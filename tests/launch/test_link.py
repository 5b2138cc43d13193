"""A learner's end of the socket to its launcher."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from starling.launch.link import ORPHANED, VARIABLE

PROGRAM = """
import sys, threading
from pathlib import Path
from starling.launch.link import Link
Link.from_environment().leftovers.append(Path(sys.argv[1]))
print("ready", flush=True)
threading.Event().wait(60.0)
"""


def test_the_learners_of_a_killed_launcher_remove_what_it_left(tmp_path: Path) -> None:
    """Such as the job that `starling.train` has packed for them: a killed launcher removes nothing."""
    left = tmp_path / "job-folder"
    left.mkdir()
    (left / "job").touch()
    ours, theirs = socket.socketpair()
    with theirs:
        learner = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(left)],
            env={**os.environ, VARIABLE: str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
        )
    assert learner.stdout is not None and learner.stdout.readline() == b"ready\n"
    assert left.exists()
    ours.close()
    assert learner.wait(30.0) == ORPHANED
    learner.stdout.close()
    assert not left.exists()
