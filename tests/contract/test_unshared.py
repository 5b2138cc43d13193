"""The steps that would be lost with a learner, because no other learner has received them."""

from collections import defaultdict

import pytest

from starling.engines.virtual.engine import VirtualEngine
from starling.training.job import Observer, StepReport, Unshared
from tests.contract.cases import CHOICES, Case, plain, sgd
from tests.contract.test_async_local import CLUSTER

LONGEST = {"sparta": 24.0, "post-local-sgd": 4.0}
"""Steps after which a learner has surely sent each of its weights. By default it is 6, the longest period of these
cases, and what is computed while a fragment is under way. `sparta` sends a fifth of the weights with each step."""


def test_messages_with_parts_of_the_weights_share_these_parts_in_turn() -> None:
    unshared = Unshared()
    assert unshared.count == 0.0
    for _ in range(4):
        unshared.num_steps += 1
    assert unshared.count == 4.0
    unshared.send(0.25)
    assert unshared.count == 3.0
    for _ in range(2):
        unshared.num_steps += 1
    unshared.send(0.75)  # the other three quarters, which were sent never
    assert unshared.count == 0.25 * 2
    unshared.send(0.5)  # the quarter that was sent first, and a third of the others
    assert unshared.count == 0.0
    unshared.num_steps += 1
    unshared.send(1.0, num_ahead=1)
    unshared.num_steps += 1
    assert unshared.count == 0.0


class Counting(Observer):
    def __init__(self) -> None:
        self.counts = defaultdict[int, list[float | None]](list)

    def on_step(self, report: StepReport) -> None:
        self.counts[report.rank].append(None if report.unshared is None else report.unshared.count)


def counts(name: str, learners: int, steps: int = 96) -> Counting:
    counting = Counting()
    VirtualEngine(Case(CHOICES[name], plain, sgd(0.01), steps=steps).job(learners), learners, CLUSTER, counting).run()
    return counting


@pytest.mark.parametrize("name", CHOICES)
def test_under_every_strategy_a_learner_shares_its_steps(name: str) -> None:
    for rank, found in counts(name, 4).counts.items():
        known = [each for each in found if each is not None]
        assert (len(known) == 0) is CHOICES[name].strategy.has_one_model
        assert max(known, default=0.0) <= LONGEST.get(name, 6.0), (rank, known)


def test_under_diloco_the_count_is_that_of_local_steps() -> None:
    """A report precedes the step with the reported gradient."""
    assert set(map(tuple, counts("diloco", 3, 27).counts.values())) == {(0.0, 1.0, 2.0) * 3}


def test_a_learner_alone_shares_nothing() -> None:
    assert counts("adpsgd-random", 1, 5).counts[0] == [0.0, 1.0, 2.0, 3.0, 4.0]
