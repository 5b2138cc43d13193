"""A run that is asked to stop saves where it is, ends, and can be gone on with as if nothing had happened."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from starling.checkpoint.reader import latest, load
from tests.end_to_end.test_seen import audited
from tests.end_to_end.test_train import Tree, starling, written
from tests.warm_start import WarmProgram

EPOCHS = 12


def stopped(folder: Path, number: int, *arguments: str) -> tuple[int, str]:
    """Train, and send the launcher a signal after the first checkpoint: the exit code, and what it said then; no
    learner is left."""
    with WarmProgram(["-m", "starling", "train", *arguments], folder) as run:
        said = []
        for line in run.output:
            said.append(line)
            if line.startswith("saved"):
                break
        learners = run.learners()
        os.kill(run.pid, number)
        message, code = run.output.read(), run.wait(timeout=60)
        assert "%WER" not in message  # it ends without scoring
    assert learners, "".join(said)
    assert not any(learner.is_running() for learner in learners)
    return code, message


def resumed(message: str, folder: Path, *arguments: str) -> None:
    """Do what the message says."""
    hint = re.search(r"resume with: starling train (\S+) (resume=\S+)", message)
    assert hint is not None, message
    again = starling(folder, "train", *hint.groups(), *arguments)
    assert again.returncode == 0, again.stderr


@pytest.mark.soak
@pytest.mark.parametrize(("strategy", "number"), [("delay-by-one", signal.SIGTERM), ("allreduce", signal.SIGINT)])
def test_a_run_stopped_by_a_signal_and_resumed_ends_in_the_bits_of_one_that_was_not(
    strategy: str, number: signal.Signals, tree: Tree, tmp_path: Path
) -> None:
    """128 + the signal, and one message that names the checkpoint and how to resume; then the same weights, momentum
    and place in the data."""
    recipe = written(tree, tmp_path)
    choice = (f"strategy={strategy}", f"budget.epochs={EPOCHS}")
    code, message = stopped(tmp_path, number, recipe, *choice, "name=stopped")
    assert code == 128 + number, message
    saved = re.search(rf"error: stopped by {number.name}, saved (\S+)\n", message)
    assert saved is not None, message
    assert (tmp_path / saved[1]) == latest(tmp_path / "exp" / "stopped")
    before = load(tmp_path / saved[1]).manifest.position
    assert before.next_ticket.epoch < EPOCHS
    resumed(message, tmp_path)
    straight = starling(tmp_path, "train", recipe, *choice, "name=straight")
    assert straight.returncode == 0, straight.stderr
    one, other = (latest(tmp_path / "exp" / name) for name in ("straight", "stopped"))
    assert one.name == other.name
    for rank in range(2):
        mine, theirs = (load_file(folder / f"learner-{rank}.safetensors") for folder in (one, other))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("strategy", "learners", "workers"),
    [
        ("adpsgd", 2, 0),
        pytest.param("{name: parameter-server, servers: own}", 3, 0, marks=pytest.mark.soak),
        pytest.param("hogwild", 2, 1, marks=pytest.mark.soak),
        pytest.param("delay-by-one", 2, 1, marks=pytest.mark.soak),
    ],
)
def test_a_run_stopped_by_a_signal_and_resumed_sees_everything_once(
    strategy: str, learners: int, workers: int, tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 143 and one message that names the checkpoint and how to resume; the record of what was seen says that
    each utterance of each epoch was seen once."""
    recipe = written(tree, tmp_path)
    choice = (f"strategy={strategy}", f"learners={learners}", f"batches.num_workers={workers}")
    saving = ("budget.epochs=100000", "checkpoints.minutes=0.02")
    code, message = stopped(tmp_path, signal.SIGTERM, recipe, *choice, *saving)
    assert code == 143, message
    saved = re.search(r"error: stopped by SIGTERM, saved (\S+)\n", message)
    assert saved is not None, message
    assert "Traceback" not in message
    position = load(tmp_path / saved[1]).manifest.position
    assert not position.outstanding
    assert tmp_path / saved[1] == latest(tmp_path / "exp" / "songs")
    epochs = position.next_ticket.epoch + 2
    resumed(message, tmp_path, f"budget.epochs={epochs}")
    assert f"{epochs} of {epochs} complete epochs saw each of" in audited(tmp_path, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_learners_of_torchrun_save_and_end_when_it_is_asked_to_stop(
    number: signal.Signals, tree: Tree, tmp_path: Path
) -> None:
    """It passes the signal on to all processes of each learner, loading processes included."""
    recipe = written(tree, tmp_path)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-addr", "127.0.0.1", "--standalone"]
    command = [
        sys.executable, *torchrun, "-m", "starling", "train", recipe, "budget.epochs=100000", "batches.num_workers=1",
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        said = []
        for line in run.stdout:
            said.append(line)
            if "epoch 3 ended" in line:
                break
        learners = psutil.Process(run.pid).children()
        os.kill(run.pid, number)
        said.append(run.stdout.read())
        run.wait(timeout=60)
    message = "".join(said)
    assert message.count(f"error: stopped by {number.name}, saved ") == 2, message
    assert "%WER" not in message
    assert not any(learner.is_running() for learner in learners)
    resumed(
        message, tmp_path, f"budget.epochs={load(latest(tmp_path / 'exp' / 'songs')).manifest.next_ticket.epoch + 1}"
    )


def test_a_simulation_that_is_stopped_leaves_nothing_half_written(tree: Tree, tmp_path: Path) -> None:
    """SIGTERM ends it with 143 and one message; a checkpoint is whole or not there."""
    recipe = written(tree, tmp_path)
    with WarmProgram(["-m", "starling", "simulate", recipe, "budget.epochs=100000"], tmp_path) as run:
        for line in run.output:
            if "epoch 1 ended" in line:
                break
        os.kill(run.pid, signal.SIGTERM)
        message = run.output.read()
        assert run.wait(timeout=60) == 143, message
    assert re.search(r"error: stopped by SIGTERM; a simulation saves only at its end", message), message
    assert "Traceback" not in message
    assert list((tmp_path / "exp" / "songs-virtual" / "checkpoints").iterdir()) == []
