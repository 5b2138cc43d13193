"""Periodic averaging without lockstep: learners step alone, and a server keeps the model that they agree on."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import Field

from starling.errors import ConfigError
from starling.learner import Learner, LoopEnded
from starling.strategies.base import never, one_learner
from starling.strategies.parameter_server import ServedStrategy, Servers
from starling.strategies.server import Served, Server, ServerOptions

if TYPE_CHECKING:
    from torch import Tensor


class AsyncLocalOptions(Served):
    """The options of the strategies whose learners agree with a server every H steps."""

    every: int = Field(default=100, ge=1)
    """H, the steps of the fastest learner from one push to the next."""
    by_speed: bool = True
    """Whether H of each learner is in proportion to its speed; otherwise all make as many steps."""
    rate: float = Field(default=0.1, gt=0.0)
    """eta, the rate of the server's optimizer."""
    momentum: float = Field(default=0.9, ge=0.0, lt=1.0)
    """beta, the momentum of the server's optimizer."""
    delay: int | None = Field(default=None, ge=1)
    """N, the pushes from one change of the momentum to the next; None: the number of workers."""
    spread: float = Field(default=0.0, ge=0.0, le=1.0)
    """c, the share of the momentum's step that each push makes, at most 1/N; the rest is made with each N-th push."""
    elasticity: float | None = Field(default=None, ge=0.0, le=1.0)
    """L r: learners and server draw each other closer by r of their difference; None: learners take theta."""

    def pushes(self, world: int) -> int:
        """N, with its default."""
        return self.delay or max(1, len(self.workers(world)))

    def server_on(self, me: Learner) -> Server | None:
        """The server that a learner runs, if it does; it uses at once what arrives."""
        piece = self.kept(me)
        if piece is None:
            return None
        from starling.strategies.delayed_nesterov import Loans

        loans = Loans(self.rate, self.momentum, self.pushes(me.world), self.spread)
        return Server(me, piece, self.workers(me.world), ServerOptions(), loans)


async def async_local(me: Learner, options: AsyncLocalOptions) -> None:
    """Each learner steps alone, and every H steps agrees with a server that keeps theta. No learner waits for another.

    Equation, for every learner l of L, with theta_l the theta that it pulled last::

        each step:             x_l <- x_l - a g_l(x_l)
        after every H-th step: push D = theta_l - x_l,  theta_l <- theta,  x_l <- theta
        server, at push t:     B <- B + D
                               theta <- theta - eta (c beta m + D / N)
        at each N-th push:     m <- beta m + B / N,  B <- 0
                               theta <- theta - eta ((1 - c N + c) beta m + D / N)

    with a the step size of the local optimizer, whose own state stays with each learner. This is the server with
    delayed Nesterov momentum (`async-diloco`): the momentum takes N pushes at once, because momentum multiplies what is
    stale in each of them. With `by_speed` H of a learner is H n_l / max_j n_j, n_l being the steps it has made.

    With `elasticity` learners keep weights of their own (`aeasgd`), and every H steps, with r = elasticity / L::

        D = r (theta - x_l),  x_l <- x_l - a g_l(x_l) + D,  push D
        server:  theta <- theta - D

    theta is pulled while the gradient is computed. At the end all learners push once more and take theta. A learner
    that begins alone has no server, and its steps are all there is.

    When a membership begins, and after a resume, a worker first pushes what it has not pushed: theta_l - x_l, or the D
    of which it does not know whether it has arrived. A server takes a push only once. H begins with `every`.

    Args:
        me: The learner that runs this coroutine: a worker, a server, or both.
        options: How often learners push, what the server makes of it, and where the servers run.

    References:
        Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135.
        Zhang, Choromanska & LeCun 2015, "Deep learning with Elastic Averaging SGD", arXiv 1412.6651.
    """
    if me.rank not in options.workers(me.world):
        if (server := options.server_on(me)) is not None:
            await server.serve()
        return
    centre = Centre(me, options)
    if me.world == 1 and not centre.has_met_servers:
        while me.claim():
            me.step(await me.gradient(me.weights))
        return
    if (server := options.server_on(me)) is not None:
        me.background(server.serve())
    await (_agree if options.elasticity is None else _pull_together)(me, centre)


async def _agree(me: Learner, centre: Centre) -> None:
    await _push(me, centre)
    me.replace(await centre.pull())
    with suppress(LoopEnded):
        while me.claim():
            me.step(await me.gradient(me.weights))
            centre.count_step()
            if centre.is_due:
                await _push(me, centre)
                me.replace(await centre.pull())
    await _push(me, centre)
    me.replace(await centre.leave())


async def _push(me: Learner, centre: Centre) -> None:
    if centre.has_steps or centre.has_sent:
        await centre.push(centre.theta - me.weights)


async def _pull_together(me: Learner, centre: Centre) -> None:
    await centre.push_again()
    with suppress(LoopEnded):
        while me.claim():
            is_due = centre.is_due
            if is_due:
                centre.ask()
            gradient = await me.gradient(me.weights)
            difference = centre.r * (await centre.answer() - me.weights) if is_due else None
            me.step(gradient)
            if difference is not None:
                me.apply(difference)
                await centre.push(difference)
            centre.count_step()
    if centre.has_steps:
        await centre.answer()  # a loop may end between a request and its answer, which is older than the next one
        difference = centre.r * (await centre.pull() - me.weights)
        me.apply(difference)
        await centre.push(difference)
    me.replace(await centre.leave())


class Centre:
    """A worker's connection to the servers, which keep theta.

    What the worker has not pushed, or does not know to have arrived, is part of its own state: it pushes that first in
    its next membership. Nothing of this state changes but at once with the worker's weights, between two waits.
    """

    DROPPED = ("theta", "_period", "_num_pushed")
    """Elastic learners use what they pull at once; otherwise theta is kept. H by speed is counted afresh."""

    def __init__(self, me: Learner, options: AsyncLocalOptions) -> None:
        import torch

        self._servers = Servers(me, options, age_numbers=2)
        counts = torch.zeros(2 + len(self._servers.pieces), dtype=torch.int64)
        self._counts = me.strategy_state("counts", counts, is_common=False)
        """The steps since the last push began, those in a push that is not known to have arrived, and each server's
        loan."""
        self._servers.ages = list(map(float, self._counts[2:].tolist()))
        zeros = me.weights.new_zeros(len(me.weights))
        is_elastic = options.elasticity is not None
        self.theta = zeros if is_elastic else me.strategy_state("theta", zeros, is_common=False)
        """theta as it was pulled last, `[P]`."""
        self._sent = me.strategy_state("sent", zeros, is_common=False) if is_elastic else None
        self.r = (options.elasticity or 0.0) / len(options.workers(me.world))
        self._options = options
        self._period, self._num_pushed = options.every, 0

    def count_step(self) -> None:
        """Count a step of this worker."""
        self._counts[0] += 1

    @property
    def has_met_servers(self) -> bool:
        """Whether it has pulled theta, perhaps in an earlier membership."""
        return bool(self._counts[2:].any())

    @property
    def has_steps(self) -> bool:
        """Whether it has made steps since the last push."""
        return bool(self._counts[0])

    @property
    def has_sent(self) -> bool:
        """Whether it does not know that its last push has arrived."""
        return bool(self._counts[1])

    @property
    def is_due(self) -> bool:
        """Whether the period is over."""
        return int(self._counts[0]) >= self._period

    def ask(self) -> None:
        """Request theta; `answer` waits for it."""
        self._servers.ask()

    async def answer(self) -> Tensor:
        """Wait for theta `[P]`, if it was requested: then all that was sent before has arrived."""
        found = await self._servers.weights()
        await self._servers.settle()
        for server, weights in found:
            self.theta[self._servers.pieces[server]] = weights.to(self.theta.device)
            self._counts[2 + server] = int(self._servers.ages[server])
            self._counts[1] = 0
        most, every = self._servers.most_finished, self._options.every
        if self._options.by_speed and min(most, self._num_pushed) > 0:
            self._period = min(every, max(1, round(every * self._num_pushed / most)))
        return self.theta

    async def pull(self) -> Tensor:
        """Request theta `[P]`, and wait for it."""
        self.ask()
        return await self.answer()

    async def push(self, difference: Tensor) -> None:
        """Send the servers a difference `[P]`, which begins the next period."""
        self._counts[1] += self._counts[0]
        self._counts[0] = 0
        if self._sent is not None:
            self._sent.copy_(difference)
        await self._send(difference)

    async def push_again(self) -> None:
        """Send the difference again that was sent last, if it is not known to have arrived."""
        if self._sent is not None and self.has_sent:
            await self._send(self._sent)

    async def _send(self, difference: Tensor) -> None:
        num_batches = int(self._counts[1])
        self._num_pushed += num_batches
        self._servers.push(difference, self._servers.ages, num_batches)
        await self._servers.settle()

    async def leave(self) -> Tensor:
        """Report that this worker pushes no more; the final theta `[P]`, once all workers have left."""
        self._servers.leave()
        await self.answer()
        return await self.pull()


class AeasgdOptions(AsyncLocalOptions):
    """The options of `aeasgd`."""

    every: int = Field(default=10, ge=1)
    by_speed: bool = False
    rate: float = Field(default=1.0, gt=0.0)
    momentum: float = Field(default=0.0, ge=0.0, lt=1.0)
    delay: int | None = Field(default=1, ge=1)
    elasticity: float | None = Field(default=0.9, ge=0.0, le=1.0)


def _check(options: AsyncLocalOptions, world: int) -> None:
    if options.spread * options.pushes(world) > 1.0:
        raise ConfigError(
            f"strategy.spread: {options.spread:g} of the momentum's step with each of {options.pushes(world)} pushes "
            f"is more than one step; set at most {1.0 / options.pushes(world):g}"
        )


def _strategy(name: str, summary: str, options: type[AsyncLocalOptions]) -> ServedStrategy:
    return ServedStrategy(
        name, summary, async_local, one_learner, options, check=_check, adopts_changes=never, kind="periodic"
    )


ASYNC_DILOCO = _strategy(
    "async-diloco", "step alone, agree with a server every few steps; no learner waits", AsyncLocalOptions
)
AEASGD = _strategy(
    "aeasgd", "step alone, drawn to a server's weights and these to them; no learner waits", AeasgdOptions
)
