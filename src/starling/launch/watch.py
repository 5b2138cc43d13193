"""What a launcher makes of its learners: what they say, who is lost, who is there from then on, and what went wrong."""

import json
import selectors
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import chain
from typing import Any

from starling import errors
from starling.errors import ConfigError, PeerLost, StarlingError, Stopped
from starling.launch.joiners import Changes, Joiners
from starling.launch.process import LOADING_GRACE, Process, Seconds, end_loading, signal_name

CAUSE_PATIENCE: Seconds = 1.0
"""How long to look for the cause after a learner said only that it lost another."""
JOINERS_SILENCE: Seconds = 10.0
"""How long a learner that joins may give no sign of life: the others wait for it, and it has nothing to lose yet."""
ENTRY_SECONDS: Seconds = 30.0
"""How long the others wait for newcomers in the place where they meet. Who has come there may take longer: a large
model's state travels to it."""
STOP_PATIENCE: Seconds = 28.0
"""How long learners may take to save and end. Slurm and Kubernetes kill everything after 30 s."""

OnMessage = Callable[[int, dict[str, Any]], None]


@dataclass(frozen=True)
class Loss:
    """A learner that a run went on without."""

    learner: int
    reason: str
    """How it ended, in words."""


class Watch:
    """Watches learners until all have ended."""

    def __init__(
        self,
        processes: list[Process],
        on_message: OnMessage,
        on_loss: Callable[[Loss], None] | None,
        silence_seconds: Seconds,
        received: "list[int]",
        changes: Changes,
        joiners: Joiners,
    ) -> None:
        self.losses: list[Loss] = []
        self._processes = processes
        self._on_message = on_message
        self._on_loss = on_loss
        self._silence_seconds = silence_seconds
        self._received = received
        self._changes = changes
        self._joiners = joiners
        self._view = 0
        self._members = tuple(process.rank for process in processes)
        self._all_here: float | None = None
        """Since when all but newcomers have been where they meet in the newest view."""
        self._asked_to_stop: Seconds | None = None

    def until_all_ended(self) -> None:
        """Pass messages on until all processes have ended well, but for those whose loss is borne; raise what else went
        wrong."""
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.line, selectors.EVENT_READ, process)
            while any(process.is_running for process in self._counted()):
                _read(selector, self._on_message, timeout=0.05)
                if number := self._signal():
                    self._stop(number)
                self._end_the_silent()
                if not self._bear(selector):
                    break
                self._let_in(selector)
            deadline = time.monotonic() + CAUSE_PATIENCE
            # a learner that still runs may go on talking: it is not listened to for ever
            while (
                _read(selector, self._on_message, timeout=0.0) or _is_unexplained(self._counted())
            ) and time.monotonic() < deadline:
                _read(selector, self._on_message, timeout=0.05)
        failed = [process for process in self._counted() if process.popen.poll()]
        if failed:
            raise _cause(failed)
        self._joiners.close(self._members)
        if number := self._signal():
            raise Stopped(f"stopped by {signal_name(number)}", number, has_saved=True)

    def _signal(self) -> int | None:
        """What signal asked the launcher, or else one of its learners, to stop."""
        return next(chain(self._received, (each.signalled for each in self._processes if each.signalled)), None)

    def _stop(self, number: int) -> None:
        """Let the learners save and end together; raise `Stopped` where they cannot, or take too long."""
        name, now = signal_name(number), time.monotonic()
        if self._asked_to_stop is None:
            if not any(process.can_stop for process in self._counted()):
                raise Stopped(f"stopped by {name}; the learners were ended", number)
            self._asked_to_stop = now
            for process in self._counted():
                process.tell({"stop": number})
        elif now - self._asked_to_stop > STOP_PATIENCE:
            raise Stopped(f"stopped by {name}; the learners had not saved after {STOP_PATIENCE:g} s", number)

    def _counted(self) -> list[Process]:
        """All who compute, or end: neither those whose loss was borne, nor those who have not joined yet."""
        return [each for each in self._processes if not each.is_out and each not in self._joiners]

    def _with_names(self, names: Collection[int]) -> list[Process]:
        """The processes of the members of a view that have these names."""
        return [each for each in self._processes if not each.is_out and each.rank in names]

    def _bear(self, selector: selectors.BaseSelector) -> bool:
        """Whether the others go on without those that have failed, if any have; if so, they are told."""
        ended = [
            process
            for process in self._processes
            if not process.is_running and (not process.is_out or process in self._joiners)
        ]
        while ended and _read(selector, self._on_message, timeout=0.0):  # what they said last
            pass
        failed = [process for process in ended if process.popen.poll() and process not in self._joiners]
        if failed and (
            self._on_loss is None
            or not all(process.was_killed for process in failed)
            or any(process.view < 0 for process in self._counted())  # they have not all met yet
        ):
            return False
        never_came = self._joiners.settle(self._members, ended)
        if failed or never_came:
            return self._go_on_without(failed, never_came)
        return True

    def _go_on_without(self, failed: list[Process], never_came: list[int]) -> bool:
        """Tell the others the next view, without some; whether there are others."""
        before, reasons = self._members, [process.death() for process in failed]
        joining = {process.rank for process in self._joiners.joining(before)}
        reason = "; ".join([*reasons, *(f"learner {name} did not join" for name in never_came)])
        lost = [*(process.rank for process in failed), *never_came]
        with_state = [each.rank for each in self._with_names(before) if each.view >= 0 and each not in failed]
        if not with_state:
            return False
        try:
            members = self._changes.succession(before, lost, ())
        except (ConfigError, PeerLost) as error:
            raise PeerLost(f"{reason}; the run cannot go on without: {error}") from error
        for process in failed:
            process.is_out = True
        self._announce(members, reason)
        for process, why in zip(failed, reasons, strict=True):
            end_loading([process], time.monotonic() + LOADING_GRACE)
            self.losses.append(Loss(process.rank, why))
            if self._on_loss is not None:
                self._on_loss(self.losses[-1])
        self._joiners.leave_out_the_stranded(self._members)
        self._replace([name for name in before if name not in {*members, *never_came, *joining}], failed)
        return True

    def _replace(self, gone: list[int], failed: list[Process]) -> None:
        """Start those again that are gone, unless that has led to nothing before, or all are about to end."""
        idle = [process for process in failed if process.joins and not process.has_computed]
        if not self._changes.replaces or self._asked_to_stop is not None:
            return
        for process in idle:
            self._changes.say(f"learner {process.rank} had computed nothing since it joined, and is not started again")
        if not idle and gone:
            self._changes.say(f"learner {', '.join(map(str, gone))}: started again")
            self._joiners.want(gone)

    def _let_in(self, selector: selectors.BaseSelector) -> None:
        """Start those who are wanted, and let those join who are ready, unless the others are just changing views."""
        if self._asked_to_stop is not None or any(process.view < 0 for process in self._counted()):
            return
        here = self._with_names(self._members)
        is_ending = any(not process.is_running for process in here)
        for process in self._joiners.tend(self._members, is_ending):
            selector.register(process.line, selectors.EVENT_READ, process)
        if is_ending or any(process.view < self._view for process in here):
            return
        names, members = self._joiners.ready(self._members)
        if names:
            self._announce(members, f"learner {', '.join(map(str, names))} joined")

    def _announce(self, members: tuple[int, ...], reason: str) -> None:
        """Tell who is there from now on to them, and to those who have to leave."""
        told = self._with_names({*self._members, *members})
        self._view, self._members, self._all_here = self._view + 1, members, None
        for process in told:
            process.tell({"view": self._view, "members": members, "reason": reason})
            process.is_out = process.rank not in members  # it leaves, and nobody waits for it

    def _end_the_silent(self) -> None:
        """Kill who gives no sign of life for too long, and newcomers whom the others wait for in vain."""
        now = time.monotonic()
        joining = self._joiners.joining(self._members)
        for process in self._counted():  # before learners have met, they load libraries, and wait for each other
            if process.is_running and process.view >= 0 and now - process.heard > self._silence_seconds:
                _kill(process, now - process.heard)
        for process in self._joiners.waiting(self._members):
            if process.is_running and now - process.heard > self._silence_seconds:
                _kill(process, now - process.heard)
        others = [each for each in self._with_names(self._members) if each not in joining]
        if not all(max(process.arrived, process.view) >= self._view for process in others):
            self._all_here = None
        elif self._all_here is None:
            self._all_here = now
        for process in joining:
            patience = ENTRY_SECONDS if process.arrived < self._view else max(ENTRY_SECONDS, self._silence_seconds)
            is_late = self._all_here is not None and now - self._all_here > patience
            if process.is_running and (is_late or now - process.heard > min(JOINERS_SILENCE, self._silence_seconds)):
                _kill(process, now - process.heard)


def _kill(process: Process, silence: Seconds) -> None:
    process.silence = silence
    process.popen.kill()
    process.popen.wait()


def _read(selector: selectors.BaseSelector, on_message: OnMessage, timeout: Seconds) -> bool:
    """Handle what learners sent; whether there was any."""
    ready = selector.select(timeout)
    for key, _ in ready:
        process: Process = key.data
        try:
            received = process.line.recv(65536)
        except ConnectionResetError:
            received = b""
        if not received:
            selector.unregister(process.line)
            process.line.close()  # it has ended, or will soon
            continue
        process.heard = time.monotonic()
        process.unread += received
        if b"\n" not in received:
            continue
        *lines, process.unread = process.unread.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if not message:
                continue
            process.doing = message.get("doing", process.doing)
            process.view = message.get("view", process.view)
            process.arrived = message.get("arrived", process.arrived)
            process.is_ready = process.is_ready or "ready" in message
            process.has_computed = process.has_computed or (process.view >= 0 and "doing" in message)
            process.can_stop = message.get("can_stop", process.can_stop)
            process.signalled = message.get("signalled", process.signalled)
            if "error" in message:
                process.error = _revived(message["error"], message["message"])
            on_message(process.rank, message)
    return bool(ready)


def _revived(name: str, text: str) -> StarlingError:
    """The error that a learner reported, here."""
    kind = getattr(errors, name, StarlingError)
    if isinstance(kind, type) and issubclass(kind, StarlingError) and kind is not Stopped:
        return kind(text)
    return StarlingError(f"{name}: {text}")


def _is_unexplained(processes: list[Process]) -> bool:
    """Whether learners failed, but only by losing others."""
    failed = [process for process in processes if process.popen.poll()]
    return bool(failed) and all(isinstance(process.error, PeerLost) for process in failed)


def _cause(failed: list[Process]) -> StarlingError:
    """The first cause among failures: a death, then an error of a learner's own, then the loss of another."""
    for process in failed:
        if process.was_killed:
            return PeerLost(f"{process.death()}; its log: {process.log}")
    for process in failed:
        if process.error is None:
            return StarlingError(
                f"learner {process.rank} ended with exit code {process.popen.returncode} while {process.doing}; "
                f"its log: {process.log}"
            )
    own = [process for process in failed if not isinstance(process.error, PeerLost)]
    first = (own or failed)[0]
    return first.error or StarlingError(f"learner {first.rank} failed; its log: {first.log}")
