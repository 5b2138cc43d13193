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
"""What the bits of a gradient depend on, beside weights, mini-batch and model."""
RACES = ("hogwild",)
"""Strategies whose learners race for single numbers, so that no order of events determines their weights."""
LOOK_SECONDS = 0.1
"""Longest wait for a turn after which a thread looks whether its learner has failed."""
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

    def key(self) -> int | None:
        """The key of the handle that the calling activity must take next; None if it takes the first to finish."""
        return None

    def chose(self, key: int) -> None:
        """Note that the calling activity takes the handle with this key, the first to be finished."""

    def takes_place(self) -> bool | None:
        """Whether the next averaging round takes place; None if the learners decide."""
        return None

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


class Turns:
    """The turns of a learner in a record, which its activities take one after the other."""

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
        """Whether this is the next turn of the learner."""
        return not self.are_over and self._turns[self._num_taken] == turn

    def following(self, is_behind: bool) -> str | None:
        """The next turn of the foreground or the background; None if the record has no more."""
        own = (BACKGROUND, ROUND, NO_ROUND) if is_behind else (FOREGROUND, NO_BATCH)
        places = range(self._num_taken, len(self._turns))
        return next((turn for turn in map(self._turns.__getitem__, places) if turn[0] in own), None)

    def expect(self, turn: str, is_behind: bool) -> bool:
        """Whether the record has further turns of an activity. Raises ReplayError if the next one is not `turn`."""
        expected = self.following(is_behind)
        if expected not in (turn, None):
            raise ReplayError(
                f"learner {self._learner}: after {self._num_taken} turns, its record has {expected!r} where this run "
                f"has {turn!r}; the record belongs to another version of the code, of the recipe or of the data"
            )
        return expected is not None


class FollowedOrder(RecordedOrder):
    """Lets the two activities of a learner, which are threads, take the turns of a record, and records them again.

    `wait_until` waits until a condition holds, which it evaluates again and again. Without a second activity there are
    no turns to wait for.
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
        return self._given.are_over or self._given.is_next(turn)  # what follows the last turn uses final weights

    def _take(self) -> None:
        with self._changed:
            if not self._given.are_over:
                self._given.take()
            self._changed.notify_all()


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


@dataclass
class Script:
    """What the record has of one learner in one membership."""

    learner: int
    batches: list[tuple[int, float | None]] = field(default_factory=list)
    """The steps of its mini-batches, each with the training time of its claim, if the budget depends on that."""
    turns: list[str] = field(default_factory=list)
    """See the top of this file."""
    barriers: list[tuple[int, bool]] = field(default_factory=list)
    """Portions before which there is a checkpoint barrier on which learners agreed, and whether the run ends there."""
    cuts: dict[int, tuple[int | None, int]] = field(default_factory=dict)
    """The cut of each barrier, and how often the activity that saved its state had used the weights."""
    plan: str = ""
    """How the membership began: a `MembershipStart`, encoded."""
    number: int = 0
    """Number of the membership."""
    saves: bool = False
    """Whether the learner copied its state at barriers."""
    states: list[tuple[int, str]] = field(default_factory=list)
    """The steps of its saved states, each with the hash of the weights."""
    arithmetic: dict[str, Any] = field(default_factory=dict)
    """Where it computed: each of `ARITHMETIC`."""
    sums_in_order: bool = True
    """Whether gradients were summed in the order of ranks."""
    members: Sequence[int] = ()
    """The learners of the membership."""

    def add(self, event: Mapping[str, Any] | None, place: str) -> None:
        """Add an event of the learner's stream; kinds that a replay does not need are left out. Raises ReplayError with
        the `place` if the event is damaged, or not as docs/events.md says."""
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
        """Raise ReplayError if other bits are computed on this device than the learner computed."""
        here = arithmetic(device)
        for name in ARITHMETIC:
            if self.arithmetic[name] != here[name]:
                raise ReplayError(
                    f"learner {self.learner} computed with {name} {self.arithmetic[name]}, but it is {here[name]} "
                    "here, where other bits are computed; replay where the run was made"
                )

    def claimed(self, tickets: SyncGroupTickets) -> list[tuple[int, float | None]]:
        """The portions that the learner claimed, each with the training time of its claim."""
        return list({tickets.number_of(Ticket(0, 0, step)): minutes for step, minutes in self.batches}.items())

    def without_events(self, learner: int) -> Script:
        """What the record of this membership has of another learner, which was lost before it began."""
        return replace(self, learner=learner, batches=[], turns=[f"{LEFT}0,0,0"], barriers=[], cuts={}, states=[])
