"""The interface of strategies: the learner, and handles of work that it has started.

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
    """Work that has been started; `await` waits for its result."""

    def __await__(self) -> Generator[Handle[Any], None, T]:
        yield self
        return self.result()

    @abstractmethod
    def result(self) -> T:
        """The result of finished work; raises the exception that the work raised."""


class LoopEnded(Exception):  # noqa: N818 - not an error
    """Raised where a strategy awaits a gradient after the user's own training loop has ended.

    A strategy whose learners have work to do after their last gradient suppresses it around its loop.
    """


def divided(change: Tensor, rate: float | Tensor, at_rest: float | Tensor = 0.0) -> Tensor:
    """A change of weights `[n]` divided by their `Learner.learning_rate`; `at_rest` where that is 0, because steps have
    moved nothing there."""
    if isinstance(rate, float):
        return change / rate if rate else 0.0 * change + at_rest
    return (change / rate).where(rate != 0.0, at_rest)


class EncodedMean(ABC):
    """One learner's part in a mean of vectors that travel encoded: it encodes its messages, and decodes those it
    receives.

    Each of L learners owns one of L equal chunks. An engine sends `messages` to the owners, and the result of each
    owner's `combine` to all. It may call the methods in another thread, once each and in this order.
    """

    vector: Tensor
    """Vector that this learner averages, `[n]`. Without numbers, in a timing-only simulation, nothing is encoded."""
    message_bytes: int
    """Number of bytes of one encoded chunk."""

    @abstractmethod
    def messages(self) -> list[Tensor]:
        """Encode each owner's chunk: a message `[message_bytes]` for each learner, in the order of ranks; zeros for
        this learner."""

    @abstractmethod
    def combine(self, received: Sequence[Tensor]) -> Tensor:
        """Encode the mean of this learner's chunk, from the messages of all learners; its own place is not read."""

    @abstractmethod
    def result(self, combined: Sequence[Tensor]) -> Tensor:
        """The mean `[n]`, from the encoded means of all chunks."""


class Shard(ABC):
    """A model shard: a piece of the weights in host memory with its own optimizer, kept by a server or shared by all
    learners."""

    @property
    @abstractmethod
    def piece(self) -> slice:
        """The shard's place in the weights `[P]`."""

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

        If `gradient` combines several gradients, `step_metadata` is that of the newest one. `read_at` lists, for each
        of them, the value of `num_steps` when its weights were read. `scale` multiplies the learning rate.
        """


class Shards(ABC):
    """Operations for strategies whose model is kept in model shards, by servers or in memory that all learners
    share."""

    @abstractmethod
    def keep(self, piece: slice, make_optimizer: MakeOptimizer | None = None) -> Shard:
        """Keep a piece of the model for all learners, initialised with this learner's weights.

        Its optimizer is like the learner's own, with the learning rates of the schedule; or `make_optimizer` creates it
        for the piece's parameters, with constant rates.
        """

    @abstractmethod
    def share(self, pieces: Sequence[slice]) -> Handle[Sequence[Shard]]:
        """Start sharing the model with all learners, in memory that all change without a lock.

        It is initialised with learner 0's weights; each learner has its own optimizer. Raises ConfigError unless all
        learners are on one machine.
        """

    @abstractmethod
    def first(self, handles: Mapping[int, Handle[Any]]) -> Handle[int]:
        """Wait until one of `handles` is finished, and return its key. The wait has no time-out as long as all peers
        are alive.

        Unfinished handles may be passed again under the same key.
        """


class LocalOptimizer(ABC):
    """A learner's own optimizer, and the layout of the weights that it changes."""

    @property
    @abstractmethod
    def shapes(self) -> Sequence[torch.Size]:
        """The shapes of the parameters that are views into the weights, in their order; in an island, the shapes of
        this rank's parts. Empty in a timing-only simulation."""

    @abstractmethod
    def pieces(self, largest: int, state: bool = False) -> Sequence[slice]:
        """Divide the weights into pieces of at most `largest` numbers, so that each is changed and sent quickly.

        With `state`, pieces of the optimizer's state per weight (momentum, Adam's two moments) follow those of the
        weights. The pieces are the same on all learners.
        """

    @abstractmethod
    def learning_rate(self, piece: slice | None = None) -> float | Tensor:
        """The present learning rate, if it is the same for all weights; otherwise the rate of each weight `[P]`, or of
        each weight in a piece `[n]`. On Starling's own engines it is in units of its peak."""

    @property
    @abstractmethod
    def step_metadata(self) -> Tensor:
        """The step metadata of the claimed mini-batch, such as its learning rate: `[k]`, float64, in host memory. k is
        constant, and the same on all learners."""

    @abstractmethod
    def clip(self, gradient: Tensor) -> Tensor | None:
        """Clip a gradient `[P]` in place to the run's maximum norm. `Learner.step` clips its gradient itself.

        Returns None if the gradient is not finite: it must not be used anywhere. Raises `NonFiniteError` after too many
        such gradients in a row.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget everything that the optimizer keeps between its steps: its next step is that of a new optimizer."""


class Background(ABC):
    """A learner's second activity, and the averaging rounds that it makes.

    All learners take part in the same rounds 0, 1, 2, ….
    """

    @abstractmethod
    def start(self, activity: Coroutine[Any, Any, None]) -> None:
        """Start a second coroutine of this learner, concurrent with the first. An error in it ends the learner."""

    @abstractmethod
    def round(self, period: float) -> Handle[int | None]:
        """Wait for the next averaging round of the run; the result is its number, or None after the last one.

        A round opens for all learners as soon as one of them has made `period` gradients for it. So a slow learner
        delays no round, and there are about 1 / `period` rounds per gradient of the fastest learner.
        """

    @abstractmethod
    def keep_up(self, most: float) -> Handle[None]:
        """Wait until this learner has made fewer than `most` gradients since the last round that its background
        completed.

        It waits only while the background is in a round: never for a round to open, nor for another learner's gradient.
        """


class Exchange(Generic[T]):
    """A message that is being received while another is sent; `await` waits for both."""

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

    # who it is

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
        """The run's seed. It is the same on all learners, so that they draw the same numbers without communication."""

    # its mini-batches and steps

    @abstractmethod
    def claim(self) -> bool:
        """Take the next mini-batch from the budget that all learners share; False once it is spent.

        The result is the same for all learners of a sync group, which finish their last step together, beyond the
        budget if necessary.
        """

    @abstractmethod
    def gradient(self, at: Tensor) -> Handle[Tensor]:
        """Start computing the gradient `[P]` of the claimed mini-batch at the weights `at`.

        `at` must not change until the handle has been awaited: if a background coroutine changes `weights`, pass a
        `snapshot()`. The result is valid until this learner starts its next gradient.
        """

    @abstractmethod
    def step(self, gradient: Tensor, read_at: int | None = None, scale: float = 1.0) -> None:
        """Make a step of the local optimizer on `weights` with `gradient` `[P]`.

        `read_at` is the value of `version` when the gradient's weights were read. None uses that of the newest
        gradient. `scale` multiplies the learning rate.
        """

    # its weights

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
        """A copy of `weights`, or of a piece of them."""

    @abstractmethod
    def apply(self, delta: Tensor, piece: slice | None = None) -> None:
        """Add `delta` to the weights `[P]`, or to a piece of them, as returned by `optimizer.pieces`."""

    @abstractmethod
    def replace(self, weights: Tensor, piece: slice | None = None) -> None:
        """Overwrite this learner's weights with `weights` `[P]`, or a piece of them with `weights` `[n]`."""

    # messages

    @abstractmethod
    def mean(self, of: Tensor | Handle[Tensor] | EncodedMean, group: Sequence[int] | None = None) -> Handle[Tensor]:
        """Start averaging the present value of a vector over a group of learners (default: all), summed in rank order.

        A group must be the learner's own sync group. Do not write to the result: learners may share it. Do not await a
        handle after passing it to `mean`, unless its work was finished. The mean of a gradient's handle may start
        before the gradient is complete: the `processes` engine then reduces each part while the rest is still being
        computed, and the backend chooses the order of the sum.

        For vectors that travel encoded, `of` is this learner's part; the result `[n]` is then in host memory, and has
        the same bits on all learners and engines. Strategies use `strategies.parts.means`, which keeps the residuals.
        """

    @abstractmethod
    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle[None]:
        """Start sending `tensor` to `peer`, which receives it under the same `tag`. A learner may send to itself.

        The tensor must not change until the handle has been awaited. A `snapshot` of a piece must never change, because
        a peer on the same machine may read it in place. Messages with the same tag arrive in order.
        """

    @abstractmethod
    def receive(self, peer: int, like: Tensor, tag: int) -> Handle[Tensor]:
        """Start receiving a tensor that `peer` sends under `tag`, with the shape, dtype and device of `like`.

        Do not write to the result: it may be the peer's memory.
        """

    def exchange(self, peer: int, tensor: Tensor, tag: int) -> Awaitable[Tensor]:
        """Start sending `tensor` to `peer`, and receiving one of the same shape from it, both under `tag`."""
        receiving = self.receive(peer, tensor, tag)  # first, so that data flows in both directions at once
        return Exchange(receiving, self.send(peer, tensor, tag))

    # what it keeps, and what few strategies need

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

        Checkpoints save it, and a learner that resumes with the same strategy, the same options and the same number of
        learners gets the saved value instead of `initial`; any other begins with `initial`. After a membership change,
        all learners begin with the value of one of them if it `is_common`, otherwise each with its own, a joiner with
        `initial`; or all with `initial` if it is `for_membership`: for what learners must keep consistent between them.
        State that a learner keeps for itself beyond a membership, and changes with its weights in the background's
        rounds, is `of_rounds`. Learners whose common state is new must have equal weights, which engines check. Only a
        strategy that declares `keeps_state` may keep common state. Only one of its coroutines may write to a tensor, in
        place; state that the background writes `for_membership` or `of_rounds` is saved as it is between two rounds,
        with the weights.
        """

    @property
    @abstractmethod
    def optimizer(self) -> LocalOptimizer:
        """The learner's own optimizer, and the layout of the weights."""

    @property
    @abstractmethod
    def background(self) -> Background:
        """The learner's second activity, in which it may average while it computes."""

    @property
    @abstractmethod
    def shards(self) -> Shards:
        """The model shards that the learner keeps or shares."""
