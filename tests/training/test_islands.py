"""How islands count learners, how models are cut, and what survives a torn island."""

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from starling.budget import Budget
from starling.checkpoint.cut import Cut
from starling.engines.processes.island import ELEMENTWISE, check_elementwise
from starling.errors import ConfigError, PeerLost
from starling.strategies import STRATEGIES, find_strategy
from starling.strategies.islands import Island, IslandStrategy, between_islands
from starling.training.job import Job
from starling.training.succession import MembershipStart, Past, plan_after
from starling.training.tensor_plan import modules_of, tensor_plan
from starling.training.tickets import DoneTickets, SyncGroupTickets
from starling.workload import Position
from tests.contract.cases import sgd
from tests.contract.problems import TinyRegression

TWO = Island(sharded=2)


def job(strategy: str = "allreduce", island: Island = TWO) -> Job:
    return Job(TinyRegression(), find_strategy(strategy), Budget(steps=100), sgd(0.1), island=island)


def test_ranks_claim_together_and_strategies_see_islands() -> None:
    adpsgd, allreduce = job("adpsgd"), job("allreduce")
    assert adpsgd.sync_groups(8).size == 2
    assert list(adpsgd.sync_groups(8).of(5)) == [4, 5]
    assert allreduce.sync_groups(8).size == 8
    for each, size in ((adpsgd, 1), (allreduce, 4)):
        assert between_islands(each.strategy, Island()).sync_groups(each.options, 8 // TWO.size).size == size


def test_an_island_is_lost_with_one_rank_and_joins_whole() -> None:
    strategy = between_islands(STRATEGIES["adpsgd"], TWO)
    options = strategy.options()
    assert strategy.successors(options, (0, 1, 2, 3, 4, 5), lost=[3]) == (0, 1, 4, 5)
    assert strategy.successors(options, (0, 1, 4, 5), lost=[], joined=[2, 3]) == (0, 1, 4, 5, 2, 3)
    with pytest.raises(ConfigError, match="5 learners cannot be divided into islands of 2"):
        strategy.successors(options, (0, 1, 4, 5), lost=[], joined=[7])


def test_the_ranks_of_a_tensor_island_claim_one_mini_batch_together() -> None:
    adpsgd = job("adpsgd", Island(tensor=2))
    assert adpsgd.sync_groups(8).size == 2
    tickets = SyncGroupTickets(adpsgd.workload, Position(), adpsgd.budget, 4, learners_per_ticket=2)
    assert [tickets.ticket(3, member).step for member in range(4)] == [6, 6, 7, 7]
    assert tickets.number_of(tickets.ticket(3, 2)) == 3
    assert tickets.num_before(3) == 6
    assert [ticket.step for ticket in tickets.position(5, undone=[3]).outstanding] == [6, 7]
    assert plan([Past(0, 5)] * 4, "allreduce", Island(tensor=2)).position.num_done == 3 * 5
    with pytest.raises(ConfigError, match="adpsgd with these options averages no gradients"):
        replace(adpsgd, weighting="utterances")


def test_a_model_says_how_it_is_cut() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel

    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    with pytest.raises(
        ConfigError, match="Sequential does not say which layers can be cut; give it a method tensor_plan"
    ):
        tensor_plan(model)
    model.tensor_plan = {"2": ColwiseParallel()}
    with pytest.raises(ConfigError, match="tensor_plan names 2, which Sequential does not have"):
        tensor_plan(model)
    model.tensor_plan = lambda: {"*": ColwiseParallel()}
    assert list(tensor_plan(model)) == ["*"]
    assert modules_of(model, "*") == list(model)


@pytest.mark.parametrize(
    ("dim", "num_uses", "message"),
    [(0, 2, "is shared by several modules"), (1, 1, "has 3 columns, which cannot be divided by 2")],
)
def test_a_parameter_that_cannot_be_cut_is_refused(dim: int, num_uses: int, message: str) -> None:
    from starling.engines.processes.tensor import _check

    _check("weight", torch.zeros(3, 3), 0, 1, 2)
    with pytest.raises(ConfigError, match=message):
        _check("weight", torch.zeros(3, 3), dim, num_uses, 2)


def test_a_job_with_islands_can_be_pickled_and_replaced() -> None:
    copied = pickle.loads(pickle.dumps(replace(job("adpsgd"), workload=None, make_optimizer=None)))  # noqa: S301
    assert isinstance(copied.strategy, IslandStrategy)
    assert copied.strategy.between is STRATEGIES["adpsgd"]
    assert copied.sync_groups(4).size == 2
    assert replace(job("adpsgd"), island=Island()).strategy is STRATEGIES["adpsgd"]
    assert replace(job("adpsgd"), island=Island(sharded=4)).sync_groups(8).size == 4


@pytest.mark.parametrize("last", [False, True])
@given(st.integers(1, 5), st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=4))
def test_a_model_is_whole_again(last: bool, size: int, shapes: list[list[int]]) -> None:
    """Its optimizer's state, too, in whatever order the optimizer has the parameters; whether it is divided along the
    first dimension or the last."""
    cut = Cut(size, tuple(map(tuple, shapes)), tuple(len(shape) - 1 for shape in shapes) if last else ())
    whole = torch.arange(1.0, 1.0 + sum(torch.Size(shape).numel() for shape in shapes))
    parts = [cut.part(whole, member) for member in range(size)]
    assert {len(part) for part in parts} == {cut.local_numbers}
    assert torch.equal(cut.whole(parts), whole)
    assert sum(float(part.sum()) for part in parts) == float(whole.sum())  # the padding is zero
    order = list(reversed(range(len(shapes))))
    state = {
        number: {"step": torch.tensor(3.0), "exp_avg": torch.rand(shapes[place])} for number, place in enumerate(order)
    }
    optimizers = [cut.part_of_optimizer({"state": state, "param_groups": []}, member, order) for member in range(size)]
    found = cut.whole_of_optimizer(optimizers, order)["state"]
    for number, values in state.items():
        assert torch.equal(found[number]["exp_avg"], values["exp_avg"])
        assert found[number]["step"] == 3.0


def plan(pasts: list[Past], strategy: str, island: Island = TWO) -> MembershipStart:
    before, all_done = MembershipStart(len(pasts) + 2, Position(), 0.0), DoneTickets(Position())
    for step in range(3):
        all_done.add(step)
    return plan_after(before, pasts, job(strategy, island), all_done=lambda: all_done)


def test_a_torn_island_copies_a_whole_one() -> None:
    """Learner 0 made a step that learner 1 had no time for: under `allreduce` its gradients are computed again."""
    pasts = [Past(0, 5), Past(0, 4), Past(0, 4), Past(0, 4)]
    found = plan(pasts, "allreduce")
    assert (found.source, found.takers) == (2, (0, 1))
    assert found.position.num_done == 4 * 6
    found = plan(pasts, "adpsgd")
    assert (found.source, found.takers) == (2, (0, 1))
    found = plan([Past(0, 5), Past(0, 5), Past(0, 4), Past(0, 4)], "allreduce")
    assert (found.source, found.takers) == (0, (2, 3))
    assert found.position.num_done == 5 * 6
    found = plan([Past(0, 5), Past(0, 5), Past(0, 4), Past(0, 4)], "adpsgd")
    assert found.takers == ()


def test_joiners_copy_the_first_island_that_has_a_state() -> None:
    found = plan([Past(0, 5), Past(0, 5), Past(), Past()], "adpsgd")
    assert (found.source, found.takers) == (0, (2, 3))


def test_nothing_is_left_if_all_islands_are_torn() -> None:
    with pytest.raises(PeerLost, match="no whole model is left; resume from the newest checkpoint"):
        plan([Past(0, 5), Past(0, 4), Past(), Past()], "adpsgd")


def test_optimizers_that_look_at_more_than_one_weight_are_refused() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    for name in ELEMENTWISE:
        check_elementwise(getattr(torch.optim, name)(parameters, lr=0.1))
    with pytest.raises(ConfigError, match="Adafactor does not treat each weight alone"):
        check_elementwise(torch.optim.Adafactor(parameters, lr=0.1))
