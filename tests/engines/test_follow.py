"""Real learners that keep to a recorded order end with the recorded weights, bit for bit."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import starling
from starling.budget import Budget
from starling.errors import ConfigError, ReplayError
from starling.experiment.folder import ExperimentFolder
from starling.experiment.recorded import read_runs
from starling.experiment.train import Trained
from starling.toy import regression
from starling.training.faults import Kill
from starling.training.job import Job
from starling.training.order import Script
from starling.training.speeds import Stragglers
from tests.engines.test_replay import STRATEGIES, experiment, marked, slower, trained

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
    assert [each.states for each in newest(run)] == [
        each.states for each in read_runs(ExperimentFolder(folder))[0].scripts
    ]


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
