"""The engine for anybody's PyTorch loop: the strategy's text is driven until it waits for a gradient of the loop's.

The text stays the only one. `claim()` is always true; a gradient's handle pauses the text, and the loop's next `step`
supplies the gradient and drives the text on to the next one. Everything else waits inside its handle, as on the
`processes` engine.
"""

import inspect
import threading
import warnings
from collections.abc import Callable, Container, Coroutine, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from starling.configuration import Config
from starling.engines.loop.attendant import Attendant, Consensus
from starling.engines.loop.gradients import unscale
from starling.engines.loop.replica import LoopGradient, LoopReplica, MeanOfGradient
from starling.engines.processes.collectives import OrderedMean
from starling.engines.processes.communication import ConnectionFailed, communicating
from starling.engines.processes.learner import has_own_device
from starling.engines.processes.peers import PeerLearner, Place
from starling.engines.processes.worker import Worker
from starling.errors import NonFiniteError, PeerLost, ProtocolError, StarlingError
from starling.learner import Handle, LoopEnded
from starling.strategies import Strategy


class DropInLearner(PeerLearner):
    """A learner whose gradients come from a loop that is not ours. All is called by the loop's thread, unless it says
    otherwise."""

    replica: LoopReplica

    def __init__(
        self,
        place: Place,
        strategy: Strategy,
        options: Config,
        replica: LoopReplica,
        seed: int,
        timeout_seconds: float,
        most_not_finite: int,
    ) -> None:
        super().__init__(place.rank, place.world, seed, strategy.sync_groups(options, place.world), replica)
        self.num_steps = 0
        self.num_skipped = 0
        """Gradients that were not finite, and so made no optimizer step."""
        self.consensus_distance: float | None = None
        self._num_skipped_in_a_row, self._most_not_finite = 0, most_not_finite
        self._strategy = strategy
        self._num_groups = len(replica.optimizer.param_groups)
        self._steps_begun, self._is_over = 0, False
        self._final: Consensus | None = None
        self._has_warned = False
        self._resumed_at = 0.0
        self._all_finished = threading.Event()  # or something failed
        self._all_settled = threading.Event()
        self._all_closed = threading.Event()
        self._coroutine = strategy.start(self, options)
        device = replica.weights.device
        is_whole = len(self.sync_group) == place.world  # then nothing but the loop's own thread makes means
        self.meet(place, device, has_own_device(place, device) and is_whole, timeout_seconds)
        self._attendant = self._make_attendant() if place.world > 1 else None
        if place.world > 1:
            with self._naming_the_lost("taking over learner 0's model"):
                replica.start_from_first()
        if self._attendant is not None:
            self._attendant.listen(self._news, self._failed_behind)
        if place.world > 1 and getattr(options, "optimizer_state", "local") == "averaged":
            replica.pieces(len(replica.weights), optimizer_state=True)  # now: the background would disturb the loop
        self._proceed()
        self._guard = replica.optimizer.register_step_pre_hook(self._refuse_step)
        self._resumed_at = self.now()

    # what the strategy asks for

    @property
    def step_metadata(self) -> Tensor:
        rates = [float(group["lr"]) for group in self.replica.optimizer.param_groups]
        if len(rates) != self._num_groups:
            raise ProtocolError(
                f"learner {self._rank}: its optimizer had {self._num_groups} parameter groups when it joined and has "
                f"{len(rates)} now; add groups before starling.join"
            )
        return torch.tensor(rates, dtype=torch.float64)

    @property
    def num_gradients(self) -> int:
        return self._steps_begun

    def set_rates(self, optimizer: Optimizer, peaks: Sequence[float], step_metadata: Tensor, scale: float) -> None:
        for group, rate in zip(optimizer.param_groups, step_metadata.tolist(), strict=True):
            group["lr"] = rate * scale

    def claim(self) -> bool:
        self._release.check()
        return not self._is_over

    def gradient(self, at: Tensor) -> Handle[Tensor]:
        if at is not self.replica.loop:
            self.replica.refresh_loop(None if at is self.weights else at)
        self._gradient_version = self.replica.version if at is self.weights else self.replica.loop_version
        self._gradient = LoopGradient(self.replica.own_gradient())
        return self._gradient

    def mean(self, of: Tensor | Handle[Tensor], group: Sequence[int] | None = None) -> Handle[Tensor]:
        if isinstance(of, LoopGradient):
            self.check_group(group)
            if len(self.sync_group) == 1:
                return of
            if not of.is_supplied:
                return MeanOfGradient(of, lambda gradient: super(DropInLearner, self).mean(gradient, group))
        return super().mean(of, group)

    def snapshot(self, piece: slice | None = None) -> Tensor:
        """As `Learner.snapshot`; but the whole, asked for by the loop's thread, is what the loop computes at, and
        valid until the next step: so the weights are copied once a step."""
        if piece is None and threading.current_thread() is not self._background:
            return self.replica.loop
        return super().snapshot(piece)

    def apply(self, delta: Tensor, piece: slice | None = None) -> None:
        super().apply(delta, piece)
        self._follow()

    def replace(self, weights: Tensor, piece: slice | None = None) -> None:
        super().replace(weights, piece)
        if piece is None:  # behind the last of several pieces comes a gradient, for which the loop follows anyway
            self._follow()

    def background(self, activity: Coroutine[Any, Any, None]) -> None:
        if self._world == 1 and not self._strategy.is_served:
            activity.close()  # there is nobody to agree with
        else:
            super().background(activity)

    # what the loop asks for

    def make_step(self, scaler: GradScaler | None = None) -> None:
        """The loop has left a gradient in its parameters: drive the strategy on to the next one."""
        self.check_in_use("step()")
        self.replica.check_model(f"learner {self._rank}")
        if scaler is not None:
            unscale(scaler, self.replica.optimizer, f"learner {self._rank}")
        begin, waited = self.now(), self.spent.waiting_for_peers
        self.spent.computing += begin - self._resumed_at
        self._steps_begun += 1
        self._news()
        self._gradient.is_supplied = True
        self._proceed()
        self.num_steps += 1
        if self._attendant is not None and self._attendant.finished:  # those who have finished want a sign of life
            with self._naming_the_store():
                self.place.store.set(f"steps/{self._rank}", str(self.num_steps))
        self._resumed_at = self.now()
        self.spent.computing += self._resumed_at - begin - (self.spent.waiting_for_peers - waited)

    @contextmanager
    def consensus(self, final: bool) -> Generator[None, None, None]:
        """Let the model hold the mean of all learners' models while the context lasts; the `final` one for good."""
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
        self.spent.computing += self.now() - self._resumed_at
        if self._attendant is None:
            agreed = Consensus(self._contribution()[1], 0.0)
        else:
            with self._naming_the_store():
                request = self._attendant.request(self.num_steps)
            agreed = self._wait_for("a consensus", lambda: self._release.wait(request))
        self.consensus_distance = agreed.distance
        try:
            with self.replica.showing(agreed.mean):
                yield
        finally:
            self._resumed_at = self.now()

    def check_in_use(self, what: str) -> None:
        """Raise what went wrong elsewhere, or `ProtocolError` where `what` cannot be asked for now."""
        self._release.check()
        if self._is_over:
            how = "closed" if self._final is None else "finished"
            raise ProtocolError(f"learner {self._rank} has {how}: {what} must come before that")
        if self.replica.is_showing:
            raise ProtocolError(
                f"learner {self._rank}: {what} inside of consensus(), where the weights are not its own"
            )

    def close(self) -> None:
        """Make no more gradients; go on averaging and agreeing until all learners have closed."""
        self._release.check()
        if not self._is_over:
            self._warn_without_steps()
            self._finish(is_final_wanted=False)
        begin = self.now()
        if self._attendant is not None:
            with self._naming_the_store():
                self._attendant.announce("closed")
                self._meet_all(self._all_closed.wait)
            self._attendant.join()
            self._consensus_means.close()
        self._all_closed.set()
        self.replica.finish()
        self.leave_optimizer()
        self.spent.waiting_for_peers += self.now() - begin

    def leave_optimizer(self) -> None:
        """Let the loop step with its optimizer by itself again."""
        self._guard.remove()

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        for event in (self._all_finished, self._all_settled, self._all_closed):
            event.set()

    def announce_failure(self, error: BaseException | None) -> None:
        """Tell the others that this learner ends without having closed."""
        if self._attendant is not None:
            self._attendant.announce("bereft" if isinstance(error, PeerLost) else "failed", words_of(error))

    @property
    def bytes_sent(self) -> int:
        """To other learners, consensus included."""
        return self.averaging.bytes_sent + (self._attendant.bytes_sent if self._attendant else 0)

    # how it is done

    def _finish(self, is_final_wanted: bool) -> Consensus | None:
        """Let the strategy end when all learners have made their last steps; then the consensus of the final weights,
        if a learner wants it."""
        self._is_over = True
        self.spent.computing += self.now() - self._resumed_at
        begin, attendant = self.now(), self._attendant
        if self._background is not None:
            self._warn_of_few_rounds()
        with self._naming_the_store():
            self._rounds.finish()
            with suppress(LoopEnded, StopIteration):  # up to where it waits for others that end
                self._coroutine.throw(LoopEnded())
            if attendant is not None:
                attendant.announce("finished", self._steps_begun)
                self._meet_all(lambda: self._wait_for_all(self._all_finished, attendant.finished))
            with suppress(StopIteration):
                while inspect.getcoroutinestate(self._coroutine) == inspect.CORO_SUSPENDED:
                    self._coroutine.send(None)
        if self._background is not None:
            self._background.join()
        self._release.check()
        self._close_threads()
        agreed = None
        if attendant is not None:
            with self._naming_the_store():
                attendant.announce("settled", int(is_final_wanted))
                self._meet_all(lambda: self._wait_for_all(self._all_settled, attendant.settled))
            agreed = self._release.wait(attendant.final)
        self.replica.refresh_loop()
        self.spent.waiting_for_peers += self.now() - begin
        return agreed

    def _meet_all(self, wait: Callable[[], object]) -> None:
        """`wait` until all learners are as far as this one, and hear at once of the death of another meanwhile."""
        farewell = Worker("starling-farewell")
        met = farewell.submit(self._farewell)
        wait()
        self._release.check()
        self._release.wait(met)
        farewell.close()

    def _step(self, gradient: Tensor) -> None:
        super()._step(gradient)
        self._look_at_gradient(self.replica.was_finite)

    def _look_at_gradient(self, is_finite: bool) -> None:
        """Count gradients that were not finite. Raises NonFiniteError after many in a row."""
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
            f"learner {self._rank} lost the store that the learners meet in, {self._whereabouts()}: learner 0 or the "
            f"launcher, which keeps it, has ended ({str(error).splitlines()[0]})"
        )

    def _make_attendant(self) -> Attendant:
        everybody = range(self._world)
        usual = timedelta(seconds=self._timeout_seconds)
        self._consensus_means = OrderedMean(dist.new_group(everybody, backend="gloo", timeout=usual), self._world)
        # who has closed waits for others as long as they live, and hears at once of the death of one
        self._farewell_group = dist.new_group(everybody, backend="gloo", timeout=timedelta(days=20))
        return Attendant(
            self.place.store, self._rank, self._world, self._consensus_means, self._contribution, self._own_weights
        )

    def _contribution(self) -> tuple[int, Tensor]:
        """How many steps this learner has made, and what it brings to the mean that is the consensus `[P + B]`."""
        brought = self.replica.contribution()
        if self._strategy.is_served:  # the model is what servers keep: everybody brings that alone
            brought[: len(self.weights)] = 0.0
        for shard in self.shards:
            brought[shard.piece] = shard.copy() * (self._world if self._strategy.is_served else 1)
        return self.num_steps, brought

    def _own_weights(self) -> Tensor:
        return self.replica.contribution()[: len(self.weights)]

    def _farewell(self) -> None:
        """Meet all others that have come as far. Called by a thread of its own."""
        words = torch.zeros(self._world, dtype=torch.uint8)
        try:
            with communicating():
                dist.all_to_all_single(torch.empty_like(words), words, group=self._farewell_group)
        except ConnectionFailed as error:
            self._failed_behind(error)

    def _wait_for_all(self, event: threading.Event, there: Container[int]) -> None:
        """Wait for an event as long as those who are not yet `there` make steps."""

        def signs() -> list[tuple[int, bytes]]:
            others = [rank for rank in range(self._world) if rank not in there]
            store = self.place.store
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
        """Draw the consequences of others' closing or failing. Called by any thread."""
        attendant = self._attendant
        if attendant is None:
            return
        for rank, why in list(attendant.failed.items()):
            if rank != self._rank:
                self.fail(PeerLost(f"learner {self._rank} lost learner {rank}, {self._whereabouts()}: {why}"))
        for rank, why in list(attendant.bereft.items()):
            if rank != self._rank and self._release.error is None:
                lost = self._lost_ones(None)
                self.fail(PeerLost(f"learner {self._rank} lost {lost}, {self._whereabouts()}: {why}"))
        for rank, steps in list(attendant.finished.items()):
            if rank in self.sync_group and (
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
        """The loop's own thread has changed the weights: what the loop computes at follows."""
        if self.replica.loop is not self.weights and threading.current_thread() is not self._background:
            self.replica.refresh_loop()

    def _failed_behind(self, error: BaseException) -> None:
        """A thread of this learner failed."""
        try:
            with self._naming_the_lost("agreeing with all"):
                raise error
        except BaseException as named:
            self.fail(named)

    def _may_be_released(self, is_behind: bool) -> bool:
        return self._world > 1 or super()._may_be_released(is_behind)

    def _lost_ones(self, suspect: int | None) -> str:
        if self._attendant is None:
            return super()._lost_ones(suspect)
        try:
            self._attendant.announce("roll-call")  # who only computes answers, too, and is not taken for lost
            lost = super()._lost_ones(None)
        except dist.DistError:
            return "the store that the learners meet in"
        failed = [f"learner {rank} ({why})" for rank, why in self._attendant.failed.items() if rank != self._rank]
        return failed[0] if failed else lost

    def _whereabouts(self) -> str:
        return f"step {self._steps_begun}" if not self._is_over else f"closing after step {self._steps_begun}"


def _waits_for_loop(handle: Handle[Any]) -> bool:
    gradient = handle.gradient if isinstance(handle, MeanOfGradient) else handle
    return isinstance(gradient, LoopGradient) and not gradient.is_supplied


def words_of(error: BaseException | None) -> str:
    """What an error says, on one line."""
    if error is None:
        return "it ended without close()"
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, StarlingError) else f"{type(error).__name__}: {text}"
