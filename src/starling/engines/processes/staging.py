"""Copies between a learner's device and host memory, for sending and receiving."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from starling.engines.processes.threads import Worker
from starling.training.streams import Streams, streams_of

T = TypeVar("T")


class Staging:
    """Copies to and from host memory; on the CPU nothing is copied.

    On CUDA copies use pinned memory and one stream per direction. A copy waits for the work queued on the calling
    thread's stream; the thread itself does not wait for it. So one piece is copied to the host while another is sent
    and a third is copied back.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self._device = device
        self._streams = streams or streams_of(device)
        if self._streams is not None:
            self._to_host, self._to_device = self._streams.new(), self._streams.new()
        self._sender = Worker("starling-staging")

    def hand_over(self, tensor: Tensor, do: Callable[[Tensor], T]) -> Callable[[], T]:
        """Call `do` with `tensor` copied to host memory; the returned function waits for its result.

        For a tensor already in host memory this thread calls `do` immediately. For others the sender thread calls it
        when they are copied, in order.
        """
        if self._streams is None or tensor.device != self._device:
            done = do(tensor.detach())
            return lambda: done
        host, made, copied = self._streams.pinned(tensor), self._streams.event(), self._streams.event()
        made.record(self._streams.current())
        self._to_host.wait_event(made)
        with self._streams.using(self._to_host):
            host.copy_(tensor.detach(), non_blocking=True)
        copied.record(self._to_host)
        self._streams.keep(tensor, self._to_host)

        def when_copied() -> T:
            copied.synchronize()
            return do(host)

        return self._sender.submit(when_copied).result

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Host memory to receive into."""
        if self._streams is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._streams.pinned(tensor)

    def to_device(self, host: Tensor) -> Tensor:
        """Copy `host` to the device; later work of the calling thread's stream may use the copy."""
        if self._streams is None:
            return host
        with self._streams.using(self._to_device):
            tensor = host.to(self._device, non_blocking=True)
        copied, current = self._streams.event(), self._streams.current()
        copied.record(self._to_device)
        current.wait_event(copied)
        self._streams.keep(tensor, current)
        return tensor

    def pass_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """A function with which a thread with another stream takes `tensor`, after the work queued on this thread's
        stream so far."""
        streams = self._streams
        if streams is None or tensor.device != self._device:
            return lambda: tensor
        complete = streams.event()
        complete.record(streams.current())

        def take() -> Tensor:
            current = streams.current()
            current.wait_event(complete)
            streams.keep(tensor, current)
            return tensor

        return take

    def abandon(self) -> None:
        """Stop sending, without waiting for the copy under way."""
        self._sender.abandon()

    def close(self) -> None:
        """End the thread."""
        self._sender.close()
