"""Calls of a communication backend, and the copies in host memory that it sends and receives.

An error is attributed to the backend according to the place where it is raised. Its message is not examined."""

import errno
import os
import resource
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from starling.engines.processes.threads import Worker
from starling.errors import PeerLost, StarlingError
from starling.training.membership import MembershipChanged
from starling.training.streams import Streams, streams_of

T = TypeVar("T")


class ConnectionFailed(Exception):  # noqa: N818 - becomes a PeerLost once the lost learner is known
    """A call of the backend failed: a peer is lost or did not answer in time."""


LOSSES = (MembershipChanged, PeerLost, ConnectionFailed, dist.DistError)
"""Exceptions that a learner raises when the loss of another learner, or a join, interrupts it."""


@contextmanager
def communicating() -> Generator[None, None, None]:
    """Within this context, convert each `RuntimeError`, the class that the backend raises, into `ConnectionFailed`. Use
    the context only for calls of the backend."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionFailed(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def check_files(learner: int) -> None:
    """Raise `StarlingError` if this process can open no more files. In that case this process has failed, and the peer
    to which it could not connect has not."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            return
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise StarlingError(
            f"learner {learner}: this process can open no more files ({error.strerror}; its limit is {most}): close "
            "files and connections that are no longer needed, or raise the limit with `ulimit -n`"
        ) from error


def wait_for(work: dist.Work | None, timeout: timedelta | None = None) -> None:
    """Wait for `work` of a process group. If it is None, the work has finished. Raises `ConnectionFailed`."""
    if work is not None:
        with communicating():
            work.wait() if timeout is None else work.wait(timeout)


def local_group(ranks: Sequence[int], timeout_seconds: float, backend: str = "gloo") -> ProcessGroup:
    """Create a new group of `ranks`. Only these ranks call this function. Raises `ConnectionFailed`."""
    # a new group does not inherit the default group's time-out; its default is half an hour
    timeout = timedelta(seconds=timeout_seconds)
    with communicating():
        group: ProcessGroup = dist.new_group(
            list(ranks), backend=backend, timeout=timeout, use_local_synchronization=True
        )
    return group


class PassWithBackend:
    """Distinguishes the backend's errors from the model's in a forward and backward pass that communicates."""

    def __init__(self) -> None:
        self._failure: ConnectionFailed | None = None

    @contextmanager
    def telling_failures(self) -> Generator[None, None, None]:
        """A context for one pass. If communication failed in the pass, the context raises `ConnectionFailed`; it
        propagates the model's errors unchanged."""
        self._failure = None
        try:
            yield
        except Exception as error:
            if self._failure is not None:
                raise self._failure from error
            raise

    @contextmanager
    def communicating(self) -> Generator[None, None, None]:
        """A context for communication within the pass."""
        try:
            with communicating():
                yield
        except ConnectionFailed as error:
            self._failure = error
            raise


class ReducingModel(PassWithBackend):
    """A model whose gradients DistributedDataParallel averages over a group while backward runs.

    DDP communicates within forward and backward, but errors of the backend are still distinguished from errors of the
    model. The part of each pass that follows forward runs within the context `waiting`. The constructor communicates
    and may raise `ConnectionFailed`.
    """

    def __init__(
        self,
        model: nn.Module,
        group: ProcessGroup | None,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        super().__init__()
        self._group, self._waiting, self._end_of_pass = group, waiting, ExitStack()
        self._world = dist.get_world_size(group)
        with communicating(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the name of `broadcast_buffers` before torch 2.13
            self.model = DistributedDataParallel(model, process_group=group, broadcast_buffers=False, init_sync=False)
        self.model.register_comm_hook(None, self._reduce)
        self.model.register_forward_hook(self._wait_for_others)

    @contextmanager
    def reducing(self) -> Generator[None, None, None]:
        """A context for one forward and backward pass. If communication failed, the context raises `ConnectionFailed`;
        it propagates the model's errors unchanged."""
        with communicating():
            self.model.reducer._rebuild_buckets()  # DDP would do this within forward
        with self.telling_failures(), self._end_of_pass:
            yield

    def _wait_for_others(self, *_: object) -> None:
        self._end_of_pass.enter_context(self._waiting())

    def _reduce(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        with self.communicating():
            work = dist.all_reduce(bucket.buffer().div_(self._world), group=self._group, async_op=True)
        averaged: Future[Tensor] = work.get_future().then(self._reduced)
        return averaged

    def _reduced(self, done: Future[list[Tensor]]) -> Tensor:
        with self.communicating():
            return done.value()[0]


class Staging:
    """Copies tensors to and from host memory. On the CPU, nothing is copied.

    On CUDA, copies use pinned memory and one stream for each direction. A copy waits for the work queued on the calling
    thread's stream, but the thread does not wait for the copy. Therefore one piece can be copied to the host while a
    second piece is sent and a third is copied back.
    """

    def __init__(self, device: torch.device, sender: Worker, streams: Streams | None = None) -> None:
        self._device, self._sender = device, sender
        self._streams = streams or streams_of(device)
        if self._streams is not None:
            self._to_host, self._to_device = self._streams.new(), self._streams.new()

    def hand_over(self, tensor: Tensor, do: Callable[[Tensor], T]) -> Callable[[], T]:
        """Call `do` with a copy of `tensor` in host memory, and return a function that waits for the result of `do`.

        If the tensor is already in host memory, this thread calls `do` immediately. Otherwise the sender thread calls
        `do` once the tensor is copied; it handles tensors in order.
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
        """Return host memory into which a tensor of this shape can be received."""
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
        """Return a function with which a thread that uses a different stream gets `tensor`. That stream then waits for
        the work queued on this thread's stream so far."""
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
