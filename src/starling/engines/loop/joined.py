"""The public API for a user's own PyTorch loop, and the hooks that turn its optimizers' steps into the learner's
steps."""

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
from starling.engines.loop.run import LoopRecord, LoopRun
from starling.engines.processes.handshake import Handshake, Peers
from starling.engines.processes.threads import end_now
from starling.errors import ConfigError, FinishedApart, ProtocolError
from starling.strategies import Strategy

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class LoopStats:
    """One learner's counters so far."""

    steps: int
    """Number of calls of `step`, including those with a non-finite gradient."""
    steps_skipped: int
    """Number of non-finite gradients, which made no optimizer step."""
    rounds: int
    """Number of averaging rounds in the learner's background."""
    rounds_per_gradient: float
    """Number of averaging rounds divided by the number of steps."""
    staleness: dict[int, int]
    """Number of gradients by staleness: the changes to the weights between reading them and applying the gradient."""
    bytes_sent: int
    """Number of bytes that this learner has sent to others."""
    seconds_computing: float
    """Time in the loop and the optimizer, without `consensus`."""
    seconds_waiting: float
    """Time spent waiting for other learners."""
    consensus_distance: float | None
    """(1/L) sum_l |w_l - mean|^2 of all learners' weights at the last `consensus`; None before the first."""


class JoinedLearner(AbstractContextManager["JoinedLearner"]):
    """The model and the optimizer of your own loop as one of several learners; `starling.join` returns it.

    Call `step()` in place of `optimizer.step()`. Evaluate and save within `with consensus():` during the loop and
    within `with consensus(final=True):` after it, and call `close()` at the end. As a context manager it closes itself,
    and notifies the others immediately if your loop fails. If another learner is lost, `step`, `consensus` and `close`
    raise `PeerLost`, which names it. A process that ends without closing exits with code 1, or 130 after Ctrl-C; after
    the final consensus it closes. Its forked children are not learners.
    """

    learner_id: int
    """This learner's permanent number: its RANK when it started. A restarted process takes the number of a lost
    learner."""
    is_in_step: bool
    """Whether all learners make their steps together, and therefore equal numbers of them, as under `allreduce`."""

    def __init__(
        self,
        root: Peers,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        options: Config,
        seed: int,
        most_not_finite: int,
        record: LoopRecord | None = None,
    ) -> None:
        """Connect to the learners of the run, `root`. Raises the errors listed at `starling.join`."""
        place, survives = root.place, root.feed.is_watched
        sync_groups = strategy.sync_groups(options, place.world)
        if sync_groups.num_workers < place.world:
            raise ConfigError(
                f"strategy.servers: with own, {place.world - sync_groups.num_workers} of {place.world} processes would "
                "have no loop; with starling.join use servers='beside'"
            )
        world = max(2, place.world) if survives else place.world  # others may join later
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
        self._run = LoopRun(strategy, options, replica, seed, most_not_finite, record)
        self._life = LoopLife(root, self._run, handshake)
        replica.adopted.leave()
        self.learner_id = place.rank
        self._hooks = StepHooks(replica, f"learner {place.rank}")
        self._process = os.getpid()
        atexit.register(self._at_exit)

    @property
    def rank(self) -> int:
        """This learner's number, in [0, world). Use it to choose data, and the learner that prints and saves. With
        `on_loss="continue"` it changes with the membership."""
        return self._life.learner.peers.rank

    @property
    def world(self) -> int:
        """The number of learners. With `on_loss="continue"` it changes with the membership."""
        return self._life.learner.peers.world

    @property
    def membership(self) -> int:
        """The number of membership changes so far: learners that were lost or have joined. Compare it with an earlier
        value to notice a change, for example to divide data again."""
        return self._life.learner.peers.membership.number

    @property
    def num_steps(self) -> int:
        """The number of steps of the run. Without joiners, that is the number of calls of `step`. A process that joins
        later begins with another learner's number; learners that step together have the same number."""
        return self._run.num_steps

    def step(self, scaler: GradScaler | None = None, *, optimizer: Optimizer | None = None) -> None:
        """Make a step of the strategy with the gradients that `backward` computed.

        If a list of optimizers has joined, all of them step; with `optimizer`, only that one steps, and the gradients
        of other parameters are ignored. Under a synchronous strategy, all learners step the same optimizers in turn.

        With fp16, pass the `scaler` instead of calling `scaler.step(optimizer)`, and call `scaler.update()` afterwards
        as usual. Gradients are unscaled first, unless `scaler.unscale_(optimizer)` has done so; scales may differ
        between learners. A scaler sees only its own learner's gradients.

        Non-finite gradients make no optimizer step: the learner continues with unchanged weights, and the others are
        not affected. Where learners step with the mean of their gradients, as under `allreduce`, that mean is
        non-finite for all of them, so all skip the step.

        Weights that the loop itself has changed since the last step, by `load_state_dict` or a clamp, are adopted: the
        mean over all learners changes by the mean of their changes. Under strategies that would lose such a change, or
        take it for progress, it is a `ProtocolError`.

        Raises `NonFiniteError` after `most_not_finite` such gradients in a row (an argument of `starling.join`), and
        `ProtocolError` if learners of a synchronous strategy make unequal numbers of steps, or if a trained parameter
        was unknown when the model joined, or has changed its dtype, shape or device. A parameter that was only
        reallocated (`model.to(memory_format=...)`, an assignment to its `data`) continues with its present values.
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
        """From now on the loop calls `optimizer.step()`, or `scaler.step(optimizer)`, in place of `step()`.

        `starling.attach` describes this. A process that ends without an error closes its learner.
        """
        self._hooks.attach(self.step, scaler)

    @contextmanager
    def consensus(self, final: bool = False) -> Generator[None, None, None]:
        """A context in which the model holds the mean of all learners' weights and floating-point buffers.

        By default that is the current mean, and afterwards the model holds exactly what it held before. Each learner
        may call it alone, any number of times, while others compute; calls at different times give different means.

        With `final` the model holds the mean of all final weights, within the context and afterwards, with the same
        bits on all learners that request it. Call it after this learner's last step: it waits until all others have
        made theirs and called `consensus(final=True)` or `close`. No steps may follow; another `consensus` gives the
        same model.

        Raises `PeerLost` as `close` does, and warns if there were gradients but no steps.
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

    def stats(self) -> LoopStats:
        """This learner's counters so far."""
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
        """Leave once all learners have closed; until then continue averaging and taking part in `consensus`.

        The model then holds this learner's own weights or, after `consensus(final=True)`, the final mean. Further calls
        do nothing. Raises `PeerLost` if another learner is lost, or makes no step for `timeout_seconds` before its last
        one. Between its last step and its `close` a learner may take longer.
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
        """Notify the others, and leave without waiting."""
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
        """End a process whose learner has not closed: otherwise torch would wait for its process groups, and Python
        would abort when one of their threads wakes up. A learner that has finished closes, as does an attached one."""
        if self._is_in_child:
            return
        error, learner = getattr(sys, "last_value", None), self._life.learner
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
    """The exit code of a process whose learner has not closed."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, FinishedApart) else 1


def _digest(model: nn.Module) -> str:
    """A digest of the names, shapes and dtypes of the model's parameters and buffers."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    text = repr([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors])
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


class StepHooks:
    """Watches the steps of all optimizers, until it is removed.

    A step that bypasses the learner is a `ProtocolError`, whether one of the learner's own optimizers makes it or
    another optimizer that has some of its parameters. Once the hooks are attached, each call of an own optimizer's
    `step` is a step of the learner. That step calls `optimizer.step()` itself, with the gradient and at the weights
    that its strategy chooses. So the call of the loop, which comes after the hook, gets a stand-in of the optimizer
    that has no parameters. Of several optimizers, the learner steps with the one that is called.
    """

    def __init__(self, replica: LoopReplica, learner: str) -> None:
        """Watch the optimizers of `replica`; `learner` names the learner in errors."""
        self.is_attached = False
        self._replica, self._learner = replica, learner
        self._optimizers = members_of(replica.optimizer)
        self._parameters = {id(parameter) for parameter in replica.parameters}
        self._harmless: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # with its number of parameters
        self._guard = register_optimizer_step_pre_hook(self._check)
        self._handles: list[RemovableHandle] = []
        self._scaler: GradScaler | None = None

    def attach(self, make_step: Callable[..., None], scaler: GradScaler | None) -> None:
        """Let the loop's calls of `optimizer.step()` or `scaler.step()` call `make_step`, a `JoinedLearner.step`."""
        self.is_attached = True
        self._make_step = make_step
        self._handles = [each.register_step_pre_hook(self._step_attached) for each in self._optimizers]
        self._scaler = scaler
        if scaler is not None:
            self._step_of_scaler = scaler.step
            scaler.step = self._step_scaled  # type: ignore[method-assign]

    def detach(self) -> None:
        """Leave the optimizers and the scaler to the loop again, as before `attach`."""
        for handle in self._handles:
            handle.remove()
        if self._scaler is not None:
            vars(self._scaler).pop("step", None)

    def remove(self) -> None:
        """Allow all steps."""
        self.detach()
        self._guard.remove()

    def _check(self, optimizer: Optimizer, *_: object) -> None:
        """Called before each step of any optimizer."""
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
        # each hook must act once on the gradient: those before this one have, and the post hooks follow
        optimizer._optimizer_step_pre_hooks = OrderedDict((name, before[name]) for name in later)
        optimizer._optimizer_step_post_hooks = OrderedDict()
        try:
            self._make_step(optimizer=optimizer)
        finally:
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after
        return (_without_parameters(optimizer),), kwargs if closure is None else {**kwargs, "closure": lambda: loss}

    def _step_scaled(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Replaces `scaler.step`, which would skip the learner's step if this learner's gradient is not finite."""
        if self._scaler is None or not any(optimizer is own for own in self._optimizers):
            return self._step_of_scaler(optimizer, *args, **kwargs)
        self._make_step(self._scaler, optimizer=optimizer)
        return None


def _without_parameters(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class whose step changes nothing."""
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    stand_in.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    stand_in.state = type(optimizer.state)(dict) if type(optimizer.state) is not dict else {}  # type: ignore[assignment]
    return stand_in
