"""A stand-in for the streams of a device, on the CPU: it works out which call must have happened before which.

Each stream has a clock of all streams' work that it is behind, as a device has it: work on one stream happens in its
order, an event stands for all that its stream was given before it was recorded, and a stream or a thread that waits
for an event is behind all of that.
"""

import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from starling.training.streams import Streams

Clock = Counter[str]
"""How much of each stream's work is done, by the stream's name."""


class Stream:
    """One order of work."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = Counter()

    def work(self) -> Clock:
        """Give the stream something to do; the clock when that is done."""
        self.clock[self.name] += 1
        return Counter(self.clock)

    def wait_event(self, event: "Event") -> None:
        self.clock |= event.clock

    def wait_stream(self, stream: "Stream") -> None:
        self.clock |= stream.clock

    def is_behind(self, done: Clock) -> bool:
        """Whether what this stream is given next happens after that work."""
        return all(self.clock[name] >= number for name, number in done.items())


class Event:
    """A moment in a stream's work."""

    def __init__(self, waited_for: list["Event"]) -> None:
        self.clock: Clock = Counter()
        self._waited_for = waited_for

    def record(self, stream: Stream) -> None:
        self.clock = Counter(stream.clock)

    def synchronize(self) -> None:
        self._waited_for.append(self)


class StandIn(Streams):
    """Streams of a device that is the CPU."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.compute = Stream("compute")
        self.made: list[Stream] = []
        self.kept: list[tuple[int, Stream]] = []
        """Whose memory is kept, by address, until which stream is done."""
        self.waited_for: list[Event] = []
        """What a thread, rather than a stream, has waited for."""
        self._threads = threading.local()

    def new(self) -> Stream:  # type: ignore[override]
        self.made.append(Stream(f"stream {len(self.made)}"))
        return self.made[-1]

    def current(self) -> Stream:  # type: ignore[override]
        return getattr(self._threads, "stream", self.compute)

    @contextmanager
    def using(self, stream: Stream) -> Generator[None, None, None]:  # type: ignore[override]
        before = self.current()
        self._threads.stream = stream
        try:
            yield
            stream.work()
        finally:
            self._threads.stream = before

    def event(self) -> Event:  # type: ignore[override]
        return Event(self.waited_for)

    def pinned(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype)

    def keep(self, tensor: Tensor, stream: Stream) -> None:  # type: ignore[override]
        self.kept.append((tensor.data_ptr(), stream))
