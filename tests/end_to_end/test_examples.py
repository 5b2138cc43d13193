"""The examples do what they say, started as a user starts them."""

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from starling.checkpoint.files import sort_key
from starling.checkpoint.reader import checkpoints_in
from starling.launch.launcher import loopback_store
from starling.launch.rendezvous import REQUIRED
from starling.recipe import apply_overrides, read_recipe
from starling.recipe.run import LaunchConfig
from tests.code_blocks import code_blocks
from tests.sessions import run_to_end
from tests.test_documents import environment
from tests.warm_start import WarmProgram

ROOT = Path(__file__).parents[2]


def test_the_ray_job_is_a_manifest_that_starts_a_run_with_token_authentication() -> None:
    """Its command line is one that `starling train` accepts."""
    manifest = yaml.safe_load((ROOT / "examples" / "rayjob.yaml").read_text(encoding="utf-8"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    assert manifest["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    *command, recipe = shlex.split(manifest["spec"]["entrypoint"])[:3]
    assert command == ["starling", "train"] and recipe.startswith("/experiments/")
    overrides = shlex.split(manifest["spec"]["entrypoint"])[3:]
    tree = apply_overrides(read_recipe(ROOT / "recipes" / "demo.yaml"), overrides)
    launch = LaunchConfig.model_validate(tree["launch"])
    assert (launch.kind, launch.resources) == ("ray", {"CPU": 4.0, "GPU": 1.0})


@pytest.mark.soak
@pytest.mark.parametrize(("learners", "strategy"), [(2, "adpsgd"), (3, "delay-by-one")])
def test_the_classifier_learns_under_torchrun(learners: int, strategy: str, tmp_path: Path) -> None:
    """Far above the 25 % of chance, soon, with exit code 0, and no process is left.

    `make test` runs the first of these as a command of the README, and asks of it the same.
    """
    torchrun = Path(sys.executable).parent / "torchrun"
    command = [torchrun, "--nproc-per-node", str(learners), ROOT / "examples" / "classifier.py", "--strategy", strategy]
    code, said, left = run_to_end(command, tmp_path)
    assert code == 0, said
    assert not left
    reached = re.search(rf"accuracy (\S+) with {learners} learners under {strategy}", said)
    assert reached, said
    assert float(reached[1]) > 0.9


@pytest.mark.parametrize("script", sorted((ROOT / "examples").rglob("*.s*h*")), ids=lambda path: path.name)
def test_the_scripts_are_valid(script: Path) -> None:
    """Bash can read them. The ones for Slurm alone give each process all variables that `starling.join` needs."""
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    text = script.read_text(encoding="utf-8")
    if script.suffix == ".sbatch" and "ray start" not in text:
        assert all(re.search(rf"\b{name}\b", text) for name in REQUIRED)
        assert "--kill-on-bad-exit=0" in text


@pytest.mark.soak
def test_torchrun_ends_all_and_starts_all_again_whatever_on_loss_says(tmp_path: Path) -> None:
    """With `--max-restarts`, the second attempt is a run of its own, and ends well; nothing is left."""
    (tmp_path / "loop.py").write_text(KILLED_ONCE, encoding="utf-8")
    torchrun = Path(sys.executable).parent / "torchrun"
    command = [torchrun, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "loop.py"]
    code, said, left = run_to_end(command, tmp_path)
    assert code == 0, said
    assert not left
    assert said.count("attempt 0 begins at step 0") == said.count("attempt 1 begins at step 0") == 2, said
    assert said.count("attempt 1 ends at step 30 with 2") == 2, said
    assert "attempt 0 ends" not in said


@pytest.mark.wide
def test_the_loop_of_the_page_resumes_after_a_kill_with_other_learners_and_strategies(tmp_path: Path) -> None:
    """The script and the commands as they stand; before them, a run that is killed after two checkpoints."""
    page = code_blocks(ROOT / "docs" / "your-own-loop.md")
    (script,) = [each for each in page if each.saved_as == "resuming.py"]
    (commands,) = [each.text for each in page if each.language == "sh" and "resuming.py" in each.text]
    (tmp_path / "resuming.py").write_text(script.text, encoding="utf-8")
    alone = subprocess.Popen([sys.executable, "resuming.py", "diloco", "100000"], cwd=tmp_path)
    saved = tmp_path / "exp" / "loop"
    while not (saved / "step-00000200" / "manifest.json").exists():
        assert alone.poll() is None
        time.sleep(0.01)
    alone.kill()
    alone.wait()
    steps = sort_key(checkpoints_in(saved)[-1].name)[0]
    for line, more in zip(commands.splitlines(), (500, 1000, 1500, 2000), strict=True):
        command = line.replace(str(more), str(more + steps))
        code, said, left = run_to_end(["bash", "-c", command], tmp_path, environment())
        assert code == 0, said
        assert not left
        assert "resuming after learner 0's step" in said
        (accuracy,) = re.findall(rf"accuracy (\S+) after {more + steps} steps", said)
        assert float(accuracy) > 0.9


@pytest.mark.wide
def test_the_loop_with_everything_survives_a_loss_and_a_restart_and_resumes(tmp_path: Path) -> None:
    """A learner is killed after two checkpoints, and started again; later, two learners make two more epochs."""
    page = code_blocks(ROOT / "docs" / "your-own-loop.md")
    (script,) = [each for each in page if each.saved_as == "everything.py"]
    (tmp_path / "everything.py").write_text(script.text, encoding="utf-8")
    saved = tmp_path / "exp" / "everything"

    def start(rank: int, world: int, port: int, epochs: int) -> WarmProgram:
        place = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return WarmProgram(["everything.py", "adpsgd", str(epochs)], tmp_path, OMP_NUM_THREADS="1", **place)

    def result(program: WarmProgram) -> str:
        said = program.output.read()
        assert program.wait(100) == 0, said
        return said

    epochs = 20
    with loopback_store() as port:
        pass  # a free port
    with start(0, 3, port, epochs) as first, start(1, 3, port, epochs) as second:
        with start(2, 3, port, epochs) as lost:
            while not any(sort_key(each.name)[0] >= 2 for each in (checkpoints_in(saved) if saved.exists() else ())):
                assert lost.poll() is None
                time.sleep(0.01)
            lost.kill()
            lost.wait()
        with start(2, 3, port, epochs) as again:
            said = [result(each) for each in (first, second, again)]
    assert re.search(rf"accuracy (0\.9\d+|1\.0+) after {epochs} epochs with 3 learners", said[0])
    with start(0, 2, port, epochs + 2) as first, start(1, 2, port, epochs + 2) as second:
        said = [result(each) for each in (first, second)]
    assert "resuming after" in said[0]
    assert f"after {epochs + 2} epochs with 2 learners" in said[0]
    assert sort_key(checkpoints_in(saved)[-1].name)[0] == epochs + 2


KILLED_ONCE = """
import os
import signal
import torch
import starling

model = torch.nn.Linear(2, 1)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
with starling.join(model, torch.optim.SGD(model.parameters(), lr=0.01), "allreduce", on_loss="continue") as learner:
    print(f"attempt {attempt} begins at step {learner.num_steps}", flush=True)
    while learner.num_steps < 30:
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        if learner.num_steps == 10 and attempt == "0" and learner.learner_id == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if learner.num_steps == 20 and attempt == "0":
            signal.pause()  # until torchrun ends it
        learner.step()
print(f"attempt {attempt} ends at step {learner.num_steps} with {learner.world}", flush=True)
"""
