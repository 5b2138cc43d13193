"""Where the stages of a preparation run: in this process, in several local ones, or on the nodes of a Ray cluster."""

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, Self

import torch

from starling.chance import one_thread
from starling.errors import ConfigError, DataError, StarlingError
from starling.extras import require
from starling.recipe.file import apply_overrides
from starling.speech.preparing.stages import Stage, Tick

MAX_JOBS = 1024
RETRIES = 3
"""How often Ray repeats a stage whose process or node was lost."""
_POLL_SECONDS = 0.1
"""Interval at which the progress of other processes is read."""
_COUNT_EVERY = 1.0
"""Interval at which a Ray cluster is asked for its CPUs, in seconds."""
_END_TIMEOUT_SECONDS = 60.0
"""How long running stages may take to finish after another one has failed."""
_num_done: "Synchronized[int] | None" = None
"""In a worker process: the number of utterances that all workers have done."""


class Executor:
    """Runs stages, one after another in this process; others run them elsewhere. As a context manager it ends the
    processes it has started."""

    def __init__(self) -> None:
        self._running: dict[Future[int], Any] = {}
        """What has been submitted, with what else is known of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """End without waiting if there is an error."""

    def run(self, stages: Iterable[Stage], tick: Tick) -> Iterator[Stage]:
        """Run the stages that have no result yet, and yield all in order, each once it has a result.

        The first error in the order of the stages is raised. Stages are drawn as they are needed: at most `window` of
        them are in memory.
        """
        queue: deque[tuple[Stage, Future[int] | None]] = deque()
        listed, error = iter(stages), None
        while True:
            try:
                stage = next(listed, None)
            except StarlingError as problem:  # raised once the stages before it are done
                stage, error = None, problem
            if stage is not None:
                queue.append((stage, None if _is_done(stage, tick) else self._submitted(stage, tick)))
            while queue and (stage is None or queue[0][1] is None or len(queue) >= self.window()):
                first, future = queue.popleft()
                if future is not None:
                    self._wait_for(first, future, tick)
                yield first
            if error is not None:
                raise error
            if stage is None:
                return

    def window(self) -> int:
        """How many stages may be submitted before the first of them has finished."""
        return 1

    def submit(self, stage: Stage, tick: Tick) -> "tuple[Future[int], Any]":
        """Run a stage; its result is the number of utterances used. Also returns what `stop` needs."""
        done: Future[int] = Future()
        with one_thread():  # on busy cores, resampling short audio with several threads is ten times slower
            done.set_result(stage.run(tick))
        return done, None

    def look(self, tick: Tick, finished: int) -> None:
        """Report the progress of stages that run elsewhere; `finished` is the number of utterances of one that has just
        ended, or 0."""

    def stop(self, at_once: bool) -> None:
        """Begin no more stages. Wait for running ones to finish or, if `at_once`, end them."""

    def _submitted(self, stage: Stage, tick: Tick) -> "Future[int]":
        try:
            future, handle = self.submit(stage, tick)
        except BrokenExecutor as error:  # raised later, when it is this stage's turn
            future, handle = Future(), None
            future.set_exception(error)
        self._running[future] = handle
        return future

    def _wait_for(self, stage: Stage, future: "Future[int]", tick: Tick) -> None:
        while not wait([future], timeout=_POLL_SECONDS).done:
            self.look(tick, 0)
        try:
            self.look(tick, future.result())
        except (BrokenExecutor, CancelledError) as error:
            self.stop(at_once=True)
            raise DataError(
                f"set {stage.checking.set_name}: the process that wrote shard {stage.number} ended unexpectedly "
                f"({str(error) or 'the connection to it is lost'}); if it ran out of memory, use fewer jobs or a "
                f"smaller data.shard_size; repeat the command to continue from the finished shards"
            ) from error
        finally:
            self._running.pop(future, None)


class Processes(Executor):
    """Several local processes, started when the first stage is submitted. They end when this process does."""

    def __init__(self, jobs: int) -> None:
        super().__init__()
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self._lifeline: tuple[Connection, ...] = ()
        self._count: Synchronized[int] | None = None
        self._seen = 0

    def window(self) -> int:
        return 2 * self._jobs

    def submit(self, stage: Stage, tick: Tick) -> "tuple[Future[int], Any]":
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._lifeline = context.Pipe(duplex=False)
            self._count, self._seen = context.Value("q", 0), 0
            self._pool = ProcessPoolExecutor(self._jobs, context, _begin, (self._lifeline[0], self._count))
        with interrupts_later():
            return self._pool.submit(_run, stage), None

    def look(self, tick: Tick, finished: int) -> None:
        if self._count is None:
            return
        count = self._count.get_obj().value  # without its lock, which a killed process may hold
        if count > self._seen:
            tick(count - self._seen)
            self._seen = count

    def stop(self, at_once: bool) -> None:
        for future in self._running:
            future.cancel()
        if at_once:
            self._end(kills=True)
        else:
            wait(self._running, timeout=_END_TIMEOUT_SECONDS)
        self._running.clear()
        self.look(lambda count: None, 0)  # do not count their progress in the next run

    def __exit__(self, kind: object, *_: object) -> None:
        self._end(kills=kind is not None)

    def _end(self, kills: bool) -> None:
        if kills:
            self._cut()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._cut()

    def _cut(self) -> None:
        for end in reversed(self._lifeline):
            end.close()
        self._lifeline = ()


class OnRay(Executor):
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
        self._num_cpus, self._counted_at = 1, 0.0

    def window(self) -> int:
        if self._ray is not None and time.monotonic() - self._counted_at > _COUNT_EVERY:
            self._num_cpus = max(1, int(self._ray.cluster_resources().get("CPU", 1.0)))
            self._counted_at = time.monotonic()
        return 2 * self._num_cpus

    def submit(self, stage: Stage, tick: Tick) -> "tuple[Future[int], Any]":
        if self._ray is None:
            self._ray = self._stack.enter_context(self._connect())
            options = {"num_cpus": 1, "max_retries": self._retries, "scheduling_strategy": "SPREAD"}
            self._task = self._ray.remote(**options)(_run_on_node)
        reference = self._task.remote(stage, Path.cwd(), version("starling-asr"))
        return reference.future(), reference

    def look(self, tick: Tick, finished: int) -> None:
        if finished:
            tick(finished)

    def stop(self, at_once: bool) -> None:
        """Interrupt or kill the stages that run, drop those that wait, and wait until none can write any more."""
        running = [reference for future, reference in self._running.items() if not future.done()]
        self._running.clear()
        for reference in running:
            self._ray.cancel(reference, force=at_once)
        if running:
            self._ray.wait(running, num_returns=len(running), timeout=_END_TIMEOUT_SECONDS)

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop(at_once=True)
        self._ray = None
        self._stack.close()

    def _wait_for(self, stage: Stage, future: "Future[int]", tick: Tick) -> None:
        from ray.exceptions import RayError, RayTaskError

        try:
            super()._wait_for(stage, future, tick)
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(
                f"set {stage.checking.set_name}: Ray could not write shard {stage.number}: {reason} (it replaces a lost"
                f" process {self._retries} times); if nodes ran out of memory, use a smaller data.shard_size; repeat "
                "the command to continue from the finished shards"
            ) from error


def executor_of(arguments: Sequence[str], address: str = "auto") -> Executor:
    """The executor that `jobs=...` and `executor=...` select; it is not started yet. `address` is that of the Ray
    cluster.

    Raises:
        ConfigError: A value is wrong, or the two contradict each other.
        MissingExtraError: Ray is not installed.
    """
    given = apply_overrides({}, arguments)
    jobs, name = given.get("jobs", 1), given.get("executor")
    problems = []
    if isinstance(jobs, bool) or not isinstance(jobs, int) or not 1 <= jobs <= MAX_JOBS:
        problems.append(f"jobs: must be a whole number from 1 to {MAX_JOBS}, got {jobs!r}")
    if "executor" in given and name != "ray":
        problems.append(
            f"executor: must be ray (the Ray cluster at launch.address), got {name!r}; without it, `jobs` processes "
            "are started on this machine"
        )
    if "jobs" in given and name == "ray":
        problems.append("jobs: executor=ray uses all CPUs of the cluster; remove jobs or executor")
    if problems:
        raise ConfigError("\n".join(problems))
    if name == "ray":
        require("ray", "executor=ray")
        from starling.launch.on_ray import connected

        return OnRay(partial(connected, address, "executor=ray", "jobs=N needs none"))
    return Processes(jobs) if jobs > 1 else Executor()


def _is_done(stage: Stage, tick: Tick) -> bool:
    result = stage.result()
    if result is not None:
        tick(len(result.places))
    return result is not None


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Block SIGINT within this context, and permanently in processes started there: only this process handles
    Ctrl-C."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(lifeline: Connection, count: "Synchronized[int]") -> None:
    """Initialise a worker process. It ends when the other end of `lifeline` is closed everywhere."""
    global _num_done
    _num_done = count
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    lifeline.poll(None)
    os._exit(1)


def _run(stage: Stage) -> int:
    return stage.run(_tick)


def _tick(count: int) -> None:
    """Count utterances where this is a worker process with a shared counter; a node of Ray has none."""
    if _num_done is not None:
        with _num_done.get_lock():
            _num_done.value += count


def _run_on_node(stage: Stage, folder: Path, sent_by: str) -> int:
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
    return stage.run(_tick)
