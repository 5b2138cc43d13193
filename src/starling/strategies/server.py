"""What the server of a shard does: it takes gradients, makes steps, and says who may have the weights when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from starling.configuration import Config
from starling.learner import Handle, Learner

if TYPE_CHECKING:
    from torch import Tensor

PULL, PUSH, LEAVE, NOTHING = 0.0, 1.0, 2.0, 3.0
"""What a worker asks for: weights; a step with the gradient behind the request; to leave; no step, for its mini-batch
gave no finite gradient."""
REQUEST, GRADIENT, AGE, WEIGHTS = range(4)
"""Tags of messages: a request; the gradient behind it; the number of steps in the weights, and the weights."""


class ServerOptions(Config):
    """The options of `parameter-server`."""

    update: Literal["synchronous", "hybrid", "asynchronous", "summed"] = "asynchronous"
    """Which gradients make a step: those of one worker at a time; of all workers; any that arrives; any `sum` of
    them."""
    sum: int | None = Field(default=None, ge=1)
    """`summed`: how many gradients make one step."""
    combine: Literal["sum", "mean"] | None = None
    """What is made of several gradients; by default the mean under `hybrid`, the sum under `summed`."""
    staleness_bound: int | None = Field(default=None, ge=0)
    """A worker that would be more than so many gradients ahead of the slowest waits; null: nobody waits."""
    shards: int = Field(default=1, ge=1)
    """Servers, each of which keeps a part of the model in host memory, with the optimizer's state."""
    servers: Literal["beside", "own"] = "beside"
    """Where servers run: beside the first workers, or as learners of their own, the last ones, that compute nothing."""
    overlap: bool = False
    """Compute the next gradient while new weights are on their way: it is taken at the weights before."""
    scale_by_staleness: bool = False
    """Divide the learning rate of a step by the mean staleness of its gradients, where that is above 1."""

    @model_validator(mode="after")
    def _makes_sense(self) -> ServerOptions:
        waits_for_nobody = self.update in ("asynchronous", "summed")
        if self.update == "summed" and self.sum is None:
            raise ValueError(
                "summed needs sum, the number of gradients that make one step; the number of workers is usual"
            )
        if self.sum is not None and self.update != "summed":
            raise ValueError(f"sum belongs to update: summed, not to {self.update}; leave it out")
        if self.combine is not None and self.update not in ("hybrid", "summed"):
            raise ValueError(f"combine: under {self.update} each gradient makes a step of its own; leave it out")
        if self.staleness_bound is not None and not waits_for_nobody:
            raise ValueError(f"staleness_bound: under {self.update} workers wait for each other anyway; leave it out")
        if self.overlap and not waits_for_nobody:
            raise ValueError(f"overlap: under {self.update} a worker needs the new weights first; leave it out")
        if self.overlap and self.staleness_bound == 0:
            raise ValueError("staleness_bound: 0 lets nobody compute while weights are on their way; overlap needs 1")
        return self

    def workers(self, world: int) -> range:
        """The learners that compute."""
        return range(world - self.shards if self.servers == "own" else world)

    def server(self, shard: int, world: int) -> int:
        """The learner that keeps a shard."""
        return world - self.shards + shard if self.servers == "own" else shard


class Server:
    """The server of one shard; all it does happens in one coroutine, one message after the other."""

    def __init__(self, me: Learner, piece: slice, options: ServerOptions) -> None:
        self._me, self._options = me, options
        self._shard = me.keep(piece)
        self._workers = options.workers(me.world)
        self._needed = {"hybrid": len(self._workers), "summed": options.sum or 1}.get(options.update, 1)
        self._held: list[tuple[int, Tensor, Tensor]] = []  # gradients not yet in a step: whose, its request, itself
        self._without: set[int] = set()  # `hybrid`: workers that have no gradient for the step
        self._num_pushed = dict.fromkeys(self._workers, 0)  # of the workers that have not left; nothing counts, too
        self._asking: list[int] = []  # workers that want weights, the first first
        self._turn: int | None = None  # who computes, where one does at a time

    async def serve(self) -> None:
        """Until all workers have left and have the last weights."""
        import torch

        me, like = self._me, torch.empty(self._shard.piece.stop - self._shard.piece.start, dtype=self._me.weights.dtype)
        request = torch.empty(2 + len(me.step_metadata), dtype=torch.float64)
        expected: dict[int, Handle[Tensor]] = {w: me.receive(w, request, REQUEST) for w in self._workers}
        pushing: dict[int, Tensor] = {}
        replies: dict[int, list[Handle[None]]] = {worker: [] for worker in self._workers}
        while expected:
            worker = await me.first(expected)
            message = await expected.pop(worker)
            if worker in pushing:
                await self._take(worker, pushing.pop(worker), message)
            elif message[0] == PUSH:
                pushing[worker] = message
            elif message[0] == NOTHING:
                await self._take_nothing(worker)
            elif message[0] == LEAVE:
                await self._leave(worker)
            else:
                self._asking.append(worker)
            if worker in self._num_pushed or message[0] == LEAVE:  # who has left asks once more, for the last weights
                expected[worker] = me.receive(worker, *((like, GRADIENT) if worker in pushing else (request, REQUEST)))
            for asking in [each for each in self._asking if self._may_have(each)]:
                for sending in replies[asking]:
                    await sending
                replies[asking] = await self._answer(asking)
        for sending in [each for handles in replies.values() for each in handles]:
            await sending

    async def _take(self, worker: int, request: Tensor, gradient: Tensor) -> None:
        """A gradient has come."""
        self._held.append((worker, request, gradient))
        await self._note_pushed(worker)

    async def _take_nothing(self, worker: int) -> None:
        """A worker's mini-batch gave no gradient. Only `hybrid` asks for one of each worker."""
        if self._options.update == "hybrid":
            self._without.add(worker)
        await self._note_pushed(worker)

    async def _note_pushed(self, worker: int) -> None:
        self._num_pushed[worker] += 1
        self._turn = None
        if len(self._held) + len(self._without) == self._needed:
            self._without.clear()
            if self._held:
                await self._step()

    async def _leave(self, worker: int) -> None:
        """A worker makes no more gradients."""
        del self._num_pushed[worker]
        self._turn = None if self._turn == worker else self._turn
        if not self._num_pushed and self._held:  # too few for a whole step, and no more will come
            await self._step()

    async def _step(self) -> None:
        """Make a step with the gradients held, summed in the order of ranks."""
        held, self._held = sorted(self._held, key=lambda each: each[0]), []
        step_metadata = self._newest(held)
        total = held[0][2]
        for _, _, gradient in held[1:]:
            total.add_(gradient)
        if (self._options.combine or ("mean" if self._options.update == "hybrid" else "sum")) == "mean":
            total.div_(len(held))
        read_at = [int(request[1]) for _, request, _ in held]
        staleness = self._shard.num_steps - sum(read_at) / len(read_at)
        scale = 1.0 / max(1.0, staleness) if self._options.scale_by_staleness else 1.0
        await self._shard.step(total, step_metadata, read_at, scale)

    @staticmethod
    def _newest(held: Sequence[tuple[int, Tensor, Tensor]]) -> Tensor:
        """The stamp of the gradient whose weights were read last."""
        return max(held, key=lambda each: float(each[1][1]))[1][2:]

    def _may_have(self, worker: int) -> bool:
        """Whether a worker that asks for weights gets them now."""
        if worker not in self._num_pushed:
            return not self._num_pushed
        if self._options.update == "synchronous":
            self._turn = worker if self._turn is None else self._turn
            return self._turn == worker
        if self._options.update == "hybrid":
            return worker not in self._without and all(worker != of for of, _, _ in self._held)
        bound = self._options.staleness_bound
        ahead = self._num_pushed[worker] + self._options.overlap - min(self._num_pushed.values())
        return bound is None or ahead <= bound

    async def _answer(self, worker: int) -> list[Handle[None]]:
        """Start sending the weights as they are now."""
        self._asking.remove(worker)
        import torch

        age = torch.tensor([self._shard.num_steps], dtype=torch.float64)
        weights = await self._shard.read()
        return [self._me.send(worker, age, AGE), self._me.send(worker, weights, WEIGHTS)]
