"""Runs stages on Dask: on an existing cluster, or on a local one."""

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
"""How long to wait for the scheduler, in seconds."""


class Dask(Remote):
    """The workers of a Dask cluster, connected to when the first stage is submitted.

    The workers read the corpus and write the shards themselves, so they need this version of Starling and the same
    paths for both. Stages are sent to them pickled, over connections without authentication.
    """

    def __init__(self, address: str | None = None, jobs: int = 1) -> None:
        """`address` is host:port of a scheduler. Without it, a cluster of `jobs` local processes is started.

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
            with suppress(OSError):  # a lost connection is reported by the futures
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
        """Stop waiting for running stages; workers may still finish them."""
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
                f"set {stage.checking.set_name}: Dask lost the worker of shard {stage.number}: {error}; see the logs "
                f"of the workers; repeat the command to continue from the finished shards"
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
                    f"executor=dask://{self._address}: no response from a scheduler within {_PATIENCE:g} s ({error}); "
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
    """Run a stage, in a worker."""
    if version("starling-asr") != sent_by:
        raise DataError(
            f"a Dask worker has Starling {version('starling-asr')}, but this process has {sent_by}; install the same "
            "version everywhere"
        )
    torch.set_num_threads(1)
    return stage.run(_ignore_tick)


def _ignore_tick(count: int) -> None: ...
