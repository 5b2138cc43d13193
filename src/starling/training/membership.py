"""Memberships: the numbered sets of living learners of a run, and how one learner receives them.

The launcher watches the learners. When one is lost or joins, it announces the next membership. Learners communicate
only within a membership: each membership has its own process groups and its own keys in the store.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from starling.workload import Position


@dataclass(frozen=True)
class Membership:
    """The learners of a run from one change to the next."""

    number: int
    """The generation; the first membership of a run is 0."""
    members: tuple[int, ...]
    """The learners' names. A learner's name never changes; its rank is its index in this tuple."""
    reason: str = ""
    """What changed, for messages."""

    @property
    def key(self) -> str:
        """The prefix of this membership's keys in the store."""
        return f"membership/{self.number}"


Stage = Literal["ready", "arrived", "entered"]
"""Of a learner: ready to join, about to connect to the other members of a membership, or connected to them."""
_NONE = Membership(-1, ())


class MembershipChanged(Exception):  # noqa: N818 - not an error
    """Interrupts a learner when its membership has been replaced by the next."""

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership.reason)
        self.membership = membership


class MembershipFeed:
    """The memberships announced to one learner; usable from any thread.

    If the learners are not watched (`is_watched` False), the first membership is the only one, and a learner that
    loses a peer fails. A learner whose `first` membership is None joins a running experiment: it waits until a
    membership includes it.
    """

    def __init__(
        self,
        name: int,
        first: Membership | None,
        is_watched: bool = False,
        report: Callable[[Stage, int], None] = lambda stage, number: None,
    ) -> None:
        self.name = name
        self.is_watched = is_watched
        self.is_new = first is None
        """Whether this learner joins a running experiment."""
        self.report = report
        """Reports a stage of this learner, and the number of the membership."""
        self.latest = first or _NONE
        """The newest membership."""
        self._changed = threading.Condition()
        self._on_change: Callable[[Membership], None] = lambda membership: None

    def first(self) -> Membership:
        """The membership to begin in. A joiner first reports that it is ready and waits for a membership."""
        if self.is_new:
            self.report("ready", self.latest.number)
            with self._changed:
                self._changed.wait_for(lambda: self.latest.number >= 0)
        return self.latest

    def announce(self, membership: Membership) -> None:
        """Announce a new membership. Called from the thread that listens to the launcher."""
        with self._changed:
            if membership.number <= self.latest.number:
                return
            self.latest = membership
            self._changed.notify_all()
            self._on_change(membership)

    def beyond(self, membership: Membership, within: float) -> Membership | None:
        """Wait at most `within` seconds for a later membership; None if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self.latest.number > membership.number, within if self.is_watched else 0.0)
            return self.latest if self.latest.number > membership.number else None

    @contextmanager
    def telling(self, membership: Membership, on_change: Callable[[Membership], None]) -> Generator[None, None, None]:
        """Within this context, call `on_change` once a later membership is announced, from any thread."""
        with self._changed:
            self._on_change = on_change
            if self.latest.number > membership.number:
                on_change(self.latest)
        try:
            yield
        finally:
            with self._changed:
                self._on_change = lambda membership: None


class MembershipObserver:
    """Follows membership changes, in each learner; this one ignores them."""

    def pause(self) -> None:
        """This learner leaves a membership: finish or drop all pending work for it before returning."""

    def begin(self, membership: Membership, position: Position, is_first: bool, /) -> None:
        """A membership begins at `position`. `is_first` is true on exactly one learner, which is called before the
        others continue."""

    def end(self) -> None:
        """The run has ended. Complete everything that other learners rely on before returning."""
