"""Memberships, which are the numbered sets of living learners of a run, and the feed through which a learner receives
them.

The launcher watches the learners. When a learner is lost or joins, the launcher announces the next membership. Learners
communicate only within a membership, which has its own process groups and its own keys in the store.
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
    """Generation of the membership; the first membership of a run is 0."""
    members: tuple[int, ...]
    """Names of the learners. A learner's name never changes; its rank is its index in this tuple."""
    reason: str = ""
    """Reason for the membership change, for messages."""

    @property
    def key(self) -> str:
        """Prefix of this membership's keys in the store."""
        return f"membership/{self.number}"


Stage = Literal["ready", "arrived", "entered"]
"""Stage of a learner on its way into a membership: ready to join, about to connect to the members, or connected to
them."""
_NONE = Membership(-1, ())


class MembershipChanged(Exception):  # noqa: N818 - not an error
    """Interrupts a learner when its membership has been replaced by the next."""

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership.reason)
        self.membership = membership


class MembershipFeed:
    """The memberships that are announced to one learner. Any thread may use this object.

    If the learners are not watched (`is_watched` is False), the first membership is the only one, and a learner that
    loses a peer fails. A learner whose `first` membership is None joins a running experiment and waits until a
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
        """Function that reports a stage of this learner, and the number of the membership."""
        self.latest = first or _NONE
        """Newest membership."""
        self.error: BaseException | None = None
        """Error after which this learner receives no further memberships."""
        self._changed = threading.Condition()
        self._on_end: list[Callable[[BaseException], None]] = []

    def first(self) -> Membership:
        """Return the membership in which this learner begins. A joiner first reports that it is ready, and waits for a
        membership."""
        if self.is_new:
            self.report("ready", self.latest.number)
            with self._changed:
                self._changed.wait_for(lambda: self.latest.number >= 0)
        return self.latest

    def announce(self, membership: Membership) -> None:
        """Announce a new membership. The thread that listens to the launcher calls this method."""
        with self._changed:
            if membership.number <= self.latest.number:
                return
            self.latest = membership
            self._tell(MembershipChanged(membership))

    def fail(self, error: BaseException) -> None:
        """End this learner's work with `error`, or with the error of an earlier call, because no further membership
        will be announced. Any thread may call this method."""
        with self._changed:
            self.error = self.error or error
            self._tell(self.error)

    def leave(self, error: BaseException | None) -> None:
        """Disconnect, because the run has ended or, with `error`, because this learner ends without the others."""

    def check(self, membership: Membership) -> None:
        """Raise `MembershipChanged` if a later membership has been announced, or the error that was passed to
        `fail`."""
        if (why := self._end_of(membership)) is not None:
            raise why

    def beyond(self, membership: Membership, within: float | None) -> Membership | None:
        """Wait at most `within` seconds for a later membership. Returns None if there is none. Raises the error that
        was passed to `fail` before or during the wait."""
        with self._changed:
            within = within if self.is_watched else 0.0
            self._changed.wait_for(lambda: self._end_of(membership) is not None, within)
            if self.error is not None:
                raise self.error
            return self.latest if self.latest.number > membership.number else None

    @contextmanager
    def telling(self, membership: Membership, on_end: Callable[[BaseException], None]) -> Generator[None, None, None]:
        """A context in which `on_end` is called, by any thread, as soon as `check` would raise an error, with that
        error. If contexts are nested, the inner function is called first."""
        with self._changed:
            self._on_end.append(on_end)
            if (why := self._end_of(membership)) is not None:
                on_end(why)
        try:
            yield
        finally:
            with self._changed:
                self._on_end.remove(on_end)

    def _end_of(self, membership: Membership) -> BaseException | None:
        return self.error or (MembershipChanged(self.latest) if self.latest.number > membership.number else None)

    def _tell(self, why: BaseException) -> None:
        self._changed.notify_all()
        for on_end in reversed(self._on_end):
            on_end(why)


class MembershipObserver:
    """Base class of objects that follow membership changes in each learner. The base class ignores the changes."""

    def pause(self) -> None:
        """Finish or drop all pending work for a membership before returning, because this learner leaves the
        membership."""

    def begin(self, membership: Membership, position: Position, is_first: bool, /) -> None:
        """Prepare for a membership that begins at `position`. `is_first` is true on exactly one learner, which is
        called before the others continue."""

    def end(self) -> None:
        """Complete all work on which other learners rely before returning, because the run has ended."""
