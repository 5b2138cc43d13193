"""Mini-batches that are loaded once and trained on by many cells."""

from collections.abc import Sequence

from torch import Tensor, nn

from starling.speech.batches import Batch
from starling.workload import Ticket, Unit, Workload

_MOST_BYTES = 512 * 2**20  # of one process


class Memory:
    """What one process keeps of the mini-batches of its last `key`, up to half a gibibyte."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._key = ""
        self._kept: dict[Ticket, Sequence[Batch]] = {}
        self._num_bytes = 0

    def load(self, key: str, workload: Workload[Batch], ticket: Ticket) -> Sequence[Batch]:
        """The mini-batch of a ticket; `key` is equal for workloads that load equal mini-batches for equal tickets."""
        if key != self._key:
            self._key, self._kept, self._num_bytes = key, {}, 0
        if ticket in self._kept:
            return self._kept[ticket]
        loaded = workload.load(ticket)
        size = sum(batch.features.nbytes for batch in loaded)
        if self._num_bytes + size <= self._most_bytes:
            self._kept[ticket] = loaded
            self._num_bytes += size
        return loaded


class Remembered(Workload[Batch]):
    """A workload whose mini-batches come out of a memory where they are in it."""

    def __init__(self, workload: Workload[Batch], memory: Memory, key: str) -> None:
        self._workload = workload
        self._memory = memory
        self._key = key
        self.num_parts = workload.num_parts

    def make_model(self) -> nn.Module:
        return self._workload.make_model()

    def num_batches(self, epoch: int) -> int:
        return self._workload.num_batches(epoch)

    def load(self, ticket: Ticket) -> Sequence[Batch]:
        return self._memory.load(self._key, self._workload, ticket)

    def loss(self, model: nn.Module, examples: Batch) -> Tensor:
        return self._workload.loss(model, examples)

    def weight(self, examples: Batch) -> float:
        return self._workload.weight(examples)

    def planned_size(self, ticket: Ticket, unit: Unit) -> float:
        return self._workload.planned_size(ticket, unit)
