"""Parameter servers: workers compute, servers keep the model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from starling.errors import ConfigError
from starling.learner import Handle, Learner, LoopEnded
from starling.strategies.server import (
    AGE,
    GRADIENT,
    LEAVE,
    NOTHING,
    PULL,
    PUSH,
    REQUEST,
    WEIGHTS,
    Server,
    ServerOptions,
)

if TYPE_CHECKING:
    from torch import Tensor


async def parameter_server(me: Learner, options: ServerOptions) -> None:
    """Workers push gradients to servers and pull weights; a server steps whenever its rule says so.

    Equation, with w the only weights that count, in S pieces on as many servers::

        worker:  Phi <- w,  push g(Phi)
        server:  w <- w - a G

    with a the step of the server's optimizer and G by `options.update`: `hybrid` the mean of all workers' gradients at
    the same w; `asynchronous` each gradient as it arrives, so that w has changed since Phi; `summed` the sum of n
    gradients that arrived; `synchronous` the gradient of the one worker whose turn it is. Under `staleness_bound` a
    worker that has pushed more than so many gradients beyond the slowest worker waits. Gradients are clipped by the
    worker, since a server sees only a piece. At the end gradients that are too few for a sum make a step of their own.
    For a gradient that is not finite the worker sends word that there is none: it makes no step, and a mean or a sum is
    that of the others.

    Sources: Dean et al. 2012, "Large Scale Distributed Deep Networks" (`asynchronous`: Downpour SGD, with shards); Ho
    et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server"
    (`staleness_bound`); Aji & Heafield 2019, arXiv 1906.03496 (`summed`); Zhang et al. 2016, "Staleness-aware
    Async-SGD", arXiv 1511.05950 (`scale_by_staleness`). `synchronous`, `hybrid` and `asynchronous` are what the
    parameter server of the Deep Speech line called them.
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
                    server.ask(PULL)
            else:
                for server in servers:
                    await server.settle()
                await _pull(servers, options)
    for server in servers:
        server.ask(LEAVE)
    for server in servers:
        await server.arrive()
    await _pull(servers, options)


async def _pull(servers: Sequence[Remote], options: ServerOptions) -> None:
    for server in servers:
        server.ask(PULL)
        if options.update == "synchronous":  # who has its turn at the first server has it at the others
            await server.arrive()
    for server in servers:
        await server.arrive()
        await server.settle()


class Remote:
    """A server as a worker sees it."""

    def __init__(self, me: Learner, rank: int, piece: slice) -> None:
        import torch

        self._me, self._rank, self._piece = me, rank, piece
        self.age = torch.zeros(1, dtype=torch.float64)
        """How many steps of the server are in the weights that this worker has, `[1]`."""
        self._like = torch.empty(piece.stop - piece.start, dtype=me.weights.dtype)  # in host memory, as the shard
        self._arriving: tuple[Handle[Tensor], Handle[Tensor]] | None = None
        self._sending: list[Handle[None]] = []

    def ask(self, what: float) -> None:
        """Tell the server what is wanted. After PULL comes `arrive`."""
        if what == PULL:
            age = self._me.receive(self._rank, self.age, AGE)
            self._arriving = age, self._me.receive(self._rank, self._like, WEIGHTS)
        self._tell(what, self.age)

    async def arrive(self) -> None:
        """Take the weights that were asked for, if any were, in place of one's own."""
        if self._arriving is not None:
            age, weights = self._arriving
            self._arriving, self.age = None, await age
            self._me.replace(await weights, self._piece)

    def push(self, gradient: Tensor | None, age: Tensor) -> None:
        """Start sending the server its piece of a gradient `[P]`, which is not to be changed before `settle`, and the
        age of the weights that it was taken at; None: the mini-batch gave no finite gradient."""
        if gradient is None:
            self._tell(NOTHING, age)
            return
        self._tell(PUSH, age)
        self._sending.append(self._me.send(self._rank, gradient[self._piece], GRADIENT))

    def _tell(self, what: float, age: Tensor) -> None:
        import torch

        words = torch.cat([torch.tensor([what], dtype=torch.float64), age, self._me.step_metadata])
        self._sending.append(self._me.send(self._rank, words, REQUEST))

    async def settle(self) -> None:
        """Wait until the server has all that was sent."""
        for sending in self._sending:
            await sending
        self._sending.clear()
