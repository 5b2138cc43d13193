"""The optimizer of an asynchronous server of weights: Nesterov's momentum that waits for several pushes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class DelayedNesterov(torch.optim.Optimizer):
    """Equation, for a push D, which takes the place of a gradient, with N = `delay` and c = `spread`::

        B <- B + D
        theta <- theta - eta (c beta m + D / N)                   usually
        m <- beta m + B / N,  B <- 0
        theta <- theta - eta ((1 - c N + c) beta m + D / N)       at each N-th push

    m and B are initially 0. With N = 1 this is Nesterov's momentum. eta and beta are those of the run, also after a
    resume; a checkpoint holds m, B and the number of pushes.
    """

    def __init__(self, parameters: list[nn.Parameter], rate: float, momentum: float, delay: int, spread: float) -> None:
        super().__init__(parameters, {"num_pushes": 0})
        self._rate, self._momentum, self._delay, self._spread = rate, momentum, delay, spread

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one push."""
        for group in self.param_groups:
            group["num_pushes"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._push(parameter, parameter.grad, group["num_pushes"] % self._delay == 0)

    def _push(self, theta: nn.Parameter, difference: torch.Tensor, is_nth: bool) -> None:
        beta, n, c, state = self._momentum, self._delay, self._spread, self.state[theta]
        change = difference / n
        if beta:
            if not state:
                state["momentum"], state["sum"] = torch.zeros_like(theta), torch.zeros_like(theta)
            m, total = state["momentum"], state["sum"].add_(difference)
            if is_nth:
                m.mul_(beta).add_(total, alpha=1.0 / n)
                total.zero_()
            change.add_(m, alpha=beta * (1.0 - c * n + c if is_nth else c))
        theta.sub_(change, alpha=self._rate)
