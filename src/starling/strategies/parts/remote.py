"""A worker's connections to servers: `Servers`, for gradients and weights, and `Centre`, for learners that step
alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starling.learner import Handle, Learner
from starling.strategies.parts.rules import Asynchronous, Served
from starling.strategies.parts.server import AGE, GRADIENT, REPORT, WEIGHTS, Report, serve

if TYPE_CHECKING:
    from torch import Tensor


class Servers:
    """A worker's connection to all servers. Workers and servers count from 0 in each membership."""

    DROPPED = ("ages", "most_finished", "_num_finished")

    def __init__(self, me: Learner, options: Served, age_numbers: int = 1) -> None:
        import torch

        self.pieces = options.pieces(len(me.weights))
        self._me, self._ranks = me, [options.server(s, me.world) for s in range(len(self.pieces))]
        self.ages = [0.0] * len(self.pieces)
        """Number of each server's steps that this worker's weights include."""
        self.most_finished = 0.0
        """Largest number of mini-batches that any worker had reported to the first server when the server sent these
        weights, if the server sends this number."""
        self._num_finished = 0.0
        self._like_age = torch.zeros(age_numbers, dtype=torch.float64)
        self._like_weights = torch.empty(0, dtype=me.weights.dtype)  # in host memory, like messages
        self._arriving: dict[int, tuple[Handle[Tensor], Handle[Tensor]]] = {}
        self._sending: list[Handle[None]] = []

    def ask(self) -> None:
        """Request the servers' weights; `arrive` waits for them."""
        for server in range(len(self.pieces)):
            self._ask(server)

    async def pull(self, in_turn: bool) -> None:
        """Request the servers' weights, from one server after another or from all at once, and overwrite this worker's
        weights with them."""
        for server in range(len(self.pieces)):
            self._ask(server)
            if in_turn:
                await self.arrive()
        await self.arrive()
        await self.settle()

    async def arrive(self) -> None:
        """Wait for the requested weights, if any, and overwrite this worker's weights with them."""
        for server, weights in await self.weights():
            self._me.replace(weights, self.pieces[server])

    async def weights(self) -> list[tuple[int, Tensor]]:
        """Wait for the requested weights, if any, and return each server's number and its piece `[n]`."""
        found = []
        for server, (age, weights) in self._arriving.items():
            self.ages[server], *rest = (await age).tolist()
            if server == 0:
                self.most_finished = rest[0] if rest else 0.0
            found.append((server, await weights))
        self._arriving.clear()
        return found

    def push(self, gradient: Tensor | None, ages: Sequence[float], num_batches: int = 1) -> None:
        """Start sending each server its piece of a gradient `[P]`, which must not change before `settle` returns.

        `ages` are the ages of the weights at which the gradient was computed. `gradient` is None if it was not finite,
        and otherwise comes from `num_batches` mini-batches.
        """
        self._num_finished += num_batches
        for rank, piece, age in zip(self._ranks, self.pieces, ages, strict=True):
            self._report(rank, math.nan if gradient is None else age)
            if gradient is not None:
                self._sending.append(self._me.send(rank, gradient[piece], GRADIENT))

    def leave(self) -> None:
        """Report that this worker sends no more gradients."""
        self._num_finished = math.inf
        for rank, age in zip(self._ranks, self.ages, strict=True):
            self._report(rank, age)

    async def settle(self) -> None:
        """Wait until all messages to the servers have arrived."""
        for sending in self._sending:
            await sending
        self._sending.clear()

    def _ask(self, server: int) -> None:
        rank, piece = self._ranks[server], self.pieces[server]
        like = self._like_weights.new_empty(piece.stop - piece.start)
        self._arriving[server] = self._me.receive(rank, self._like_age, AGE), self._me.receive(rank, like, WEIGHTS)
        self._report(rank, self.ages[server])

    def _report(self, rank: int, age: float) -> None:
        report = Report(self._num_finished, age, self._me.optimizer.step_metadata).encode()
        self._sending.append(self._me.send(rank, report, REPORT))


class Centre:
    """A worker's connection to servers that keep theta, for a learner that steps alone and pushes differences.

    Differences that the worker has not pushed, or whose arrival is unknown, are part of its own state, and are pushed
    first in its next membership. This state changes only together with the worker's weights, between two waits.
    """

    DROPPED = ("theta", "_num_pushed")
    """Attributes that are dropped with a membership. A strategy that needs theta after the next wait must keep theta
    itself. Pushed steps, which determine the speed, are counted from 0 again."""

    def __init__(self, me: Learner, options: Served) -> None:
        import torch

        self._servers = Servers(me, options, age_numbers=2)
        counts = torch.zeros(2 + len(self._servers.pieces), dtype=torch.int64)
        self._counts = me.strategy_state("counts", counts, is_common=False)
        """Number of steps since the last push began, number of steps in a push whose arrival is unknown, and each
        server's loan."""
        self._servers.ages = list(map(float, self._counts[2:].tolist()))
        self.theta = me.weights.new_zeros(len(me.weights))
        """theta `[P]`, as it was last pulled."""
        self.rebuilt = slice(0)
        """The piece of theta that is now this worker's own weights, because its server was lost."""
        self._num_pushed = 0

    @property
    def has_met_servers(self) -> bool:
        """Whether the worker has pulled theta, perhaps in an earlier membership."""
        return bool(self._counts[2:].any())

    @property
    def num_steps(self) -> int:
        """The number of steps that the worker has made since its last push."""
        return int(self._counts[0])

    @property
    def num_unconfirmed(self) -> int:
        """The number of steps in a push whose arrival is unknown."""
        return int(self._counts[1])

    def loan_of(self, piece: slice) -> int:
        """Return the number of the copy of a server's piece that this worker has, or 0."""
        return int(self._counts[2 + self._servers.pieces.index(piece)])

    def count_step(self) -> None:
        """Count a step of this worker."""
        self._counts[0] += 1

    def by_speed(self, every: int) -> int:
        """Return this worker's number of steps between two pushes. It is `every` for the fastest worker, and in
        proportion to the pushed steps for the others."""
        most = self._servers.most_finished
        if min(most, self._num_pushed) <= 0:
            return every
        return min(every, max(1, round(every * self._num_pushed / most)))

    def ask(self) -> None:
        """Request theta; `answer` waits for it."""
        self._servers.ask()

    async def answer(self) -> Tensor:
        """Wait for theta `[P]`, if it was requested. All messages that were sent earlier have then arrived."""
        found = await self._servers.weights()
        await self._servers.settle()
        for server, weights in found:
            self.theta[self._servers.pieces[server]] = weights.to(self.theta.device)
            self._counts[2 + server] = int(self._servers.ages[server])
            self._counts[1] = 0
        return self.theta

    async def pull(self) -> Tensor:
        """Request theta `[P]`, and wait for it."""
        self.ask()
        return await self.answer()

    async def push(self, difference: Tensor) -> None:
        """Send the servers a difference `[P]`. The worker then counts steps from 0 again."""
        self._counts[1] += self._counts[0]
        self._counts[0] = 0
        await self.push_again(difference)

    async def push_again(self, difference: Tensor) -> None:
        """Send the difference that may not have arrived."""
        self._num_pushed += self.num_unconfirmed
        self._servers.push(difference, self._servers.ages, self.num_unconfirmed)
        await self._servers.settle()

    async def leave(self) -> Tensor:
        """Report that this worker makes no more pushes, and return the final theta `[P]` once all workers have left."""
        self._servers.leave()
        await self.answer()
        return await self.pull()


async def connected(
    me: Learner, options: Served, rate: float = 1.0, momentum: float = 0.0, delay: int = 1, spread: float = 0.0
) -> Centre | None:
    """Start the learner's server, if it runs one, with a `DelayedNesterov` that has these constants, and return the
    learner's connection to all servers.

    A learner that computes no gradients serves to the end, and a learner that begins alone needs no server and makes
    all steps; in both cases the result is then None.
    """
    from starling.strategies.parts.delayed_nesterov import Loans

    centre = Centre(me, options)
    if me.world == 1 and not centre.has_met_servers:
        while me.claim():
            me.step(await me.gradient(me.weights))
        return None
    own = await serve(me, options, Asynchronous(), Loans(rate, momentum, delay, spread), centre.loan_of)
    if centre.has_met_servers:
        centre.rebuilt = own
    return centre if me.rank in options.workers(me.world) else None
