"""Parameter servers: workers compute, servers keep the model."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from starling.errors import ConfigError, PeerLost
from starling.learner import Handle, Learner, LoopEnded
from starling.strategies.base import Strategy, SyncGroups, never
from starling.strategies.server import AGE, GRADIENT, REPORT, WEIGHTS, Report, Served, Server, ServerOptions

if TYPE_CHECKING:
    from torch import Tensor


async def parameter_server(me: Learner, options: ServerOptions) -> None:
    """Workers push gradients to servers and pull weights; each server steps according to its update rule.

    Equation, with w the servers' weights, one piece on each of S servers::

        worker:  Phi <- w,  push g(Phi)
        server:  w <- w - a G

    with a the step size of the server's optimizer, and G determined by `options.update`:

    * `asynchronous`: each gradient when it arrives; w has usually changed since Phi.
    * `summed`: the sum of any n gradients.
    * `hybrid`: the mean of all workers' gradients at the same w.
    * `synchronous`: the gradient of the worker whose turn it is.

    `server.py` gives the equation of each rule. With `staleness_bound`, a worker more than that many gradients
    ahead of the slowest worker waits.

    Workers clip gradients, since a server sees only a piece. If too few gradients for a sum remain at the end of a run,
    these make the last step. A non-finite gradient is not sent: it makes no step, and a mean or sum is over the others.

    Args:
        me: The learner that runs this coroutine: a worker, a server, or both.
        options: The update rule, and where the servers run.

    References:
        Dean et al. 2012, "Large Scale Distributed Deep Networks", NIPS (`asynchronous`: Downpour SGD, with shards).
        Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS
        (`staleness_bound`).
        Aji & Heafield 2019, "Making Asynchronous Stochastic Gradient Descent Work for Transformers", arXiv 1906.03496
        (`summed`).
        Zhang et al. 2016, "Staleness-aware Async-SGD for Distributed Deep Learning", arXiv 1511.05950
        (`scale_by_staleness`). `staleness.py` has those of the corrections.
        The names `synchronous`, `hybrid` and `asynchronous` come from the parameter server of Deep Speech.
    """
    kept, pieces, workers = options.kept(me), options.pieces(len(me.weights)), options.workers(me.world)
    server = None if kept is None else Server(me, kept, workers, options)
    if me.rank not in workers:
        if server is not None:
            await server.serve()
        return
    if server is not None:
        me.background(server.serve())
    await _work(me, [Remote(me, options.server(s, me.world), piece) for s, piece in enumerate(pieces)], options)


async def _work(me: Learner, servers: Sequence[Remote], options: ServerOptions) -> None:
    with suppress(LoopEnded):
        await _pull(servers, options)
        while me.claim():
            ages = [server.age for server in servers]
            gradient = me.clip(await me.gradient(me.weights))
            for server in servers:
                await server.arrive()
                await server.settle()
            if options.overlap and gradient is not None:
                gradient = gradient.clone()  # the next gradient overwrites it
            for server, age in zip(servers, ages, strict=True):
                server.push(gradient, age)
            if options.overlap:
                for server in servers:
                    server.pull()
            else:
                for server in servers:
                    await server.settle()
                await _pull(servers, options)
    for server in servers:
        server.leave()
    for server in servers:
        await server.arrive()
    await _pull(servers, options)


async def _pull(servers: Sequence[Remote], options: ServerOptions) -> None:
    for server in servers:
        server.pull()
        if options.update == "synchronous":  # the first server grants the turn for all servers
            await server.arrive()
    for server in servers:
        await server.arrive()
        await server.settle()


class Remote:
    """A worker's connection to one server. Both count from 0 in each membership."""

    DROPPED = ("age", "most_finished", "_num_finished")

    def __init__(self, me: Learner, rank: int, piece: slice, age_numbers: int = 1) -> None:
        import torch

        self.piece = piece
        self._me, self._rank = me, rank
        self.age = 0.0
        """The number of the server's steps that are in this worker's weights."""
        self.most_finished = 0.0
        """The largest number of mini-batches that a worker had reported then, if the server tells it."""
        self._num_finished = 0.0
        self._like_age = torch.zeros(age_numbers, dtype=torch.float64)
        self._like_weights = torch.empty(piece.stop - piece.start, dtype=me.weights.dtype)  # host memory, as sent
        self._arriving: tuple[Handle[Tensor], Handle[Tensor]] | None = None
        self._sending: list[Handle[None]] = []

    def pull(self) -> None:
        """Request the server's weights; `arrive` waits for them."""
        age = self._me.receive(self._rank, self._like_age, AGE)
        self._arriving = age, self._me.receive(self._rank, self._like_weights, WEIGHTS)
        self._report(self.age)

    async def arrive(self) -> None:
        """Wait for the requested weights, if any, and overwrite this worker's weights with them."""
        if (weights := await self.weights()) is not None:
            self._me.replace(weights, self.piece)

    async def weights(self) -> Tensor | None:
        """Wait for the requested weights `[n]`; None: none were requested."""
        if self._arriving is None:
            return None
        age, weights = self._arriving
        self._arriving, (self.age, *rest) = None, (await age).tolist()
        self.most_finished = rest[0] if rest else 0.0
        return await weights

    def push(self, gradient: Tensor | None, age: float, num_batches: int = 1) -> None:
        """Start sending the server its piece of a gradient `[P]`, which must not change before `settle` returns.

        `age` is that of the weights at which the gradient was taken. `gradient` is None if it was not finite, and
        otherwise comes from so many mini-batches.
        """
        self._num_finished += num_batches
        self._report(math.nan if gradient is None else age)
        if gradient is not None:
            self._sending.append(self._me.send(self._rank, gradient[self.piece], GRADIENT))

    def leave(self) -> None:
        """Report that this worker sends no more gradients, and request the final weights."""
        self._num_finished = math.inf
        self._report(self.age)

    def _report(self, age: float) -> None:
        report = Report(self._num_finished, age, self._me.step_metadata).encode()
        self._sending.append(self._me.send(self._rank, report, REPORT))

    async def settle(self) -> None:
        """Wait until everything sent to the server has arrived."""
        for sending in self._sending:
            await sending
        self._sending.clear()


class ServedStrategy(Strategy):
    """A strategy whose options are `Served`: servers keep the model, and the run ends if one is lost."""

    is_served = True

    def sync_groups(self, options: Served, world: int) -> SyncGroups:
        return SyncGroups(len(options.workers(world)), self.sync_group_size(options, world))

    def survivors(self, options: Served, world: int, lost: Collection[int]) -> Sequence[int]:
        for shard in range(options.shards):
            if (server := options.server(shard, world)) in lost:
                raise PeerLost(f"learner {server} of {world} was a server; its shard of the model is lost")
        left = super().survivors(options, world, lost)
        self.validate(options, len(left))
        return left

    def validate(self, options: Served, world: int) -> None:
        if options.servers == "own" and world <= options.shards:
            raise ConfigError(
                f"strategy.shards: with {options.shards} servers as learners of their own, none of the {world} "
                "learners is a worker; start more learners, or choose servers: beside"
            )
        if options.shards > world:
            raise ConfigError(
                f"strategy.shards: {options.shards} servers, but only {world} learners to run them; choose at most "
                f"{world}"
            )
        super().validate(options, world)


PARAMETER_SERVER = ServedStrategy(
    "parameter-server",
    "workers push gradients to servers, which keep the model",
    parameter_server,
    lambda options, world: len(options.workers(world)) if options.update == "hybrid" else 1,
    ServerOptions,
    averages_gradients=lambda options: options.update == "hybrid",
    adopts_changes=never,
    kind="server",
    steps_itself=False,
)
