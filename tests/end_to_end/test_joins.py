"""Learners that come back or are new in a real training: all is seen once, and checkpoints are of all members."""

import io
import json
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest
from rich.console import Console

from starling.checkpoint.files import read_manifest
from starling.checkpoint.reader import latest
from starling.experiment.record import audit, read_seen
from tests.end_to_end.test_train import Tree, starling, written
from tests.warm_start import learners_of


@pytest.fixture
def songs(tree: Tree, tmp_path: Path) -> Iterator[str]:
    """A recipe for songs, in batches that take no time. A training that a failed test has left is ended."""
    yield written(tree | {"validate_every": None}, tmp_path)
    for training in STARTED:
        training.kill()  # its learners end with it
        training.wait()
    STARTED.clear()


STARTED: "list[subprocess.Popen[str]]" = []


class Training:
    """A training as a user starts it, in steps from one line on its screen to another."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.said: list[str] = []
        command = [sys.executable, "-m", "starling", "train", *arguments]
        self.process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
        STARTED.append(self.process)
        self.lines: SimpleQueue[str] = SimpleQueue()
        self.read_to = 0  # in the file of events
        self.trained: set[int] = set()  # learners that ended an epoch after they joined, in the events read so far
        self.reader = threading.Thread(target=self._read, daemon=True)  # or it would wait for a reader
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self.lines.put(line)
        self.lines.put("")

    def until(self, is_there: Callable[[str], bool], times: int = 1) -> None:
        """Read on until there were so many such lines."""
        while line := self.lines.get(timeout=200):
            self.said.append(line)
            times -= is_there(line)
            if times == 0:
                return
        pytest.fail("".join(self.said))

    def until_joined(self, learner: int) -> None:
        """Until a learner has joined and computed, and two checkpoints were written after that."""
        self.until(lambda line: line.startswith(f"learner {learner} has joined"))
        self.until(lambda line: re.match(r"epoch \d+ ended", line) is not None and self.has_computed(learner))
        self.until(lambda line: line.startswith("saved"), 2)

    def has_computed(self, learner: int) -> bool:
        """Whether a learner took part in an epoch that ended after it joined."""
        with (self.folder / "exp" / "songs" / "log" / "events.jsonl").open(encoding="utf-8") as events:
            events.seek(self.read_to)
            while (line := events.readline()).endswith("\n"):
                self.read_to = events.tell()
                event = json.loads(line)
                if event["kind"] == "join":
                    self.trained.discard(event["learner"])
                if event["kind"] == "epoch":
                    self.trained.update(int(name) for name, end in event["learners"].items() if end["steps"] > 0)
        return learner in self.trained

    def kill(self, learner: int) -> None:
        """As kill -9 does."""
        next(process for rank, process in learners_of(self.process.pid) if rank == learner).kill()

    def end(self) -> None:
        """As a user who has seen enough."""
        learners = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=100) == 143, "".join(self.said)
        self.reader.join()
        assert not any(learner.is_running() for learner in learners)


def audited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Counter[int]]:
    """What `starling audit` says in its last line, and how many mini-batches each learner computed."""
    monkeypatch.chdir(folder)  # the recipe's paths are relative to where it was used
    said: list[str] = []
    audit(Path("exp/songs"), said.append, Console(file=io.StringIO()))
    end = read_manifest(latest(Path("exp/songs"))).position
    return said[-1], Counter(sight.learner for sight in read_seen(Path("exp/songs/seen"), end))


@pytest.mark.soak  # `make test` has tests/launch/test_joins.py
@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce"])
def test_a_lost_learner_and_one_more_join_and_all_is_seen_once(
    strategy: str, songs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two is killed and comes back; a third is asked for from elsewhere. Everything was computed once, by all of
    them; checkpoints are of three; and afterwards there is nothing to join."""
    run = Training(
        tmp_path, songs, "learners=2", f"strategy={strategy}", "budget.epochs=100000", "checkpoints.every=200",
        "on_loss=replace",
    )  # fmt: skip
    run.until(lambda line: line.startswith("saved"), 2)
    run.kill(1)
    run.until_joined(1)
    joining = starling(tmp_path, "join", "exp/songs")
    assert joining.returncode == 0, joining.stderr
    assert joining.stdout == "joined as learner 2; 3 learners train now; logs: exp/songs/log\n"
    run.until_joined(2)
    run.end()
    line, shares = audited(tmp_path, monkeypatch)
    assert "every mini-batch before number" in line
    assert shares.keys() == {0, 1, 2}
    assert read_manifest(latest(Path("exp/songs"))).world == 3
    assert (tmp_path / "exp" / "songs" / "log" / "learner-2.log").is_file()
    refused = starling(tmp_path, "join", "exp/songs", "--learners", "2")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "exp/songs: nothing runs here; start it with: starling train exp/songs/config.yaml" in refused.stderr


@pytest.mark.soak
def test_a_run_that_learners_joined_can_be_resumed(songs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner comes on purpose; four, under another strategy, resume from the checkpoint of three."""
    run = Training(
        tmp_path, songs, "learners=2", "strategy=delay-by-one", "budget.epochs=100000", "checkpoints.every=200",
        "faults=[{join: 7, at_seconds: 1}]",
    )  # fmt: skip
    run.until_joined(7)
    run.end()
    position = read_manifest(latest(tmp_path / "exp" / "songs")).next_ticket
    resumed = starling(
        tmp_path, "train", "exp/songs/config.yaml", "resume=exp/songs", "learners=4", "strategy=adpsgd", "faults=[]",
        f"budget.epochs={position.epoch + 2}",
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    line, shares = audited(tmp_path, monkeypatch)
    whole = position.epoch + 2
    assert f"{whole} of {whole} complete epochs saw each of" in line
    assert shares[7] > 0


@pytest.mark.soak
def test_a_joiner_that_differs_is_left_out_and_the_others_continue(songs: str, tmp_path: Path) -> None:
    """The recipe of a running experiment was edited: `starling join` says so, and the run is not disturbed."""
    run = Training(tmp_path, songs, "learners=2", "budget.epochs=100000", "checkpoints.every=200")
    run.until(lambda line: line.startswith("saved"))
    config = tmp_path / "exp" / "songs" / "config.yaml"
    config.write_text(config.read_text().replace("\nvalidate_every: null", "\nvalidate_every: 300"))
    joining = starling(tmp_path, "join", "exp/songs")
    assert joining.returncode == 3
    assert "learner 2: learner 2 and learner 0 differ in configuration" in joining.stderr
    run.until(lambda line: line.startswith("saved"), 2)
    run.end()
