"""`StarlingTrainer` and `StarlingSGD` with miniature speech models, in two real processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """The folder of all cases, and the exit codes of their processes; the libraries are imported once for all."""
    folder = tmp_path_factory.mktemp("huggingface")
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.huggingface_process"]
    command += ["equal,train,fail,accelerated", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    codes = json.loads((folder / "codes.json").read_text(encoding="utf-8"))
    assert codes["equal"] == codes["train"] == codes["accelerated"] == [0, 0], done.stdout + done.stderr
    return folder, codes


def both(outcome: tuple[Path, dict[str, list[int]]], name: str) -> list[dict[str, torch.Tensor]]:
    return [load_file(outcome[0] / f"{name}-{rank}.safetensors") for rank in range(2)]


def test_allreduce_trains_as_the_ddp_of_the_trainer(outcome: Any) -> None:
    """20 steps of a miniature wav2vec 2.0, on data in the same order."""
    for found in both(outcome, "equal"):
        torch.testing.assert_close(found["starling"], found["ddp"], rtol=0.0, atol=1e-6)


def test_a_training_resumes_from_a_checkpoint_of_the_trainer(outcome: Any) -> None:
    """20 steps are 10 steps, and another 10 from the checkpoint of the first."""
    for found in both(outcome, "equal"):
        torch.testing.assert_close(found["resumed"], found["starling"], rtol=0.0, atol=1e-6)


def test_asynchronous_learners_share_the_samples_of_an_epoch(outcome: Any) -> None:
    """Four epochs of 96 samples are 96 mini-batches together."""
    first, second = both(outcome, "train")
    told = [json.loads((outcome[0] / f"train-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert sum(each["steps"] for each in told) == 96
    assert torch.equal(first["final"], second["final"])
    assert told[0]["evaluated"] == pytest.approx(told[1]["evaluated"], rel=1e-5)
    for each in told:
        assert each["evaluated"] < each["first"]


def test_learner_0_saves_the_consensus(outcome: Any) -> None:
    """Checkpoints at its epochs' ends, and the finished model after training."""
    saved = load_file(outcome[0] / "final" / "model.safetensors")
    weights = both(outcome, "train")[0]["final"]
    assert sum(value.numel() for value in saved.values()) == len(weights)
    assert float(sum(value.double().sum() for value in saved.values())) == pytest.approx(float(weights.double().sum()))
    assert len(list((outcome[0] / "kept").glob("checkpoint-*"))) == 4


def test_an_exception_in_one_process_ends_both(outcome: Any) -> None:
    """The other one says which learner was lost, and why."""
    assert outcome[1]["fail"] == [1, 1]
    said = [(outcome[0] / f"fail-{rank}.txt").read_text(encoding="utf-8") for rank in range(2)]
    assert said[0].startswith("PeerLost: learner 0 lost learner 1")
    assert said[0].endswith(said[1])


def test_a_loop_of_accelerate_trains_as_under_its_ddp(outcome: Any) -> None:
    """A miniature Whisper with accumulated gradients; under `adpsgd` all end with the same model, and another one."""
    first, second = both(outcome, "accelerated")
    torch.testing.assert_close(first["allreduce"], first["ddp"], rtol=0.0, atol=1e-6)
    assert torch.equal(first["adpsgd"], second["adpsgd"])
    assert not torch.equal(first["adpsgd"], first["allreduce"])
