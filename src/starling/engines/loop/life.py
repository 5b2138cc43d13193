"""A loop's learner across memberships: each membership has a `LoopLearner`, which continues with the progress.

If the learners are not watched there is one, and the loss of a learner is an error. Otherwise a thread regroups the
learners after each change while the loop computes, evaluates or saves; a call of the loop that the change interrupts is
repeated by the learner of the next membership.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from typing import Concatenate, ParamSpec, TypeVar

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from starling.engines.loop.announcements import UNEQUAL
from starling.engines.loop.learner import LoopLearner
from starling.engines.loop.run import LoopRun, Past, plan
from starling.engines.processes.backend import ConnectionFailed
from starling.engines.processes.handshake import Handshake, Peers
from starling.engines.processes.place import Place
from starling.engines.processes.process_group import Connections, process_group
from starling.engines.processes.threads import Release
from starling.errors import ConfigError, FinishedApart, PeerLost, ProtocolError
from starling.timeouts import REGROUP
from starling.training.membership import Membership, MembershipChanged, MembershipFeed

T = TypeVar("T")
P = ParamSpec("P")
_FOREVER = 1e6
_LOSSES = (MembershipChanged, PeerLost, ConnectionFailed, DistError)
_LOG = logging.getLogger("starling")


class Coordination:
    """How a learner at `place` hears of memberships: of one alone, which no learner may leave."""

    listening: Store | None = None
    """The store, over a connection that nothing else uses; None: there is none yet."""

    def __init__(self, place: Place, feed: MembershipFeed | None = None) -> None:
        self.place = place
        self.feed = feed or MembershipFeed(place.rank, Membership(0, tuple(range(place.world))))

    def await_first(self) -> Membership:
        """Report that this learner is ready; the first membership that includes it. Raises PeerLost."""
        return self.feed.first()

    def watch(self, on_lost: Callable[[PeerLost], None]) -> None:
        """Call `on_lost` once if the connection to who announces memberships is lost."""

    def leave(self, error: BaseException | None) -> None:
        """Disconnect: because the run has ended or, with `error`, because this learner ends without the others."""


class Closed(Exception):  # noqa: N818 - not an error
    """All learners have closed."""


class LoopLife:
    """The learner of one loop. The loop's thread calls all public methods."""

    learner: LoopLearner
    """The learner of the present membership."""

    def __init__(self, coordination: Coordination, timeout_seconds: float, run: LoopRun, handshake: Handshake) -> None:
        """Enter the first membership."""
        self._coordination, self._feed = coordination, coordination.feed
        self._root = Peers(coordination.place, timeout_seconds, feed=self._feed)
        self._run, self._handshake = run, handshake
        self._stack = ExitStack()
        self._connections: Connections | None = None
        self._lock = threading.RLock()  # held while the loop is in a learner, and while learners are regrouped
        self._changed = threading.Condition()
        self._failure = Release()
        self._is_over = False
        try:
            coordination.watch(self._fail)
            if self._feed.is_watched:
                self._root.check_alike(handshake)
            first = coordination.await_first()
            run.has_joined = first.number > 0
            self._regroup(first)
        except BaseException as error:
            coordination.leave(error)
            raise
        if self._feed.is_watched:
            threading.Thread(target=self._follow, name="starling-regroup", daemon=True).start()

    def run(self, action: Callable[Concatenate[LoopLearner, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `action` on the learner, repeated with the next one if a membership change interrupts it.
        Every `action` begins with a check of whether the learner has failed."""
        while True:
            try:
                with self._lock:
                    learner = self.learner
                    return action(learner, *args, **kwargs)
            except _LOSSES as error:
                if error is self._failure.error:
                    raise
                interruption = error
            self._await_next(learner.peers.membership, interruption)  # here, so that what it raises is shown alone

    def close(self) -> None:
        """Close the learner, and leave once all have closed."""
        try:
            with suppress(Closed):
                self.run(LoopLearner.close)
        except PeerLost as error:
            if not self._feed.is_watched or self._run.final is None:
                raise
            raise FinishedApart(
                f"learner {self._root.rank} has finished apart from the others, which may end with another model than "
                f"its own: {error}; use the model of a learner that ended well"
            ) from error
        with self._lock:
            self._is_over = True
            if not self._feed.is_watched:
                self.learner.peers.part()
            self._coordination.leave(None)
            self._stack.close()

    def abandon(self, error: BaseException | None) -> None:
        """Leave without the others: they are notified. Connections stay open, because threads may be waiting in
        them."""
        self._is_over = True
        unclosed = ProtocolError(f"learner {self._root.rank} ended without close()")
        self.learner.fail(error or unclosed)
        self._coordination.leave(error or unclosed)
        if not self._feed.is_watched:
            with suppress(DistError):  # the store may be gone as well
                self.learner.announce_failure(error)

    # implementation

    def _fail(self, error: BaseException) -> None:
        """End this learner with `error`. Called by another thread."""
        if self._is_over:
            return
        with self._changed:
            self._failure.fail(error)
            self._changed.notify_all()
        if hasattr(self, "learner"):
            self.learner.fail(error)
        self._cut()

    def _cut(self) -> None:
        if self._connections is not None:
            self._connections.cut()

    def _await_next(self, membership: Membership, error: BaseException) -> None:
        """Wait until the learners have regrouped after `membership`. Raises `error` if nothing explains it."""
        if self._later(membership) is None and not self._has_ended:
            raise error
        with self._changed:
            self._changed.wait_for(lambda: self.learner.peers.membership.number > membership.number or self._has_ended)
            if self._is_over:
                raise Closed
            self._failure.check()

    @property
    def _has_ended(self) -> bool:
        return self._is_over or self._failure.error is not None

    def _later(self, membership: Membership) -> Membership | None:
        """Wait for a later membership, at most for `REGROUP`; None if none comes or this learner has failed."""
        deadline = time.monotonic() + REGROUP
        while self._feed.is_watched and time.monotonic() < deadline and not self._has_ended:
            if change := self._feed.beyond(membership, 0.2):
                return change
        return None

    def _follow(self) -> None:
        """Regroup after each change of the membership. The target of a thread."""
        try:
            while (change := self._feed.beyond(self.learner.peers.membership, _FOREVER)) and not self._is_over:
                with self._lock:
                    if not self._is_over and not self._leave():
                        self._regroup(change)
        except BaseException as error:
            self._fail(error)

    def _leave(self) -> bool:
        """Leave the membership that has ended. Returns whether the run is over: all learners have closed in it, or this
        one has failed, which its loop may not have noticed yet."""
        store, failure = self.learner.peers.store, self.learner.release.error
        if store.check([UNEQUAL]):
            failure = ProtocolError(store.get(UNEQUAL).decode())
        if failure is not None and not isinstance(failure, _LOSSES):
            self._fail(failure)
            return True
        if self.learner.peers.decide(is_over=False):
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            return True
        self.learner.leave()
        self._stack.close()
        return False

    def _regroup(self, change: Membership) -> None:
        """Enter the membership `change`, or a later one if that changes meanwhile."""
        while True:
            try:
                learner = self._enter(change)
                break
            except _LOSSES:
                self._cut()
                self._stack.close()
                if (later := self._later(change)) is None:
                    self._failure.check()
                    raise
                change = later
        if change.number and learner.peers.rank == 0:
            _LOG.warning("%s: %d learners continue", change.reason or "the membership changed", learner.world)
        with self._changed:
            self.learner = learner
            self._changed.notify_all()

    def _enter(self, membership: Membership) -> LoopLearner:
        name = self._feed.name
        if name not in membership.members:
            raise PeerLost(f"learner {name} was taken for lost, and the others continue without it")
        world, run = len(membership.members), self._run
        try:
            run.strategy.validate(run.options, world)
        except ConfigError as error:
            raise PeerLost(f"{membership.reason}; {run.strategy.name} cannot continue: {error}") from error
        peers = self._root.enter(membership, self._failure.check)
        peers.shake_hands(replace(self._handshake, world=world))
        found = peers.gather_all("past", asdict(run.past), "entering the next membership")
        pasts = [Past(**each) for each in found]
        if all(past.has_joined and not past.has_state for past in pasts):
            raise ProtocolError(
                f"learner {name} has joined, but all learners that had the run's model were lost before it was "
                "copied; start the run again, from your loop's last checkpoint"
            )
        is_in_step = run.strategy.sync_groups(run.options, 2).size == 2
        how = plan(pasts, run.strategy.has_one_model, is_in_step, run.strategy.keeps_state)
        listening = self._coordination.listening and PrefixStore(membership.key, self._coordination.listening)
        self._connections = None
        if peers.world > 1:
            self._connections = self._stack.enter_context(process_group(peers, run.replica.weights.device))
        with peers.telling(lambda change: self._connections.cut_all() if self._connections else None):
            learner = LoopLearner(peers, run, how, listening)
        if self._connections is not None:
            self._connections.note()
        self._stack.enter_context(learner.ending(self._cut))
        return learner
