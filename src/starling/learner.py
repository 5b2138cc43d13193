"""All that a strategy may use: the learner, and the handles of the work that it has started.

A strategy is an `async def` over one `Learner`. It is not asyncio: an engine drives the coroutine. Starting work
returns a `Handle` at once; only `await` waits. Time is real on the `processes` engine and simulated on the `virtual`
engine; the text of the strategy is the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Generator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class Handle(ABC, Generic[T]):
    """Work under way; `await` waits for its result."""

    def __await__(self) -> Generator["Handle[Any]", None, T]:
        yield self
        return self.result()

    @abstractmethod
    def result(self) -> T:
        """The result of finished work; raises the work's exception."""


class LoopEnded(Exception):  # noqa: N818 - it is no error
    """Raised where a strategy awaits a gradient that a user's training loop will not make, because the loop has ended.

    A strategy whose learners have work to do after their last gradient suppresses it around its loop.
    """


class Shard(ABC):
    """A piece of the model in host memory, with its own optimizer: a server's, or memory that learners share."""

    @property
    @abstractmethod
    def piece(self) -> slice:
        """Its place in the weights `[P]`."""

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """The number of steps made on it, by any learner."""

    @abstractmethod
    def read(self) -> Handle[Tensor]:
        """Start copying the piece `[n]`."""

    @abstractmethod
    def step(self, gradient: Tensor, step_metadata: Tensor, read_at: Sequence[int], scale: float = 1.0) -> Handle[None]:
        """Start changing the piece by `gradient` `[n]`, in host memory, with the optimizer.

        `step_metadata` is that of the learner whose gradient it is (of a sum, the last). `read_at` gives, for each
        gradient in it, `num_steps` when its weights were read; `scale` multiplies the learning rate.
        """


class Learner(ABC):
    """One of the learners that train a model together, as its strategy sees it.

    Weights and gradients are flat vectors `[P]` in one order on all learners. Weights change only through
    `step`, `apply` and `replace`, each atomic, so that work in the learner's background never loses an update.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """This learner's number, in [0, world)."""

    @property
    @abstractmethod
    def world(self) -> int:
        """The number of learners."""

    @property
    @abstractmethod
    def seed(self) -> int:
        """The seed of the run, the same on all learners: they agree on what they draw from it without a message."""

    @property
    @abstractmethod
    def weights(self) -> Tensor:
        """This learner's own model, flat, `[P]`; the model's parameters are views into it. Do not write to it."""

    @abstractmethod
    def claim(self) -> bool:
        """Take the next mini-batch from the budget shared by all; False once the budget is spent."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The number of changes made to `weights`."""

    @property
    @abstractmethod
    def step_metadata(self) -> Tensor:
        """What a `Shard` must know about the claimed mini-batch, such as its learning rate: `[k]` of float64 in host
        memory. k is the same on all learners and at all times."""

    @abstractmethod
    def gradient(self, at: Tensor) -> Handle[Tensor]:
        """Start computing the gradient `[P]` of the claimed mini-batch at the weights `at`.

        Do not change `at` before the handle was awaited: if the background changes `weights`, take the gradient at a
        `snapshot()`. The result is valid until this learner's next gradient begins.
        """

    @abstractmethod
    def clip(self, gradient: Tensor) -> Tensor | None:
        """Clip a gradient `[P]` in place to the norm that the run allows, as `step` does anyway.

        None for a non-finite gradient: it must make no step anywhere. `NonFiniteError` after many in a row.
        """

    @abstractmethod
    def mean(self, of: Tensor | Handle[Tensor], group: Sequence[int] | None = None) -> Handle[Tensor]:
        """Start averaging a vector, as it is now, over a group of learners (None: all), summed in rank order.

        A group other than all is the learner's own sync group. Do not write to the result: learners may share it. Do
        not await a handle that was given to `mean` while its work was under way. The mean of a gradient's handle may
        begin before the gradient is complete: the `processes` engine reduces each part while the rest is still being
        computed, and then a backend chooses the order of the sum.
        """

    @abstractmethod
    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle[None]:
        """Start sending `tensor` to `peer`, which receives it under the same `tag`. A learner may send to itself.

        Do not change the tensor before the handle was awaited, and a `snapshot` of a piece not at all: a peer on the
        same machine may read it in place. Messages under one tag arrive in order.
        """

    @abstractmethod
    def receive(self, peer: int, like: Tensor, tag: int) -> Handle[Tensor]:
        """Start receiving what `peer` sends under `tag`, with the shape, dtype and device of `like`.

        Do not write to the result: it may be the peer's memory.
        """

    @abstractmethod
    def first(self, handles: Mapping[int, Handle[Any]]) -> Handle[int]:
        """Wait until one of `handles` is finished; its key. There is no time-out as long as all peers live.

        Unfinished handles may be waited for again, under the same keys.
        """

    @abstractmethod
    def exchange(self, peer: int, tensor: Tensor, tag: int) -> Handle[Tensor]:
        """Start sending `tensor` to `peer` and receiving its tensor, of the same shape, under the same `tag`."""

    @abstractmethod
    def background(self, activity: Coroutine[Any, Any, None]) -> None:
        """Start a second coroutine of this learner, concurrent with the first. An error in it ends the learner."""

    @abstractmethod
    def round(self, period: float) -> Handle[int | None]:
        """Wait for the next averaging round of the run; its number, or None after the last.

        All learners go through the same rounds, 0, 1, 2, …, and through equally many, in whatever order they finish.
        A round opens for all as soon as one learner has made `period` gradients for it: so a slow learner delays no
        rounds, and about 1 / `period` rounds pass per gradient of the fastest learner.
        """

    @abstractmethod
    def keep_up(self, most: float) -> Handle[None]:
        """Wait until this learner is less than `most` gradients ahead of the last round that its background completed.

        It waits for its own background, while that is in a round, and never for a round to open or for another
        learner's gradient.
        """

    @abstractmethod
    def step(self, gradient: Tensor, read_at: int | None = None) -> None:
        """Change `weights` by `gradient` `[P]`, with the local optimizer.

        `read_at` was `version` when the weights of the gradient were read; None: it is the newest gradient.
        """

    @abstractmethod
    def apply(self, delta: Tensor, piece: slice | None = None) -> None:
        """weights += delta, for all weights or for a piece, as `pieces` cuts them."""

    @abstractmethod
    def replace(self, weights: Tensor, piece: slice | None = None) -> None:
        """Replace this learner's weights by `weights` `[P]`, or a piece of them by `[n]`."""

    @abstractmethod
    def snapshot(self, piece: slice | None = None) -> Tensor:
        """A copy of `weights`, or of a piece of them."""

    @abstractmethod
    def pieces(self, largest: int, optimizer_state: bool = False) -> Sequence[slice]:
        """`weights` cut into pieces of at most `largest` numbers, so that changing and sending each is quick.

        With `optimizer_state` the pieces of the optimizer's state for each weight (momentum, Adam's two moments)
        follow those of the weights, in the same order on all learners.
        """

    @abstractmethod
    def keep(self, piece: slice) -> Shard:
        """Keep a piece of the model for all learners, starting from this learner's weights."""

    @abstractmethod
    def share(self, pieces: Sequence[slice]) -> Handle[Sequence[Shard]]:
        """Start sharing the model with all learners, in memory that all of them change without a lock.

        It starts from learner 0's weights; each learner has its own optimizers. ConfigError unless all learners run on
        one machine.
        """
