"""Checkpoints of learners that do not step together, whose saved states include the same work.

Learners pass a checkpoint barrier at different times, each between two of its own mini-batches, and no learner waits
there. If each saved its weights as they are at that moment, a round between two of these moments would be in one state
and not in the other, and the mean of the saved weights would lack a part of one learner's progress and include a part
of another's twice. So a learner copies its state, and adds to the copy the changes of further rounds, up to the cut:
the first round that no learner has entered when the last one passes the barrier. The changes of a round sum to zero
over all learners, whatever they have done meanwhile. So the mean of the copies includes each mini-batch before the
barrier once, and none after it.

Likewise a server copies its shards before the first push of a worker that has passed the barrier, and lets the copies
take the pushes of workers that have not: see `HeldShard.fork`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

from starling.checkpoint.state import MEMBERSHIP_PREFIX, ROUNDS_PREFIX, LearnerState, own
from starling.training.replica import Replica


class CutAgreement(ABC):
    """Agreement of all learners on the cut of each checkpoint barrier. Barriers and rounds are numbered from 0."""

    @abstractmethod
    def passed(self, barrier: int, num_entered: int) -> None:
        """Note that this learner has passed a barrier after entering `num_entered` rounds. The last learner to pass
        places the cut."""

    @abstractmethod
    def cut(self, barrier: int) -> int | None:
        """The cut of a barrier; None if it is not known yet."""

    def is_cut(self, barrier: int, number: int) -> bool:
        """Whether a round is the cut of a barrier that this learner has passed. Called by the background whenever it
        enters a round, before the round changes anything."""
        return self.cut(barrier) == number

    def saved(self, barrier: int) -> None:  # noqa: B027 - the processes' store forgets a cut, memory need not
        """Note that this learner has the complete state of a barrier, and asks no more about its cut."""


@dataclass
class _Pending:
    """A state at a checkpoint barrier that is not saved yet."""

    barrier: int
    state: LearnerState
    save: Callable[[LearnerState], None]
    complete: Callable[[LearnerState], LearnerState]
    is_complete: bool = False


class Cuts:
    """The states that one learner has copied at checkpoint barriers, until they are complete.

    The foreground copies and saves; the background reports the rounds that it enters and completes.
    """

    def __init__(self, replica: Replica, agreement: CutAgreement) -> None:
        self._replica, self._agreement = replica, agreement
        self._lock = threading.Lock()
        self._pending: list[_Pending] = []
        self._num_barriers = self._num_entered = self._num_completed = 0

    def entered(self, number: int) -> None:
        """Note that the background enters a round."""
        with self._lock:
            self._num_entered = number + 1
            pending = [each for each in self._pending if not each.is_complete]
        for each in pending:
            if self._agreement.is_cut(each.barrier, number):
                self._complete(each)

    def completed(self, number: int) -> None:
        """Note that the background has completed all rounds below `number`."""
        self._num_completed = number

    def add(
        self,
        state: LearnerState,
        save: Callable[[LearnerState], None],
        complete: Callable[[LearnerState], LearnerState] | None = None,
    ) -> None:
        """Copy the state at the next barrier, and `save` it once it is complete: when it has its rounds or, with
        `complete`, when that has completed it after all learners have passed the barrier."""
        copied = state.copy()
        with self._lock:
            chosen = self._copy_for_rounds() if complete is None else complete
            self._pending.append(pending := _Pending(self._num_barriers, copied, save, chosen))
            num_entered = self._num_entered
        self._num_barriers += 1
        self._agreement.passed(pending.barrier, num_entered)

    def save(self, is_over: bool = False) -> None:
        """Save, in order, the states that are complete, or all states if the run is over. Called between two
        mini-batches."""
        while self._pending:
            first = self._pending[0]
            if not first.is_complete:
                if not is_over:
                    cut = self._agreement.cut(first.barrier)
                    if cut is None or self._num_completed < cut:
                        return
                self._complete(first)
            if not is_over:
                self._agreement.saved(first.barrier)
            self._pending.pop(0)
            first.save(first.state)

    def _complete(self, pending: _Pending) -> None:
        """Complete a state that other learners no longer change."""
        with self._lock:
            if not pending.is_complete:
                pending.state = pending.complete(pending.state)
                pending.is_complete = True

    def _copy_for_rounds(self) -> Callable[[LearnerState], LearnerState]:
        """Copy the state that rounds change, and add their changes to the copies. The result puts the copies into a
        state."""
        replica, copies = self._replica, self._replica.copy_for_rounds()

        def complete(state: LearnerState) -> LearnerState:
            optimizer = replica.end_copy_for_rounds(copies, state.optimizer)
            kept = replica.strategy_state.items()
            of_rounds = {name: own(each) for name, each in kept if name.startswith((MEMBERSHIP_PREFIX, ROUNDS_PREFIX))}
            return replace(state, weights=copies[0], optimizer=optimizer, strategy=state.strategy | of_rounds)

        return complete
