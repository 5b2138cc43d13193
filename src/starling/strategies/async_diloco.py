"""Asynchronous DiLoCo: learners step alone, and a server applies their changes with delayed Nesterov momentum."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar

from pydantic import Field

from starling.errors import ConfigError
from starling.learner import Learner, LoopEnded
from starling.strategies.base import never, one_learner, registered
from starling.strategies.parts.remote import connected
from starling.strategies.parts.rules import Served, ServedStrategy


class AsyncDilocoOptions(Served):
    """The options of `async-diloco`."""

    MOVED: ClassVar[Mapping[str, str]] = {
        "elasticity": "elastic averaging is a strategy of its own: write `name: aeasgd`"
    }

    every: int = Field(default=100, ge=1)
    """H, the number of steps that the fastest learner makes between two pushes."""
    by_speed: bool = True
    """Whether each learner's H is proportional to its speed; otherwise, all learners make the same number of steps."""
    rate: float = Field(default=0.1, gt=0.0)
    """eta, the rate of the server's optimizer."""
    momentum: float = Field(default=0.9, ge=0.0, lt=1.0)
    """beta, the momentum of the server's optimizer."""
    delay: int | None = Field(default=None, ge=1)
    """N, the number of pushes between two changes of the momentum; null: the number of workers."""
    spread: float = Field(default=0.0, ge=0.0, le=1.0)
    """c, the share of the momentum's step that is made with each push, at most 1/N; the rest is made with each N-th
    push."""

    def pushes(self, world: int) -> int:
        """Return N, the number of pushes between two changes of the momentum; by default, the number of workers."""
        return self.delay or max(1, len(self.workers(world)))


def _check(options: AsyncDilocoOptions, world: int) -> None:
    if options.spread * options.pushes(world) > 1.0:
        raise ConfigError(
            f"strategy.spread: {options.spread:g} of the momentum's step with each of {options.pushes(world)} pushes "
            f"is more than one step; set at most {1.0 / options.pushes(world):g}"
        )


@registered(
    "async-diloco",
    "step alone, and agree with a server every few steps; no learner waits",
    AsyncDilocoOptions,
    kind="periodic",
    sync_group_size=one_learner,
    check=_check,
    adopts_changes=never,
    of=ServedStrategy,
)
async def async_diloco(me: Learner, options: AsyncDilocoOptions) -> None:
    """Each learner steps alone, and every H steps it pushes its change to a server that keeps theta.

    Equation, for every learner l of L, with theta_l the theta that it pulled last::

        each step:             x_l <- x_l - a g_l(x_l)
        after every H-th step: push D = theta_l - x_l,  theta_l <- theta,  x_l <- theta
        server, at each push:  B <- B + D
          if it is not an N-th: theta <- theta - eta (c beta m + D / N)
          if it is an N-th:     m <- beta m + B / N,  B <- 0
                                theta <- theta - eta ((1 - c N + c) beta m + D / N)

    with a the step size of the local optimizer, whose own state stays with each learner; m and B the server's momentum
    and sum, initially 0; eta, beta, N and c the options `rate`, `momentum`, `delay` and `spread`. The momentum includes
    N pushes at once, because momentum multiplies the staleness of each push. With `by_speed`, learner l makes
    H n_l / max_j n_j steps between two pushes, with n_l the number of steps that it has pushed.

    At the end, all learners push once more and adopt theta. A learner that begins alone has no server, and only makes
    its own steps. When a membership begins, and after a resume, a worker first pushes its unpushed change, theta_l -
    x_l. A server applies a push only once.

    The paper assumes that each learner's speed is known; here, it follows from the number of pushed steps.

    Waits:
        No learner waits for another. Once in H steps, a learner waits for its push to arrive and for theta to come
        back.

    Use when:
        The link is slow, and learners differ in speed or stall. If they are alike, use `diloco`, under which nothing is
        stale.

    Args:
        me: The learner that runs this coroutine: a worker, a server, or both.
        options: How often learners push, the server's optimizer, and where the servers run.

    References:
        Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135 (Algorithm 3).

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("async-diloco", every=4), learners=4).loss()
        0.036
    """
    outer = options.rate, options.momentum, options.pushes(me.world), options.spread
    if (centre := await connected(me, options, *outer)) is None:
        return
    centre.theta = me.strategy_state("theta", centre.theta, is_common=False)
    centre.theta[centre.rebuilt] = me.weights[centre.rebuilt]

    async def push() -> None:
        if centre.num_steps or centre.num_unconfirmed:
            await centre.push(centre.theta - me.weights)

    await push()
    me.replace(await centre.pull())
    with suppress(LoopEnded):
        while me.claim():
            me.step(await me.gradient(me.weights))
            centre.count_step()
            if centre.num_steps >= (centre.by_speed(options.every) if options.by_speed else options.every):
                await push()
                me.replace(await centre.pull())
    await push()
    me.replace(await centre.leave())
