"""The launcher's reports about its run: its events, explanations of stalls, `status.json`, and the final summary.

Also `starling status` and `starling join`, which show a running experiment, and add learners to it, from another
terminal.
"""

import os
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table

from starling.errors import ConfigError, DataError, PeerLost, ProtocolError, StarlingError
from starling.events import VERSION, Events
from starling.experiment.folder import ExperimentFolder, existing
from starling.experiment.record import batches_in, ends_of, read_skipped, segments
from starling.files import writing
from starling.launch.joiners import ask, launcher_id, take_answer, withdraw
from starling.launch.messages import LearnerStatus, Status, decode_file, encode_file
from starling.launch.roster import LearnerRecord, LearnerState, Roster
from starling.recipe.run import RunConfig
from starling.reporting.epochs import SPENT, duration, merged, share
from starling.reporting.goodput import goodput_of
from starling.reporting.progress import Prose, Say, Stalls, say_on
from starling.timeouts import ANSWER_EVERY, LOOK_EVERY, STATUS_FRESH

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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._stage = "ended"
        self._exit_code, self._message = _ending(error, self.events.verdict)
        stopped = self._message.partition(", saved ")[0]  # the checkpoint has a line of its own
        how = "ended" if error is None and self.events.verdict else stopped
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
            whole = f"whole run {duration(roster.clock() - roster.began_at)}"
            training = f"; start and training {duration(self._seconds)}, " if self._seconds is not None else "; "
            title = f"{self._run.name}, {self._run.strategy.name}: {how}{training}{whole}"
            lines = [*_lines(roster, counts, self._stalls.ended, self._run)]
            if (goodput := goodput_of(roster, counts.num_computed or None)) is not None:
                lines.append(Prose(str(goodput)))
                self.events.write("goodput", ratio=goodput.ratio, **asdict(goodput))
            summary = Group(Prose(title), _table(roster, counts), *lines)
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


def _lines(roster: Roster, counts: Counts, waits: Sequence[str], run: RunConfig) -> Iterator[Prose]:
    """The lines below the table. `waits` are the lines about stalls that have ended."""
    lines = [f"lost {duration(each.at - roster.began_at)} after the start: {each.reason}" for each in roster.lost]
    joined = [str(each.learner_id) for each in roster.learners.values() if each.num_joins]
    if joined:
        lines.append(f"joined the running experiment: learner {', '.join(joined)}")
    if roster.lost or roster.generation > 0:
        advice = f"to check that nothing was missed: starling audit {run.folder}"
        lines.append(f"{counts.num_again} mini-batches that others had begun were re-issued; {advice}")
    if counts.num_skipped:
        lines.append(f"skipped utterances: {counts.num_skipped}, listed in {run.folder}/seen")
    if num_not_finite := sum(each.done.num_not_finite for each in roster.learners.values()):
        lines.append(f"gradients that were not finite and left out: {num_not_finite}")
    lines += waits
    lines.append(f"checkpoints: {roster.num_saved}, the newest {roster.saved}" if roster.saved else "checkpoints: none")
    return map(Prose, lines)


def _became(learner: LearnerRecord) -> str:
    how = str(learner.state.value) if learner.is_out or learner.state is LearnerState.ENDED else "was ended"
    return f"joined, {how}" if learner.num_joins and not learner.is_out else how


def status(experiment: Path, watch: bool, output: Console) -> None:
    """Print the state of an experiment; with `watch`, update it until the run ends or its launcher is gone.

    Raises ConfigError if the folder is not an experiment or has no status, DataError if the status is damaged.
    """
    read = read_status(experiment)
    if not watch:
        output.print(describe(read, time.time(), is_alive(read)), highlight=False)
        return
    with Live(console=output, auto_refresh=False) as live:
        while True:
            alive = is_alive(read)
            live.update(describe(read, time.time(), alive), refresh=True)
            if read.stage == "ended" or not alive:
                return
            time.sleep(LOOK_EVERY)
            read = read_status(experiment)


def read_status(experiment: Path) -> Status:
    """The last status that an experiment's launcher has written."""
    folder = existing(experiment)
    try:
        return decode_file(Status, folder.status.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{experiment}: no status.json, because it never ran under `starling train`; simulations, and learners "
            "that torchrun or Slurm start, do not write one"
        ) from None
    except (OSError, ProtocolError) as error:
        raise DataError(
            f"{folder.status}: cannot be read ({error}); a running launcher rewrites it every second"
        ) from error


def is_alive(status: Status) -> bool:
    """Whether the launcher that wrote a status still runs: the status is recent, and the process exists, as far as this
    machine can tell."""
    is_recent, is_here = time.time() - status.written < STATUS_FRESH, status.machine in ("", os.uname().nodename)
    try:
        if is_recent and is_here:
            os.kill(status.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process exists and belongs to another user
        return True
    return is_recent


def learners_of(roster: Roster) -> Iterator[LearnerStatus]:
    """The present status of all learners of a roster."""
    now = roster.clock()
    for record in sorted(roster.learners.values(), key=lambda each: each.learner_id):
        yield LearnerStatus(
            learner_id=record.learner_id,
            rank=record.rank,
            state=state_of(record, roster),
            num_steps=record.num_steps,
            loss=record.loss,
            heard=None if record.attempt.heard_at is None else now - record.attempt.heard_at,
            log=f"log/learner-{record.learner_id}.log",
            node=record.process.node,
        )


def state_of(record: LearnerRecord, roster: Roster) -> str:
    """A learner's state as text: `silent`, or else its state; during training, its computation or its wait."""
    if silence := roster.silence(record):
        return f"silent for {duration(silence)}"
    if record.state is LearnerState.READY:
        return "ready to join"
    if record.state is not LearnerState.TRAINING:
        return str(record.state.value)
    attempt, wait = record.attempt, record.attempt.wait
    if wait is not None and not wait.is_behind:
        is_named = wait.is_group or not wait.whom or f"learner {wait.whom[0]}" in wait.what
        whom = "" if is_named else f" for learner {', '.join(map(str, wait.whom[:8]))}"
        return f"waiting {duration(wait.seconds)} in {wait.what}{whom}"
    return attempt.doing if attempt.doing.startswith("computing") else "computing"


def describe(status: Status, now: float, is_alive: bool) -> Group:
    """A status as a table with text, at time `now`; `is_alive` says whether its launcher runs."""
    has_nodes = any(each.node for each in status.learners)
    right, folded = partial(Column, justify="right"), partial(Column, overflow="fold")
    nodes = [folded("node")] if has_nodes else []
    table = Table(right("learner"), "state", *map(right, ("batches", "loss", "last heard")), *nodes, folded("log"))
    since = max(0.0, now - status.written)
    for each in status.learners:
        heard = "none yet" if each.heard is None else f"{duration(each.heard + since)} ago"
        loss = "" if each.loss is None else f"{each.loss:.4f}"
        node = [each.node] if has_nodes else []
        table.add_row(str(each.learner_id), each.state, str(each.num_steps), loss, heard, *node, each.log)
    lines = [f"lost: {loss}" for loss in status.losses]
    if status.goodput:
        lines.append(status.goodput)
    if status.saved:
        lines.append(f"newest checkpoint: {status.saved}, saved {duration(status.saved_age + since)} ago")
    else:
        lines.append("no checkpoint of this run yet")
    if status.stage != "ended" and status.message:
        lines.insert(0, status.message)
    return Group(Prose(_title(status, now, is_alive)), table, *map(Prose, lines))


def _title(status: Status, now: float, is_alive: bool) -> str:
    what = f"{status.name}, {status.strategy}"
    if status.stage == "ended":
        took, ago = duration(status.written - status.began), duration(max(0.0, now - status.written))
        return f"{what}: ended {ago} ago, whole run {took}, exit code {status.exit_code}: {status.message}"
    since = f"{status.stage}, run began {duration(max(0.0, now - status.began))} ago"
    generation = f", membership {status.generation}" if status.generation >= 0 else ""
    if is_alive:
        return f"{what}: {since}{generation}"
    silent = duration(max(0.0, now - status.written))
    return f"{what}: its launcher (process {status.pid}) is gone or stalled; it wrote this {silent} ago, {since}"


def join(experiment: Path, learners: int, tell: Say) -> None:
    """Ask for more learners in a running experiment, and wait until they train.

    Raises ConfigError if nothing runs there or the request is refused, PeerLost if a learner failed while joining or
    the run ended first.
    """
    folder = existing(experiment)
    launcher = launcher_id(folder.joins)
    if launcher is None:
        raise ConfigError(f"{experiment}: nothing runs here; start it with: starling train {folder.config}")
    with writing(folder.joins, f"to add learners you need write access to {experiment}"):
        request = ask(folder.joins, learners)
    try:
        while True:
            is_over = launcher_id(folder.joins) != launcher  # checked before the last look for an answer
            if answer := take_answer(folder.joins, request):
                break
            if is_over:
                raise PeerLost(f"{experiment}: the run ended before a learner joined")
            time.sleep(ANSWER_EVERY)
    finally:
        withdraw(folder.joins, request)
    if answer.refused:
        raise ConfigError(f"{experiment}: no learner was added: {answer.refused}")
    if answer.joined:
        names = ", ".join(map(str, answer.joined))
        tell(f"joined as learner {names}; {answer.learners} learners train now; logs: {folder.log}")
    if answer.failed:
        raise PeerLost(f"{experiment}: " + "; ".join(answer.failed))
