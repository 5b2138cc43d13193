"""Training through the command line, with real learner processes."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import chdir
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from starling.checkpoint.reader import latest, load
from starling.cli import app
from starling.experiment.record import read_timeline
from starling.launch.joiners import taking_requests
from starling.speech.training import validate
from tests.mounts import run_with, small_disk
from tests.warm_start import learners_of

Tree = dict[str, Any]


def starling(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Starling's to its end, in a folder; this process is the one that starts the learners."""
    with chdir(folder):
        done = CliRunner().invoke(app, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def written(tree: Tree, folder: Path) -> str:
    """The recipe as a file; small and learned in seconds."""
    tree |= {
        "exp": "exp",
        "strategy": "delay-by-one",
        "batches": {"max_duration": 2},
        "checkpoints": {"epochs": 1},
        "augment": {"speed": [1.0], "spec_augment": None},
        "optimizer": {"lr": 0.02, "schedule": {"decay": "constant", "warmup": 0.0}},
    }
    (folder / "songs.yaml").write_text(yaml.safe_dump(tree))
    return "songs.yaml"


@pytest.mark.wide
def test_a_run_that_has_stopped_learning_ends_and_its_best_model_is_scored(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before its budget is spent, with exit code 0, and a checkpoint from which it could be resumed."""
    monkeypatch.setattr(validate, "_REST", 1.0)
    recipe = written(tree, tmp_path)
    run = starling(
        tmp_path, "train", recipe, "budget.epochs=100000", "patience=3", "data.valid=test", "checkpoints.epochs=null"
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"no lower error on test since epoch \d+: training ends", run.stderr)
    experiment = tmp_path / "exp" / "songs"
    (best,) = (experiment / "best").iterdir()
    wer = json.loads((best / "score.json").read_text())["wer"]
    assert run.stdout.splitlines()[1].startswith(f"%WER {wer:.2f} ")
    assert load(latest(experiment)).manifest.position.num_done >= json.loads((best / "score.json").read_text())["steps"]


@pytest.mark.wide
@pytest.mark.cold
def test_two_learners_learn_and_their_experiment_can_be_used(tree: Tree, tmp_path: Path, songs: Path) -> None:
    """One command trains, saves and scores; others score again and transcribe; the folder holds what it should."""
    recipe = written(tree, tmp_path)
    run = starling(
        tmp_path, "train", recipe, "budget.epochs=25", "optimizer.schedule.decay=cosine", "seed=4",
        "data.valid=test", "validate_every=5", "checkpoints.epochs=null",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert re.search(r"after epoch 25, test: %WER", run.stderr)
    assert run.stderr.count("\nsaved exp/songs/checkpoints/") == 1  # the run is shorter than checkpoints.minutes
    name, wer, *_ = run.stdout.splitlines()
    assert name == "test"
    assert float(re.fullmatch(r"%WER (\S+) \[ \d+ / \d+, \d+ ins, \d+ del, \d+ sub \].*", wer)[1]) <= 20.0  # type: ignore[index]
    ends = re.findall(r"\nepoch (\d+) ended after .*: loss .*, computing .* %.*, waiting .* % for data", run.stderr)
    assert ends[:10] == [str(epoch) for epoch in range(1, 11)] and ends[-1] == "25"
    assert run.stderr.count("raise batches.num_workers") + run.stderr.count("local_sgd, may wait less") <= 2

    experiment = tmp_path / "exp" / "songs"
    own = (experiment / "log" / "learner-1.log").read_text()
    assert re.search(r"\(1/2\) epoch 25 ended: \d+ steps in .* % computing, .* % waiting for peers", own)
    assert "(1/2)" not in run.stderr
    assert {path.name for path in experiment.iterdir()} == {
        "config.yaml", "env.txt", "status.json",
        "initial", "log", "tensorboard", "checkpoints", "best", "decode", "seen", "joins",
    }  # fmt: skip
    assert {path.name for path in (experiment / "log").iterdir()} == {
        "events.jsonl", "learner-0.log", "learner-1.log", "summary.txt",
    }  # fmt: skip
    assert {path.name for path in (experiment / "tensorboard").iterdir()} == {
        "consensus", "learner-0", "learner-1", "valid",
    }  # fmt: skip
    end = load(latest(experiment)).manifest.next_ticket
    assert end.epoch == 25
    stretches = read_timeline(experiment / "seen")
    assert sorted(each.step for each in stretches) == list(range(end.step))
    for learner in (0, 1):
        own = [each for each in stretches if each.learner == learner]
        assert all(before.end <= after.begin + 1e-3 for before, after in pairwise(own))
        told = sum(each.computing + each.waiting_for_data + each.waiting_for_peers for each in own)
        assert 0.5 * (own[-1].end - own[0].begin) < told < 1.01 * (own[-1].end - own[0].begin)
    assert starling(tmp_path, "evaluate", "exp/songs", "--best").stdout.splitlines()[0] == "test"

    again = starling(tmp_path, "evaluate", "exp/songs", "--set", "test", "--greedy")
    assert again.stdout == run.stdout
    spoken = starling(tmp_path, "transcribe", "exp/songs", str(songs.parent / "0.flac"))
    assert re.fullmatch(r"\S+0\.flac\t(DO|RE|MI|FA)( (DO|RE|MI|FA))*\n", spoken.stdout), spoken.stderr
    (tmp_path / "0.txt").write_text(text := spoken.stdout.split("\t")[1].lower())
    command = ["align", "exp/songs", str(songs.parent / "0.flac"), "--text", "0.txt", "--format", "ctm"]
    aligned = starling(tmp_path, *command)
    assert " ".join(line.split()[4] for line in aligned.stdout.splitlines()) == text.strip().upper(), aligned.stderr
    assert [path.name for path in (experiment / "align").iterdir()] == ["spelling.safetensors"]
    assert starling(tmp_path, *command, "--output", "times.ctm").returncode == 0
    assert (tmp_path / "times.ctm").read_text() == aligned.stdout
    heard = starling(tmp_path, "transcribe", *command[1:3], "--align", "--format", "ctm")
    for line, other in zip(heard.stdout.splitlines(), aligned.stdout.splitlines(), strict=True):
        assert line.split()[4] == other.split()[4]
        assert float(line.split()[2]) == pytest.approx(float(other.split()[2]), abs=0.05)


@pytest.mark.parametrize(
    ("strategy", "learners"),
    [
        pytest.param("delay-by-one", 2, id="delay-by-one"),
        pytest.param("{name: parameter-server, update: hybrid, servers: own}", 3, id="hybrid", marks=pytest.mark.soak),
    ],
)
def test_a_resumed_run_ends_in_the_same_bits_as_one_that_was_never_stopped(
    strategy: str, learners: int, tree: Tree, tmp_path: Path
) -> None:
    """Weights, momentum and position of all learners, a server included, continue exactly as they were."""
    recipe = written(tree, tmp_path)
    choice = (f"strategy={strategy}", f"learners={learners}")
    straight = starling(tmp_path, "train", recipe, *choice, "name=straight", "budget.epochs=2")
    first = starling(tmp_path, "train", recipe, *choice, "name=stopped", "budget.epochs=1")
    second = starling(tmp_path, "train", recipe, *choice, "name=stopped", "budget.epochs=2", "resume=exp/stopped")
    assert (straight.returncode, first.returncode, second.returncode) == (0, 0, 0), second.stderr
    one, other = (latest(tmp_path / "exp" / name) for name in ("straight", "stopped"))
    assert one.name == other.name
    for rank in range(learners):
        mine, theirs = (load_file(folder / f"learner-{rank}.safetensors") for folder in (one, other))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def torchrun(recipe: str, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Train with two processes that torchrun has started."""
    start = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-addr", "127.0.0.1", "--standalone"]
    command = [sys.executable, *start, "-m", "starling", "train", recipe, "learners=3", *overrides]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    return run


@pytest.mark.wide
def test_torchrun_can_start_the_learners(tree: Tree, tmp_path: Path) -> None:
    """Its number of processes counts; one of them prepares, prints and scores."""
    run = torchrun(written(tree, tmp_path), tmp_path)
    assert run.stdout.count("%WER") == 1
    assert "2 learners were started; the recipe's learners=3 is ignored" in run.stderr
    manifest = load(latest(tmp_path / "exp" / "songs")).manifest
    assert (manifest.world, manifest.learners) == (2, 2)


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_under_slurm_the_first_death_ends_the_run_soon_and_says_how_to_resume(
    victim: int, tree: Tree, tmp_path: Path
) -> None:
    """A task of `srun` is a process that finds the others by variables. The one that hosts the store may die, too."""
    recipe = written(tree, tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    tasks = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with (tmp_path / f"task-{rank}").open("wb") as log:
            command = [sys.executable, "-m", "starling", "train", recipe, "budget.epochs=100000"]
            env = {**os.environ, **place}
            tasks.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        while not (checkpoints := tmp_path / "exp" / "songs" / "checkpoints").exists() or not list(
            checkpoints.glob("step-*")
        ):
            assert all(task.poll() is None for task in tasks)
            time.sleep(0.1)
        tasks[victim].kill()
        assert tasks[1 - victim].wait(timeout=30.0) == 3
        assert tasks[victim].wait() == -signal.SIGKILL
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    message = (tmp_path / f"task-{1 - victim}").read_text(encoding="utf-8")
    assert re.search(f"error: learner {1 - victim} lost (learner {victim}|the store)", message), message
    hint = re.search(r"resume with: starling train (\S+) (resume=\S+)", message)
    assert hint is not None, message
    before = load(latest(tmp_path / "exp" / "songs")).manifest.next_ticket.epoch
    resumed = starling(tmp_path, "train", *hint.groups(), f"budget.epochs={before + 1}")
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.soak
def test_torchrun_can_resume_a_run(tree: Tree, tmp_path: Path) -> None:
    """A resume works like any other."""
    recipe = written(tree, tmp_path)
    torchrun(recipe, tmp_path)
    torchrun(recipe, tmp_path, "resume=exp/songs", "budget.epochs=2")
    assert load(latest(tmp_path / "exp" / "songs")).manifest.epochs_ended == 2


def test_a_learner_that_fails_ends_the_run_with_its_error(tree: Tree, tmp_path: Path) -> None:
    """Losses that explode end all learners with one message and the exit code of its kind."""
    recipe = written(tree, tmp_path)
    run = starling(
        tmp_path, "train", recipe, "optimizer.lr=1e30", "optimizer.name=sgd", "optimizer.clip_norm=null",
        "budget.epochs=2",
    )  # fmt: skip
    assert run.returncode == 4, run.stderr
    assert re.search(r"error: learner \d: the loss of mini-batch \d+ of epoch [12] is (nan|inf)", run.stderr)
    assert "Traceback" not in run.stderr


@pytest.mark.wide
def test_faults_on_purpose_happen_and_are_borne(tree: Tree, tmp_path: Path) -> None:
    """A recipe kills one learner, stops another for a moment, and spoils a gradient: the run ends well and says so."""
    recipe = written(tree | {"learners": 3, "strategy": "adpsgd", "budget": {"steps": 60}}, tmp_path)
    faults = "faults=[{kill: 2, at_step: 6}, {pause: 1, seconds: 1.5, at_step: 4}, {nan: 0, at_step: 5}]"
    run = starling(tmp_path, "train", recipe, faults)
    assert run.returncode == 0, run.stderr
    assert re.search(r"songs ended without learner 2: learner 2 was killed by SIGKILL \(last reported: ", run.stderr)
    logs = "".join(path.read_text() for path in (tmp_path / "exp" / "songs" / "log").glob("learner-[01].log"))
    assert logs.count("1 gradients not finite and left out") == 1
    assert load(latest(tmp_path / "exp" / "songs")).manifest.position.num_done >= 60


def test_faults_of_learners_that_are_not_there_are_refused(tree: Tree, tmp_path: Path) -> None:
    """Before anything starts, with the place in the recipe."""
    run = starling(tmp_path, "train", written(tree, tmp_path), "faults=[{kill: 2, at_step: 6}]")
    assert run.returncode == 2, run.stderr
    assert "faults.0: there is no learner 2 among 2" in run.stderr


def test_a_second_run_in_the_folder_of_a_running_one_is_refused(tree: Tree, tmp_path: Path) -> None:
    """Before it touches anything: two would write the same checkpoints. Nor is a partial one removed."""
    recipe = written(tree, tmp_path)
    folder = tmp_path / "exp" / "songs"
    with taking_requests(folder / "joins") as requests:
        assert requests is not None
        (folder / "checkpoints" / ".step-00000004.partial").mkdir(parents=True)
        before = sorted(folder.rglob("*"))
        for more in ([], ["overwrite=true"]):
            run = starling(tmp_path, "train", recipe, *more)
            assert run.returncode == 2, run.stderr
            assert "exp/songs: another run writes here; wait for its end, stop it, or set name" in run.stderr
        assert sorted(folder.rglob("*")) == before


@pytest.mark.soak  # `make test` has the same for a run that its strategy continues: test_explains.py
def test_a_run_that_lost_a_learner_says_who_and_can_be_resumed(tree: Tree, tmp_path: Path) -> None:
    """Where it is asked for, a killed learner ends the run with exit code 3; the message tells how to resume."""
    recipe = written(tree, tmp_path)
    command = [sys.executable, "-m", "starling", "train", recipe, "budget.epochs=100000", "on_loss=stop"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if line.startswith("saved"):
                break
        victims = [process for _, process in learners_of(run.pid)]
        assert len(victims) == 2
        victims[1].kill()
        message = run.stderr.read()
        assert run.wait(timeout=60) == 3, message
    assert re.search(r"error: learner \d was killed by SIGKILL \(last reported: ", message)
    hint = re.search(r"resume with: starling train (\S+) (resume=\S+)", message)
    assert hint is not None
    assert not any(victim.is_running() for victim in victims)
    before = load(latest(tmp_path / "exp" / "songs")).manifest.next_ticket.epoch
    resumed = starling(tmp_path, "train", *hint.groups(), f"budget.epochs={before + 1}")
    assert resumed.returncode == 0, resumed.stderr
    assert load(latest(tmp_path / "exp" / "songs")).manifest.next_ticket.epoch == before + 1


@pytest.mark.soak
def test_a_full_disk_ends_a_run_with_what_is_needed_and_costs_nothing(tree: Tree, tmp_path: Path) -> None:
    """On a real one: exit code 6, the checkpoint before is whole and nothing half-written; with room it resumes."""
    written(tree, tmp_path)
    (tmp_path / "exp").mkdir()
    inside = f"import {__name__} as me; me.train_on_a_full_disk({str(tmp_path)!r})"
    run_with(small_disk(tmp_path / "exp", "64m"), inside, timeout=250.0)


def train_on_a_full_disk(place: str) -> None:
    """Train, fill the disk, train on, make room, train on; in a process of its own, which has mounted the disk."""
    folder = Path(place)
    experiment = folder / "exp" / "songs"
    first = starling(folder, "train", "songs.yaml", "budget.epochs=1", "learners=1")
    assert first.returncode == 0, first.stderr
    saved = latest(experiment)
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    filling = folder / "exp" / "filling"
    filling.write_bytes(bytes(shutil.disk_usage(filling.parent).free - size // 2))
    second = starling(folder, "train", "songs.yaml", "budget.epochs=2", "resume=exp/songs")
    assert second.returncode == 6, second.stderr
    assert re.search(r"step-\d+: disk full: needs [\d,]+ bytes, [\d,]+ free; make room, then resume", second.stderr)
    assert [line.count("disk full") for line in second.stderr.splitlines() if line.startswith("error:")] == [1]
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    load(saved)
    filling.unlink()
    third = starling(folder, "train", "songs.yaml", "budget.epochs=2", "resume=exp/songs", "learners=1")
    assert third.returncode == 0, third.stderr
    assert load(latest(experiment)).manifest.epochs_ended == 2
