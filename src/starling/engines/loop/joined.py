"""What somebody's own PyTorch loop holds of Starling."""

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
from starling.engines.loop.learner import DropInLearner
from starling.engines.loop.replica import LoopReplica
from starling.engines.processes.handshake import Handshake, part, shake_hands
from starling.engines.processes.learner import process_group
from starling.engines.processes.peers import Place
from starling.errors import ConfigError, ProtocolError
from starling.strategies import Strategy


@dataclass(frozen=True)
class LoopStats:
    """What one learner did so far."""

    steps: int
    """Gradients that the loop has handed over, skipped ones included."""
    steps_skipped: int
    """Gradients that were not finite, and so made no optimizer step."""
    rounds: int
    """Averaging rounds in its background."""
    rounds_per_gradient: float
    staleness: dict[int, int]
    """Gradients by the number of changes made to the weights between their being read for the gradient and the step."""
    bytes_sent: int
    seconds_computing: float
    """Between two calls of `step`, and in the optimizer; not in `consensus`."""
    seconds_waiting: float
    """For other learners."""
    consensus_distance: float | None
    """(1/L) sum_l |w_l - mean|^2 of all learners' weights at the last `consensus`."""


class JoinedLearner:
    """A model and an optimizer of your own loop, as one learner among several: what `starling.join` returns.

    Call `step()` in place of `optimizer.step()`, evaluate and save inside `with consensus(final=True):` when the loop
    has ended (and inside `with consensus():` before), and `close()` at the end. Used as a context manager it closes
    itself, and tells the others at once if your loop fails. All methods raise `PeerLost`, naming the learner, when
    another one is gone. A process that ends without having closed ends with exit code 1, and 130 after Ctrl-C.
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
        """Meet the others. Raises as `starling.join` says."""
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
            shake_hands(place.store, place.rank, mine, timeout_seconds)
            self._connections.enter_context(process_group(place, replica.weights.device, timeout_seconds))
        self._learner = DropInLearner(place, strategy, options, replica, seed, timeout_seconds, most_not_finite)
        atexit.register(self._at_exit)

    @property
    def rank(self) -> int:
        """Which learner this is, in [0, world): for the choice of data, and of who prints and saves."""
        return self._place.rank

    @property
    def world(self) -> int:
        """How many learners there are."""
        return self._place.world

    def step(self, scaler: GradScaler | None = None) -> None:
        """Make an optimizer step with the gradients that `backward` left, and agree with the others as the strategy
        does.

        With fp16, give the `scaler` in place of `scaler.step(optimizer)`, and call `scaler.update()` afterwards as
        usual. The gradients are unscaled first, unless `scaler.unscale_(optimizer)` has done that; each learner may
        have another scale. A scaler looks at its own learner's gradients.

        Gradients that are not finite make no optimizer step: the learner takes part in what follows with unchanged
        weights, and nobody else notices. Where learners step with the mean of their gradients, as under `allreduce`,
        that mean is not finite for any of them, so all skip that step alike.

        Raises `NonFiniteError` after `most_not_finite` such gradients in a row (an argument of `starling.join`), and
        `ProtocolError` where learners of a strategy that works in step make unequal numbers of steps, or where a
        parameter of the model is trained that was unknown when it joined or has another dtype, shape or device now. A
        parameter that only has other memory now (`model.to(memory_format=...)`, an assignment to its `data`) is
        trained on with the values that it has there.
        """
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise ProtocolError(
                f"learner {self.rank}: step() takes a GradScaler or nothing, got {type(scaler).__name__}; it takes no "
                "closure: call backward() before it"
            )
        self._learner.make_step(scaler)

    @contextmanager
    def consensus(self, final: bool = False) -> Generator[None, None, None]:
        """Inside of it the model holds the mean of all learners' weights and floating-point buffers.

        By default that is the mean at this moment, and afterwards the model holds exactly what it held before. One
        learner may ask alone, and as often as it likes, while others compute: those that are still training have not
        finished, and another learner that asks gets the mean of another moment.

        With `final` it is the finished model, the same bits on all learners that ask for it: this learner has made its
        last step, waits until all others have (they call this, or `close`), and then holds the mean of all final
        weights, inside and from then on. After that there are no more steps; another `consensus` shows the same model.

        Raises `PeerLost` as `close` does, and warns if there were gradients and never a step.
        """
        with self._learner.consensus(final):
            yield

    def stats(self) -> LoopStats:
        """What this learner did so far."""
        learner = self._learner
        return LoopStats(
            steps=learner.num_steps,
            steps_skipped=learner.num_skipped,
            rounds=learner.averaging.rounds,
            rounds_per_gradient=learner.averaging.rounds / max(1, learner.num_steps),
            staleness=dict(sorted(learner.averaging.staleness.items())),
            bytes_sent=learner.bytes_sent,
            seconds_computing=learner.spent.computing,
            seconds_waiting=learner.spent.waiting_for_peers,
            consensus_distance=learner.consensus_distance,
        )

    def close(self) -> None:
        """Leave when everybody has closed; until then this learner goes on averaging and serving `consensus` calls.

        The model then holds this learner's own weights, or, after `consensus(final=True)`, the finished model. Calling
        it again does nothing. Raises `PeerLost` if a learner that is waited for ends, or makes no step for
        `timeout_seconds` before its last one; it may take longer between its last step and its `close`.
        """
        if self._is_closed:
            return
        try:
            self._learner.close()
            if self.world > 1:
                part(self._place.store, self.rank, self.world, self._timeout_seconds)
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
        """Tell the others, and wait for nobody. Connections stay as they are: threads may wait in them."""
        if self._is_closed:
            return
        self._is_closed = True
        self._learner.leave_optimizer()
        self._learner.fail(error or ProtocolError(f"learner {self.rank} ended without close()"))
        with suppress(DistError):  # the store may be gone, too
            self._learner.announce_failure(error)

    def _at_exit(self) -> None:
        """End a process whose learner has not closed: torch would wait for what its groups still wait for, and Python
        abort when a thread comes back from there."""
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
