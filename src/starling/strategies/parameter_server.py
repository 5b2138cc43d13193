"""Parameter servers: workers compute, servers keep the model."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from starling.errors import ConfigError, PeerLost
from starling.learner import Handle, Learner, LoopEnded
from starling.strategies.base import Strategy, all_but_the_lost
from starling.strategies.server import AGE, GRADIENT, REPORT, WEIGHTS, Report, Server, ServerOptions

if TYPE_CHECKING:
    from torch import Tensor


async def parameter_server(me: Learner, options: ServerOptions) -> None:
    """Workers push gradients to servers and pull weights; a server steps whenever its rule says so.

    Equation, with w the only weights that count, in S pieces on as many servers::

        worker:  Phi <- w,  push g(Phi)
        server:  w <- w - a G

    with a the step of the server's optimizer and G by `options.update`: `asynchronous` each gradient as it arrives, so
    that w has changed since Phi; `summed` the sum of n gradients that arrived; `hybrid` the mean of all workers'
    gradients at the same w; `synchronous` the gradient of the one worker whose turn it is. `server_rules.py` has the
    equation of each. Under `staleness_bound` a worker waits that has finished more than that many gradients beyond the
    slowest.

    Gradients are clipped by the worker, since a server sees only a piece. At the end of a run gradients that are too
    few for a sum make a step of their own. A gradient that is not finite is not sent: it makes no step, and a mean or a
    sum is that of the others.

    Args:
        me: The learner that runs this text: a worker, a server, or both.
        options: The rule, and where the servers are.

    References:
        Dean et al. 2012, "Large Scale Distributed Deep Networks", NIPS (`asynchronous`: Downpour SGD, with shards).
        Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS
        (`staleness_bound`).
        Aji & Heafield 2019, "Making Asynchronous Stochastic Gradient Descent Work for Transformers", arXiv 1906.03496
        (`summed`).
        Zhang et al. 2016, "Staleness-aware Async-SGD for Distributed Deep Learning", arXiv 1511.05950
        (`scale_by_staleness`).
        `synchronous`, `hybrid` and `asynchronous` are the names of the Deep Speech line's parameter server.
    """
    num_weights, shards = len(me.weights), options.shards
    if shards > num_weights:
        raise ConfigError(f"strategy.shards: {shards} servers cannot share the model's {num_weights} parameters")
    pieces = [slice(num_weights * s // shards, num_weights * (s + 1) // shards) for s in range(shards)]
    kept = next((piece for s, piece in enumerate(pieces) if options.server(s, me.world) == me.rank), None)
    if me.rank not in options.workers(me.world):
        if kept is not None:
            await Server(me, kept, options).serve()
        return
    if kept is not None:
        me.background(Server(me, kept, options).serve())
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
                gradient = gradient.clone()  # the next one takes its place
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
        if options.update == "synchronous":  # a worker that has its turn at the first server has it at the others
            await server.arrive()
    for server in servers:
        await server.arrive()
        await server.settle()


class Remote:
    """A server as a worker sees it."""

    def __init__(self, me: Learner, rank: int, piece: slice) -> None:
        import torch

        self._me, self._rank, self._piece = me, rank, piece
        self.age = 0.0
        """The steps of the server that are in the weights of this worker."""
        self._num_finished = 0.0
        self._like_age = torch.zeros(1, dtype=torch.float64)
        self._like_weights = torch.empty(piece.stop - piece.start, dtype=me.weights.dtype)  # in host memory, as there
        self._arriving: tuple[Handle[Tensor], Handle[Tensor]] | None = None
        self._sending: list[Handle[None]] = []

    def pull(self) -> None:
        """Ask for the weights; `arrive` waits for them."""
        age = self._me.receive(self._rank, self._like_age, AGE)
        self._arriving = age, self._me.receive(self._rank, self._like_weights, WEIGHTS)
        self._report(self.age)

    async def arrive(self) -> None:
        """Put the weights that were asked for, if any were, in the place of this worker's own."""
        if self._arriving is not None:
            age, weights = self._arriving
            self._arriving, self.age = None, float(await age)
            self._me.replace(await weights, self._piece)

    def push(self, gradient: Tensor | None, age: float) -> None:
        """Start sending the server its piece of a gradient `[P]`, which must not change before `settle`.

        `age` is that of the weights at which it was taken. None: the mini-batch gave no finite gradient.
        """
        self._num_finished += 1
        self._report(math.nan if gradient is None else age)
        if gradient is not None:
            self._sending.append(self._me.send(self._rank, gradient[self._piece], GRADIENT))

    def leave(self) -> None:
        """Say that no more gradients will come."""
        self._num_finished = math.inf
        self._report(self.age)

    def _report(self, age: float) -> None:
        report = Report(self._num_finished, age, self._me.step_metadata).encode()
        self._sending.append(self._me.send(self._rank, report, REPORT))

    async def settle(self) -> None:
        """Wait until the server has all that was sent."""
        for sending in self._sending:
            await sending
        self._sending.clear()


def _check(options: ServerOptions, world: int) -> None:
    if options.servers == "own" and world <= options.shards:
        raise ConfigError(
            f"strategy.shards: {options.shards} servers as learners of their own leave no worker among {world} "
            "learners; start more learners, or choose servers: beside"
        )
    if options.shards > world:
        raise ConfigError(
            f"strategy.shards: {options.shards} servers do not fit beside {world} learners; at most {world}"
        )


def _num_workers(options: ServerOptions, world: int) -> int:
    return len(options.workers(world))


def _survivors(options: ServerOptions, world: int, lost: Collection[int]) -> Sequence[int]:
    """All that are left, as long as every server and a worker are among them."""
    for shard in range(options.shards):
        if (server := options.server(shard, world)) in lost:
            raise PeerLost(
                f"learner {server} of {world} was a server, and the part of the model that it kept is lost with it"
            )
    left = all_but_the_lost(options, world, lost)
    _check(options, len(left))
    return left


PARAMETER_SERVER = Strategy(
    "parameter-server",
    "workers push gradients to servers, which keep the model",
    parameter_server,
    lambda options, world: _num_workers(options, world) if options.update == "hybrid" else 1,
    ServerOptions,
    num_workers=_num_workers,
    check=_check,
    survivors=_survivors,
    averages_gradients=lambda options: options.update == "hybrid",
    is_served=True,
    steps_itself=False,
)
