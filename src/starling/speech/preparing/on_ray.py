"""Runs stages on the nodes of a Ray cluster."""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from starling.errors import DataError
from starling.speech.preparing.executors import END_TIMEOUT_SECONDS, Remote
from starling.speech.preparing.stages import Stage, Tick

RETRIES = 3
"""How often Ray repeats a stage whose process or node was lost."""
_COUNT_EVERY = 1.0
"""Interval at which the cluster is asked for its CPUs, in seconds."""


class OnRay(Remote):
    """The CPUs of a running Ray cluster, connected to when the first stage is submitted.

    The nodes read the corpus and write the shards themselves, so they need this version of Starling, and the same
    paths for both. Ray repeats the stages of a lost process or node elsewhere, which changes no byte of the result.
    """

    def __init__(self, connect: Callable[[], AbstractContextManager[Any]], retries: int = RETRIES) -> None:
        """`connect` makes a context that provides the module `ray`, connected to a cluster."""
        super().__init__()
        self._connect, self._retries = connect, retries
        self._stack = ExitStack()
        self._ray: Any = None
        self._task: Any = None
        self._references: dict[Future[int], Any] = {}
        self._num_cpus, self._counted_at = 1, 0.0

    def window(self) -> int:
        if self._ray is not None and time.monotonic() - self._counted_at > _COUNT_EVERY:
            self._num_cpus = max(1, int(self._ray.cluster_resources().get("CPU", 1.0)))
            self._counted_at = time.monotonic()
        return 2 * self._num_cpus

    def submit(self, stage: Stage) -> "Future[int]":
        if self._ray is None:
            self._ray = self._stack.enter_context(self._connect())
            options = {"num_cpus": 1, "max_retries": self._retries, "scheduling_strategy": "SPREAD"}
            self._task = self._ray.remote(**options)(_run)
        reference = self._task.remote(stage, Path.cwd(), version("starling-asr"))
        future: Future[int] = reference.future()
        self._references[future] = reference
        return future

    def look(self, tick: Tick, finished: int) -> None:
        if finished:
            tick(finished)

    def abandon(self, at_once: bool) -> None:
        self._end(kills=at_once)
        self._futures.clear()

    def kill(self) -> None:
        self._end(kills=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(kills=True)
        self._ray = None
        self._stack.close()

    def _end(self, kills: bool) -> None:
        """Interrupt or kill the stages that run, drop those that wait, and wait until none can write any more."""
        running = [reference for future, reference in self._references.items() if not future.done()]
        self._references.clear()
        for reference in running:
            self._ray.cancel(reference, force=kills)
        if running:
            self._ray.wait(running, num_returns=len(running), timeout=END_TIMEOUT_SECONDS)

    def _finished(self, stage: Stage, future: "Future[int] | None", tick: Tick) -> Stage:
        if future is None:
            return stage
        from ray.exceptions import RayError, RayTaskError

        try:
            return super()._finished(stage, future, tick)
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(
                f"set {stage.checking.set_name}: Ray could not write shard {stage.number}: {reason} (it replaces a lost"
                f" process {self._retries} times); if nodes ran out of memory, use a smaller data.shard_size; repeat "
                "the command to continue from the finished shards"
            ) from error
        finally:
            self._references.pop(future, None)


def _run(stage: Stage, folder: Path, sent_by: str) -> int:
    """Run a stage on a node, in the folder from which relative paths start."""
    name = stage.checking.set_name
    if (own := version("starling-asr")) != sent_by:
        raise DataError(
            f"set {name}: node {os.uname().nodename} has Starling {own}, but this process has {sent_by}; install the "
            "same version everywhere"
        )
    try:
        os.chdir(folder)
        stage.work.stat()
    except OSError as error:
        raise DataError(
            f"set {name}: node {os.uname().nodename} cannot read {error.filename} ({error.strerror}): the corpus, "
            "data.folder and the current folder must be on storage that all nodes share, under the same paths"
        ) from error
    torch.set_num_threads(1)
    return stage.run(_ignore_tick)


def _ignore_tick(count: int) -> None: ...
