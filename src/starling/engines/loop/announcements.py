"""Announcements between learners with users' loops: which learners have finished or failed, and requests for a
consensus.

Announcements are numbered keys in the store, so that all learners see the same sequence. In each learner a thread waits
for the next announcement, without polling. Learners can therefore take part in a consensus while their loops compute.
All these threads end after the same announcement, unless the membership ends earlier.

A learner ends in stages. `ended`: its loop has made its last step; learners that step together then agree on the number
of the last step. `finished`: its strategy needs no more gradients; once all learners have finished, the strategies run
to their ends. `settled`: its weights are final; once all learners have settled, the final consensus follows, if a
learner wants it. `closed`: the learner no longer needs the others.
"""

import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch import Tensor

from starling.engines.loop.replica import Consensus
from starling.engines.loop.run import LoopRun
from starling.engines.processes.collectives import OrderedMean
from starling.engines.processes.forks import clone_store
from starling.engines.processes.handshake import Peers
from starling.errors import ProtocolError

_ROUNDING = 1e-4
"""Largest distance between equal replicas, relative to the norm of their weights, that can result from rounding on
different processors."""
UNEQUAL = "unequal"
"""Key, and name of the announcement, under which the reason is published why learners that must make equal numbers of
steps cannot end together."""


class AnnouncementListener(threading.Thread):
    """Listens to announcements, and takes part in each consensus on behalf of its learner.

    `contribution` returns the learner's contribution after the steps of its `run`, and the weights `[P]` whose distance
    from the mean is measured. `run` also counts the bytes. The thread calls `on_news` when a learner has finished,
    settled, closed or failed, and `on_error` when the thread itself fails.
    """

    def __init__(
        self,
        peers: Peers,
        means: OrderedMean,
        run: LoopRun,
        contribution: Callable[[], tuple[Tensor, Tensor]],
        on_news: "Callable[[AnnouncementListener], None]",
        on_error: Callable[[BaseException], None],
    ) -> None:
        # a daemon, because it must not keep a failed process alive
        super().__init__(name=f"starling-announcements-{peers.rank}", daemon=True)
        # each of these attributes holds, by rank, the content of the announcements that have its name
        self.ended: dict[int, tuple[int, int]] = {}
        """For each rank whose loop has ended, its number of steps, and the number of steps by which it may be ahead of
        the other ranks."""
        self.ahead: dict[int, int] = {}
        """The newest step of each rank that still makes steps after another rank has ended."""
        self.unequal: dict[int, str] = {}
        """The reason why learners that must make equal numbers of steps cannot end together. The text is the same for
        all ranks."""
        self.finished: dict[int, str] = {}
        """The ranks whose strategies need no more gradients."""
        self.settled: dict[int, int] = {}
        """The ranks whose weights are final, each with whether it wants the final consensus."""
        self.closed: dict[int, str] = {}
        self.failed: dict[int, tuple[bool, str]] = {}
        """For each rank that failed, whether it had lost a peer, and the text of its error."""
        self.final: Future[Consensus | None] = Future()
        """The consensus of the final weights, once all learners have settled; None if no learner wants it."""
        self._store = peers.store
        # a separate connection, because the thread blocks on it
        self._own = clone_store(peers.store)
        self._own.set_timeout(timedelta(days=20))
        self._rank, self._world, self._means, self._run = peers.rank, peers.world, means, run
        self._contribution, self._on_news, self._on_error = contribution, on_news, on_error
        self._size: int | None = None
        self._lock = threading.Lock()
        self._requests: dict[int, Future[Consensus]] = {}
        self._under_way: tuple[int, Future[Consensus]] | None = None

    def announce(self, what: str, word: object = "") -> int:
        """Make an announcement to all learners, including this one, and return the number of the announcement."""
        number = self._store.add("announced", 1) - 1
        self._store.set(f"announced/{number}", json.dumps([self._rank, what, word]))
        return number

    def request(self) -> "Future[Consensus]":
        """Request a consensus that includes this learner's steps so far. If such a consensus is already under way, join
        it."""
        with self._lock:
            if self._under_way is not None and self._under_way[0] == self._run.num_steps:
                return self._under_way[1]
            future: Future[Consensus] = Future()
            self._requests[self.announce("consensus")] = future
            return future

    def last_step(self, ranks: Sequence[int]) -> int:
        """Return the number of the last step that any of these ranks is known to make."""
        return max(max(self.ended.get(rank, (0, 0))[0], self.ahead.get(rank, 0)) for rank in ranks)

    @property
    def is_over(self) -> bool:
        """Whether all learners have closed."""
        return len(self.closed) == self._world

    def run(self) -> None:
        try:
            for number in count():
                rank, what, word = json.loads(self._own.get(f"announced/{number}"))
                self._hear(number, rank, what, word)
                if self.is_over or self.failed:
                    return
        except BaseException as error:
            self._on_error(error)

    def _hear(self, number: int, rank: int, what: str, word: Any) -> None:
        if what == "consensus":
            with self._lock:
                future = self._requests.pop(number, None) or Future()
            self._take_part(future)
        elif what == "roll-call":
            self._store.set(f"noticed/{self._rank}", "")
        else:
            getattr(self, what)[rank] = word
            if what == "settled" and len(self.settled) == self._world:
                if any(self.settled.values()):
                    self._take_part(self.final)
                else:
                    self.final.set_result(None)
            self._on_news(self)

    def _take_part(self, future: "Future[Any]") -> None:
        with self._lock:
            num_steps = self._run.num_steps
            (mine, own), num_included = self._run.with_steps(self._contribution)
            self._under_way = num_steps, future
        try:
            future.set_result(self._agree(num_included, mine, own))
        except BaseException as error:  # the thread continues, to answer the other learners
            self._on_error(error)
            future.set_exception(error)
        with self._lock:
            self._under_way = None

    def _agree(self, num_steps: float, mine: Tensor, own: Tensor) -> Consensus:
        """Compute the mean of the contributions `mine` of all learners. `num_steps` is the number of steps that this
        learner's weights `own` contain, or NaN."""
        self._size = self._size or len(mine)
        if len(mine) != self._size:
            raise ProtocolError(
                f"learner {self._rank}: its model's buffers had {self._size - len(own)} numbers and now have "
                f"{len(mine) - len(own)}; they must keep their shapes"
            )
        mean = self._means.start(mine)()
        difference = own.cpu().sub_(mean[: len(own)])
        norm = torch.linalg.vector_norm(difference, dtype=torch.float64)
        told = torch.tensor([float(norm) ** 2, num_steps, num_steps**2], dtype=torch.float64)
        distance, steps, squared_steps = self._means.start(told)().tolist()
        self._run.consensus_bytes += 2 * (self._world - 1) * mine.nbytes // self._world
        strategy = self._run.strategy
        if strategy.has_one_model and squared_steps == steps * steps:  # all have made equal numbers of steps
            self._check_equal(strategy.name, distance, mean[: len(own)])
        return Consensus(mean, distance)

    def _check_equal(self, strategy: str, distance: float, mean: Tensor) -> None:
        """Raise `ProtocolError` if replicas that must be equal are apart by more than rounding errors."""
        apart, size = math.sqrt(distance), float(torch.linalg.vector_norm(mean, dtype=torch.float64))
        if apart > _ROUNDING * size:
            raise ProtocolError(
                f"learner {self._rank}: under {strategy} all learners have the same weights, but they are {apart:.3g} "
                f"from their mean, whose norm is {size:.3g} (root mean square): the loop of one learner has changed "
                "its weights alone (load_state_dict, a clamp, an optimizer's eval(), …). Do it on all learners alike, "
                "or load weights before starling.join"
            )
