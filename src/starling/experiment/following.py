"""The launcher's reports about its run: explanations of stalls, `status.json`, and the final summary."""

import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from rich.console import Console

from starling.errors import DataError, StarlingError
from starling.experiment.folder import ExperimentFolder
from starling.experiment.seen import count_lines, segments, start_of
from starling.launch.messages import Status, encode_file
from starling.launch.roster import Roster
from starling.recipe.run import RunConfig
from starling.reporting.events import Events
from starling.reporting.progress import say_on
from starling.reporting.stalls import Stalls
from starling.reporting.status import Record, learners_of, summarise
from starling.timeouts import LOOK_EVERY
from starling.workload import Position

_WIDTH = 120


class Following:
    """Reports on a run of real learners; a context manager around the whole run.

    The launcher keeps `roster` up to date; `events` are written to `log/events.jsonl`. When the context ends, a summary
    is printed and written to `log/summary.txt`, however the run ended. `scoring` is the context for scoring after a
    successful run. `on_look` is called about once a second.
    """

    def __init__(self, run: RunConfig, folder: ExperimentFolder, console: Console) -> None:
        self._run = run
        self._folder = folder
        self._console = console
        self._say = say_on(console)
        self._writing = threading.Lock()
        self.roster = Roster(run.learners)
        self.events = Events(folder.log / "events.jsonl", self._warn)
        self.on_look: Callable[[], None] = lambda: None
        self._stalls = Stalls(
            self.roster, lambda learner: f"{folder.log}/learner-{learner}.log", run.engine.explain_seconds
        )
        self._began = time.time()
        self._first_segment = segments(folder.seen)[-1].name
        self._stage: Literal["training", "scoring", "ended"] = "training"
        self._message = ""
        self._exit_code: int | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name="starling-following", daemon=True)
        self._has_warned = False

    def __enter__(self) -> Self:
        tell_start(self.events, self._run)
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._stage = "scoring"
            self._report_stalls()  # those that ended less than a second ago
        else:
            self._end(error)
        self._sum_up("ended well" if error is None else _first_line(error))
        self._write()

    @contextmanager
    def scoring(self) -> Generator[None, None, None]:
        """The context for scoring after a successful run."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as own:
            error = own
            raise
        finally:
            self._end(error)
            self._write()

    def _end(self, error: BaseException | None) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._stage = "ended"
        self._exit_code, self._message = tell_end(self.events, error)

    def _keep_looking(self) -> None:
        while not self._is_over.wait(LOOK_EVERY):
            self._report_stalls()
            self.on_look()
            self._write()

    def _report_stalls(self) -> None:
        with self.roster.lock:
            lines = self._stalls.look()
            over = self._stalls.ended[-len(lines) :] if lines else []
        for line in lines:
            self.events.write("stall-over" if line in over else "stall", text=line)
            self._say(line)

    def _status(self) -> Status:
        roster = self.roster
        return Status(
            name=self._run.name,
            strategy=self._run.strategy.name,
            stage=self._stage,
            began=self._began,
            written=time.time(),
            pid=os.getpid(),
            generation=roster.generation,
            learners=tuple(learners_of(roster)),
            losses=tuple(each.reason for each in roster.lost),
            saved=roster.saved,
            saved_age=roster.clock() - roster.saved_at if roster.saved else 0.0,
            exit_code=self._exit_code,
            message=self._message,
            machine=os.uname().nodename,
        )

    def _write(self) -> None:
        with self.roster.lock:
            text = encode_file(self._status())
        aside = self._folder.status.with_name(f".{self._folder.status.name}.partial")
        with self._writing:
            try:
                aside.write_text(text, encoding="utf-8")
                aside.replace(self._folder.status)
            except OSError as error:
                self._warn(self._folder.status, error)

    def _sum_up(self, how: str) -> None:
        roster = self.roster
        took = roster.clock() - roster.began_at
        title = f"{self._run.name}, {self._run.strategy.name}: {how}, after {took:.0f} s"
        with roster.lock:
            record = self._record()
            summary = summarise(title, roster, record, self._stalls.ended, str(self._folder.path))
        self._console.print(summary, markup=False, highlight=False)
        path = self._folder.log / "summary.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8") as file:
                Console(file=file, width=_WIDTH).print(summary, markup=False, highlight=False)
        except OSError as error:
            self._warn(path, error)

    def _record(self) -> Record:
        try:
            return read_record(self._folder.seen, self._first_segment)
        except OSError as error:
            self._warn(self._folder.seen, error)
            return Record()

    def _warn(self, path: Path, error: OSError) -> None:
        """Warn once that a file cannot be used; the run continues."""
        if not self._has_warned:
            self._has_warned = True
            self._say(unusable(path, error))


def tell_start(events: Events, run: RunConfig) -> None:
    """The event with which a run begins."""
    events.write(
        "start",
        name=run.name,
        strategy=run.strategy.name,
        learners=run.learners,
        pid=os.getpid(),
        command=_command(sys.argv),
    )


def tell_end(events: Events, error: BaseException | None) -> tuple[int, str]:
    """The event with which a run ends, the last one; its exit code and message."""
    code, message = _exit_code(error), "ended well" if error is None else _first_line(error)
    events.write("end", exit_code=code, message=message)
    events.close()
    return code, message


def _command(arguments: Sequence[str]) -> str:
    """The command that this process was started with, for a shell."""
    program, *rest = arguments or ["starling"]
    is_own = Path(program).name == "starling" or Path(program).parts[-2:] == ("starling", "__main__.py")
    return shlex.join(["starling", *rest] if is_own else ["python", program, *rest])


def unusable(path: Path, error: OSError) -> str:
    """The warning that a file of the experiment cannot be read or written."""
    return f"warning: {path} cannot be used ({error}); the run continues without it"


def read_record(seen: Path, first_segment: str) -> Record:
    """Sum up what learners recorded since the start of segment `first_segment`."""
    begun = segments(seen)
    names = [each.name for each in begun]
    own = begun[names.index(first_segment) if first_segment in names else 0 :]
    num_computed: dict[int, int] = {}
    num_again = num_skipped = 0
    for place, segment in enumerate(own):
        until = _start_of(own[place + 1]) if place + 1 < len(own) else None
        for path in segment.glob("learner-*.tsv"):
            learner = int(path.stem.removeprefix("learner-"))
            num_computed[learner] = num_computed.get(learner, 0) + count_lines(path, until)
        num_skipped += sum(count_lines(path) for path in segment.glob("skipped-*.tsv"))
        if place > 0 and (start := _start_of(segment)) is not None:
            num_again += len(start.outstanding)
    return Record(num_computed, num_again, num_skipped)


def _start_of(segment: Path) -> Position | None:
    """Where a segment starts; None if that is damaged."""
    try:
        return start_of(segment)
    except DataError:
        return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, StarlingError) else 1
