"""A learner process's communication with its peers: messages, means, averaging rounds, and its background thread."""

import threading
import warnings
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from starling.engines.processes import process_group as membership_group
from starling.engines.processes.backend import (
    ConnectionFailed,
    ReducingModel,
    Staging,
    check_files,
    communicating,
    local_group,
    wait_for,
)
from starling.engines.processes.collectives import OrderedMean, SharedMean
from starling.engines.processes.handshake import A_LOSS_WAS_NOTICED, Peers
from starling.engines.processes.links import LinkBoard, MemoryLinks, share_memory
from starling.engines.processes.stalls import BACKGROUND, OWN_ROUND, OWN_ROUNDS, Waits
from starling.engines.processes.threads import STARTED, GradientHandle, ProcessHandle, Release, Worker, Workers
from starling.engines.processes.tickets import ProcessRounds, StoreBoard
from starling.errors import PeerLost, ProtocolError, ReplayError
from starling.learner import EncodedMean, Handle, Shard
from starling.strategies import SyncGroups
from starling.timeouts import CAUSE
from starling.training.job import Statistics
from starling.training.membership import MembershipChanged
from starling.training.order import FollowedOrder, Order, RecordedOrder, Script, Turns
from starling.training.replica import Replica, ReplicaLearner
from starling.training.shards import HeldShards, host_copy
from starling.training.streams import beside_this_thread, synchronize

T = TypeVar("T")
FOREVER = timedelta(days=20)
LOOK_AROUND_SECONDS = 1.0
LONGEST_LEAVE_SECONDS = 10.0
A_MEAN = "a mean"
MEAN_OF_GRADIENT = "the mean of a gradient"
_PATIENCE = "; increase timeout_seconds if the learners are only slow"


A_TURN = "its recorded turn"


class _Lane(NamedTuple):
    """The collectives and the worker with which one of a learner's two threads averages and waits. Each thread has its
    own lane, because collectives that two threads start in one group would have no common order."""

    means: OrderedMean | SharedMean
    device_group: ProcessGroup | None
    """The group on NCCL, if means use NCCL."""
    waiter: Worker
    finished: SimpleQueue[ProcessHandle[Any]]
    """Handles, in the order in which they finish or fail, for a strategy that awaits the first of several."""


class ConnectedLearner(ReplicaLearner):
    """A learner that is a process and is connected with its peers. The default process group must exist. Subclasses
    compute gradients and run the strategy.

    On the CPU, learners on one machine communicate through shared memory (`MemoryLinks`). All other learners use gloo
    through host memory. If each learner has its own device, means use NCCL.

    In islands of `row_size` ranks, the learner communicates with the learners that hold the same model shard. Waiting
    time, bytes and rounds are counted in `statistics`. `has_other_threads` means that threads other than the background
    may `fail` this learner while it waits.
    """

    own_shards: HeldShards

    def __init__(
        self,
        peers: Peers,
        sync_groups: SyncGroups,
        replica: Replica,
        seed: int,
        statistics: Statistics,
        has_other_threads: bool = False,
        row_size: int = 1,
    ) -> None:
        self.release = Release()
        self.begun = threading.Event()
        """Set once the strategy holds all of its shards, because it has communicated or waits for a loop's gradient, or
        when the learner fails."""
        place = self._place = peers.place.row(row_size)
        self.rank, self.world, self.seed = place.rank, place.world, seed
        self.peers = replace(peers, look_around=self.release.check, naming_the_lost=self.naming_the_lost)
        """The learners of the membership. Waits for these learners end when this learner fails."""
        self.replica, self.sync_group = replica, sync_groups.of(place.rank)
        self._group_processes = [place.process(rank) for rank in self.sync_group]
        self._device, is_whole = replica.weights.device, len(self.sync_group) == self.world
        # if all learners form one sync group, only the strategy's own thread computes means
        by_nccl = peers.place.has_own_device(self._device) and (is_whole or not has_other_threads)
        self._by_nccl = by_nccl and not place.sums_in_order
        self.statistics, self.waits = statistics, peers.waits
        self._has_other_threads = has_other_threads
        self.workers = Workers()
        self._staging = Staging(self._device, self.workers["starling-staging"])
        self._background: threading.Thread | None = None
        """The thread of the learner's second coroutine."""
        self._own_messages: dict[int, SimpleQueue[Callable[[], Any]]] = defaultdict(SimpleQueue)
        with self.naming_the_lost("linking the learners of this machine"):
            # the waits of the membership name whole ranks
            in_row = peers if place.num_rows == 1 else replace(peers, place=place, waits=Waits())
            links = self._links = MemoryLinks(in_row, replica.weights.nbytes if self._device.type == "cpu" else 0)
        is_linked = links.join(range(self.world))
        self.rounds = ProcessRounds(LinkBoard(links) if is_linked else StoreBoard(place.store, self.rank, self.world))
        groups = [sync_groups.of(first) for first in range(0, sync_groups.num_workers, sync_groups.size)]
        shares_memory = sync_groups.size > 1 and all(links.join(each) for each in groups)  # the same on all learners
        self.reduces_in_backward = place.num_rows == 1 and not shares_memory and not place.sums_in_order
        """Whether the mean of a gradient is computed while backward runs. It is not in three cases: in shared memory,
        where a whole mean takes less time than the overhead of splitting it; in an island, whose backward ends with the
        gradient of the model shard; and if vectors must be added in rank order."""
        self._lanes = [self._make_lane(number, shares_memory and len(self.sync_group) > 1) for number in range(2)]
        self._reducing_group = self._lanes[0].device_group
        if not self._by_nccl and self.reduces_in_backward and not is_whole:
            self._reducing_group = self._new_group("gloo")

    def order_of(self, script: Script | None, tell: Callable[[str], None]) -> Order:
        """Return the order of the learner's activities, which is free or follows the record in `script`. The order
        passes each of its turns to `tell`."""
        if script is None:
            return RecordedOrder(lambda: self.is_behind, tell)

        def wait_until(has_come: Callable[[], bool]) -> None:
            with self.naming_the_lost(A_TURN), self._waiting(A_TURN):
                self.peers.await_done(has_come, "another activity has not taken its turn")

        return FollowedOrder(lambda: self.is_behind, tell, Turns(script.learner, script.turns), wait_until)

    @property
    def is_behind(self) -> bool:
        """Whether the calling thread is the background."""
        return threading.current_thread() is self._background

    @property
    def _lane(self) -> _Lane:
        """The lane of the calling thread."""
        return self._lanes[self.is_behind]

    @abstractmethod
    def _where(self) -> str:
        """This learner's progress, for messages."""

    def _name_lost(self, suspect: int | None) -> str:
        """The names of the lost learners, for messages. `suspect` is the learner that is suspected, if any."""
        return self.peers.silent(suspect)

    def mean(self, of: Tensor | Handle[Tensor] | EncodedMean, group: Sequence[int] | None = None) -> Handle[Tensor]:
        self.begin_mean(of, group, self.sync_group)
        return self._started(lambda: self._start_mean(of))

    def _started(self, start: Callable[[], Handle[T]]) -> Handle[T]:
        """Start work whose effects leave this process. The events on which the work may depend are recorded before it
        starts, and its success is recorded afterwards."""
        if (order := self.replica.order).turns:
            order.flush()
        self.begun.set()
        handle = start()
        STARTED.count[0] += 1
        return handle

    def _start_mean(self, of: Tensor | Handle[Tensor] | EncodedMean) -> Handle[Tensor]:
        if isinstance(of, Tensor):
            return self._mean(of)
        if isinstance(of, EncodedMean):
            self.statistics.averaging.bytes_sent += 2 * (len(self.sync_group) - 1) * of.message_bytes
            return ProcessHandle(self._averaging(A_MEAN, lambda means: means.start_encoded(of)))
        self.is_averaged = True
        handle = cast(ProcessHandle[Tensor], of)  # as all that this learner has started
        if handle.is_finished:
            return self._mean_of(handle)
        if isinstance(handle, GradientHandle):
            return handle.averaged(lambda gradient: self._mean(gradient, into=gradient).result())
        return ProcessHandle(lambda: self._mean_of(handle).result(), of=handle.of)

    def _mean_of(self, handle: Handle[Tensor]) -> Handle[Tensor]:
        vector = handle.result()
        self.check_mean(vector)
        return self._mean(vector)

    def _mean(self, of: Tensor, into: Tensor | None = None) -> Handle[Tensor]:
        """Start the mean of the present values of a vector. The result is in new memory or, if learners share memory,
        in `into`."""
        self.count_mean(of.nbytes)
        if len(self.sync_group) == 1:
            alone = of.clone() if into is None else of
            return ProcessHandle(lambda: alone)
        if self._by_nccl:
            vector = of.clone()
            with self.naming_the_lost(A_MEAN), communicating():
                work = dist.all_reduce(vector, group=self._lane.device_group, async_op=True)

            def wait() -> None:
                wait_for(work)
                self.await_device()

            def reduced() -> Tensor:
                # NCCL does not block but makes this thread's stream wait, so it must be the thread that computes
                self.wait_for(A_MEAN, wait, in_this_thread=True)
                return vector.div_(len(self.sync_group))

            return ProcessHandle(reduced)
        what = A_MEAN if into is None else MEAN_OF_GRADIENT
        averaging = self._averaging(what, lambda means: means.start(of, into))
        return ProcessHandle(lambda: averaging().to(self._device))

    def _averaging(
        self, what: str, start: Callable[[OrderedMean | SharedMean], Callable[[], Tensor]]
    ) -> Callable[[], Tensor]:
        """Start a mean, and return a function that waits for it."""
        means = self._lane.means
        with self.naming_the_lost(what):
            under_way = start(means)
        # in shared memory, a wait ends when this learner fails
        return lambda: self.wait_for(what, under_way, in_this_thread=isinstance(means, SharedMean))

    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle[None]:
        self.check_peer(peer)
        self.count_sent(tensor)
        return self._started(lambda: self._start_sending(peer, tensor, tag))

    def _start_sending(self, peer: int, tensor: Tensor, tag: int) -> Handle[None]:
        if peer == self.rank:
            self._own_messages[tag].put(self._staging.pass_on(tensor.clone()))
            return ProcessHandle(lambda: None)
        self.statistics.averaging.bytes_sent += tensor.nbytes
        what = f"sending to learner {self._place.process(peer)}"
        if peer in self._links.peers:
            with self.naming_the_lost(what, peer):
                if self._links.send(peer, tensor, tag):
                    return ProcessHandle(lambda: None)

        def begin(host: Tensor) -> dist.Work | None:
            with communicating():
                return dist.isend(host.contiguous(), self._place.process(peer), tag=tag)

        with self.naming_the_lost(what, peer):
            begun = self._staging.hand_over(tensor, begin)

        return ProcessHandle(lambda: self.wait_for(what, lambda: wait_for(begun()), peer))

    def receive(self, peer: int, like: Tensor, tag: int) -> Handle[Tensor]:
        self.check_peer(peer)
        return self._started(lambda: self._start_receiving(peer, like, tag))

    def _start_receiving(self, peer: int, like: Tensor, tag: int) -> Handle[Tensor]:
        if peer == self.rank:
            own = self._own_messages[tag].get
            return ProcessHandle(
                lambda: self.wait_for("receiving from its own server", own)().to(like.device),
                lambda: own()().to(like.device),
            )
        what = f"receiving from learner {self._place.process(peer)}"
        is_linked = peer in self._links.peers

        def begin() -> tuple[Tensor, dist.Work | None]:
            theirs = self._staging.empty_like(like)
            with self.naming_the_lost(what, peer), communicating():
                return theirs, dist.irecv(theirs, self._place.process(peer), tag=tag)

        begun = None if is_linked else begin()

        def take(is_patient: bool) -> Tensor:
            if is_linked:
                received = self._links.receive(peer, tag, None if is_patient else self.peers.timeout_seconds)
                if received is not None:
                    return received.view(like.dtype).view(like.shape)
            theirs, work = begun or begin()
            wait_for(work, FOREVER if is_patient else None)
            return theirs

        def on_device(theirs: Tensor) -> Tensor:  # in the thread that uses it
            return self._staging.to_device(theirs) if like.device.type != "cpu" else theirs

        def patient_result() -> Tensor:
            with self.naming_the_lost(what, peer):
                return on_device(take(True))

        return ProcessHandle(
            lambda: on_device(self.wait_for(what, lambda: take(False), peer, in_this_thread=is_linked)), patient_result
        )

    def first(self, handles: Mapping[int, Handle[Any]]) -> Handle[int]:
        keys = {cast(ProcessHandle[Any], handle): key for key, handle in handles.items()}

        def result() -> int:
            finished, others, wanted = self._lane.finished, list[ProcessHandle[Any]](), self.order.key()
            if wanted not in (None, *handles):
                raise ReplayError(
                    f"learner {self.peers.rank}: its record has the key {wanted}, but it waits for {sorted(handles)}"
                )
            for handle, key in keys.items():
                handle.finish_in(self.workers[f"starling-first-{self.is_behind:d}-{key}"], finished.put)
            with self._waiting("receiving the first of several messages"):
                while True:
                    try:
                        first = finished.get(timeout=LOOK_AROUND_SECONDS)
                    except Empty:
                        self._notice_losses()
                    else:
                        if wanted not in (None, keys.get(first)):
                            others.append(first)
                        elif first in keys:
                            for other in others:
                                finished.put(other)
                            first.result()  # raises if it has failed; a record must not contain failed work
                            self.order.chose(keys[first])
                            return keys[first]

        return ProcessHandle(result)

    def _notice_losses(self) -> None:
        """Raise `PeerLost` if other learners have noticed a loss. Otherwise a wait for the first of several handles
        would not end."""
        self.release.check()
        if self.peers.store.check([A_LOSS_WAS_NOTICED]):
            raise PeerLost(f"learner {self.peers.rank} lost {self._name_lost(None)}, {self._where()}")

    def share(self, pieces: Sequence[slice]) -> Handle[Sequence[Shard]]:
        return ProcessHandle(lambda: self.own_shards.share(pieces, *self._shared_model(len(pieces))))

    def _shared_model(self, num_pieces: int) -> tuple[Tensor, Tensor]:
        """Learner 0's weights `[P]` and zero counts `[num_pieces, L]`, in memory shared by all learners."""
        own, num_counts = host_copy(self.weights), num_pieces * self.world

        def weights_in(memory: Tensor) -> Tensor:
            return memory[8 * num_counts :].view(own.dtype)

        with self.naming_the_lost("sharing a model's memory"):
            memory = share_memory(self.peers, 8 * num_counts + own.nbytes, lambda memory: weights_in(memory).copy_(own))
        return weights_in(memory), memory[: 8 * num_counts].view(torch.int64).view(num_pieces, self.world)

    def snapshot(self, piece: slice | None = None) -> Tensor:
        memory = None  # peers on this machine can read the copy of a piece without another copy
        if piece is not None and self._links.peers:
            memory = self._links.snapshot_memory(self.weights[: piece.stop - piece.start])
        return self.replica.snapshot(piece, memory)

    def start_on_memory(self, num_bytes: int, passes: int, do: Callable[[], T]) -> Handle[T]:
        """Start work on a model shard in this process's memory. The work is done when the handle is awaited."""

        def result() -> T:
            begin = self.waits.running()
            done = do()
            if not self.is_behind:
                self.statistics.spent.computing += self.waits.running() - begin
            return done

        return ProcessHandle(result)

    def start(self, activity: Coroutine[Any, Any, None]) -> None:
        """Start the learner's second coroutine in a thread. On CUDA, the thread has a separate stream."""
        if self._background is not None:
            raise ProtocolError(f"learner {self.rank} already has a background; it can have only one")
        on_stream = beside_this_thread(self._device)

        def run() -> None:  # blocks in the results of handles, without polling
            STARTED.count = self.order.num_started[1]
            try:
                with on_stream:
                    while True:
                        activity.send(None)
            except StopIteration:
                pass
            except BaseException as error:
                self.fail(error)
                self.release.restore(error)

        # a daemon, because it must not keep a failed learner alive
        self.order.share()
        self._background = threading.Thread(target=run, name=f"{BACKGROUND}-{self.rank}", daemon=True)
        self._background.start()

    def fail(self, error: BaseException) -> None:
        """End all waits of this learner with `error`. May be called by any thread."""
        self.release.fail(error)
        self._links.release()

    def round(self, period: float) -> Handle[int | None]:

        def result() -> int | None:
            self.release.check()
            if (takes_place := self.order.takes_place()) is not None:
                place = self.rounds.recorded()
                self.order.entered(takes_place)
                number = self.rounds.enter(place, takes_place)
            else:
                with self.naming_the_lost("an averaging round"):
                    number = self.rounds.next(period)
                self.order.entered(number is not None)
            self.statistics.averaging.rounds += number is not None
            return number

        return ProcessHandle(result)

    def keep_up(self, most: float) -> Handle[None]:

        def result() -> None:
            kept_up: Future[None] = Future()
            if not self.order.gives and not self.rounds.keeps_up(most, lambda: kept_up.set_result(None)):
                with self._waiting(OWN_ROUND):
                    self.release.wait(kept_up)

        return ProcessHandle(result)

    def reducing(self, model: nn.Module) -> ReducingModel:
        """Wrap `model` so that its gradients are averaged over the sync group while backward runs."""
        waiting = partial(self.waits.waiting, MEAN_OF_GRADIENT, self._group_processes, is_group=True)
        with self.naming_the_lost(MEAN_OF_GRADIENT):
            return ReducingModel(model, self._reducing_group, waiting)

    def count_mean(self, num_bytes: int) -> None:
        """Count the bytes that a mean over the sync group sends."""
        size = len(self.sync_group)
        self.statistics.averaging.bytes_sent += 2 * (size - 1) * num_bytes // size

    def warn_of_few_rounds(self) -> None:
        """Warn at the end of the run if this learner made too few averaging rounds."""
        averages = self._background is not None and self.world > 1 and not self.is_served
        if averages and (complaint := self.rounds.complaint()):
            warnings.warn(f"learner {self.peers.rank} {complaint}", RuntimeWarning, stacklevel=2)

    def end_rounds(self) -> None:
        """Declare that this learner computes no more gradients, and wait until all rounds have ended. Other learners
        may still be computing."""
        self.warn_of_few_rounds()
        self.rounds.finish()
        self.join_background()
        self.end_threads()

    def join_background(self) -> None:
        """Wait until the background, if there is one, has ended, and raise the error with which it ended, if any."""
        if self._background is not None:
            with self.waits.waiting(OWN_ROUNDS):
                self._background.join()
            self.release.check()

    def end_threads(self) -> None:
        """End the threads. None of them may still be waiting."""
        self.workers.close()
        self._links.close()

    def leave(self) -> None:
        """Stop communicating without completing pending work. The caller must have cut the connections."""
        self.fail(MembershipChanged(self.peers.feed.latest))
        for messages in list(self._own_messages.values()):
            messages.put(self.release.check)  # raises where a thread waits for the learner's own server
        if self._background is not None:
            self._background.join(LONGEST_LEAVE_SECONDS)
        self.workers.abandon()
        self._links.close()

    def has_left(self) -> bool:
        """Whether all threads have ended."""
        threads = (self._background, *(worker.thread for worker in self.workers.values()))
        return not any(thread and thread.is_alive() for thread in threads)

    def wait_for(self, what: str, wait: Callable[[], T], peer: int | None = None, in_this_thread: bool = False) -> T:
        """Wait for the sync group or one peer. If the wait fails, the error names the lost learners."""
        is_mean = what in (A_MEAN, MEAN_OF_GRADIENT)
        whom = self._group_processes if is_mean else () if peer is None else [self._place.process(peer)]
        may_be_released = self._has_other_threads or (self._background is not None and not self.is_behind)
        with self.naming_the_lost(what, peer), self._waiting(what, whom, is_mean):
            if may_be_released and not in_this_thread:
                return self.release.wait(self._lane.waiter.submit(wait))
            return wait()

    def await_device(self) -> None:
        """Wait for NCCL's results on this thread's stream, and raise an error if a collective was aborted. An aborted
        collective appears complete, but its result must not be used."""
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
            check_files(self.peers.rank)
            if change := self.peers.feed.beyond(self.peers.membership, CAUSE):
                raise MembershipChanged(change) from error
            suspect = None if peer is None else self._place.process(peer)
            raise PeerLost(
                f"learner {self.peers.rank} lost {self._name_lost(suspect)} in {what}, {self._where()} "
                f"({str(error).splitlines()[0]}){_PATIENCE if 'timed out' in str(error).lower() else ''}"
            ) from error

    @contextmanager
    def _waiting(self, what: str, whom: Sequence[int] = (), is_group: bool = False) -> Generator[None, None, None]:
        """A context in which this thread waits for other learners. The waiting time is counted unless the thread is the
        background."""
        wait = self.waits.waiting(what, whom, is_group)
        try:
            with wait:
                yield
        finally:  # also if the wait ends with a membership
            if not self.is_behind:
                self.statistics.spent.waiting_for_peers += wait.seconds

    def _make_lane(self, number: int, shares_memory: bool) -> _Lane:
        means: OrderedMean | SharedMean
        if shares_memory:
            means = SharedMean(self._links, self.sync_group, number)
        else:
            means = OrderedMean(self._new_group("gloo"), len(self.sync_group), self.workers[f"starling-mean-{number}"])
        device_group = self._new_group(membership_group.BACKEND) if self._by_nccl else None
        if device_group is not None:
            with communicating():
                membership_group.connect(device_group, self._device)
        return _Lane(means, device_group, self.workers[f"starling-waiter-{number}"], SimpleQueue())

    def _new_group(self, backend: str) -> ProcessGroup | None:
        """Create a process group for this learner's sync group. Return None if the learner is alone in its group."""
        if len(self.sync_group) == 1:
            return None
        return local_group(self._group_processes, self.peers.timeout_seconds, backend)
