"""The order in which a learner's two activities use its weights: left free, recorded, or given by a record.

A mini-batch and its gradient are functions of a ticket and of weights. Two runs of one seed differ only in order: which
learner takes which ticket, which of a learner's activities uses its weights next, whose message a server takes first,
and which averaging round is the last. A record has all of these in `turns`, a text with one sign for each:

    f, b     the foreground or the background uses the weights: a copy, a step, a change, a replacement, their version
    f3, b3   the foreground or the background takes the handle with key 3 (a message of learner 3), the first to finish
    r, e     the background enters the next averaging round; or there is no further one
    x        the foreground gets no further mini-batch
    l7,9,5   the membership ends for this learner: its foreground has used the weights 7 times before it had a
             background, which is not listed; the foreground has started or awaited 9 messages, means and other
             handles, the background 5
"""

from __future__ import annotations

import hashlib
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
    """Leaves the order free, and records nothing.

    Its attributes tell whether its methods need to be called; most learners have no background, and call none of them.
    """

    gives = False
    """Whether activities must `wait` for their turns."""
    notes = False
    """Whether uses of the weights are noted one by one."""

    def __init__(self) -> None:
        self.turns = deque[str]()
        """What has been noted and not been written down."""
        self.num_used = [0, 0]
        """How often the foreground and the background have used the weights."""
        self.num_started = [0], [0]
        """How many messages, means and other handles each has started or awaited. One that has left could not start
        the next."""

    @property
    def num_own(self) -> int:
        """How often the calling activity has used the weights."""
        return self.num_used[0]

    def share(self) -> None:
        """Note that the background begins; from now on two activities use the weights."""

    def wait(self) -> None:
        """Wait until it is the calling activity's turn to use the weights."""

    def note(self) -> None:
        """Note that the calling activity uses the weights now. Called with their lock held, after `wait`."""

    def started(self, is_behind: bool) -> None:
        """Note that an activity starts to send, to receive or to average, or has awaited a handle."""
        self.num_started[is_behind][0] += 1

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
        super().__init__()
        self._is_behind, self._tell = is_behind, tell
        self._num_alone: int | None = None
        self._telling = threading.Lock()

    def share(self) -> None:
        self.notes, self._num_alone = True, self.num_used[0]

    @property
    def num_own(self) -> int:
        return self.num_used[self._is_behind()]

    def note(self) -> None:
        self.num_used[self._is_behind()] += 1
        self.turns.append(self._activity())

    def chose(self, key: int) -> None:
        self.turns.append(f"{self._activity()}{key}")

    def entered(self, takes_place: bool) -> None:
        self.turns.append(ROUND if takes_place else NO_ROUND)

    def ended(self) -> None:
        self.turns.append(NO_BATCH)
        self.flush()

    def left(self) -> None:
        alone = self.num_used[0] if self._num_alone is None else self._num_alone
        self.turns.append(f"{LEFT}{alone},{self.num_started[0][0]},{self.num_started[1][0]}")
        self.flush()

    def flush(self) -> None:
        with self._telling:
            turns = "".join(self.turns.popleft() for _ in range(len(self.turns)))
            if turns:
                self._tell(turns)

    def _activity(self) -> str:
        return BACKGROUND if self._is_behind() else FOREGROUND


def arithmetic(device: torch.device) -> dict[str, str | int]:
    """Each of `ARITHMETIC`, as it is in this process."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = torch.__version__, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), name
    return dict(zip(ARITHMETIC, found, strict=True))


def sha256_of(weights: torch.Tensor) -> str:
    """The hash of a learner's weights `[P]`."""
    return hashlib.sha256(weights.cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()


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
