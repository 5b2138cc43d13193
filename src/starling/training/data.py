"""A workload made from a PyTorch model, a loss and data."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from starling.chance import derive_seed
from starling.errors import ConfigError, DataError
from starling.workload import Ticket, Workload

MakeModel = Callable[[], nn.Module]
Loss = Callable[[nn.Module, Any], Tensor]
"""Function that returns the scalar to minimise, a mean over examples, given the model and a mini-batch on the model's
device."""
MakeBatch = Callable[[Ticket], Any]
Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Batch:
    """A mini-batch of any structure of tensors."""

    content: Any
    num_examples: int
    ids: tuple[str, ...] = ()
    """Indices of the examples, if they come from a map-style dataset."""
    num_frames: int = 0
    seconds: float = 0.0

    def to(self, device: torch.device) -> Self:
        """Return a copy with all tensors on `device`."""
        return replace(self, content=_moved(self.content, device))


class DataWorkload(Workload[Batch]):
    """Trains `make_model()` to minimise `loss(model, batch)` over `data`.

    Learners and loading processes receive a pickled copy, so the functions must be importable. Define them at the top
    level of a module or of the script that is run; lambdas do not work.

    Args:
        make_model: A function that returns a new model on the CPU. The same random seed is set before each call.
        loss: A function that returns the mean loss over the examples of a mini-batch.
        data: A map-style dataset (`__len__` and `__getitem__`), an iterable (such as an `IterableDataset`), or a
            function from a `Ticket` to a mini-batch.
        batch_size: The number of examples in a mini-batch; None if `data` is a function.
        num_batches: The number of mini-batches in an epoch. It is required unless `data` is map-style; an epoch is then
            one pass over the dataset.
        collate: A function that makes a mini-batch from a list of examples, as in `torch.utils.data.DataLoader`.
        shuffle: Whether a map-style dataset is shuffled, in a new order for each epoch.
        seed: The seed of the model's initial weights and of the order of examples.

    Raises:
        ConfigError: The arguments are inconsistent.
        DataError: A map-style dataset is empty.

    An iterable must yield the same examples in the same order each time it is iterated, because each learner reads all
    examples and collates only its own mini-batches. If the iterable has a method `set_epoch`, this method is called
    before each epoch.
    """

    def __init__(
        self,
        make_model: MakeModel,
        loss: Loss,
        data: "Dataset[Any] | Sequence[Any] | Iterable[Any] | MakeBatch",
        batch_size: int | None = None,
        num_batches: int | None = None,
        collate: Collate = default_collate,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self._make_model, self._loss, self._collate = make_model, loss, collate
        self._data: Any = data
        self._batch_size, self._shuffle, self._seed = batch_size or 0, shuffle, seed
        has_length = hasattr(data, "__len__") and hasattr(data, "__getitem__")
        self._is_map_style = has_length and not isinstance(data, IterableDataset)
        self._is_iterable = not self._is_map_style and hasattr(data, "__iter__")
        self._num_batches = self._checked(batch_size, num_batches)
        self._order: tuple[int, Tensor] | None = None  # the newest epoch and its order
        self._reading: tuple[int, int, Iterator[Any]] | None = None  # epoch, next mini-batch, and its examples onwards

    def _checked(self, batch_size: int | None, num_batches: int | None) -> int:
        """Return the number of mini-batches in an epoch. Raises `ConfigError` if the arguments are inconsistent."""
        is_dataset = self._is_map_style or self._is_iterable
        if not (is_dataset or callable(self._data)):
            raise ConfigError(
                f"data: a {type(self._data).__name__} is not a dataset, an iterable or a function of a ticket"
            )
        if (batch_size is not None) != is_dataset:
            what = "a dataset needs batch_size" if is_dataset else "a function of a ticket makes whole mini-batches"
            raise ConfigError(f"batch_size: {what}")
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"batch_size: {batch_size} is not at least 1")
        if self._is_map_style:
            if num_batches is not None:
                raise ConfigError("num_batches: for a map-style dataset it follows from its length; leave it out")
            if len(self._data) == 0:
                raise DataError("data: the dataset is empty")
            return math.ceil(len(self._data) / self._batch_size)
        if num_batches is None or num_batches < 1:
            raise ConfigError(f"num_batches: {num_batches}; give the number of mini-batches in an epoch, at least 1")
        return num_batches

    def with_seed(self, seed: int) -> Self:
        """Return a copy with a different initial model and a different order of examples."""
        other = copy(self)
        other._seed, other._order, other._reading = seed, None, None
        return other

    def make_model(self) -> nn.Module:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(derive_seed(self._seed, "model"))
            return self._make_model()

    def num_batches(self, epoch: int) -> int:
        return self._num_batches

    def load(self, ticket: Ticket) -> Sequence[Batch]:
        if self._is_map_style:
            places = self._places(ticket)
            content = self._collate([self._data[place] for place in places])
            return [Batch(content, len(places), tuple(map(str, places)))]
        if self._is_iterable:
            return [self._of_iterable(ticket)]
        content = self._data(ticket)
        return [Batch(content, _num_examples(content))]

    def loss(self, model: nn.Module, examples: Batch) -> Tensor:
        return self._loss(model, examples.content)

    def planned_size(self, ticket: Ticket, unit: str) -> float:
        if self._is_map_style and unit == "utterances":
            return float(len(self._places(ticket)))
        return super().planned_size(ticket, unit)  # type: ignore[arg-type]

    def _places(self, ticket: Ticket) -> list[int]:
        """Return the indices of a mini-batch's examples in a map-style dataset."""
        size, length = self._batch_size, len(self._data)
        first = ticket.index * size
        if not self._shuffle:
            return list(range(first, min(first + size, length)))
        if self._order is None or self._order[0] != ticket.epoch:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "order", ticket.epoch))
            self._order = ticket.epoch, torch.randperm(length, generator=generator)
        return [int(place) for place in self._order[1][first : first + size]]

    def _of_iterable(self, ticket: Ticket) -> Batch:
        """Read forward to a ticket's mini-batch, starting from the beginning if the current position is beyond it."""
        size = self._batch_size
        epoch, following, examples = self._reading or (-1, 0, iter(()))
        if epoch != ticket.epoch or following > ticket.index:
            if hasattr(self._data, "set_epoch"):
                self._data.set_epoch(ticket.epoch)
            following, examples = 0, iter(self._data)
        skipped = size * (ticket.index - following)
        next(islice(examples, skipped, skipped), None)
        found = list(islice(examples, size))
        self._reading = ticket.epoch, ticket.index + 1, examples
        if not found:
            raise DataError(
                f"data: the iterable ended before mini-batch {ticket.index + 1} of epoch {ticket.epoch + 1}; "
                f"it has fewer than num_batches={self._num_batches} mini-batches of {size} examples; lower num_batches"
            )
        return Batch(self._collate(found), len(found))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reading": None}  # an iterator cannot be pickled, and each process has its own


def _moved(content: Any, device: torch.device) -> Any:
    if isinstance(content, Tensor):
        return content.to(device, non_blocking=True)
    if isinstance(content, Mapping):
        return {key: _moved(value, device) for key, value in content.items()}
    if isinstance(content, tuple) and hasattr(content, "_fields"):
        return type(content)(*(_moved(value, device) for value in content))
    if isinstance(content, list | tuple):
        return type(content)(_moved(value, device) for value in content)
    return content.to(device) if hasattr(content, "to") else content


def _num_examples(content: Any) -> int:
    """Return the length of the first tensor in a mini-batch, or 1 if there is no tensor."""
    if isinstance(content, Tensor):
        return len(content) if content.dim() else 1
    values = content.values() if isinstance(content, Mapping) else content if isinstance(content, list | tuple) else ()
    return next((_num_examples(value) for value in values if isinstance(value, Tensor | Mapping | list | tuple)), 1)
