"""Calls of a communication backend. Its errors are recognised by where they are raised, never by their words."""

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


class ConnectionFailed(Exception):  # noqa: N818 - becomes a PeerLost once it is known who was lost
    """A call of the backend failed: a peer is gone, or did not answer in time."""


@contextmanager
def communicating() -> Generator[None, None, None]:
    """A context for calls of the backend and nothing else: its errors are plain RuntimeErrors."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionFailed(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def wait_for(work: dist.Work, timeout: timedelta | None = None) -> None:
    """Wait for a group's work. Raises `ConnectionFailed`."""
    with communicating():
        if timeout is None:
            work.wait()
        else:
            work.wait(timeout)


class ReducingModel:
    """A model whose gradients are averaged over a group while backward runs, by DistributedDataParallel.

    Errors of the backend are kept apart from those of the model, although DDP communicates within forward and backward.
    Creating it communicates; raises `ConnectionFailed`.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup | None, **options: Any) -> None:
        self._group = group
        self._world = dist.get_world_size(group)
        self._failure: ConnectionFailed | None = None
        with communicating():
            self.model = DistributedDataParallel(
                model, process_group=group, broadcast_buffers=False, init_sync=False, **options
            )
        self.model.register_comm_hook(None, self._reduce)

    @contextmanager
    def reducing(self) -> Generator[None, None, None]:
        """A context for one forward and backward pass. Raises `ConnectionFailed` if a mean failed, otherwise what the
        model raised."""
        self._failure = None
        with communicating():
            self.model.reducer._rebuild_buckets()  # DDP would do it within forward
        try:
            yield
        except Exception as error:
            if self._failure is not None:
                raise self._failure from error
            raise

    def _reduce(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        try:
            with communicating():
                work = dist.all_reduce(bucket.buffer().div_(self._world), group=self._group, async_op=True)
        except ConnectionFailed as error:
            self._failure = error
            raise
        averaged: Future[Tensor] = work.get_future().then(self._taken)
        return averaged

    def _taken(self, done: Future[list[Tensor]]) -> Tensor:
        try:
            with communicating():
                return done.value()[0]
        except ConnectionFailed as error:
            self._failure = error
            raise
