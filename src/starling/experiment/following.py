"""The launcher's reports about its run: its events, explanations of stalls, `status.json`, and the final summary."""

import os
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from rich.console import Console, Group
from rich.table import Column, Table
from rich.text import Text

from starling.errors import DataError, StarlingError
from starling.events import VERSION, Events
from starling.experiment.folder import ExperimentFolder
from starling.experiment.record import batches_in, ends_of, read_skipped, segments
from starling.experiment.running import learners_of
from starling.launch.messages import Status, encode_file
from starling.launch.roster import LearnerRecord, LearnerState, Roster
from starling.recipe.run import RecipeConfig, RunConfig
from starling.reporting.epochs import SPENT, duration, merged, share
from starling.reporting.goodput import goodput_of
from starling.reporting.progress import Say, say_on
from starling.reporting.stalls import Stalls
from starling.timeouts import LOOK_EVERY

_WIDTH = 120


@contextmanager
def recorded(run: RunConfig, folder: ExperimentFolder, say: Say) -> Generator[Events, None, None]:
    """A context for a whole run, which records its events in `log/events.jsonl`, from its start to its end."""
    events = Events(folder.log / "events.jsonl", lambda path, error: say(unusable(path, error)))
    events.write(
        "start",
        version=VERSION,
        name=run.name,
        strategy=run.strategy.name,
        learners=run.learners,
        pid=os.getpid(),
        command=_command(sys.argv),
    )
    error: BaseException | None = None
    try:
        yield events
    except BaseException as own:
        error = own
        raise
    finally:
        code, message = _ending(error, events.verdict)
        events.write("end", exit_code=code, message=message)
        events.close()


class Following:
    """Reports on a run of real learners; a context manager inside the one that records its `events`.

    The launcher keeps `roster` up to date, and calls `end_training` if training ends well, before the model is scored.
    At the end of the context, a summary is printed and written to `log/summary.txt`. `on_look` is called about once a
    second.
    """

    def __init__(self, run: RunConfig, folder: ExperimentFolder, console: Console, events: Events) -> None:
        self._run = run
        self._folder = folder
        self._console = console
        self._writing = threading.Lock()
        self.roster = Roster(run.learners)
        self.events = events
        self.on_look: Callable[[], None] = lambda: None
        self._stalls = Stalls(self.roster, folder.log, run.engine.explain_seconds)
        self._began = time.time()
        self._first_segment = segments(folder.seen)[-1].name
        self._stage: Literal["training", "scoring", "ended"] = "training"
        self._seconds: float | None = None  # of training, once it has ended
        self._exit_code: int | None = None
        self._message = ""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name="starling-following", daemon=True)

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._stage = "ended"
        self._exit_code, self._message = _ending(error, self.events.verdict)
        how = "ended" if error is None and self.events.verdict else self._message
        if error is not None and self._seconds is not None:
            how = f"trained, but not scored ({self._message})"
        self._sum_up(how)
        self._write()

    def end_training(self) -> None:
        """Record that training has ended well; its model is scored next."""
        self._stage, self._seconds = "scoring", self.roster.clock() - self.roster.began_at
        self._report_stalls()  # those that ended less than a second ago
        self._write()

    def _keep_looking(self) -> None:
        while not self._is_over.wait(LOOK_EVERY):
            self._report_stalls()
            self.on_look()
            self._write()

    def _report_stalls(self) -> None:
        with self.roster.lock:
            told = self._stalls.look()
        for kind, line in told:
            self.events.write(kind, text=line)
            say_on(self._console)(line)

    def _write(self) -> None:
        roster = self.roster
        with roster.lock:
            status = Status(
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
                message=self._message or self.events.verdict,
                goodput=str(goodput_of(roster) or ""),
                machine=os.uname().nodename,
            )
        aside = self._folder.status.with_name(f".{self._folder.status.name}.partial")
        with self._writing:
            try:
                aside.write_text(encode_file(status), encoding="utf-8")
                aside.replace(self._folder.status)
            except OSError as error:
                self.events.warn(self._folder.status, error)

    def _sum_up(self, how: str) -> None:
        roster, counts = self.roster, Counts()
        try:
            counts = read_record(self._folder.seen, self._first_segment)
        except (OSError, DataError) as error:
            self.events.warn(self._folder.seen, error)
        with roster.lock:
            seconds = roster.clock() - roster.began_at if self._seconds is None else self._seconds
            title = f"{self._run.name}, {self._run.strategy.name}: {how}, after {seconds:.0f} s"
            lines = [*_lines(roster, counts, self._stalls.ended, self._run)]
            if (goodput := goodput_of(roster, counts.num_computed or None)) is not None:
                lines.append(Text(str(goodput)))
                self.events.write("goodput", ratio=goodput.ratio, **asdict(goodput))
            summary = Group(Text(title), _table(roster, counts), *lines)
        self._print(self._console, summary)
        path = self._folder.log / "summary.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8") as file:
                self._print(Console(file=file, width=_WIDTH, force_jupyter=False), summary)
        except OSError as error:
            self.events.warn(path, error)

    def _print(self, console: Console, summary: Group) -> None:
        if self.events.verdict:
            say_on(console)(self.events.verdict)
        console.print(summary, markup=False, highlight=False)


def _command(arguments: Sequence[str]) -> str:
    """The command line with which this process was started, for a shell."""
    program, *rest = arguments or ["starling"]
    is_own = Path(program).name == "starling" or Path(program).parts[-2:] == ("starling", "__main__.py")
    return shlex.join(["starling", *rest] if is_own else ["python", program, *rest])


def unusable(path: Path, error: Exception) -> str:
    """The warning that a file of the experiment cannot be read or written."""
    return f"warning: {path} cannot be used ({error}); the run continues without it"


def _ending(error: BaseException | None, verdict: str) -> tuple[int, str]:
    """The exit code of a run, and how it ended in words: without an error, by the verdict on its model, if there is
    one."""
    if error is None:
        return 0, verdict or "ended well"
    others = 130 if isinstance(error, KeyboardInterrupt) else 1
    code = error.exit_code if isinstance(error, StarlingError) else others
    return code, (str(error).splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True)
class Counts:
    """Counts from a run's record of mini-batches, without the runs that it resumed."""

    num_computed: Mapping[int, int] = field(default_factory=dict)
    """Number of mini-batches that each learner computed; empty if there is no record."""
    num_again: int = 0
    """Number of mini-batches that were re-issued after a membership change."""
    num_skipped: int = 0
    """Number of utterances that could not be used, summed over epochs."""


def read_record(seen: Path, first_segment: str) -> Counts:
    """Sum up the records of learners since the start of segment `first_segment`. Raises DataError if a record is
    damaged."""
    begun = segments(seen)
    names = [each.name for each in begun]
    own = begun[names.index(first_segment) if first_segment in names else 0 :]
    ends = ends_of(own)
    num_computed = Counter(batch.learner for batch in batches_in(own, ends))
    num_again = sum(len(end.outstanding) for end in ends if end is not None)
    return Counts(num_computed, num_again, sum(map(len, read_skipped(own).values())))


def _table(roster: Roster, counts: Counts) -> Table:
    numbered = ("learner", "batches", "share", "computing", "waiting for data", "for peers")
    table = Table(*(Column(heading, justify="right") for heading in numbered), "outcome")
    learners = sorted(roster.learners.items())
    numbers = counts.num_computed or {learner_id: learner.num_steps for learner_id, learner in learners}
    total = sum(numbers.values())
    for learner_id, learner in learners:
        number, every = numbers.get(learner_id, 0), merged(each.so_far for each in learner.epochs)
        spent = [f"{share(every, what):.1f} %" if every.seconds > 0.0 else "" for what in SPENT]
        part = f"{100 * number / total:.1f} %" if total else ""
        table.add_row(str(learner_id), str(number), part, *spent, _became(learner))
    return table


def _lines(roster: Roster, counts: Counts, waits: Sequence[str], run: RunConfig) -> Iterator[Text]:
    """The lines below the table. `waits` are the lines about stalls that have ended."""
    lines = [f"lost after {duration(each.at - roster.began_at)}: {each.reason}" for each in roster.lost]
    joined = [str(each.learner_id) for each in roster.learners.values() if each.num_joins]
    if joined:
        lines.append(f"joined the running experiment: learner {', '.join(joined)}")
    if roster.lost or roster.generation > 0:
        can_audit = isinstance(run, RecipeConfig)  # not a job of `starling.train`, which is not in the folder
        advice = f"; to check that nothing was missed: starling audit {run.folder}" if can_audit else ""
        lines.append(f"{counts.num_again} mini-batches that others had begun were re-issued{advice}")
    if counts.num_skipped:
        lines.append(f"skipped utterances: {counts.num_skipped}, listed in {run.folder}/seen")
    if num_not_finite := sum(each.done.num_not_finite for each in roster.learners.values()):
        lines.append(f"gradients that were not finite and left out: {num_not_finite}")
    lines += waits
    lines.append(f"checkpoints: {roster.num_saved}, the newest {roster.saved}" if roster.saved else "checkpoints: none")
    return map(Text, lines)


def _became(learner: LearnerRecord) -> str:
    how = str(learner.state.value) if learner.is_out or learner.state is LearnerState.ENDED else "was ended"
    return f"joined, {how}" if learner.num_joins and not learner.is_out else how
