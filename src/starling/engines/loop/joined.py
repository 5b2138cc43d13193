"""What a user's own PyTorch loop holds of Starling."""

import atexit
import hashlib
import logging
import os
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import DistError
from torch.optim import Optimizer

from starling.configuration import Config
from starling.engines.loop.learner import LoopLearner
from starling.engines.loop.replica import LoopReplica
from starling.engines.processes.handshake import Handshake, part, shake_hands
from starling.engines.processes.place import Place
from starling.engines.processes.process_group import process_group
from starling.engines.processes.stalls import Waits
from starling.errors import ConfigError, ProtocolError
from starling.strategies import Strategy


@dataclass(frozen=True)
class LoopStats:
    """What one learner has done so far."""

    steps: int
    """Gradients that the loop has handed over, skipped ones included."""
    steps_skipped: int
    """Non-finite gradients, which made no optimizer step."""
    rounds: int
    """Averaging rounds in its background."""
    rounds_per_gradient: float
    staleness: dict[int, int]
    """Gradients by staleness: the changes made to the weights between reading them for the gradient and the step."""
    bytes_sent: int
    seconds_computing: float
    """Between two calls of `step`, and in the optimizer; not in `consensus`."""
    seconds_waiting: float
    """For other learners."""
    consensus_distance: float | None
    """(1/L) sum_l |w_l - mean|^2 of all learners' weights at the last `consensus`."""


class JoinedLearner:
    """The model and the optimizer of your own loop, as one learner among several; `starling.join` returns it.

    Call `step()` in place of `optimizer.step()`. Evaluate and save within `with consensus(final=True):` after the loop
    (within `with consensus():` before), and call `close()` at the end. As a context manager it closes itself, and tells
    the others at once if your loop fails. All methods raise `PeerLost`, naming the learner, when another one is gone. A
    process that ends without closing exits with code 1, or 130 after Ctrl-C.
    """

    def __init__(
        self,
        place: Place,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        options: Config,
        seed: int,
        timeout_seconds: float,
        most_not_finite: int,
    ) -> None:
        """Connect to the other learners. Raises as `starling.join` does."""
        sync_groups = strategy.sync_groups(options, place.world)
        if sync_groups.num_workers < place.world:
            raise ConfigError(
                f"strategy.servers: own would leave {place.world - sync_groups.num_workers} of {place.world} processes "
                "without a loop; in your own loop servers run beside it (servers='beside')"
            )
        is_shared = sync_groups.size == place.world
        replica = LoopReplica(model, optimizer, is_shared)
        self._place, self._timeout_seconds = place, timeout_seconds
        self._connections = ExitStack()
        self._is_closed = False
        waits = self._waits = Waits()
        if place.world > 1:
            mine = Handshake(
                world=place.world,
                strategy=strategy.name,
                num_parameters=len(replica.weights),
                dtype=str(replica.weights.dtype),
                configuration=f"{options.model_dump_json()}, seed {seed}, model {_digest(model)}, "
                f"{len(optimizer.param_groups)} parameter groups",
                **Handshake.of_versions(),
            )
            shake_hands(place.store, place.rank, mine, timeout_seconds, waits=waits)
            self._connections.enter_context(process_group(place, replica.weights.device, timeout_seconds, waits=waits))
        self._learner = LoopLearner(place, strategy, options, replica, seed, timeout_seconds, most_not_finite, waits)
        atexit.register(self._at_exit)

    @property
    def rank(self) -> int:
        """This learner's number, in [0, world): to choose its data, and the learner that prints and saves."""
        return self._place.rank

    @property
    def world(self) -> int:
        """The number of learners."""
        return self._place.world

    def step(self, scaler: GradScaler | None = None) -> None:
        """Make an optimizer step with the gradients that `backward` left, and agree with the others as the strategy
        does.

        With fp16, pass the `scaler` instead of calling `scaler.step(optimizer)`, and call `scaler.update()` afterwards
        as usual. Gradients are unscaled first, unless `scaler.unscale_(optimizer)` has done so; scales may differ
        between learners. A scaler sees only its own learner's gradients.

        Non-finite gradients make no optimizer step: the learner continues with unchanged weights, and the others are
        not affected. Where learners step with the mean of their gradients, as under `allreduce`, that mean is
        non-finite for all of them, so all skip the step.

        Raises `NonFiniteError` after `most_not_finite` such gradients in a row (an argument of `starling.join`), and
        `ProtocolError` if learners of a synchronous strategy make unequal numbers of steps, or if a trained parameter
        was unknown when the model joined, or has changed its dtype, shape or device. A parameter that was only
        reallocated (`model.to(memory_format=...)`, an assignment to its `data`) continues with its present values.
        """
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise ProtocolError(
                f"learner {self.rank}: step() takes a GradScaler or nothing, got {type(scaler).__name__}; it takes no "
                "closure: call backward() before it"
            )
        self._learner.make_step(scaler)

    @contextmanager
    def consensus(self, final: bool = False) -> Generator[None, None, None]:
        """A context in which the model holds the mean of all learners' weights and floating-point buffers.

        By default that is the mean at this moment, and afterwards the model holds exactly what it held before. One
        learner may call it alone, as often as it likes, while others compute; another learner's call gives the mean at
        another moment.

        With `final` it is the finished model, with the same bits on all learners that ask for it: this learner has made
        its last step, waits until all others have (they call this, or `close`), and then holds the mean of all final
        weights, within the context and afterwards. No steps may follow; another `consensus` shows the same model.

        Raises `PeerLost` as `close` does, and warns if there were gradients but no steps.
        """
        with self._learner.consensus(final):
            yield

    def stats(self) -> LoopStats:
        """What this learner has done so far."""
        learner = self._learner
        averaging, spent = learner.statistics.averaging, learner.statistics.spent
        return LoopStats(
            steps=learner.num_steps,
            steps_skipped=learner.num_skipped,
            rounds=averaging.rounds,
            rounds_per_gradient=averaging.rounds / max(1, learner.num_steps),
            staleness=dict(sorted(averaging.staleness.items())),
            bytes_sent=learner.bytes_sent,
            seconds_computing=spent.computing,
            seconds_waiting=spent.waiting_for_peers,
            consensus_distance=learner.consensus_distance,
        )

    def close(self) -> None:
        """Leave once all learners have closed; until then this learner continues averaging and answering `consensus`.

        The model then holds this learner's own weights or, after `consensus(final=True)`, the finished model. Further
        calls do nothing. Raises `PeerLost` if another learner ends, or makes no step for `timeout_seconds` before its
        last one; between its last step and its `close` it may take longer.
        """
        if self._is_closed:
            return
        try:
            self._learner.close()
            if self.world > 1:
                part(self._place.store, self.rank, self.world, self._timeout_seconds, waits=self._waits)
        except BaseException as error:
            self._abandon(error)
            raise
        self._is_closed = True
        atexit.unregister(self._at_exit)
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon(error)

    def _abandon(self, error: BaseException | None) -> None:
        """Tell the others, and leave without waiting. Connections stay open: threads may be waiting in them."""
        if self._is_closed:
            return
        self._is_closed = True
        self._learner.leave_optimizer()
        self._learner.fail(error or ProtocolError(f"learner {self.rank} ended without close()"))
        with suppress(DistError):  # the store may be gone, too
            self._learner.announce_failure(error)

    def _at_exit(self) -> None:
        """End a process whose learner has not closed: torch would wait for its groups, and Python would abort when a
        thread wakes up from there."""
        error = getattr(sys, "last_value", None)
        self._abandon(error)
        if self.world > 1:
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _digest(model: nn.Module) -> str:
    """A digest of what the model consists of."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    text = repr([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors])
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
