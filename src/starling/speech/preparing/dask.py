"""Stages on Dask: on a cluster that somebody has started, or on one of a few processes here."""

import logging
import tempfile
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, suppress
from importlib.metadata import version
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from starling.errors import ConfigError, DataError
from starling.speech.preparing.executors import Remote, interrupts_later
from starling.speech.preparing.stages import Stage, Tick

if TYPE_CHECKING:
    from distributed import Client

_PATIENCE = 10.0
"""Seconds for a scheduler to answer."""


class Dask(Remote):
    """The workers of a Dask cluster, met when there is something to do.

    They read the corpus and write the shards themselves, so they need this version of Starling and the folders of
    both under the same names. What they are sent is pickled, and nothing on the way is authenticated.
    """

    def __init__(self, address: str | None = None, jobs: int = 1) -> None:
        """`address` is host:port of a scheduler; without one, a cluster of `jobs` processes on the loopback interface.

        Raises:
            ConfigError: Dask is not installed.
        """
        super().__init__()
        try:
            import distributed  # noqa: F401 - for the error only
        except ImportError as error:
            raise ConfigError(
                f"executor=dask: the package distributed is missing ({error}): pip install 'starling-asr[dask]'"
            ) from error
        self._address, self._jobs = address, jobs
        self._stack = ExitStack()
        self._client: Client | None = None
        self._pool: Any = None
        self._threads = 1

    def window(self) -> int:
        if self._client is not None:
            with suppress(OSError):  # who is lost is told by what is waited for
                threads: dict[str, int] = self._client.nthreads()  # type: ignore[no-untyped-call]
                self._threads = max(sum(threads.values()), 1)
        return 2 * self._threads

    def submit(self, stage: Stage) -> "Future[int]":
        if self._client is None:
            self._client = self._stack.enter_context(self._met())
        if self._pool is None:
            self._pool = self._client.get_executor(pure=False)
        future: Future[int] = self._pool.submit(_run, stage, version("starling-asr"))
        return future

    def look(self, tick: Tick, finished: int) -> None:
        if finished:
            tick(finished)

    def kill(self) -> None:
        """Give up what runs; a worker that is in the middle of a shard may finish it."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._client = None
        self._stack.close()

    def _finished(self, stage: Stage, future: "Future[int] | None", tick: Tick) -> Stage:
        from distributed import KilledWorker
        from distributed.comm.core import CommClosedError

        try:
            return super()._finished(stage, future, tick)
        except (KilledWorker, CommClosedError) as error:
            raise DataError(
                f"set {stage.checking.set_name}: Dask has lost what wrote shard {stage.number}: {error}; look at the "
                f"logs of its workers; the same command goes on from the shards that are finished"
            ) from error

    def _met(self) -> "Client":
        from distributed import Client, LocalCluster

        if self._address is not None:
            try:
                return Client(  # type: ignore[no-untyped-call]
                    f"tcp://{self._address}", timeout=_PATIENCE, set_as_default=False
                )
            except (OSError, CancelledError) as error:
                raise ConfigError(
                    f"executor=dask://{self._address}: no scheduler answers there within {_PATIENCE:g} s ({error}); "
                    f"start one with `dask scheduler`, and workers with `dask worker`"
                ) from error
        scratch = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="starling-dask-"))
        with interrupts_later():
            cluster = LocalCluster(  # type: ignore[no-untyped-call]
                n_workers=self._jobs,
                threads_per_worker=1,
                host="127.0.0.1",
                local_directory=scratch,
                memory_limit=None,
                silence_logs=logging.CRITICAL,
                scheduler_kwargs={"dashboard": False, "dashboard_address": "127.0.0.1:0"},
            )
        self._stack.enter_context(cluster)
        return Client(cluster, set_as_default=False)  # type: ignore[no-untyped-call]


def _run(stage: Stage, sent_by: str) -> int:
    """A stage, in a worker."""
    if version("starling-asr") != sent_by:
        raise DataError(
            f"a Dask worker has Starling {version('starling-asr')}, but {sent_by} prepares; install one version on all"
        )
    torch.set_num_threads(1)
    return stage.run(_untold)


def _untold(count: int) -> None: ...
