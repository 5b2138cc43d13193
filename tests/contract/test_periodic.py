"""What strategies keep that agree every few steps: special cases, and other texts of their equations."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from starling.budget import Budget
from starling.checkpoint.state import LearnerState
from starling.configuration import Config
from starling.engines.virtual.engine import Outcome, VirtualEngine
from starling.errors import ConfigError
from starling.learner import Learner
from starling.strategies import STRATEGIES
from starling.strategies.parts.means import TopK
from starling.training.job import EpochReport, Job, Observer
from starling.workload import Ticket
from tests.contract.cases import MakeOptimizer, adamw, sgd
from tests.contract.matrix_form import Vector, columns
from tests.contract.oracle import gradient_of_regression
from tests.contract.oracle_periodic import periodic
from tests.contract.problems import TinyRegression
from tests.contract.test_contract import flat

LEARNERS, STEPS = 3, 36
"""Twelve steps of each learner."""


PLAIN = sgd(0.1)


def trained(name: str, optimizer: MakeOptimizer = PLAIN, learners: int = LEARNERS, **options: Any) -> Tensor:
    """The consensus after a run on the virtual engine."""
    strategy = STRATEGIES[name]
    job = Job(TinyRegression(), strategy, Budget(steps=STEPS), optimizer, options=strategy.options(**options), seed=11)
    weights = [state.weights for state in VirtualEngine(job, learners).run().states]
    return torch.stack(weights).double().mean(dim=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bmuf", {"momentum": 0.0, "rate": 1.0, "warm_up": 0}),
        ("bmuf", {"momentum": 0.0, "rate": 1.0, "warm_up": 0, "nesterov": False}),
        ("slowmo", {"momentum": 0.0}),
        ("diloco", {"momentum": 0.0, "rate": 1.0}),
        ("streaming-diloco", {"momentum": 0.0, "rate": 1.0, "fragments": 1, "overlap": 0, "blend": 0.0}),
    ],
)
@pytest.mark.parametrize("optimizer", [sgd(0.1), adamw(0.01)], ids=["sgd", "adamw"])
def test_without_an_outer_momentum_and_with_an_outer_rate_of_1_all_are_local_sgd(
    name: str, options: dict[str, Any], optimizer: MakeOptimizer
) -> None:
    """To rounding where D is divided by the rate, else to the bit."""
    expected = trained("local-sgd", optimizer, every=4)
    assert torch.allclose(trained(name, optimizer, every=4, **options), expected, rtol=0.0, atol=1e-6)
    if name != "slowmo":
        assert torch.equal(trained(name, optimizer, every=4, **options), expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("local-sgd", {}),
        ("post-local-sgd", {"warm_up": 5}),
        ("bmuf", {"momentum": 0.0, "warm_up": 0}),
        ("slowmo", {"momentum": 0.0}),
        ("diloco", {"momentum": 0.0, "rate": 1.0}),
        ("streaming-diloco", {"momentum": 0.0, "rate": 1.0, "fragments": 1, "overlap": 0, "blend": 0.0}),
        ("sparta", {"share": 1.0}),
    ],
)
def test_agreeing_after_every_step_of_plain_sgd_is_allreduce(name: str, options: dict[str, Any]) -> None:
    """H = 1, and an outer optimizer of rate 1 without momentum."""
    found = trained(name, every=1, **options)
    torch.testing.assert_close(found, trained("allreduce"), rtol=0.0, atol=1e-6)


def test_a_warm_up_as_long_as_the_run_is_allreduce() -> None:
    """To the bit: both take the mean gradient."""
    assert torch.equal(trained("post-local-sgd", adamw(0.01), warm_up=STEPS), trained("allreduce", adamw(0.01)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("local-sgd", {"every": 1}),
        ("bmuf", {"every": 3, "warm_up": 2}),
        ("post-local-sgd", {"every": 4, "warm_up": 3}),
        ("slowmo", {"every": 5, "rate": 0.8, "momentum": 0.3}),
        ("diloco", {"every": 20}),
        ("streaming-diloco", {"every": 4, "fragments": 2, "overlap": 1}),
        ("streaming-diloco", {"every": 4, "fragments": 4, "overlap": 1, "blend": 0.0}),
        ("streaming-diloco", {"every": 5, "fragments": 2, "overlap": 0, "blend": 0.25}),
        ("noloco", {"every": 2, "pull": 0.3}),
        ("noloco", {"every": 5}),
        ("easgd", {"every": 5, "rate": 0.5}),
        ("easgd", {"every": 1}),
        ("sparta", {"every": 5, "share": 0.3}),
        ("sparseloco", {"every": 5, "rate": 0.8, "compression": TopK(top_k=0.1)}),
    ],
)
def test_options_that_the_contract_leaves_out_follow_the_equation(name: str, options: dict[str, Any]) -> None:
    """In matrix form, as those of the contract."""
    oracle = periodic(name, STRATEGIES[name].options(**options))
    start = flat(TinyRegression().make_model()).double().numpy()
    expected = oracle(start, gradient_of_regression(), 0.1, LEARNERS, STEPS // LEARNERS)
    np.testing.assert_allclose(trained(name, **options).numpy(), expected.mean(axis=1), rtol=0.0, atol=2e-6)


def local_run(every: int, start: Vector) -> Any:
    """Yields the mean of the learners' weights after each period; is sent what they continue from."""
    gradient, weights = gradient_of_regression(), np.tile(start[:, None], (1, LEARNERS))
    for k in range(STEPS // LEARNERS):
        weights = weights - 0.1 * columns(weights, gradient, k)
        if (k + 1) % every == 0:
            weights = np.tile((yield weights.mean(axis=1))[:, None], (1, LEARNERS))


def test_the_outer_step_of_diloco_is_that_of_torchs_sgd_with_nesterov() -> None:
    """The second implementation is torch's optimizer, with D for a gradient."""
    theta = torch.nn.Parameter(flat(TinyRegression().make_model()).double())
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
    periods = local_run(4, theta.detach().numpy().copy())
    mean = next(periods)
    for _ in range(STEPS // LEARNERS // 4):
        theta.grad = theta.detach() - torch.from_numpy(mean)
        outer.step()
        try:
            mean = periods.send(theta.detach().numpy().copy())
        except StopIteration:
            break
    torch.testing.assert_close(trained("diloco", every=4), theta.detach(), rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_bmuf_is_the_papers_recursion(nesterov: bool) -> None:
    """G = mean - W_g; Delta <- eta Delta + zeta G; W <- W + Delta; learners continue from W_g, which is W, or
    W + eta Delta with Nesterov's momentum (Chen & Huo 2016)."""
    eta, zeta = 1 - 1 / LEARNERS, 1.0
    w = flat(TinyRegression().make_model()).double().numpy()
    w_g, delta = w.copy(), np.zeros_like(w)
    periods = local_run(3, w_g)
    mean = next(periods)
    for _ in range(STEPS // LEARNERS // 3):
        delta = eta * delta + zeta * (mean - w_g)
        w = w + delta
        w_g = w + eta * delta if nesterov else w
        try:
            mean = periods.send(w_g)
        except StopIteration:
            break
    found = trained("bmuf", every=3, warm_up=0, nesterov=nesterov)
    torch.testing.assert_close(found, torch.from_numpy(w_g), rtol=0.0, atol=2e-6)


class Sent(Observer):
    """The bytes that each learner has sent."""

    def __init__(self) -> None:
        self.by_rank: dict[int, int] = {}

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self.by_rank[report.rank] = self.by_rank.get(report.rank, 0) + report.averaging.bytes_sent


@pytest.mark.parametrize(
    ("name", "options", "agreements"),
    [
        ("local-sgd", {"every": 4}, 3),
        ("local-sgd", {"every": 5}, 3),
        ("diloco", {"every": 6}, 2),
        ("post-local-sgd", {"every": 6, "warm_up": 6}, 6 + 1 + 1),
        ("streaming-diloco", {"every": 4, "fragments": 2, "overlap": 1, "blend": 0.0}, 3 + 1),
    ],
)
def test_the_bytes_sent_are_those_of_the_formula(name: str, options: dict[str, Any], agreements: int) -> None:
    """2 (L - 1) / L x 4 P for each agreement about all weights; the last period has one of its own, and so has the end
    of a warm-up."""
    strategy, sent = STRATEGIES[name], Sent()
    job = Job(TinyRegression(), strategy, Budget(steps=STEPS), sgd(0.1), options=strategy.options(**options), seed=11)
    outcome: Outcome = VirtualEngine(job, LEARNERS, observer=sent).run()
    size = 4 * len(outcome.states[0].weights)
    expected = agreements * 2 * (LEARNERS - 1) * size / LEARNERS
    assert all(abs(each - expected) <= agreements * LEARNERS for each in sent.by_rank.values())
    assert len(sent.by_rank) == LEARNERS


def test_two_learners_that_agree_in_pairs_agree_among_all() -> None:
    """With gamma = eta, NoLoCo is SlowMo; to rounding, as each pair sums for itself."""
    expected = trained("slowmo", adamw(0.01), learners=2, every=4, rate=0.7, momentum=0.5)
    found = trained("noloco", adamw(0.01), learners=2, every=4)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(("options", "vectors"), [({}, 1), ({"pull": 0.7}, 1), ({"pull": 0.5}, 2)])
def test_a_pair_sends_its_weights_and_theta_only_if_it_must(options: dict[str, float], vectors: int) -> None:
    """4 P, or 8 P, for each agreement; the last period has one of its own."""
    strategy, sent = STRATEGIES["noloco"], Sent()
    chosen = strategy.options(every=4, **options)
    VirtualEngine(Job(TinyRegression(), strategy, Budget(steps=40), sgd(0.1), options=chosen), 4, observer=sent).run()
    assert sent.by_rank == dict.fromkeys(range(4), 3 * vectors * 4 * 29)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 2, "fragments": 3}, "3 fragments cannot agree in turn within 2 steps"),
        (
            {"every": 8, "fragments": 4, "overlap": 3},
            "still be averaged after 3 steps when the next one begins, 2 steps",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, int], message: str) -> None:
    """With what to set instead."""
    strategy = STRATEGIES["streaming-diloco"]
    with pytest.raises(ConfigError, match=message):
        strategy.validate(strategy.options(**{"overlap": 0} | options), 2)


def test_easgd_is_the_papers_recursion() -> None:
    """x' = x - a g(x) - r (x - c), c' = c + r sum (x - c), from the same x and c. So learners and centre together move
    by the gradients alone."""
    gradient, r = gradient_of_regression(), 0.9 / LEARNERS
    c = flat(TinyRegression().make_model()).double().numpy()
    start, moved = (LEARNERS + 1) * c, np.zeros_like(c)
    x = np.tile(c[:, None], (1, LEARNERS))
    for k in range(STEPS // LEARNERS):
        step = -0.1 * columns(x, gradient, k)
        moved += step.sum(axis=1)
        x, c = x + step - r * (x - c[:, None]), c + r * (x - c[:, None]).sum(axis=1)
        np.testing.assert_allclose(x.sum(axis=1) + c, start + moved, rtol=0.0, atol=1e-12)
    for _ in range(2):  # what is under way at the end, and the agreement that ends the run
        x, c = x - r * (x - c[:, None]), c + r * (x - c[:, None]).sum(axis=1)
    np.testing.assert_allclose(trained("easgd", every=1).numpy(), c, rtol=0.0, atol=2e-6)


def test_easgd_without_elasticity_is_learners_alone() -> None:
    """r near 0: each learner's weights are those of its own mini-batches, to the bit, until all take the centre."""
    before: dict[int, Tensor] = {}

    async def watched(me: Learner, chosen: Config) -> None:
        step = me.step

        def noted(gradient: Tensor, read_at: int | None = None, scale: float = 1.0) -> None:
            step(gradient, read_at, scale)
            before[me.rank] = me.weights.clone()

        me.step = noted  # type: ignore[method-assign]
        await easgd.run(me, chosen)

    easgd = STRATEGIES["easgd"]
    strategy, options = replace(easgd, run=watched), easgd.options(every=2, rate=1e-30)
    VirtualEngine(Job(TinyRegression(), strategy, Budget(steps=STEPS), PLAIN, options=options, seed=11), LEARNERS).run()
    for rank, weights in before.items():
        network = TinyRegression().make_model()
        optimizer = PLAIN(list(network.parameters()))
        for number in range(rank, STEPS, LEARNERS):
            (points,) = TinyRegression().load(Ticket(number // 12, number % 12, number))
            optimizer.zero_grad()
            TinyRegression().loss(network, points).backward()
            optimizer.step()
        assert torch.equal(weights, flat(network))


def test_sparta_with_all_weights_is_local_sgd_after_every_step() -> None:
    """And a small share moves learners together, with the bytes of that share."""
    assert torch.equal(trained("sparta", share=1.0), trained("local-sgd", every=1))
    strategy, sent = STRATEGIES["sparta"], Sent()
    job = Job(TinyRegression(), strategy, Budget(steps=STEPS), PLAIN, options=strategy.options(share=0.1), seed=11)
    VirtualEngine(job, LEARNERS, observer=sent).run()
    rounds, k, size = STEPS // LEARNERS, 3, 29
    expected = 2 * (LEARNERS - 1) * 4 * (rounds * k + size) / LEARNERS
    assert all(abs(each - expected) <= rounds + 1 for each in sent.by_rank.values())


def test_every_weight_agrees_sooner_or_later() -> None:
    """Places differ from step to step; each step has k of them, and none is left out for long. At the end all agree."""
    changed: list[Tensor] = []

    async def watched(me: Learner, chosen: Config) -> None:
        take = me.replace

        def noted(weights: Tensor, piece: slice | None = None) -> None:
            if me.rank == 0 and piece is None:
                changed.append(weights != me.weights)
            take(weights, piece)

        me.replace = noted  # type: ignore[method-assign]
        await sparta.run(me, chosen)

    sparta = STRATEGIES["sparta"]
    strategy, options = replace(sparta, run=watched), sparta.options(share=0.25)
    VirtualEngine(Job(TinyRegression(), strategy, Budget(steps=120), PLAIN, options=options, seed=11), 2).run()
    *of_steps, at_the_end = changed
    assert [int(each.sum()) for each in of_steps] == [7] * 60
    assert bool(torch.stack(of_steps).any(dim=0).all())
    assert torch.equal(at_the_end, ~of_steps[-1])


@pytest.mark.parametrize("feedback", [0.0, 0.5, 1.0])
def test_an_error_that_is_fed_back_in_part_is_forgotten_in_part(feedback: float) -> None:
    """SparseLoCo's feedback is the momentum of its errors."""
    strategy = STRATEGIES["sparseloco"]
    options = strategy.options(every=2, compression=TopK(top_k=0.1, bits=2), feedback=feedback)
    job = Job(TinyRegression(), strategy, Budget(steps=STEPS), PLAIN, options=options, seed=11)
    start = flat(TinyRegression().make_model()).double().numpy()
    expected = periodic("sparseloco", options)(start, gradient_of_regression(), 0.1, LEARNERS, STEPS // LEARNERS)
    for rank, state in enumerate(VirtualEngine(job, LEARNERS).run().states):
        np.testing.assert_allclose(state.weights.numpy(), expected[:, rank], rtol=0.0, atol=2e-6)


def test_learners_move_in_the_union_of_the_places_that_they_send() -> None:
    """The mean of sparse messages is not made sparse again: with top_k 0.1, 3 of 29 weights of each learner."""
    options = {"every": STEPS // LEARNERS, "compression": TopK(top_k=0.1)}
    moved = trained("sparseloco", **options) != flat(TinyRegression().make_model()).double()
    alone = [local_changes(rank, STEPS // LEARNERS).abs().topk(3).indices.tolist() for rank in range(LEARNERS)]
    assert moved.nonzero()[:, 0].tolist() == sorted({place for each in alone for place in each})
    assert int(moved.sum()) > 3  # else this shows nothing


def local_changes(rank: int, steps: int) -> Tensor:
    """By how much a learner moves alone."""
    start = flat(TinyRegression().make_model()).double().numpy()
    gradient, x = gradient_of_regression(), start
    for k in range(steps):
        x = x - 0.1 * gradient(x, k * LEARNERS + rank)
    return torch.from_numpy(x - start)
