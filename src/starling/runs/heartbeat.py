"""What a learner says of itself twice a second: how many mini-batches it has computed, and what it waits for.

What it waits for unusually long it writes into its own log as well, which is all there is under torchrun or Slurm.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from starling.checkpoint.state import LearnerState
from starling.engines.processes.stalls import Stall, Waits
from starling.launch.link import BEAT_SECONDS, Link
from starling.report.stalls import TIMES_AS_LONG, own_line, resumed_line
from starling.training.job import EpochReport, StepReport

Message = dict[str, Any]
SHORT_SECONDS = 1.0
"""Waits that last no longer are not told."""
STILL_SECONDS = 2.0
"""Later than this, a sign of life says that the whole process stood still."""


class Heartbeat:
    """An observer that counts, and the messages made of that; `write` takes the lines for this learner's log.

    `waits` are those of the learner; beyond `long_seconds` they are unusual.
    """

    def __init__(
        self,
        name: int,
        write: Callable[[str], None],
        waits: Waits,
        long_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_steps = 0
        self._name = name
        self._write = write
        self._long_seconds = long_seconds
        self._waits = waits
        self._clock = clock
        self._last_beat = clock()
        self._last: Stall | None = None  # the one that was written about
        self._again_at = 0.0

    def on_step(self, report: StepReport) -> None:
        self.num_steps += 1

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None: ...

    def on_mark(self, state: LearnerState) -> None: ...

    def beat(self) -> Message:
        """The sign of life of this moment; to be called again and again."""
        now = self._clock()
        stood_still, self._last_beat = now - self._last_beat - BEAT_SECONDS, now
        if stood_still > STILL_SECONDS:
            self._waits.forget(stood_still)
            self._write(f"learner {self._name} stood still for {stood_still:.1f} s: stopped, or kept from running")
        wait = self._waits.longest(SHORT_SECONDS)
        self._log(wait)
        return {"beat": {"steps": self.num_steps, "wait": None if wait is None else asdict(wait)}}

    def _log(self, wait: Stall | None) -> None:
        if self._last is not None and (wait is None or wait.number != self._last.number):
            self._write(resumed_line([self._name], self._last.seconds))
            self._last = None
        if wait is None or not wait.is_unusual(self._long_seconds, TIMES_AS_LONG):
            return
        if self._last is None or wait.seconds >= self._again_at:
            self._write(own_line(self._name, wait))
            self._again_at = 2.0 * wait.seconds
        self._last = wait


@contextmanager
def giving(sign: Heartbeat, link: Link | None) -> Generator[None, None, None]:
    """Give this sign of life as long as the context lasts: to the launcher, or, without one, to the log alone."""
    if link is not None:
        link.heartbeat = sign.beat
        yield
        link.send({"doing": "ending", "ended": True, **sign.beat()})
        return
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.wait(BEAT_SECONDS):
            sign.beat()

    threading.Thread(target=go_on, name="starling-heart", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
