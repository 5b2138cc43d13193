"""What a launcher makes of its learners: what they say, who is lost, who is there from then on, and what went wrong."""

import json
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from starling import errors
from starling.errors import PeerLost, StarlingError, Stopped
from starling.launch.process import LOADING_GRACE, Process, Seconds, end_loading, signal_name

CAUSE_PATIENCE: Seconds = 1.0
"""How long to look for the cause after a learner said only that it lost another."""
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
    ) -> None:
        self.losses: list[Loss] = []
        self._processes = processes
        self._on_message = on_message
        self._on_loss = on_loss
        self._silence_seconds = silence_seconds
        self._received = received
        self._view = 0
        self._asked_to_stop: Seconds | None = None

    def until_all_ended(self) -> None:
        """Pass messages on until all processes have ended well, but for those whose loss is borne; raise what else went
        wrong."""
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.line, selectors.EVENT_READ, process)
            while any(process.is_running for process in self._processes):
                _read(selector, self._on_message, timeout=0.05)
                if number := self._signal():
                    self._stop(number)
                self._end_the_silent()
                if any(process.popen.poll() for process in self._watched()) and not self._bear(selector):
                    break
            deadline = time.monotonic() + CAUSE_PATIENCE
            # a learner that still runs may go on talking: it is not listened to for ever
            while (
                _read(selector, self._on_message, timeout=0.0) or _is_unexplained(self._watched())
            ) and time.monotonic() < deadline:
                _read(selector, self._on_message, timeout=0.05)
        failed = [process for process in self._watched() if process.popen.poll()]
        if failed:
            raise _cause(failed)
        if number := self._signal():
            raise Stopped(f"stopped by {signal_name(number)}", number, has_saved=True)

    def _signal(self) -> int | None:
        """What signal asked the launcher, or else one of its learners, to stop."""
        return next(chain(self._received, (each.signalled for each in self._processes if each.signalled)), None)

    def _stop(self, number: int) -> None:
        """Let the learners save and end together; raise `Stopped` where they cannot, or take too long."""
        name, now = signal_name(number), time.monotonic()
        if self._asked_to_stop is None:
            if not any(process.can_stop for process in self._watched()):
                raise Stopped(f"stopped by {name}; the learners were ended", number)
            self._asked_to_stop = now
            for process in self._watched():
                process.tell({"stop": number})
        elif now - self._asked_to_stop > STOP_PATIENCE:
            raise Stopped(f"stopped by {name}; the learners had not saved after {STOP_PATIENCE:g} s", number)

    def _watched(self) -> list[Process]:
        """All but those whose loss was borne."""
        lost = {loss.learner for loss in self.losses}
        return [process for process in self._processes if process.rank not in lost]

    def _bear(self, selector: selectors.BaseSelector) -> bool:
        """Whether the others go on without those that have failed; if so, they are told."""
        while _read(selector, self._on_message, timeout=0.0):  # what they said last
            pass
        failed = [process for process in self._watched() if process.popen.poll()]
        left = [process for process in self._watched() if process.is_running]
        if (
            self._on_loss is None
            or not all(process.was_killed for process in failed)
            or not left
            or any(process.view < 0 for process in [*failed, *left])  # they have not all met yet
        ):
            return False
        self._view += 1
        reasons = [process.death() for process in failed]
        for process in left:
            members = [each.rank for each in left]
            process.tell({"view": self._view, "members": members, "reason": "; ".join(reasons)})
        for process, reason in zip(failed, reasons, strict=True):
            end_loading([process], time.monotonic() + LOADING_GRACE)
            self.losses.append(Loss(process.rank, reason))
            self._on_loss(self.losses[-1])
        return True

    def _end_the_silent(self) -> None:
        now = time.monotonic()
        for process in self._watched():  # before learners have met, they load libraries, and wait for each other
            if process.is_running and process.view >= 0 and now - process.heard > self._silence_seconds:
                process.silence = now - process.heard
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
