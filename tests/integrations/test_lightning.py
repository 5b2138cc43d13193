"""`StarlingStrategy` in Lightning's trainer, with two real processes."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from starling.errors import MissingExtraError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """The folder of all cases, and the exit codes of their processes; the library is imported once for all."""
    folder = tmp_path_factory.mktemp("lightning")
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.lightning_process"]
    command += ["equal,train,fail,sampler", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, json.loads((folder / "codes.json").read_text(encoding="utf-8"))


def both(outcome: tuple[Path, dict[str, list[int]]], name: str, code: int = 0) -> list[dict[str, torch.Tensor]]:
    folder, codes = outcome
    assert codes[name] == [code, code]
    return [load_file(folder / f"{name}-{rank}.safetensors") for rank in range(2)]


@pytest.mark.parametrize("setting", ["plain", "accumulated", "bf16", "fp16"])
def test_allreduce_trains_as_the_ddp_of_lightning(outcome: Any, setting: str) -> None:
    """20 batches, with accumulated gradients, and with both kinds of mixed precision."""
    for found in both(outcome, "equal"):
        torch.testing.assert_close(found[f"{setting}-starling"], found[f"{setting}-ddp"], rtol=0.0, atol=1e-6)
        assert not torch.equal(found["plain-starling"], found["straight"])


def test_a_fit_resumes_from_a_checkpoint_of_the_trainer(outcome: Any) -> None:
    """Weights, momentum and schedule: two epochs are one epoch, and another one from its checkpoint."""
    for found in both(outcome, "equal"):
        torch.testing.assert_close(found["resumed"], found["straight"], rtol=0.0, atol=1e-6)


def test_asynchronous_learners_train_with_unequal_numbers_of_batches(outcome: Any) -> None:
    """80 and 160 steps; at the end all have the same model, which has learnt the task."""
    first, second = both(outcome, "train")
    told = [json.loads((outcome[0] / f"train-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert [each["steps"] for each in told] == [80, 160]
    assert torch.equal(first["final"], second["final"])
    for each in told:
        assert each["last"] < 0.5 * each["first"]
        assert each["accuracy"] > 0.9
        assert "leave sync_dist out" in each["warned"][0]


def test_checkpoints_and_validation_hold_the_consensus(outcome: Any) -> None:
    """The model that was validated last is not this learner's own; what `save_checkpoint` wrote is the final one."""
    first, _ = both(outcome, "train")
    saved = torch.load(outcome[0] / "final.ckpt", weights_only=True)["state_dict"]
    weights = torch.cat([value.reshape(-1) for name, value in saved.items() if name.endswith(("weight", "bias"))])
    assert torch.equal(weights, first["final"])
    assert not torch.equal(first["validated"], first["own"])
    assert len(list((outcome[0] / "kept").glob("*.ckpt"))) == 2


def test_an_exception_in_one_process_ends_both(outcome: Any) -> None:
    """The other one says which learner was lost, and why."""
    assert outcome[1]["fail"] == [1, 1]
    said = [(outcome[0] / f"fail-{rank}.txt").read_text(encoding="utf-8") for rank in range(2)]
    assert said[0].startswith("PeerLost: learner 0 lost learner 1")
    assert said == [said[0], "ValueError: a bad mini-batch"]
    assert said[0].endswith("ValueError: a bad mini-batch")


def test_a_distributed_sampler_is_named_with_its_remedy(outcome: Any) -> None:
    """Lightning puts one in the loader, unless `use_distributed_sampler=False`."""
    assert outcome[1]["sampler"] == [0, 0]


@pytest.mark.soak
def test_three_processes_train_as_well_as_ddp(tmp_path: Path) -> None:
    """Equal to 1e-6 under `allreduce`; `adpsgd` and DiLoCo reach the accuracy of DDP; a killed process ends all."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.lightning_process"]
    command += ["equal,accuracies,killed", str(tmp_path), "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    codes = json.loads((tmp_path / "codes.json").read_text(encoding="utf-8"))
    assert codes == {"equal": [0, 0, 0], "accuracies": [0, 0, 0], "killed": [1, -9, 1]}, done.stderr
    for rank in range(3):
        found = load_file(tmp_path / f"equal-{rank}.safetensors")
        torch.testing.assert_close(found["plain-starling"], found["plain-ddp"], rtol=0.0, atol=1e-6)
    reached = json.loads((tmp_path / "accuracies-0.json").read_text(encoding="utf-8"))
    for strategy in ("adpsgd", "diloco"):
        assert min(reached[strategy]) >= min(reached["ddp"]) - 0.03, reached


def test_a_configuration_of_nemo_makes_the_strategy(outcome: Any) -> None:
    """As hydra instantiates it: `_target_` names the class, and the other keys are its keywords."""
    assert json.loads((outcome[0] / "nemo.json").read_text(encoding="utf-8")) == {
        "strategy": "adpsgd",
        "options": {"pattern": "random"},
        "is_ddp": True,
    }


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, instead of an ImportError."""
    monkeypatch.setattr("starling.extras.find_spec", lambda name: None)
    for name, extra in (("lightning", "lightning"),):
        monkeypatch.delitem(sys.modules, f"starling.integrations.{name}", raising=False)
        with pytest.raises(MissingExtraError, match=rf"pip install 'starling-asr\[{extra}\]'"):
            importlib.import_module(f"starling.integrations.{name}")
