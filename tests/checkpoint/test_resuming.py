"""What a resumed run begins with: each learner its own state, or all of them the consensus and nothing else."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from starling.budget import Budget
from starling.checkpoint.reader import Checkpoint, load
from starling.checkpoint.state import LearnerState
from starling.checkpoint.writer import CheckpointWriter
from starling.engines.virtual.cluster import Cluster, ComputeModel, LinkModel
from starling.engines.virtual.engine import VirtualEngine
from starling.errors import ProtocolError
from starling.strategies import STRATEGIES
from starling.training.job import Job, Silence
from starling.training.stragglers import Stragglers
from tests.contract.cases import adam, sgd
from tests.contract.problems import TinyRegression
from tests.warm_start import start_learners

CLUSTER = Cluster(compute=ComputeModel(seconds=1.0), link=LinkModel(latency=1e-3, bandwidth=1e9))
Choice = tuple[str, dict[str, Any]]
ONE_MODEL: list[Choice] = [
    ("allreduce", {}),
    ("allreduce", {"compression": {"low_rank": 1}}),
    ("delayed", {"delay": 2}),
    ("sparseloco", {"every": 2, "compression": {"top_k": 0.2, "bits": 2}}),
    ("diloco", {"every": 3, "compression": "int8"}),
    ("diloco", {"every": 3}),
    ("hadpsgd", {"per_node": 3}),
]
"""Strategies under which all three learners end with one model."""


def job(choice: Choice, steps: int, rate: float = 0.1, **settings: Any) -> Job:
    """A short run of a strategy with options, on random points."""
    name, options = choice
    given = {"workload": TinyRegression(), "seed": 11, "make_optimizer": sgd(rate)} | settings
    return Job(
        strategy=STRATEGIES[name],
        budget=Budget(steps=steps),
        options=STRATEGIES[name].options.model_validate(options),
        **given,
    )


def saved(folder: Path, states: Sequence[LearnerState]) -> Checkpoint:
    """A checkpoint of learners' states, as a run writes it and reads it."""
    arrived: Counter[str] = Counter()

    def arrive(name: str) -> int:
        arrived[name] += 1
        return arrived[name]

    writer = CheckpointWriter(folder, arrive, lambda folder, weights, buffers: folder.mkdir(), {}, keep=1000)
    for state in states:
        checkpoint = writer.save(state)
    assert checkpoint is not None
    return load(checkpoint.folder)


def resumed(checkpoint: Checkpoint, job: Job, world: int = 3) -> list[LearnerState]:
    """The learners' states at the end of a run that resumes."""
    strategy = job.strategy.described(job.options)
    start = [checkpoint.start(rank, world, strategy) for rank in range(world)]
    return VirtualEngine(job, world, CLUSTER, start=start).run().states


def distance(states: Sequence[LearnerState]) -> float:
    """By how much the first learner's weights differ from any other's, at most."""
    return max(float((state.weights - states[0].weights).abs().max()) for state in states)


@pytest.mark.parametrize(
    "before",
    [
        ("adpsgd", {}),
        ("adpsgd", {"compression": "int8", "pattern": "ring"}),
        ("noloco", {"every": 2}),
        ("aeasgd", {"every": 2}),
        ("local-sgd", {"every": 50}),
    ],
    ids=str,
)
def test_a_resume_with_another_strategy_begins_with_one_model(before: Choice, tmp_path: Path) -> None:
    """All learners begin with the consensus and one optimizer state, so that those that must be equal are, to the bit,
    for ever."""
    steps = 24 if before[0] != "local-sgd" else 23
    states: list[LearnerState] = []

    class AtBarrier(Silence):
        def on_barrier(self, state: LearnerState) -> None:
            states.append(state.copy())

    slow, data = Stragglers(slow={1: 1.7}), TinyRegression(40)
    first = job(before, steps, stragglers=slow, checkpoint_every=11, workload=data, make_optimizer=adam(0.01))
    VirtualEngine(first, 3, CLUSTER, AtBarrier()).run()
    checkpoint = saved(tmp_path, sorted(states[:3], key=lambda state: state.rank))
    assert distance(states[:3]) > 1e-4
    for after in ONE_MODEL:
        found = resumed(checkpoint, job(after, 36, workload=TinyRegression(40), make_optimizer=adam(0.01)))
        assert distance(found) == 0.0 or (after[0] == "hadpsgd" and distance(found) < 1e-6), after


def test_outer_state_of_an_earlier_run_moves_no_weights(tmp_path: Path) -> None:
    """DiLoCo, then allreduce, then DiLoCo again at a rate of 1e-9: theta and momentum of the first are gone."""
    diloco: Choice = ("diloco", {"every": 3})
    first = saved(tmp_path / "first", VirtualEngine(job(diloco, 24), 3, CLUSTER).run().states)
    assert first.learner(0).strategy["momentum"].abs().max() > 1e-3
    second = saved(tmp_path / "second", resumed(first, job(("allreduce", {}), 48)))
    before = second.consensus()
    moved = [float((state.weights - before).abs().max()) for state in resumed(second, job(diloco, 72, rate=1e-9))]
    assert max(moved) < 1e-6
    again = [float((state.weights - before).abs().max()) for state in resumed(first, job(diloco, 48, rate=1e-9))]
    assert max(again) > 1e-3  # the same strategy continues with its momentum


@pytest.mark.parametrize("after", [("parameter-server", {}), ("aeasgd", {}), ("hogwild", {}), ("allreduce", {})])
def test_what_a_server_keeps_is_not_read_by_another_strategy(after: Choice, tmp_path: Path) -> None:
    """Its optimizer has another state, and perhaps other pieces: all begin with the consensus."""
    before = job(("async-diloco", {"every": 2, "shards": 2}), 24, make_optimizer=adam(0.01))
    checkpoint = saved(tmp_path, VirtualEngine(before, 3, CLUSTER).run().states)
    found = resumed(checkpoint, job(after, 48, rate=1e-9, make_optimizer=adam(1e-9)))
    model = checkpoint.consensus()
    assert all(float((state.weights - model).abs().max()) < 1e-6 for state in found)


def test_another_number_of_shards_begins_with_the_consensus(tmp_path: Path) -> None:
    """It was an error."""
    before = job(("parameter-server", {"shards": 2}), 24, make_optimizer=adam(0.01))
    checkpoint = saved(tmp_path, VirtualEngine(before, 3, CLUSTER).run().states)
    found = resumed(checkpoint, job(("parameter-server", {"shards": 3}), 48, make_optimizer=adam(1e-9)))
    assert all(float((state.weights - checkpoint.consensus()).abs().max()) < 1e-6 for state in found)


@pytest.mark.parametrize("choice", ONE_MODEL[:6], ids=str)
def test_learners_that_must_be_equal_say_so_when_they_begin(choice: Choice) -> None:
    """On the virtual engine, which compares them; the message names two learners and what to do."""
    first = job(choice, 12)
    states = VirtualEngine(first, 3, CLUSTER).run().states
    start = [replace(state, strategy={}, weights=state.weights.clone()) for state in states]
    VirtualEngine(job(choice, 24), 3, CLUSTER, start=start).run()
    start[2].weights[0] += 0.5
    with pytest.raises(ProtocolError, match=r"learner 2 and learner 0 begin with different weights.*make_model"):
        VirtualEngine(job(choice, 24), 3, CLUSTER, start=start).run()


@pytest.mark.parametrize(
    ("strategy", "by", "is_refused"), [("allreduce", 0.1, True), ("allreduce", 1e-6, False), ("adpsgd", 0.1, False)]
)
def test_processes_that_must_be_equal_say_so_when_they_begin(
    strategy: str, by: float, is_refused: bool, tmp_path: Path
) -> None:
    """All of them name the same two learners, before the first mini-batch; what differs by rounding may."""
    command = [sys.executable, "-m", "tests.checkpoint.resuming_process", strategy, str(by)]
    with start_learners(command, 3, tmp_path) as started:
        for rank in range(3):
            code, said = started.end(rank, 120.0)
            assert ("learner 1 and learner 0 begin with different weights" in said) == is_refused, said
            assert (code != 0) == is_refused, said
