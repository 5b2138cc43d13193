"""All that a strategy may ask for: the learner, and the handles of work that it has started.

A strategy is an `async def` over one `Learner`. It is not asyncio: an engine drives the coroutine. Starting work
returns a `Handle` at once; only `await` waits. On the `processes` engine time passes as it does, on the `virtual`
engine on a simulated clock; the text of the strategy is the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class Handle(ABC, Generic[T]):
    """Work that was started; `await` waits for its result."""

    def __await__(self) -> Generator["Handle[Any]", None, T]:
        yield self
        return self.result()

    @abstractmethod
    def result(self) -> T:
        """The result of finished work; raises what the work raised."""


class Learner(ABC):
    """One of the learners that train a model together, as its strategy sees it.

    Weights and gradients are flat vectors `[P]` in the order of `model.parameters()`. Weights change only through
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
    def weights(self) -> Tensor:
        """This learner's own model, flat, `[P]`; the model's parameters are views into it. Not to be written to."""

    @abstractmethod
    def claim(self) -> bool:
        """Take the next mini-batch from the budget shared by all; False once the budget is spent."""

    @abstractmethod
    def gradient(self, at: Tensor) -> Handle[Tensor]:
        """Start computing the gradient `[P]` of the claimed mini-batch at the weights `at`, as they are now.

        The result is valid until the next gradient of this learner begins.
        """

    @abstractmethod
    def mean(self, of: Tensor | Handle[Tensor]) -> Handle[Tensor]:
        """Start averaging a vector `[P]`, as it is now, over all learners: (1/L) sum_l of_l, summed in rank order.

        The result is not to be written to: learners may share it. A handle given to `mean` while its work is under
        way is not to be awaited for itself. The mean of a gradient's handle may begin before the gradient is complete:
        the `processes` engine reduces each part while the rest is still being computed, and then a backend chooses the
        order of the sum.
        """

    @abstractmethod
    def exchange(self, peer: int, tensor: Tensor, tag: int) -> Handle[Tensor]:
        """Start sending `tensor`, as it is now, to `peer` and receiving the one it sends under the same `tag`.

        Both are of one shape and dtype. Several of one tag meet in the order in which they began.
        """

    @abstractmethod
    def step(self, gradient: Tensor) -> None:
        """Let the local optimizer change `weights` by `gradient` `[P]`."""

    @abstractmethod
    def apply(self, delta: Tensor) -> None:
        """weights += delta."""

    @abstractmethod
    def replace(self, weights: Tensor) -> None:
        """Put `weights` `[P]` in the place of this learner's own."""

    @abstractmethod
    def snapshot(self) -> Tensor:
        """A copy of `weights`."""
