"""The optimizer of an asynchronous server of weights, which applies Nesterov's momentum only after several pushes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


class Loans:
    """The numbered copies of theta that a server has lent to workers and for which it has received no push. Each copy
    is for one push.

    A worker whose membership has ended cannot know whether its last push has arrived. It pushes again, and the server
    applies the push only if that copy is still lent. The server's optimizer keeps the numbers, so that a checkpoint
    contains the numbers and theta after the same push. The ages are for statistics.
    """

    _ROOM = 256  # more than the copies by which two workers are apart
    DROPPED = ("_optimizer", "_ages")
    """Attributes that are dropped with a membership. The optimizer is not dropped, but saved with the server's
    shard."""

    def __init__(
        self, rate: float, momentum: float, delay: int, spread: float, kind: type[DelayedNesterov] | None = None
    ) -> None:
        self._settings, self._kind = (rate, momentum, delay, spread), kind or DelayedNesterov
        self.optimizer([nn.Parameter(torch.empty(0))])  # in a simulation of time alone there is no other
        self._ages: dict[int, int] = {}

    def optimizer(self, parameters: list[nn.Parameter]) -> DelayedNesterov:
        """Return a new optimizer of the server for these parameters."""
        self._optimizer = self._kind(parameters, *self._settings)
        return self._optimizer

    @property
    def has_lent(self) -> bool:
        """Whether the server has lent any copy, perhaps in an earlier membership."""
        return bool(self._optimizer.param_groups[0]["num_loans"])

    def follow(self, number: int) -> None:
        """Continue the numbers of a server that was lost, of whose copies a worker holds the one with this number.
        Other workers may hold newer and older copies, and push changes to them."""
        group = self._optimizer.param_groups[0]
        group["num_loans"] = number + self._ROOM
        group["out"] = tuple(range(max(1, number - self._ROOM), number + self._ROOM + 1))

    @property
    def current(self) -> Any:
        """The newest optimizer, which makes the next push."""
        return self._optimizer

    def lend(self, number: int, age: int) -> int:
        """Return the number of a copy of this age for a worker. It is the number of the copy that the worker already
        has, unless the worker has pushed since it received that copy."""
        group = self._optimizer.param_groups[0]
        if number not in group["out"]:
            number = group["num_loans"] + 1
            group["num_loans"], group["out"] = number, (*group["out"], number)
        self._ages[number] = age
        return number

    def pay_back(self, number: int) -> int | None:
        """Expect the push for a copy next, and return the age of the copy, or 0 if it is unknown. Return None if the
        push was taken before."""
        group = self._optimizer.param_groups[0]
        if number <= group["num_loans"] and number not in group["out"]:
            return None
        _lend_up_to(group, number)  # it may have been lent after the server was saved
        self._optimizer.loan = number
        return self._ages.pop(number, 0)


def _lend_up_to(group: dict[str, Any], number: int) -> None:
    """Record all copies up to a number as lent."""
    group["out"] = (*group["out"], *range(group["num_loans"] + 1, number + 1))
    group["num_loans"] = max(number, group["num_loans"])


class DelayedNesterov(torch.optim.Optimizer):
    """Nesterov's momentum for pushes, which take the place of gradients.

    Equation, for a push D, with N = `delay` and c = `spread`::

        B <- B + D
        theta <- theta - eta (c beta m + D / N)                   usually
        m <- beta m + B / N,  B <- 0
        theta <- theta - eta ((1 - c N + c) beta m + D / N)       at each N-th push

    m and B are initially 0. With N = 1 this is Nesterov's momentum. eta and beta are those of the run, also after a
    resume; a checkpoint holds m, B, the number of pushes and the numbers of `Loans`.
    """

    def __init__(self, parameters: list[nn.Parameter], rate: float, momentum: float, delay: int, spread: float) -> None:
        super().__init__(parameters, {"num_pushes": 0, "num_loans": 0, "out": ()})
        self.loan = 0
        """Loan that the next push pays back."""
        self._rate, self._momentum, self._delay, self._spread = rate, momentum, delay, spread

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply one push."""
        for group in self.param_groups:
            group["num_pushes"] += 1
            group["out"] = tuple(each for each in group["out"] if each != self.loan)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._push(parameter, parameter.grad, group["num_pushes"] % self._delay == 0)

    def fork(self, parameters: list[nn.Parameter]) -> DelayedNesterov:
        """Return the optimizer of a copy of the shard at a checkpoint barrier. It applies the pushes from before the
        barrier."""
        fork = type(self)(parameters, self._rate, self._momentum, self._delay, self._spread)
        fork.load_state_dict(copy.deepcopy(self.state_dict()))
        return fork

    def step_as(self, other: DelayedNesterov) -> None:
        """Apply the push that `other` has just applied."""
        self.loan = other.loan
        for group in self.param_groups:
            _lend_up_to(group, self.loan)
        self.step()

    def catch_up(self, other: DelayedNesterov) -> None:
        """Record all loans of `other`. Loans that later pushes have paid back in `other` are still open in this
        optimizer."""
        for group, its in zip(self.param_groups, other.param_groups, strict=True):
            _lend_up_to(group, its["num_loans"])

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
