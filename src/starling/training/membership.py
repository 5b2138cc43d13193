"""Memberships: the numbered sets of living learners of a run, and what one learner hears of them.

The launcher watches the learners. When one is lost or joins, it announces the next membership. Between two memberships
learners do nothing together; each membership has its own process groups and its own keys in the store.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from starling.workload import Position


@dataclass(frozen=True)
class Membership:
    """The learners of a run from one change to the next."""

    number: int
    """The run begins with membership 0."""
    members: tuple[int, ...]
    """Their names. A learner keeps its name for life; its rank is its place among these."""
    reason: str = ""
    """What changed, in words."""

    @property
    def key(self) -> str:
        """The prefix of this membership's keys in the store."""
        return f"membership/{self.number}"


_NONE = Membership(-1, ())


class MembershipChanged(Exception):  # noqa: N818 - it is no error
    """Ends what a learner does in a membership that is over."""

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership.reason)
        self.membership = membership


class MembershipFeed:
    """The memberships that one learner hears of; usable from any thread.

    If the learners are not watched (`is_watched` False), the first membership is the only one, and a learner that
    loses another fails. A learner without a `first` membership (None) joins a running experiment: it waits until a
    membership includes it.
    """

    def __init__(
        self,
        name: int,
        first: Membership | None,
        is_watched: bool = False,
        on_enter: Callable[[Membership], None] = lambda membership: None,
        on_arrive: Callable[[Membership], None] = lambda membership: None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.is_watched = is_watched
        self.is_new = first is None
        """Whether this learner joins a running experiment."""
        self._on_enter = on_enter
        self._on_arrive = on_arrive
        self._on_ready = on_ready
        self._latest = first or _NONE
        self._changed = threading.Condition()
        self._on_change: Callable[[Membership], None] = lambda membership: None

    @property
    def latest(self) -> Membership:
        """The newest membership."""
        return self._latest

    def first(self) -> Membership:
        """The membership to begin in. A joiner reports that it is ready, and waits until a membership includes it."""
        if self.is_new:
            self._on_ready()
            with self._changed:
                self._changed.wait_for(lambda: self._latest.number >= 0)
        return self._latest

    def arrive(self, membership: Membership) -> None:
        """Report that this learner is about to connect to the other members."""
        self._on_arrive(membership)

    def enter(self, membership: Membership) -> None:
        """Report that this learner has connected to the other members."""
        self._on_enter(membership)

    def announce(self, membership: Membership) -> None:
        """There is a new membership. Called from the thread that listens to the launcher."""
        with self._changed:
            if membership.number <= self._latest.number:
                return
            self._latest = membership
            self._changed.notify_all()
            self._on_change(membership)

    def beyond(self, membership: Membership, within: float) -> Membership | None:
        """Wait at most `within` seconds for a membership later than this one; None if none comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._latest.number > membership.number, within if self.is_watched else 0.0)
            return self._latest if self._latest.number > membership.number else None

    @contextmanager
    def telling(self, membership: Membership, on_change: Callable[[Membership], None]) -> Generator[None, None, None]:
        """While the context lasts, call `on_change`, from any thread, as soon as a later membership is announced."""
        with self._changed:
            self._on_change = on_change
            if self._latest.number > membership.number:
                on_change(self._latest)
        try:
            yield
        finally:
            with self._changed:
                self._on_change = lambda membership: None


class MembershipObserver(Protocol):
    """Follows membership changes, in each learner."""

    def pause(self) -> None:
        """This learner leaves a membership: finish, or drop, what was begun for it before returning."""

    def begin(self, membership: Membership, position: Position, is_first: bool, /) -> None:
        """A membership begins at the position that all learners have reached together. Exactly one learner is called
        with `is_first`, before the others continue."""

    def end(self) -> None:
        """All is done. What other learners rely on when they hear of it must be complete before this returns."""


class IgnoreMembership:
    """Ignores membership changes."""

    def pause(self) -> None: ...

    def begin(self, membership: Membership, position: Position, is_first: bool) -> None: ...

    def end(self) -> None: ...
