"""Saving behind training: what is saved is the state of that moment, in order, and nothing is lost at the end."""

import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from starling.checkpoint.reader import Checkpoint, checkpoints_in, latest, load
from starling.checkpoint.state import LearnerState, ShardState
from starling.checkpoint.writer import BackgroundWriter, CheckpointWriter
from starling.errors import CheckpointError
from starling.workload import Position, Ticket
from tests.checkpoint.test_checkpoints import state, write_model

ROOT = Path(__file__).resolve().parents[2]


class Watched(CheckpointWriter):
    """A writer for one learner that notes when it begins and ends, and begins when it may."""

    def __init__(self, experiment: Path) -> None:
        super().__init__(experiment / "checkpoints", lambda name: 1, write_model, {"model": "m"}, keep=100)
        self.go = threading.Event()
        self.events: list[str] = []

    def save(self, state: LearnerState) -> Checkpoint | None:
        self.go.wait(60.0)
        self.events.append(f"begin {state.position.num_done}")
        saved = super().save(state)
        self.events.append(f"end {state.position.num_done}")
        return saved


def ignore(checkpoint: Checkpoint) -> None:
    """For those who do not ask what was completed."""


def test_what_is_saved_is_the_state_of_that_moment(tmp_path: Path) -> None:
    """Weights, buffers, optimizer and shards are copied: the learner changes its own before the first is written."""
    writer = Watched(tmp_path)
    mine = state(0, 1, Ticket(1, 0, 8))
    shard_optimizer = {"state": {0: {"exp_avg": torch.tensor([3.0])}}, "param_groups": []}
    shard = ShardState(1, 2, mine.weights[1:2], shard_optimizer)
    mine = LearnerState(0, 1, mine.position, 1.5, mine.weights, mine.buffers, mine.optimizer, shards=(shard,))
    expected = state(0, 1, Ticket(1, 0, 8))
    background = BackgroundWriter(writer)
    background.save(mine, ignore)
    for tensor in mine.encode()[1].values():
        tensor.fill_(99)
    mine.optimizer["param_groups"][0]["lr"] = 99.0
    writer.go.set()
    background.close()
    saved = load(latest(tmp_path)).learner(0)
    assert torch.equal(saved.weights, expected.weights)
    assert torch.equal(saved.buffers["mean"], expected.buffers["mean"])
    momentum = [each.optimizer["state"][0]["momentum_buffer"] for each in (saved, expected)]
    assert torch.equal(*momentum)
    assert saved.optimizer["param_groups"] == expected.optimizer["param_groups"]
    assert saved.shards[0].optimizer["state"][0]["exp_avg"].tolist() == [3.0]


def test_there_is_one_copy_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who saves again too soon waits until the save before is done, and copies then."""
    writer = Watched(tmp_path)
    copy = LearnerState.copy

    def noted(mine: LearnerState) -> LearnerState:
        writer.events.append(f"copy {mine.position.num_done}")
        return copy(mine)

    monkeypatch.setattr(LearnerState, "copy", noted)
    background = BackgroundWriter(writer)
    background.save(state(0, 1, Ticket(1, 0, 8)), ignore)
    assert writer.events == ["copy 8"]  # the learner goes on, though nothing is written yet
    writer.go.set()
    for done in (16, 24):
        background.save(state(0, 1, Ticket(1, 0, done)), ignore)
    background.close()
    assert writer.events == [f"{what} {done}" for done in (8, 16, 24) for what in ("copy", "begin", "end")]


@pytest.mark.parametrize("how", ["save", "close", "check"])
def test_an_error_in_the_background_reaches_the_learner_unchanged(how: str, tmp_path: Path) -> None:
    """At its next save or mini-batch, or at the end; once."""
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    writer = Watched(tmp_path)
    writer.go.set()
    background = BackgroundWriter(writer)
    background.save(state(0, 1, Ticket(1, 0, 8)), ignore)
    with pytest.raises(CheckpointError, match=r"step-00000008: a checkpoint cannot be written .*then resume"):
        if how == "save":
            background.save(state(0, 1, Ticket(1, 0, 16)), ignore)
        elif how == "close":
            background.close()
        else:
            while True:  # until the thread has failed, which nobody waits for
                background.check()
    background.close()


def test_a_check_does_not_wait(tmp_path: Path) -> None:
    """A learner looks after every mini-batch."""
    writer = Watched(tmp_path)
    background = BackgroundWriter(writer)
    background.save(state(0, 1, Ticket(1, 0, 8)), ignore)
    background.check()
    assert writer.events == []
    writer.go.set()
    background.close()
    assert writer.events == ["begin 8", "end 8"]


def test_checkpoints_are_completed_in_their_order(tmp_path: Path) -> None:
    """By whoever is the last to arrive, while learners go on at speeds of their own."""
    lock, arrived, completed = threading.Lock(), Counter[str](), list[int]()

    def arrive(name: str) -> int:
        with lock:
            arrived[name] += 1
            return arrived[name]

    writer = CheckpointWriter(tmp_path / "checkpoints", arrive, write_model, {"model": "m"}, keep=100)

    def learn(rank: int) -> None:
        background = BackgroundWriter(writer)
        for epoch in range(1, 9):
            background.save(
                state(rank, 3, Ticket(epoch, 0, 8 * epoch)),
                lambda checkpoint: completed.append(checkpoint.manifest.position.num_done),
            )
        background.close()

    learners = [threading.Thread(target=learn, args=(rank,)) for rank in range(3)]
    for learner in learners:
        learner.start()
    for learner in learners:
        learner.join()
    assert completed == [8 * epoch for epoch in range(1, 9)]
    assert [load(folder).manifest.position for folder in checkpoints_in(tmp_path / "checkpoints")] == [
        Position(Ticket(epoch, 0, 8 * epoch)) for epoch in range(1, 9)
    ]


@pytest.mark.wide
def test_a_process_does_not_end_before_all_is_written(tmp_path: Path) -> None:
    """Even if nobody closes: here the thread begins to write when the interpreter has begun to end."""
    command = [sys.executable, "-c", f"import {__name__} as me; me.save_and_go({str(tmp_path)!r})"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "the main thread is at its end\n"
    load(latest(tmp_path))


def save_and_go(experiment: str) -> None:
    """Begin a save, and return."""
    writer = Watched(Path(experiment))
    threading._register_atexit(writer.go.set)  # type: ignore[attr-defined]  # before it waits for its threads
    BackgroundWriter(writer).save(state(0, 1, Ticket(1, 0, 8)), ignore)
    sys.stdout.write("the main thread is at its end\n")
