"""A deliberately slow link, emulated by waiting, for machines on which no real link can be throttled."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.runs import Seconds


class SlowLink:
    """A link of `bytes_per_second` that carries one message at a time; what this process sends takes as long as on
    it."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def occupy(self, num_bytes: int) -> Seconds:
        """The time at which bytes that are sent now have passed the link."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._bytes_per_second
            return self._free_at

    @contextmanager
    def under_messages(self) -> Generator[None, None, None]:
        """A context in which everything that `isend` sends passes the link."""
        unpatched: Callable[..., Any] = dist.isend

        def isend(tensor: Tensor, *args: Any, **kwargs: Any) -> "_Late":
            return _Late(unpatched(tensor, *args, **kwargs), self.occupy(tensor.nbytes))

        dist.isend = isend  # type: ignore[assignment]
        try:
            yield
        finally:
            dist.isend = unpatched

    def under_reducing(self, model: DistributedDataParallel, world: int) -> DistributedDataParallel:
        """Make what `model` sends for its means, as in a ring, pass the link."""

        def reduce(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            gradients = bucket.buffer().div_(world)
            passed_at = self.occupy(2 * (world - 1) * gradients.nbytes // world)

            def late(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
                _wait_until(passed_at)
                return reduced.value()[0]

            return dist.all_reduce(gradients, async_op=True).get_future().then(late)

        model.register_comm_hook(None, reduce)
        return model


class _Late:
    """A send that does not complete before `passed_at`."""

    def __init__(self, work: Any, passed_at: Seconds) -> None:
        self._work, self._passed_at = work, passed_at

    def wait(self) -> None:
        self._work.wait()
        _wait_until(self._passed_at)


def _wait_until(moment: Seconds) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
