"""The stages of preparing a set, and the executors that run them. A stage checks a chunk of utterances and writes it as
one shard. Stages run in this process, in several local processes, or on the nodes of a Ray cluster.

<work>/stages/checked.000000.json     result of checking recordings that will be joined into strings
<work>/stages/written.000000.json     index of a shard; written last, so that its existence shows a complete shard
<work>/set/shar/...                   the shards
<work>/aside-.../                     unfinished files of a process
"""

import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import TypeAdapter

from starling.chance import one_thread
from starling.configuration import digest
from starling.errors import ConfigError, DataError, StarlingError, require
from starling.files import replace_file
from starling.recipe import apply_overrides
from starling.speech.corpora import Utterance
from starling.speech.shard_writer import ShardIndex, Spoken, audio_file, cuts_file, write_shard
from starling.speech.usable import Checker, Checking, Dropped

Tick = Callable[[int], None]
"""A function that is called with the number of utterances done since the last call."""
OnProgress = Callable[[str, int, int], None]
"""A function that is called with the name of a set, the number of utterances done, and their total (0 if it is
unknown)."""
REPORT_EVERY = 25
_SEPARATORS = (",", ":")


@dataclass(frozen=True)
class Result:
    """The result of a stage. `places` are the indices of the used utterances in the chunk. If the stage only checks,
    `shard` has no files."""

    listing: str
    taken: tuple[str, ...]
    total: int
    places: tuple[int, ...]
    dropped: tuple[Dropped, ...]
    shard: ShardIndex
    short: tuple[str, ...] = ()
    """The used utterances whose files have slightly less audio than their headers declare."""


_RESULT = TypeAdapter(Result)


@dataclass(frozen=True)
class Stage:
    """A chunk of utterances to check or write. A stage can be pickled."""

    work: Path
    number: int
    utterances: tuple[Utterance, ...]
    checking: Checking
    writes: bool
    """Whether to write a shard; otherwise, the stage only checks."""
    listing: str
    """Digest of the chunk as the corpus lists it. A result with a different digest is invalid."""
    taken: frozenset[str] = frozenset()
    """The ids of this chunk that utterances of earlier chunks already use."""

    @property
    def file(self) -> Path:
        """The path of the result's file, which exists once the stage is complete."""
        return self.work / "stages" / f"{'written' if self.writes else 'checked'}.{self.number:06d}.json"

    def result(self) -> Result | None:
        """The result of an earlier run, if it is complete; otherwise None."""
        result = read_result(self.file)
        if result is None or result.listing != self.listing:
            return None
        files = result.shard.files if self.writes else ()
        return result if all(_has(self.work / "set" / "shar" / name, size) for name, size in files) else None

    def run(self, tick: Tick) -> int:
        """Run the stage, replacing an earlier result. Returns the number of utterances used.

        Raises:
            DataError: An utterance is unusable, and `on_bad` is `fail`.
            OSError: A file cannot be written.
        """
        checker = Checker(self.checking, self.taken)
        places: list[int] = []

        def used() -> Iterator[Spoken]:
            for place, each, samples, _ in checker.usable(self.utterances):
                places.append(place)
                yield each.id, each.speaker, each.text, samples
                tick(1)

        with TemporaryDirectory(prefix="aside-", dir=self.work, ignore_cleanup_errors=True) as name:
            aside = Path(name)
            if self.writes:
                shard = write_shard(aside, self.number, self.checking.sampling_rate, used())
            else:
                shard = ShardIndex(self.number, 0, 0, *zip(*[each[:3] for each in used()], strict=True))
            taken, dropped = tuple(sorted(self.taken)), tuple(checker.dropped)
            result = Result(
                self.listing, taken, len(self.utterances), tuple(places), dropped, shard, tuple(checker.short)
            )
            self.file.unlink(missing_ok=True)
            if self.writes:
                self._publish(aside, shard)
            replace_file(self.file, json.dumps(asdict(result), separators=_SEPARATORS), aside)
        return len(places)

    def _publish(self, aside: Path, shard: ShardIndex) -> None:
        folder, made = self.work / "set" / "shar", [name for name, _ in shard.files]
        for name in (audio_file(self.number), cuts_file(self.number)):
            if name in made:
                (aside / name).replace(folder / name)
            else:
                (folder / name).unlink(missing_ok=True)


class Meter:
    """Counts the utterances that are done, and reports after every `REPORT_EVERY` of them."""

    def __init__(self, label: str, utterances: Iterable[Utterance], report: OnProgress) -> None:
        self._label, self._report, self._done = label, report, 0
        self._total = len(utterances) if isinstance(utterances, Sequence) else 0

    def add(self, count: int) -> None:
        before, self._done = self._done, self._done + count
        if self._done // REPORT_EVERY > before // REPORT_EVERY:
            self._report(self._label, self._done, self._total)

    def end(self) -> None:
        self._report(self._label, self._done, self._total or self._done)


def listing_of(utterances: Iterable[Utterance]) -> str:
    """The digest of a corpus's entries for some utterances, without their audio."""
    return digest([(each.id, each.speaker, each.text, each.origin, each.segment) for each in utterances])


def read_result(file: Path) -> Result | None:
    """The result in a file; None if the file is missing or invalid."""
    try:
        return _RESULT.validate_python(json.loads(file.read_text(encoding="utf-8")))  # ids may have lone surrogates
    except (OSError, ValueError):
        return None


def remove_asides(work: Path) -> None:
    """Remove unfinished files that killed processes have left."""
    for each in work.glob("aside-*"):
        shutil.rmtree(each, ignore_errors=True)


def _has(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


MAX_JOBS = 1024
RETRIES = 3
"""Number of times that Ray repeats a stage whose process or node was lost."""
_POLL_SECONDS = 0.1
"""Interval in seconds at which the progress of other processes is read."""
_END_TIMEOUT_SECONDS = 60.0
"""Seconds that running stages may take to finish after another one has failed."""
_REPEAT = "repeat the command to continue from the finished shards"
_num_done: "Synchronized[int]"
"""The number of utterances that all workers have done, in a worker process."""


class Executor(AbstractContextManager["Executor"]):
    """Runs stages one after another in this process; subclasses run them elsewhere. An executor is a context manager
    that ends the processes it has started."""

    def __init__(self) -> None:
        self._running: dict[Future[int], Any] = {}
        """The stages that run elsewhere, with Ray's references to them."""

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop(at_once=kind is not None)

    def run(self, stages: Iterable[Stage], tick: Tick) -> Iterator[tuple[Stage, Result]]:
        """Run the stages that have no result yet, and yield each stage with its result, in order.

        If stages fail, the error of the first one in order is raised. Stages are taken from the iterable as they are
        needed, so that at most `window` stages are in memory.
        """
        queue: deque[tuple[Stage, Future[int]]] = deque()
        listed, problem = iter(stages), None
        while True:
            try:
                stage = next(listed, None)
            except StarlingError as error:  # raised once the stages before it are done
                stage, problem = None, error
            if stage is not None:
                queue.append((stage, self._begun(stage, tick)))
            while queue and (stage is None or len(queue) >= self.window()):
                yield self._finished(*queue.popleft(), tick)
            if problem is not None:
                raise problem
            if stage is None:
                return

    def window(self) -> int:
        """The number of stages that may be submitted before the first of them has finished."""
        return 1

    def submit(self, stage: Stage, tick: Tick) -> "Future[int]":
        """Run a stage. The result of the returned future is the number of utterances used."""
        with one_thread():  # on busy cores, resampling short audio with several threads is ten times slower
            return _done(stage.run(tick))

    def look(self, tick: Tick) -> None:
        """Report the progress of stages that run elsewhere."""

    def outcome(self, stage: Stage, future: "Future[int]", tick: Tick) -> None:
        """Report a stage that has ended, or raise its error."""
        try:
            future.result()
        except (BrokenExecutor, CancelledError) as error:
            self.stop(at_once=True)
            raise DataError(
                f"set {stage.checking.set_name}: the process that wrote shard {stage.number} ended unexpectedly "
                f"({str(error) or 'the connection to it is lost'}); if it ran out of memory, use fewer jobs or a "
                f"smaller data.shard_size; {_REPEAT}"
            ) from error
        self.look(tick)

    def stop(self, at_once: bool) -> None:
        """Start no more stages. Wait for running stages to finish or, with `at_once`, end them."""

    def _begun(self, stage: Stage, tick: Tick) -> "Future[int]":
        if (result := stage.result()) is not None:
            tick(len(result.places))
            return _done(0)
        try:
            return self.submit(stage, tick)
        except BrokenExecutor as error:  # raised later, when it is this stage's turn
            future: Future[int] = Future()
            future.set_exception(error)
            return future

    def _finished(self, stage: Stage, future: "Future[int]", tick: Tick) -> tuple[Stage, Result]:
        while not wait([future], timeout=_POLL_SECONDS).done:
            self.look(tick)
        self._running.pop(future, None)
        self.outcome(stage, future, tick)
        if (result := stage.result()) is None:
            raise DataError(
                f"set {stage.checking.set_name}: a process has written shard {stage.number}, but {stage.file} or the "
                f"shard is missing; {stage.work} must be the same folder for all processes"
            )
        return stage, result


class Processes(Executor):
    """Runs stages in several local processes, which start when the first stage is submitted and end when this process
    does."""

    def __init__(self, jobs: int) -> None:
        super().__init__()
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self._lifeline = ExitStack()
        self._count: Synchronized[int] | None = None
        self._seen = 0

    def window(self) -> int:
        return 2 * self._jobs

    def submit(self, stage: Stage, tick: Tick) -> "Future[int]":
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            lifeline, _ = map(self._lifeline.enter_context, context.Pipe(duplex=False))
            self._count, self._seen = context.Value("q", 0), 0
            self._pool = ProcessPoolExecutor(self._jobs, context, _begin, (lifeline, self._count))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # workers inherit the mask
        try:
            future = self._pool.submit(_run, stage)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._running[future] = None
        return future

    def look(self, tick: Tick) -> None:
        if self._count is not None:
            # without its lock: a killed process may hold it
            before, self._seen = self._seen, self._count.get_obj().value
            tick(self._seen - before)

    def stop(self, at_once: bool) -> None:
        for future in self._running:
            future.cancel()
        if not at_once:
            wait(self._running, timeout=_END_TIMEOUT_SECONDS)
        self._lifeline.close()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = self._count = None
        self._running.clear()


class OnRay(Executor):
    """Runs stages on the CPUs of a running Ray cluster, to which it connects when the first stage is submitted.

    The nodes read the corpus and write the shards themselves. They therefore need this version of Starling, and the
    paths of the corpus and the shards must be the same on all nodes. If a process or node is lost, Ray repeats its
    stages elsewhere, which changes no byte of the result.
    """

    def __init__(self, connect: Callable[[], AbstractContextManager[Any]], retries: int = RETRIES) -> None:
        """Create an executor. `connect` returns a context manager that provides the module `ray`, connected to a
        cluster."""
        super().__init__()
        self._connect, self._retries = connect, retries
        self._stack = ExitStack()
        self._ray: Any = None
        self._task: Any = None

    def window(self) -> int:
        return 2 * max(1, int(self._ray.cluster_resources().get("CPU", 1.0))) if self._ray else 1

    def submit(self, stage: Stage, tick: Tick) -> "Future[int]":
        if self._ray is None:
            self._ray = self._stack.enter_context(self._connect())
            options = {"num_cpus": 1, "max_retries": self._retries, "scheduling_strategy": "SPREAD"}
            self._task = self._ray.remote(**options)(_run_on_node)
        reference = self._task.remote(stage, Path.cwd(), version("starling-asr"))
        future: Future[int] = reference.future()
        self._running[future] = reference
        return future

    def outcome(self, stage: Stage, future: "Future[int]", tick: Tick) -> None:
        from ray.exceptions import RayError, RayTaskError

        try:
            tick(future.result())
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(
                f"set {stage.checking.set_name}: Ray could not write shard {stage.number}: {reason} (it replaces a lost"
                f" process {self._retries} times); if nodes ran out of memory, use a smaller data.shard_size; {_REPEAT}"
            ) from error

    def stop(self, at_once: bool) -> None:
        """Interrupt or kill the running stages, cancel the waiting stages, and return once no stage can write any
        more."""
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


def executor_of(arguments: Sequence[str], address: str = "auto") -> Executor:
    """The executor that `jobs=...` and `executor=...` select; it is not started yet. `address` is the address of the
    Ray cluster.

    Raises:
        ConfigError: A value is wrong, or the arguments contradict each other.
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


def _done(count: int) -> "Future[int]":
    future: Future[int] = Future()
    future.set_result(count)
    return future


def _begin(lifeline: Connection, count: "Synchronized[int]") -> None:
    """Initialise a worker process. It ends when the other end of `lifeline` is closed in all processes."""
    global _num_done
    _num_done = count
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    lifeline.poll(None)
    os._exit(1)


def _run(stage: Stage) -> int:
    def tick(count: int) -> None:
        with _num_done.get_lock():
            _num_done.value += count

    return stage.run(tick)


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
    return stage.run(lambda count: None)
