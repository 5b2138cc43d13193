"""The joiners of a running experiment: how they are requested, which have been started, and how each attempt ended.

Other processes request them by files in the experiment's folder.

    joins/open                  locked by the launcher while it takes requests; its content identifies the launcher
    joins/request-<id>.json     a `JoinRequest`; removed by the launcher once it has been read
    joins/answer-<id>.json      a `JoinAnswer`; removed by the process that sent the request

Files are written under a temporary name and renamed. Any user with write access to the folder can send a request.
"""

import fcntl
import math
import secrets
import signal
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from starling.errors import ProtocolError, StarlingError
from starling.files import replace_file
from starling.launch.messages import JoinAnswer, JoinRequest, decode_file, encode_file
from starling.launch.process import end_loaders
from starling.launch.roster import LearnerRecord, LearnerState, Loss, Roster
from starling.timeouts import JOINER_FRESH, LOCK, REQUESTS_EVERY, Seconds
from starling.training.faults import Join, Kill, Pause

MAX_LEARNERS = 4096
_LOCK, _REQUEST, _ANSWER = "open", "request-{}.json", "answer-{}.json"
Succession = Callable[[Sequence[int], Collection[int], Sequence[int]], tuple[int, ...]]
"""Computes the members of the next membership, in rank order, from the members of the current one, the ids of lost
learners and the ids of joiners; see `Strategy.successors`."""


Requests = Callable[[], Iterable["Request"]]


@dataclass(eq=False)
class Request:
    """A request at the launcher, from its arrival to its answer."""

    learners: int
    """Number of learners to add; 0, which is refused, if it could not be read."""
    path: Path
    """File of the request's answer."""
    outcomes: dict[int, str | None] = field(default_factory=dict)
    """Outcome of each learner, once the request was granted: why it has failed, empty if it has joined, None if neither
    has happened yet."""

    def answer(self, answer: JoinAnswer) -> None:
        """Write the answer."""
        with suppress(OSError):  # a full disk must not end the run
            replace_file(self.path, encode_file(answer))


def _take(folder: Path) -> Generator[Request, None, None]:
    """Remove and return the new requests in a folder that this launcher has locked."""
    for path in sorted(folder.glob(_REQUEST.format("*"))):
        answer = folder / _ANSWER.format(path.stem.removeprefix("request-"))
        with suppress(OSError):
            content = path.read_bytes()
            path.unlink()
            try:
                learners = decode_file(JoinRequest, content).learners
            except ProtocolError:
                learners = 0
            yield Request(learners, answer)


@contextmanager
def taking_requests(folder: Path) -> Generator[Requests | None, None, None]:
    """Take requests inside the context; yields None if the folder cannot be written, or another launcher takes requests
    there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("ab")
    except OSError:
        yield None
        return
    with lock:
        deadline = time.monotonic() + LOCK
        while not (is_ours := _lock(lock.fileno(), fcntl.LOCK_EX)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not is_ours:
            yield None
            return
        for old in (*folder.glob(_REQUEST.format("*")), *folder.glob(_ANSWER.format("*"))):
            old.unlink(missing_ok=True)
        with suppress(OSError):  # the disk may be full
            lock.truncate(0)
            lock.write(secrets.token_hex(8).encode())
            lock.flush()
        yield partial(_take, folder)


@dataclass(frozen=True)
class Changes:
    """Rules for changes of the set of learners during a run, and the functions that are called at a change."""

    on_loss: Literal["stop", "continue", "replace"] = "stop"
    """Reaction to a killed learner: the run ends, the others continue, or it is restarted as well."""
    silence_seconds: Seconds = math.inf
    """Time without a heartbeat after which a learner is killed."""
    succession: Succession = lambda members, lost, joining: (*(each for each in members if each not in lost), *joining)
    faults: Sequence[Kill | Pause | Join] = ()
    """Learners that are killed, are paused or join at given times, in this order."""
    requests: Requests | None = None
    """Function that takes the new requests of other processes for more learners; None if there can be none."""
    is_enough: Callable[[], bool] = lambda: False
    """Whether the learners should save and end before their budget is spent, which is no error."""
    say: Callable[[str], None] = lambda line: None
    on_lost: Callable[[Loss], None] = lambda loss: None
    """Called when the others continue without a learner."""
    on_join: Callable[[int, int], None] = lambda learner_id, num_learners: None
    """Called when a learner has joined, with the number of learners that now train."""
    on_left_out: Callable[[int, str], None] = lambda learner_id, reason: None
    """Called when a joiner was started but did not join, with the reason."""


class Joiners:
    """Requested and started joiners, each until it trains or has failed.

    `start` starts a process for a learner that has none running.
    """

    def __init__(self, changes: Changes, roster: Roster, start: Callable[[int], None]) -> None:
        self._changes, self._roster, self._start = changes, roster, start
        self._wanted: list[int] = []
        self._requests: list[Request] = []
        """Granted requests, until each of their learners trains or has failed."""
        self._timed = list(changes.faults)
        self._paused: dict[int, float] = {}  # until when, by learner
        self._begin: float | None = None
        self._next_look = 0.0

    def want(self, learner_ids: Iterable[int]) -> None:
        """Request these learners: `tend` starts each once its previous process, if any, has exited."""
        self._wanted = list(dict.fromkeys([*self._wanted, *learner_ids]))

    def tend(self, is_ending: bool) -> None:
        """Take new requests, and start the requested learners.

        Called only after all members, except joiners still on their way, have entered a membership. `is_ending` is
        true once one of them has exited: then requests are refused, and no learner is started.
        """
        now = self._roster.clock()
        self._begin = now if self._begin is None else self._begin
        while self._timed and now - self._begin >= (self._timed[0].at_seconds or 0.0):
            self._cause(self._timed.pop(0), now)
        self.wake(now)
        if self._changes.requests is not None and now >= self._next_look:
            self._next_look = now + REQUESTS_EVERY
            for request in self._changes.requests():
                if problem := self._grant(request, is_ending):
                    self._changes.say(f"a request for learners was refused: {problem}")
                    request.answer(JoinAnswer(refused=problem))
        if is_ending:
            return
        running = {each.learner_id for each in self._roster.learners.values() if each.process.is_running}
        for learner_id in [each for each in self._wanted if each not in running]:
            self._wanted.remove(learner_id)
            try:
                self._start(learner_id)
            except OSError as error:  # for example out of memory; the run continues without this joiner
                reason = f"learner {learner_id} could not be started ({error})"
                self._changes.say(reason)
                self._note(learner_id, reason)

    def wake(self, now: float = math.inf) -> None:
        """Resume the learners whose pauses end at `now` or earlier; by default, all of them. If the others have given
        up one of them meanwhile, it is started again."""
        for learner_id in [each for each, until in self._paused.items() if now >= until]:
            del self._paused[learner_id]
            process = self._roster.learners[learner_id].process
            if process.is_running:
                process.signal(signal.SIGCONT)
            elif now < math.inf and learner_id not in {*self._roster.members, *self._coming()}:
                self.want([learner_id])

    def _cause(self, fault: Kill | Pause | Join, now: float) -> None:
        """Let a fault happen now, if it can."""
        learner_id, problem = fault.learner, ""
        record = self._roster.learners.get(learner_id)
        if isinstance(fault, Join):
            if learner_id in {*self._roster.members, *self._coming()}:
                problem = "does not join, because it is already running or starting"
            else:
                self.want([learner_id])
        elif record is None or not record.process.is_running:
            problem = "cannot be killed or paused, because it does not run"
        elif isinstance(fault, Kill):
            record.process.signal(signal.SIGKILL)
        else:
            record.process.signal(signal.SIGSTOP)
            self._paused[learner_id] = max(now + fault.seconds, self._paused.get(learner_id, 0.0))
        if problem:
            self._changes.say(f"faults: learner {learner_id} {problem}")

    def ready(self) -> tuple[list[int], tuple[int, ...]]:
        """The joiners to admit now, oldest first, and the members of the next membership. Of the ready joiners, as many
        are admitted as the strategy can use; both results are empty if that is none."""
        ready = [
            each.learner_id
            for each in self._roster.joining(is_member=False)
            if each.state is LearnerState.READY
            and each.process.is_running
            and self._roster.since_heard(each) < JOINER_FRESH
        ]
        for number in range(len(ready), 0, -1):
            try:
                return ready[:number], self._changes.succession(self._roster.members, (), ready[:number])
            except StarlingError:
                continue
        return [], ()

    def joined(self, learner_id: int) -> None:
        """Record that a joiner has started training."""
        self._changes.on_join(learner_id, len(self._roster.members))
        self._note(learner_id, "")

    def settle(self, exited: Collection[int]) -> list[int]:
        """Record the joiners that have `exited`; return the ids of members among them."""
        gone = [each for each in self._roster.learners.values() if each.is_joining and each.learner_id in exited]
        failed = [record.learner_id for record in gone if record.rank is not None]
        for record in gone:
            self._leave_out(record, record.describe_exit())
        if gone and not failed:
            self.drop_unusable()
        return failed

    def drop_unusable(self) -> None:
        """If the members cannot form a valid membership with the remaining joiners, kill these joiners and drop the
        learners that have not been started."""
        waiting = self._roster.joining(is_member=False)
        try:
            self._changes.succession(self._roster.members, (), [*(each.learner_id for each in waiting), *self._wanted])
        except StarlingError as error:
            for record in waiting:
                record.kill()
                self._leave_out(record, f"learner {record.learner_id} was killed ({error})")
            for learner_id in self._wanted:
                self._note(learner_id, f"learner {learner_id} was not started ({error})")
            self._wanted.clear()

    def close(self) -> None:
        """Answer the requests that are still open when the run ends."""
        for request in list(self._requests):
            for learner_id in request.outcomes:
                self._note(learner_id, f"learner {learner_id}: the run ended before it joined")

    def _leave_out(self, record: LearnerRecord, reason: str) -> None:
        self._roster.lose(record.learner_id)
        end_loaders([record.process])
        self._changes.on_left_out(record.learner_id, reason)
        self._note(record.learner_id, reason)

    def _coming(self) -> list[int]:
        """The joiners that are not members yet, started or not."""
        return [*(each.learner_id for each in self._roster.joining(is_member=False)), *self._wanted]

    def _grant(self, request: Request, is_ending: bool) -> str:
        """Request the learners that a request asks for; return the reason if that is impossible, or an empty text."""
        if is_ending or self._changes.on_loss == "stop":
            return "the run is ending" if is_ending else "the run was started with on_loss: stop"
        coming = self._coming()
        num_before = len(self._roster.members) + len(coming)
        if not 1 <= request.learners <= MAX_LEARNERS - num_before:
            return f"the number of learners must be in [1, {MAX_LEARNERS - num_before}], got {request.learners}"
        learner_ids = self._free(request.learners, {*self._roster.members, *coming})
        try:
            self._changes.succession(self._roster.members, (), [*coming, *learner_ids])
        except StarlingError as error:
            return f"cannot add {request.learners} to the run's {num_before} learners: {error}"
        request.outcomes = dict.fromkeys(learner_ids)
        self._requests.append(request)
        self.want(learner_ids)
        return ""

    def _free(self, number: int, taken: Collection[int]) -> list[int]:
        """`number` unused ids: those of lost learners first, then new ones."""
        known = sorted({*self._roster.learners, *taken})
        running = {each.learner_id for each in self._roster.learners.values() if each.process.is_running}
        free = [each for each in known if each not in taken and each not in running]
        return [*free, *range(known[-1] + 1, known[-1] + 1 + number)][:number]

    def _note(self, learner_id: int, failure: str) -> None:
        """Record in a learner's request that the learner trains or, with a reason, that it has failed."""
        for request in list(self._requests):
            if request.outcomes.get(learner_id, "") is None:
                request.outcomes[learner_id] = failure
                if None not in request.outcomes.values():
                    self._requests.remove(request)
                    joined = tuple(each for each, why in request.outcomes.items() if not why)
                    failed = tuple(filter(None, request.outcomes.values()))
                    request.answer(JoinAnswer("", joined, failed, len(self._roster.members)))


def launcher_id(folder: Path) -> bytes | None:
    """An identifier of the launcher that takes requests in this folder now; None if there is none."""
    try:
        with (folder / _LOCK).open("rb") as lock:
            # a shared lock, so that several processes can look at the same time
            return None if _lock(lock.fileno(), fcntl.LOCK_SH) else lock.read()
    except OSError:
        return None


def ask(folder: Path, learners: int) -> JoinRequest:
    """Write a request for more learners."""
    request = JoinRequest(learners, f"{time.time_ns():020d}-{secrets.token_hex(4)}")
    replace_file(folder / _REQUEST.format(request.id), encode_file(request))
    return request


def take_answer(folder: Path, request: JoinRequest) -> JoinAnswer | None:
    """Remove and return the answer to a request; None if there is none yet. Raises ProtocolError for an invalid
    file."""
    path = folder / _ANSWER.format(request.id)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    path.unlink(missing_ok=True)
    return decode_file(JoinAnswer, content)


def withdraw(folder: Path, request: JoinRequest) -> None:
    """Remove the files of a request and its answer, if they still exist."""
    for name in (_REQUEST, _ANSWER):
        (folder / name.format(request.id)).unlink(missing_ok=True)


def _lock(descriptor: int, kind: int) -> bool:
    """Try to lock an open file until it is closed; return whether that succeeded."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
