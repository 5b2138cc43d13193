"""The order in which a learner's two activities use its weights: left free, recorded, or given by a record.

A mini-batch and its gradient are functions of a ticket and of weights. Two runs of one seed differ only in order: which
learner takes which ticket, which of a learner's activities uses its weights next, whose message a server takes first,
and which averaging round is the last. A record has all of these in `turns`, a text with one sign for each:

    f, b     the foreground or the background uses the weights: a copy, a step, a change, a replacement, their version
    f3, b3   the foreground or the background takes the handle with key 3, the first to be finished
    r, e     the background enters the next averaging round; or there is no further one
    x        the foreground gets no further mini-batch
    l7,9,5   the membership ends for this learner: its foreground has used the weights 7 times before it had a
             background, which is not listed; the foreground has started or awaited 9 messages, means and other
             handles, the background 5
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator

import torch

FOREGROUND, BACKGROUND, ROUND, NO_ROUND, NO_BATCH, LEFT = "f", "b", "r", "e", "x", "l"
ARITHMETIC = ("torch", "threads", "processor", "device")
"""What the bits of a gradient depend on, beside weights, mini-batch and model."""
_TURN = re.compile(r"[fb][0-9]*|[rex]|l[0-9]+,[0-9]+,[0-9]+")


class Order:
    """Leaves the order free, and records nothing."""

    @property
    def num_noted(self) -> int:
        """How often the calling activity has used the weights."""
        return 0

    def share(self) -> None:
        """Note that the background begins; from now on two activities use the weights."""

    def wait(self) -> None:
        """Wait until it is the calling activity's turn to use the weights."""

    def note(self) -> None:
        """Note that the calling activity uses the weights now. Called with their lock held, after `wait`."""

    def awaited(self) -> None:
        """Note that a handle of the calling activity has been awaited."""

    def started(self) -> None:
        """Note that the calling activity has started to send, to receive or to average. It may not have been able to,
        and then it has left."""

    def chose(self, key: int) -> None:
        """Note that the calling activity takes the handle with this key, the first to be finished."""

    def entered(self, takes_place: bool) -> None:
        """Note that the background enters the next averaging round, or that there is none."""

    def ended(self) -> None:
        """Note that the foreground gets no further mini-batch."""

    def left(self) -> None:
        """Note that the membership ends for this learner."""

    def flush(self) -> None:
        """Write down what has been noted. Called before anything leaves the process, so that the record has all that
        others may have seen of a learner when it is killed."""


FREE = Order()


class RecordedOrder(Order):
    """Records the order.

    `is_behind` returns whether the background calls. `tell` is given the turns since the last call. Both activities may
    call at any time.
    """

    def __init__(self, is_behind: Callable[[], bool], tell: Callable[[str], None]) -> None:
        self._is_behind, self._tell = is_behind, tell
        self._is_shared = False
        self._num_alone = 0
        self._num_noted = [0, 0]  # by the foreground and the background
        self._num_started = [0, 0]  # and awaited
        self._turns = deque[str]()
        self._telling = threading.Lock()

    @property
    def num_noted(self) -> int:
        return self._num_noted[self._is_behind()]

    def share(self) -> None:
        self._is_shared = True

    def note(self) -> None:
        self._num_noted[self._is_behind()] += 1
        if self._is_shared:
            self._turns.append(self._activity())
        else:
            self._num_alone += 1

    def awaited(self) -> None:
        self._num_started[self._is_behind()] += 1

    started = awaited

    def chose(self, key: int) -> None:
        self._turns.append(f"{self._activity()}{key}")

    def entered(self, takes_place: bool) -> None:
        self._turns.append(ROUND if takes_place else NO_ROUND)

    def ended(self) -> None:
        self._turns.append(NO_BATCH)
        self.flush()

    def left(self) -> None:
        self._turns.append(f"{LEFT}{self._num_alone},{self._num_started[0]},{self._num_started[1]}")
        self.flush()

    def flush(self) -> None:
        if not self._turns:
            return
        with self._telling:
            turns = "".join(self._turns.popleft() for _ in range(len(self._turns)))
            if turns:
                self._tell(turns)

    def _activity(self) -> str:
        return BACKGROUND if self._is_behind() else FOREGROUND


def arithmetic(device: torch.device) -> dict[str, str | int]:
    """Each of `ARITHMETIC`, as it is in this process."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = torch.__version__, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), name
    return dict(zip(ARITHMETIC, found, strict=True))


def turns_in(text: str) -> Iterator[str]:
    """The turns of a record. Raises ValueError if the text has anything else."""
    place = 0
    for found in _TURN.finditer(text):
        if found.start() != place:
            break
        place = found.end()
        yield found.group()
    if place != len(text):
        raise ValueError(f"{text[place : place + 20]!r} is no turn")
