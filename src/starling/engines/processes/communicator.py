"""A learner process's communication with its peers: messages, means, averaging rounds, and its background thread."""

import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from starling.engines.processes import nccl
from starling.engines.processes.backend import (
    ConnectionFailed,
    ReducingModel,
    check_files,
    communicating,
    local_group,
    wait_for,
)
from starling.engines.processes.collectives import OrderedMean
from starling.engines.processes.handshake import A_LOSS_WAS_NOTICED, await_keys, do_nothing, silent_learners
from starling.engines.processes.links import LinkBoard, MemoryLinks, SharedMean
from starling.engines.processes.place import Place
from starling.engines.processes.rounds import Board, Rounds, StoreBoard, StoreCuts
from starling.engines.processes.shared_memory import share_memory
from starling.engines.processes.staging import Staging
from starling.engines.processes.stalls import BACKGROUND, OWN_ROUND, OWN_ROUNDS, Waits
from starling.engines.processes.threads import FirstOf, Release, Worker
from starling.errors import PeerLost, ProtocolError
from starling.learner import EncodedMean, Handle
from starling.strategies import SyncGroups
from starling.training.checks import check_group, check_mean, check_peer, given_away
from starling.training.job import Statistics
from starling.training.shards import host_copy
from starling.training.streams import beside_this_thread, synchronize

T = TypeVar("T")
FOREVER = timedelta(days=20)
LONGEST_LEAVE_SECONDS = 10.0
A_MEAN = "a mean"
MEAN_OF_GRADIENT = "the mean of a gradient"
SAVING = "saving a checkpoint"
_PATIENCE = "; increase timeout_seconds if the learners are only slow"


def stopwatch() -> Callable[[], float]:
    """A clock that returns the seconds since this call."""
    begin = time.monotonic()
    return lambda: time.monotonic() - begin


class ProcessHandle(Handle[T]):
    """Work under way in this process. The first call of `result()` waits for it; later calls return the same result.

    `finish` waits by `wait_long`, if given: in another thread than the strategy's, and without a time-out.
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
        """Wait without a time-out. An error is raised by `result`."""
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


class GradientHandle(ProcessHandle[Tensor]):
    """A gradient, computed when it is awaited; before that, `mean` may request the sync group's mean instead.

    With `may_reduce` the mean is computed while backward runs, otherwise from the whole gradient, in its memory.
    """

    def __init__(self, rank: int, compute: Callable[[bool], Tensor], may_reduce: bool) -> None:
        self._own = ProcessHandle(lambda: compute(False))
        super().__init__(self._own.result)
        self.may_reduce = may_reduce
        self._rank = rank
        self._reduced = ProcessHandle(lambda: compute(True))
        self._is_given_away = False

    def reduced(self) -> Handle[Tensor]:
        """The mean over the sync group, computed in place of the gradient itself."""
        self._is_given_away = True
        return self._reduced

    def give_away(self) -> Handle[Tensor]:
        """The gradient, in memory that the caller may overwrite."""
        self._is_given_away = True
        return self._own

    def result(self) -> Tensor:
        if self._is_given_away:
            raise given_away(self._rank)
        return super().result()


class Background(threading.Thread):
    """A thread that runs a learner's second coroutine, on CUDA with a stream of its own. It blocks in the results of
    handles, without polling."""

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


class Communicator:
    """Connects this learner process with its peers. The default process group must exist.

    Learners on one machine use shared memory (`MemoryLinks`) on the CPU; all others use gloo through host memory. If
    each learner has its own device (`by_nccl`), means use NCCL.

    Waiting time on `clock`, bytes and rounds are counted in `statistics`; waits are recorded in `waits`. Errors name
    the lost peers with `name_lost`, which takes a suspected rank or None, and the learner's progress with `where`.
    Before that, `explain` may raise the cause of a lost connection. `has_other_threads` means that threads other than
    the background may `fail` this learner while it waits. While connecting, `look_around` is called repeatedly and may
    raise.
    """

    def __init__(
        self,
        place: Place,
        sync_groups: SyncGroups,
        weights: Tensor,
        by_nccl: bool,
        timeout_seconds: float,
        statistics: Statistics,
        waits: Waits,
        clock: Callable[[], float],
        where: Callable[[], str],
        *,
        explain: Callable[[Exception], None] = lambda error: None,
        name_lost: Callable[[int | None], str] | None = None,
        has_other_threads: bool = False,
        look_around: Callable[[], None] = do_nothing,
    ) -> None:
        self.release = Release()
        self._place, self._sync_groups, self._weights = place, sync_groups, weights
        self._rank, self._world = place.rank, place.world
        self._name = place.process(place.rank)
        self._sync_group = sync_groups.of(place.rank)
        self._device = weights.device
        self._by_nccl = by_nccl
        self._timeout_seconds = timeout_seconds
        self._statistics, self._waits, self._now = statistics, waits, clock
        self._where, self._explain = where, explain
        self._name_lost = name_lost or partial(silent_learners, place.store, place.rank, place.world)
        self._has_other_threads = has_other_threads
        self._staging = Staging(self._device)
        self._background: Background | None = None
        self._waiters = Worker("starling-waiter"), Worker("starling-waiter-behind")
        self._firsts: tuple[FirstOf[ProcessHandle[Any]], FirstOf[ProcessHandle[Any]]] = FirstOf(), FirstOf()
        self._own_messages: dict[int, SimpleQueue[Callable[[], Tensor]]] = defaultdict(SimpleQueue)
        timeout = timedelta(seconds=timeout_seconds)
        self._links = self._make_links(look_around) if self._device.type == "cpu" else None
        self.rounds = Rounds(self._make_board())
        self._cuts = StoreCuts(place.store, place.rank, place.world)
        self.reduces_in_backward = place.num_rows == 1 and not self._shares_memory()
        """Whether the mean of a gradient is computed while backward runs. Not so in shared memory, where a whole mean
        takes less time than the overhead of splitting it, nor in an island, whose backward ends with the shard."""
        self._ordered, self._ordered_behind = (self._make_means(lane, timeout) for lane in range(2))
        self._device_groups = (
            [self._new_group_of_sync_group(nccl.BACKEND, timeout) for _ in range(2)] if by_nccl else []
        )
        is_whole = len(self._sync_group) == self._world and place.num_rows == 1
        self._reducing_group = (
            None if is_whole or not self.reduces_in_backward else self._new_group_of_sync_group("gloo", timeout)
        )
        if by_nccl:
            self._reducing_group = self._device_groups[False]

    @property
    def is_behind(self) -> bool:
        """Whether the calling thread is the background."""
        return threading.current_thread() is self._background

    def mean(self, of: Tensor | Handle[Tensor], group: Sequence[int] | None = None) -> Handle[Tensor]:
        """See `Learner.mean`."""
        check_group(self._rank, group, self._sync_group, self._world)
        if isinstance(of, GradientHandle) and not of.is_finished:
            if of.may_reduce:
                return of.reduced()
            gradient = of.give_away()
            return ProcessHandle(lambda: self._mean(own := gradient.result(), into=own).result())
        if isinstance(of, ProcessHandle) and of.is_finished:
            of = of.result()
        if isinstance(of, Handle):
            return ProcessHandle(lambda: self._mean(of.result()).result())
        return self._mean(of)

    def _mean(self, of: Tensor, into: Tensor | None = None) -> Handle[Tensor]:
        """The mean of a vector as it is now, in new memory or, if learners share memory, in `into`."""
        check_mean(self._rank, of, self._weights)
        self.count_mean(of.nbytes)
        if len(self._sync_group) == 1:
            alone = of.clone() if into is None else of
            return ProcessHandle(lambda: alone)
        is_behind = threading.current_thread() is self._background
        if self._by_nccl:
            vector = of.clone()
            with self.naming_the_lost(A_MEAN), communicating():
                work = dist.all_reduce(vector, group=self._device_groups[is_behind], async_op=True)

            def wait() -> None:
                wait_for(work)
                self.await_device()

            def reduced() -> Tensor:
                # NCCL does not block but makes this thread's stream wait, so it must be the thread that computes
                self.wait_for(A_MEAN, wait, in_this_thread=True)
                return vector.div_(len(self._sync_group))

            return ProcessHandle(reduced)
        means = self._ordered_behind if is_behind else self._ordered
        is_shared = isinstance(means, SharedMean)  # its waits end when this learner fails
        what = A_MEAN if into is None else MEAN_OF_GRADIENT
        with self.naming_the_lost(what):
            under_way = means.start(of, into) if isinstance(means, SharedMean) else means.start(of)
        return ProcessHandle(lambda: self.wait_for(what, under_way.result, in_this_thread=is_shared).to(self._device))

    def encoded_mean(self, part: EncodedMean) -> Handle[Tensor]:
        """See `Learner.encoded_mean`."""
        self._statistics.averaging.bytes_sent += 2 * (len(self._sync_group) - 1) * part.message_bytes
        means = self._ordered_behind if self.is_behind else self._ordered
        is_shared = isinstance(means, SharedMean)
        with self.naming_the_lost(A_MEAN):
            under_way = means.start_encoded(part)
        return ProcessHandle(lambda: self.wait_for(A_MEAN, under_way.result, in_this_thread=is_shared))

    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle[None]:
        """See `Learner.send`."""
        check_peer(self._rank, peer, self._world)
        if peer == self._rank:
            self._own_messages[tag].put(self._staging.pass_on(tensor.clone()))
            return ProcessHandle(lambda: None)
        self._statistics.averaging.bytes_sent += tensor.nbytes
        what = f"sending to learner {self._place.process(peer)}"
        if self._links is not None and peer in self._links.peers:
            with self.naming_the_lost(what, peer):
                if self._links.send(peer, tensor, tag):
                    return ProcessHandle(lambda: None)

        def begin(host: Tensor) -> dist.Work | None:
            with communicating():
                return dist.isend(host.contiguous(), self._place.process(peer), tag=tag)

        with self.naming_the_lost(what, peer):
            begun = self._staging.hand_over(tensor, begin)

        def wait() -> None:
            if (work := begun()) is not None:
                wait_for(work)

        return ProcessHandle(lambda: self.wait_for(what, wait, peer))

    def receive(self, peer: int, like: Tensor, tag: int) -> Handle[Tensor]:
        """See `Learner.receive`."""
        check_peer(self._rank, peer, self._world)
        if peer == self._rank:
            own = self._own_messages[tag].get
            return ProcessHandle(
                lambda: self.wait_for("receiving from its own server", own)().to(like.device),
                lambda: own()().to(like.device),
            )
        what = f"receiving from learner {self._place.process(peer)}"
        if self._links is not None and peer in self._links.peers:
            return self._receive_by_link(self._links, peer, like, tag, what)
        theirs = self._staging.empty_like(like)
        with self.naming_the_lost(what, peer), communicating():
            work = dist.irecv(theirs, self._place.process(peer), tag=tag)

        def result() -> Tensor:
            if work is not None:
                self.wait_for(what, partial(wait_for, work), peer)
            return self._staging.to_device(theirs) if like.device.type != "cpu" else theirs

        def patient_result() -> Tensor:
            if work is not None:
                with self.naming_the_lost(what, peer):
                    wait_for(work, FOREVER)
            return self._staging.to_device(theirs) if like.device.type != "cpu" else theirs

        return ProcessHandle(result, patient_result)

    def _receive_by_link(self, links: MemoryLinks, peer: int, like: Tensor, tag: int, what: str) -> Handle[Tensor]:
        def take(timeout_seconds: float | None) -> Tensor:
            received = links.receive(peer, tag, timeout_seconds)
            if isinstance(received, Tensor):
                return received.view(like.dtype).view(like.shape)
            theirs = torch.empty_like(like)
            with communicating():
                work = dist.irecv(theirs, self._place.process(peer), tag=tag)
            if work is not None:
                wait_for(work, FOREVER if timeout_seconds is None else None)
            return theirs

        def patient_result() -> Tensor:
            with self.naming_the_lost(what, peer):
                return take(None)

        return ProcessHandle(
            lambda: self.wait_for(what, lambda: take(self._timeout_seconds), peer, in_this_thread=True), patient_result
        )

    def exchange(self, peer: int, tensor: Tensor, tag: int) -> Handle[Tensor]:
        """See `Learner.exchange`."""
        receiving = self.receive(peer, tensor, tag)  # first, so that data flows in both directions at once
        sending = self.send(peer, tensor, tag)

        def result() -> Tensor:
            sending.result()
            return receiving.result()

        return ProcessHandle(result)

    def first(self, handles: Mapping[int, Handle[Any]]) -> Handle[int]:
        """See `Learner.first`."""
        work = {key: handle for key, handle in handles.items() if isinstance(handle, ProcessHandle)}

        def result() -> int:
            begin, is_behind = self._now(), threading.current_thread() is self._background
            with self._waits.waiting("receiving the first of several messages"):
                key = self._firsts[is_behind].of(work, self._notice_losses)
            if not is_behind:
                self._statistics.spent.waiting_for_peers += self._now() - begin
            return key

        return ProcessHandle(result)

    def _notice_losses(self) -> None:
        """Raise `PeerLost` if other learners have noticed a loss: a wait for the first of several would not end."""
        self.release.check()
        if self._place.store.check([A_LOSS_WAS_NOTICED]):
            raise PeerLost(f"learner {self._name} lost {self._name_lost(None)}, {self._where()}")

    def start_on_memory(self, num_bytes: int, passes: int, do: Callable[[], T]) -> Handle[T]:
        """Work on this process's memory, done when it is awaited."""

        def result() -> T:
            begin = self._now()
            done = do()
            if threading.current_thread() is not self._background:
                self._statistics.spent.computing += self._now() - begin
            return done

        return ProcessHandle(result)

    def share(self, num_pieces: int) -> tuple[Tensor, Tensor]:
        """Learner 0's weights `[P]` and zero counts `[num_pieces, L]`, in memory shared by all learners."""
        own, num_counts = host_copy(self._weights), num_pieces * self._world
        store, seconds, look_around = self._place.store, self._timeout_seconds, self.release.check
        num_bytes = 8 * num_counts + own.nbytes
        memory = share_memory(store, self._rank, self._world, num_bytes, seconds, look_around, self._waits)
        counts = memory[: 8 * num_counts].view(torch.int64).view(num_pieces, self._world)
        weights = memory[8 * num_counts :].view(own.dtype)
        if self._rank == 0:
            weights.copy_(own)
            store.set("shared weights", "")
        with self.naming_the_lost("sharing the weights"):
            await_keys(store, ["shared weights"], seconds, look_around, "sharing the weights", [0], self._waits)
        return weights, counts

    def snapshot_memory(self, piece: slice | None) -> Tensor | None:
        """Memory for a copy of a piece that peers on this machine can read without another copy; None if there is
        none."""
        if piece is None or self._links is None or not self._links.peers:
            return None
        return self._links.snapshot_memory(self._weights[: piece.stop - piece.start])

    def start_background(self, activity: Coroutine[Any, Any, None], on_error: Callable[[BaseException], None]) -> None:
        """Start the learner's second coroutine in a thread."""
        if self._background is not None:
            raise ProtocolError(f"learner {self._rank} already has a background; it can have only one")
        self._background = Background(activity, self._rank, on_error, beside_this_thread(self._device))
        self._background.start()

    def fail(self, error: BaseException) -> None:
        """End all waits of this learner with `error`. May be called by any thread."""
        self.release.fail(error)
        if self._links is not None:
            self._links.release()

    def round(self, period: float) -> Handle[int | None]:
        """See `Learner.round`."""

        def result() -> int | None:
            with self.naming_the_lost("an averaging round"):
                number = self.rounds.next(period)
            self._statistics.averaging.rounds += number is not None
            return number

        return ProcessHandle(result)

    def passed(self, barrier: int, num_entered: int) -> None:
        """See `CutAgreement.passed`."""
        with self.naming_the_lost(SAVING):
            self._cuts.passed(barrier, num_entered)

    def is_cut(self, barrier: int, number: int) -> bool:
        """See `CutAgreement.is_cut`; called while entering a round, which names the lost."""
        return self._cuts.is_cut(barrier, number)

    def cut(self, barrier: int) -> int | None:
        """See `CutAgreement.cut`."""
        with self.naming_the_lost(SAVING):
            return self._cuts.cut(barrier)

    def saved(self, barrier: int) -> None:
        """See `CutAgreement.saved`."""
        with self.naming_the_lost(SAVING):
            self._cuts.saved(barrier)

    def keep_up(self, most: float) -> Handle[None]:
        """See `Learner.keep_up`."""

        def result() -> None:
            kept_up = self.rounds.kept_up(most)
            if kept_up is not None:
                begin = self._now()
                with self._waits.waiting(OWN_ROUND):
                    self.release.wait(kept_up)
                self._statistics.spent.waiting_for_peers += self._now() - begin

        return ProcessHandle(result)

    def reducing(self, model: nn.Module) -> ReducingModel:
        """`model`, whose gradients are averaged over the sync group while backward runs."""
        with self.naming_the_lost(MEAN_OF_GRADIENT):
            reducing = ReducingModel(model, self._reducing_group)
        reducing.model.register_forward_hook(
            lambda *_: self._waits.begin(MEAN_OF_GRADIENT, self._processes(self._sync_group), is_group=True)
        )
        return reducing

    def count_mean(self, num_bytes: int) -> None:
        """Count the bytes that a mean over the sync group sends."""
        size = len(self._sync_group)
        self._statistics.averaging.bytes_sent += 2 * (size - 1) * num_bytes // size

    def warn_of_few_rounds(self) -> None:
        """Warn, at the end, if this learner made too few averaging rounds."""
        if self._background is not None and (complaint := self.rounds.pace.complaint()):
            warnings.warn(f"learner {self._name} {complaint}", RuntimeWarning, stacklevel=2)

    def end_rounds(self) -> None:
        """Make no more gradients: wait until all rounds have ended; other learners may still be computing."""
        self.warn_of_few_rounds()
        self.rounds.finish()
        if self._background is not None:
            self.join_background()
            self.release.check()
        self.close()

    def join_background(self) -> None:
        """Wait until the background, if there is one, has ended."""
        if self._background is not None:
            with self._waits.waiting(OWN_ROUNDS):
                self._background.join()

    def close_foreground_mean(self) -> None:
        """End the thread that averages for the foreground."""
        self._ordered.close()

    def close(self) -> None:
        """End the threads. None of them may still be waiting."""
        for means in (self._ordered, self._ordered_behind, self._staging, *self._waiters, *self._firsts):
            means.close()
        if self._links is not None:
            self._links.close()

    def leave(self) -> None:
        """Stop communicating without completing pending work; the caller has cut the connections."""
        self.rounds.leave()
        if self._background is not None:
            self._background.join(LONGEST_LEAVE_SECONDS)
        for means in (self._ordered, self._ordered_behind, self._staging, *self._waiters, *self._firsts):
            means.abandon()
        if self._links is not None:
            self._links.close()

    def wait_for(self, what: str, wait: Callable[[], T], peer: int | None = None, in_this_thread: bool = False) -> T:
        """Wait for the sync group or one peer, and name the lost learners if that fails."""
        begin = self._now()
        is_behind = threading.current_thread() is self._background
        is_mean = what in (A_MEAN, MEAN_OF_GRADIENT)
        whom = self._processes(self._sync_group if is_mean else () if peer is None else [peer])
        with self.naming_the_lost(what, peer), self._waits.waiting(what, whom, is_group=is_mean):
            if self._may_be_released(is_behind) and not in_this_thread:
                result = self.release.wait(self._waiters[is_behind].submit(wait))
            else:
                result = wait()
        if not is_behind:
            self._statistics.spent.waiting_for_peers += self._now() - begin
        return result

    def await_device(self) -> None:
        """Wait for NCCL's results on this thread's stream, and raise the error of an abort: an aborted collective
        appears complete, but its result must not be used."""
        if self._by_nccl:
            synchronize(self._device)
            self.release.check()

    @contextmanager
    def naming_the_lost(self, what: str, peer: int | None = None) -> Generator[None, None, None]:
        """Turn an error of the backend or the store into a `PeerLost` that names the operation `what`."""
        try:
            yield
        except (ConnectionFailed, dist.DistError) as error:
            self.release.check()
            check_files(self._name)
            self._explain(error)
            raise PeerLost(
                f"learner {self._name} lost {self._name_lost(peer)} in {what}, {self._where()} "
                f"({str(error).splitlines()[0]}){_PATIENCE if 'timed out' in str(error).lower() else ''}"
            ) from error

    def _processes(self, ranks: Sequence[int]) -> list[int]:
        """The numbers of learners in the membership."""
        return [self._place.process(rank) for rank in ranks]

    def _may_be_released(self, is_behind: bool) -> bool:
        """Whether another thread may end a wait of the background or, if `is_behind` is false, of the foreground."""
        return self._has_other_threads or (self._background is not None and not is_behind)

    def _make_links(self, look_around: Callable[[], None]) -> MemoryLinks:
        with self.naming_the_lost("linking the learners of this machine"):
            store, num_bytes = self._place.store, self._weights.nbytes
            waits = self._waits if self._place.num_rows == 1 else None  # they would name ranks of the row
            return MemoryLinks(store, self._rank, self._world, num_bytes, self._timeout_seconds, look_around, waits)

    def _make_board(self) -> Board:
        if self._links is not None and self._links.join(range(self._world)):
            return LinkBoard(self._links)
        return StoreBoard(self._place.store, self._rank, self._world)

    def _shares_memory(self) -> bool:
        """Whether each sync group is on one machine. The result is the same on all learners."""
        groups, links = self._sync_groups, self._links
        ranges = [range(first, first + groups.size) for first in range(0, groups.num_workers, groups.size)]
        return links is not None and groups.size > 1 and all(links.join(each) for each in ranges)

    def _make_means(self, lane: int, timeout: timedelta) -> OrderedMean | SharedMean:
        """Means for one thread: the collectives of two threads in one group would have no common order."""
        if self._links is not None and self._shares_memory():
            if self._rank < self._sync_groups.num_workers:
                return SharedMean(self._links, self._rank, self._sync_group, lane, self._timeout_seconds)
            return OrderedMean(None, 1)
        return OrderedMean(self._new_group_of_sync_group("gloo", timeout), len(self._sync_group))

    def _new_group_of_sync_group(self, backend: str, timeout: timedelta) -> ProcessGroup | None:
        """A new process group of this learner's sync group. All processes create those of all sync groups, in order."""
        # a new group does not inherit the default group's time-out; its default is half an hour
        size, mine = self._sync_groups.size, None
        if self._place.num_rows > 1 and size > 1:  # other rows may need no group, if they share memory
            with communicating():
                return local_group(self._processes(self._sync_group), timeout)
        for first in range(0, self._sync_groups.num_workers if size > 1 else 0, size):
            with communicating():
                group = dist.new_group(range(first, first + size), backend=backend, timeout=timeout)
            mine = group if first == self._sync_group.start else mine
        if mine is not None and backend == nccl.BACKEND:
            with communicating():
                nccl.connect(mine, self._device)
        return mine
