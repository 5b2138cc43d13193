"""How many copies of the weights the virtual engine keeps for each learner."""

import gc
from collections.abc import Iterator

import pytest
from torch import Tensor, nn

from starling.budget import Budget
from starling.engines.virtual.cluster import Cluster, ComputeModel
from starling.engines.virtual.engine import VirtualEngine
from starling.engines.virtual.simulation import Simulation
from starling.training.job import Job
from tests.contract.cases import CHOICES, adam
from tests.contract.problems import ConstantGradient

SIZE, LEARNERS = 50_000, 12
UNEQUAL = Cluster(compute=ComputeModel(distribution="uniform", seconds=0.1, spread=0.5))


def num_vectors() -> float:
    """How many vectors as long as the weights all large tensors of this process make."""
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(size for size in storages.values() if size >= SIZE) / (4 * SIZE)


@pytest.fixture
def only_what_is_new() -> Iterator[None]:
    """Let `gc.get_objects` leave out all that is there."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.wide
@pytest.mark.usefixtures("only_what_is_new")
@pytest.mark.parametrize("strategy", ["allreduce", "dpsgd-ring", "adpsgd-ring", "server-asynchronous"])
def test_a_learner_is_its_weights_two_moments_and_one_more_vector_at_rest(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under Adam; the one more is its gradient. While learners average, up to three more are under way: what a learner
    compares with, what it sends and what it received. Some vectors belong to the engine."""
    choice, steps = CHOICES[strategy], Budget(steps=4 * LEARNERS)
    job = Job(ConstantGradient(SIZE), choice.strategy, steps, adam(0.001), options=choice.options(LEARNERS))
    counts: list[float] = []
    record = Simulation.record

    def counting(self: Simulation, name: int, kind: str, detail: bytes) -> None:
        record(self, name, kind, detail)
        if self.num_events > 5 * LEARNERS and self.num_events % 7 == 0:  # all learners have made steps
            counts.append(num_vectors())

    monkeypatch.setattr(Simulation, "record", counting)
    engine = VirtualEngine(job, LEARNERS, UNEQUAL)
    engine.run()
    assert num_vectors() / LEARNERS < 4.5
    assert len(counts) >= 10
    assert max(counts) / LEARNERS < 7.0
