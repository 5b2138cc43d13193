"""The launcher's reports about its run: explanations of stalls, `status.json`, and the final summary."""

import os
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from starling.errors import StarlingError
from starling.experiment.folder import ExperimentFolder
from starling.experiment.running import learners_of
from starling.experiment.seen import count_lines, ends_of, segments
from starling.launch.messages import Status, encode_file
from starling.launch.roster import LearnerRecord, LearnerState, Roster
from starling.recipe.run import RunConfig
from starling.reporting.epochs import together
from starling.reporting.events import Events
from starling.reporting.lines import duration, share
from starling.reporting.progress import say_on
from starling.reporting.stalls import Stalls
from starling.timeouts import LOOK_EVERY

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
        counts = Counts()
        with roster.lock:
            try:
                counts = read_record(self._folder.seen, self._first_segment)
            except OSError as error:
                self._warn(self._folder.seen, error)
            summary = summarise(title, roster, counts, self._stalls.ended, str(self._folder.path))
        self._console.print(summary, markup=False, highlight=False)
        path = self._folder.log / "summary.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8") as file:
                Console(file=file, width=_WIDTH).print(summary, markup=False, highlight=False)
        except OSError as error:
            self._warn(path, error)

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


@dataclass(frozen=True)
class Counts:
    """Of a run's record of mini-batches, without the runs that it resumed."""

    num_computed: Mapping[int, int] = field(default_factory=dict)
    """Mini-batches computed by each learner."""
    num_again: int = 0
    """Mini-batches that were re-issued after a change of the membership."""
    num_skipped: int = 0
    """Utterances that could not be used, counted each time they were skipped."""


def read_record(seen: Path, first_segment: str) -> Counts:
    """Sum up what learners recorded since the start of segment `first_segment`."""
    begun = segments(seen)
    names = [each.name for each in begun]
    own = begun[names.index(first_segment) if first_segment in names else 0 :]
    ends, num_computed = ends_of(own), Counter[int]()
    for segment, end in zip(own, ends, strict=True):
        for path in segment.glob("learner-*.tsv"):
            num_computed[int(path.stem.removeprefix("learner-"))] += count_lines(path, end)
    num_skipped = sum(count_lines(path) for segment in own for path in segment.glob("skipped-*.tsv"))
    return Counts(num_computed, sum(len(end.outstanding) for end in ends if end is not None), num_skipped)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, StarlingError) else 1


def summarise(title: str, roster: Roster, counts: Counts, waits: Sequence[str], experiment: str) -> Group:
    """The table, and the lines below it. `waits` are the lines about stalls that have ended."""
    table = Table()
    for heading in ("learner", "batches", "share", "computing", "waiting for data", "for peers", "outcome"):
        table.add_column(heading, justify="left" if heading == "outcome" else "right")
    numbers = {each: counts.num_computed.get(each, learner.num_steps) for each, learner in roster.learners.items()}
    total = sum(numbers.values())
    for learner_id, learner in sorted(roster.learners.items()):
        share = f"{100 * numbers[learner_id] / total:.1f} %" if total else ""
        table.add_row(str(learner_id), str(numbers[learner_id]), share, *_shares(learner), _became(learner))
    return Group(Text(title), table, *(Text(line) for line in _lines(roster, counts, waits, experiment)))


def _lines(roster: Roster, counts: Counts, waits: Sequence[str], experiment: str) -> list[str]:
    lines = [f"lost after {duration(each.at - roster.began_at)}: {each.reason}" for each in roster.lost]
    joined = [str(each.learner_id) for each in roster.learners.values() if each.num_joins]
    if joined:
        lines.append(f"joined the running experiment: learner {', '.join(joined)}")
    if roster.lost or roster.generation > 0:
        lines.append(
            f"{counts.num_again} mini-batches that others had begun were re-issued; to check that nothing was missed: "
            f"starling audit {experiment}"
        )
    if counts.num_skipped:
        lines.append(f"skipped utterances: {counts.num_skipped}, listed in {experiment}/seen")
    if num_not_finite := sum(end.num_not_finite for each in roster.learners.values() for end in each.epochs):
        lines.append(f"gradients that were not finite and left out: {num_not_finite}")
    lines += waits
    lines.append(f"checkpoints: {roster.num_saved}, the newest {roster.saved}" if roster.saved else "checkpoints: none")
    return lines


def _shares(learner: LearnerRecord) -> list[str]:
    all_epochs = together(learner.epochs)
    if all_epochs.seconds <= 0.0:
        return [""] * 3  # it reported no epoch
    return [f"{share(all_epochs, what):.1f} %" for what in ("computing", "waiting_for_data", "waiting_for_peers")]


def _became(learner: LearnerRecord) -> str:
    if learner.state is LearnerState.LOST:
        return "lost"
    if learner.state is LearnerState.LEFT:
        return "left"
    joined = "joined, " if learner.num_joins else ""
    return f"{joined}{'ended' if learner.state is LearnerState.ENDED else 'was ended'}"
