"""Checkpoints of learners that do not step together: together they have each mini-batch before the barrier once."""

import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from starling.budget import Budget
from starling.checkpoint.state import MEMBERSHIP_PREFIX, LearnerState
from starling.engines.processes.handshake import Peers
from starling.engines.processes.place import Place
from starling.engines.processes.tickets import StoreCuts
from starling.engines.virtual.cluster import Cluster, ComputeModel
from starling.engines.virtual.engine import VirtualEngine
from starling.engines.virtual.membership import VirtualRounds
from starling.experiment.observers import Keep, Saver
from starling.strategies.parts.delayed_nesterov import Loans
from starling.training.job import EpochReport, Observer
from starling.training.replica import Replica
from starling.training.speeds import Stragglers
from starling.training.succession import CutAgreement, Cuts
from starling.workload import Position, Ticket
from tests.checkpoint.cut_cases import (
    STEPS,
    OwnWeight,
    delivered_and_pending,
    expected,
    job,
    places_of_each_mini_batch,
    plain,
    summing,
)
from tests.warm_start import run_learners

CLUSTER = Cluster(compute=ComputeModel(distribution="log-normal", seconds=0.1, spread=0.5))
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "ring": ("adpsgd", {"pattern": "ring"}, 3),
    "pairs": ("adpsgd", {"pattern": "pairs", "period": 0.5}, 4),
    "in pieces": ("adpsgd", {"pattern": "random", "piece_megabytes": 1e-5, "period": 0.25}, 3),
    "super-learners": ("hadpsgd", {"per_node": 2}, 4),
}


class Saved(Observer):
    """The states that a checkpoint would have, by the number of mini-batches done."""

    def __init__(self) -> None:
        self.states: dict[int, dict[int, LearnerState]] = defaultdict(dict)

    def on_barrier(self, state: LearnerState) -> None:
        self.states[state.position.num_done][state.rank] = state.copy()

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        if state.is_complete:
            self.on_barrier(state)


def checkpoints(
    name: str, options: dict[str, Any], world: int, **settings: Any
) -> list[tuple[int, list[LearnerState]]]:
    """All checkpoints of some runs with one slow learner: how many mini-batches are done, and the states."""
    found = []
    for seed in range(6):
        saved, stragglers = Saved(), Stragglers(slow={1: 2.0})
        mine = job(name, options, stragglers=stragglers, seed=seed, **settings)
        VirtualEngine(mine, world, CLUSTER, saved).run()
        assert all(len(states) == world for states in saved.states.values())
        found += [(num_done, list(states.values())) for num_done, states in saved.states.items()]
    return found


def mean(states: list[LearnerState], of: Callable[[LearnerState], Tensor]) -> Tensor:
    """The mean over learners."""
    return torch.stack([of(state) for state in states]).mean(dim=0)


@pytest.fixture
def moved_later(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How far rounds have moved each saved state after its learner had passed the barrier."""
    moved: list[float] = []
    add = Cuts.add

    def noting(self: Cuts, state: LearnerState, save: Callable[[LearnerState], None], complete: None = None) -> None:
        before = state.weights.clone()

        def note(complete: LearnerState) -> None:
            moved.append(float((complete.weights - before).abs().max()))
            save(complete)

        add(self, state, note, complete)

    monkeypatch.setattr(Cuts, "add", noting)
    return moved


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.wide if number else (), id=name)
        for number, (name, case) in enumerate(CASES.items())
    ],
)
def test_a_checkpoint_has_each_mini_batch_before_the_barrier_once(
    case: tuple[str, dict[str, Any], int], moved_later: list[float]
) -> None:
    """And none after it, whatever rounds there were while learners passed the barrier."""
    name, options, world = case
    found = checkpoints(name, options, world)
    assert len(found) > 50
    assert sum(distance > 0.1 for distance in moved_later) > 20
    for num_done, states in found:
        torch.testing.assert_close(-mean(states, lambda state: state.weights), expected(num_done, world))


def test_what_is_averaged_of_the_optimizer_is_conserved_with_the_weights() -> None:
    """The momentum, which is here the sum of a learner's gradients."""
    options = {"pattern": "ring", "optimizer_state": "averaged"}
    for num_done, states in checkpoints("adpsgd", options, 3, make_optimizer=summing):
        momentum = mean(states, lambda state: state.optimizer["state"][0]["momentum_buffer"].flatten())
        torch.testing.assert_close(momentum, expected(num_done, 3))


def test_the_momenta_of_averaging_sum_to_zero_in_a_checkpoint() -> None:
    """They are those of the round with which the weights end."""
    options = {"acceleration": {"rate": 0.3, "step": 1.2}}
    largest = 0.0
    for num_done, states in checkpoints("a2cid2", options, 5):
        momenta = [state.strategy[f"{MEMBERSHIP_PREFIX}momentum"] for state in states]
        largest = max(largest, float(momenta[0].abs().max()))
        torch.testing.assert_close(sum(momenta, torch.zeros(STEPS)), torch.zeros(STEPS), rtol=0.0, atol=1e-5)
        torch.testing.assert_close(
            -mean(states, lambda state: state.weights), expected(num_done, 5), rtol=0.0, atol=1e-5
        )
    assert largest > 0.1


def test_the_end_of_an_epoch_is_saved_once_its_rounds_are_complete() -> None:
    """Reports come at once, without a state to save; the state follows, and says which epoch has ended."""
    found = checkpoints("adpsgd", {"pattern": "ring"}, 3, workload=OwnWeight(9), checkpoint_every=None)
    assert Counter(num_done for num_done, _ in found)[9] == 6
    for num_done, states in found:
        if num_done < STEPS:
            assert [state.epochs_ended for state in states] == [num_done // 9] * 3
        torch.testing.assert_close(-mean(states, lambda state: state.weights), expected(num_done, 3))


def test_saving_changes_no_event() -> None:
    """A run with checkpoints is the run without them."""
    hashes = {
        VirtualEngine(job("adpsgd", {"pattern": "ring"}, checkpoint_every=every), 3, CLUSTER).run().event_hash
        for every in (None, 3)
    }
    assert len(hashes) == 1


@pytest.mark.wide
@pytest.mark.parametrize("servers", [{"shards": 1}, {"shards": 2}, {"servers": "own"}], ids=str)
def test_a_checkpoint_of_servers_and_workers_has_each_mini_batch_once(servers: dict[str, Any]) -> None:
    """In theta, or in what a worker pushes when it resumes; of other workers' later pushes it has nothing."""
    options = {"rate": 1.0, "momentum": 0.0, "delay": 1, "every": 3} | servers
    found = checkpoints("async-diloco", options, 3)
    assert len(found) > 50
    for num_done, states in found:
        torch.testing.assert_close(delivered_and_pending(states), expected(num_done, 1))


@pytest.mark.parametrize("quorum", [1, 2, pytest.param(3, marks=pytest.mark.wide)])
@pytest.mark.parametrize("fragments", [1, 3])
def test_a_checkpoint_of_a_syncer_has_each_mini_batch_before_the_barrier_once(quorum: int, fragments: int) -> None:
    """Merged or waiting to be merged, or still with the learner that has computed it."""
    options = {"rate": 1.0, "momentum": 0.0, "every": 3 * fragments, "fragments": fragments, "overlap": 2}
    found = checkpoints("decoupled-diloco", options | {"quorum": quorum}, 3)
    assert len(found) > 50
    num_waiting = 0
    for num_done, states in found:
        torch.testing.assert_close(places_of_each_mini_batch(states), (torch.arange(STEPS) < num_done).float())
        sums = [each["sum"] for state in states for shard in state.shards for each in shard.optimizer["state"].values()]
        num_waiting += any(bool(each.any()) for each in sums)
    assert num_waiting > 0 or quorum == 1


def test_a_server_lends_no_number_that_a_saved_worker_holds() -> None:
    """Two workers hold copies that were lent after the server's copy of its shard was made."""
    loans = Loans(1.0, 0.0, 1, 0.0)
    theta, copied = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = loans.optimizer([theta])
    fork = optimizer.fork([copied])
    held = [loans.lend(0, age=0), loans.lend(0, age=0), loans.lend(0, age=0)]
    assert loans.pay_back(held[1]) == 0
    theta.grad = copied.grad = torch.ones(1)
    optimizer.step()
    fork.step_as(optimizer)
    fork.catch_up(optimizer)
    resumed = Loans(1.0, 0.0, 1, 0.0)
    resumed.optimizer([nn.Parameter(torch.zeros(1))]).load_state_dict(fork.state_dict())
    assert [resumed.pay_back(number) for number in held] == [0, None, 0]
    assert resumed.lend(0, age=0) not in held


@pytest.mark.wide
@pytest.mark.parametrize(
    ("case", "linked"),
    [(CASES["ring"], "linked"), pytest.param(CASES["super-learners"], "apart", marks=pytest.mark.wide)],
    ids=["ring", "super-learners"],
)
def test_a_checkpoint_of_processes_has_each_mini_batch_once(
    case: tuple[str, dict[str, Any], int], linked: str, tmp_path: Path
) -> None:
    """On one machine, and as if each were on its own."""
    name, options, world = case
    program = [sys.executable, "-m", "tests.checkpoint.cut_process", name, json.dumps(options), linked, str(tmp_path)]
    run_learners(program, world, tmp_path)
    states: dict[int, list[Tensor]] = defaultdict(list)
    for path in tmp_path.glob("*-*.json"):
        states[int(path.stem.split("-")[0])].append(torch.tensor(json.loads(path.read_text(encoding="utf-8"))))
    assert sorted(states) == list(range(4, STEPS + 1, 4))
    for num_done, weights in states.items():
        assert len(weights) == world
        torch.testing.assert_close(-torch.stack(weights).mean(dim=0), expected(num_done, world))


class Walker:
    """A learner that does nothing but enter rounds, each of which adds 1 to its only weight, and pass barriers."""

    def __init__(self, agreement: CutAgreement, state: LearnerState) -> None:
        parameter = nn.Parameter(torch.zeros(1))
        self.replica = Replica(parameter.data, torch.zeros(1), [parameter], plain, None)
        self.cuts = Cuts(self.replica, agreement)
        self.state = state
        self.number = self.num_barriers = 0
        self.is_in_round = False
        self.saved: list[float] = []

    def go_on(self) -> None:
        """Enter a round or complete it."""
        if self.is_in_round:
            self.replica.apply(torch.ones(1), in_round=True)
            self.number += 1
            self.cuts.completed(self.number)
        else:
            self.cuts.entered(self.number)
        self.is_in_round = not self.is_in_round

    def pass_barrier(self) -> None:
        """Pass the next barrier."""
        self.num_barriers += 1
        self.cuts.add(
            replace(self.state, weights=self.replica.weights), lambda state: self.saved.append(float(state.weights))
        )


@pytest.mark.parametrize(
    ("engine", "num_orders"), [("virtual", 200), pytest.param("processes", 40, marks=pytest.mark.wide)]
)
def test_all_learners_save_after_the_same_round_in_whatever_order_they_act(engine: str, num_orders: int) -> None:
    """Random orders in which learners enter rounds, complete them, pass barriers and save."""
    import simpy

    state = LearnerState(0, 3, Position(Ticket(0, 0, 0)), 0.0, torch.zeros(1), {}, {"state": {}, "param_groups": []})
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    num_different = 0
    for seed in range(num_orders):
        draw = random.Random(seed)
        shared = VirtualRounds(simpy.Environment(), 3)
        shared._num_opened = 1 << 20
        agreements: list[CutAgreement] = [shared] * 3
        if engine == "processes":
            from torch.distributed import PrefixStore  # type: ignore[attr-defined]

            places = [Place(rank, 3, rank, 3, PrefixStore(str(seed), store)) for rank in range(3)]
            agreements = [StoreCuts(Peers(place)) for place in places]
        walkers = [Walker(agreement, state) for agreement in agreements]
        passed: list[list[int]] = [[], [], []]
        while any(len(walker.saved) < 4 for walker in walkers):
            walker = draw.choice(walkers)
            action = draw.random()
            if action < 0.6 and walker.number <= 2 + min(each.number for each in walkers):
                if engine == "virtual" and not walker.is_in_round:
                    shared._first_free = max(shared._first_free, walker.number + 1)
                walker.go_on()
            elif action < 0.8 and walker.num_barriers < 4:
                passed[walkers.index(walker)].append(walker.number)
                walker.pass_barrier()
            else:
                walker.cuts.save()
        assert walkers[0].saved == walkers[1].saved == walkers[2].saved
        num_different += len({tuple(numbers) for numbers in passed}) > 1
    assert num_different > 0.75 * num_orders


def test_a_saver_saves_the_end_of_an_epoch_when_its_state_is_complete() -> None:
    """What is saved is chosen when the epoch ends."""
    kept: list[tuple[LearnerState, str]] = []

    class Noting(Saver):
        def _save(self, state: LearnerState, chosen: str, moment: str) -> None:  # type: ignore[override]
            if chosen:
                kept.append((state, moment))

    def choose(report: EpochReport) -> Keep:
        return "checkpoint" if report.epoch == 1 else ""

    saver = Noting(None, lambda message: None, lambda: None, choose)  # type: ignore[arg-type, return-value]
    mine = job("adpsgd", {"pattern": "ring"}, workload=OwnWeight(9), checkpoint_every=None)
    VirtualEngine(replace(mine, budget=Budget(steps=24)), 3, CLUSTER, saver).run()
    assert [(state.position.num_done, moment, state.is_complete) for state, moment in kept] == [(18, "epoch", True)] * 3
