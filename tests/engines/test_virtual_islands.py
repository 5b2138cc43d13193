"""Islands on the simulated clock: the arithmetic of whole models, and the time and the bytes of their traffic."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from starling.checkpoint.state import LearnerState
from starling.engines.virtual.cluster import Cluster, ComputeModel, LinkModel, NodeModel
from starling.engines.virtual.engine import VirtualEngine
from starling.engines.virtual.timing import simulate_timing
from starling.errors import ConfigError
from starling.strategies import find_strategy
from starling.strategies.islands import Island
from starling.training.faults import Kill
from starling.training.job import EpochReport, Observer, StepReport
from starling.training.speeds import Stragglers
from starling.training.tensor_plan import traffic_of
from tests.contract.problems import Uneven as UnevenSizes
from tests.engines.island_process import CASES
from tests.engines.test_islands import Oracle, flat

CLUSTER = Cluster(compute=ComputeModel(seconds=0.1), link=LinkModel(latency=1e-3, bandwidth=1e6))


class Watching(Observer):
    """Notes which ticket each learner reports, and the bytes it sent."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int]] = []
        self.sent: Counter[int] = Counter()
        self.waiting: dict[int, float] = {}

    def on_step(self, report: StepReport) -> None:
        self.steps.append((report.rank, report.ticket.step, report.num_examples))

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self.sent[report.rank] += report.averaging.bytes_sent
        self.waiting[report.rank] = report.spent.waiting_for_peers


def simulated(
    name: str, cluster: Cluster = CLUSTER, world: int = 4, **changes: Any
) -> tuple[list[Tensor], float, Watching]:
    watching = Watching()
    outcome = VirtualEngine(replace(CASES[name].job(), **changes), world, cluster, watching).run()
    return [state.weights for state in outcome.states], outcome.seconds, watching


@pytest.mark.parametrize("name", ["alone", "allreduce", "four"])
def test_an_island_steps_with_the_mean_gradient_of_its_ranks(name: str) -> None:
    world = 2 if name == "alone" else 4
    oracle = Oracle(name, 1)
    for first in range(0, CASES[name].steps, world):
        oracle.step(0, oracle.gradient(0, list(range(first, first + world))))
    found, _, watching = simulated(name, world=world)
    assert len(found) == world // CASES[name].size
    for each in found:
        torch.testing.assert_close(each, flat(oracle.models[0]), rtol=0.0, atol=1e-6)
    assert sorted((rank, step) for rank, step, _ in watching.steps) == sorted(
        (step % world, step) for step in range(CASES[name].steps)
    )
    workload = CASES[name].workload()
    for _, step, num_examples in watching.steps:
        batch = workload.load(workload_ticket(step))
        assert num_examples == sum(each.num_examples for each in batch)


def workload_ticket(step: int) -> Any:
    from starling.workload import Ticket

    return Ticket(0, step, step)


@pytest.mark.parametrize("name", ["dpsgd", "delay-by-one"])
def test_islands_average_as_learners_with_whole_models(name: str) -> None:
    oracle = Oracle(name, 2)
    for first in range(0, CASES[name].steps, 4):
        gradients = [oracle.gradient(number, [first + 2 * number, first + 2 * number + 1]) for number in range(2)]
        mean = (flat(oracle.models[0]) + flat(oracle.models[1])) / 2
        for number, gradient in enumerate(gradients):
            oracle.put(number, mean)
            oracle.step(number, gradient)
    for number, each in enumerate(simulated(name)[0]):
        torch.testing.assert_close(each, flat(oracle.models[number]), rtol=0.0, atol=1e-6)


def test_mini_batches_are_weighted_within_and_between_islands() -> None:
    """As in a run of as many learners with whole models, whose mean has the same weights."""
    job = replace(CASES["allreduce"].job(), workload=UnevenSizes(), weighting="utterances")
    found = VirtualEngine(job, 4).run().states[0].weights
    whole = VirtualEngine(replace(job, island=Island()), 4).run().states[0].weights
    torch.testing.assert_close(found, whole, rtol=0.0, atol=1e-6)


def test_a_gradient_takes_the_time_of_two_gathers_and_a_scatter_more() -> None:
    """One island of four: each moves 3 parts of a quarter, one after another."""
    size = flat(CASES["four"].workload().make_model()).nbytes
    _, seconds, watching = simulated("four")
    traffic = 3 * 3 * (1e-3 + -(-size // 4) / 1e6)
    num_gradients = CASES["four"].steps / 4
    assert seconds == pytest.approx(num_gradients * (0.1 + traffic), rel=1e-6)
    assert watching.waiting[0] == pytest.approx(num_gradients * traffic, rel=1e-6)
    assert watching.sent == dict.fromkeys(range(4), int(num_gradients) * 3 * 3 * size // 4)


def test_a_tensor_island_steps_with_one_mini_batch() -> None:
    """Its first rank reports it; all send the same."""
    oracle = Oracle("tensor allreduce", 1)
    for first in range(0, CASES["tensor allreduce"].steps, 2):
        oracle.step(0, oracle.gradient(0, [first, first + 1]))
    found, _, watching = simulated("tensor allreduce")
    for each in found:
        torch.testing.assert_close(each, flat(oracle.models[0]), rtol=0.0, atol=1e-6)
    assert sorted((step, rank) for rank, step, _ in watching.steps) == [(step, 2 * (step % 2)) for step in range(24)]
    assert len(set(watching.sent.values())) == 1


def test_a_gradient_of_a_tensor_island_takes_the_time_of_what_its_cut_layers_send() -> None:
    """The inner layer's inputs and outputs `[4, 7]` are reduced, outputs `[4, 9]` gathered and their layer's inputs
    reduced; and the parameters that are not cut are gathered: 5 x 7 and 7, 7 and 7, and 7 of the inner layer's bias."""
    _, seconds, watching = simulated("tensor", world=2)
    reduced, gathered = 3 * [4 * 4 * 7], [4 * 4 * 9, 4 * 63]
    traffic = sum(2 * (1e-3 + each / 2 / 1e6) for each in reduced) + sum(1e-3 + each / 2 / 1e6 for each in gathered)
    num_gradients = CASES["tensor"].steps
    assert seconds == pytest.approx(num_gradients * (0.1 + traffic), rel=1e-6)
    assert watching.sent == dict.fromkeys(range(2), num_gradients * (2 * sum(reduced) + sum(gathered)) // 2)


def test_the_parts_of_a_model_travel_between_islands_side_by_side() -> None:
    """Two islands of two average gradients: each rank one half, over a link of its own."""
    size = flat(CASES["allreduce"].workload().make_model()).nbytes
    _, seconds, watching = simulated("allreduce")
    within, between = 3 * (1e-3 + -(-size // 2) / 1e6), 2 * (1e-3 + -(-size // 2) / 2e6)
    assert seconds == pytest.approx(6 * (0.1 + within + between), rel=1e-6)
    assert watching.sent[0] == 6 * (3 * size + size) // 2


def test_an_island_waits_for_its_slowest_rank() -> None:
    usual, slow = (simulated("alone", world=2, stragglers=Stragglers(slow=given))[1] for given in ({}, {1: 3.0}))
    assert slow - usual == pytest.approx(12 * 0.2, rel=1e-6)


def test_islands_on_nodes_share_the_uplink() -> None:
    """Islands of two that fill their nodes: inside the links are fast, and the uplink carries whole models."""
    nodes = NodeModel(size=2, bandwidth=1e9, latency=0.0, uplink=1e5)
    cluster = CLUSTER.model_copy(update={"nodes": nodes, "link": LinkModel(latency=0.0, bandwidth=1e6)})
    size = flat(CASES["allreduce"].workload().make_model()).nbytes
    seconds = simulated("allreduce", cluster)[1]
    assert seconds == pytest.approx(6 * (0.1 + 3 * size / 2 / 1e9 + size / 1e5), rel=1e-3)


def test_the_same_seed_gives_the_same_events() -> None:
    cluster = Cluster(compute=ComputeModel(distribution="log-normal", spread=0.5))
    job = CASES["adpsgd"].job()
    first, second = (VirtualEngine(job, 8, cluster).run() for _ in range(2))
    assert first.event_hash == second.event_hash
    total = sum(state.weights for state in first.states)
    torch.testing.assert_close(total, torch.full_like(total, -0.5 * CASES["adpsgd"].steps / 2), rtol=0.0, atol=1e-3)


def test_timing_alone_takes_the_same_time() -> None:
    size = flat(CASES["allreduce"].workload().make_model()).nbytes
    outcome = simulate_timing(find_strategy("allreduce"), None, 4, CLUSTER, size, 24, island=Island(sharded=2))
    assert outcome.seconds == pytest.approx(simulated("allreduce")[1], rel=1e-9)
    assert len(outcome.learners) == 4


def test_timing_alone_must_know_what_a_tensor_island_sends() -> None:
    case = CASES["tensor allreduce"]
    size, traffic = flat(case.workload().make_model()).nbytes, traffic_of(case.workload())
    timing = partial(simulate_timing, find_strategy("allreduce"), None, 4, CLUSTER, size, 24, island=Island(tensor=2))
    outcome = timing(traffic=traffic)
    assert outcome.seconds == pytest.approx(simulated("tensor allreduce")[1], rel=1e-9)
    assert [each.num_steps for each in outcome.learners] == [12, 0, 12, 0]
    with pytest.raises(ConfigError, match="give `traffic`"):
        timing()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload": UnevenSizes(), "island": Island(tensor=2)}, "does not say which layers can be cut"),
        ({"faults": (Kill(kill=1, at_step=3),)}, "faults are not simulated with islands"),
        ({"cluster": CLUSTER.model_copy(update={"nodes": NodeModel(size=3)})}, "islands of 2 neither fill nodes of 3"),
        (
            {"cluster": CLUSTER.model_copy(update={"compute": ComputeModel(batched=True)})},
            "leave out batched or processes",
        ),
        ({"world": 3}, "3 learners cannot be divided into islands of 2"),
    ],
)
def test_what_is_not_simulated_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulated("allreduce", **changes)


def test_a_simulation_with_islands_cannot_resume() -> None:
    job = CASES["allreduce"].job()
    with pytest.raises(ConfigError, match="cannot resume"):
        VirtualEngine(job, 4, start=VirtualEngine(job, 4).run().states)
