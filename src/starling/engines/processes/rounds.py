"""Averaging rounds of learner processes: which have opened, which is the last, and where checkpoints cut them."""

from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from starling.engines.processes.forks import clone_store
from starling.engines.processes.handshake import Peers
from starling.engines.processes.links import LinkBoard
from starling.training.cuts import CutAgreement
from starling.training.pace import Rounds

ENDED = 1 << 30
"""Number added to a round's key if the round will never open."""
_CUT, _ENTERED = "cut", "entered"
"""Values that the store has for a round that a learner wants to enter: whether it is the cut of a checkpoint
barrier."""
SAVING = "saving a checkpoint"
DRIFT = 1024
"""Maximum number of rounds that one learner may be ahead of another; older keys are removed from the store. Neighbours
wait for each other in every round, so with any connected topology learners stay much closer."""


class StoreBoard:
    """Which rounds have opened, and which is the last, in the store: each round is a key, for which all backgrounds
    wait without polling.

    A background that opens a round learns from the store's answer that it is open, and need not ask: a round trip to
    the store can take long if weights fill the link.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self._store = store
        self._own = clone_store(store)
        self._own.set_timeout(timedelta(days=20))
        self._rank, self._world = rank, world

    def open(self, number: int, is_behind: bool) -> bool:
        if not is_behind:
            return int(self._store.add(_key(number), 1)) < ENDED
        return self._enter(number, int(self._own.add(_key(number), 1)))

    def await_open(self, number: int) -> bool:
        """Wait until a round opens. False if it never will. Called by the background."""
        return self._enter(number, int(self._own.get(_key(number))))

    def _enter(self, number: int, value: int) -> bool:
        has_opened = value < ENDED
        if has_opened and number >= DRIFT and number % self._world == self._rank:
            self._own.delete_key(_key(number - DRIFT))
        return has_opened

    def finish(self, first_unopened: int) -> None:
        if self._store.add("rounds/finished", 1) < self._world:
            return
        while self._store.check([_key(first_unopened)]):
            first_unopened += 1
        self._store.add(_key(first_unopened), ENDED)


class StoreCuts(CutAgreement):
    """The cuts of a membership's checkpoint barriers, in the store.

    Learners that have passed a barrier mark each round that they enter. The last to pass places the cut at the first
    round that is not marked and that no learner entered before it passed. The store decides which of the two comes
    first.
    """

    def __init__(self, peers: Peers) -> None:
        self._store, self._rank, self._world = peers.store, peers.rank, peers.world
        self._naming_the_lost = peers.naming_the_lost
        self._behind: Store | None = None  # the background's own connection

    def passed(self, barrier: int, num_entered: int) -> None:
        store, key = self._store, f"cuts/{barrier}/{{}}".format
        with self._naming_the_lost(SAVING):
            store.set(key(f"entered/{self._rank}"), str(num_entered))
            if int(store.add(key("passed"), 1)) < self._world:
                return
            number = max(self._entered(barrier))
            while store.compare_set(key(number), "", _CUT) != _CUT.encode():
                number += 1
            store.set(key("place"), str(number))

    def is_cut(self, barrier: int, number: int) -> bool:
        if self._behind is None:  # entering a round names the lost
            self._behind = clone_store(self._store)
        return bool(self._behind.compare_set(f"cuts/{barrier}/{number}", "", _ENTERED) == _CUT.encode())

    def cut(self, barrier: int) -> int | None:
        key = f"cuts/{barrier}/place"
        with self._naming_the_lost(SAVING):
            return int(self._store.get(key)) if self._store.check([key]) else None

    def saved(self, barrier: int) -> None:
        store, key = self._store, f"cuts/{barrier}/{{}}".format
        with self._naming_the_lost(SAVING):
            if int(store.add(key("saved"), 1)) < self._world:
                return
            marked = range(min(self._entered(barrier)), int(store.get(key("place"))) + 1)
            names = ["passed", "place", "saved", *marked, *(f"entered/{rank}" for rank in range(self._world))]
            for name in names:
                store.delete_key(key(name))

    def _entered(self, barrier: int) -> list[int]:
        """The number of rounds that each learner had entered when it passed a barrier."""
        return [int(self._store.get(f"cuts/{barrier}/entered/{rank}")) for rank in range(self._world)]


class ProcessRounds(Rounds):
    """The rounds of a learner that is a process, whose background waits in them."""

    def __init__(self, board: StoreBoard | LinkBoard) -> None:
        super().__init__(board)
        self._own_board = board

    def next(self, period: float) -> int | None:
        """Called by the background: wait for the next round. Returns its number, or None after the last."""
        number, is_open = self.begin(period)
        return self.enter(number, self._own_board.await_open(number) if is_open is None else is_open)


def _key(number: int) -> str:
    return f"rounds/{number}"
