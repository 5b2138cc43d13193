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
    kept, workers = options.kept(me), options.workers(me.world)
    server = None if kept is None else Server(me, kept, workers, options)
    if me.rank in workers:
        if server is not None:
            me.background(server.serve())
        await _work(me, Servers(me, options), options)
    elif server is not None:
        await server.serve()


async def _work(me: Learner, servers: Servers, options: ServerOptions) -> None:
    in_turn = options.update == "synchronous"  # the first server grants the turn for all servers
    with suppress(LoopEnded):
        await servers.pull(in_turn)
        while me.claim():
            ages = list(servers.ages)
            gradient = me.clip(await me.gradient(me.weights))
            await servers.arrive()
            await servers.settle()
            if options.overlap and gradient is not None:
                gradient = gradient.clone()  # the next gradient overwrites it
            servers.push(gradient, ages)
            if options.overlap:
                servers.ask()
            else:
                await servers.settle()
                await servers.pull(in_turn)
    servers.leave()
    await servers.arrive()
    await servers.pull(in_turn)


class Servers:
    """A worker's connection to all servers. All count from 0 in each membership."""

    DROPPED = ("ages", "most_finished", "_num_finished")

    def __init__(self, me: Learner, options: Served, age_numbers: int = 1) -> None:
        import torch

        self.pieces = options.pieces(len(me.weights))
        self._me, self._ranks = me, [options.server(s, me.world) for s in range(len(self.pieces))]
        self.ages = [0.0] * len(self.pieces)
        """The number of each server's steps that are in this worker's weights."""
        self.most_finished = 0.0
        """The largest number of mini-batches that a worker had reported to the first server then, if it tells it."""
        self._num_finished = 0.0
        self._like_age = torch.zeros(age_numbers, dtype=torch.float64)
        self._like_weights = torch.empty(0, dtype=me.weights.dtype)  # host memory, as sent
        self._arriving: dict[int, tuple[Handle[Tensor], Handle[Tensor]]] = {}
        self._sending: list[Handle[None]] = []

    def ask(self) -> None:
        """Request the servers' weights; `arrive` waits for them."""
        for server in range(len(self.pieces)):
            self._ask(server)

    async def pull(self, in_turn: bool) -> None:
        """Request the servers' weights, in turn or of all at once, and overwrite this worker's weights with them."""
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
        """Wait for the requested weights, if any: each server's number and its piece `[n]`."""
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

        `ages` are those of the weights at which the gradient was taken. `gradient` is None if it was not finite, and
        otherwise comes from so many mini-batches.
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
        """Wait until everything sent to the servers has arrived."""
        for sending in self._sending:
            await sending
        self._sending.clear()

    def _ask(self, server: int) -> None:
        rank, piece = self._ranks[server], self.pieces[server]
        like = self._like_weights.new_empty(piece.stop - piece.start)
        self._arriving[server] = self._me.receive(rank, self._like_age, AGE), self._me.receive(rank, like, WEIGHTS)
        self._report(rank, self.ages[server])

    def _report(self, rank: int, age: float) -> None:
        report = Report(self._num_finished, age, self._me.step_metadata).encode()
        self._sending.append(self._me.send(rank, report, REPORT))


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
