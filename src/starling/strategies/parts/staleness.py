"""Corrections of a gradient that was computed at older weights, each with its equation.

In the equations, w is the weights to be changed, Phi the weights at which the gradient g was computed, and g' the
gradient that replaces g in the step. Without staleness, w is Phi, and g' is bit-identical to g. On a server, w is the
server's piece, which other workers' gradients have changed. On a learner of `adpsgd`, w is the learner's own weights,
which averaging has changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from starling.configuration import Config

if TYPE_CHECKING:
    from torch import Tensor

    from starling.learner import Learner

EPSILON = 1e-7
"""Constant that is added to mean squares."""


class DelayCompensation(Config):
    """Correct gradients to first order for how far the weights have moved (DC-ASGD)."""

    delay_compensation: float = Field(gt=0.0)
    """lambda. The paper uses 0.04, and 2 with `mean_square`."""
    mean_square: float | None = Field(default=None, ge=0.0, lt=1.0)
    """rho. For each weight, lambda is divided by the root of the running mean square of the gradient. With null, lambda
    is not divided."""


Staleness = Literal["none", "gap-aware"] | DelayCompensation
"""Correction of stale gradients."""


class Correction(ABC):
    """Corrects gradients. Within a membership, it keeps the weights at which each worker may be computing. All other
    data that a rule keeps are part of a learner's own state."""

    DROPPED: ClassVar[tuple[str, ...]] = ("_given",)

    def __init__(self) -> None:
        self._given: dict[int, list[tuple[float, Tensor]]] = {}

    def gave(self, worker: int, age: float, weights: Tensor) -> None:
        """Record that a worker is sent these weights `[n]`, which must not change afterwards. `age` is the number of
        steps that they include."""
        self._given.setdefault(worker, []).append((age, weights))

    def correct(self, worker: int, age: float, gradient: Tensor, now: Tensor) -> Tensor:
        """Return the corrected gradient of a worker, which computed the gradient at weights of the given age."""
        given = [each for each in self._given[worker] if each[0] >= age]  # not saved: a resumed worker pulls first
        self._given[worker] = given
        return self.corrected(gradient, now - given[0][1])

    @abstractmethod
    def corrected(self, gradient: Tensor, moved: Tensor) -> Tensor:
        """Return the corrected gradient g', given g and w - Phi, both `[n]`."""

    def before_step(self, now: Tensor) -> None:  # noqa: B027 - most rules ignore it
        """Record that a step follows at the weights `now`, which are the result of the previous step."""

    def stepped(self, before: Tensor, after: Tensor) -> None:  # noqa: B027 - most rules ignore it
        """Record that a step has changed the weights from `before` to `after`."""


class Compensation(Correction):
    """Correct a gradient to first order for how far the weights have moved.

    Equation, with lambda constant or, if rho is given, separate for each weight::

        g' = g + lambda g g (w - Phi)
        m <- rho m + (1 - rho) g g,  lambda <- lambda_0 / sqrt(m + epsilon)

    with lambda_0 the option `delay_compensation`, rho `mean_square`, m the mean square of gradients, initially 0. g g
    approximates the diagonal of the loss's second derivative. A weight without a gradient stays without one.

    References:
        Zheng et al. 2017, "Asynchronous Stochastic Gradient Descent with Delay Compensation", arXiv 1609.08326
        (Algorithm 2; DC-ASGD-c, and with rho DC-ASGD-a).
    """

    def __init__(self, options: DelayCompensation, me: Learner) -> None:
        super().__init__()
        self._options, self._me = options, me
        self._mean_square: Tensor | None = None

    def corrected(self, gradient: Tensor, moved: Tensor) -> Tensor:
        change = gradient * gradient * moved * self._options.delay_compensation
        if (rho := self._options.mean_square) is not None:
            if self._mean_square is None:
                zeros = gradient.new_zeros(len(gradient))
                self._mean_square = self._me.strategy_state("staleness mean square", zeros, is_common=False)
            self._mean_square.mul_(rho).add_(gradient * gradient * (1.0 - rho))
            change = change / (self._mean_square + EPSILON) ** 0.5
        if gradient.is_meta:
            return gradient
        return (gradient + change).where(gradient != 0.0, gradient)  # -0.0 means that there is no gradient


class GapAware(Correction):
    """Divide a gradient by how far the weights have moved, in steps.

    Equation, with C the mean length of the steps that the server, or this learner, has made so far::

        g' = g / (1 + |w - Phi| / C)

    The gap |w - Phi| / C is about the staleness if all steps have the same direction, and smaller if they turn. The
    paper derives C from the optimizer's momentum, and has a variant for each weight.

    References:
        Barkai, Hakimi & Schuster 2019, "Gap Aware Mitigation of Gradient Staleness", arXiv 1909.10802.
    """

    DROPPED = (*Correction.DROPPED, "_before")

    def __init__(self, me: Learner) -> None:
        import torch

        super().__init__()
        self._before: Tensor | None = None  # the step that begins there is not counted if the server is saved now
        zeros = torch.zeros(2, dtype=torch.float64)
        self._steps = me.strategy_state("staleness steps", zeros, is_common=False)  # their number and whole length

    def before_step(self, now: Tensor) -> None:
        if self._before is not None:
            self.stepped(self._before, now)
        self._before = now

    def stepped(self, before: Tensor, after: Tensor) -> None:
        if not after.is_meta:
            self._steps += self._steps.new_tensor([1.0, float((after - before).norm())])

    def corrected(self, gradient: Tensor, moved: Tensor) -> Tensor:
        if moved.is_meta:
            return gradient
        distance = float(moved.norm())
        num_steps, length = float(self._steps[0]), float(self._steps[1])
        if distance == 0.0 or length == 0.0:
            return gradient
        return gradient / (1.0 + distance * num_steps / length)


def correction(staleness: Staleness, me: Learner) -> Correction | None:
    """Return the correction that a learner makes, or None if gradients are used without correction."""
    if isinstance(staleness, DelayCompensation):
        return Compensation(staleness, me)
    return GapAware(me) if staleness == "gap-aware" else None


def rate_scale(staleness: float) -> float:
    """Return the factor that divides the learning rate of a step by the staleness.

    Equation, for a gradient that was computed tau changes of the weights ago::

        a <- a / max(1, tau)

    References:
        Zhang et al. 2016, "Staleness-aware Async-SGD for Distributed Deep Learning", arXiv 1511.05950.
    """
    return 1.0 / max(1.0, staleness)


class StaleSteps:
    """The steps of a learner whose background changes its weights while it computes a gradient.

    Without a correction, `snapshot` and `step` are `Learner.snapshot` and `Learner.step`.
    """

    DROPPED = ("_read_at",)  # the next snapshot begins with its own

    def __init__(self, me: Learner, staleness: Staleness, scale_by_staleness: bool) -> None:
        self._me, self._scales = me, scale_by_staleness
        self._correction = correction(staleness, me)
        self._taken_at: Tensor | None = None  # Phi; kept only for a correction
        self._read_at = me.version

    def snapshot(self) -> Tensor:
        """Return Phi `[P]`, the weights at which the next gradient is to be computed."""
        self._read_at = self._me.version
        phi = self._me.snapshot()
        self._taken_at = None if self._correction is None else phi
        return phi

    def step(self, gradient: Tensor) -> None:
        """Make a step with a gradient `[P]` that was computed at the last snapshot."""
        me, (phi, self._taken_at) = self._me, (self._taken_at, None)
        scale = rate_scale(me.version - self._read_at) if self._scales else 1.0
        if self._correction is None or phi is None or not is_finite(gradient):  # a step skips what is not finite
            me.step(gradient, scale=scale)
            return
        now = me.snapshot()
        me.step(self._correction.corrected(gradient, now - phi), scale=scale)
        self._correction.stepped(now, me.snapshot())


def is_finite(gradient: Tensor) -> bool:
    """Return whether a gradient is finite. In a timing-only simulation, every gradient counts as finite."""
    return gradient.is_meta or bool(gradient.isfinite().all())
