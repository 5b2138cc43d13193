"""A loop's learner across memberships. Each membership has a new `LoopLearner`, which continues the loop's progress.

If the learners are not watched, there is only one membership, and the loss of a learner is an error. Otherwise a thread
regroups the learners after each membership change, while the loop computes, evaluates or saves. If the change
interrupts a call of the loop, the learner of the next membership repeats the call.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from typing import Concatenate, ParamSpec, TypeVar

from torch.distributed import DistError

from starling.engines.loop.announcements import UNEQUAL
from starling.engines.loop.learner import LoopLearner
from starling.engines.loop.run import LoopRun, Past, plan
from starling.engines.processes.backend import LOSSES
from starling.engines.processes.handshake import Handshake, Peers
from starling.engines.processes.process_group import process_group
from starling.errors import ConfigError, FinishedApart, PeerLost, ProtocolError, StarlingError, some
from starling.timeouts import REGROUP
from starling.training.membership import Membership

T = TypeVar("T")
P = ParamSpec("P")
_LOG = logging.getLogger("starling")


class Closed(Exception):  # noqa: N818 - not an error
    """Exception that is raised when all learners have closed."""


class LoopLife:
    """The learner of one loop. The loop's thread calls all public methods."""

    learner: LoopLearner
    """The learner of the present membership."""

    def __init__(self, root: Peers, run: LoopRun, handshake: Handshake) -> None:
        """Enter the first membership. `root` are the learners of the run."""
        self._root, self._feed, self._run, self._handshake = root, root.feed, run, handshake
        self._stack = ExitStack()
        self._changed = threading.Condition()  # held while the loop is in a learner, and while learners are regrouped
        self._is_over = False
        try:
            if self._feed.is_new:
                root.check_alike(handshake)
            first = self._feed.first()
            run.has_joined = first.number > 0
            if not run.has_joined:
                run.resume(root.place.rank, root.place.world)
            self._regroup(first)
        except BaseException as error:
            self._feed.leave(error)
            if isinstance(error, StarlingError):
                raise error.with_traceback(None) from None
            raise
        if self._feed.is_watched:
            threading.Thread(target=self._follow, name="starling-regroup", daemon=True).start()

    def run(self, action: Callable[Concatenate[LoopLearner, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `action` on the learner, and return its result. If a membership change interrupts the call, repeat it on
        the learner of the next membership. Every `action` first checks whether the learner has failed.

        Errors of Starling end without the frames inside the engine, so that the user sees where the loop was."""
        try:
            return self._repeat(action, *args, **kwargs)
        except StarlingError as error:
            if isinstance(error, PeerLost) and not (self._feed.is_watched or hasattr(error, "__notes__")):
                error.add_note(
                    "start again from the last checkpoint; with on_loss='continue', the others continue alone"
                )
            raise error.with_traceback(None) from None

    def _repeat(self, action: Callable[Concatenate[LoopLearner, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        while True:
            try:
                with self._changed:
                    learner = self.learner
                    return action(learner, *args, **kwargs)
            except LOSSES as error:
                if error is self._feed.error:
                    raise
                interruption = error
            self._await_next(learner.peers.membership, interruption)  # outside `except`, so that its errors show alone

    def close(self) -> None:
        """Close the learner, and leave the run once all learners have closed."""
        try:
            with suppress(Closed):
                self.run(LoopLearner.close)
        except PeerLost as error:
            if not self._feed.is_watched or self._run.final is None:
                raise
            raise FinishedApart(
                f"learner {self._root.rank} has finished apart from the others, which may end with another model than "
                f"its own: {error}; use the model of a learner that ended well"
            ) from None
        with self._changed:
            self._is_over = True
            if not self._feed.is_watched:
                self.learner.peers.part()
            self._feed.leave(None)
            self._stack.close()
            if self._run.record is not None:
                self._run.record.close()

    def abandon(self, error: BaseException | None) -> None:
        """Notify the other learners, and leave without waiting for them. The process may join other learners later."""
        self._is_over = True
        unclosed = ProtocolError(f"learner {self._root.rank} ended without close()")
        self.learner.fail(error or unclosed)
        self._feed.leave(error or unclosed)
        if not self._feed.is_watched:
            with suppress(DistError):  # the store may be gone as well
                self.learner.announce_failure(error)
        self._stack.__exit__(type(unclosed), unclosed, None)  # an error cuts connections in which threads wait
        self.learner.leave()

    # implementation

    def _await_next(self, membership: Membership, error: BaseException) -> None:
        """Wait until the learners have regrouped after `membership`. Raises `error` if no membership change explains
        it."""
        if self._feed.beyond(membership, REGROUP) is None:
            raise error
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self.learner.peers.membership.number > membership.number)
            if self._is_over:
                raise Closed
            self._feed.beyond(membership, 0.0)

    @property
    def _has_ended(self) -> bool:
        return self._is_over or self._feed.error is not None

    def _follow(self) -> None:
        """Regroup after each membership change. This method is the target of a thread."""
        try:
            while not self._is_over:
                change = self._feed.beyond(self.learner.peers.membership, None)
                with self._changed:
                    if change and not self._is_over and not self._leave():
                        self._regroup(change)
        except BaseException as error:
            if not self._is_over:
                self._feed.fail(error)
        with self._changed:
            self._changed.notify_all()

    def _leave(self) -> bool:
        """Leave the membership that has ended. Return whether the run is over, because all learners closed in that
        membership. If this learner has failed, raise its error, which its loop may not have noticed yet."""
        store, failure = self.learner.peers.store, self.learner.release.error
        if store.check([UNEQUAL]):
            failure = ProtocolError(store.get(UNEQUAL).decode())
        if failure is not None and not isinstance(failure, LOSSES):
            raise failure
        self._is_over = self.learner.peers.decide(is_over=False)
        if not self._is_over:
            self.learner.leave()
            self._stack.close()
        return self._is_over

    def _regroup(self, change: Membership) -> None:
        """Enter the membership `change`, or a later one if the membership changes again meanwhile."""
        while True:
            try:
                learner = self._enter(change)
                break
            except LOSSES:
                if self._feed.name not in change.members or (later := self._feed.beyond(change, REGROUP)) is None:
                    raise
                change = later
        if change.number and learner.peers.rank == 0:
            _LOG.warning("%s: %d learners continue", change.reason or "the membership changed", learner.world)
        with self._changed:
            self.learner = learner
            self._changed.notify_all()

    def _enter(self, membership: Membership) -> LoopLearner:
        name = self._feed.name
        world, run = len(membership.members), self._run
        if (size := run.strategy.size_of_unit(run.options)) > 1 and name not in membership.members:
            first = name // size * size
            raise PeerLost(
                f"{membership.reason}, so learners {first} to {first + size - 1} leave the run, because they are one "
                "super-learner; start all of them again to join it"
            )
        if name not in membership.members:
            raise PeerLost(f"learner {name} was taken for lost, and the others continue without it")
        try:
            run.strategy.validate(run.options, world)
        except ConfigError as error:
            raise PeerLost(f"{membership.reason}; {run.strategy.name} cannot continue: {error}") from error
        peers = self._root.enter(membership)
        peers.shake_hands(replace(self._handshake, world=world))
        what = "entering the next membership"
        pasts = [Past(**each) for each in peers.gather_all("past", asdict(run.past), what)]
        if all(past.has_joined and not past.has_state for past in pasts):
            raise ProtocolError(
                f"learner {name} has joined, but all learners that had the run's model were lost before it was "
                "copied; start the run again, from your loop's last checkpoint"
            )
        newest = {past.newest_save for past in pasts}
        if membership.number == 0 and len(newest) > 1:
            raise ProtocolError(
                f"learners resume from different checkpoints, {some(sorted(newest))}; the folder `checkpoints` must be "
                "on a file system that all learners share"
            )
        run.newest_save = max(newest)
        is_in_step = run.strategy.sync_groups(run.options, world).size == world
        size = size if membership.number else 1  # in the first membership, each learner has its own checkpoint
        how = plan(pasts, run.strategy.has_one_model, is_in_step, run.strategy.keeps_state, size)
        with ExitStack() as stack:
            connections = None
            if peers.world > 1:
                connections = stack.enter_context(process_group(peers, run.replica.weights.device))
            learner = LoopLearner(peers, run, how)
            if connections is not None:
                connections.note()
            stack.enter_context(peers.telling(learner.fail))
            self._stack = stack.pop_all()
        return learner
