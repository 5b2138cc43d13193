"""Real learners that keep to a recorded order end with the recorded weights, bit for bit."""

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import starling
from starling.budget import Budget
from starling.checkpoint.reader import checkpoints_in
from starling.engines.loop.run import LoopRecord
from starling.errors import ConfigError, ReplayError
from starling.experiment.folder import ExperimentFolder
from starling.experiment.replay import read_runs
from starling.experiment.train import Trained
from starling.toy import regression
from starling.training.faults import Kill
from starling.training.job import Job
from starling.training.order import Script
from starling.training.speeds import Stragglers
from tests.contract.problems import TinyRegression
from tests.engines.drop_in_process import take_gradient
from tests.engines.test_drop_in import command
from tests.engines.test_replay import STRATEGIES, experiment, marked, recorded_on_disk, slower, trained
from tests.warm_start import run_learners

__all__ = ["experiment"]


def newest(run: Trained) -> list[Script]:
    """What the record of a run has of its learners, in its newest part."""
    return read_runs(ExperimentFolder(run.folder))[-1].scripts


def follow(job: Job, run: Path, name: str = "again", **given: Any) -> Trained:
    """Train again, with other learners slow, in the order of a run."""
    job = dataclasses.replace(job, stragglers=Stragglers(slow={0: 2.0}, jitter=0.5))
    return starling.train(job, follow=run, name=name, exp=run.parent, **given)


@pytest.mark.parametrize("strategy", marked(STRATEGIES, "adpsgd"))
def test_a_run_is_repeated_to_the_bit_by_learners_of_other_speeds(strategy: str, tmp_path: Path) -> None:
    job, run = trained(strategy, tmp_path)
    own, again = newest(run), newest(follow(job, run.folder, learners=3))
    for before, after in zip(own, again, strict=True):
        assert len(before.states) > 2
        assert after.states == before.states
        assert after.batches == before.batches
        assert [turn for turn in after.turns if turn[0] != "l"] == [turn for turn in before.turns if turn[0] != "l"]


def test_processes_keep_to_a_simulated_order(experiment: tuple[Job, Path], tmp_path: Path) -> None:
    """Both engines compute the same weights in the same order."""
    job, folder = experiment
    run = starling.train(job, learners=2, follow=folder, exp=tmp_path)
    simulated = read_runs(ExperimentFolder(folder))[0].scripts
    assert [each.states for each in newest(run)] == [each.states for each in simulated]


def test_a_simulation_that_copied_no_states_is_carried_out_with_checkpoints(tmp_path: Path) -> None:
    """As `starling simulate` records it. The checkpoints, which take no turn, are those of this run."""
    job = dataclasses.replace(regression("adpsgd"), checkpoint_every=20)
    folder = recorded_on_disk(job, tmp_path / "simulated", saves=False)
    run = starling.train(job, learners=2, follow=folder, exp=tmp_path)
    simulated = read_runs(ExperimentFolder(folder))[0].scripts
    assert [each.states[-1] for each in newest(run)] == [each.states[-1] for each in simulated]
    assert len(checkpoints_in(run.folder / "checkpoints")) > 1
    resumed = starling.train(
        dataclasses.replace(job, budget=Budget(epochs=(job.budget.epochs or 0) + 1)),
        learners=2,
        resume=checkpoints_in(run.folder / "checkpoints")[0],
        name="resumed",
        exp=tmp_path,
    )
    assert len(newest(resumed)[0].states) > 1


def test_a_resumed_run_is_repeated_part_by_part(tmp_path: Path) -> None:
    job, run = trained("adpsgd", tmp_path)
    more = dataclasses.replace(job, budget=Budget(epochs=(job.budget.epochs or 0) + 2))
    resumed = starling.train(more, learners=3, resume=run.folder, name=run.folder.name, exp=tmp_path)
    first = follow(job, resumed.folder, learners=3)
    second = follow(more, resumed.folder, learners=3, resume=first.folder)
    assert [each.states for each in newest(second)] == [each.states for each in newest(resumed)]


def test_a_run_with_another_learning_rate_ends_at_its_first_other_state(tmp_path: Path) -> None:
    job, run = trained("dpsgd", tmp_path)
    with pytest.raises(ReplayError, match="its state number 2"):
        follow(dataclasses.replace(job, make_optimizer=slower), run.folder, learners=3)


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    job, run = trained("adpsgd", tmp_path)
    with pytest.raises(ConfigError, match="is the folder of this run itself"):
        follow(job, run.folder, name=run.folder.name, learners=3)
    with pytest.raises(ConfigError, match="has the record of 3 learners"):
        follow(job, run.folder, learners=2)
    with pytest.raises(ConfigError, match="hogwild cannot be replayed"):
        follow(regression("hogwild"), run.folder, learners=3)
    with pytest.raises(ConfigError, match=r"no config.yaml here"):
        follow(job, tmp_path / "none", learners=3)
    job, run = trained("dpsgd", tmp_path, [Kill(kill=1, at_step=2)])
    with pytest.raises(ConfigError, match="were lost or joined"):
        follow(job, run.folder, learners=3)


LOOPS = ("adpsgd", "a2cid2", "ako", "dpsgd", "async-diloco", "parameter-server", "sgp")


@pytest.mark.parametrize("strategy", marked(LOOPS, "adpsgd"))
def test_a_joined_loop_is_repeated_to_the_bit(strategy: str, tmp_path: Path) -> None:
    """In three loops of unequal lengths, which record, follow, and follow what the second one has recorded."""
    case: dict[str, Any] = {"strategy": strategy}
    if strategy not in ("dpsgd", "sgp"):
        case["steps"] = {"0": 20, "1": 40}
    records = [str(tmp_path / f"record-{number}") for number in range(3)]
    options = [{"record": records[0]}, *({"record": now, "follow": before} for before, now in pairwise(records))]
    cases = {f"run-{number}": case | {"options": each} for number, each in enumerate(options)}
    run_learners(command(cases, tmp_path), 3, tmp_path, within=100.0)
    for rank in range(3):
        first, *others = (load_file(tmp_path / f"{name}-{rank}.safetensors")["weights"] for name in cases)
        assert all(torch.equal(first, other) for other in others)
        scripts = [LoopRecord(rank, None, Path(folder)).script for folder in records]
        assert all(script is not None and len(script.states) > 4 for script in scripts)
        assert len({str(script and (script.turns, script.states)) for script in scripts}) == 1


def test_a_loop_that_computes_something_else_is_told(tmp_path: Path) -> None:
    """With one learner: under allreduce, its weights after the first step differ."""

    def loop(rate: float, **given: str) -> None:
        model = TinyRegression().make_model()
        with starling.join(model, torch.optim.SGD(model.parameters(), lr=rate), "allreduce", **given) as learner:
            for number in range(4):
                take_gradient(model, number)
                learner.step()

    record = str(tmp_path / "record")
    loop(0.1, record=record)
    loop(0.1, follow=record)
    with pytest.raises(ReplayError, match="after 1 steps, its weights have the hash"):
        loop(0.2, follow=record)
    with pytest.raises(ConfigError, match="learners of hogwild race"):
        starling.join(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters()), "hogwild", record=record)
    with pytest.raises(ConfigError, match="choose another folder"):
        loop(0.1, record=record, follow=record)
    with pytest.raises(ConfigError, match=r"there is no .*learner-0.jsonl"):
        loop(0.1, follow=str(tmp_path / "none"))
    path = tmp_path / "record" / "learner-0.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace('"step":1', '"step":7'), encoding="utf-8")
    with pytest.raises(ReplayError, match="damaged"):
        loop(0.1, follow=record)
