"""Who is there: numbered views of the learners of a run, and what one learner hears of them.

Who starts learners watches them, and says when one is lost or comes: the living ones, and those to come, are the next
view. Between two views learners do nothing together; each view has process groups and keys in the store of its own.
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
    """0 is the view that the run begins with."""
    members: tuple[int, ...]
    """Their names. A learner keeps its name for life; its rank is its place among these."""
    reason: str = ""
    """What changed, in words."""

    @property
    def key(self) -> str:
        """Where the store has what belongs to this view."""
        return f"view/{self.number}"


_NONE = Membership(-1, ())


class MembershipChanged(Exception):  # noqa: N818 - it is no error
    """Ends what a learner does in a view that is over."""

    def __init__(self, view: Membership) -> None:
        super().__init__(view.reason)
        self.view = view


class MembershipFeed:
    """The views that one learner hears of, by any thread.

    Where nobody watches (`is_watched` False), the first view is the only one, and who loses another learner fails.
    Without a first view (None) this learner is new: others compute already, and it waits to be told of a view with it.
    """

    def __init__(
        self,
        name: int,
        first: Membership | None,
        is_watched: bool = False,
        on_enter: Callable[[Membership], None] = lambda view: None,
        on_arrive: Callable[[Membership], None] = lambda view: None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.is_watched = is_watched
        self.is_new = first is None
        """Whether the others had begun without this learner."""
        self._on_enter = on_enter
        self._on_arrive = on_arrive
        self._on_ready = on_ready
        self._latest = first or _NONE
        self._changed = threading.Condition()
        self._on_change: Callable[[Membership], None] = lambda view: None

    @property
    def latest(self) -> Membership:
        """The newest view."""
        return self._latest

    def first_view(self) -> Membership:
        """The view to begin in. Who is new says that it is ready, and waits until the others expect it."""
        if self.is_new:
            self._on_ready()
            with self._changed:
                self._changed.wait_for(lambda: self._latest.number >= 0)
        return self._latest

    def arrive(self, view: Membership) -> None:
        """This learner is about to meet the other members of a view. Who watches is told by `on_arrive`."""
        self._on_arrive(view)

    def enter(self, view: Membership) -> None:
        """This learner has met the other members of a view. Who watches is told by `on_enter`."""
        self._on_enter(view)

    def announce(self, view: Membership) -> None:
        """There is a new view. Called by who listens to the launcher, in any thread."""
        with self._changed:
            if view.number <= self._latest.number:
                return
            self._latest = view
            self._changed.notify_all()
            self._on_change(view)

    def beyond(self, view: Membership, within: float) -> Membership | None:
        """A later view, as soon as there is one; None if none comes within so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._latest.number > view.number, within if self.is_watched else 0.0)
            return self._latest if self._latest.number > view.number else None

    @contextmanager
    def telling(self, view: Membership, on_change: Callable[[Membership], None]) -> Generator[None, None, None]:
        """Call `on_change`, in any thread, as soon as there is a view beyond `view`, while the context lasts."""
        with self._changed:
            self._on_change = on_change
            if self._latest.number > view.number:
                on_change(self._latest)
        try:
            yield
        finally:
            with self._changed:
                self._on_change = lambda view: None


class MembershipObserver(Protocol):
    """Who wants to know, in each learner, that others were lost or came."""

    def pause(self) -> None:
        """This learner leaves a view. What was begun for it is to be finished, or left, before this returns."""

    def begin(self, view: Membership, position: Position, is_first: bool) -> None:
        """A view begins, with what all have done together. Where `is_first`, before the others go on."""

    def end(self) -> None:
        """All is done. What others must be able to rely on when they hear of it is to be done before this returns."""


class IgnoreMembership:
    """Does not care who is there."""

    def pause(self) -> None: ...

    def begin(self, view: Membership, position: Position, is_first: bool) -> None: ...

    def end(self) -> None: ...
