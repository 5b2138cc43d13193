"""Ordering between the CUDA streams of threads that share data.

A CUDA call returns before its work is done: the work is queued on the calling thread's current stream. A lock orders
threads but not their streams, so threads with different streams also need events. On the CPU there are no streams, and
`lock_for` returns a plain lock.
"""

import threading
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class Streams:
    """The stream operations of one CUDA device that Starling uses. Tests replace this class."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new(self) -> torch.cuda.Stream:
        """Return a new stream."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def current(self) -> torch.cuda.Stream:
        """Return the calling thread's current stream."""
        return torch.cuda.current_stream(self._device)

    def using(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """Return a context within which `stream` is the calling thread's current stream."""
        return torch.cuda.stream(stream)

    def event(self) -> torch.cuda.Event:
        """Return a new event."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def pinned(self, like: Tensor) -> Tensor:
        """Return uninitialised page-locked host memory with the shape and dtype of `like`."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def keep(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Ensure that, once `tensor` is freed, its memory is reused only after the work that is then queued on `stream`
        is done."""
        tensor.record_stream(stream)


def streams_of(device: torch.device) -> Streams | None:
    """Return the stream operations of a CUDA device, or None for any other device."""
    return Streams(device) if device.type == "cuda" else None


class OrderedLock:
    """A lock for threads with different streams. The device executes the work that threads queue under the lock in the
    order in which they hold the lock.

    On entry the thread's stream waits for all work that was queued on the previous holder's stream before the lock was
    released, including work from before the lock was acquired. It does not wait for later work. The background, for
    example, waits for the last step, but not for the forward and backward passes after that step.
    """

    def __init__(self, streams: Streams) -> None:
        self._lock = threading.Lock()
        self._streams = streams
        self._released = streams.event()
        self._stream = streams.current()  # the last holder's stream; initially the stream that created the data
        self._released.record(self._stream)

    def __enter__(self) -> None:
        self._lock.acquire()
        current = self._streams.current()
        if current != self._stream:
            current.wait_event(self._released)
            self._stream = current

    def __exit__(self, *_: object) -> None:
        self._released.record(self._stream)
        self._lock.release()


def lock_for(device: torch.device) -> AbstractContextManager[object]:
    """Return a lock for data on `device`. It is an `OrderedLock` on CUDA, otherwise a plain lock."""
    streams = streams_of(device)
    return threading.Lock() if streams is None else OrderedLock(streams)


def beside_this_thread(device: torch.device) -> AbstractContextManager[object]:
    """Return a context for a different thread, with a new stream that waits for the work that has been queued on this
    thread's stream so far."""
    if (streams := streams_of(device)) is None:
        return nullcontext()
    own = streams.new()
    own.wait_stream(streams.current())
    return streams.using(own)


def synchronize(device: torch.device) -> None:
    """Wait until the work that has been queued on this thread's stream so far is done."""
    if (streams := streams_of(device)) is not None:
        streams.current().synchronize()
