"""A run of real learners says by itself why it stands still, who was lost, and what became of it."""

import re
import subprocess
import sys
from pathlib import Path

import psutil

from starling.checkpoint.reader import latest, load
from starling.experiment.seen import read_seen
from starling.experiment.status import read_status
from tests.end_to_end.test_train import Tree, starling, written


def begin(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    """A run, whose lines are read while it goes on."""
    command = [sys.executable, "-m", "starling", "train", *arguments]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)


def read_until(run: "subprocess.Popen[str]", pattern: str) -> str:
    """The first line in which a pattern occurs; an error with all lines if there is none."""
    assert run.stderr is not None
    said = []
    for line in run.stderr:
        said.append(line)
        if re.search(pattern, line):
            return line
    raise AssertionError("".join(said))


def test_a_run_that_stands_still_says_for_whom_and_what_that_one_said_last(tree: Tree, tmp_path: Path) -> None:
    """In step nobody knows who is late: the launcher finds out, says it on the screen, and `starling status` shows it
    from another terminal; the learners' own logs say what they know."""
    recipe = written(tree, tmp_path)
    choice = ("learners=3", "strategy=allreduce", "budget.epochs=null", "budget.steps=90", "engine.explain_seconds=1")
    with begin(tmp_path, recipe, *choice, "faults=[{pause: 1, seconds: 8, at_step: 20}]") as run:
        assert run.stderr is not None
        line = read_until(run, r"learners 0 and 2 have waited .*sign of life for")
        shown = starling(tmp_path, "status", "exp/songs")
        rest = run.stderr.read()
        assert run.wait(timeout=100) == 0, rest
    assert re.search(
        r"have waited \d+\.\d s in the mean of a gradient .* for learner 1: learner 1 has given no sign of life for "
        r"\d+\.\d s; it last said \d+\.\d s ago: .*; its log: exp/songs/log/learner-1.log",
        line,
    ), line
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"songs, allreduce: training, began \d+\.\d s ago, view 0", shown.stdout)
    assert len(re.findall(r"│ waiting \d", shown.stdout)) == 2, shown.stdout
    assert re.search(r"1 │ silent for \d", shown.stdout), shown.stdout
    assert re.search(r"learners 0 and 2 go on after \d+\.\d s of waiting for learner 1", rest)
    assert len(re.findall(r"have waited", rest)) <= 3
    logs = tmp_path / "exp" / "songs" / "log"
    assert "in the mean of a gradient" in (logs / "learner-0.log").read_text()
    assert "learner 1 stood still for" in (logs / "learner-1.log").read_text()
    ended = starling(tmp_path, "status", "exp/songs", "--watch")
    assert re.search(r"songs, allreduce: ended .* exit code 0: ended well", ended.stdout), ended.stdout


def test_a_summary_says_who_did_how_much_and_who_was_lost(tree: Tree, tmp_path: Path) -> None:
    """On the screen and in a file; its numbers are those of the record of who saw what."""
    recipe = written(tree, tmp_path)
    choice = ("learners=3", "strategy=adpsgd", "budget.epochs=null", "budget.steps=150")
    faults = "faults=[{kill: 2, at_step: 8}, {nan: 0, at_step: 4}]"
    run = starling(tmp_path, "train", recipe, *choice, faults)
    assert run.returncode == 0, run.stderr
    summary = (tmp_path / "exp" / "songs" / "log" / "summary.txt").read_text()
    computed = {int(name): int(number) for name, number in re.findall(r"│ +(\d) │ +(\d+) │ +[\d.]+ % │", summary)}
    sights = list(
        read_seen(tmp_path / "exp" / "songs" / "seen", load(latest(tmp_path / "exp" / "songs")).manifest.standing)
    )
    assert computed.keys() == {0, 1, 2}
    assert 0 <= sum(computed.values()) - len(sights) <= 3, summary  # what was computed twice, on account of the loss
    assert computed[2] == 7
    assert re.search(r"2 │ +7 │ .*│ lost", summary)
    assert re.search(r"lost after \d+\.\d s: learner 2 was killed by SIGKILL while \S+", summary)
    assert re.search(r"\d mini-batches that others had begun were given out again; .*starling audit", summary)
    assert "gradients that were not finite and left out: 1\n" in summary
    assert re.search(r"checkpoints: \d+, the newest exp/songs/checkpoints/step-\d+", summary)
    assert "songs, adpsgd: ended well" in run.stderr
    assert "lost after" in run.stderr
    assert starling(tmp_path, "audit", "exp/songs").returncode == 0
    status = read_status(tmp_path / "exp" / "songs")
    assert (status.stage, status.exit_code) == ("ended", 0)
    assert [each.state for each in status.learners] == ["ended", "ended", "lost"]
    assert re.match("learner 2 was killed by SIGKILL", status.losses[0])


def test_a_launcher_that_was_killed_is_seen_to_be_gone(tree: Tree, tmp_path: Path) -> None:
    """By whoever asks for the status, with what was known last."""
    recipe = written(tree, tmp_path)
    with begin(tmp_path, recipe, "learners=1", "budget.epochs=100000") as run:
        read_until(run, "^saved")
        learners = psutil.Process(run.pid).children()
        run.kill()
        run.wait()
        shown = starling(tmp_path, "status", "exp/songs")
    psutil.wait_procs(learners, timeout=10)
    assert shown.returncode == 0
    assert f"its launcher (process {run.pid}) is gone" in shown.stdout
    assert read_status(tmp_path / "exp" / "songs").exit_code is None
