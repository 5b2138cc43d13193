"""Mini-batches that are loaded once and trained on by many cells."""

from collections.abc import Sequence

from starling.speech.batches import Batch
from starling.speech.training.workload import SpeechWorkload
from starling.workload import Ticket

_MAX_BYTES = 512 * 2**20  # of one process


class Memory:
    """The mini-batches of the last `key` that a process loaded, up to half a gibibyte."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._key = ""
        self._kept: dict[Ticket, Sequence[Batch]] = {}
        self._num_bytes = 0

    def load(self, key: str, workload: SpeechWorkload, ticket: Ticket) -> Sequence[Batch]:
        """The mini-batch of a ticket; `key` is equal for workloads that load equal mini-batches for equal tickets."""
        if key != self._key:
            self._key, self._kept, self._num_bytes = key, {}, 0
        if ticket in self._kept:
            return self._kept[ticket]
        loaded = SpeechWorkload.load(workload, ticket)
        size = sum(batch.features.nbytes for batch in loaded)
        if self._num_bytes + size <= self._max_bytes:
            self._kept[ticket] = loaded
            self._num_bytes += size
        return loaded


class Remembered(SpeechWorkload):
    """A workload that takes mini-batches from a memory."""

    def __init__(self, workload: SpeechWorkload, memory: Memory, key: str) -> None:
        super().__init__(workload.plan, workload.features, workload.tokenizer, workload.initial, workload.phones)
        self._memory = memory
        self._key = key

    def load(self, ticket: Ticket) -> Sequence[Batch]:
        return self._memory.load(self._key, self, ticket)
