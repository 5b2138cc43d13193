"""A run of real learners says why it is stalled, which learners were lost, and what became of it."""

import json
import re
from collections import Counter
from pathlib import Path

import psutil
import pytest

from starling.checkpoint.reader import latest, load
from starling.experiment.following import read_status
from starling.experiment.record import read_seen
from tests.end_to_end.test_train import Tree, starling, written
from tests.warm_start import WarmProgram


def begin(folder: Path, *arguments: str) -> WarmProgram:
    """A run whose lines are read while it trains."""
    return WarmProgram(["-m", "starling", "train", *arguments], folder)


def read_until(run: WarmProgram, pattern: str) -> str:
    """The first line in which a pattern occurs; an error with all lines if there is none."""
    said = []
    for line in run.output:
        said.append(line)
        if re.search(pattern, line):
            return line
    raise AssertionError("".join(said))


@pytest.mark.wide
def test_a_stalled_run_says_for_which_learner_and_what_that_one_did_last(tree: Tree, tmp_path: Path) -> None:
    """In step no learner knows which one is late: the launcher finds out, says it on the screen and in the events, and
    `starling status` shows it from another terminal; the learners' own logs say what they know."""
    recipe = written(tree, tmp_path)
    choice = ("learners=3", "strategy=allreduce", "budget.epochs=null", "budget.steps=90", "engine.explain_seconds=1")
    with begin(tmp_path, recipe, *choice, "faults=[{pause: 1, seconds: 8, at_step: 20}]") as run:
        line = read_until(run, r"have waited .*not sent a heartbeat for")
        shown = starling(tmp_path, "status", "exp/songs")
        rest = run.output.read()
        assert run.wait(timeout=100) == 0, rest
    assert re.search(
        r"have waited \d+\.\d s in the mean of a gradient .* for learner 1: learner 1 has not sent a heartbeat for "
        r"\d+\.\d s; it last reported \d+\.\d s ago: .*; its log: exp/songs/log/learner-1.log",
        line,
    ), line
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"songs, allreduce: training, run began \d+\.\d s ago, membership 0", shown.stdout)
    assert len(re.findall(r"│ waiting \d", shown.stdout)) == 2, shown.stdout
    assert re.search(r"1 │ silent for \d", shown.stdout), shown.stdout
    assert re.search(r"learners 0 and 2 continue after waiting \d+\.\d s for learner 1", rest)
    assert len(re.findall(r"have waited", rest)) <= 3
    logs = tmp_path / "exp" / "songs" / "log"
    assert "in the mean of a gradient" in (logs / "learner-0.log").read_text()
    assert "learner 1 did not run for" in (logs / "learner-1.log").read_text()
    kinds = [json.loads(each)["kind"] for each in (logs / "events.jsonl").read_text().splitlines()]
    assert {"start", "stall", "stall-over", "epoch", "checkpoint", "end"} <= set(kinds)
    ended = starling(tmp_path, "status", "exp/songs", "--watch")
    said = " ".join(ended.stdout.split())
    assert re.search(r"songs, allreduce: ended .* exit code 0: the recogniser does not work", said), said  # 5 epochs


@pytest.mark.wide
def test_a_lost_learner_is_in_the_summary_and_the_run_can_be_resumed_with_it(tree: Tree, tmp_path: Path) -> None:
    """In step, one killed inside an epoch: how much each did, by the record of what was seen, which was lost, when and
    how. Then two resume, and every utterance of every epoch was seen once."""
    recipe = written(tree, tmp_path)
    choice = ("strategy=allreduce", "checkpoints.every=4", "budget.epochs=2")
    faults = "faults=[{kill: 1, at_step: 5}, {nan: 0, at_step: 3}]"
    run = starling(tmp_path, "train", recipe, *choice, faults)
    assert run.returncode == 0, run.stderr
    experiment = tmp_path / "exp" / "songs"
    summary = (experiment / "log" / "summary.txt").read_text()
    computed = {int(name): int(number) for name, number in re.findall(r"│ +(\d) │ +(\d+) │ +[\d.]+ % │", summary)}
    sights = Counter(
        sight.learner for sight in read_seen(experiment / "seen", load(latest(experiment)).manifest.position)
    )
    assert computed[1] == 4
    assert {name: computed[name] - sights[name] in (0, 1) for name in computed} == {0: True, 1: True}, summary
    assert re.search(r"1 │ +4 │ .*│ lost", summary)
    assert re.search(r"lost \d+\.\d s after the start: learner 1 was killed by SIGKILL \(last reported: \S+", summary)
    assert re.search(r"\d mini-batches that others had begun were re-issued; .*starling audit", summary)
    assert re.search(r"gradients that were not finite and left out: [12]\n", summary)
    assert re.search(r"checkpoints: \d+, the newest exp/songs/checkpoints/step-\d+", summary)
    assert "\nthe recogniser does not work: " in run.stderr  # after two epochs of 24 songs
    assert "\nsongs, allreduce: ended; start and training" in run.stderr
    assert re.search(r"lost \d+\.\d s after the start", run.stderr)
    status = read_status(experiment)
    assert (status.stage, status.exit_code) == ("ended", 0)
    assert [each.state for each in status.learners] == ["ended", "lost"]
    assert re.match("learner 1 was killed by SIGKILL", status.losses[0])
    again = starling(tmp_path, "train", "exp/songs/config.yaml", "resume=exp/songs", "budget.epochs=4", "faults=[]")
    assert again.returncode == 0, again.stderr
    audited = starling(tmp_path, "audit", "exp/songs")
    assert "4 of 4 complete epochs saw each of 24 utterances exactly once" in audited.stdout, audited.stdout


@pytest.mark.soak
def test_a_launcher_that_was_killed_is_seen_to_be_gone(tree: Tree, tmp_path: Path) -> None:
    """By `starling status`, with what was known last."""
    recipe = written(tree, tmp_path)
    with begin(tmp_path, recipe, "learners=1", "budget.epochs=100000") as run:
        read_until(run, "^saved")
        learners = run.learners()
        run.kill()
        run.wait()
        shown = starling(tmp_path, "status", "exp/songs")
    psutil.wait_procs(learners, timeout=10)
    assert shown.returncode == 0
    assert f"its launcher (process {run.pid}) is gone" in shown.stdout
    assert read_status(tmp_path / "exp" / "songs").exit_code is None
