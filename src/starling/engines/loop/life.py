"""A loop's learner across memberships: each membership has a `LoopLearner`, which continues with the progress.

Without a feed of memberships there is one, and the loss of a learner is an error. With one, a thread regroups the
learners after each change while the loop computes, evaluates or saves; a call of the loop that the change interrupts is
repeated by the learner of the next membership.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from torch.amp.grad_scaler import GradScaler
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from starling.configuration import Config
from starling.engines.loop.announcements import UNEQUAL
from starling.engines.loop.hooks import MakeStep, StepHook
from starling.engines.loop.learner import Entry, LoopLearner
from starling.engines.loop.progress import LoopProgress, Past, plan
from starling.engines.loop.replica import LoopReplica
from starling.engines.processes.backend import ConnectionFailed
from starling.engines.processes.handshake import (
    OF_LEARNER_0,
    Handshake,
    check_alike,
    gather,
    in_one_list,
    part,
    shake_hands,
)
from starling.engines.processes.place import Place
from starling.engines.processes.process_group import Connections, process_group
from starling.engines.processes.stalls import Waits
from starling.errors import ConfigError, FinishedApart, PeerLost, ProtocolError
from starling.strategies import Strategy
from starling.timeouts import CAUSE, REGROUP
from starling.training.membership import Membership, MembershipChanged, MembershipFeed

T = TypeVar("T")
_FOREVER = 1e6
_OUTCOME, _OVER, _CHANGED = "outcome", "over", "changed"
_LOSSES = (MembershipChanged, PeerLost, ConnectionFailed, DistError)
_LOG = logging.getLogger("starling")


class Coordination(Protocol):
    """This learner's connection to the process that announces memberships."""

    feed: MembershipFeed
    listening: Store
    """The store, over a connection that nothing else uses."""

    def await_first(self) -> Membership:
        """Report that this learner is ready; the first membership that includes it. Raises PeerLost."""

    def watch(self, on_lost: Callable[[PeerLost], None]) -> None:
        """Call `on_lost` once if the connection is lost."""

    def leave(self, error: BaseException | None) -> None:
        """Disconnect: because the run has ended or, with `error`, because this learner ends without the others."""


class Closed(Exception):  # noqa: N818 - not an error
    """All learners have closed."""


class LoopLife:
    """The learner of one loop. The loop's thread calls all public methods."""

    learner: LoopLearner
    """The learner of the present membership."""

    def __init__(
        self,
        place: Place,
        strategy: Strategy,
        options: Config,
        replica: LoopReplica,
        seed: int,
        timeout_seconds: float,
        most_not_finite: int,
        handshake: Callable[[int], Handshake],
        coordination: Coordination | None,
    ) -> None:
        """Enter the first membership. `handshake` makes this learner's for a number of learners."""
        self.place = place
        self.membership = Membership(0, tuple(range(place.world)))
        self.progress = LoopProgress()
        self._root, self._strategy, self._options, self._replica = place, strategy, options, replica
        self._seed, self._timeout_seconds, self._most_not_finite = seed, timeout_seconds, most_not_finite
        self._handshake, self._coordination = handshake, coordination
        self._waits = Waits()
        self._stack = ExitStack()
        self._connections: Connections | None = None
        self._lock = threading.RLock()  # held while the loop is in a learner, and while learners are regrouped
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_over = False
        if coordination is None:
            self._enter_only()
            return
        try:
            self._begin(coordination)
        except BaseException as error:
            coordination.leave(error)
            raise

    def _begin(self, coordination: Coordination) -> None:
        place, handshake = self.place, self._handshake
        coordination.watch(self._fail)
        store = PrefixStore(Membership(0, ()).key, place.store)
        if store.check([OF_LEARNER_0]):
            check_alike(store, coordination.feed.name, handshake(0))
        first = coordination.await_first()
        self.progress.has_joined = first.number > 0
        self._regroup(coordination, first)
        thread = threading.Thread(target=self._follow, args=[coordination], name="starling-regroup", daemon=True)
        thread.start()

    def run(self, action: Callable[[LoopLearner], T]) -> T:
        """The result of `action` on the learner, repeated with the next one if a membership change interrupts it."""
        while True:
            try:
                with self._lock:
                    if self._error is not None:
                        raise self._error
                    learner, membership = self.learner, self.membership
                    return action(learner)
            except _LOSSES as error:
                if self._coordination is None or error is self._error:
                    raise
                self._await_next(self._coordination.feed, membership, error)

    def close(self) -> None:
        """Close the learner, and leave once all have closed."""
        try:
            with suppress(Closed):
                self.run(lambda learner: learner.close())
        except PeerLost as error:
            if not self.survives or self.progress.final is None:
                raise
            raise FinishedApart(
                f"learner {self._root.rank} has finished apart from the others, which may end with another model than "
                f"its own: {error}; use the model of a learner that ended well"
            ) from error
        with self._lock:
            self._is_over = True
            self.learner.leave_optimizer()
            if self._coordination is not None:
                self._coordination.leave(None)
            elif self.place.world > 1:
                self._part()
            self._stack.close()

    @property
    def survives(self) -> bool:
        """Whether this learner continues when others are lost."""
        return self._coordination is not None

    def attach(self, make_step: MakeStep, scaler: GradScaler | None) -> StepHook:
        """Let the loop's calls of `optimizer.step()` or `scaler.step()` call `make_step`; returns the hook."""
        with self._lock:
            self._replica.is_attached = True
            return StepHook(self._replica, make_step, scaler)

    def abandon(self, error: BaseException | None) -> None:
        """Leave without the others: they are notified. Connections stay open, because threads may be waiting in
        them."""
        self._is_over = True
        self.learner.leave_optimizer()
        unclosed = ProtocolError(f"learner {self._root.rank} ended without close()")
        self.learner.fail(error or unclosed)
        if self._coordination is not None:
            self._coordination.leave(error or unclosed)
        else:
            with suppress(DistError):  # the store may be gone as well
                self.learner.announce_failure(error)

    # implementation

    def _enter_only(self) -> None:
        place = self.place
        if place.world > 1:
            shake_hands(place.store, place.rank, self._handshake(place.world), self._timeout_seconds, waits=self._waits)
            device = self._replica.weights.device
            connections = self._stack.enter_context(
                process_group(place, device, self._timeout_seconds, waits=self._waits)
            )
            self.learner = self._make_learner(place, None)
            connections.note()
        else:
            self.learner = self._make_learner(place, None)

    def _make_learner(self, place: Place, entry: Entry | None) -> LoopLearner:
        return LoopLearner(
            place,
            self._strategy,
            self._options,
            self._replica,
            self._seed,
            self._timeout_seconds,
            self._most_not_finite,
            self._waits,
            self.progress,
            entry,
        )

    def _part(self) -> None:
        place = self.place
        part(place.store, place.rank, place.world, self._timeout_seconds, waits=self._waits)

    def _fail(self, error: BaseException) -> None:
        """End this learner with `error`. Called by another thread."""
        if self._is_over:
            return
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        if hasattr(self, "learner"):
            self.learner.fail(error)
        if self._connections is not None:
            self._connections.cut()

    def _await_next(self, feed: MembershipFeed, membership: Membership, error: BaseException) -> None:
        """Wait until the learners have regrouped after `membership`. Raises `error` if nothing explains it."""
        if self._later(feed, membership) is None and self._error is None and not self._is_over:
            raise error
        with self._changed:
            self._changed.wait_for(
                lambda: self.membership.number > membership.number or self._error is not None or self._is_over
            )
            if self._is_over:
                raise Closed
            if self._error is not None:
                raise self._error

    def _later(self, feed: MembershipFeed, membership: Membership) -> Membership | None:
        """Wait for a later membership, at most for `REGROUP`; None if none comes or this learner has failed."""
        deadline = time.monotonic() + REGROUP
        while time.monotonic() < deadline and self._error is None and not self._is_over:
            if change := feed.beyond(membership, 0.2):
                return change
        return None

    def _follow(self, coordination: Coordination) -> None:
        """Regroup after each change of the membership. The target of a thread."""
        try:
            while (change := coordination.feed.beyond(self.membership, _FOREVER)) and not self._is_over:
                with self._lock:
                    if not self._is_over and not self._leave():
                        self._regroup(coordination, change)
        except BaseException as error:
            self._fail(error)

    def _leave(self) -> bool:
        """Leave the membership that has ended. Returns whether the run is over: all learners have closed in it, or this
        one has failed, which its loop may not have noticed yet."""
        store, failure = self.place.store, self.learner.failure
        if store.check([UNEQUAL]):
            failure = ProtocolError(store.get(UNEQUAL).decode())
        if failure is not None and not isinstance(failure, _LOSSES):
            self._fail(failure)
            return True
        if store.compare_set(_OUTCOME, "", _CHANGED).decode() == _OVER:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            return True
        self.learner.leave()
        self._stack.close()
        return False

    def _regroup(self, coordination: Coordination, change: Membership) -> None:
        """Enter the membership `change`, or a later one if that changes meanwhile."""
        while True:
            try:
                learner = self._enter(coordination.feed, coordination.listening, change)
                break
            except _LOSSES as error:
                if self._connections is not None:
                    self._connections.cut()
                self._stack.close()
                later = self._later(coordination.feed, change)
                if later is None:
                    raise self._error or error from error
                change = later
        if change.number and self.place.rank == 0:
            _LOG.warning("%s: %d learners continue", change.reason or "the membership changed", self.place.world)
        with self._changed:
            self.learner, self.membership = learner, change
            self._changed.notify_all()

    def _enter(self, feed: MembershipFeed, listening: Store, membership: Membership) -> LoopLearner:
        if feed.name not in membership.members:
            raise PeerLost(f"learner {feed.name} was taken for lost, and the others continue without it")
        rank, world = membership.members.index(feed.name), len(membership.members)
        try:
            self._strategy.validate(self._options, world)
        except ConfigError as error:
            raise PeerLost(f"{membership.reason}; {self._strategy.name} cannot continue: {error}") from error
        store = PrefixStore(membership.key, self._root.store)
        place = self.place = replace(self._root, rank=rank, world=world, store=store)
        self._waits.among(rank, membership.members)

        def look_around() -> None:
            if self._error is not None:
                raise self._error
            if feed.latest.number > membership.number:
                raise MembershipChanged(feed.latest)

        def explain(error: Exception) -> None:
            if change := feed.beyond(membership, CAUSE):
                raise MembershipChanged(change) from error

        def end() -> None:
            if store.compare_set(_OUTCOME, "", _OVER).decode() == _CHANGED:
                raise MembershipChanged(feed.latest)

        shake_hands(store, rank, self._handshake(world), self._timeout_seconds, look_around, self._waits)
        pasts = self._pasts(place, look_around)
        if all(past.has_joined and not past.has_state for past in pasts):
            raise ProtocolError(
                f"learner {feed.name} has joined, but all learners that had the run's model were lost before it was "
                "copied; start the run again, from your loop's last checkpoint"
            )
        is_in_step = self._strategy.sync_group_size(self._options, 2) == 2
        how = plan(pasts, self._strategy.has_one_model, is_in_step, self._strategy.keeps_state)
        listening = PrefixStore(membership.key, listening)
        entry = Entry(how, explain, look_around, listening, end, membership.members)
        telling = partial(feed.telling, membership)
        if world == 1:
            learner = self._make_learner(place, entry)
            self._connections = None
        else:
            device = self._replica.weights.device
            connections = self._connections = self._stack.enter_context(
                process_group(place, device, self._timeout_seconds, telling, True, self._waits)
            )
            with telling(lambda change: connections.cut_all()):
                learner = self._make_learner(place, entry)
            connections.note()

        def end_membership(change: Membership) -> None:  # called by another thread
            learner.fail(MembershipChanged(change))
            if self._connections is not None:
                self._connections.cut()

        self._stack.enter_context(telling(end_membership))
        return learner

    def _pasts(self, place: Place, look_around: Callable[[], None]) -> list[Past]:
        """What all members of a membership have done before, by rank."""
        own, what, seconds = self.progress.past.encode(), "entering the next membership", self._timeout_seconds
        found = gather(
            place.store, place.rank, place.world, "past", own, in_one_list, seconds, look_around, what, self._waits
        )
        return [Past(**each) for each in json.loads(found)]
