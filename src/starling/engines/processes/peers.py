"""A learner's dealings with its peers among processes: messages, means, rounds, and a background to do them in."""

import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from starling.engines.processes import nccl
from starling.engines.processes.collectives import OrderedMean
from starling.engines.processes.communication import ConnectionFailed, ReducingModel, communicating, wait_for
from starling.engines.processes.handshake import A_LOSS_WAS_NOTICED, await_keys, do_nothing, silent_learners
from starling.engines.processes.links import LinkBoard, Links, SharedMean
from starling.engines.processes.rounds import Board, Rounds, StoreBoard
from starling.engines.processes.shared_memory import share_memory
from starling.engines.processes.staging import Staging
from starling.engines.processes.stalls import BACKGROUND, OWN_ROUND, OWN_ROUNDS, WAITS
from starling.engines.processes.waiting import FirstOf, Release
from starling.engines.processes.worker import Worker
from starling.errors import PeerLost, ProtocolError
from starling.learner import Handle, Shard
from starling.training.replica_learner import ReplicaLearner
from starling.training.shards import HeldShard, check_piece, host_copy
from starling.training.streams import beside_this_thread, synchronize

T = TypeVar("T")
FOREVER = timedelta(days=20)
LONGEST_LEAVE_SECONDS = 10.0
A_MEAN = "a mean"
DEVICE_BACKEND = "nccl"
"""What means travel by between learners that each have a device of their own."""
_PATIENCE = "; give more timeout_seconds if all are well and only slow"


@dataclass(frozen=True)
class Place:
    """Where a learner stands among all, and the store through which they meet."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    store: Store


class ProcessHandle(Handle[T]):
    """Work under way in this process; `result()` waits for it once and keeps what it gave.

    `wait_long`, if there is one, is another way to wait for it: in a thread beside those of the strategy, and as long
    as all peers live.
    """

    def __init__(self, wait: Callable[[], T], wait_long: Callable[[], T] | None = None) -> None:
        self._wait = wait
        self._wait_long = wait_long or wait
        self._results: list[T] = []
        self._error: BaseException | None = None

    @property
    def is_finished(self) -> bool:
        return bool(self._results)

    def finish(self) -> None:
        """Wait for it long; an error is raised by `result`."""
        try:
            self._results.append(self._wait_long())
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        if not self._results:
            self._results.append(self._wait())
        return self._results[0]


class Background(threading.Thread):
    """A learner's second coroutine, in a thread, on a stream of its own where the device has streams. It waits inside
    its handles and polls nothing."""

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, None],
        rank: int,
        on_error: Callable[[BaseException], None],
        on_stream: AbstractContextManager[object],
    ) -> None:
        super().__init__(name=f"{BACKGROUND}-{rank}", daemon=True)  # it must not keep a failed learner alive
        self._coroutine = coroutine
        self._on_error = on_error
        self._on_stream = on_stream

    def run(self) -> None:
        try:
            with self._on_stream:
                while True:
                    self._coroutine.send(None)
        except StopIteration:
            pass
        except BaseException as error:
            self._on_error(error)


class GradientHandle(ProcessHandle[Tensor]):
    """A gradient, computed when it is waited for; `mean` may ask before that for the mean over the team instead."""

    def __init__(self, learner: ReplicaLearner, compute: Callable[[bool], Tensor], may_reduce: bool) -> None:
        super().__init__(lambda: compute(False))
        self.may_reduce = may_reduce
        self._learner = learner
        self._reduced = ProcessHandle(lambda: compute(True))
        self._is_given_away = False

    def reduced(self) -> Handle[Tensor]:
        """The mean over the team, in whose place the gradient itself is never computed."""
        self._is_given_away = True
        return self._reduced

    def result(self) -> Tensor:
        if self._is_given_away:
            raise self._learner.given_away()
        return super().result()


class PeerLearner(ReplicaLearner):
    """A learner that is this process, among others that are processes; `meet` connects it.

    Everything travels by gloo through host memory, except for what DDP reduces and, where each learner has a device of
    its own (`by_nccl`), means.
    """

    def meet(
        self,
        place: Place,
        device: torch.device,
        by_nccl: bool,
        timeout_seconds: float,
        look_around: Callable[[], None] = do_nothing,
    ) -> None:
        """Connect with the others; the default process group is there. While it waits for them it calls `look_around`
        now and then, which may raise."""
        self.place = place
        self._device = device
        self._by_nccl = by_nccl
        self._begin = time.monotonic()
        self._staging = Staging(device)
        self._background: Background | None = None
        self._release = Release()
        self._waiters = Worker("starling-waiter"), Worker("starling-waiter-behind")
        self._firsts: tuple[FirstOf[ProcessHandle[Any]], FirstOf[ProcessHandle[Any]]] = FirstOf(), FirstOf()
        self._own_messages: dict[int, SimpleQueue[Callable[[], Tensor]]] = defaultdict(SimpleQueue)
        self._timeout_seconds = timeout_seconds
        timeout = timedelta(seconds=timeout_seconds)
        self._links = self._make_links(look_around) if device.type == "cpu" else None
        self._rounds = Rounds(self._make_board())
        self._ordered, self._ordered_behind = (self._make_means(lane, timeout) for lane in range(2))
        self._device_groups = (
            [self._new_group_of_sync_group(DEVICE_BACKEND, timeout) for _ in range(2)] if by_nccl else []
        )
        self._reducing_group = (
            None if len(self.sync_group) == place.world else self._new_group_of_sync_group("gloo", timeout)
        )
        if by_nccl:
            self._reducing_group = self._device_groups[False]

    def now(self) -> float:
        """Seconds since this learner met the others."""
        return time.monotonic() - self._begin

    def mean(self, of: Tensor | Handle[Tensor], group: Sequence[int] | None = None) -> Handle[Tensor]:
        self.check_group(group)
        if isinstance(of, GradientHandle) and of.may_reduce and not of.is_finished:
            return of.reduced()
        if isinstance(of, ProcessHandle) and of.is_finished:
            of = of.result()
        if isinstance(of, Handle):
            return ProcessHandle(lambda: self.mean(of.result(), group).result())
        self.check_mean(of)
        self._count_mean(of.nbytes)
        if len(self.sync_group) == 1:
            alone = of.clone()
            return ProcessHandle(lambda: alone)
        is_behind = threading.current_thread() is self._background
        if self._by_nccl:
            vector = of.clone()
            with self._naming_the_lost(A_MEAN), communicating():
                work = dist.all_reduce(vector, group=self._device_groups[is_behind], async_op=True)

            def wait() -> None:
                wait_for(work)
                self._await_device()

            def reduced() -> Tensor:
                # NCCL orders a stream behind a mean instead of waiting, and must do that in the thread that computes
                self._wait_for(A_MEAN, wait, in_this_thread=True)
                return vector.div_(len(self.sync_group))

            return ProcessHandle(reduced)
        means = self._ordered_behind if is_behind else self._ordered
        with self._naming_the_lost(A_MEAN):
            under_way = means.start(of)
        is_shared = isinstance(means, SharedMean)  # whose waits end when this learner fails
        return ProcessHandle(
            lambda: self._wait_for(A_MEAN, under_way.result, in_this_thread=is_shared).to(self._device)
        )

    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle[None]:
        self.check_peer(peer)
        if peer == self._rank:
            self._own_messages[tag].put(self._staging.pass_on(tensor.clone()))
            return ProcessHandle(lambda: None)
        self.averaging.bytes_sent += tensor.nbytes
        what = f"sending to learner {peer}"
        if self._links is not None and peer in self._links.peers:
            with self._naming_the_lost(what, peer):
                if self._links.send(peer, tensor, tag):
                    return ProcessHandle(lambda: None)

        def begin(host: Tensor) -> dist.Work | None:
            with communicating():
                return dist.isend(host.contiguous(), peer, tag=tag)

        with self._naming_the_lost(what, peer):
            begun = self._staging.hand_over(tensor, begin)

        def wait() -> None:
            if (work := begun()) is not None:
                wait_for(work)

        return ProcessHandle(lambda: self._wait_for(what, wait, peer))

    def receive(self, peer: int, like: Tensor, tag: int) -> Handle[Tensor]:
        self.check_peer(peer)
        if peer == self._rank:
            own = self._own_messages[tag].get
            return ProcessHandle(
                lambda: self._wait_for("its own server", own)().to(like.device), lambda: own()().to(like.device)
            )
        what = f"receiving from learner {peer}"
        if self._links is not None and peer in self._links.peers:
            return self._receive_by_link(self._links, peer, like, tag, what)
        theirs = self._staging.empty_like(like)
        with self._naming_the_lost(what, peer), communicating():
            work = dist.irecv(theirs, peer, tag=tag)

        def result() -> Tensor:
            if work is not None:
                self._wait_for(what, partial(wait_for, work), peer)
            return self._staging.to_device(theirs) if like.device.type != "cpu" else theirs

        def patient_result() -> Tensor:
            if work is not None:
                with self._naming_the_lost(what, peer):
                    wait_for(work, FOREVER)
            return self._staging.to_device(theirs) if like.device.type != "cpu" else theirs

        return ProcessHandle(result, patient_result)

    def _receive_by_link(self, links: Links, peer: int, like: Tensor, tag: int, what: str) -> Handle[Tensor]:
        def take(timeout_seconds: float | None) -> Tensor:
            received = links.receive(peer, tag, timeout_seconds)
            if isinstance(received, Tensor):
                return received.view(like.dtype).view(like.shape)
            theirs = torch.empty_like(like)
            with communicating():
                work = dist.irecv(theirs, peer, tag=tag)
            if work is not None:
                wait_for(work, FOREVER if timeout_seconds is None else None)
            return theirs

        def patient_result() -> Tensor:
            with self._naming_the_lost(what, peer):
                return take(None)

        return ProcessHandle(
            lambda: self._wait_for(what, lambda: take(self._timeout_seconds), peer, in_this_thread=True), patient_result
        )

    def snapshot(self, piece: slice | None = None) -> Tensor:
        memory = None
        if piece is not None and self._links is not None and self._links.peers:
            memory = self._links.snapshot_memory(self.weights[: piece.stop - piece.start])
        return self.replica.snapshot(piece, memory)

    def first(self, handles: Mapping[int, Handle[Any]]) -> Handle[int]:
        work = {key: handle for key, handle in handles.items() if isinstance(handle, ProcessHandle)}

        def result() -> int:
            begin, is_behind = self.now(), threading.current_thread() is self._background
            with WAITS.waiting("whoever comes first"):
                key = self._firsts[is_behind].of(work, self._notice_losses)
            if not is_behind:
                self.spent.waiting_for_peers += self.now() - begin
            return key

        return ProcessHandle(result)

    def _look_for_change(self, error: Exception) -> None:
        """Raise what explains the loss of a connection, where somebody else is to tell."""

    def _notice_losses(self) -> None:
        """Raise `PeerLost` if others have noticed a loss: who waits for whoever comes first would not."""
        self._release.check()
        if self.place.store.check([A_LOSS_WAS_NOTICED]):
            raise PeerLost(f"learner {self._rank} lost {self._lost_ones(None)}, {self._whereabouts()}")

    def start_on_shard(self, num_bytes: int, passes: int, do: Callable[[], T]) -> Handle[T]:
        def result() -> T:
            begin = self.now()
            done = do()
            if threading.current_thread() is not self._background:
                self.spent.computing += self.now() - begin
            return done

        return ProcessHandle(result)

    def share(self, pieces: Sequence[slice]) -> Handle[Sequence[Shard]]:
        for piece in pieces:
            check_piece(piece, self)

        def result() -> Sequence[Shard]:
            own, num_counts = host_copy(self.weights), len(pieces) * self._world
            store, patience, look_around = self.place.store, self._timeout_seconds, self._release.check
            num_bytes = 8 * num_counts + own.nbytes
            memory = share_memory(store, self._rank, self._world, num_bytes, patience, look_around)
            counts = memory[: 8 * num_counts].view(torch.int64).view(len(pieces), self._world)
            weights = memory[8 * num_counts :].view(own.dtype)
            if self._rank == 0:
                weights.copy_(own)
                store.set("shared weights", "")
            with self._naming_the_lost("shared weights"):
                await_keys(store, ["shared weights"], patience, look_around, "the shared weights", [0])
            return [
                self.hold(HeldShard(self, piece, weights[piece], counts[number], self._rank))
                for number, piece in enumerate(pieces)
            ]

        return ProcessHandle(result)

    def exchange(self, peer: int, tensor: Tensor, tag: int) -> Handle[Tensor]:
        receiving = self.receive(peer, tensor, tag)  # first, so that both directions flow at once
        sending = self.send(peer, tensor, tag)

        def result() -> Tensor:
            sending.result()
            return receiving.result()

        return ProcessHandle(result)

    def background(self, activity: Coroutine[Any, Any, None]) -> None:
        if self._background is not None:
            raise ProtocolError(f"learner {self._rank} has a background already; it can have one")
        self._background = Background(activity, self._rank, self.fail, beside_this_thread(self._device))
        self._background.start()

    def fail(self, error: BaseException) -> None:
        """Let everything that this learner waits for end with this error. Called by any thread."""
        self._release.fail(error)
        if self._links is not None:
            self._links.release()

    def round(self, period: float) -> Handle[int | None]:
        def result() -> int | None:
            with self._naming_the_lost("waiting for a round"):
                number = self._rounds.next(period)
            self.averaging.rounds += number is not None
            return number

        return ProcessHandle(result)

    def keep_up(self, most: float) -> Handle[None]:
        def result() -> None:
            kept_up = self._rounds.kept_up(most)
            if kept_up is not None:
                begin = self.now()
                with WAITS.waiting(OWN_ROUND):
                    self._release.wait(kept_up)
                self.spent.waiting_for_peers += self.now() - begin

        return ProcessHandle(result)

    def reducing(self, model: nn.Module) -> ReducingModel:
        """`model`, whose gradients are averaged over the team while backward runs."""
        with self._naming_the_lost("the mean of a gradient"):
            reducing = ReducingModel(model, self._reducing_group)
        reducing.model.register_forward_hook(
            lambda *_: WAITS.begin("the mean of a gradient", self.sync_group, is_group=True)
        )
        return reducing

    def _step(self, gradient: Tensor) -> None:
        super()._step(gradient)
        self._rounds.gradient_made()

    def leave(self) -> None:
        """Give up all dealings with the others; `cut` their connections before."""
        self._rounds.leave()
        if self._background is not None:
            self._background.join(LONGEST_LEAVE_SECONDS)
        for means in (self._ordered, self._ordered_behind, self._staging, *self._waiters, *self._firsts):
            means.abandon()
        if self._links is not None:
            self._links.close()

    def _warn_of_few_rounds(self) -> None:
        """Say once, at the end, if this learner has trained nearly apart from the others."""
        if complaint := self._rounds.pace.complaint():
            warnings.warn(f"learner {self._rank} {complaint}", RuntimeWarning, stacklevel=2)

    def _end_rounds(self) -> None:
        """No gradients will follow: wait until all rounds have ended. The others may still be computing."""
        if self._background is not None:
            self._warn_of_few_rounds()
        self._rounds.finish()
        if self._background is not None:
            with WAITS.waiting(OWN_ROUNDS):
                self._background.join()
            self._release.check()
        self._close_threads()

    def _close_threads(self) -> None:
        """Nothing is waited for any more."""
        for means in (self._ordered, self._ordered_behind, self._staging, *self._waiters, *self._firsts):
            means.close()
        if self._links is not None:
            self._links.close()

    def _make_links(self, look_around: Callable[[], None]) -> Links:
        with self._naming_the_lost("linking the learners of this machine"):
            store, num_bytes = self.place.store, self.weights.nbytes
            return Links(store, self._rank, self._world, num_bytes, self._timeout_seconds, look_around)

    def _make_board(self) -> Board:
        if self._links is not None and self._links.join(range(self._world)):
            return LinkBoard(self._links)
        return StoreBoard(self.place.store, self._rank, self._world)

    def _make_means(self, lane: int, timeout: timedelta) -> OrderedMean | SharedMean:
        """Means of a thread of its own: two threads in one group would have no common order."""
        size = self.sync_groups.size
        sync_groups = [range(first, first + size) for first in range(0, self.sync_groups.num_workers, size)]
        if self._links is not None and size > 1 and all(self._links.join(each) for each in sync_groups):
            if self.is_worker:
                return SharedMean(self._links, self._rank, self.sync_group, lane, self._timeout_seconds)
            return OrderedMean(None, 1)
        return OrderedMean(self._new_group_of_sync_group("gloo", timeout), len(self.sync_group))

    def _count_mean(self, num_bytes: int) -> None:
        """Count what a mean over the team sends."""
        self.averaging.bytes_sent += 2 * (len(self.sync_group) - 1) * num_bytes // len(self.sync_group)

    def _new_group_of_sync_group(self, backend: str, timeout: timedelta) -> ProcessGroup | None:
        """A group of this learner's team; every process makes those of all teams, in one order."""
        # a new group would not take over the time-out of the default one, but wait for half an hour
        size, mine = self.sync_groups.size, None
        for first in range(0, self.sync_groups.num_workers if size > 1 else 0, size):
            with communicating():
                group = dist.new_group(range(first, first + size), backend=backend, timeout=timeout)
            mine = group if first == self.sync_group.start else mine
        if mine is not None and backend == DEVICE_BACKEND:
            with communicating():
                nccl.connect(mine, self._device)
        return mine

    def _wait_for(self, what: str, wait: Callable[[], T], peer: int | None = None, in_this_thread: bool = False) -> T:
        """Wait for others, or for one peer, and name who is lost if they do not come."""
        begin = self.now()
        is_behind = threading.current_thread() is self._background
        is_mean = what == A_MEAN
        whom = self.sync_group if is_mean else () if peer is None else [peer]
        with self._naming_the_lost(what, peer), WAITS.waiting(what, whom, is_group=is_mean):
            if self._may_be_released(is_behind) and not in_this_thread:
                result = self._release.wait(self._waiters[is_behind].submit(wait))
            else:
                result = wait()
        if not is_behind:
            self.spent.waiting_for_peers += self.now() - begin
        return result

    def _await_device(self) -> None:
        """Wait until this thread's stream has what NCCL gave it, and raise what ended that: what is aborted looks
        complete, and must not reach the weights."""
        if self._by_nccl:
            synchronize(self._device)
            self._release.check()

    def _may_be_released(self, is_behind: bool) -> bool:
        """Whether a wait, of the background or not, ends when something failed in another thread."""
        return self._background is not None and not is_behind

    def _lost_ones(self, suspect: int | None) -> str:
        """Who did not come, in words; `suspect` if a connection to one peer broke."""
        return silent_learners(self.place.store, self._rank, self._world, suspect)

    def _whereabouts(self) -> str:
        """How far this learner has come, for errors."""
        return f"step {self.replica.version}"

    @contextmanager
    def _naming_the_lost(self, what: str, peer: int | None = None) -> Generator[None, None, None]:
        """Turn a backend's or the store's complaint about an address into a `PeerLost` that says what was going on."""
        try:
            yield
        except (ConnectionFailed, dist.DistError) as error:
            self._release.check()
            self._look_for_change(error)
            raise PeerLost(
                f"learner {self._rank} lost {self._lost_ones(peer)} in {what}, {self._whereabouts()} "
                f"({str(error).splitlines()[0]}){_PATIENCE if 'timed out' in str(error).lower() else ''}"
            ) from error
