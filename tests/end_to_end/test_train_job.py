"""`starling.train` trains anybody's model and data on real processes, with what a recipe's run has."""

import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from starling.checkpoint.reader import latest, load
from starling.errors import DataError
from starling.experiment.record import audit, read_seen
from tests.warm_start import WarmProgram

SCRIPT = """
import sys
from functools import partial
import torch
from torch import nn
import starling
from starling.training.faults import Kill

def make_model():
    return nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

def loss(model, batch):
    points, labels = batch
    return nn.functional.cross_entropy(model(points), labels)

points = torch.randn(1200, 2, generator=torch.Generator().manual_seed(1))
labels = (points.prod(dim=1) > 0).long()
data = torch.utils.data.TensorDataset(points, labels)
job = starling.Job(
    starling.DataWorkload(make_model, loss, data, batch_size=20),
    starling.STRATEGIES["adpsgd"],
    starling.Budget(epochs=int(sys.argv[2])),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    options=starling.STRATEGIES["adpsgd"].options(),
    faults=(Kill(kill=1, at_step=10),) if "kill" in sys.argv else (),
)
"""
TRAIN = """
if __name__ == "__main__":
    resume = "exp/quadrants" if "resume" in sys.argv else None
    trained = starling.train(job, learners=int(sys.argv[1]), name="quadrants", resume=resume, engine={"threads": 1})
    right = (trained.model()(points).argmax(dim=1) == labels).float().mean()
    print(f"accuracy {right:.3f}")
"""
OWN = """
from starling import Learner, Strategy

async def every_fourth(me: Learner) -> None:
    count = me.strategy_state("count", torch.zeros(1, dtype=torch.int64), is_common=True)
    while me.claim():
        me.step(await me.gradient(me.weights))
        count += 1
        if count % 4 == 0:
            me.replace(await me.mean(me.weights))
        while count == 80 and me.world < 3:  # the others wait for the learner that replaces the killed one
            await me.mean(me.weights)

OWN = Strategy("my-local-sgd", "average every four steps", every_fourth, keeps_state=True)
"""


def run(folder: Path, text: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """What a script of somebody's own does."""
    script = folder / "quadrants.py"
    script.write_text(text, encoding="utf-8")
    return ended(WarmProgram([str(script), *arguments], folder, **environment))


def ended(program: WarmProgram) -> "subprocess.CompletedProcess[str]":
    """A program at its end; its errors are among what it says."""
    with program:
        said = program.output.read()
        return subprocess.CompletedProcess(program.args, program.wait(timeout=200), said, said)


def accuracy(done: "subprocess.CompletedProcess[str]") -> float:
    assert done.returncode == 0, done.stderr
    return float(re.findall(r"accuracy ([\d.]+)", done.stdout)[0])


@pytest.mark.soak  # `make test` runs the script of the README, which loses a learner, too
def test_a_job_survives_a_killed_learner_sees_everything_once_and_resumes_with_other_learners(tmp_path: Path) -> None:
    """One of three is killed with -9; then two go on from the checkpoint."""
    first = run(tmp_path, SCRIPT + TRAIN, "3", "5", "kill")
    assert accuracy(first) > 0.8
    assert "learner 1 was killed by SIGKILL" in first.stderr
    experiment = tmp_path / "exp" / "quadrants"
    assert json.loads((experiment / "status.json").read_text())["exit_code"] == 0
    second = run(tmp_path, SCRIPT + TRAIN, "2", "7", "resume")
    assert accuracy(second) > 0.9
    manifest = load(latest(experiment)).manifest
    assert (manifest.position.num_done, manifest.world) == (7 * 60, 2)
    seen = Counter(sight.ticket.step for sight in read_seen(experiment / "seen", manifest.position))
    assert seen == Counter(range(7 * 60))


def test_a_resume_with_another_strategy_begins_from_the_consensus_and_says_so(tmp_path: Path) -> None:
    """After dpsgd, whose learners end apart, those of allreduce have one model, to the bit."""
    text = (SCRIPT + TRAIN).replace("adpsgd", "dpsgd")
    assert run(tmp_path, text, "2", "2").returncode == 0
    experiment = tmp_path / "exp" / "quadrants"
    assert (load(latest(experiment)).manifest.consensus_distance or 0.0) > 0.0
    second = run(tmp_path, text.replace("dpsgd", "allreduce"), "2", "3", "resume")
    assert second.returncode == 0, second.stderr
    said = " ".join(second.stderr.split())
    assert "resume: dpsgd saved it, and this run trains with allreduce; all learners begin with the mean" in said
    checkpoint = load(latest(experiment))
    assert checkpoint.manifest.position.num_done == 3 * 60
    one, other = (checkpoint.learner(rank).weights for rank in range(2))
    assert bool((one == other).all())


@pytest.mark.parametrize(
    ("above", "given", "name"),
    [
        (OWN, "OWN", "__main__:OWN"),
        pytest.param("from own import OWN", "OWN", "own:OWN", marks=pytest.mark.wide),
        pytest.param("", "'own:OWN'", "own:OWN", marks=pytest.mark.wide),
    ],
)
def test_a_strategy_of_ones_own_survives_a_loss_and_a_resume(above: str, given: str, name: str, tmp_path: Path) -> None:
    """Learners find it again: in the script, or in a module that the script imports or names. The learner that replaces
    the killed one, and those of a resumed run, do so, too."""
    (tmp_path / "own.py").write_text("import torch\n" + OWN, encoding="utf-8")
    setting = f"    {given},\n    starling.Budget(epochs=int(sys.argv[2])),"
    strategy = re.compile(r'    starling.STRATEGIES\["adpsgd"\],\n.*')
    text = strategy.sub(setting, SCRIPT.replace("job =", f"{above}\njob =")).replace(
        '    options=starling.STRATEGIES["adpsgd"].options(),\n', ""
    )
    text += TRAIN.replace("name=", 'on_loss="replace", name=')
    first = run(tmp_path, text, "3", "5", "kill")
    assert accuracy(first) > 0.7
    said = " ".join(first.stderr.split())
    assert "learner 1 was killed by SIGKILL" in said
    assert "mini-batches that others had begun were re-issued; to check that nothing was missed: starling audit" in said
    experiment = tmp_path / "exp" / "quadrants"
    told: list[str] = []
    audit(experiment, told.append, Console(file=io.StringIO()))
    (line,) = told
    assert re.match(r"every mini-batch before number 30\d was computed once", line)
    assert line.endswith("; in 5 complete epochs: each of 1200 examples was seen 5 times")
    (segment, *_) = sorted((experiment / "seen").iterdir())
    record = segment / "learner-0.jsonl"
    lines = record.read_bytes().splitlines(keepends=True)
    (place, *_) = [place for place, line in enumerate(lines) if b'"kind":"batch"' in line]
    record.write_bytes(b"".join(lines[:place] + lines[place + 1 :]))
    with pytest.raises(DataError, match=r"mini-batches \d+ of epoch 1 were not computed"):
        audit(experiment, told.append, Console(file=io.StringIO()))
    record.write_bytes(b"".join(lines))
    assert yaml.safe_load((experiment / "config.yaml").read_text())["strategy"] == {"name": name}
    manifest = load(latest(experiment)).manifest
    assert (manifest.position.num_done // 3, manifest.world) == (5 * 20, 3)  # learners step together
    assert accuracy(run(tmp_path, text, "3", "7", "resume")) > 0.7
    checkpoint = load(latest(experiment))
    assert checkpoint.manifest.position.num_done // 3 == 7 * 20
    assert int(checkpoint.learner(0).strategy["count"]) >= 7 * 20  # it was not lost with the first run


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd"])
def test_with_batch_shares_a_job_survives_a_killed_learner_and_resumes_with_others(
    strategy: str, tmp_path: Path
) -> None:
    """Each mini-batch counts once, and learner 0 keeps its two of each step, before the death and after the resume."""
    script = (SCRIPT + TRAIN).replace("adpsgd", strategy).replace("faults=", "batch_shares={0: 2},\n    faults=")
    first = run(tmp_path, script, "3", "5", "kill")
    assert accuracy(first) > 0.8
    assert "learner 1 was killed by SIGKILL" in first.stderr
    assert accuracy(run(tmp_path, script, "2", "7", "resume")) > 0.8
    experiment = tmp_path / "exp" / "quadrants"
    position = load(latest(experiment)).manifest.position
    sights = list(read_seen(experiment / "seen", position))
    assert Counter(sight.ticket.step for sight in sights) == Counter(range(position.num_done))
    assert 7 * 60 <= position.num_done < 7 * 60 + 3
    of_learner = Counter(sight.learner for sight in sights)
    assert of_learner[0] == pytest.approx(2 * (of_learner[1] + of_learner[2]), abs=30)  # 10 steps had a third learner


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            SCRIPT.replace("make_model, loss", "lambda: make_model(), loss") + TRAIN,
            "job: cannot be sent to learner processes",
        ),
        (
            SCRIPT + TRAIN.replace('if __name__ == "__main__":', "if True:"),
            "starling.train was called while another process imported this script",
        ),
        (
            SCRIPT + TRAIN.replace("name=", "on_loss='shrug', strategy='adpgsd', name="),
            "starling.train: 2 problems",
        ),
        (
            (SCRIPT + TRAIN)
            .replace('starling.STRATEGIES["adpsgd"],', "replace(OWN, name='x'),")
            .replace("job =", f"{OWN}\nfrom dataclasses import replace\njob =")
            .replace('starling.STRATEGIES["adpsgd"].options()', "None"),
            "strategy: 'x' cannot be found by learner processes; assign it to a name at the top level",
        ),
        (SCRIPT.replace("batch_size=20", "batch_size=0") + TRAIN, "batch_size: 0 is not at least 1"),
    ],
)
def test_what_cannot_work_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    """Before or after learners have started; nothing is left behind."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = run(tmp_path, text, "2", "1", TMPDIR=str(scratch))
    assert done.returncode != 0
    assert message in done.stderr, done.stderr
    assert not list(scratch.iterdir())


@pytest.mark.wide
def test_a_script_from_standard_input_is_one_clear_error(tmp_path: Path) -> None:
    """Learners could not import it; the remedy is named, and nothing is left behind."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, "-", "1", "1"],
        input=SCRIPT + TRAIN,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(scratch)},
        check=False,
    )
    assert done.returncode != 0
    assert "save the script in a file, and start that instead of reading it from standard input" in done.stderr
    assert not list(scratch.iterdir())


def test_a_resume_with_another_model_is_refused_by_name(tmp_path: Path) -> None:
    """The shapes of the model are compared with the checkpoint's."""
    assert accuracy(run(tmp_path, SCRIPT + TRAIN, "1", "1")) > 0.4
    other = run(tmp_path, SCRIPT.replace("16", "17") + TRAIN, "1", "2", "resume")
    assert "it was trained with another model than this run asks for" in other.stderr


@pytest.mark.wide
def test_under_torchrun_every_process_makes_the_same_call(tmp_path: Path) -> None:
    """Its learners are those that torchrun started."""
    (tmp_path / "quadrants.py").write_text(SCRIPT + TRAIN, encoding="utf-8")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "quadrants.py", "7", "3"]
    assert accuracy(ended(WarmProgram(command, tmp_path))) > 0.7
    assert load(latest(tmp_path / "exp" / "quadrants")).manifest.world == 2
