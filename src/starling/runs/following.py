"""A launcher follows its run: it explains what stands still, writes `status.json`, and sums up in the end."""

import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from starling.errors import DataError, StarlingError
from starling.report.progress import say_on
from starling.report.roster import Roster
from starling.report.stalls import Stalls
from starling.report.status import Status, learners_of
from starling.report.summary import Record, summarise
from starling.runs.experiment.folder import ExperimentFolder
from starling.runs.experiment.seen import segments, start_of
from starling.runs.recipe.recipe import Recipe

LOOK_SECONDS = 1.0
"""Between two looks at all learners, and two writings of `status.json`."""
_WIDTH = 120


class Following:
    """What is known of a run of real learners, as a context manager around all of it.

    `hear` and `lose` are for what the launcher hears of. When the context ends there is a summary on the console and
    in `log/summary.txt`, however the run ended; `scoring` is for what comes after a good one.
    """

    def __init__(self, recipe: Recipe, folder: ExperimentFolder, console: Console) -> None:
        self._recipe = recipe
        self._folder = folder
        self._console = console
        self._say = say_on(console)
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._roster = Roster(recipe.learners)
        self._stalls = Stalls(
            self._roster, lambda name: f"{folder.log}/learner-{name}.log", recipe.engine.explain_seconds
        )
        self._began = time.time()
        self._first_segment = segments(folder.seen)[-1].name
        self._stage, self._message = "training", ""
        self._exit_code: int | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look_again_and_again, name="starling-following", daemon=True)
        self._has_warned = False

    def hear(self, learner: int, message: dict[str, Any]) -> None:
        """A learner has sent a message."""
        with self._lock:
            self._roster.hear(learner, message)

    def lose(self, learner: int, reason: str) -> None:
        """The others go on without a learner."""
        with self._lock:
            self._roster.lose(learner, reason)

    def leave_out(self, learner: int, reason: str) -> None:
        """A learner was started, and did not join."""
        with self._lock:
            self._roster.leave_out(learner)

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._stage = "scoring"
        else:
            self._end(error)
        self._sum_up("ended well" if error is None else _first_line(error))
        self._write()

    @contextmanager
    def scoring(self) -> Generator[None, None, None]:
        """What follows a run that ended well, as long as the context lasts."""
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
        self._stage, self._message = "ended", "ended well" if error is None else _first_line(error)
        self._exit_code = _exit_code(error)

    def _look_again_and_again(self) -> None:
        while not self._is_over.wait(LOOK_SECONDS):
            with self._lock:
                lines = self._stalls.look()
            for line in lines:
                self._say(line)
            self._write()

    def _status(self) -> Status:
        roster = self._roster
        return Status(
            name=self._recipe.name,
            strategy=self._recipe.strategy.name,
            stage=self._stage,
            began=self._began,
            written=time.time(),
            pid=os.getpid(),
            view=roster.view,
            learners=tuple(learners_of(roster)),
            losses=tuple(each.reason for each in roster.losses),
            saved=roster.saved,
            saved_age=roster.clock() - roster.saved_at if roster.saved else 0.0,
            exit_code=self._exit_code,
            message=self._message,
        )

    def _write(self) -> None:
        with self._lock:
            text = self._status().encode()
        aside = self._folder.status.with_name(f".{self._folder.status.name}.partial")
        with self._writing:
            try:
                aside.write_text(text, encoding="utf-8")
                aside.replace(self._folder.status)
            except OSError as error:
                self._warn(self._folder.status, error)

    def _sum_up(self, how: str) -> None:
        roster = self._roster
        took = roster.clock() - roster.began_at
        title = f"{self._recipe.name}, {self._recipe.strategy.name}: {how}, after {took:.0f} s"
        with self._lock:
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
        """Once: it is no reason for a run to end."""
        if not self._has_warned:
            self._has_warned = True
            self._say(f"warning: {path} cannot be used ({error}); the run goes on without it")


def read_record(seen: Path, first_segment: str) -> Record:
    """What learners wrote down since a start of the run, that one included. What cannot be read does not count."""
    begun = segments(seen)
    names = [each.name for each in begun]
    own = begun[names.index(first_segment) if first_segment in names else 0 :]
    num_computed: dict[int, int] = {}
    num_again = num_skipped = 0
    for place, segment in enumerate(own):
        for path in segment.glob("learner-*.tsv"):
            name = int(path.stem.removeprefix("learner-"))
            num_computed[name] = num_computed.get(name, 0) + _count_lines(path)
        num_skipped += sum(_count_lines(path) for path in segment.glob("skipped-*.tsv"))
        if place > 0:
            num_again += _given_again(segment)
    return Record(num_computed, num_again, num_skipped)


def _given_again(segment: Path) -> int:
    try:
        return len(start_of(segment).outstanding)
    except DataError:
        return 0


def _count_lines(path: Path) -> int:
    """Whole lines below the header."""
    with path.open("rb") as file:
        return max(0, sum(line.endswith(b"\n") for line in file) - 1)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, StarlingError) else 1
