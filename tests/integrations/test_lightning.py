"""`StarlingStrategy` in Lightning's trainer, with real processes."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from starling.errors import MissingExtraError
from tests.integrations.conftest import Outcome
from tests.integrations.host_process import run
from tests.integrations.recordings import corpus

pytestmark = pytest.mark.timeout(900)
"""The first test runs all cases."""


def both(outcome: Outcome, name: str, case: str = "") -> list[dict[str, torch.Tensor]]:
    assert outcome.codes[f"lightning:{case or name}"] == [0, 0], outcome.said
    return [load_file(outcome.folder / f"{name}-{rank}.safetensors") for rank in range(2)]


def test_the_example_of_the_page_trains_with_two_learners(outcome: Outcome) -> None:
    """As it stands, but for the number of devices."""
    assert outcome.codes["lightning:page"] == [0, 0], outcome.said


@pytest.mark.parametrize("setting", ["plain", "accumulated", "bf16", "fp16"])
def test_allreduce_trains_as_the_ddp_of_lightning(outcome: Outcome, setting: str) -> None:
    """20 batches, with accumulated gradients, and with both kinds of mixed precision."""
    for found in both(outcome, "equal"):
        torch.testing.assert_close(found[f"{setting}-starling"], found[f"{setting}-ddp"], rtol=0.0, atol=1e-6)
        assert not torch.equal(found["plain-starling"], found["straight"])


def test_a_fit_resumes_from_a_checkpoint_of_the_trainer(outcome: Outcome) -> None:
    """Weights, momentum and schedule: two epochs are one epoch, and another one from its checkpoint."""
    for found in both(outcome, "equal"):
        torch.testing.assert_close(found["resumed"], found["straight"], rtol=0.0, atol=1e-6)


def test_asynchronous_learners_resume_in_the_middle_of_an_epoch(outcome: Outcome) -> None:
    """With the weights and the momentum of the checkpoint, and with the samples that had not been given out; the next
    epoch is whole."""
    first, second = both(outcome, "resume")
    saved = torch.load(outcome.folder / "middle" / "epoch=0-step=3.ckpt", weights_only=True)
    weights = torch.cat([saved["state_dict"][f"net.{name}"].reshape(-1) for name in parameters()])
    buffers = saved["optimizer_states"][0]["state"]
    for found in (first, second):
        assert torch.equal(found["weights"], weights)
        assert torch.equal(
            found["momentum"], torch.cat([buffers[each]["momentum_buffer"].reshape(-1) for each in buffers])
        )
    assert torch.equal(first["final"], second["final"])
    samples = torch.cat([first["samples"], second["samples"]]).tolist()
    remaining = sum(stop - start for start, stop in saved["SharedData"]["remaining"])
    assert 0 < remaining < 160
    assert len(samples) == remaining + 160
    assert len(set(samples)) == 160


def parameters() -> list[str]:
    return ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]


def test_asynchronous_learners_train_with_unequal_numbers_of_batches(outcome: Outcome) -> None:
    """80 and 160 steps; at the end all have the same model, which has learnt the task."""
    first, second = both(outcome, "train")
    told = [json.loads((outcome.folder / f"train-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert [each["steps"] for each in told] == [80, 160]
    assert told[0]["best"] == told[1]["best"] and Path(told[1]["best"]).exists()  # their names count learner 0's steps
    assert torch.equal(first["final"], second["final"])
    for each in told:
        assert each["last"] < 0.5 * each["first"]
        assert each["accuracy"] > 0.9
        assert "leave sync_dist out" in each["warned"][0]


def test_checkpoints_and_validation_hold_the_consensus(outcome: Outcome) -> None:
    """The model that was validated last is not this learner's own; what `save_checkpoint` wrote is the final one."""
    first, _ = both(outcome, "train")
    saved = torch.load(outcome.folder / "final.ckpt", weights_only=True)["state_dict"]
    weights = torch.cat([value.reshape(-1) for name, value in saved.items() if name.endswith(("weight", "bias"))])
    assert torch.equal(weights, first["final"])
    assert not torch.equal(first["validated"], first["own"])
    assert len(list((outcome.folder / "kept").glob("*.ckpt"))) == 2


def test_an_exception_in_one_process_ends_both(outcome: Outcome) -> None:
    """The other one says which learner was lost, and why."""
    assert outcome.codes["lightning:fail"] == [1, 1]
    said = [(outcome.folder / f"fail-{rank}.txt").read_text(encoding="utf-8") for rank in range(2)]
    assert said[0].startswith("PeerLost: learner 0 lost learner 1")
    assert said == [said[0], "ValueError: a bad mini-batch"]
    assert said[0].endswith("ValueError: a bad mini-batch")


def test_a_fit_survives_a_process_that_is_killed(outcome: Outcome) -> None:
    """With `on_loss="continue"`, and though it was learner 0: another one saves the final model in its place."""
    check_survivors(outcome, "adpsgd", "survive")


def check_survivors(outcome: Outcome, strategy: str, case: str) -> None:
    assert outcome.codes[f"lightning:{case}"] == [-9, 0, 0], outcome.said
    found = [load_file(outcome.folder / f"{strategy}-survive-{rank}.safetensors")["final"] for rank in (1, 2)]
    assert torch.equal(*found)
    for rank in (1, 2):
        told = json.loads((outcome.folder / f"{strategy}-survive-{rank}.json").read_text(encoding="utf-8"))
        assert (told["world"], told["membership"]) == (2, 1)
        assert told["accuracy"] > 0.9
    saved = torch.load(outcome.folder / f"{strategy}-survived.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(torch.cat([saved[f"net.{name}"].reshape(-1) for name in parameters()]), found[0])
    assert (outcome.folder / "survivors" / "last.ckpt").exists()


def test_a_distributed_sampler_and_all_gather_are_named_with_their_remedies(outcome: Outcome) -> None:
    """Lightning puts such a sampler in the loader, unless `use_distributed_sampler=False`. Of the learners that gather,
    the slower one may have heard already that the other has failed."""
    assert outcome.codes["lightning:sampler"] == [0, 0], outcome.said
    raised = {(outcome.folder / f"gathers-{rank}").read_text() for rank in range(2)}
    assert "ConfigError" in raised


@pytest.mark.soak
def test_three_processes_train_as_under_ddp(tmp_path: Path) -> None:
    """Equal to 1e-6 under `allreduce`; without `on_loss`, a killed process ends all; with it, none, in step as well."""
    codes = run(tmp_path, "lightning:equal:3", "lightning:killed:3", "lightning:survive_in_step:3")
    outcome = Outcome(tmp_path, codes)
    assert codes["lightning:equal"] == [0, 0, 0], outcome.said
    assert codes["lightning:killed"] == [-9, 1, 1], outcome.said
    for rank in range(3):
        found = load_file(tmp_path / f"equal-{rank}.safetensors")
        torch.testing.assert_close(found["plain-starling"], found["plain-ddp"], rtol=0.0, atol=1e-6)
    check_survivors(outcome, "allreduce", "survive_in_step")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.skipif(corpus() is None, reason="the recordings of spoken digits are absent")
def test_other_strategies_tell_digits_apart_as_well_as_ddp(tmp_path: Path, check_accuracies: Any) -> None:
    """`adpsgd` and DiLoCo, on 1,200 real recordings."""
    assert run(tmp_path, "lightning:accuracies:2", is_warm=False)["lightning:accuracies"] == [0, 0]
    check_accuracies(json.loads((tmp_path / "lightning-accuracies-0.json").read_text(encoding="utf-8")))


def test_a_configuration_of_nemo_makes_the_strategy(outcome: Outcome) -> None:
    """As hydra instantiates it: `_target_` names the class, and the other keys are its keywords."""
    assert json.loads((outcome.folder / "nemo.json").read_text(encoding="utf-8")) == {
        "strategy": "adpsgd",
        "options": {"pattern": "random"},
        "is_ddp": True,
    }


@pytest.mark.parametrize(
    ("name", "extra"), [("lightning", "lightning"), ("huggingface", "huggingface"), ("accelerate", "huggingface")]
)
def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch, name: str, extra: str) -> None:
    """In one line, instead of an ImportError."""
    monkeypatch.setattr("starling.errors.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, f"starling.integrations.{name}", raising=False)
    with pytest.raises(MissingExtraError, match=rf"pip install 'starling-asr\[{extra}\]'"):
        importlib.import_module(f"starling.integrations.{name}")
