"""What a resumed run begins with: each learner its own state, or all of them the consensus and nothing else."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from starling.budget import Budget
from starling.checkpoint.reader import Checkpoint, load
from starling.checkpoint.state import OWN_PREFIX, LearnerState
from starling.checkpoint.writer import CheckpointWriter
from starling.engines.virtual.cluster import Cluster, ComputeModel, LinkModel
from starling.engines.virtual.engine import VirtualEngine
from starling.errors import ProtocolError
from starling.strategies import STRATEGIES
from starling.training.faults import Kill
from starling.training.job import EpochReport, Job, Observer
from starling.training.speeds import Stragglers
from tests.contract.cases import adam, sgd
from tests.contract.problems import ConstantGradient, TinyRegression
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
        pytest.param(("adpsgd", {"compression": "int8", "pattern": "ring"}), marks=pytest.mark.wide),
        pytest.param(("noloco", {"every": 2}), marks=pytest.mark.wide),
        pytest.param(("aeasgd", {"every": 2}), marks=pytest.mark.wide),
        pytest.param(("local-sgd", {"every": 50}), marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_a_resume_with_another_strategy_begins_with_one_model(before: Choice, tmp_path: Path) -> None:
    """All learners begin with the consensus and one optimizer state, so that those that must be equal are, to the bit,
    for ever."""
    steps = 24 if before[0] != "local-sgd" else 23
    states: list[LearnerState] = []

    class AtBarrier(Observer):
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


@pytest.mark.wide
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


class AllBarriers(Observer):
    """Keeps a copy of all learners' states at each barrier, and the final ones, by position."""

    def __init__(self) -> None:
        self.states: dict[int, list[LearnerState]] = {}

    def on_barrier(self, state: LearnerState) -> None:
        self.states.setdefault(state.position.num_done, []).append(state.copy())

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        if not report.is_last:
            self.on_barrier(state)


@pytest.mark.parametrize("delay", [0, 1, 4])
@pytest.mark.parametrize("world", [1, 2])
def test_delayed_gradients_survive_a_stop_at_any_barrier(delay: int, world: int, tmp_path: Path) -> None:
    """The gradients that wait are in a checkpoint: the same bits as without a stop, also soon after the beginning."""
    choice: Choice = ("delayed", {"delay": delay})
    barriers = AllBarriers()
    settings: dict[str, Any] = {"make_optimizer": adam(0.01), "checkpoint_every": 2 * world}
    straight = VirtualEngine(job(choice, 12 * world, **settings), world, CLUSTER, barriers).run().states
    assert len(barriers.states) >= 5
    for number, states in barriers.states.items():
        checkpoint = saved(tmp_path / str(number), states)
        found = resumed(checkpoint, job(choice, 12 * world, **settings), world)
        assert all(torch.equal(one.weights, other.weights) for one, other in zip(found, straight, strict=True)), number


def steps_in(weights: Tensor, rate: float) -> float:
    """How many gradients of 1 have moved weights that began with 0."""
    return float(-weights.double().mean() / rate)


@pytest.mark.wide
@pytest.mark.parametrize("resumes", [False, True])
def test_delayed_gradients_are_each_applied_once_when_a_learner_is_lost(resumes: bool, tmp_path: Path) -> None:
    """At any event: the mini-batches whose gradients waited are computed again, unless a checkpoint brought these."""
    choice: Choice = ("delayed", {"delay": 2})
    settings: dict[str, Any] = {"workload": ConstantGradient(5), "checkpoint_every": 6}
    steps, rate, start, before = 24, 2.0**-6, None, 0
    if resumes:
        barriers = AllBarriers()
        VirtualEngine(job(choice, steps, rate, **settings), 3, CLUSTER, barriers).run()
        before, states = sorted(barriers.states.items())[1]
        strategy = STRATEGIES["delayed"].described(job(choice, 1).options)
        checkpoint = saved(tmp_path, states)
        start = [checkpoint.start(rank, 3, strategy) for rank in range(3)]
        assert checkpoint.learner(0).strategy["queue"][1] == 2
    num_changes = 0
    for event in range(1, 60, 3):
        faults = (Kill(kill=1, at_event=event),)
        outcome = VirtualEngine(job(choice, steps, rate, faults=faults, **settings), 3, CLUSTER, start=start).run()
        if not outcome.losses:
            break
        num_changes += 1
        assert distance(outcome.states) == 0.0
        num_done = outcome.states[0].position.num_done
        applied = steps_in(outcome.states[0].weights, rate)
        # a step is the mean of 3 mini-batches, or of 2 after the loss
        assert before // 3 <= steps // 3 <= applied <= num_done / 2 + 1e-6
        lost_at = applied * 2 - num_done  # 3 a + 2 b = num_done, and a + b = applied
        assert abs(lost_at + round(-lost_at)) < 1e-3
        assert 3 * -lost_at + 2 * (applied + lost_at) == pytest.approx(num_done)
    assert num_changes > 5


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        (("adpsgd", {"staleness": "gap-aware"}), "steps"),
        (("adpsgd", {"staleness": {"delay_compensation": 2.0, "mean_square": 0.9}}), "mean square"),
        (("parameter-server", {"staleness": "gap-aware"}), "steps"),
        (("parameter-server", {"staleness": {"delay_compensation": 2.0, "mean_square": 0.9}}), "mean square"),
    ],
    ids=str,
)
def test_what_a_rule_for_stale_gradients_remembers_is_in_a_checkpoint(
    choice: Choice, name: str, tmp_path: Path
) -> None:
    """m of DC-ASGD, and the steps of gap-aware: a resumed run continues with them."""
    states = VirtualEngine(job(choice, 24), 3, CLUSTER).run().states
    checkpoint, key = saved(tmp_path, states), f"{OWN_PREFIX}staleness {name}"
    kept = checkpoint.learner(0).strategy[key]
    assert kept.abs().max() > 0.0
    more = resumed(checkpoint, job(choice, 48))[0].strategy[key]
    first = resumed(checkpoint, job(choice, 24))[0].strategy[key]
    assert torch.equal(first, kept)
    assert not torch.equal(more, kept)
    if name == "steps":
        assert more[0] > 1.5 * kept[0]


@pytest.mark.wide
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
