"""The pages on other libraries' loops: their tables, their diff, and their example."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import starling
from tests.code_blocks import run_python
from tests.integrations.forked import in_processes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
SECTIONS = {text.split("\n")[0]: text for text in PAGE.split("\n## ")[1:]}
LOOPS = ["From DistributedDataParallel", "From torchft", "From Horovod"]
HOSTS = ["From Lightning's DDP", "From NeMo", "From accelerate's LocalSGD"]
"""Those whose libraries take seconds to import."""


def column(section: str, number: int) -> list[str]:
    """The code in a column of a section's table, row by row."""
    rows = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", SECTIONS[section], re.MULTILINE)]
    cells = [row[number].strip() if number < len(row) else "" for row in rows if not row[0].startswith("you wrote")]
    return [code for cell in cells for code in re.findall(r"^`(.*)`", cell)]


def namespace() -> dict[str, Any]:
    """What a table takes for granted."""
    points = torch.rand(16, 1)
    model = nn.Linear(1, 1)

    def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    return {
        "starling": starling,
        "DataLoader": DataLoader,
        "dataset": TensorDataset(points, points),
        "batch": [points, points],
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_of": loss_of,
    }


def test_every_section_is_run_by_a_test() -> None:
    """And what it says you wrote is Python."""
    assert [*SECTIONS] == ["From DistributedDataParallel", *HOSTS, *LOOPS[1:], "Traps"]
    for section in [*LOOPS, *HOSTS]:
        assert len(column(section, 1)) > 0
        for code in column(section, 0):
            ast.parse(code)


@pytest.mark.wide
@pytest.mark.parametrize("section", LOOPS)
def test_what_a_table_says_to_write_trains(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    """From top to bottom, with one learner."""
    found = namespace()
    before = found["model"].weight.item()
    run(column(section, 1), found)
    assert found["model"].weight.item() != before
    assert found["learner"].stats().steps == 1
    strategy = starling.STRATEGIES[found.get("strategy", "diloco")]
    strategy.options.model_validate(found.get("options", {}))


def run(lines: list[str], found: dict[str, Any]) -> None:
    """Run lines as a program, with the names in `found`, to which it adds its own."""
    found.update(run_python("\n".join(lines), **found))


HOST_TABLES = """
from tests.integrations.test_pages import HOSTS, column, namespace, run

found = namespace()
found["machine"] = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
from lightning.pytorch import Trainer
found.update(Trainer=Trainer, module=found["model"])
run(column(HOSTS[0], 1), found)
assert found["trainer"].strategy is found["strategy"]
run(column(HOSTS[1], 1), found)
module, _, name = found["config"].pop("_target_").rpartition(".")
getattr(__import__(module, fromlist=[name]), name)(**found["config"])
from accelerate import Accelerator
found = namespace() | {"accelerator": Accelerator(cpu=True)}
before = found["model"].weight.item()
run(column(HOSTS[2], 1), found)
assert found["model"].weight.item() != before
assert found["local"].learner.stats().steps == 1
"""


@pytest.mark.soak
def test_what_the_tables_of_other_libraries_say_to_write_works() -> None:
    done = subprocess.run([sys.executable, "-c", HOST_TABLES], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def hunks() -> list[tuple[str, str]]:
    """The hunks of the diff in docs/icefall.md: what the example has, and what the loop under DDP has."""
    (text,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs" / "icefall.md").read_text("utf-8"), re.S | re.M)
    found = []
    for hunk in text.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        found.append(tuple("".join(line[1:] for line in lines if line[0] == sign) for sign in "+-"))
    return found  # type: ignore[return-value]


def under_ddp() -> str:
    """The example with the page's diff applied backwards."""
    text = (ROOT / "examples" / "icefall_style.py").read_text(encoding="utf-8")
    for ours, theirs in hunks():
        assert text.count(ours) == 1, ours
        text = text.replace(ours, theirs)
    return text


def test_the_diff_of_the_page_is_that_of_the_example() -> None:
    """Nothing of Starling is left, and ten lines of it are enough."""
    text = under_ddp()
    ast.parse(text)
    assert "starling." not in text.split('"""', 2)[2]
    assert sum(ours.count("\n") for ours, _ in hunks()) <= 10


@pytest.mark.wide
def test_the_example_trains(capfd: pytest.CaptureFixture[str]) -> None:
    """Two learners share the batches of each epoch."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import icefall_style
    finally:
        sys.path.pop(0)
    assert in_processes(2, lambda rank: check_accuracy(icefall_style.main("adpsgd", 5, True))) == [0, 0]
    assert "under adpsgd" in capfd.readouterr().out


def check_accuracy(reached: float) -> None:
    assert reached > 0.9


@pytest.mark.soak
def test_the_loop_under_ddp_trains_as_well(tmp_path: Path) -> None:
    """So the page compares with a loop that works."""
    (tmp_path / "loop.py").write_text(under_ddp(), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "loop.py", "--epochs", "8"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"accuracy ([\d.]+)", done.stdout)[0]) > 0.8
