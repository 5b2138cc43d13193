"""The interface that strategies use: the learner, and handles to the work that it has started.

A strategy is an `async def` over one `Learner`. It does not use asyncio: an engine drives the coroutine. Methods that
start work return a `Handle` at once; only `await` waits. The same strategy runs in real time on the `processes` engine
and in simulated time on the `virtual` engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


T = TypeVar("T")


class Handle(ABC, Generic[T]):
    """A handle to work that has been started. Awaiting the handle waits for the work and returns its result."""

    def __await__(self) -> Generator[Handle[Any], None, T]:
        yield self
        return self.result()

    @abstractmethod
    def result(self) -> T:
        """Return the result of finished work, or raise the exception that the work raised."""


class LoopEnded(Exception):  # noqa: N818 - not an error
    """Raised where a strategy awaits a gradient after the user's own training loop has ended.

    A strategy whose learners must still work after their last gradient suppresses this exception around its loop.
    """


def divided(change: Tensor, rate: float | Tensor, at_rest: float | Tensor = 0.0) -> Tensor:
    """Divide a change of weights `[n]` by their learning rate.

    Where the rate is 0, optimizer steps have not moved the weights, and the result is `at_rest`.
    """
    if isinstance(rate, float):
        return change / rate if rate else 0.0 * change + at_rest
    return (change / rate).where(rate != 0.0, at_rest)


class EncodedMean(ABC):
    """One learner's part in a mean of vectors that learners send in encoded form. It encodes the messages that the
    learner sends, and decodes those that the learner receives.

    A vector is divided into L equal chunks, and each of the L learners owns one of them. The engine sends `messages` to
    the owners, and the result of each owner's `combine` to all learners. It calls `messages`, `combine` and `result`
    once each, in this order, possibly in a different thread.
    """

    vector: Tensor
    """Vector `[n]` that this learner averages. In a timing-only simulation it has no values, and nothing is encoded."""
    message_bytes: int
    """Number of bytes of one encoded chunk."""

    @abstractmethod
    def messages(self) -> list[Tensor]:
        """Encode the chunk of each owner. Return one message `[message_bytes]` for each learner, in rank order; the
        message for this learner itself contains zeros."""

    @abstractmethod
    def combine(self, received: Sequence[Tensor]) -> Tensor:
        """Encode the mean of the chunk that this learner owns. `received` has one message from each learner, in rank
        order; the entry of this learner itself is not read."""

    @abstractmethod
    def result(self, combined: Sequence[Tensor]) -> Tensor:
        """Decode the mean `[n]` from the encoded means of all chunks."""


class Shard(ABC):
    """A model shard: a piece of the weights in host memory, with an optimizer of its own. A server keeps the shard, or
    all learners share it."""

    @property
    @abstractmethod
    def piece(self) -> slice:
        """The slice of the weights `[P]` that this shard contains."""

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """The number of optimizer steps that all learners have made on the shard."""

    @abstractmethod
    def read(self) -> Handle[Tensor]:
        """Start copying the shard's weights `[n]`."""

    @abstractmethod
    def step(self, gradient: Tensor, step_metadata: Tensor, read_at: Sequence[int], scale: float = 1.0) -> Handle[None]:
        """Start an optimizer step on the shard with `gradient` `[n]`, which is in host memory.

        If `gradient` combines several gradients, `step_metadata` belongs to the newest of them. For each of the
        combined gradients, `read_at` contains the value of `num_steps` when the weights for that gradient were read.
        `scale` multiplies the learning rate.
        """

    @abstractmethod
    def change(self, how: Callable[[Any], None]) -> Handle[None]:
        """Start calling `how` with the shard's optimizer, and with the optimizers of its copies at checkpoint
        barriers."""


class Shards(ABC):
    """Operations for strategies that divide the model into model shards. The shards are kept by servers, or in memory
    that all learners share."""

    @abstractmethod
    def keep(self, piece: slice, make_optimizer: MakeOptimizer | None = None) -> Shard:
        """Keep a piece of the model for all learners, as their server. The piece is initialised with this learner's
        weights.

        By default, the optimizer of the piece is like the learner's own and follows the learning rate schedule. If
        `make_optimizer` is given, it creates the optimizer for the piece's parameters, and learning rates are constant.
        """

    @abstractmethod
    def share(self, pieces: Sequence[slice]) -> Handle[Sequence[Shard]]:
        """Start sharing the model with all learners, in memory that all of them change without a lock.

        The shared model is initialised with the weights of learner 0. Each learner has its own optimizer. Raises
        ConfigError unless all learners are on one machine.
        """

    @abstractmethod
    def mini_batch(self, worker: int, step_metadata: Tensor) -> int | None:
        """Return the number, within the whole run, of the mini-batch of a worker that has this step metadata.

        After a loss, a mini-batch that is not known to be done is computed again, and has the same number again. None
        if the engine computes no mini-batch again.
        """

    @abstractmethod
    def first(self, handles: Mapping[int, Handle[Any]]) -> Handle[int]:
        """Wait until one of `handles` is finished, and return its key. The wait does not time out while all peers are
        alive.

        A later call may include the unfinished handles again, under the same keys.
        """


class LocalOptimizer(ABC):
    """A learner's own optimizer, and the layout of the weights that it changes."""

    @property
    @abstractmethod
    def shapes(self) -> Sequence[torch.Size]:
        """The shapes of the parameters that are views into the weights, in the order of the weights. In an island,
        these are the shapes of this rank's parts of the parameters. Empty in a timing-only simulation."""

    @abstractmethod
    def pieces(self, largest: int, state: bool = False) -> Sequence[slice]:
        """Divide the weights into pieces of at most `largest` elements, so that each piece can be changed and sent
        quickly.

        With `state`, the pieces of the weights are followed by pieces of the optimizer's per-weight state, such as
        momentum or Adam's two moments. The pieces are the same on all learners.
        """

    @abstractmethod
    def learning_rate(self, piece: slice | None = None) -> float | Tensor:
        """Return the present learning rate as a number if all weights have the same rate. Otherwise return a tensor
        with the rate of each weight `[P]`, or of each weight in `piece` `[n]`. On Starling's own engines, rates are in
        units of the peak learning rate."""

    @property
    @abstractmethod
    def step_metadata(self) -> Tensor:
        """Return the step metadata of the claimed mini-batch, such as its learning rate. The result is a float64 tensor
        `[k]` in host memory, where k is constant and the same on all learners."""

    @abstractmethod
    def clip(self, gradient: Tensor) -> Tensor | None:
        """Clip a gradient `[P]` in place to the run's maximum norm. `Learner.step` clips its gradient itself.

        Returns None if the gradient is not finite. Such a gradient must not be used anywhere. Raises `NonFiniteError`
        after too many non-finite gradients in a row.
        """

    @abstractmethod
    def reset(self) -> None:
        """Clear the optimizer's state, so that its next step equals the first step of a new optimizer."""


class Background(ABC):
    """A learner's second coroutine, and the averaging rounds in which it takes part.

    All learners take part in the same rounds, which are numbered 0, 1, 2, ….
    """

    @abstractmethod
    def start(self, activity: Coroutine[Any, Any, None]) -> None:
        """Start a second coroutine of this learner, which runs concurrently with the first. An error in the second
        coroutine ends the learner."""

    @abstractmethod
    def round(self, period: float) -> Handle[int | None]:
        """Wait for the next averaging round of the run. The result is the number of the round, or None after the last
        one.

        A round opens for all learners as soon as one of them has computed `period` gradients since the previous round.
        A slow learner therefore delays no round, and there are about 1 / `period` rounds for each gradient of the
        fastest learner.
        """

    @abstractmethod
    def keep_up(self, most: float) -> Handle[None]:
        """Wait until this learner has computed fewer than `most` gradients since the last round that its background
        completed.

        The learner waits only while its background is in a round. It never waits for a round to open or for another
        learner's gradient.
        """


class Exchange(Generic[T]):
    """A message that is being received while another one is being sent. Awaiting the exchange waits for both, and
    returns the received message."""

    def __init__(self, receiving: Handle[T], sending: Handle[None]) -> None:
        self._receiving, self._sending = receiving, sending

    def __await__(self) -> Generator[Handle[Any], None, T]:
        received = yield from self._receiving.__await__()
        yield from self._sending.__await__()
        return received


class Learner(ABC):
    """One of the learners that train a model together, as seen by its strategy.

    Weights and gradients are flat vectors `[P]`, in the same order on all learners. Weights change only through `step`,
    `apply` and `replace`, which are atomic, so that a background coroutine never loses an update.
    """

    # identity

    @property
    @abstractmethod
    def rank(self) -> int:
        """This learner's rank, in [0, world)."""

    @property
    @abstractmethod
    def world(self) -> int:
        """The number of learners, L."""

    @property
    @abstractmethod
    def seed(self) -> int:
        """The run's seed. All learners have the same seed, so they draw the same random numbers without
        communicating."""

    # mini-batches and steps

    @abstractmethod
    def claim(self) -> bool:
        """Claim the next mini-batch from the budget that all learners share. Return False once the budget is spent.

        The result is the same for all learners of a sync group, so that they finish their last step together. That step
        may exceed the budget.
        """

    @abstractmethod
    def gradient(self, at: Tensor) -> Handle[Tensor]:
        """Start computing the gradient `[P]` of the claimed mini-batch at the weights `at`.

        `at` must not change until the handle has been awaited. If a background coroutine changes `weights`, pass a
        `snapshot()`. The result is valid until this learner starts to compute its next gradient.
        """

    @abstractmethod
    def step(self, gradient: Tensor, read_at: int | None = None, scale: float = 1.0) -> None:
        """Make a step of the local optimizer on `weights` with `gradient` `[P]`.

        `read_at` is the value of `version` when the weights for this gradient were read. If it is None, the value for
        the newest gradient is used. `scale` multiplies the learning rate.
        """

    # weights

    @property
    @abstractmethod
    def weights(self) -> Tensor:
        """This learner's weights `[P]`; the model's parameters are views into them. Do not write to them directly."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The number of changes that have been made to `weights`."""

    @abstractmethod
    def snapshot(self, piece: slice | None = None) -> Tensor:
        """Return a copy of `weights`, or of one piece of them."""

    @abstractmethod
    def apply(self, delta: Tensor, piece: slice | None = None) -> None:
        """Add `delta` to the weights `[P]`, or to one of the pieces that `optimizer.pieces` returns."""

    @abstractmethod
    def replace(self, weights: Tensor, piece: slice | None = None) -> None:
        """Overwrite all weights of this learner with `weights` `[P]`, or one piece of them with `weights` `[n]`."""

    # messages

    @abstractmethod
    def mean(self, of: Tensor | Handle[Tensor] | EncodedMean, group: Sequence[int] | None = None) -> Handle[Tensor]:
        """Start averaging the present value of a vector over a group of learners. The default group is all learners.
        Vectors are added in rank order.

        `group` must be the learner's own sync group. Do not write to the result, because learners may share its memory.
        Do not await a handle after passing it to `mean`, unless its work was already finished. If `of` is the handle of
        a gradient, averaging may start before the gradient is complete. The `processes` engine then reduces each part
        while the rest is still being computed, and the backend chooses the order of the sum.

        If `of` is an `EncodedMean`, learners send their vectors in encoded form. The result `[n]` is then in host
        memory, and is bit-identical on all learners and engines. Strategies do not make such objects themselves: they
        use `strategies.parts.means`, which also keeps the residuals.
        """

    @abstractmethod
    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle[None]:
        """Start sending `tensor` to `peer`, which receives it under the same `tag`. A learner may send to itself.

        Do not change the tensor until the handle has been awaited. Never change a `snapshot` of a piece after sending
        it, because a peer on the same machine may read it in place. Messages with the same tag arrive in order.
        """

    @abstractmethod
    def receive(self, peer: int, like: Tensor, tag: int) -> Handle[Tensor]:
        """Start receiving a tensor that `peer` sends under `tag`, with the shape, dtype and device of `like`.

        Do not write to the result, because it may be the peer's memory.
        """

    def exchange(self, peer: int, tensor: Tensor, tag: int) -> Awaitable[Tensor]:
        """Start sending `tensor` to `peer` and receiving a tensor of the same shape from that peer, both under
        `tag`."""
        receiving = self.receive(peer, tensor, tag)  # first, so that data flows in both directions at once
        return Exchange(receiving, self.send(peer, tensor, tag))

    # saved state, and operations that few strategies need

    @abstractmethod
    def strategy_state(
        self,
        name: str,
        initial: Tensor,
        is_common: bool = True,
        for_membership: bool = False,
        of_rounds: bool = False,
    ) -> Tensor:
        """A tensor that the strategy keeps between its steps, such as an outer momentum; initially a copy of `initial`.

        Checkpoints save the tensor. If a run resumes with the same strategy, options and number of learners, each
        learner gets the saved value; otherwise it begins with `initial`.

        After a membership change, the flags determine the value:

        * `is_common`: all learners begin with the value of one of them. If their common state is new, they must have
          equal weights, which engines check. Raises ProtocolError if the strategy does not declare `keeps_state`.
        * not `is_common`: each learner begins with its own value, and a joiner with `initial`.
        * `for_membership`: all learners begin with `initial`. Use this for state that must be consistent between
          learners.

        Set `of_rounds` for state that a learner keeps for itself beyond a membership, and that its background changes
        in the averaging rounds together with the weights.

        Only one of the strategy's coroutines may write to the tensor, and only in place. State that the background
        writes, `for_membership` or `of_rounds`, is saved together with the weights, with the value that it has between
        two rounds.
        """

    @property
    @abstractmethod
    def optimizer(self) -> LocalOptimizer:
        """The learner's own optimizer, and the layout of the weights."""

    @property
    @abstractmethod
    def background(self) -> Background:
        """The learner's second coroutine, in which it may average while it computes gradients."""

    @property
    @abstractmethod
    def shards(self) -> Shards:
        """The model shards that the learner keeps or shares."""
