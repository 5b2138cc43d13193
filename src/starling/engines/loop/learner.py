"""The engine for a user's own PyTorch loop. It runs the strategy until the strategy waits for a gradient of the loop.

The engine runs the same strategy coroutines as the other engines. `claim()` is true until the loop ends. A gradient's
handle pauses the strategy. The loop's next `step` supplies the gradient and runs the strategy until it waits for the
next gradient. All other handles block until their work is done, as on the `processes` engine.
"""

import inspect
import math
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from starling.checkpoint.state import MEMBERSHIP_PREFIX, LearnerState, beyond_membership
from starling.engines.loop.announcements import UNEQUAL, AnnouncementListener
from starling.engines.loop.replica import Consensus, LoopReplica, members_of
from starling.engines.loop.run import LoopPlan, LoopRun
from starling.engines.processes.backend import ConnectionFailed, communicating
from starling.engines.processes.collectives import OrderedMean, share_state
from starling.engines.processes.communicator import LONGEST_LEAVE_SECONDS, ConnectedLearner
from starling.engines.processes.handshake import Peers
from starling.engines.processes.threads import GradientHandle, Mean, Worker
from starling.engines.processes.tickets import SAVING, StoreCuts
from starling.errors import PeerLost, ProtocolError, StarlingError
from starling.learner import Handle, LoopEnded, Shard
from starling.training.shards import HeldShards, MakeOptimizer
from starling.training.succession import Cuts
from starling.workload import Position, Ticket

_HEARD_SECONDS = 2.0
"""Time for which a learner waits until all other learners have received the reason why they cannot end together."""


class LoopLearner(ConnectedLearner):
    """A learner whose gradients come from a user's loop. The loop's thread calls all methods, unless noted otherwise.

    While the loop computes, an `AnnouncementListener` responds to the other learners. A `LoopLearner` belongs to one
    membership, which it enters with a `plan`. In the next membership, a new `LoopLearner` continues the `run`.
    """

    replica: LoopReplica
    _listener: AnnouncementListener | None = None

    def __init__(self, peers: Peers, run: LoopRun, plan: LoopPlan) -> None:
        self._run, self.most_not_finite = run, run.most_not_finite
        self._me = f"learner {peers.membership.members[peers.rank]}"
        self.survives = peers.feed.is_watched
        self._num_groups = len(run.replica.optimizer.param_groups)
        self._is_ending = False
        self.has_common_state = run.strategy.has_common_state(run.options)
        self._averages_gradients = run.strategy.averages_gradients(run.options)
        self._has_mixed = False  # whether the loop's own thread has changed the weights other than by a step
        self._before_rounds: dict[str, Tensor] = {}
        self._changed = threading.Condition()  # notified when there is an announcement or a failure
        self._coroutine = run.strategy.start(self, run.options)
        sync_groups = run.strategy.sync_groups(run.options, peers.world)
        super().__init__(peers, sync_groups, run.replica, run.seed, run.statistics, has_other_threads=peers.world > 1)
        self.own_shards = HeldShards(self, self._set_rates, run.resumed.shards if run.resumed else ())
        self._passed = [run.newest_save]  # the saves that learners are known to have passed, the newest last
        self.is_served = run.strategy.is_served
        is_cut = run.strategy.steps_itself and sync_groups.size < peers.world
        if run.checkpoints is not None and is_cut:
            self.rounds.cuts = Cuts(run.replica, StoreCuts(self.peers))
        if (record := run.record) is not None:
            self.replica.order = self.order_of(record.script, lambda turns: record.tell("turns", turns=turns))
        try:
            self._listener = self._new_listener() if self.world > 1 else None
            self._continue(plan)
            if run.record is not None:
                run.record.begin(plan, peers.membership.number, peers.membership.members, run.replica.weights)
                run.record.state(run.num_steps, run.replica.weights)
        except BaseException:
            super().leave()
            raise
        if self._listener is not None:
            self._listener.start()
            if getattr(run.options, "optimizer_state", "local") == "averaged":
                self.replica.pieces(len(self.replica.weights), optimizer_state=True)  # not later, in the background
        if run.final is None:
            before = self.replica.version
            self._proceed()
            self.begun.set()
            self.own_shards.forget_saved()
            run.resumed = None
            if self.replica.version != before and not self.replica.adopts_changes_apart:
                self.replica.adopted.leave()  # the end of an interrupted agreement is no change that the loop has made
        self.begin_computing()

    # the contract with the strategy

    @property
    def step_metadata(self) -> Tensor:
        """The learning rate of each parameter group, and the number of the learner's newest save."""
        return torch.tensor([*self._rates, self._run.newest_save], dtype=torch.float64)

    @property
    def _rates(self) -> list[float]:
        rates = [float(group["lr"]) for group in self.replica.optimizer.param_groups]
        if len(rates) != self._num_groups:
            raise ProtocolError(
                f"{self._me}: its optimizer has {len(rates)} parameter groups, but had "
                f"{self._num_groups} at starling.join; add groups before starling.join"
            )
        return rates

    def learning_rate(self, piece: slice | None = None) -> float | Tensor:
        rates = self._rates
        if len(set(rates)) == 1:
            return rates[0]
        of_weights = self.replica.rates_of_weights(rates)
        return of_weights if piece is None else of_weights[piece]

    def claim(self) -> bool:
        self.release.check()
        if self._run.checkpoints is not None and self.rounds.cuts is None:
            # a checkpoint needs the state before the rounds that the strategy starts with the next gradient
            kept = self.replica.strategy_state.items()
            self._before_rounds = {name: each.clone() for name, each in kept if name.startswith(MEMBERSHIP_PREFIX)}
        return not self._is_ending

    def gradient(self, at: Tensor) -> Handle[Tensor]:
        replica = self.replica
        if at is not replica.loop:
            replica.refresh_loop(None if at is replica.weights else at)
        self.gradient_version = replica.version if at is replica.weights else replica.loop_version
        gradient, is_alone = replica.next_gradient(), len(self.sync_group) == 1

        def compute(mean: Mean | None) -> Tensor:
            return gradient if mean is None or is_alone else mean(replica.own_gradient())

        self._gradient = GradientHandle(self.rank, compute, is_supplied=False)
        return self._gradient

    def step(self, gradient: Tensor, read_at: int | None = None, scale: float = 1.0) -> None:
        when = self.gradient_version if read_at is None else read_at
        self.statistics.averaging.staleness[self.replica.version - when] += 1
        is_finite = self.replica.step(gradient, scale)
        if self._run.gradient == "given":
            self._run.gradient = "used"
        self.rounds.gradient_made()
        self.count_finite(is_finite)

    def apply(self, delta: Tensor, piece: slice | None = None) -> None:
        super().apply(delta, piece)
        self._has_mixed |= not self.is_behind
        self._follow()

    def replace(self, weights: Tensor, piece: slice | None = None) -> None:
        super().replace(weights, piece)
        self._has_mixed |= not self.is_behind
        if piece is None:  # if pieces were replaced, the next gradient refreshes the loop's weights
            self._follow()

    def snapshot(self, piece: slice | None = None) -> Tensor:
        """Return a snapshot of the weights; see `Learner.snapshot`. Without `piece`, the loop's thread gets the weights
        at which the loop computes, without a copy. They are valid until the next step."""
        if piece is None and not self.is_behind:
            return self.replica.loop
        return super().snapshot(piece)

    def mini_batch(self, worker: int, step_metadata: Tensor) -> int | None:
        return None  # a user's loop hands out its own data

    def keep(self, piece: slice, make_optimizer: MakeOptimizer | None = None) -> Shard:
        return self.own_shards.keep(piece, make_optimizer)

    def start(self, activity: Coroutine[Any, Any, None]) -> None:
        if self.world == 1 and not self._run.strategy.is_served:
            activity.close()  # there are no other learners
        else:
            super().start(activity)

    # called by the user's loop

    def step_of_loop(self, scaler: GradScaler | None = None, optimizer: Optimizer | None = None) -> None:
        """Pass the gradient that the loop has computed to the strategy, and run the strategy until it waits for the
        next gradient. With `optimizer`, only the gradient of that optimizer's parameters is used. If a membership
        change interrupts the step, the learner of the next membership completes it."""
        run, spent, listener = self._run, self.statistics.spent, self._listener
        if run.gradient == "none":
            self.check_in_use("step()")
            self._end_computing()
            if scaler is not None:
                for member in members_of(optimizer or self.replica.optimizer):
                    _unscale(scaler, member, self._me)
            run.gradient = "given"
        else:
            self.release.check()
        begin, waited = time.monotonic(), spent.waiting_for_peers
        if listener is not None and listener.ended:
            self._news(listener)
        if run.gradient == "given":
            self._gradient.is_supplied = True
            self._proceed()
            self._count_round(self._averages_gradients)
        elif run.gradient == "alone":
            self.replica.step(self.replica.next_gradient(), 1.0)
        run.num_steps += 1
        if run.record is not None and run.num_steps.bit_count() == 1:  # less and less often, because a hash takes time
            run.record.state(run.num_steps, self.replica.snapshot())
        run.gradient = "none"  # assigned last, because other threads then consider the step complete
        if listener is not None and (listener.finished or listener.ended):  # these learners wait for this heartbeat
            with self.naming_the_lost("step()"):
                self.peers.store.set(f"steps/{self.rank}", str(run.num_steps))
        self.replica.adopted.leave()
        if self.rounds.cuts is not None:
            self.rounds.cuts.save()
        self.begin_computing()
        spent.computing += time.monotonic() - begin - (spent.waiting_for_peers - waited)

    def save(self, number: int | None) -> None:
        """Save this learner's part of a checkpoint; see `JoinedLearner.save`. If learners average in the background, or
        push changes to servers, the part is written during a later step, when it includes the same rounds and pushes as
        the other parts."""
        run = self._run
        self.check_in_use("save()")
        if run.checkpoints is None:
            raise ProtocolError(f"{self._me}: save() needs a folder; give starling.join one as `checkpoints`")
        self._end_computing()
        number = run.num_steps if number is None else number
        if number > run.newest_save:  # otherwise others have saved it in an earlier membership, or it is there
            self._pass(number)
            is_too_late = number not in self._passed
            run.newest_save = number
            state = self.replica.saved(
                self.rank,
                self.world,
                position=Position(Ticket(0, 0, number)),
                of_strategy=run.strategy.described(run.options),
                loop=run.checkpoints.kept(run.num_steps),
            )
            state.strategy.update(self._before_rounds)
            state = self.own_shards.added_to(state, run.strategy.steps_itself)
            if (cuts := self.rounds.cuts) is None:
                self._write(state)
            else:
                from starling.checkpoint.files import checkpoint_name  # only loops that save need it

                cuts.num_passed = number
                write = _leave_out if is_too_late else self._write
                cuts.add(state, write, partial(self.own_shards.with_forks, portion=number) if self.is_served else None)
                run.checkpoints.check_left(self.rank, [checkpoint_name(each.position) for each in cuts.pending])
        self.begin_computing()

    def agree(self) -> Consensus:
        """Compute the mean of all learners' present models."""
        self.release.check()
        self._end_computing()
        if self._listener is None:
            return Consensus(self._contribution()[0], 0.0)
        with self.naming_the_lost("requesting a consensus"):
            request = self._listener.request()
        return self.wait_for("a consensus", lambda: self.release.wait(request))

    def check_in_use(self, what: str) -> None:
        """Raise an error of another thread, or `ProtocolError` if `what` cannot be called now."""
        self.release.check()
        if self._run.is_over:
            how = "closed" if self._run.final is None else "finished"
            raise ProtocolError(f"{self._me} has {how}: {what} must be called before that")
        if self.replica.aside is not None:
            raise ProtocolError(f"{self._me}: {what} was called within consensus(), where the weights are not its own")

    def close(self) -> None:
        """Finish, and continue to average and to take part in consensus until all learners have closed."""
        self.release.check()
        if self._run.final is None:
            self.finish(is_final_wanted=False)
        begin, listener = time.monotonic(), self._listener
        if listener is not None:
            self._meet_all("closed", lambda: self._wait_until(lambda: listener.is_over))
            listener.join()
            self._consensus_thread.close()
        self.peers.end()
        self.end_threads()
        self.replica.finish()
        self.statistics.spent.waiting_for_peers += time.monotonic() - begin

    def leave(self) -> None:
        """Leave a membership that has ended and whose connections were cut."""
        super().leave()
        if (listener := self._listener) is not None:
            self._consensus_thread.abandon()
            listener.join(LONGEST_LEAVE_SECONDS)  # its connection has been cut, too
            if listener.final.done() and listener.final.exception() is None:
                self._run.final = self._run.final or listener.final.result()
        self._coroutine.close()
        self.replica.strategy_state = beyond_membership(self.replica.strategy_state)

    def has_left(self) -> bool:
        return super().has_left() and not (self._listener is not None and self._listener.is_alive())

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self.begun.set()
        with self._changed:
            self._changed.notify_all()

    def announce_failure(self, error: BaseException | None) -> None:
        """Notify the other learners that this learner ends without having closed."""
        if self._listener is not None:
            self._listener.announce("failed", [isinstance(error, PeerLost), one_line(error)])
            self._listener.join(1.0)  # it hears of it too; torch would report a connection that is cut while it waits

    def finish(self, is_final_wanted: bool) -> None:
        """Run the strategy to its end once all learners have made their last steps. If any learner wants the consensus
        of the final weights, all learners compute it, and this learner keeps it if `is_final_wanted`."""
        run, listener = self._run, self._listener
        self.release.check()
        if run.final is None:
            if not run.is_over:
                self._end_computing()
            run.is_over = True
            begin = time.monotonic()
            if listener is not None and len(self.sync_group) > 1:
                self._meet_all("ended", lambda: self._make_up(listener), [run.num_steps, self._lead])
            self._is_ending = True
            self.order.ended()
            self.warn_of_few_rounds()
            with self.naming_the_lost("its last step"):
                self.rounds.finish()
                with suppress(LoopEnded, StopIteration):  # run it until it waits for the other learners to end
                    self._coroutine.throw(LoopEnded())
            self._meet_all("finished")
            with self.naming_the_lost("its last step"), suppress(StopIteration):
                while inspect.getcoroutinestate(self._coroutine) == inspect.CORO_SUSPENDED:
                    self._coroutine.send(None)
            self.join_background()
            self._count_round(is_mean=False)
            if self.rounds.cuts is not None:
                self.rounds.cuts.save(is_over=True)
            self.order.flush()
            if run.record is not None:
                run.record.state(run.num_steps, self.replica.weights)
            self._meet_all("settled", word=int(is_final_wanted))
            agreed = None if listener is None else self.release.wait(listener.final)
            self.replica.refresh_loop()
            self.statistics.spent.waiting_for_peers += time.monotonic() - begin
            if is_final_wanted:
                run.final = agreed or Consensus(self._contribution()[0], 0.0)
        if is_final_wanted and run.final is not None:
            self.replica.adopt(run.final.mean)

    def begin_computing(self) -> None:
        """Record that the loop computes from now on."""
        self._resumed_at = time.monotonic()

    # implementation

    def _end_computing(self) -> None:
        """Adopt the loop's changes to the weights, and count the time for which the loop has computed."""
        self.replica.take_from_loop(self._me)
        begun, self._resumed_at = self._resumed_at, time.monotonic()
        self.statistics.spent.computing += self._resumed_at - begun

    def not_finite(self) -> str:
        return (
            f"{self._me}: the gradient of step {self._run.steps_begun} is not finite, nor were the "
            f"{self.most_not_finite - 1} before it; lower the learning rate, clip gradients or use a longer warm-up "
            "(with a GradScaler, a smaller init_scale), or increase most_not_finite in starling.join"
        )

    def _set_rates(self, optimizer: Optimizer, peaks: Sequence[float], step_metadata: Tensor, scale: float) -> None:
        """Set the learning rates of a model shard's optimizer to those of the loop that sent the gradient."""
        *rates, newest_save = step_metadata.tolist()
        self._pass(int(newest_save))
        if peaks:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * scale

    def _pass(self, number: int) -> None:
        """Copy the model shards, which a push from after the save `number` is about to change, for that save."""
        if self.rounds.cuts is not None:
            with self.own_shards.in_turn():
                if number > self._passed[-1]:
                    self._passed.append(number)
                    self.own_shards.fork(number)

    def _write(self, state: LearnerState) -> None:
        run = self._run
        with self.naming_the_lost(SAVING):
            if run.checkpoints is not None:
                run.checkpoints.save(
                    state,
                    self.replica,
                    lambda name: int(self.peers.store.add(f"saved/{name}", 1)),
                    run.strategy.has_one_model,
                )

    def _count_round(self, is_mean: bool) -> None:
        """Count a round in the loop's own thread, if there was one: its step used the mean gradient (`is_mean`), or the
        learner has received weights. Rounds in the background are counted there."""
        strategy = self._run.strategy
        if self.world > 1 and self._background is None and strategy.steps_itself and not strategy.is_served:
            self.statistics.averaging.rounds += is_mean or self._has_mixed
        self._has_mixed = False

    def _make_up(self, listener: AnnouncementListener) -> None:
        """Wait until the loops of all learners have ended. Learners that step together must end after the same step, so
        a learner whose loop ended earlier makes its missing steps without a gradient."""

        def is_behind() -> bool:
            return self._run.num_steps < listener.last_step(self.sync_group)

        while True:
            self._wait_for_all(listener.ended, is_behind)
            self.release.check()
            if not is_behind():
                return
            self._step_without_gradient()

    def _step_without_gradient(self) -> None:
        """Make a step of the strategy with a non-finite gradient, which changes no weights. If learners step with the
        mean of their gradients, the step changes no learner's weights."""
        run, statistics, parameters = self._run, self.statistics, self.replica.parameters
        before = statistics.num_not_finite, statistics.not_finite_in_a_row
        gradients = [parameter.grad for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, math.nan)
            run.gradient = "given"
            self._gradient.is_supplied = True
            self._proceed()
            run.num_steps += 1
        finally:
            run.gradient = "none"
            statistics.num_not_finite, statistics.not_finite_in_a_row = before
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    @property
    def _lead(self) -> int:
        """The number of steps by which this learner may be ahead of another learner of its sync group. It is less than
        one period, or the number of steps that a membership change made the learner skip, which its loop may not have
        counted."""
        return max(int(getattr(self._run.options, "every", 1)) - 1, self._run.num_jumped)

    def _check_ends(self, listener: AnnouncementListener) -> None:
        """Compare the numbers of steps after which loops ended that must make equal numbers of steps. If the numbers
        are too far apart, all learners fail."""
        begun, lead = self._run.steps_begun, self._lead
        for rank, (steps, their_lead) in list(listener.ended.items()):
            if rank == self.rank or rank not in self.sync_group:
                continue
            is_behind = self.rank in listener.ended and steps - begun > their_lead
            if begun - steps > lead or is_behind:
                done = "has closed after" if self._run.is_over else "is in step"
                unequal = (
                    f"{self._name(rank)} has closed after {steps} steps, but {self._me} {done} "
                    f"{begun}: under {self._run.strategy.name} they must make equal numbers of steps; give "
                    "them equal numbers of mini-batches"
                    + (" (let learner.num_steps count them)" if self.survives else "")
                    + ", or choose an asynchronous strategy, such as adpsgd"
                )
                self._fail_together(listener, unequal)
            elif begun > max(steps, listener.ahead.get(self.rank, 0)):
                listener.ahead[self.rank] = begun
                listener.announce("ahead", begun)

    def _fail_together(self, listener: AnnouncementListener, unequal: str) -> None:
        """End all learners with one error, so that none of them ends with a model that the others do not have."""
        store = self.peers.store
        first = store.compare_set(UNEQUAL, "", unequal).decode()
        if not listener.unequal:
            listener.unequal[self.rank] = first
            listener.announce(UNEQUAL, first)
        if not self.survives:  # otherwise the store outlives this learner
            store.set(f"{UNEQUAL}/{self.rank}", "")
            with suppress(dist.DistError):  # some learners may have already ended
                others = [f"{UNEQUAL}/{rank}" for rank in range(self.world) if rank != self.rank]
                store.wait(others, timedelta(seconds=_HEARD_SECONDS))
        self.fail(ProtocolError(first))

    def _name(self, rank: int) -> str:
        """Return the name of a learner for messages. It is the learner's permanent number, which equals its rank unless
        learners may be lost."""
        return f"learner {self.peers.membership.members[rank]}"

    def _meet_all(self, stage: str, wait: Callable[[], object] | None = None, word: object = 0) -> None:
        """Announce that this learner has reached a stage, call `wait` if given or else wait until all learners have
        reached the stage, and then meet them in a closing barrier. The barrier fails immediately if one of them dies. A
        learner that survives losses is notified of a death even without the barrier."""
        if (listener := self._listener) is None:
            return
        with self.naming_the_lost("close()"):
            listener.announce(stage, word)
            met = None if self.survives else self.workers["starling-closing"].submit(self._closing_barrier)
            (wait or partial(self._wait_for_all, getattr(listener, stage)))()
            self.release.check()
            if met is not None:
                self.release.wait(met)

    def _proceed(self) -> None:
        """Run the strategy until it waits for the loop's next gradient."""
        try:
            with self.naming_the_lost("step()"):
                self._coroutine.send(None)
        except BaseException as error:
            self.fail(error)
            raise

    def _new_listener(self) -> AnnouncementListener:
        """Create a listener, and the groups that a consensus and the end of the run need."""
        ranks = range(self.world)
        usual = timedelta(seconds=self.peers.timeout_seconds)
        self._consensus_thread = Worker("starling-consensus")
        group = dist.new_group(ranks, backend="gloo", timeout=usual)
        means = OrderedMean(group, self.world, self._consensus_thread)
        if not self.survives:
            # a learner that has closed waits for the others without a time-out, but fails immediately if one dies
            self._closing_group = dist.new_group(ranks, backend="gloo", timeout=timedelta(days=20))
        return AnnouncementListener(self.peers, means, self._run, self._contribution, self._news, self._failed_behind)

    def _continue(self, plan: LoopPlan) -> None:
        """Continue from this learner's state, or from the state of another learner."""
        run, replica = self._run, self.replica
        copies = [] if plan.source is None or self.world == 1 else [(plan.source, plan.takers)]
        for source, takers in [*copies, *plan.within]:
            # unless learners may be lost, each loop keeps the optimizer state that it may have loaded itself
            own = replica.state(self.rank, self.world, run.final, has_optimizer=self.survives)
            with self.naming_the_lost(f"copying the model of {self._name(source)}"):
                state = share_state(own, source)
            if source == plan.source or self.rank in takers:
                run.final = run.final or replica.take(state, self.rank in takers)
                run.is_over = run.is_over or run.final is not None
        is_taker = any(self.rank in takers for _, takers in [*copies, *plan.within])
        run.continue_from(plan.num_done[self.rank], is_taker)

    def _contribution(self) -> tuple[Tensor, Tensor]:
        """Return this learner's contribution `[P + B]` to the consensus mean, and its own weights `[P]`."""
        is_served = self._run.strategy.is_served
        if is_served and self._run.final is None:
            self.begun.wait()
            self.release.check()
        contribution, num_weights = self.replica.contribution(), len(self.replica.weights)
        own = contribution[:num_weights].clone()
        if is_served and self.world > 1:  # the servers hold the model: each learner contributes only its shards
            contribution[:num_weights] = 0.0
        for shard in self.own_shards.held:
            contribution[shard.piece] = shard.seen() * (self.world if is_served else 1)
        return contribution, own

    def _closing_barrier(self) -> None:
        """Wait until all learners have called this method. It is called in a separate thread."""
        words = torch.zeros(self.world, dtype=torch.uint8)
        try:
            with communicating():
                dist.all_to_all_single(torch.empty_like(words), words, group=self._closing_group)
        except ConnectionFailed as error:
            self._failed_behind(error)

    def _wait_until(self, is_done: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until `is_done` returns True after news from other learners, or until a failure. Return whether either
        happened in time."""
        with self._changed:
            return self._changed.wait_for(lambda: is_done() or self.release.error is not None, seconds)

    def _wait_for_all(self, ready: Collection[int], is_enough: Callable[[], bool] = lambda: False) -> None:
        """Wait until all learners are `ready`, or `is_enough` returns True. The wait continues as long as at least one
        learner that is not ready makes steps."""

        def progress() -> list[tuple[int, bytes]]:
            others = [rank for rank in range(self.world) if rank not in ready]
            store = self.peers.store
            return [(rank, store.get(key) if store.check([key := f"steps/{rank}"]) else b"") for rank in others]

        before = progress()
        while not self._wait_until(lambda: is_enough() or len(ready) == self.world, self.peers.timeout_seconds):
            if (now := progress()) == before:
                names = " and ".join(self._name(rank) for rank, _ in now)
                raise PeerLost(
                    f"{self._me} has closed and lost {names}: no step and no close() within "
                    f"{self.peers.timeout_seconds:g} s; increase timeout_seconds if steps take that long"
                )
            before = now

    def _news(self, listener: AnnouncementListener) -> None:
        """React to learners that have finished, settled, closed or failed. Any thread may call this method."""
        for rank, (has_lost_peer, why) in list(listener.failed.items()):
            if rank != self.rank and self.release.error is None:
                lost = self._name_lost(None) if has_lost_peer else self._name(rank)
                self.fail(PeerLost(f"{self._me} lost {lost}, {self._where()}: {why}"))
        with suppress(dist.DistError):  # a lost store is noticed elsewhere
            if listener.unequal and self.release.error is None:
                self._fail_together(listener, next(iter(listener.unequal.values())))
            elif self.release.error is None:
                self._check_ends(listener)
        with self._changed:
            self._changed.notify_all()
        if not self._run.is_over and threading.current_thread() is not listener:
            self.release.check()

    def _follow(self) -> None:
        """If the loop's own thread has changed the weights, copy them to the loop's weights."""
        if self.replica.loop is not self.replica.weights and not self.is_behind:
            self.replica.refresh_loop()

    def _failed_behind(self, error: BaseException) -> None:
        """Fail this learner because another of its threads failed."""
        try:
            with self.naming_the_lost("agreeing with the others"):
                raise error
        except BaseException as named:
            self.fail(named)

    def _name_lost(self, suspect: int | None) -> str:
        """Name the lost learners, which are those that do not answer a roll-call."""
        if self._listener is None:
            return self.peers.silent(suspect)
        try:
            self._listener.announce("roll-call")  # learners that only compute respond to it as well
            lost = self.peers.silent()
        except dist.DistError:
            return f"the store, which {'the coordinator' if self.survives else 'learner 0 or the launcher'} hosts,"
        for rank, (has_lost_peer, why) in list(self._listener.failed.items()):
            if rank != self.rank and not has_lost_peer:
                return f"{self._name(rank)} ({why})"
        return lost

    def _where(self) -> str:
        return f"{'closing after ' if self._run.is_over else ''}step {self._run.steps_begun}"


def _leave_out(state: LearnerState) -> None:
    """Write no part of a checkpoint for which a server has no copy of its shards, because a learner passed that save
    and the next one between two pushes."""


def _unscale(scaler: GradScaler, optimizer: Optimizer, learner: str) -> None:
    """Unscale the gradients unless the loop has already done so, and record for `scaler.update()` whether they are
    finite, as `scaler.step(optimizer)` does. Raises `ProtocolError` if it is called twice before `scaler.update()`."""
    if not scaler.is_enabled():
        return
    state = scaler._per_optimizer_states[id(optimizer)]  # there is no public way to know whether the loop has unscaled
    if state["stage"] is OptState.STEPPED:
        raise ProtocolError(
            f"{learner}: step() was called twice with one GradScaler; call scaler.update() after each step"
        )
    if state["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    state["stage"] = OptState.STEPPED


def one_line(error: BaseException | None) -> str:
    """Return the text of an error on one line."""
    if error is None:
        return "it ended without close()"
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, StarlingError) else f"{type(error).__name__}: {text}"
