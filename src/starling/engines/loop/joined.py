"""The public API for a user's own PyTorch loop, and the hooks that replace the steps of its optimizers with steps of
the learner."""

import atexit
import hashlib
import os
import sys
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from starling.configuration import Config
from starling.engines.loop.learner import LoopLearner
from starling.engines.loop.life import LoopLife
from starling.engines.loop.replica import LoopReplica, describe, members_of, parameters_of
from starling.engines.loop.run import LoopFiles, LoopRun
from starling.engines.processes.handshake import Handshake, Peers
from starling.engines.processes.threads import end_now
from starling.errors import ConfigError, FinishedApart, ProtocolError
from starling.strategies import Strategy

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class LoopStats:
    """The counters of one learner since it joined."""

    steps: int
    """Number of calls of `step` in this process, including calls with a non-finite gradient. `JoinedLearner.num_steps`
    counts the steps of the run, which may have begun before this process joined."""
    steps_skipped: int
    """Number of non-finite gradients, which are skipped."""
    rounds: int
    """Number of times that the learner has averaged its weights or its gradient with others; 0 if servers keep the
    model, or if it is shared."""
    rounds_per_gradient: float
    """`rounds` divided by the number of steps."""
    staleness: dict[int, int]
    """Number of gradients with each staleness, which is the number of changes to the weights between reading them and
    applying the gradient."""
    bytes_sent: int
    """Number of bytes that this learner has sent to other learners."""
    seconds_computing: float
    """Time spent in the loop and in the optimizer, excluding `consensus`."""
    seconds_waiting: float
    """Time spent waiting for other learners."""
    consensus_distance: float | None
    """(1/L) sum_l |w_l - mean|^2 over the weights w_l of the L learners at the last `consensus`. None before the first
    `consensus`."""


class JoinedLearner(AbstractContextManager["JoinedLearner"]):
    """The model and the optimizer of your own loop, as one of several learners. `starling.join` returns this object.

    Call `step()` in place of `optimizer.step()`. Evaluate and save within `with consensus():` during the loop and
    within `with consensus(final=True):` after the loop, and call `close()` at the end. If you use the learner as a
    context manager, it closes itself, and notifies the other learners immediately if your loop fails. If another
    learner is lost, `step`, `consensus` and `close` raise `PeerLost` with the name of the lost learner.

    A process that ends without closing its learner exits with code 1, or with code 130 after Ctrl-C. After the final
    consensus, the end of the process closes the learner. Forked children of the process are not learners.
    """

    learner_id: int
    """This learner's permanent number: its RANK when it started. A restarted process takes the number of a lost
    learner."""
    is_in_step: bool
    """Whether all learners make their steps together, as under `allreduce`, and therefore make equal numbers of
    steps."""

    def __init__(
        self,
        root: Peers,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        options: Config,
        seed: int,
        most_not_finite: int,
        files: LoopFiles,
    ) -> None:
        """Connect to `root`, the learners of the run. Raises the errors that `starling.join` lists."""
        place, survives = root.place, root.feed.is_watched
        sync_groups = strategy.sync_groups(options, place.world)
        if sync_groups.num_workers < place.world:
            raise ConfigError(
                f"strategy.servers: with own, {place.world - sync_groups.num_workers} of {place.world} processes would "
                "have no loop; with starling.join use servers='beside'"
            )
        world = max(2, place.world) if survives else place.world  # other learners may join later
        self.is_in_step = strategy.sync_groups(options, world).size == world
        refuses = None if strategy.adopts_changes(options) else strategy.name
        replica = self._replica = LoopReplica(model, optimizer, self.is_in_step, refuses)
        handshake = Handshake(
            world=place.world,
            strategy=strategy.name,
            num_parameters=len(replica.weights),
            dtype=str(replica.weights.dtype),
            configuration=f"{options.model_dump_json()}, seed {seed}, model {_digest(model)}, "
            f"{len(optimizer.param_groups)} parameter groups" + (", on_loss continue" if survives else ""),
            optimizer=describe(optimizer),
        )
        self._is_closed = self._has_warned = False
        self._consensus_distance: float | None = None
        self._run = LoopRun(strategy, options, replica, seed, most_not_finite, files)
        self._life = LoopLife(root, self._run, handshake)
        replica.adopted.leave()
        self.learner_id = place.rank
        self._hooks = StepHooks(replica, f"learner {place.rank}")
        self._process = os.getpid()
        atexit.register(self._at_exit)

    @property
    def rank(self) -> int:
        """This learner's number, in [0, world). Use it to choose the learner's data, and to choose the learner that
        prints and saves. With `on_loss="continue"` the rank changes with the membership."""
        return self._life.learner.peers.rank

    @property
    def world(self) -> int:
        """The number of learners. With `on_loss="continue"` the number changes with the membership."""
        return self._life.learner.peers.world

    @property
    def membership(self) -> int:
        """The number of membership changes so far, each of which is caused by learners that were lost or that joined.
        Compare the number with an earlier value to notice a change, for example to divide the data again."""
        return self._life.learner.peers.membership.number

    @property
    def num_steps(self) -> int:
        """The number of steps of the run. Without joiners, this is the number of calls of `step`. A process that joins
        later begins with the number of another learner. Learners that step together have the same number."""
        return self._run.num_steps

    @property
    def newest_save(self) -> int | None:
        """The number of the newest checkpoint that this learner has saved, from which it resumed, or that others had
        begun to save when it joined; None if there is none. The checkpoint is complete once all learners have saved it.
        With numbers of epochs, a resumed loop continues with the next one."""
        return self._run.newest_save if self._run.newest_save >= 0 else None

    def step(self, scaler: GradScaler | None = None, *, optimizer: Optimizer | None = None) -> None:
        """Make a step of the strategy with the gradients that `backward` computed.

        If `starling.join` was given a list of optimizers, all of them step. With `optimizer`, only that optimizer
        steps, and the gradients of other parameters are ignored. Under a synchronous strategy, all learners must step
        the same optimizers in the same order.

        With fp16, pass the `scaler` instead of calling `scaler.step(optimizer)`, and call `scaler.update()` afterwards
        as usual. Gradients are unscaled first, unless `scaler.unscale_(optimizer)` has done so; scales may differ
        between learners. A scaler sees only its own learner's gradients.

        Non-finite gradients make no optimizer step: the learner continues with unchanged weights, and the others are
        not affected. Where learners step with the mean of their gradients, as under `allreduce`, that mean is
        non-finite for all of them, so all skip the step.

        If the loop itself has changed weights since the last step, for example by `load_state_dict` or by clamping
        them, the change is kept: the mean over all learners changes by the mean of their changes. Some strategies would
        lose such a change or mistake it for progress; under these, it raises `ProtocolError`.

        Raises `NonFiniteError` after `most_not_finite` non-finite gradients in a row (an argument of `starling.join`).
        Raises `ProtocolError` if learners of a synchronous strategy make unequal numbers of steps, if a trained
        parameter was unknown when the model joined, or if a parameter has changed its dtype, shape or device. A
        parameter that was only reallocated (`model.to(memory_format=...)`, an assignment to its `data`) continues with
        its present values.
        """
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise ProtocolError(
                f"learner {self.learner_id}: step() accepts only a GradScaler, got {type(scaler).__name__}; instead of "
                "a closure, call backward() before step()"
            )
        if optimizer is not None and not any(optimizer is each for each in members_of(self._replica.optimizer)):
            raise ProtocolError(
                f"learner {self.learner_id}: step(optimizer=…) got a {type(optimizer).__name__} that was not given to "
                "starling.join; join the model with a list of all its optimizers"
            )
        with self._replica.only(optimizer) if optimizer is not None else nullcontext():
            self._life.run(LoopLearner.step_of_loop, scaler, optimizer)
        self._run.statistics.num_steps += 1

    def take_over(self, scaler: GradScaler | None = None) -> None:
        """Make the learner step whenever the loop calls `optimizer.step()` or `scaler.step(optimizer)`.

        Do not call `step()` afterwards. `starling.attach` describes this mode. A process that ends without an error
        closes its learner.
        """
        self._hooks.attach(self.step, scaler)

    @contextmanager
    def consensus(self, final: bool = False) -> Generator[None, None, None]:
        """Return a context in which the model contains the mean of all learners' weights and floating-point buffers.

        By default this is the current mean, and the model's own values are restored exactly when the context ends. Each
        learner may call `consensus` alone, any number of times, while other learners compute. Calls at different times
        give different means.

        With `final`, the model contains the mean of all final weights, both within the context and afterwards. The mean
        is bit-identical on all learners that request it. Call `consensus(final=True)` after this learner's last step.
        It waits until every other learner has made its last step and called `consensus(final=True)` or `close`. No
        steps may follow, and a later `consensus` gives the same model.

        Raises `PeerLost` under the same conditions as `close`. Warns if gradients were computed but no step was made.
        """
        life, run = self._life, self._run
        if run.final is not None and not self._is_closed:
            yield
            return
        life.run(LoopLearner.check_in_use, "consensus()")
        self._warn_without_steps()
        if final:
            life.run(LoopLearner.finish, is_final_wanted=True)
            self._consensus_distance = run.final.distance if run.final else None
            self._hooks.detach()
            yield
            return
        agreed = life.run(LoopLearner.agree)
        self._consensus_distance = agreed.distance
        try:
            with self._replica.showing(agreed.mean):
                yield
        finally:
            life.learner.begin_computing()

    def save(self, number: int | None = None) -> None:
        """Save this learner's part of a checkpoint in the folder that `starling.join` got as `checkpoints`.

        Every learner calls this method between two steps, and not within `consensus`. The checkpoint is complete, and
        `starling.join` can resume from it, once all learners have saved it; its folder `model` then contains the mean
        of all learners' weights. The newest two checkpoints are kept.

        Args:
            number: The number of the checkpoint, by default `num_steps`. All learners call with the same numbers, which
                increase. Pass a number, such as that of the epoch, if learners make unequal numbers of steps.

        Raises:
            ProtocolError: `starling.join` got no folder.
            CheckpointError: The checkpoint cannot be written, or the optimizer's or an object's state cannot be saved.
        """
        self._life.run(LoopLearner.save, number)

    def stats(self) -> LoopStats:
        """Return this learner's counters up to now."""
        run, counted = self._run, self._run.statistics
        averaging, spent = counted.averaging, counted.spent
        return LoopStats(
            steps=counted.num_steps,
            steps_skipped=counted.num_not_finite,
            rounds=averaging.rounds,
            rounds_per_gradient=averaging.rounds / max(1, counted.num_steps),
            staleness=dict(sorted(averaging.staleness.items())),
            bytes_sent=averaging.bytes_sent + run.consensus_bytes,
            seconds_computing=spent.computing,
            seconds_waiting=spent.waiting_for_peers,
            consensus_distance=self._consensus_distance,
        )

    def close(self) -> None:
        """Leave the run once all learners have closed. Until then, this learner continues to average and to take part
        in `consensus`.

        Afterwards the model contains this learner's own weights or, after `consensus(final=True)`, the final mean.
        Further calls do nothing. Raises `PeerLost` if another learner is lost, or if it makes no step for
        `timeout_seconds` although its last step is still to come. A learner may take longer between its last step and
        its `close`.
        """
        if self._is_closed:
            return
        try:
            self._warn_without_steps()
            self._life.close()
        except BaseException as error:
            self._abandon(error)
            raise
        self._is_closed = True
        self._hooks.remove()
        atexit.unregister(self._at_exit)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None and not self._is_in_child:
            self.close()
        else:
            self._abandon(error)

    @property
    def _is_in_child(self) -> bool:
        """Whether this process is a forked child of the learner's process, and therefore not the learner."""
        return os.getpid() != self._process

    def _abandon(self, error: BaseException | None) -> None:
        """Notify the other learners, and leave the run without waiting for them."""
        if self._is_closed or self._is_in_child:
            return
        self._is_closed = True
        self._hooks.remove()
        self._life.abandon(error)

    def _warn_without_steps(self) -> None:
        run = self._run
        has_gradients = any(parameter.grad is not None for parameter in self._replica.parameters)
        if run.steps_begun == 0 and not run.is_over and has_gradients and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"learner {self.learner_id} has computed gradients but made no step, so nothing was trained. Call "
                "step() of the joined learner after each backward",
                RuntimeWarning,
                stacklevel=2,
            )

    def _at_exit(self) -> None:
        """End a process whose learner has not closed. Otherwise, torch would wait for its process groups, and Python
        would abort when one of their threads wakes up. A learner that has finished, or that was attached, is closed."""
        error, learner = getattr(sys, "last_value", None), self._life.learner
        if self._is_in_child or (error is None and self._is_closed and learner.has_left()):
            return  # after an error that was caught, the exit code is the program's own
        is_attached = self._hooks.is_attached and (learner.survives or learner.release.error is None)
        if error is None and not self._is_closed and (is_attached or self._run.final is not None):
            try:
                self.close()
            except BaseException as failure:
                traceback.print_exc()
                error = failure
            else:
                return
        elif error is None and not self._is_closed:
            sys.stderr.write(
                f"learner {self.learner_id} ended without close(), after {self.num_steps} steps: call close() of the "
                "joined learner at the end, or use it in a with statement\n"
            )
        self._abandon(error)
        if self.world > 1 or learner.survives:
            end_now(_exit_code(error), self._at_exit)


def _exit_code(error: BaseException | None) -> int:
    """Return the exit code of a process whose learner has not closed."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, FinishedApart) else 1


def _digest(model: nn.Module) -> str:
    """Return a digest of the names, shapes and dtypes of the model's parameters and buffers."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    text = repr([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors])
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


class StepHooks:
    """Hooks that watch the steps of all optimizers until `remove` is called.

    A step that bypasses the learner raises `ProtocolError`. The step may be made by one of the learner's own
    optimizers, or by a foreign optimizer that has some of the learner's parameters.

    After `attach`, each call of `step` of one of the learner's own optimizers becomes a step of the learner with that
    optimizer. The learner's step calls `optimizer.step()` itself, with the gradient and at the weights that its
    strategy chooses. The loop's own call continues after the hook, and must not change the weights again; it therefore
    operates on a stand-in for the optimizer, without parameters.
    """

    def __init__(self, replica: LoopReplica, learner: str) -> None:
        """Watch the optimizers of `replica`. `learner` is the learner's name in error messages."""
        self.is_attached = False
        self._replica, self._learner = replica, learner
        self._optimizers = members_of(replica.optimizer)
        self._parameters = {id(parameter) for parameter in replica.parameters}
        self._harmless: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # each with its number of parameters
        self._guard = register_optimizer_step_pre_hook(self._check)
        self._handles: list[RemovableHandle] = []
        self._scaler: GradScaler | None = None

    def attach(self, make_step: Callable[..., None], scaler: GradScaler | None) -> None:
        """Make the loop's calls of `optimizer.step()` and `scaler.step()` call `make_step`, which is
        `JoinedLearner.step`."""
        self.is_attached = True
        self._make_step = make_step
        self._handles = [each.register_step_pre_hook(self._step_attached) for each in self._optimizers]
        self._scaler = scaler
        if scaler is not None:
            self._step_of_scaler = scaler.step
            scaler.step = self._step_scaled  # type: ignore[method-assign]

    def detach(self) -> None:
        """Undo `attach`, so that the optimizers and the scaler work as usual again."""
        for handle in self._handles:
            handle.remove()
        if self._scaler is not None:
            vars(self._scaler).pop("step", None)

    def remove(self) -> None:
        """Remove all hooks, so that every optimizer may step."""
        self.detach()
        self._guard.remove()

    def _check(self, optimizer: Optimizer, *_: object) -> None:
        """Raise `ProtocolError` for a step that bypasses the learner. Called before each step of any optimizer."""
        if any(optimizer is own for own in self._optimizers):
            if not self._replica.is_stepping and not self.is_attached:
                raise ProtocolError(
                    f"{self._learner}: optimizer.step() was called on an optimizer given to starling.join, so the "
                    "other learners would not see the step; call step() of the joined learner instead, and "
                    "step(scaler) instead of scaler.step(optimizer), or use starling.attach"
                )
            return
        number = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._harmless.get(optimizer) == number:
            return
        if any(id(parameter) in self._parameters for parameter in parameters_of(optimizer)):
            raise ProtocolError(
                f"{self._learner}: a step of {type(optimizer).__name__} would change parameters of the joined model, "
                "but this optimizer was not given to starling.join, so the other learners would not see the step; join "
                "the model with a list of all its optimizers, and call step(optimizer=…) of the joined learner"
            )
        self._harmless[optimizer] = number

    def _step_attached(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        if self._replica.is_stepping:
            return None
        kwargs = dict(kwargs)
        closure = args[1] if len(args) > 1 else kwargs.pop("closure", None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        names, own = list(before), {handle.id for handle in self._handles}
        later = names[next(place for place, name in enumerate(names) if name in own) + 1 :]
        # each hook must act once on the gradient: earlier pre-hooks have already acted, and the post-hooks act later
        optimizer._optimizer_step_pre_hooks = OrderedDict((name, before[name]) for name in later)
        optimizer._optimizer_step_post_hooks = OrderedDict()
        try:
            self._make_step(optimizer=optimizer)
        finally:
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after
        return (_without_parameters(optimizer),), kwargs if closure is None else {**kwargs, "closure": lambda: loss}

    def _step_scaled(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step through the learner in place of `scaler.step`. The original method would skip the learner's step if this
        learner's gradient is not finite."""
        if self._scaler is None or not any(optimizer is own for own in self._optimizers):
            return self._step_of_scaler(optimizer, *args, **kwargs)
        self._make_step(self._scaler, optimizer=optimizer)
        return None


def _without_parameters(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same class that has no parameters, so that its step changes nothing."""
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    stand_in.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    stand_in.state = type(optimizer.state)(dict) if type(optimizer.state) is not dict else {}  # type: ignore[assignment]
    return stand_in
