"""The four rules by which a parameter server turns gradients into steps, each with its equation.

In the equations w is the server's piece of the weights, a the step size of its optimizer, and g_l(Phi_l) the gradient
that worker l computed at Phi_l, the weights it pulled. A rule decides when the gradients that have arrived make a step,
and which worker may pull the weights. The `Server` handles messages, staleness and the step itself; the workers clip.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Combine = Literal["sum", "mean"]


class Rule(ABC):
    """Decides when a server steps, and with which gradient."""

    most_kept = 0
    """The most gradients that wait for others although their workers continue: the next membership needs them."""

    @abstractmethod
    def finish(self, worker: int, num_waiting: int) -> bool:
        """Record that a worker has finished a mini-batch, with or without a finite gradient.

        Returns whether the `num_waiting` gradients that have arrived since the last step now make a step.
        """

    def grant(self, worker: int) -> bool:
        """Whether a worker that has requested the weights gets them now."""
        return True

    def leave(self, worker: int) -> None:  # noqa: B027 - most rules ignore it
        """Record that a worker computes no more gradients."""

    def combine(self, gradients: Sequence[Tensor]) -> Tensor:
        """The gradient for the optimizer, from the workers' gradients in the order of their ranks."""
        return _sum(gradients)


class Asynchronous(Rule):
    """Each gradient makes a step when it arrives, and no worker waits for another.

    Equation, for the gradient of worker l::

        w <- w - a g_l(Phi_l)

    Other workers may have changed w since worker l pulled Phi_l.

    References:
        Dean et al. 2012, "Large Scale Distributed Deep Networks", NIPS (Downpour SGD).
    """

    def finish(self, worker: int, num_waiting: int) -> bool:
        return num_waiting == 1


class Summed(Rule):
    """Any n gradients make one step with their sum, and no worker waits for another.

    Equation, for the next n gradients to arrive, from any workers::

        w <- w - a (g_1(Phi_1) + ... + g_n(Phi_n))

    With `combine` mean, the sum is divided by n. The last step of a run may have fewer than n gradients.

    References:
        Aji & Heafield 2019, "Making Asynchronous Stochastic Gradient Descent Work for Transformers", arXiv 1906.03496.
    """

    def __init__(self, n: int, combine: Combine = "sum") -> None:
        self._n, self._combine = n, combine
        self.most_kept = n - 1

    def finish(self, worker: int, num_waiting: int) -> bool:
        return num_waiting == self._n

    def combine(self, gradients: Sequence[Tensor]) -> Tensor:
        return _sum(gradients) if self._combine == "sum" else _mean(gradients)


class Hybrid(Rule):
    """The mean of all workers' gradients at the same weights makes a step, and every worker waits for it.

    Equation, for N workers::

        w <- w - a (1/N) sum_l g_l(w)

    This is `allreduce` with the step made by the server. Non-finite gradients are left out of the mean. With `combine`
    sum, the sum is not divided.
    """

    def __init__(self, num_workers: int, combine: Combine = "mean") -> None:
        self._num_workers, self._combine = num_workers, combine
        self._finished: set[int] = set()  # since the last step

    def finish(self, worker: int, num_waiting: int) -> bool:
        self._finished.add(worker)
        is_complete = len(self._finished) == self._num_workers
        if is_complete:
            self._finished.clear()
        return is_complete

    def grant(self, worker: int) -> bool:
        return worker not in self._finished

    def combine(self, gradients: Sequence[Tensor]) -> Tensor:
        return _mean(gradients) if self._combine == "mean" else _sum(gradients)


class Synchronous(Rule):
    """One worker at a time pulls, computes a gradient and pushes it, while the others wait for their turn.

    Equation, for the worker l whose turn it is::

        w <- w - a g_l(w)
    """

    def __init__(self) -> None:
        self._turn: int | None = None

    def finish(self, worker: int, num_waiting: int) -> bool:
        self._turn = None
        return num_waiting == 1

    def grant(self, worker: int) -> bool:
        self._turn = worker if self._turn is None else self._turn
        return self._turn == worker

    def leave(self, worker: int) -> None:
        self._turn = None if self._turn == worker else self._turn


def _sum(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of the gradients, in order; none of them is overwritten."""
    if len(gradients) == 1:
        return gradients[0]
    total = gradients[0] + gradients[1]
    for gradient in gradients[2:]:
        total.add_(gradient)
    return total


def _mean(gradients: Sequence[Tensor]) -> Tensor:
    return _sum(gradients).div_(len(gradients)) if len(gradients) > 1 else gradients[0]
