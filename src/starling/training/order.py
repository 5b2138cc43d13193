"""The order in which a learner's two activities use its weights. The order is free, is recorded, or follows a record.

A mini-batch and its gradient are functions of a ticket and of weights. Two runs with the same seed differ only in the
order of events: which learner receives which ticket, which of a learner's activities uses its weights next, whose
message a server handles first, and which averaging round is the last. A record contains these events in `turns`, a text
with one sign for each event:

    f, b     the foreground or the background uses the weights: it copies, steps, changes or replaces them, or reads
             their version
    f3, b3   the foreground or the background takes the handle with key 3 (a message of learner 3), which finished first
    r, e     the background enters the next averaging round (r), or there is no further round (e)
    x        the foreground receives no further mini-batch
    l7,9,5   the membership ends for this learner. Before the learner had a background, its foreground used the weights
             7 times; these uses are not listed. The foreground started or awaited 9 messages, means and other handles,
             and the background 5
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from starling.errors import ReplayError
from starling.training.tickets import SyncGroupTickets
from starling.workload import Ticket

FOREGROUND, BACKGROUND, ROUND, NO_ROUND, NO_BATCH, LEFT = "f", "b", "r", "e", "x", "l"
ARITHMETIC = ("torch", "threads", "processor", "device")
"""Properties other than weights, mini-batch and model on which the bits of a gradient depend."""
RACES = ("hogwild",)
"""Strategies whose learners race for single numbers, so that no order of events determines their weights."""
LOOK_SECONDS = 0.1
"""Time for which a thread waits for its turn before it checks whether its learner has failed."""
_TURN = re.compile(r"[fb][0-9]*|[rex]|l[0-9]+,[0-9]+,[0-9]+")


class Order:
    """Leaves the order free, and records nothing.

    The attributes of an order say whether its methods need to be called. Most learners have no background, and call
    none of them.
    """

    gives = False
    """Whether activities must `wait` for their turns."""
    notes = False
    """Whether uses of the weights are noted one by one."""

    def __init__(self) -> None:
        self.turns = deque[str]()
        """Turns that have been noted but not written to the record."""
        self.num_used = [0, 0]
        """Numbers of times that the foreground and the background have used the weights."""
        self.num_started = [0], [0]
        """Numbers of messages, means and other handles that the foreground and the background have started or awaited.
        An activity that has left could not start the next one."""

    @property
    def num_own(self) -> int:
        """The number of times that the calling activity has used the weights."""
        return self.num_used[0]

    def share(self) -> None:
        """Record that the background begins, so that two activities use the weights from now on."""

    def wait(self) -> None:
        """Wait until it is the calling activity's turn to use the weights."""

    def note(self) -> None:
        """Record that the calling activity uses the weights now. The caller must hold the lock of the weights, and must
        have called `wait`."""

    def started(self, is_behind: bool) -> None:
        """Record that an activity starts to send, receive or average, or has awaited a handle."""
        self.num_started[is_behind][0] += 1

    def key(self) -> int | None:
        """Return the key of the handle that the calling activity must take next, or None if it takes the first handle
        to finish."""
        return None

    def chose(self, key: int) -> None:
        """Record that the calling activity takes the handle with this key, which finished first."""

    def takes_place(self) -> bool | None:
        """Return whether the next averaging round takes place, or None if the learners decide."""
        return None

    def entered(self, takes_place: bool) -> None:
        """Record that the background enters the next averaging round, or that there is no further round."""

    def ended(self) -> None:
        """Record that the foreground receives no more mini-batches."""

    def left(self) -> None:
        """Record that the membership ends for this learner."""

    def flush(self) -> None:
        """Write the noted turns to the record. This method is called before any data leaves the process. If the learner
        is killed, the record thus contains all events whose effects other learners may have seen."""


FREE = Order()


class RecordedOrder(Order):
    """Records the order.

    `is_behind` returns whether the caller is the background. `tell` is called with the turns since its last call. Both
    activities may call the methods at any time.
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


class Turns:
    """The turns of a learner in a record. The learner's activities take them one after another."""

    def __init__(self, learner: int, turns: Iterable[str]) -> None:
        self._learner, self._turns = learner, [turn for turn in turns if not turn.startswith(LEFT)]
        self._num_taken = 0

    @property
    def are_over(self) -> bool:
        """Whether all turns have been taken."""
        return self._num_taken == len(self._turns)

    def take(self) -> None:
        """Take the next turn."""
        self._num_taken += 1

    def is_next(self, turn: str) -> bool:
        """Return whether `turn` is the next turn of the learner."""
        return not self.are_over and self._turns[self._num_taken] == turn

    def following(self, is_behind: bool) -> str | None:
        """Return the next turn of the foreground or the background, or None if the record has no further turn."""
        own = (BACKGROUND, ROUND, NO_ROUND) if is_behind else (FOREGROUND, NO_BATCH)
        places = range(self._num_taken, len(self._turns))
        return next((turn for turn in map(self._turns.__getitem__, places) if turn[0] in own), None)

    def expect(self, turn: str, is_behind: bool) -> bool:
        """Return whether the record has further turns of an activity. Raises `ReplayError` if the next of these is not
        `turn`."""
        expected = self.following(is_behind)
        if expected not in (turn, None):
            raise ReplayError(
                f"learner {self._learner}: after {self._num_taken} turns, its record has {expected!r} where this run "
                f"has {turn!r}; the record belongs to another version of the code, of the recipe or of the data"
            )
        return expected is not None


class FollowedOrder(RecordedOrder):
    """Lets the two activities of a learner, which are threads, take the turns of a record, and records them again.

    `wait_until` waits until a condition holds, which it evaluates repeatedly. Without a second activity there are no
    turns for which to wait.
    """

    def __init__(
        self,
        is_behind: Callable[[], bool],
        tell: Callable[[str], None],
        turns: Turns,
        wait_until: Callable[[Callable[[], bool]], None],
    ) -> None:
        super().__init__(is_behind, tell)
        self._given, self._wait_until = turns, wait_until
        self._changed = threading.Condition()

    def share(self) -> None:
        super().share()
        self.gives = True

    def wait(self) -> None:
        self._await(self._activity())

    def note(self) -> None:
        super().note()
        self._take()

    def key(self) -> int | None:
        following = self._given.following(self._is_behind()) or ""
        return int(following[1:]) if following[1:] else -1

    def chose(self, key: int) -> None:
        self._await(f"{self._activity()}{key}")
        super().chose(key)
        self._take()

    def takes_place(self) -> bool | None:
        return self._given.following(is_behind=True) != NO_ROUND

    def entered(self, takes_place: bool) -> None:
        self._await(ROUND if takes_place else NO_ROUND)
        super().entered(takes_place)
        self._take()

    def ended(self) -> None:
        self._await(NO_BATCH)
        super().ended()
        self._take()

    def _await(self, turn: str) -> None:
        def has_come() -> bool:
            with self._changed:
                self._given.expect(turn, self._is_behind())
                return self._is_turn(turn) or self._changed.wait_for(lambda: self._is_turn(turn), LOOK_SECONDS)

        if not self._is_turn(turn):
            self._wait_until(has_come)

    def _is_turn(self, turn: str) -> bool:
        return self._given.are_over or self._given.is_next(turn)  # events after the last turn use final weights

    def _take(self) -> None:
        with self._changed:
            if not self._given.are_over:
                self._given.take()
            self._changed.notify_all()


def arithmetic(device: torch.device) -> dict[str, str | int]:
    """Return the value of each property in `ARITHMETIC` in this process."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = torch.__version__, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), name
    return dict(zip(ARITHMETIC, found, strict=True))


def sha256_of(weights: torch.Tensor) -> str:
    """Return the hash of a learner's weights `[P]`."""
    return hashlib.sha256(weights.cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()


def turns_in(text: str) -> Iterator[str]:
    """Yield the turns in the text of a record. Raises `ValueError` if the text contains anything else."""
    place = 0
    for found in _TURN.finditer(text):
        if found.start() != place:
            break
        place = found.end()
        yield found.group()
    if place != len(text):
        raise ValueError(f"{text[place : place + 20]!r} is no turn")


@dataclass
class Script:
    """The record of one learner in one membership."""

    learner: int
    batches: list[tuple[int, float | None]] = field(default_factory=list)
    """Steps of the learner's mini-batches, each with the training time of its claim if the budget depends on time."""
    turns: list[str] = field(default_factory=list)
    """Turns of the learner, in the notation at the top of this file."""
    barriers: list[tuple[int, bool]] = field(default_factory=list)
    """Portions before which there is a checkpoint barrier on which learners agreed, each with whether the run ends
    there."""
    cuts: dict[int, tuple[int | None, int]] = field(default_factory=dict)
    """For each barrier, its cut, and the number of times that the activity that saved the state had used the
    weights."""
    plan: str = ""
    """Plan with which the membership began, as an encoded `MembershipStart`."""
    number: int = 0
    """Number of the membership."""
    saves: bool = False
    """Whether the learner copied its state at barriers."""
    states: list[tuple[int, str]] = field(default_factory=list)
    """Steps of the learner's saved states, each with the hash of the weights."""
    arithmetic: dict[str, Any] = field(default_factory=dict)
    """Value of each property in `ARITHMETIC` where the learner computed."""
    sums_in_order: bool = True
    """Whether gradients were added in rank order."""
    members: Sequence[int] = ()
    """Learners of the membership."""

    def add(self, event: Mapping[str, Any] | None, place: str) -> None:
        """Add an event of the learner's stream. Kinds of events that a replay does not need are left out. Raises
        `ReplayError` with the `place` if the event is damaged, or does not agree with docs/events.md."""
        try:
            if event is None:
                raise ValueError("not an event, or not as it was written")
            self._add(event)
        except (KeyError, TypeError, ValueError) as error:
            raise ReplayError(f"{place}: damaged: {error}") from None

    def _add(self, event: Mapping[str, Any]) -> None:
        match event["kind"]:
            case "membership":
                self.number, self.members, self.saves = event["number"], tuple(event["members"]), event["saves"]
                self.plan = json.dumps(event["plan"])
                self.sums_in_order = event.get("ordered", True)
                self.arithmetic = {name: event[name] for name in ARITHMETIC}
            case "batch":
                self.batches.append((int(event["step"]), event.get("minutes")))
            case "turns":
                self.turns += turns_in(event["turns"])
            case "barrier":
                self.barriers.append((int(event["portion"]), bool(event["stops"])))
            case "cut":
                self.cuts[int(event["barrier"])] = event["round"], int(event["turn"])
            case "state":
                self.states.append((int(event["step"]), event["sha256"]))

    def check_arithmetic(self, device: torch.device) -> None:
        """Raise `ReplayError` if this device may compute different bits than the recorded learner computed."""
        here = arithmetic(device)
        for name in ARITHMETIC:
            if self.arithmetic[name] != here[name]:
                raise ReplayError(
                    f"learner {self.learner} computed with {name} {self.arithmetic[name]}, but it is {here[name]} "
                    "here, where other bits are computed; replay where the run was made"
                )

    def claimed(self, tickets: SyncGroupTickets) -> list[tuple[int, float | None]]:
        """Return the portions that the learner claimed, each with the training time of its claim."""
        return list({tickets.number_of(Ticket(0, 0, step)): minutes for step, minutes in self.batches}.items())

    def without_events(self, learner: int) -> Script:
        """Return the record of this membership for a different learner, which was lost before it began."""
        return replace(self, learner=learner, batches=[], turns=[f"{LEFT}0,0,0"], barriers=[], cuts={}, states=[])
