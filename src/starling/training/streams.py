"""The order in which the streams of a device touch what they share.

On a CUDA device a call returns before its work is done: the work waits on the stream that was current in the calling
thread. A lock orders threads, not streams, so a thread with a stream of its own also needs events. On the CPU there are
no streams, and nothing here costs anything.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
from torch import Tensor


class Streams:
    """What Starling asks of the streams of one CUDA device; tests put a stand-in in its place."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new(self) -> torch.cuda.Stream:
        """A stream beside all others."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def current(self) -> torch.cuda.Stream:
        """The stream of the calling thread."""
        return torch.cuda.current_stream(self._device)

    def using(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """Make `stream` that of the calling thread while the context lasts."""
        return torch.cuda.stream(stream)

    def event(self) -> torch.cuda.Event:
        """An event that can be recorded on streams."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def pinned(self, like: Tensor) -> Tensor:
        """Host memory that is copied to and from the device without a detour."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def keep(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Do not reuse the memory of `tensor` before `stream` has done what it was given so far."""
        tensor.record_stream(stream)


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None where there are none."""
    return Streams(device) if device.type == "cuda" else None


class OrderedLock:
    """A lock for threads that use different streams of a device: what they do while they hold it happens on the device
    in the order in which they held it.

    A stream waits for the work that was given to others under this lock, and for nothing that they were given besides:
    the background waits for the last step, not for the forward and backward passes behind it.
    """

    def __init__(self, streams: Streams) -> None:
        self._lock = threading.Lock()
        self._streams = streams
        self._released = streams.event()
        self._stream = streams.current()  # which held the lock last; it made what the lock guards
        self._released.record(self._stream)

    def __enter__(self) -> None:
        self._lock.acquire()
        current = self._streams.current()
        if current != self._stream:
            current.wait_event(self._released)
            self._stream = current

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._released.record(self._stream)
        self._lock.release()


def lock_for(device: torch.device) -> AbstractContextManager[object]:
    """A lock for what is on `device`."""
    streams = streams_of(device)
    return threading.Lock() if streams is None else OrderedLock(streams)


def beside_this_thread(device: torch.device) -> AbstractContextManager[object]:
    """What gives another thread a stream of its own, behind all that this thread's stream was given so far."""
    if (streams := streams_of(device)) is None:
        return nullcontext()
    own = streams.new()
    own.wait_stream(streams.current())
    return streams.using(own)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what this thread's stream was given so far."""
    if (streams := streams_of(device)) is not None:
        streams.current().synchronize()
