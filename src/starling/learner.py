"""All that a strategy may ask for: the learner, and the handles of work that it has started.

A strategy is an `async def` over one `Learner`. It is not asyncio: an engine drives the coroutine. Starting work
returns a `Handle` at once; only `await` waits. On the `processes` engine time passes as it does, on the `virtual`
engine on a simulated clock; the text of the strategy is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from torch import Tensor


T = TypeVar("T")


class Handle(ABC, Generic[T]):
    """Work that was started; `await` waits for its result."""

    def __await__(self) -> Generator[Handle[Any], None, T]:
        yield self
        return self.result()

    @abstractmethod
    def result(self) -> T:
        """The result of finished work; raises what the work raised."""


class LoopEnded(Exception):  # noqa: N818 - it is no error
    """Raised where a strategy awaits a gradient that somebody's own training loop will not make: the loop has ended.

    A strategy whose learners have something to do after their last gradient suppresses it around its loop.
    """


class Shard(ABC):
    """A piece of the model in host memory with an optimizer of its own: a server's, or memory that learners share."""

    @property
    @abstractmethod
    def piece(self) -> slice:
        """Which piece of the weights `[P]` it is."""

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """How many steps were made on it, by whomever."""

    @abstractmethod
    def read(self) -> Handle[Tensor]:
        """Start copying the piece `[n]`."""

    @abstractmethod
    def step(self, gradient: Tensor, step_metadata: Tensor, read_at: Sequence[int], scale: float = 1.0) -> Handle[None]:
        """Start letting the optimizer change the piece by `gradient` `[n]`, which is of host memory.

        `stamp` is that of the learner whose gradient it is (or the last of those in it); `read_at` tells for each
        gradient in it what `num_steps` was when its weights were read; `scale` multiplies the learning rate.
        """


class Learner(ABC):
    """One of the learners that train a model together, as its strategy sees it.

    Weights and gradients are flat vectors `[P]` in one order on all learners. Weights change only through
    `step`, `apply` and `replace`, each atomic, so that work in the learner's background never loses an update.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """Who am I, in [0, world)."""

    @property
    @abstractmethod
    def world(self) -> int:
        """How many learners are there."""

    @property
    @abstractmethod
    def seed(self) -> int:
        """The seed of the run, the same on all learners: what they draw from it they agree on without a word."""

    @property
    @abstractmethod
    def weights(self) -> Tensor:
        """This learner's own model, flat, `[P]`; the model's parameters are views into it. Not to be written to."""

    @abstractmethod
    def claim(self) -> bool:
        """Take the next mini-batch from the budget shared by all; False once the budget is spent."""

    @property
    @abstractmethod
    def version(self) -> int:
        """How many changes were made to `weights`."""

    @property
    @abstractmethod
    def step_metadata(self) -> Tensor:
        """What a `Shard` must know of the claimed mini-batch, `[k]` of float64 in host memory: its learning rate and
        the like. k is the same on all learners and at all times."""

    @abstractmethod
    def gradient(self, at: Tensor) -> Handle[Tensor]:
        """Start computing the gradient `[P]` of the claimed mini-batch at the weights `at`.

        `at` is not to be changed before the handle was awaited: where something in the background changes `weights`,
        take the gradient at a `snapshot()`. The result is valid until the next gradient of this learner begins.
        """

    @abstractmethod
    def clip(self, gradient: Tensor) -> Tensor | None:
        """Shorten a gradient `[P]` in place to the longest that the run allows, as `step` does by itself.

        None for one that is not finite: it must make no step anywhere. `NonFiniteError` after many in a row.
        """

    @abstractmethod
    def mean(self, of: Tensor | Handle[Tensor], group: Sequence[int] | None = None) -> Handle[Tensor]:
        """Start averaging a vector, as it is now, over a group of learners (None: all), summed in rank order.

        A group other than all is the learner's own team: the learners that claim together with it. The result is not
        to be written to: learners may share it. A handle given to `mean` while its work is under way is not to be
        awaited for itself. The mean of a gradient's handle may begin before the gradient is complete: the `processes`
        engine reduces each part while the rest is still being computed, and then a backend chooses the order of the
        sum.
        """

    @abstractmethod
    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle[None]:
        """Start sending `tensor` to `peer`, which receives it under the same `tag`. A learner may send to itself.

        The tensor is not to be changed before the handle was awaited, and a `snapshot` of a piece not at all: a peer on
        the same machine may read it where it lies. Several of one tag arrive in their order.
        """

    @abstractmethod
    def receive(self, peer: int, like: Tensor, tag: int) -> Handle[Tensor]:
        """Start receiving what `peer` sends under `tag`, of the shape, dtype and device of `like`.

        The result is not to be written to: the peer may have lent it.
        """

    @abstractmethod
    def first(self, handles: Mapping[int, Handle[Any]]) -> Handle[int]:
        """Wait until one of `handles` is finished; its key. However long it takes, as long as all peers live.

        What is not finished may be waited for again, under the same key.
        """

    @abstractmethod
    def exchange(self, peer: int, tensor: Tensor, tag: int) -> Handle[Tensor]:
        """Start sending `tensor` to `peer` and receiving the one it sends, alike, under the same `tag`."""

    @abstractmethod
    def background(self, activity: Coroutine[Any, Any, None]) -> None:
        """Start a second coroutine of this learner, beside the first. An error in it ends the learner."""

    @abstractmethod
    def round(self, period: float) -> Handle[int | None]:
        """Wait for the next averaging round of the run; its number, or None after the last.

        All learners go through the same rounds, 0, 1, 2, …, and through equally many, whatever order they finish in.
        A round opens for everybody as soon as one learner has made `period` gradients for it: so a slow learner delays
        nobody's rounds, and about 1 / `period` rounds pass for each gradient of the fastest.
        """

    @abstractmethod
    def keep_up(self, most: float) -> Handle[None]:
        """Wait until this learner is less than `most` gradients ahead of the last round that its background completed.

        It waits for its own background, while that is in a round; never for a round to open, nor for another learner's
        gradient.
        """

    @abstractmethod
    def step(self, gradient: Tensor, read_at: int | None = None) -> None:
        """Let the local optimizer change `weights` by `gradient` `[P]`.

        `read_at` is what `version` was when the weights of the gradient were read; None: it is the newest gradient.
        """

    @abstractmethod
    def apply(self, delta: Tensor, piece: slice | None = None) -> None:
        """weights += delta; or a piece of them, as `pieces` cuts them."""

    @abstractmethod
    def replace(self, weights: Tensor, piece: slice | None = None) -> None:
        """Put `weights` `[P]`, or a piece `[n]` of them, in the place of this learner's own."""

    @abstractmethod
    def snapshot(self, piece: slice | None = None) -> Tensor:
        """A copy of `weights`, or of a piece of them."""

    @abstractmethod
    def pieces(self, largest: int, optimizer_state: bool = False) -> Sequence[slice]:
        """`weights` cut into pieces of at most `largest` numbers, so that each is changed and sent in little time.

        With `optimizer_state` the pieces of what the optimizer remembers about each weight (momentum, Adam's two
        moments) follow behind those of the weights, the same on all learners.
        """

    @abstractmethod
    def keep(self, piece: slice) -> Shard:
        """Keep a piece of the model on behalf of all learners, from this learner's weights on."""

    @abstractmethod
    def share(self, pieces: Sequence[slice]) -> Handle[Sequence[Shard]]:
        """Start sharing the model with all learners, in memory that everybody changes without a lock.

        It begins with learner 0's weights; optimizers are each learner's own. ConfigError unless all learners run on
        one machine.
        """
