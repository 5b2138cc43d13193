"""Everything a strategy may use: the learner, and the handles of work that it has started.

A strategy is an `async def` over one `Learner`. It is not asyncio: an engine drives the coroutine. Starting work
returns a `Handle` at once; only `await` waits. Time is real on the `processes` engine and simulated on the `virtual`
engine; the text of the strategy is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from torch import Tensor


T = TypeVar("T")


class Handle(ABC, Generic[T]):
    """Work that has been started; `await` waits for its result."""

    def __await__(self) -> Generator[Handle[Any], None, T]:
        yield self
        return self.result()

    @abstractmethod
    def result(self) -> T:
        """The result of finished work; raises what the work raised."""


class LoopEnded(Exception):  # noqa: N818 - it is no error
    """Raised where a strategy awaits a gradient that the user's own training loop will not make: the loop has ended.

    A strategy whose learners have work to do after their last gradient suppresses it around its loop.
    """


class Shard(ABC):
    """A piece of the model in host memory with its own optimizer: a server's, or memory that learners share."""

    @property
    @abstractmethod
    def piece(self) -> slice:
        """Its place in the weights `[P]`."""

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """The number of steps made on it, by all learners."""

    @abstractmethod
    def read(self) -> Handle[Tensor]:
        """Start copying the piece `[n]`."""

    @abstractmethod
    def step(self, gradient: Tensor, step_metadata: Tensor, read_at: Sequence[int], scale: float = 1.0) -> Handle[None]:
        """Start letting the optimizer change the piece by `gradient` `[n]`, which is in host memory.

        `step_metadata` is that of the learner whose gradient it is (or of the newest gradient in it). `read_at` holds,
        for each gradient in it, what `num_steps` was when its weights were read. `scale` multiplies the learning rate.
        """


class Learner(ABC):
    """One of the learners that train a model together, as its strategy sees it.

    Weights and gradients are flat vectors `[P]`, in the same order on all learners. Weights change only through `step`,
    `apply` and `replace`, each atomic, so that work in the learner's background never loses an update.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """This learner's number, in [0, world)."""

    @property
    @abstractmethod
    def world(self) -> int:
        """The number of learners, L."""

    @property
    @abstractmethod
    def seed(self) -> int:
        """The seed of the run, the same on all learners: they agree on what they draw from it without communication."""

    @property
    @abstractmethod
    def weights(self) -> Tensor:
        """This learner's own model, flat, `[P]`; the model's parameters are views into it. Do not write to it."""

    @abstractmethod
    def claim(self) -> bool:
        """Take the next mini-batch from the budget that all learners share; False once it is spent."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The number of changes made to `weights`."""

    @property
    @abstractmethod
    def step_metadata(self) -> Tensor:
        """What a `Shard` must know about the claimed mini-batch, such as its learning rate: `[k]` of float64 in host
        memory. k is the same on all learners and never changes."""

    @abstractmethod
    def gradient(self, at: Tensor) -> Handle[Tensor]:
        """Start computing the gradient `[P]` of the claimed mini-batch at the weights `at`.

        `at` must not change before the handle has been awaited: if the background changes `weights`, take the gradient
        at a `snapshot()`. The result is valid until the next gradient of this learner begins.
        """

    @abstractmethod
    def clip(self, gradient: Tensor) -> Tensor | None:
        """Shorten a gradient `[P]` in place to the longest that the run allows; `step` does this to its own.

        None for one that is not finite: it must make no step anywhere. `NonFiniteError` after many in a row.
        """

    @abstractmethod
    def mean(self, of: Tensor | Handle[Tensor], group: Sequence[int] | None = None) -> Handle[Tensor]:
        """Start averaging a vector, as it is now, over a group of learners (None: all), summed in rank order.

        A group other than all must be the learner's own sync group: the learners that claim together with it. Do not
        write to the result: learners may share it. Do not await a handle after giving it to `mean`, unless its work was
        finished. The mean of a gradient's handle may begin before the gradient is complete: the `processes` engine
        reduces each part while the rest is still being computed, and then a backend chooses the order of the sum.
        """

    @abstractmethod
    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle[None]:
        """Start sending `tensor` to `peer`, which receives it under the same `tag`. A learner may send to itself.

        The tensor must not change before the handle has been awaited, and a `snapshot` of a piece never: a peer on the
        same machine may read it in place. Messages under one tag arrive in order.
        """

    @abstractmethod
    def receive(self, peer: int, like: Tensor, tag: int) -> Handle[Tensor]:
        """Start receiving what `peer` sends under `tag`, of the shape, dtype and device of `like`.

        Do not write to the result: the peer may have lent it.
        """

    @abstractmethod
    def first(self, handles: Mapping[int, Handle[Any]]) -> Handle[int]:
        """Wait until one of `handles` is finished, and return its key. There is no time-out while all peers live.

        Unfinished handles may be waited for again, under the same key.
        """

    @abstractmethod
    def exchange(self, peer: int, tensor: Tensor, tag: int) -> Handle[Tensor]:
        """Start sending `tensor` to `peer`, and receiving one of the same shape from it, both under `tag`."""

    @abstractmethod
    def background(self, activity: Coroutine[Any, Any, None]) -> None:
        """Start a second coroutine of this learner, beside the first. An error in it ends the learner."""

    @abstractmethod
    def round(self, period: float) -> Handle[int | None]:
        """Wait for the next averaging round of the run; its number, or None after the last.

        All learners go through the same rounds, 0, 1, 2, …, and equally many of them, in whatever order they finish. A
        round opens for all learners as soon as one has made `period` gradients for it. So a slow learner delays no
        rounds, and about 1 / `period` rounds pass for each gradient of the fastest.
        """

    @abstractmethod
    def keep_up(self, most: float) -> Handle[None]:
        """Wait until this learner is less than `most` gradients ahead of the last round that its background completed.

        It waits for its own background while that is in a round; never for a round to open, and never for another
        learner's gradient.
        """

    @abstractmethod
    def step(self, gradient: Tensor, read_at: int | None = None) -> None:
        """Let the local optimizer change `weights` by `gradient` `[P]`.

        `read_at` is what `version` was when the weights of the gradient were read. None: it is the newest gradient.
        """

    @abstractmethod
    def apply(self, delta: Tensor, piece: slice | None = None) -> None:
        """weights += delta, or the same for a piece of them, as `pieces` cuts them."""

    @abstractmethod
    def replace(self, weights: Tensor, piece: slice | None = None) -> None:
        """Overwrite this learner's weights with `weights` `[P]`, or a piece of them with `[n]`."""

    @abstractmethod
    def snapshot(self, piece: slice | None = None) -> Tensor:
        """A copy of `weights`, or of a piece of them."""

    @abstractmethod
    def pieces(self, largest: int, optimizer_state: bool = False) -> Sequence[slice]:
        """`weights` cut into pieces of at most `largest` numbers, so that each is changed and sent quickly.

        With `optimizer_state`, pieces of what the optimizer remembers about each weight (momentum, Adam's two moments)
        follow those of the weights, the same on all learners.
        """

    @abstractmethod
    def keep(self, piece: slice) -> Shard:
        """Keep a piece of the model on behalf of all learners, beginning with this learner's weights."""

    @abstractmethod
    def share(self, pieces: Sequence[slice]) -> Handle[Sequence[Shard]]:
        """Start sharing the model with all learners, in memory that all change without a lock.

        It begins with learner 0's weights; each learner has its own optimizer. ConfigError unless all learners run on
        one machine.
        """
