"""Averaging rounds: how far a learner may be ahead of its own."""

import threading
from collections import Counter

import pytest
import simpy
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from starling.budget import Budget
from starling.engines.processes.tickets import ProcessRounds, StoreBoard
from starling.engines.virtual.cluster import Cluster, ComputeModel, LinkModel
from starling.engines.virtual.engine import VirtualEngine
from starling.engines.virtual.learner import VirtualLearner
from starling.engines.virtual.membership import VirtualRounds
from starling.strategies import STRATEGIES
from starling.strategies.adpsgd import AsynchronousOptions
from starling.training.job import Job
from starling.training.pace import ENOUGH_GRADIENTS, Rounds
from tests.contract.cases import sgd
from tests.contract.problems import TinyRegression

SLOW_LINK = Cluster(
    compute=ComputeModel(distribution="uniform", seconds=1.0, spread=0.3), link=LinkModel(latency=20.0, bandwidth=1e9)
)
"""A message takes twenty times as long as a gradient."""
STEPS = 240


def run_on_slow_link(monkeypatch: pytest.MonkeyPatch, options: AsynchronousOptions) -> tuple[float, int]:
    """Rounds per gradient of all learners, and the most gradients that one made after completing a round."""
    ahead: Counter[int] = Counter()
    most = 0
    gradients = rounds = 0
    own_step, own_round = VirtualLearner.step, VirtualLearner.round

    def step(self: VirtualLearner, gradient: Tensor, read_at: int | None = None, scale: float = 1.0) -> None:
        nonlocal most, gradients
        gradients += 1
        ahead[self.rank] += 1
        most = max(most, ahead[self.rank])
        own_step(self, gradient, read_at, scale)

    def begin_round(self: VirtualLearner, period: float) -> object:
        nonlocal rounds
        rounds += 1
        ahead[self.rank] = 0
        return own_round(self, period)

    monkeypatch.setattr(VirtualLearner, "step", step)
    monkeypatch.setattr(VirtualLearner, "round", begin_round)
    job = Job(TinyRegression(), STRATEGIES["adpsgd"], Budget(steps=STEPS), sgd(0.01), options=options)
    VirtualEngine(job, 4, SLOW_LINK).run()
    return rounds / gradients, most


@pytest.mark.parametrize(("options", "bound"), [({}, 2), ({"period": 4.0}, 8), ({"max_lag": 5.0}, 5)])
def test_a_learner_is_never_further_ahead_of_its_own_rounds_than_the_bound(
    options: dict[str, float], bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow link makes gradients wait for their learner's own background, and rounds keep their pace."""
    per_gradient, most = run_on_slow_link(
        monkeypatch, AsynchronousOptions.model_validate({"pattern": "pairs", **options})
    )
    assert most == bound
    assert per_gradient >= 1.0 / bound


def test_without_a_tight_bound_a_slow_link_means_training_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bound is for: the same run hardly averages when it is as good as none."""
    per_gradient, _ = run_on_slow_link(monkeypatch, AsynchronousOptions(pattern="pairs", max_lag=1000.0))
    assert per_gradient < 0.1


def test_a_pace_far_below_its_period_is_complained_of_with_the_remedy() -> None:
    """Not after a few gradients, and not at half of the pace, which the default bound allows."""
    rounds = Rounds(VirtualRounds(simpy.Environment(), 1))
    for gradient in range(10 * ENOUGH_GRADIENTS):
        rounds.gradient_made()
        if gradient % 2 == 0:
            rounds.enter(gradient // 2, True)
        if gradient < ENOUGH_GRADIENTS - 1:
            assert rounds.complaint() is None
    assert rounds.complaint() is None
    for _ in range(10 * ENOUGH_GRADIENTS):
        rounds.gradient_made()
    complaint = rounds.complaint()
    assert complaint is not None
    assert "0.25 averaging rounds per gradient" in complaint
    assert "max_lag" in complaint


def test_a_background_that_opens_a_round_need_not_ask_whether_it_is_open() -> None:
    """One round trip to the store, not two; after the end the answer is that the round never opens."""

    class Counting(StoreBoard):
        num_asked = 0

        def await_open(self, number: int) -> bool:
            self.num_asked += 1
            return super().await_open(number)

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board, other = Counting(store, 0, 2), StoreBoard(store, 1, 2)
    rounds = ProcessRounds(board)
    rounds.gradient_made()
    assert rounds.next(1.0) == 0
    assert other.await_open(0)
    assert board.num_asked == 0
    rounds.gradient_made()
    rounds.gradient_made()
    for each in (board, other):
        each.finish(1)
    assert rounds.next(1.0) is None
    assert board.num_asked == 0


def test_who_waits_for_its_own_round_is_woken_by_its_completion() -> None:
    """On the store of real processes: two gradients open a round and wait, until the background asks for the next."""
    rounds = ProcessRounds(StoreBoard(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), 0, 1))
    entered, complete = threading.Event(), threading.Event()

    def background() -> None:
        while rounds.next(1.0) is not None:
            entered.set()
            complete.wait()

    thread = threading.Thread(target=background, daemon=True)
    thread.start()
    rounds.gradient_made()
    assert entered.wait(timeout=30.0)
    rounds.gradient_made()
    kept_up = threading.Event()
    assert not rounds.keeps_up(2.0, kept_up.set)
    assert not kept_up.is_set()
    complete.set()
    assert kept_up.wait(timeout=30.0)
    rounds.finish()
    thread.join(timeout=30.0)
    assert not thread.is_alive()
