"""`StarlingTrainer` and `StarlingSGD` with miniature speech models, in real processes."""

import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integrations.conftest import Outcome
from tests.integrations.host_process import run
from tests.integrations.recordings import corpus

pytestmark = pytest.mark.timeout(900)
"""The first test runs all cases."""


def both(outcome: Outcome, name: str, case: str, world: int = 2) -> list[dict[str, torch.Tensor]]:
    assert outcome.codes[f"huggingface:{case}"] == [0] * world, outcome.said
    return [load_file(outcome.folder / f"{name}-{rank}.safetensors") for rank in range(world)]


def test_the_examples_of_the_page_train_with_two_learners(outcome: Outcome) -> None:
    """As they stand."""
    assert outcome.codes["huggingface:page"] == [0, 0], outcome.said


def test_allreduce_trains_as_the_ddp_of_the_trainer(outcome: Outcome) -> None:
    """20 steps of a miniature wav2vec 2.0, on data in the same order."""
    for found in both(outcome, "hf-equal", "equal"):
        torch.testing.assert_close(found["starling"], found["ddp"], rtol=0.0, atol=1e-6)


def test_a_training_resumes_from_a_checkpoint_of_the_trainer(outcome: Outcome) -> None:
    """20 steps are 10 steps, and another 10 from the checkpoint of the first."""
    for found in both(outcome, "hf-equal", "equal"):
        torch.testing.assert_close(found["resumed"], found["starling"], rtol=0.0, atol=1e-6)


def test_asynchronous_learners_resume_in_the_middle_of_an_epoch(outcome: Outcome) -> None:
    """With the weights and the optimizer of the checkpoint, and with the samples that had not been given out; the next
    epoch is whole."""
    first, second = both(outcome, "hf-resume", "resume")
    folder = outcome.folder / "hf-middle" / "checkpoint-3"
    saved = load_file(folder / "model.safetensors")
    moments = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    (remaining,) = [
        state["remaining"]
        for name, state in json.loads((folder / "trainer_state.json").read_text("utf-8"))["stateful_callbacks"].items()
        if name == "SharedSampler"
    ]
    for found in (first, second):
        total = sum(float(value.double().sum()) for value in saved.values())
        assert float(found["weights"].double().sum()) == pytest.approx(total, rel=1e-6)
        total = sum(float(state["exp_avg"].double().sum()) for state in moments.values())
        assert float(found["moments"].double().sum()) == pytest.approx(total, rel=1e-6)
        assert found["epoch"] == 2.0
    assert torch.equal(first["weights"], second["weights"])
    assert torch.equal(first["final"], second["final"])
    num_left = sum(stop - start for start, stop in remaining)
    assert 0 < num_left < 64
    assert int(first["steps"] + second["steps"]) == (num_left + 64) // 4


def test_asynchronous_learners_share_the_samples_of_an_epoch(outcome: Outcome) -> None:
    """Four epochs of 96 samples are 96 mini-batches together."""
    first, second = both(outcome, "hf-train", "train")
    told = [json.loads((outcome.folder / f"hf-train-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert sum(each["steps"] for each in told) == 96
    assert torch.equal(first["final"], second["final"])
    assert told[0]["evaluated"] == pytest.approx(told[1]["evaluated"], rel=1e-5)
    for each in told:
        assert each["evaluated"] < each["first"]


def test_the_learning_rate_of_a_slow_learner_decays_as_that_of_a_fast_one(outcome: Outcome) -> None:
    """It follows the samples given out to both, of which a quarter is left at most. The slow learner's own steps, 26 at
    most of 48 on average, would leave it 0.46 of its rate or more."""
    assert outcome.codes["huggingface:train"] == [0, 0], outcome.said
    told = [json.loads((outcome.folder / f"hf-train-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert told[1]["steps"] <= 26
    for each in told:
        assert each["rate"] < 0.3


def test_learner_0_saves_the_consensus(outcome: Outcome) -> None:
    """Checkpoints at its epochs' ends, and the finished model after training."""
    saved = load_file(outcome.folder / "final" / "model.safetensors")
    weights = both(outcome, "hf-train", "train")[0]["final"]
    assert sum(value.numel() for value in saved.values()) == len(weights)
    assert float(sum(value.double().sum() for value in saved.values())) == pytest.approx(float(weights.double().sum()))
    assert len(list((outcome.folder / "hf-kept").glob("checkpoint-*"))) == 4


def test_an_exception_in_one_process_ends_both(outcome: Outcome) -> None:
    """The other one says which learner was lost, and why."""
    assert outcome.codes["huggingface:fail"] == [1, 1]
    said = [(outcome.folder / f"hf-fail-{rank}.txt").read_text(encoding="utf-8") for rank in range(2)]
    assert said[0].startswith("PeerLost: learner 0 lost learner 1")
    assert said[0].endswith(said[1])


def test_a_training_survives_a_process_that_is_killed(outcome: Outcome) -> None:
    """With `on_loss="continue"`, and though it was learner 0: another one saves in its place, at each epoch's end. The
    others train on the samples that it had received."""
    check_survivors(outcome, "adpsgd", "survive")
    noted = [path.read_text(encoding="utf-8").split() for path in outcome.folder.glob("hf-adpsgd-noted-*")]
    counts = Counter(chain.from_iterable(noted))
    assert len(counts) == 96 and set(counts.values()) == {3}  # also what learner 0 had received; once in each epoch


def check_survivors(outcome: Outcome, strategy: str, case: str) -> None:
    assert outcome.codes[f"huggingface:{case}"] == [-9, 0, 0], outcome.said
    found = [load_file(outcome.folder / f"hf-{strategy}-survive-{rank}.safetensors")["final"] for rank in (1, 2)]
    assert torch.equal(*found)
    for rank in (1, 2):
        told = json.loads((outcome.folder / f"hf-{strategy}-survive-{rank}.json").read_text(encoding="utf-8"))
        assert (told["world"], told["membership"], told["epoch"]) == (2, 1, 3.0)
    saved = load_file(outcome.folder / f"{strategy}-saved" / "model.safetensors")
    total = float(sum(value.double().sum() for value in saved.values()))
    assert total == pytest.approx(float(found[0].double().sum()))
    folder = outcome.folder / f"{strategy}-survivors"
    assert sorted(path.name for path in folder.glob("saved-*")) == ["saved-1", "saved-2", "saved-3"]
    assert next(folder.glob("checkpoint-*/model.safetensors"), None) is not None


def test_a_loop_of_accelerate_trains_as_under_its_ddp(outcome: Outcome) -> None:
    """A miniature Whisper with accumulated gradients; under `adpsgd` all end with the same model, and another one."""
    first, second = both(outcome, "accelerated", "accelerated")
    torch.testing.assert_close(first["allreduce"], first["ddp"], rtol=0.0, atol=1e-6)
    assert torch.equal(first["adpsgd"], second["adpsgd"])
    assert not torch.equal(first["adpsgd"], first["allreduce"])


def test_a_loop_of_accelerate_resumes_from_a_saved_state(outcome: Outcome) -> None:
    """Under `adpsgd`, in the middle of an epoch: with the mean that was saved, the optimizer, and the other samples."""
    first, second = both(outcome, "accelerated-resume", "accelerated_resume")
    state = torch.load(outcome.folder / "state" / "custom_checkpoint_0.pkl", weights_only=True)
    moments = torch.load(outcome.folder / "state" / "optimizer.bin", weights_only=True)["state"]
    for found in (first, second):
        assert torch.equal(found["weights"], first["saved"])
        assert torch.equal(found["moments"], torch.cat([each["exp_avg"].reshape(-1) for each in moments.values()]))
    num_left = sum(stop - start for start, stop in state["remaining"])
    assert 0 < num_left < 64
    assert 4 * int(first["steps"] + second["steps"]) == num_left


def test_a_loop_of_accelerate_survives_a_process_that_is_killed(outcome: Outcome) -> None:
    """With `on_loss="continue"`, and though it was learner 0: another one is the main process and saves."""
    assert outcome.codes["huggingface:accelerated_survive"] == [-9, 0, 0], outcome.said
    found = [load_file(outcome.folder / f"accelerated-survive-{rank}.safetensors")["final"] for rank in (1, 2)]
    assert torch.equal(*found)
    told = [
        json.loads((outcome.folder / f"accelerated-survive-{rank}.json").read_text(encoding="utf-8")) for rank in (1, 2)
    ]
    assert [(each["world"], each["membership"]) for each in told] == [(2, 1), (2, 1)]
    assert sorted(each["is_main"] for each in told) == [False, True]
    saved = load_file(outcome.folder / "accelerated-saved" / "model.safetensors")
    total = float(sum(value.double().sum() for value in saved.values()))
    assert total == pytest.approx(float(found[0].double().sum()))


@pytest.mark.soak
def test_three_processes_train_as_under_ddp(tmp_path: Path) -> None:
    """Equal to 1e-6 under `allreduce`, in both libraries; learners in step survive a loss, too."""
    cases = ("huggingface:equal:3", "huggingface:accelerated:3", "huggingface:survive_in_step:3")
    outcome = Outcome(tmp_path, run(tmp_path, *cases))
    for found in both(outcome, "hf-equal", "equal", 3):
        torch.testing.assert_close(found["starling"], found["ddp"], rtol=0.0, atol=1e-6)
    for found in both(outcome, "accelerated", "accelerated", 3):
        torch.testing.assert_close(found["allreduce"], found["ddp"], rtol=0.0, atol=1e-6)
    check_survivors(outcome, "allreduce", "survive_in_step")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.skipif(corpus() is None, reason="the recordings of spoken digits are absent")
@pytest.mark.parametrize(("case", "host"), [("accuracies", "huggingface"), ("accelerated_accuracies", "accelerate")])
def test_other_strategies_tell_words_apart_as_well_as_ddp(
    tmp_path: Path, check_accuracies: Any, case: str, host: str
) -> None:
    """`adpsgd` and DiLoCo, on 1,200 recordings of ten words: a miniature of Whisper's encoder, and a classifier."""
    assert run(tmp_path, f"huggingface:{case}:2", is_warm=False)[f"huggingface:{case}"] == [0, 0]
    check_accuracies(json.loads((tmp_path / f"{host}-accuracies-0.json").read_text(encoding="utf-8")))
