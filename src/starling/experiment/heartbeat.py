"""A learner's heartbeat: twice a second, how many mini-batches it has computed, and what it is waiting for.

The learner also writes stalls to its own log. Under torchrun or Slurm, that is the only report of them.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from starling.engines.processes.stalls import Stall, Waits
from starling.launch.link import Link
from starling.launch.messages import Ended, Heartbeat
from starling.reporting.stalls import TIMES_AS_LONG, own_line, resumed_line
from starling.timeouts import HEARTBEAT_EVERY, SHORT_WAIT, STOPPED_AFTER
from starling.training.job import Silence, StepReport


class HeartbeatSource(Silence):
    """An observer that counts mini-batches and makes heartbeats.

    `write` writes a line to this learner's log. `waits` are the learner's waits; one that lasts longer than
    `long_seconds`, and much longer than usual, is logged as a stall.
    """

    def __init__(
        self,
        learner_id: int,
        write: Callable[[str], None],
        waits: Waits,
        long_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_steps = 0
        self._learner_id = learner_id
        self._write = write
        self._long_seconds = long_seconds
        self._waits = waits
        self._clock = clock
        self._last_beat = clock()
        self._last: Stall | None = None  # the stall that was logged last
        self._again_at = 0.0

    def on_step(self, report: StepReport) -> None:
        self.num_steps += 1

    def beat(self) -> Heartbeat:
        """Make a heartbeat and log stalls; call this every `HEARTBEAT_EVERY` seconds."""
        now = self._clock()
        stopped, self._last_beat = now - self._last_beat - HEARTBEAT_EVERY, now
        if stopped > STOPPED_AFTER:
            self._waits.forget(stopped)
            self._write(
                f"learner {self._learner_id} did not run for {stopped:.1f} s: it was stopped or got no processor time"
            )
        wait = self._waits.longest(SHORT_WAIT)
        self._log(wait)
        return Heartbeat(self.num_steps, wait)

    def _log(self, wait: Stall | None) -> None:
        if self._last is not None and (wait is None or wait.number != self._last.number):
            self._write(resumed_line([self._learner_id], self._last.seconds))
            self._last = None
        if wait is None or not wait.is_unusual(self._long_seconds, TIMES_AS_LONG):
            return
        if self._last is None or wait.seconds >= self._again_at:
            self._write(own_line(self._learner_id, wait))
            self._again_at = 2.0 * wait.seconds
        self._last = wait


@contextmanager
def beating(source: HeartbeatSource, link: Link | None) -> Generator[None, None, None]:
    """Send heartbeats inside the context; without a launcher, only log stalls."""
    if link is not None:
        link.heartbeat = source.beat
        yield
        link.send(Ended(source.num_steps))
        return
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(HEARTBEAT_EVERY):
            source.beat()

    threading.Thread(target=beat, name="starling-heart", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
