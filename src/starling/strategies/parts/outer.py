"""The effects of an agreement on the weights, through the outer optimizer, and on the learners' own optimizer state."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Literal

from starling.learner import Learner, divided
from starling.strategies.parts.means import Means

if TYPE_CHECKING:
    from torch import Tensor


OptimizerState = Literal["local", "averaged", "reset"]
"""Treatment of momentum and Adam's moments. They stay with each learner, are averaged like weights, or are discarded
together with the step count, so that the next step is the first step of a new optimizer."""


class AgreedState:
    """Applies the effect of agreements to the state of a learner's optimizer."""

    def __init__(self, me: Learner, what: OptimizerState) -> None:
        self._me, self._is_reset = me, what == "reset"
        self._vectors = me.optimizer.pieces(len(me.weights), True)[1:] if what == "averaged" else []

    async def agree(self) -> None:
        """Apply the effect of an agreement to the state."""
        if self._is_reset:
            self._me.optimizer.reset()
        for vector in self._vectors:
            self._me.replace(await self._me.mean(self._me.snapshot(vector)), vector)


class Outer:
    """theta, the weights on which learners last agreed, and the momentum v with which it follows the mean of their
    weights.

    Equation, with D = theta - (1/L) sum_l x_l, eta the rate and beta the momentum::

        v <- beta v + D
        theta <- theta - eta v                    (classical momentum)
        theta <- theta - eta (D + beta v)         (Nesterov's)

    After a step for all weights at once, the caller replaces its weights by theta. A learner that lost a peer, and
    missed a mean that others received, begins the next membership with theta, which includes its own part. A joiner
    also begins with theta.

    With eta = 1 and beta = 0, theta is bit-identical to the mean. It is then kept only if the method needs it, or if
    `means` are encoded. In the latter case learners send theta - x_l, and D is the mean of the decoded messages. v is
    kept only if beta > 0.
    """

    def __init__(
        self,
        me: Learner,
        means: Means,
        rate: float = 1.0,
        momentum: float = 0.0,
        nesterov: bool = False,
        is_common: bool = True,
        keeps_theta: bool = False,
    ) -> None:
        """Begin with theta equal to the learner's weights. `is_common` is False if each learner has a separate theta;
        `keeps_theta` is True if a method needs theta."""
        import torch

        self._me, self._means, self._rate, self._momentum, self._nesterov = me, means, rate, momentum, nesterov
        self._is_mean = rate == 1.0 and momentum == 0.0 and not (means.are_encoded or keeps_theta)
        if not self._is_mean:
            self.theta = me.strategy_state("theta", me.weights, is_common)
            """theta `[P]`. The attribute does not exist if theta is always the mean."""
            self._num_steps = me.strategy_state("outer steps", torch.zeros(1, dtype=torch.int64))
            self._num_taken = me.strategy_state("taken", torch.zeros(1, dtype=torch.int64), is_common=False)
            if is_common and self._num_taken < self._num_steps:
                me.replace(self.theta)
                self._num_taken.copy_(self._num_steps)
            if momentum:
                self._v = me.strategy_state("momentum", me.weights.new_zeros(len(me.weights)), is_common)

    def mean(self, piece: slice | None = None, x: Tensor | None = None) -> Awaitable[Tensor]:
        """Start averaging this learner's weights, or a piece of them, or x `[n]` in their place. The result is the mean
        or, if theta - x_l is sent encoded, D; pass it to `step`."""
        x = self._me.snapshot(piece) if x is None else x
        return self._means.start(self.theta[piece or slice(None)] - x if self._means.are_encoded else x, piece)

    def step(self, mean: Tensor, piece: slice | None = None, a: float | Tensor | None = None) -> Tensor:
        """Make a step of theta, or of a piece, with the result of `mean`, and return theta `[n]`, which is changed in
        place. With a learning rate `a`, v is in units of `a`: v <- beta v + D / a, theta <- theta - eta a v."""
        if self._is_mean:
            return mean
        if piece is None:
            self._num_steps.add_(1)
            self._num_taken.copy_(self._num_steps)
        rate: float | Tensor = self._rate
        beta = self._momentum
        theta = self.theta[piece or slice(None)]
        difference = mean if self._means.are_encoded else theta - mean
        if a is not None:
            difference, rate = divided(difference, a), rate * a
        if not beta:
            return theta.sub_(rate * difference)
        v = self._v[piece or slice(None)]
        v.mul_(beta).add_(difference)  # in place: of a large model, each vector made on the way costs as much as these
        return theta.sub_((beta * v).add_(difference).mul_(rate) if self._nesterov else rate * v)
