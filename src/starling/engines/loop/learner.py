"""The engine for a user's own PyTorch loop: the strategy is driven until it waits for a gradient of the loop.

The strategy's text stays the only one. `claim()` is always true; a gradient's handle pauses the strategy, and the
loop's next `step` supplies the gradient and drives the strategy to the next one. Everything else waits within its
handle, as on the `processes` engine.
"""

import inspect
import math
import threading
import warnings
from collections.abc import Callable, Container, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from starling.configuration import Config
from starling.engines.loop.attendant import Attendant, Consensus
from starling.engines.loop.replica import LoopGradient, LoopReplica, MeanOfGradient
from starling.engines.processes.backend import ConnectionFailed, communicating
from starling.engines.processes.collectives import OrderedMean
from starling.engines.processes.communicator import Communicator, ProcessHandle, stopwatch
from starling.engines.processes.handshake import silent_learners
from starling.engines.processes.place import Place
from starling.engines.processes.stalls import Waits
from starling.engines.processes.threads import Worker
from starling.errors import NonFiniteError, PeerLost, ProtocolError, StarlingError
from starling.learner import Handle, Learner, LoopEnded, Shard
from starling.strategies import Strategy
from starling.training.checks import check_group
from starling.training.job import Statistics
from starling.training.shards import Shards


class LoopLearner(Learner):
    """A learner whose gradients come from a user's loop. The loop's thread calls all methods, unless noted otherwise.

    It has a `replica` of the loop's model and optimizer, a communicator, shards where its strategy holds any, and an
    attendant, which answers the other learners while the loop computes.
    """

    def __init__(
        self,
        place: Place,
        strategy: Strategy,
        options: Config,
        replica: LoopReplica,
        seed: int,
        timeout_seconds: float,
        most_not_finite: int,
        waits: Waits,
    ) -> None:
        self.replica = replica
        self.statistics = Statistics()
        self.num_steps = 0
        self.num_skipped = 0
        """Non-finite gradients, which made no optimizer step."""
        self.consensus_distance: float | None = None
        self._place, self._rank, self._world, self._seed = place, place.rank, place.world, seed
        self._timeout_seconds = timeout_seconds
        self._num_skipped_in_a_row, self._most_not_finite = 0, most_not_finite
        self._strategy = strategy
        self._num_groups = len(replica.optimizer.param_groups)
        self._gradient_version = 0  # of the weights that the newest gradient is taken at
        self._steps_begun, self._is_over = 0, False
        self._final: Consensus | None = None
        self._has_warned = False
        self._resumed_at = 0.0
        self._all_finished = threading.Event()  # or something failed
        self._all_settled = threading.Event()
        self._all_closed = threading.Event()
        self._attendant: Attendant | None = None
        self._coroutine = strategy.start(self, options)
        sync_groups = strategy.sync_groups(options, place.world)
        self._sync_group = sync_groups.of(place.rank)
        # if all learners are one sync group, only the loop's own thread makes means
        by_nccl = place.has_own_device(replica.weights.device) and len(self._sync_group) == place.world
        self._now = stopwatch()
        self._communicator = Communicator(
            place,
            sync_groups,
            replica.weights,
            by_nccl,
            timeout_seconds,
            self.statistics,
            waits,
            self._now,
            self._where,
            name_lost=self._name_lost,
            has_other_threads=place.world > 1,
        )
        self._release = self._communicator.release
        self._shards = Shards(place.rank, replica, self.statistics, _set_rates, self._communicator.start_on_memory)
        if place.world > 1:
            self._meet()
            if getattr(options, "optimizer_state", "local") == "averaged":
                replica.pieces(len(replica.weights), optimizer_state=True)  # later, the background would do it
        self._proceed()
        self._guard = replica.optimizer.register_step_pre_hook(self._refuse_step)
        self._resumed_at = self._now()

    # the contract with the strategy

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world(self) -> int:
        return self._world

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def weights(self) -> Tensor:
        return self.replica.weights

    @property
    def version(self) -> int:
        return self.replica.version

    @property
    def step_metadata(self) -> Tensor:
        rates = [float(group["lr"]) for group in self.replica.optimizer.param_groups]
        if len(rates) != self._num_groups:
            raise ProtocolError(
                f"learner {self._rank}: its optimizer had {self._num_groups} parameter groups when it joined and has "
                f"{len(rates)} now; add groups before starling.join"
            )
        return torch.tensor(rates, dtype=torch.float64)

    def claim(self) -> bool:
        self._release.check()
        return not self._is_over

    def gradient(self, at: Tensor) -> Handle[Tensor]:
        replica = self.replica
        if at is not replica.loop:
            replica.refresh_loop(None if at is replica.weights else at)
        self._gradient_version = replica.version if at is replica.weights else replica.loop_version
        self._gradient = LoopGradient(replica.own_gradient())
        return self._gradient

    def clip(self, gradient: Tensor) -> Tensor | None:
        is_finite = math.isfinite(self.replica.clip(gradient))
        self._count_not_finite(is_finite)
        return gradient if is_finite else None

    def step(self, gradient: Tensor, read_at: int | None = None) -> None:
        replica = self.replica
        when = self._gradient_version if read_at is None else read_at
        self.statistics.averaging.staleness[replica.version - when] += 1
        replica.step(gradient, 1.0)
        self._communicator.rounds.gradient_made()
        self._count_not_finite(replica.was_finite)

    def apply(self, delta: Tensor, piece: slice | None = None) -> None:
        self.replica.apply(delta, piece)
        self._follow()

    def replace(self, weights: Tensor, piece: slice | None = None) -> None:
        self.replica.replace(weights, piece)
        if piece is None:  # after the last of several pieces comes a gradient, for which the loop follows anyway
            self._follow()

    def snapshot(self, piece: slice | None = None) -> Tensor:
        """See `Learner.snapshot`. The whole, requested by the loop's thread, is what the loop computes at, and valid
        until the next step: so the weights are copied once per step."""
        if piece is None and not self._communicator.is_behind:
            return self.replica.loop
        return self.replica.snapshot(piece, self._communicator.snapshot_memory(piece))

    def pieces(self, largest: int, optimizer_state: bool = False) -> Sequence[slice]:
        return self.replica.pieces(largest, optimizer_state)

    def keep(self, piece: slice) -> Shard:
        return self._shards.keep(piece)

    def share(self, pieces: Sequence[slice]) -> Handle[Sequence[Shard]]:
        for piece in pieces:
            self._shards.check(piece)
        return ProcessHandle(lambda: self._shards.share(pieces, *self._communicator.share(len(pieces))))

    def mean(self, of: Tensor | Handle[Tensor], group: Sequence[int] | None = None) -> Handle[Tensor]:
        if isinstance(of, LoopGradient):
            check_group(self._rank, group, self._sync_group, self._world)
            if len(self._sync_group) == 1:
                return of
            if not of.is_supplied:
                return MeanOfGradient(of, lambda gradient: self._communicator.mean(gradient, group))
        return self._communicator.mean(of, group)

    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle[None]:
        return self._communicator.send(peer, tensor, tag)

    def receive(self, peer: int, like: Tensor, tag: int) -> Handle[Tensor]:
        return self._communicator.receive(peer, like, tag)

    def first(self, handles: Mapping[int, Handle[Any]]) -> Handle[int]:
        return self._communicator.first(handles)

    def exchange(self, peer: int, tensor: Tensor, tag: int) -> Handle[Tensor]:
        return self._communicator.exchange(peer, tensor, tag)

    def background(self, activity: Coroutine[Any, Any, None]) -> None:
        if self._world == 1 and not self._strategy.is_served:
            activity.close()  # there is no learner to agree with
        else:
            self._communicator.start_background(activity, self.fail)

    def round(self, period: float) -> Handle[int | None]:
        return self._communicator.round(period)

    def keep_up(self, most: float) -> Handle[None]:
        return self._communicator.keep_up(most)

    # what the loop asks for

    def make_step(self, scaler: GradScaler | None = None) -> None:
        """The loop has left a gradient in its parameters: drive the strategy to the next one."""
        spent = self.statistics.spent
        self.check_in_use("step()")
        self.replica.check_model(f"learner {self._rank}")
        if scaler is not None:
            _unscale(scaler, self.replica.optimizer, f"learner {self._rank}")
        begin, waited = self._now(), spent.waiting_for_peers
        spent.computing += begin - self._resumed_at
        self._steps_begun += 1
        self._news()
        self._gradient.is_supplied = True
        self._proceed()
        self.num_steps += 1
        if self._attendant is not None and self._attendant.finished:  # those that have finished want a heartbeat
            with self._naming_the_store():
                self._place.store.set(f"steps/{self._rank}", str(self.num_steps))
        self._resumed_at = self._now()
        spent.computing += self._resumed_at - begin - (spent.waiting_for_peers - waited)

    @contextmanager
    def consensus(self, final: bool) -> Generator[None, None, None]:
        """Let the model hold the mean of all learners' models while the context lasts; the `final` one permanently."""
        if self._final is not None and not self._all_closed.is_set():
            yield
            return
        self.check_in_use("consensus()")
        self.replica.check_model(f"learner {self._rank}")
        self._warn_without_steps()
        if final:
            self._final = self._finish(is_final_wanted=True) or Consensus(self._contribution()[1], 0.0)
            self.replica.adopt(self._final.mean)
            self.consensus_distance = self._final.distance
            yield
            return
        self.statistics.spent.computing += self._now() - self._resumed_at
        if self._attendant is None:
            agreed = Consensus(self._contribution()[1], 0.0)
        else:
            with self._naming_the_store():
                request = self._attendant.request(self.num_steps)
            agreed = self._communicator.wait_for("a consensus", lambda: self._release.wait(request))
        self.consensus_distance = agreed.distance
        try:
            with self.replica.showing(agreed.mean):
                yield
        finally:
            self._resumed_at = self._now()

    def check_in_use(self, what: str) -> None:
        """Raise an error of another thread, or `ProtocolError` if `what` cannot be called now."""
        self._release.check()
        if self._is_over:
            how = "closed" if self._final is None else "finished"
            raise ProtocolError(f"learner {self._rank} has {how}: {what} must come before that")
        if self.replica.is_showing:
            raise ProtocolError(
                f"learner {self._rank}: {what} inside of consensus(), where the weights are not its own"
            )

    def close(self) -> None:
        """Make no more gradients; continue averaging and agreeing until all learners have closed."""
        self._release.check()
        if not self._is_over:
            self._warn_without_steps()
            self._finish(is_final_wanted=False)
        begin = self._now()
        if self._attendant is not None:
            with self._naming_the_store():
                self._attendant.announce("closed")
                self._meet_all(self._all_closed.wait)
            self._attendant.join()
            self._consensus_means.close()
        self._all_closed.set()
        self.replica.finish()
        self.leave_optimizer()
        self.statistics.spent.waiting_for_peers += self._now() - begin

    def leave_optimizer(self) -> None:
        """Let the loop call its optimizer's `step` again."""
        self._guard.remove()

    def fail(self, error: BaseException) -> None:
        """End everything that this learner waits for with this error. Called by any thread."""
        self._communicator.fail(error)
        for event in (self._all_finished, self._all_settled, self._all_closed):
            event.set()

    def announce_failure(self, error: BaseException | None) -> None:
        """Tell the others that this learner ends without having closed."""
        if self._attendant is not None:
            self._attendant.announce("bereft" if isinstance(error, PeerLost) else "failed", words_of(error))

    @property
    def bytes_sent(self) -> int:
        """To other learners, including consensus."""
        return self.statistics.averaging.bytes_sent + (self._attendant.bytes_sent if self._attendant else 0)

    # how it is done

    def _finish(self, is_final_wanted: bool) -> Consensus | None:
        """Let the strategy end once all learners have made their last steps; then the consensus of the final weights,
        if a learner wants it."""
        self._is_over = True
        spent, communicator = self.statistics.spent, self._communicator
        spent.computing += self._now() - self._resumed_at
        begin, attendant = self._now(), self._attendant
        communicator.warn_of_few_rounds()
        with self._naming_the_store():
            communicator.rounds.finish()
            with suppress(LoopEnded, StopIteration):  # up to where it waits for others that end
                self._coroutine.throw(LoopEnded())
            if attendant is not None:
                attendant.announce("finished", self._steps_begun)
                self._meet_all(lambda: self._wait_for_all(self._all_finished, attendant.finished))
            with suppress(StopIteration):
                while inspect.getcoroutinestate(self._coroutine) == inspect.CORO_SUSPENDED:
                    self._coroutine.send(None)
        communicator.join_background()
        self._release.check()
        communicator.close()
        agreed = None
        if attendant is not None:
            with self._naming_the_store():
                attendant.announce("settled", int(is_final_wanted))
                self._meet_all(lambda: self._wait_for_all(self._all_settled, attendant.settled))
            agreed = self._release.wait(attendant.final)
        self.replica.refresh_loop()
        spent.waiting_for_peers += self._now() - begin
        return agreed

    def _meet_all(self, wait: Callable[[], object]) -> None:
        """`wait` until all learners have come as far as this one, and hear at once if another dies meanwhile."""
        farewell = Worker("starling-farewell")
        met = farewell.submit(self._farewell)
        wait()
        self._release.check()
        self._release.wait(met)
        farewell.close()

    def _count_not_finite(self, is_finite: bool) -> None:
        """Count non-finite gradients. Raises NonFiniteError after many in a row."""
        self._num_skipped_in_a_row = 0 if is_finite else self._num_skipped_in_a_row + 1
        self.num_skipped += not is_finite
        if self._num_skipped_in_a_row == self._most_not_finite:
            raise NonFiniteError(
                f"learner {self._rank}: the gradient of step {self._steps_begun} is not finite, nor were the "
                f"{self._most_not_finite - 1} before it; lower the learning rate, clip gradients or warm up for longer "
                "(with a GradScaler, start from a smaller init_scale), or give starling.join more most_not_finite"
            )

    def _refuse_step(self, *_: object) -> None:
        """Called before each step of the loop's optimizer."""
        if not self.replica.is_stepping:
            raise ProtocolError(
                f"learner {self._rank}: optimizer.step() was called on an optimizer given to starling.join, and the "
                "other learners would not see it; call step() of the joined learner in its place, and "
                "step(scaler) in place of scaler.step(optimizer)"
            )

    def _warn_without_steps(self) -> None:
        if self._steps_begun == 0 and self.replica.has_gradients and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"learner {self._rank} has computed gradients and made no step: nothing was trained. Call step() of "
                "the joined learner after each backward",
                RuntimeWarning,
                stacklevel=2,
            )

    def _proceed(self) -> None:
        """Drive the strategy until it waits for the loop's next gradient."""
        try:
            with self._naming_the_store():
                while not _waits_for_loop(self._coroutine.send(None)):
                    pass
        except BaseException as error:
            self.fail(error)
            raise

    @contextmanager
    def _naming_the_store(self) -> Generator[None, None, None]:
        try:
            yield
        except dist.DistError as error:
            raise self._lost_store(error) from error

    def _lost_store(self, error: dist.DistError) -> BaseException:
        """What to raise when the store does not answer."""
        return self._release.error or PeerLost(
            f"learner {self._rank} lost the store that the learners meet in, {self._where()}: learner 0 or the "
            f"launcher, which keeps it, has ended ({str(error).splitlines()[0]})"
        )

    def _meet(self) -> None:
        """Start from learner 0's model, and listen to the others."""
        ranks = range(self._world)
        usual = timedelta(seconds=self._timeout_seconds)
        self._consensus_means = OrderedMean(dist.new_group(ranks, backend="gloo", timeout=usual), self._world)
        # a learner that has closed waits for the others as long as they live, and hears at once if one dies
        self._farewell_group = dist.new_group(ranks, backend="gloo", timeout=timedelta(days=20))
        attendant = self._attendant = Attendant(
            self._place.store, self._rank, self._world, self._consensus_means, self._contribution, self._own_weights
        )
        with self._communicator.naming_the_lost("copying learner 0's model"):
            self.replica.start_from_first()
        attendant.listen(self._news, self._failed_behind)

    def _contribution(self) -> tuple[int, Tensor]:
        """The number of steps made, and this learner's part of the mean that is the consensus `[P + B]`."""
        brought = self.replica.contribution()
        if self._strategy.is_served:  # the model is what servers keep: each learner brings only its shards
            brought[: len(self.replica.weights)] = 0.0
        for shard in self._shards.held:
            brought[shard.piece] = shard.copy() * (self._world if self._strategy.is_served else 1)
        return self.num_steps, brought

    def _own_weights(self) -> Tensor:
        return self.replica.contribution()[: len(self.replica.weights)]

    def _farewell(self) -> None:
        """Meet all learners that have come as far. Called in a thread of its own."""
        words = torch.zeros(self._world, dtype=torch.uint8)
        try:
            with communicating():
                dist.all_to_all_single(torch.empty_like(words), words, group=self._farewell_group)
        except ConnectionFailed as error:
            self._failed_behind(error)

    def _wait_for_all(self, event: threading.Event, there: Container[int]) -> None:
        """Wait for an event as long as the learners that are not yet `there` make steps."""

        def signs() -> list[tuple[int, bytes]]:
            others = [rank for rank in range(self._world) if rank not in there]
            store = self._place.store
            return [(rank, store.get(key) if store.check([key := f"steps/{rank}"]) else b"") for rank in others]

        before = signs()
        while not event.wait(self._timeout_seconds):
            if (now := signs()) == before:
                names = " and ".join(f"learner {rank}" for rank, _ in now)
                raise PeerLost(
                    f"learner {self._rank} has closed and lost {names}: no step and no close() within "
                    f"{self._timeout_seconds:g} s; give more timeout_seconds if steps take that long"
                )
            before = now

    def _news(self) -> None:
        """React to learners that have finished, closed or failed. Called by any thread."""
        attendant = self._attendant
        if attendant is None:
            return
        for rank, why in list(attendant.failed.items()):
            if rank != self._rank:
                self.fail(PeerLost(f"learner {self._rank} lost learner {rank}, {self._where()}: {why}"))
        for rank, why in list(attendant.bereft.items()):
            if rank != self._rank and self._release.error is None:
                lost = self._name_lost(None)
                self.fail(PeerLost(f"learner {self._rank} lost {lost}, {self._where()}: {why}"))
        for rank, steps in list(attendant.finished.items()):
            if rank in self._sync_group and (
                steps < self._steps_begun or (self._rank in attendant.finished and steps != self._steps_begun)
            ):
                done = "has closed after" if self._is_over else "is in step"
                self.fail(
                    ProtocolError(
                        f"learner {rank} has closed after {steps} steps, and learner {self._rank} {done} "
                        f"{self._steps_begun}: under {self._strategy.name} they make equal numbers of steps; give "
                        "them equally many mini-batches, or choose an asynchronous strategy, such as adpsgd"
                    )
                )
        if len(attendant.finished) == self._world:
            self._all_finished.set()
        if len(attendant.settled) == self._world:
            self._all_settled.set()
        if attendant.is_over:
            self._all_closed.set()
        if not self._is_over and threading.current_thread() is not attendant:
            self._release.check()

    def _follow(self) -> None:
        """If the loop's own thread has changed the weights, the loop computes at the new ones."""
        if self.replica.loop is not self.replica.weights and not self._communicator.is_behind:
            self.replica.refresh_loop()

    def _failed_behind(self, error: BaseException) -> None:
        """Another thread of this learner failed."""
        try:
            with self._communicator.naming_the_lost("agreeing with all"):
                raise error
        except BaseException as named:
            self.fail(named)

    def _name_lost(self, suspect: int | None) -> str:
        """Name the lost learners, as `silent_learners` does, after a roll-call."""
        store, rank, world = self._place.store, self._rank, self._world
        if self._attendant is None:
            return silent_learners(store, rank, world, suspect)
        try:
            self._attendant.announce("roll-call")  # learners that only compute answer it, too
            lost = silent_learners(store, rank, world)
        except dist.DistError:
            return "the store that the learners meet in"
        failed = [f"learner {rank} ({why})" for rank, why in self._attendant.failed.items() if rank != self._rank]
        return failed[0] if failed else lost

    def _where(self) -> str:
        return f"step {self._steps_begun}" if not self._is_over else f"closing after step {self._steps_begun}"


def _set_rates(optimizer: Optimizer, peaks: Sequence[float], step_metadata: Tensor, scale: float) -> None:
    """Set the learning rates of a shard's optimizer to those of the loop that sent the gradient."""
    for group, rate in zip(optimizer.param_groups, step_metadata.tolist(), strict=True):
        group["lr"] = rate * scale


def _unscale(scaler: GradScaler, optimizer: Optimizer, learner: str) -> None:
    """Do what `scaler.step(optimizer)` does before the optimizer's step: unscale the gradients unless the loop has, and
    note for `scaler.update()` whether they are finite. `ProtocolError` for a second time before `scaler.update()`."""
    if not scaler.is_enabled():
        return
    state = scaler._per_optimizer_states[id(optimizer)]  # the only place that knows whether the loop has unscaled
    if state["stage"] is OptState.STEPPED:
        raise ProtocolError(
            f"{learner}: step() was called twice with one GradScaler; call scaler.update() after each step"
        )
    if state["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    state["stage"] = OptState.STEPPED


def _waits_for_loop(handle: Handle[Any]) -> bool:
    gradient = handle.gradient if isinstance(handle, MeanOfGradient) else handle
    return isinstance(gradient, LoopGradient) and not gradient.is_supplied


def words_of(error: BaseException | None) -> str:
    """An error on one line."""
    if error is None:
        return "it ended without close()"
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, StarlingError) else f"{type(error).__name__}: {text}"
