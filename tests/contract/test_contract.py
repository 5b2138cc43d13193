"""What every registered strategy must keep on both engines."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from starling.budget import Budget, Progress
from starling.engines.virtual.engine import VirtualEngine
from starling.strategies import STRATEGIES
from starling.topology import complete, find_topology
from starling.training.flat import trainable
from starling.training.job import Job
from starling.workload import Ticket
from tests.contract.cases import CHOICES, NOT_FINITE, NUM_FROZEN, PERIODIC, SHARED, cases, sgd
from tests.contract.conftest import DISTINCT, OF_REPLICAS, REPLICAS, Runner
from tests.contract.oracle import SYNCHRONOUS, gradient_of_regression
from tests.contract.problems import NoisyQuadratic, TinyRegression

every_strategy = pytest.mark.parametrize("strategy", CHOICES)
every_synchronous = pytest.mark.parametrize("strategy", SYNCHRONOUS)
FOLLOWS_THE_MEAN = [name for name in PERIODIC if "local" not in name]
"""Choices with an outer optimizer: their model is not the mean of what learners found."""
NO_CLOSED_FORM = [
    *FOLLOWS_THE_MEAN,
    *("dpsgd-int4", "gossip-pga", "dpsgd-quasi-global", "dpsgd-d2", "dpsgd-tracking", "sgp-overlap"),
]
"""The mixing of what is encoded is no matrix; the others remember earlier steps."""
ADAPT_FIRST = {"sgp": "exponential"}
"""Choices whose averaging also averages the step, with their patterns."""
every_engine = pytest.mark.parametrize("engine", ["on_virtual", "on_processes"])


on_every_replica = pytest.mark.parametrize(
    ("strategy", "engine"),
    [(strategy, "on_virtual") for strategy in CHOICES] + [(strategy, "on_processes") for strategy in REPLICAS],
)
every_engine_widely = pytest.mark.parametrize(
    "engine", ["on_virtual", pytest.param("on_processes", marks=pytest.mark.wide)]
)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainable(model)])


@every_engine
@every_strategy
@pytest.mark.parametrize("variant", ["sgd", "adam"])
def test_one_learner_is_plain_sgd_to_the_bit(
    strategy: str, engine: str, variant: str, request: pytest.FixtureRequest
) -> None:
    """With nobody to agree with, every strategy is the plain PyTorch loop."""
    run: Runner = request.getfixturevalue(engine)
    (weights,) = run(f"{strategy}/{variant}", 1)
    assert torch.equal(weights, in_the_plain_loop(variant))


@cache
def in_the_plain_loop(variant: str, device: torch.device | None = None) -> Tensor:
    """The last weights of a case with one learner, which is the same under all strategies; trained on `device`."""
    case = cases()[f"allreduce/{variant}"]
    job = case.job(1)
    model = job.workload.make_model().to(device)
    optimizer = job.make_optimizer(list(model.parameters()))
    peak = optimizer.param_groups[0]["lr"]
    for step in range(case.steps):
        (points,) = job.workload.load(Ticket(step // 12, step % 12, step))
        before, after = (Progress(done, 0.0, 0.0) for done in (step, step + 1))
        optimizer.param_groups[0]["lr"] = peak * job.schedule.at(before, Budget(steps=case.steps), after)
        optimizer.zero_grad()
        job.workload.loss(model, points.to(device)).backward()
        optimizer.step()
    return flat(model).cpu()


@on_every_replica
def test_a_parameter_without_a_gradient_is_left_alone_as_in_the_plain_loop(
    strategy: str, engine: str, request: pytest.FixtureRequest
) -> None:
    """Layers that a mini-batch leaves out have `grad` None, so that AdamW's decay does not move them. To the bit."""
    run: Runner = request.getfixturevalue(engine)
    (weights,) = run(f"{strategy}/unused", 1)
    assert torch.equal(weights, without_some_layers())


@cache
def without_some_layers() -> Tensor:
    """The last weights of the plain loop whose mini-batches leave out layers."""
    case = cases()["allreduce/unused"]
    job = case.job(1)
    model = job.workload.make_model()
    optimizer = job.make_optimizer(list(model.parameters()))
    num_unused = []
    for step in range(case.steps):
        optimizer.zero_grad()
        for points in (batch := job.workload.load(Ticket(step // 12, step % 12, step))):
            (job.workload.loss(model, points) / len(batch)).backward()
        num_unused.append(sum(parameter.grad is None for parameter in model.parameters()))
        optimizer.step()
    assert 0 in num_unused and max(num_unused) > 0  # else this shows nothing
    return flat(model)


@on_every_replica
def test_thawing_is_the_plain_loop_that_freezes_until_then(
    strategy: str, engine: str, request: pytest.FixtureRequest
) -> None:
    """Without gradient, decay or state of AdamW for half of the budget; then as if the layer were new. To the bit."""
    run: Runner = request.getfixturevalue(engine)
    (weights,) = run(f"{strategy}/thawed", 1)
    assert torch.equal(weights, frozen_until_the_middle())


@cache
def frozen_until_the_middle() -> Tensor:
    """The last weights of the plain loop that freezes the first layer for half of its steps."""
    case = cases()["allreduce/thawed"]
    job = case.job(1)
    model = job.workload.make_model()
    optimizer = job.make_optimizer(list(model.parameters()))
    start = flat(model)
    for step in range(case.steps):
        model[0].requires_grad_(step >= case.steps / 2)
        (points,) = job.workload.load(Ticket(step // 12, step % 12, step))
        optimizer.zero_grad()
        job.workload.loss(model, points).backward()
        optimizer.step()
        is_frozen = torch.equal(torch.cat([each.flatten() for each in model[0].parameters()]), start[:NUM_FROZEN])
        assert is_frozen == (step < case.steps / 2)
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@on_every_replica
def test_what_is_frozen_keeps_its_bits_with_two_learners(
    strategy: str, engine: str, request: pytest.FixtureRequest
) -> None:
    """Gradients, weights, servers or memory may be shared: nothing moves it, and all the rest is trained."""
    start = flat(TinyRegression().make_model())
    run: Runner = request.getfixturevalue(engine)
    for weights in run(f"{strategy}/frozen", 2):
        assert torch.equal(weights[:NUM_FROZEN], start[:NUM_FROZEN])
        assert not bool((weights[NUM_FROZEN:] == start[NUM_FROZEN:]).any())


@on_every_replica
def test_a_gradient_that_is_not_finite_is_a_mini_batch_that_the_plain_loop_leaves_out(
    strategy: str, engine: str, request: pytest.FixtureRequest
) -> None:
    """Under AdamW, whose decay and momentum would move the weights by themselves."""
    run: Runner = request.getfixturevalue(engine)
    (weights,) = run(f"{strategy}/not-finite", 1)
    assert torch.equal(weights, without_those_left_out())


@cache
def without_those_left_out() -> Tensor:
    """The last weights of the plain loop without the mini-batches whose gradient is not finite."""
    case = cases()["allreduce/not-finite"]
    job = case.job(1)
    model = job.workload.make_model()
    optimizer = job.make_optimizer(list(model.parameters()))
    left_out = {fault.at_step - 1 for fault in NOT_FINITE}
    for step in sorted(set(range(case.steps)) - left_out):
        (points,) = job.workload.load(Ticket(step // 12, step % 12, step))
        optimizer.zero_grad()
        job.workload.loss(model, points).backward()
        optimizer.step()
    return flat(model)


@every_engine
@every_strategy
@pytest.mark.parametrize("learners", [2, 3])
def test_a_learning_rate_of_zero_conserves_the_mean(
    strategy: str, engine: str, learners: int, request: pytest.FixtureRequest
) -> None:
    """Without steps there is only mixing, and mixing never moves the mean of the weights."""
    run: Runner = request.getfixturevalue(engine)
    weights = torch.stack(run(f"{strategy}/still", learners)).mean(dim=0)
    torch.testing.assert_close(weights, flat(TinyRegression().make_model()), rtol=0.0, atol=1e-6)


@every_engine
@every_synchronous
@pytest.mark.parametrize("learners", [2, 3])
def test_every_synchronous_strategy_follows_its_equation_in_matrix_form(
    strategy: str, engine: str, learners: int, request: pytest.FixtureRequest
) -> None:
    """The oracle is the equation in NumPy, in double precision, with gradients from autograd."""
    start = flat(TinyRegression().make_model()).double().numpy()
    expected = SYNCHRONOUS[strategy](start, gradient_of_regression(), 0.1, learners, 24 // learners)
    run: Runner = request.getfixturevalue(engine)
    measured = torch.stack(run(f"{strategy}/sgd", learners), dim=1).double().numpy()
    np.testing.assert_allclose(measured, expected, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize(
    ("strategy", "variant"),
    [
        *((strategy, variant) for variant in ("sgd", "adam", "same-data") for strategy in SYNCHRONOUS),
        *((each, variant) for variant in OF_REPLICAS[:-1] for each in REPLICAS if CHOICES[each].is_synchronous),
    ],
)
@pytest.mark.parametrize("learners", [2, 3])
def test_both_engines_agree(
    strategy: str, variant: str, learners: int, on_virtual: Runner, on_processes: Runner
) -> None:
    """Where the sums are ours the bits are the same; where a backend sums, to rounding."""
    virtual = torch.stack(on_virtual(f"{strategy}/{variant}", learners))
    real = torch.stack(on_processes(f"{strategy}/{variant}", learners))
    if strategy in SUMMED_BY_A_BACKEND:
        torch.testing.assert_close(real, virtual, rtol=0.0, atol=1e-6)
    else:
        assert torch.equal(real, virtual)


@pytest.mark.parametrize("learners", [2, 3])
@pytest.mark.parametrize("strategy", ["allreduce", "server-hybrid"])
def test_learners_that_weigh_their_mini_batches_agree_on_both_engines(
    strategy: str, learners: int, on_virtual: Runner, on_processes: Runner
) -> None:
    """Also where DDP reduces while backward runs."""
    virtual = torch.stack(on_virtual(f"{strategy}/weighted", learners))
    real = torch.stack(on_processes(f"{strategy}/weighted", learners))
    torch.testing.assert_close(real, virtual, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("learners", [2, 3])
@pytest.mark.parametrize("strategy", SHARED)
def test_batch_shares_give_the_same_on_both_engines(
    strategy: str, learners: int, on_virtual: Runner, on_processes: Runner
) -> None:
    """The first learner takes two mini-batches a step. Also where DDP reduces while backward runs, for a while too."""
    virtual = torch.stack(on_virtual(f"{strategy}/shares", learners))
    real = torch.stack(on_processes(f"{strategy}/shares", learners))
    torch.testing.assert_close(real, virtual, rtol=0.0, atol=1e-6)
    assert not torch.allclose(virtual[0], on_virtual(f"{strategy}/adam", learners)[0], atol=1e-4)


def test_measured_batch_shares_are_those_of_the_speeds_on_both_engines(
    on_virtual: Runner, on_processes: Runner
) -> None:
    """Learner 1 is 60 times slower, so that the other has the largest share, 16; only then is a step that of
    17 mini-batches."""
    virtual = torch.stack(on_virtual("allreduce/measured-shares", 2))
    torch.testing.assert_close(torch.stack(on_processes("allreduce/measured-shares", 2)), virtual, rtol=0.0, atol=1e-6)


def test_learners_several_claims_apart_agree_when_the_time_is_up(on_processes: Runner) -> None:
    """Until they agree on weights, a fast learner is up to H claims ahead of a slow one, which still gets the time of
    each claim."""
    first, second = on_processes("local-sgd/by-the-clock", 2)
    assert torch.equal(first, second)
    assert not torch.equal(first, flat(TinyRegression().make_model()))


SUMMED_BY_A_BACKEND = {"allreduce", "delayed", "post-local-sgd", "streaming-diloco"}


@pytest.mark.parametrize("learners", [2, 3])
def test_exchanges_give_the_same_bits_on_both_engines(learners: int, on_virtual: Runner, on_processes: Runner) -> None:
    """What two learners tell each other does not depend on the engine that carries it."""
    for variant in ("sgd", "adam", "accumulated"):
        virtual = torch.stack(on_virtual(f"exchanges/{variant}", learners))
        real = torch.stack(on_processes(f"exchanges/{variant}", learners))
        assert torch.equal(real, virtual)
        assert not torch.equal(virtual[0], virtual[1])


@every_engine_widely
@pytest.mark.parametrize("learners", [2, 3])
def test_identical_data_make_allreduce_plain_sgd(engine: str, learners: int, request: pytest.FixtureRequest) -> None:
    """The mean of equal gradients is the gradient: L learners go where one goes, with as many steps."""
    run: Runner = request.getfixturevalue(engine)
    together = run("allreduce/same-data", learners)
    single = Job(
        workload=TinyRegression(batches=12 // learners),
        strategy=STRATEGIES["allreduce"],
        budget=Budget(steps=24 // learners),
        make_optimizer=sgd(0.1),
    )
    (state,) = VirtualEngine(single, 1).run().states
    for weights in together:
        torch.testing.assert_close(weights, state.weights, rtol=0.0, atol=1e-6)


def test_every_synchronous_choice_has_an_oracle() -> None:
    """A new synchronous strategy cannot join the contract without its matrix form."""
    assert {name for name, choice in CHOICES.items() if choice.is_synchronous} == set(SYNCHRONOUS)


def test_every_coroutine_runs_on_processes_in_each_test_run() -> None:
    """A strategy with a coroutine of its own cannot be left to `make test-all`."""
    assert {CHOICES[name].strategy.run for name in DISTINCT} == {each.strategy.run for each in CHOICES.values()}
    assert set(REPLICAS) < set(DISTINCT)


@pytest.mark.parametrize("strategy", [name for name in SYNCHRONOUS if name not in NO_CLOSED_FORM])
def test_the_stationary_variance_is_the_closed_form(strategy: str) -> None:
    """On h/2 |w|^2 with gradient noise of variance 1, the mean over the modes beside the consensus is
    a^2 / (1 - E[(lambda - a h)^2]) of each, where mixing matrices change from step to step; the mean's has lambda 1."""
    learners, dimensions, a, h = 4, 20_000, 0.4, 0.5
    job = Job(
        workload=NoisyQuadratic(dimensions, h),
        strategy=CHOICES[strategy].strategy,
        options=CHOICES[strategy].options(learners),
        budget=Budget(steps=60 * learners),
        make_optimizer=sgd(a),
    )
    weights = torch.stack([state.weights for state in VirtualEngine(job, learners).run().states]).double()
    mean = weights.mean(dim=0)
    of_mean = learners * float((mean**2).mean())
    of_rest = float(((weights - mean) ** 2).sum(dim=0).mean()) / (learners - 1)
    expected = _variance_under_delay(2, a, h) if strategy == "delayed" else a * a / (1 - (1 - a * h) ** 2)
    assert of_mean == pytest.approx(expected, rel=5 * (2 / dimensions) ** 0.5)
    is_one_model = strategy.startswith("allreduce") or strategy in ("delayed", "server-hybrid", *PERIODIC)
    expected_of_rest = 0.0 if is_one_model else _variance_beside_the_mean(strategy, learners, a, h)
    assert of_rest == pytest.approx(expected_of_rest, rel=0.03, abs=1e-12)


def _variance_under_delay(delay: int, a: float, h: float) -> float:
    """a^2 times the sum of squares of w_{k+1} = w_k - a h w_{k-d}, w_0 = 1: what becomes of each gradient's noise."""
    response = [0.0] * delay + [1.0]
    for _ in range(60):
        response.append(response[-1] - a * h * response[-1 - delay])
    return a * a * float(np.square(response[delay:]).sum())


def _variance_beside_the_mean(strategy: str, learners: int, a: float, h: float) -> float:
    """The covariance recursion C <- (T - a h)^T C (T - a h) + a^2 in NumPy, over the very matrices of the run; where
    the step is averaged, too, C <- T^T ((1 - a h)^2 C + a^2) T."""
    pattern = ADAPT_FIRST.get(strategy) or (strategy.removeprefix("dpsgd-") if "dpsgd" in strategy else None)
    topology = find_topology(pattern, learners, seed=0) if pattern else None
    covariance = np.zeros((learners, learners))
    for k in range(60):
        mixing = complete(learners) if topology is None else topology.matrix(k)
        if strategy in ADAPT_FIRST:
            covariance = mixing.T @ ((1 - a * h) ** 2 * covariance + a * a * np.eye(learners)) @ mixing
            continue
        step = mixing - a * h * np.eye(learners)
        covariance = step.T @ covariance @ step + a * a * np.eye(learners)
    beside = np.eye(learners) - complete(learners)
    return float(np.trace(beside @ covariance @ beside)) / (learners - 1)
