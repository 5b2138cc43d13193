"""When a server is lost, a worker takes its place: few mini-batches are lost with it, and fewer count twice."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from starling.budget import Budget
from starling.engines.virtual.cluster import Cluster, ComputeModel
from starling.engines.virtual.engine import VirtualEngine
from starling.errors import PeerLost
from starling.training.faults import Kill
from tests.checkpoint.cut_cases import STEPS, job

CLUSTER = Cluster(compute=ComputeModel(distribution="log-normal", seconds=0.1, spread=0.5))
EVERY = 3
PUSHING = {"rate": 1.0, "momentum": 0.0, "delay": 1, "every": EVERY, "by_speed": False}
CASES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "parameter-server": ("parameter-server", {}, 3, 0),
    "two shards": ("parameter-server", {"shards": 2}, 3, 1),
    "two shards, apart": ("parameter-server", {"shards": 2}, 4, 2),
    "server of its own": ("parameter-server", {"servers": "own"}, 4, 3),
    "async-diloco": ("async-diloco", PUSHING, 3, 0),
    "async-diloco, two shards": ("async-diloco", PUSHING | {"shards": 2}, 3, 1),
    "async-diloco, server of its own": ("async-diloco", PUSHING | {"servers": "own"}, 4, 3),
}
"""Strategy, options, number of learners, and the server that is lost."""


@pytest.mark.parametrize("case", CASES)
def test_few_mini_batches_are_lost_with_a_server_and_fewer_count_twice(case: str) -> None:
    """Each mini-batch has a coordinate of the model. At most two messages of each worker are lost, and at most one that
    had arrived, without the worker knowing it, is sent again."""
    name, options, world, victim = CASES[case]
    seen: Counter[float] = Counter()
    message = EVERY if name == "async-diloco" else 1
    num_events = VirtualEngine(job(name, options), world, CLUSTER).run().num_events
    num_losses = 0
    for event in range(2, num_events, 11):
        outcome = VirtualEngine(job(name, options, faults=(Kill(kill=victim, at_event=event),)), world, CLUSTER).run()
        num_losses += len(outcome.losses)
        (weights, *others) = (state.weights for state in outcome.states)
        for each in others:
            torch.testing.assert_close(each, weights)
        found = -weights.double()[:STEPS]
        assert float(found.min()) > -1e-6
        num_twice, num_lost = float((found - 1.0).clamp(min=0.0).sum()), float((1.0 - found).clamp(min=0.0).sum())
        seen[round(num_lost)] += 1
        assert num_twice < world * message + 0.5, event
        assert num_lost < 2 * world * message + 0.5, event
    assert num_losses > 20
    assert max(seen) > 0  # else the loss of a server would cost nothing, which no worker could know


@pytest.mark.parametrize(
    ("options", "victim"),
    [
        ({}, 1),
        ({"update": "summed", "sum": 2}, 2),
        ({"update": "summed", "sum": 2, "shards": 2}, 2),
        ({"update": "synchronous"}, 1),
        ({"shards": 2}, 2),
        ({"servers": "own"}, 0),
        ({"overlap": True}, 2),
    ],
    ids=str,
)
def test_each_mini_batch_is_in_the_model_once_if_a_worker_is_lost(options: dict[str, Any], victim: int) -> None:
    """Also if its gradient had arrived, and the worker did not know this: the servers take a mini-batch only once."""
    num_events = VirtualEngine(job("parameter-server", options), 3, CLUSTER).run().num_events
    num_losses = 0
    for event in range(2, num_events, 11):
        faults = (Kill(kill=victim, at_event=event),)
        outcome = VirtualEngine(job("parameter-server", options, faults=faults), 3, CLUSTER).run()
        num_losses += len(outcome.losses)
        torch.testing.assert_close(outcome.states[0].weights[:STEPS], torch.full((STEPS,), -1.0))
    assert num_losses > 20


def test_each_mini_batch_is_in_one_mean_if_a_worker_is_lost() -> None:
    """Under `hybrid`, the mean of three gradients, of two, or of one where the server has the other one already."""
    budget, shares = Budget(steps=STEPS - 6), set()
    plain = replace(job("parameter-server", {"update": "hybrid"}), budget=budget)
    for event in range(2, VirtualEngine(plain, 3, CLUSTER).run().num_events, 11):
        outcome = VirtualEngine(replace(plain, faults=(Kill(kill=2, at_event=event),)), 3, CLUSTER).run()
        shares |= {round(-float(share), 3) for share in outcome.states[0].weights[: STEPS - 6]}
    assert shares == {0.333, 0.5, 1.0}


def test_without_a_worker_to_spare_the_run_says_so() -> None:
    """Two servers cannot be one learner."""
    with pytest.raises(PeerLost, match=r"learner 0 was killed .* 2 servers, but only 1 learners"):
        VirtualEngine(job("parameter-server", {"shards": 2}, faults=(Kill(kill=0, at_event=40),)), 2, CLUSTER).run()
