"""The four rules by which a parameter server turns gradients into steps, each with its equation.

In the equations w is the server's piece of the weights, a the step size of its optimizer, and g_l(Phi_l) the gradient
that worker l computed at Phi_l, the weights it pulled. A rule decides when the gradients that have arrived make a step,
and which worker may pull the weights. The `Server` handles messages, staleness and the step itself; the workers clip.
"""

from __future__ import annotations


class Rule:
    """Decides when a server steps."""

    most_kept = 0
    """The most gradients that wait for others although their workers continue: the next membership needs them."""

    def finish(self, worker: int, num_waiting: int) -> bool:
        """Record that a worker has finished a mini-batch, with or without a finite gradient.

        Returns whether the `num_waiting` gradients that have arrived since the last step now make a step.
        """
        return num_waiting == 1

    def grant(self, worker: int) -> bool:
        """Whether a worker that has requested the weights gets them now."""
        return True

    def leave(self, worker: int) -> None:
        """Record that a worker computes no more gradients."""


class Asynchronous(Rule):
    """Each gradient makes a step when it arrives, and no worker waits for another.

    Equation, for the gradient of worker l::

        w <- w - a g_l(Phi_l)

    Other workers may have changed w since worker l pulled Phi_l.

    References:
        Dean et al. 2012, "Large Scale Distributed Deep Networks", NIPS (Downpour SGD).
    """


class Summed(Rule):
    """Any n gradients make one step with their sum, and no worker waits for another.

    Equation, for the next n gradients to arrive, from any workers::

        w <- w - a (g_1(Phi_1) + ... + g_n(Phi_n))

    With `combine` mean, the sum is divided by n. The last step of a run may have fewer than n gradients.

    References:
        Aji & Heafield 2019, "Making Asynchronous Stochastic Gradient Descent Work for Transformers", arXiv 1906.03496.
    """

    def __init__(self, n: int) -> None:
        self._n, self.most_kept = n, n - 1

    def finish(self, worker: int, num_waiting: int) -> bool:
        return num_waiting == self._n


class Hybrid(Rule):
    """The mean of all workers' gradients at the same weights makes a step, and every worker waits for it.

    Equation, for N workers::

        w <- w - a (1/N) sum_l g_l(w)

    This is `allreduce` with the step made by the server. Non-finite gradients are left out of the mean. With `combine`
    sum, the sum is not divided.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._finished: set[int] = set()  # since the last step

    def finish(self, worker: int, num_waiting: int) -> bool:
        self._finished.add(worker)
        is_complete = len(self._finished) == self._num_workers
        if is_complete:
            self._finished.clear()
        return is_complete

    def grant(self, worker: int) -> bool:
        return worker not in self._finished


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
