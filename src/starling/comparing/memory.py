"""Mini-batches that are loaded once and trained on by many cells."""

from collections.abc import Callable, Sequence
from typing import Any

from starling.workload import Ticket

_MAX_BYTES = 512 * 2**20  # of one process
Examples = Sequence[Any]


class Memory:
    """The mini-batches of the last `key` that a process loaded, up to half a gibibyte."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._key = ""
        self._kept: dict[Ticket, Examples] = {}
        self._num_bytes = 0

    def load(
        self, key: str, ticket: Ticket, load: Callable[[Ticket], Examples], size: Callable[[Examples], int]
    ) -> Examples:
        """The mini-batch of a ticket, which `load` loads and which has `size` bytes; `key` is equal for workloads that
        load equal mini-batches for equal tickets."""
        if key != self._key:
            self._key, self._kept, self._num_bytes = key, {}, 0
        if ticket in self._kept:
            return self._kept[ticket]
        loaded = load(ticket)
        num_bytes = size(loaded)
        if self._num_bytes + num_bytes <= self._max_bytes:
            self._kept[ticket] = loaded
            self._num_bytes += num_bytes
        return loaded
