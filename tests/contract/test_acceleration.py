"""A2CiD2, averaging with a momentum of its own: against its events in NumPy, and the mean that it must conserve."""

import copy
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from starling.budget import Budget
from starling.checkpoint.state import MEMBERSHIP_PREFIX, LearnerState
from starling.consensus import consensus_distance
from starling.engines.virtual.cluster import Cluster, ComputeModel, LinkModel
from starling.engines.virtual.engine import VirtualEngine
from starling.engines.virtual.timing import simulate_timing
from starling.errors import ConfigError
from starling.learner import Learner
from starling.strategies import STRATEGIES, Strategy
from starling.strategies.a2cid2 import A2Cid2Options, a2cid2
from starling.topology import accelerated_contraction, acceleration_constants, complete_graph, lazy, ring
from starling.training.faults import Kill
from starling.training.job import EpochReport, Job, Observer
from starling.training.speeds import Stragglers
from starling.workload import Position, Ticket
from tests.contract.cases import LEARNING_RATE, adamw, sgd
from tests.contract.conftest import Runner
from tests.contract.oracle import Matrix, Vector
from tests.contract.problems import ConstantGradient, NoisyQuadratic, TinyRegression

MOMENTUM = MEMBERSHIP_PREFIX + "momentum"
VARYING = Cluster(
    compute=ComputeModel(distribution="log-normal", seconds=1.0, spread=0.4),
    link=LinkModel(latency=0.05, bandwidth=1e12),
)
GIVEN = {"rate": 0.3, "step": 1.2}
CURVATURE, RATE = 0.5, 0.1
Event = tuple[int, str, slice]
"""A learner, what it does, and with which piece of the weights."""
UNEQUAL = Stragglers(slow={1: 2.7})


def job(optimizer: Any = None, steps: int = 60, workload: Any = None, name: str = "a2cid2", **options: Any) -> Job:
    strategy = STRATEGIES[name]
    chosen = strategy.options.model_validate({"pattern": "ring"} | options)
    optimizer, workload = optimizer or sgd(0.1), workload or TinyRegression()
    return Job(workload, strategy, Budget(steps=steps), optimizer, options=chosen, seed=11)


def weights_of(states: Sequence[LearnerState]) -> Tensor:
    """`[P, L]`."""
    return torch.stack([state.weights for state in states], dim=1).double()


def momenta_of(states: Sequence[LearnerState]) -> Tensor:
    """y = x~ - x, `[P, L]`."""
    return torch.stack([state.strategy[MOMENTUM] for state in states], dim=1).double()


@dataclass
class Noted:
    """A learner that notes what its strategy does, in the order of all learners."""

    me: Any
    events: list[Event]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.me, name)

    def claim(self) -> bool:
        return self._note("claims", self.me.claim())

    def snapshot(self, piece: slice | None = None) -> Tensor:
        return self._note("begins" if piece is None else "sends", self.me.snapshot(piece), piece)

    def step(self, gradient: Tensor, **more: Any) -> None:
        self._note("steps", self.me.step(gradient, **more))

    def apply(self, delta: Tensor, piece: slice) -> None:
        self._note("averages", self.me.apply(delta, piece), piece)

    def _note(self, what: str, result: Any, piece: slice | None = None) -> Any:
        if result is not False:
            self.events.append((self.me.rank, what, piece or slice(None)))
        return result


def replayed(events: Sequence[Event], mixing: Matrix, rate: float, step: float, size: int) -> tuple[Matrix, Matrix]:
    """All x and all x~, from the events of the learners.

    Nabli et al. 2023, arXiv 2306.08289, Algorithm 1: both move by -gamma g in a step; in a communication x by -alpha
    (x_i - x_j) and x~ by -alpha~ (x_i - x_j), alpha = 1/2; and (x, x~) <- exp(t [[-eta, eta], [eta, -eta]]) (x, x~) in
    the time t between. Here t is 1 from one round to the next, and a round may have several neighbours.
    """
    learners, noise, claimed = len(mixing), NoisyQuadratic(size, CURVATURE), itertools.count()
    x, companion, begun = np.zeros((3, size, learners))
    tickets = [0] * learners
    sent: dict[tuple[int, int], list[Vector]] = defaultdict(list)  # by learner and piece
    rounds: Counter[tuple[int, int]] = Counter()
    for rank, what, piece in events:
        here, place = (piece, rank), (rank, piece.start)
        if what == "claims":
            tickets[rank] = next(claimed)
        elif what == "begins":
            begun[here] = x[here]
        elif what == "sends":
            sent[place].append(x[here].copy())
        elif what == "steps":
            drawn = noise.load(Ticket(0, tickets[rank], tickets[rank]))[0].inputs[0].double().numpy()
            change = -RATE * (CURVATURE * begun[here] + drawn)
            x[here] += change
            companion[here] += change
        else:
            mine, k = sent[place][rounds[place]], rounds[place]
            rounds[place] += 1
            peers = np.flatnonzero(mixing[:, rank])
            delta = sum(mixing[peer, rank] * (sent[peer, piece.start][k] - mine) for peer in peers)
            x[here] += delta
            companion[here] += 2.0 * step * delta
            mixed = 0.5 * (1.0 - np.exp(-2.0 * rate)) * (companion[here] - x[here])
            x[here] += mixed
            companion[here] -= mixed
    return x, companion


@pytest.mark.parametrize(
    ("acceleration", "more"), [("auto", {}), (GIVEN, {"period": 0.5}), (GIVEN, {"piece_megabytes": 1e-5})], ids=str
)
def test_weights_and_companions_follow_their_events(acceleration: Any, more: dict[str, Any]) -> None:
    """At unequal speeds, with both vectors in full, and each change where its event was."""
    learners, size, events = 5, 6, []

    async def noted(me: Learner, options: A2Cid2Options) -> None:
        await a2cid2(Noted(me, events), options)  # type: ignore[arg-type]

    strategy = Strategy("noted", "only in tests", noted, lambda options, world: 1, A2Cid2Options)
    mine = job(sgd(RATE), workload=NoisyQuadratic(size, CURVATURE), acceleration=acceleration, **more)
    outcome = VirtualEngine(replace(mine, strategy=strategy, stragglers=UNEQUAL), learners, VARYING).run()
    mixing = ring(learners).matrix(0)
    rate, step = acceleration_constants(mixing) if acceleration == "auto" else GIVEN.values()
    x, companion = replayed(events, mixing, rate, step, size)
    np.testing.assert_allclose(weights_of(outcome.states).numpy(), x, rtol=0.0, atol=1e-6)
    np.testing.assert_allclose(momenta_of(outcome.states).numpy(), companion - x, rtol=0.0, atol=1e-6)
    np.testing.assert_allclose(companion.mean(axis=1), x.mean(axis=1), rtol=0.0, atol=1e-12)
    assert np.abs(companion - x).max() > 0.01


@pytest.mark.parametrize("more", [{}, {"compression": "bfloat16"}, {"optimizer_state": "averaged"}], ids=str)
def test_the_mean_of_companions_is_that_of_the_weights_at_any_speeds(more: dict[str, Any]) -> None:
    """Every gradient is 1, so the mean of the weights counts the steps, and all momenta sum to 0."""
    mine = job(sgd(LEARNING_RATE), 120, ConstantGradient(64), acceleration=GIVEN, **more)
    states = VirtualEngine(replace(mine, stragglers=UNEQUAL), 6, VARYING).run().states
    mean, momenta = weights_of(states).mean(dim=1), momenta_of(states)
    expected = torch.full_like(mean, -LEARNING_RATE * 20)
    torch.testing.assert_close(mean, expected, rtol=2**-8 if "compression" in more else 1e-6, atol=0.0)
    torch.testing.assert_close(momenta.sum(dim=1), torch.zeros(64).double(), rtol=0.0, atol=1e-6)
    assert float(momenta.abs().max()) > 1e-3


@pytest.mark.parametrize("acceleration", [{"rate": 0.5, "step": 0.5}, {"rate": 1e-15, "step": 1.5}], ids=str)
def test_without_momentum_or_mixing_it_is_adpsgd(acceleration: dict[str, float]) -> None:
    """To the bit, and event by event; so it is with `auto` where all average with all."""
    found, plain = (
        VirtualEngine(job(adamw(0.01), **more), 4, VARYING).run()
        for more in ({"acceleration": acceleration}, {"name": "adpsgd"})
    )
    assert torch.equal(weights_of(found.states), weights_of(plain.states))
    assert found.event_hash == plain.event_hash


@pytest.mark.parametrize(("pattern", "learners"), [("complete", 5), ("ring", 3), ("ring", 2), ("ring", 1)])
def test_where_all_average_with_all_there_is_nothing_to_accelerate(pattern: str, learners: int) -> None:
    """`auto` keeps no momentum then, and is `adpsgd` to the bit."""
    found, plain = (
        VirtualEngine(job(name=name, pattern=pattern, steps=24), learners, VARYING).run()
        for name in ("a2cid2", "adpsgd")
    )
    assert found.event_hash == plain.event_hash and torch.equal(weights_of(found.states), weights_of(plain.states))
    assert not any(state.strategy for state in found.states)


class Saved(Observer):
    """The states at checkpoints, and the numbers of rounds and bytes of learner 0."""

    def __init__(self) -> None:
        self.states: dict[int, list[LearnerState]] = {}
        self.rounds = self.bytes = 0

    def on_barrier(self, state: LearnerState) -> None:
        self.states.setdefault(state.position.next_ticket.step, []).append(copy.deepcopy(state))

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        if report.rank == 0:
            self.rounds += report.averaging.rounds
            self.bytes += report.averaging.bytes_sent


EQUAL = Cluster(compute=ComputeModel(seconds=1.0), link=LinkModel(latency=0.01, bandwidth=1e12))


def test_a_resumed_run_continues_with_the_momentum_of_its_checkpoint() -> None:
    """Without gradients, from weights far apart, it follows the recursion from what was saved."""
    learners, whole, rest = 5, Saved(), Saved()
    mine = replace(job(sgd(0.0), 14 * learners, acceleration=GIVEN), checkpoint_every=4 * learners)
    noise = torch.Generator().manual_seed(5)
    first = [
        replace(state, position=Position(), epochs_ended=None, weights=torch.randn(29, generator=noise))
        for state in VirtualEngine(replace(mine, budget=Budget(steps=0)), learners).run().states
    ]
    VirtualEngine(mine, learners, EQUAL, whole, start=first).run()
    saved = sorted(whole.states[4 * learners], key=lambda state: state.rank)
    end = VirtualEngine(mine, learners, EQUAL, rest, start=saved).run().states
    x, momenta = weights_of(saved).numpy(), momenta_of(saved).numpy()
    assert rest.rounds > 8 and np.abs(momenta).max() > 0.1
    np.testing.assert_allclose(x.mean(axis=1), weights_of(first).mean(dim=1).numpy(), rtol=0.0, atol=1e-6)
    columns = np.concatenate([x, x + momenta], axis=1) @ np.linalg.matrix_power(
        one_round(ring(learners).matrix(0), **GIVEN).T, rest.rounds
    )
    np.testing.assert_allclose(weights_of(end).numpy(), columns[:, :learners], rtol=0.0, atol=2e-6)


def one_round(mixing: Matrix, rate: float, step: float) -> Matrix:
    """What a round makes of the x of all learners and their x~, one below the other, `[2 L, 2 L]`."""
    stays, nothing = np.eye(len(mixing)), np.zeros_like(mixing)
    averages = np.block([[mixing, nothing], [2.0 * step * (mixing - stays), stays]])
    mixes = torch.linalg.matrix_exp(rate * torch.tensor([[-1.0, 1.0], [1.0, -1.0]]).double()).numpy()
    product: Matrix = np.kron(mixes, stays) @ averages
    return product


def test_survivors_of_a_loss_begin_without_momentum() -> None:
    """The lost learner's part is missing, so what is left would move the mean."""
    mine = job(acceleration=GIVEN, steps=80)
    outcome = VirtualEngine(replace(mine, faults=(Kill(kill=2, at_step=6),)), 5, EQUAL).run()
    momenta = momenta_of(outcome.states)
    assert momenta.shape == (29, 4) and float(momenta.abs().max()) > 1e-4
    torch.testing.assert_close(momenta.sum(dim=1), torch.zeros(29).double(), rtol=0.0, atol=1e-6)


@pytest.mark.wide
@pytest.mark.parametrize("learners", [2, 3, 4])
@pytest.mark.parametrize("engine", ["on_virtual", "on_processes"])
def test_accelerated_learners_lose_no_update_and_train(
    learners: int, engine: str, request: pytest.FixtureRequest
) -> None:
    """Averaging beside the steps conserves the mean on both engines; and the mean of the models learns."""
    run: Runner = request.getfixturevalue(engine)
    counted = torch.stack(run("a2cid2/one-slow", learners)).double().mean(dim=0)
    expected = torch.full_like(counted, -LEARNING_RATE * 60 / learners)
    torch.testing.assert_close(counted, expected, rtol=1e-6, atol=0.0)
    start = torch.nn.utils.parameters_to_vector(TinyRegression().make_model().parameters()).detach()
    trained = torch.stack(run("a2cid2/descent", learners)).mean(dim=0)
    assert loss_at(trained) < 0.95 * loss_at(start)


@torch.no_grad()
def loss_at(weights: Tensor) -> float:
    """Of all mini-batches."""
    workload = TinyRegression()
    model = workload.make_model()
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    return sum(float(workload.loss(model, workload.load(Ticket(0, index, index))[0])) for index in range(12))


@pytest.mark.wide
def test_on_a_ring_of_sixteen_learners_stay_closer_together_under_noise() -> None:
    """After as many rounds, and by as much as the recursion without curvature says: a quarter."""

    def distance(name: str) -> float:
        saved = Saved()
        workload = NoisyQuadratic(256, CURVATURE)
        mine = job(sgd(0.05), 16 * 60, workload, name)
        states = VirtualEngine(mine, 16, EQUAL, saved).run().states
        assert saved.rounds == pytest.approx(60, abs=1)
        each = [state.weights for state in states]
        return consensus_distance(each, torch.stack(each).mean(dim=0))

    assert distance("a2cid2") == pytest.approx(0.76 * distance("adpsgd"), rel=0.1)


@pytest.mark.parametrize("learners", [4, 7, 16, 33])
def test_the_constants_of_a_ring_have_their_closed_form(learners: int) -> None:
    """Its slowest wave, and the resistance of one edge beside all the others in a row; each averages 2/3 times."""
    chi_1 = 1.0 / (2.0 * (1.0 - (1.0 + 2.0 * np.cos(2.0 * np.pi / learners)) / 3.0))
    chi_2 = 1.5 * (learners - 1) / learners / 2.0
    rate, step = acceleration_constants(ring(learners).matrix(0))
    assert rate == pytest.approx(1.0 / (2.0 * np.sqrt(chi_1 * chi_2)))
    assert step == pytest.approx(np.sqrt(chi_1 / chi_2) / 2.0)


@pytest.mark.parametrize("learners", [2, 4, 9, 64])
def test_the_accelerated_contraction_is_the_largest_eigenvalue_of_a_round(learners: int) -> None:
    """Of both vectors of all learners, apart from their means; with alpha~ = 1/2 and eta = 0, that of averaging."""
    for mixing in (ring(learners).matrix(0), lazy(complete_graph(learners)).matrix(0)):
        rate, step = acceleration_constants(mixing)
        apart = np.kron(np.eye(2), np.eye(learners) - 1.0 / learners)
        largest = np.abs(np.linalg.eigvals(apart @ one_round(mixing, rate, step))).max()
        assert accelerated_contraction(mixing, rate, step) == pytest.approx(largest**2, abs=1e-6)
        assert largest < 1.0
    assert accelerated_contraction(ring(1).matrix(0), 1.0, 0.5) == 0.0


def test_the_bytes_sent_are_those_of_adpsgd() -> None:
    """In a run as in a simulation of time alone."""
    watched = {name: Saved() for name in ("a2cid2", "adpsgd")}
    for name, saved in watched.items():
        mine = job(name=name)
        VirtualEngine(mine, 5, EQUAL, saved).run()
        timing = simulate_timing(mine.strategy, mine.options, 5, EQUAL, 4 * 29, 60)
        assert timing.learners[0].averaging.bytes_sent == saved.bytes == saved.rounds * 2 * 4 * 29
    assert watched["a2cid2"].bytes == watched["adpsgd"].bytes > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "random"}, "same neighbours in each round, in both directions, which pattern random does not"),
        ({"pattern": "exponential"}, "pattern exponential does not have, or does not declare .*; choose pattern ring"),
        ({"acceleration": {"rate": 0.4, "step": 3.5}}, "16 learners under pattern ring would move apart, by a factor"),
    ],
    ids=str,
)
def test_what_cannot_be_accelerated_is_refused(options: dict[str, Any], message: str) -> None:
    """With what to set instead."""
    with pytest.raises(ConfigError, match=message):
        STRATEGIES["a2cid2"].validate(A2Cid2Options.model_validate(options), 16)


@pytest.mark.parametrize(
    ("acceleration", "message"),
    [
        ({"rate": 0.0, "step": 1.0}, r"rate\n.*greater than 0"),
        ({"rate": 0.1, "step": 0.49}, r"step\n.*greater than or equal to 0.5"),
        ({"rate": 0.1}, r"step\n.*required"),
        ("fast", "'auto'"),
    ],
    ids=str,
)
def test_constants_out_of_bounds_are_refused(acceleration: Any, message: str) -> None:
    """By name, with the bound."""
    with pytest.raises(ValueError, match=message):
        A2Cid2Options(acceleration=acceleration)
