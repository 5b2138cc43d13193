"""Frame-level training with real learners: it learns, resumes to the bit, and keeps its alignment."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from starling.checkpoint.reader import latest
from tests.end_to_end.test_train import starling

Tree = dict[str, Any]


@pytest.fixture
def recipe(tree: Tree, tmp_path: Path) -> str:
    """A recipe of a hybrid model as a file; learned in seconds."""
    del tree["batches"]
    tree |= {
        "exp": "exp",
        "loss": "frames",
        "features": {"splice": 2},
        "sequences": {"batch": 8},
        "states": {"number": 30, "per_unit": 2, "min_frames": 5},
        "alignment": {"rounds": 6},
        "model": {"name": "blstm-hybrid", "preset": "tiny"},
        "checkpoints": {"epochs": 1},
        "optimizer": {"lr": 0.02, "schedule": {"decay": "constant"}},
    }
    (tmp_path / "frames.yaml").write_text(yaml.safe_dump(tree))
    return "frames.yaml"


@pytest.mark.wide
def test_a_resumed_run_ends_in_the_same_bits_and_keeps_its_alignment(recipe: str, tmp_path: Path) -> None:
    """With two learners in step; what a run may not change is named, and without its frames it cannot resume."""
    straight = starling(tmp_path, "train", recipe, "strategy=allreduce", "name=straight", "budget.epochs=4")
    first = starling(tmp_path, "train", recipe, "strategy=allreduce", "name=stopped", "budget.epochs=2")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "exp" / "stopped" / "frames").iterdir()}
    resumed = ("train", recipe, "strategy=allreduce", "budget.epochs=4", "resume=exp/stopped")
    second = starling(tmp_path, *resumed, "name=stopped")
    assert (straight.returncode, first.returncode, second.returncode) == (0, 0, 0), second.stderr
    one, other = (latest(tmp_path / "exp" / name) for name in ("straight", "stopped"))
    assert one.name == other.name
    mine, theirs = (load_file(folder / "learner-1.safetensors") for folder in (one, other))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert kept == {path.name: path.read_bytes() for path in (tmp_path / "exp" / "stopped" / "frames").iterdir()}
    assert kept.keys() == {"features.bin", "states.npy", "ends.npy", "utterances.npy", "speeds.npy"}
    audited = starling(tmp_path, "audit", "exp/stopped")
    assert "sub-sequences exactly once" in audited.stdout, audited.stderr
    changed = starling(tmp_path, *resumed, "name=changed", "budget.epochs=5", "states.number=20")
    assert changed.returncode != 0
    assert "trained with another loss" in changed.stderr and "loss.states.number=30 (now 20)" in changed.stderr
    shutil.rmtree(tmp_path / "exp" / "stopped" / "frames")
    lost = starling(tmp_path, *resumed, "name=lost", "budget.epochs=5")
    assert lost.returncode != 0
    assert "the aligned frames of the run to resume are missing" in lost.stderr


@pytest.mark.wide
def test_asynchronous_learners_learn_to_recognise(recipe: str, tmp_path: Path) -> None:
    """Two processes that gossip reach a word error rate of 10 % at most on songs that they never heard."""
    done = starling(tmp_path, "train", recipe, "strategy=adpsgd", "budget.epochs=10")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("%WER")]
    assert float(line.split()[1]) <= 10.0
