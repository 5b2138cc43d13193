"""A model, a loss and data make a workload: each example counts once an epoch; every process loads the same."""

import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from starling.budget import Budget
from starling.engines.virtual.engine import VirtualEngine
from starling.errors import ConfigError, DataError
from starling.strategies import STRATEGIES
from starling.training.data import Batch, DataWorkload
from starling.training.job import ClaimReport, Job, Observer
from starling.workload import Ticket


def make_model() -> nn.Module:
    return nn.Linear(3, 2)


def loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


class Squares:
    """A map-style dataset."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return torch.full((3,), float(place)), place % 2


class Counting(IterableDataset[tuple[Tensor, int]]):
    """An iterable that counts how often it begins, and shifts its examples by the epoch."""

    def __init__(self) -> None:
        self.begun, self.epoch = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        self.begun += 1
        for place in range(10):
            yield torch.full((3,), float(100 * self.epoch + place)), place % 2


def batch_of(ticket: Ticket) -> dict[str, Tensor]:
    return {"x": torch.full((4, 3), float(ticket.index)), "y": torch.zeros(4, dtype=torch.int64)}


def places(batch: Batch) -> list[float]:
    return [float(each) for each in batch.content[0][:, 0]]


def test_an_epoch_of_a_dataset_is_each_example_once_in_an_order_of_its_own() -> None:
    workload = DataWorkload(make_model, loss, Squares(), batch_size=4)
    assert workload.num_batches(0) == 3
    epochs = [
        [place for index in range(3) for place in places(workload.load(Ticket(epoch, index, 0))[0])] for epoch in (0, 1)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    (last,) = workload.load(Ticket(0, 2, 2))
    assert (last.num_examples, len(last.ids)) == (2, 2)
    assert workload.planned_size(Ticket(0, 2, 2), "utterances") == 2.0


def test_a_copy_in_another_process_makes_the_same_model_and_loads_the_same() -> None:
    workload = DataWorkload(make_model, loss, Squares(), batch_size=4, seed=5)
    workload.load(Ticket(3, 1, 0))
    copied = pickle.loads(pickle.dumps(workload))  # noqa: S301 - what was just written
    assert places(copied.load(Ticket(3, 1, 0))[0]) == places(workload.load(Ticket(3, 1, 0))[0])
    before = torch.random.get_rng_state()
    mine, theirs = workload.make_model(), copied.make_model()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(*pair) for pair in zip(mine.parameters(), theirs.parameters(), strict=True))


def test_an_iterable_is_restarted_only_for_earlier_items() -> None:
    data = Counting()
    workload = DataWorkload(make_model, loss, data, batch_size=3, num_batches=4)
    read = [places(workload.load(Ticket(0, index, 0))[0]) for index in (0, 2, 3)]
    assert read == [[0, 1, 2], [6, 7, 8], [9]]
    assert data.begun == 1
    assert places(workload.load(Ticket(0, 1, 0))[0]) == [3, 4, 5]
    assert places(workload.load(Ticket(1, 0, 0))[0]) == [100, 101, 102]
    assert data.begun == 3
    assert pickle.loads(pickle.dumps(workload)).num_batches(0) == 4  # noqa: S301 - what was just written


def test_an_iterable_shorter_than_promised_is_an_error_with_the_numbers() -> None:
    workload = DataWorkload(make_model, loss, Counting(), batch_size=3, num_batches=5)
    with pytest.raises(
        DataError, match=r"before mini-batch 5 of epoch 1; it has fewer than num_batches=5 mini-batches of 3 examples"
    ):
        workload.load(Ticket(0, 4, 4))


def test_a_function_of_a_ticket_makes_whole_mini_batches() -> None:
    workload = DataWorkload(make_model, loss, batch_of, num_batches=2)
    (batch,) = workload.load(Ticket(0, 1, 1))
    assert batch.num_examples == 4
    assert batch.to(torch.device("cpu")).content["x"].eq(1.0).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": Squares()}, "batch_size: a dataset needs batch_size"),
        ({"data": Squares(), "batch_size": 0}, "batch_size: 0 is not at least 1"),
        ({"data": Squares(), "batch_size": 2, "num_batches": 3}, "num_batches: for a map-style dataset it follows"),
        ({"data": Counting(), "batch_size": 2}, "num_batches: None; give the number"),
        ({"data": batch_of, "batch_size": 2, "num_batches": 1}, "batch_size: a function of a ticket makes whole"),
        ({"data": 3}, "data: a int is not a dataset, an iterable or a function"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataWorkload(make_model, loss, **given)


class Seen(Observer):
    """An observer that counts the examples of every epoch."""

    def __init__(self) -> None:
        self.examples: Counter[tuple[int, str]] = Counter()

    def on_claim(self, report: ClaimReport) -> None:
        self.examples.update((report.ticket.epoch, name) for name in report.ids)


@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce"])
def test_learners_see_every_example_once_an_epoch(strategy: str) -> None:
    seen = Seen()
    job = Job(
        DataWorkload(make_model, loss, Squares(), batch_size=1),
        STRATEGIES[strategy],
        Budget(epochs=2),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
    VirtualEngine(job, 5 if strategy == "allreduce" else 3, observer=seen).run()
    assert seen.examples == Counter({(epoch, str(place)): 1 for epoch in range(2) for place in range(10)})
