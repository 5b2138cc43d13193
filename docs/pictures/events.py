"""What happens in a short run on the virtual engine: who computes when, who waits, what travels."""

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from starling.budget import Budget
from starling.chance import derive_seed
from starling.configuration import Config
from starling.engines.virtual.cluster import Cluster, ComputeModel, LinkModel, MemoryModel
from starling.engines.virtual.engine import VirtualEngine
from starling.strategies import STRATEGIES
from starling.strategies.parts.server import GRADIENT
from starling.training.job import Job
from starling.training.speeds import Stragglers
from starling.workload import Ticket, Workload

NUM_WEIGHTS = 120
WEIGHTS_SECONDS = 0.03
"""The time that all weights take from one learner to another."""
PASS_SECONDS = 0.002
"""The time to go over all weights in host memory once."""
GRADIENT_SECONDS = 0.1
SLOW = 0
SLOWER = 3.0
LEARNERS = 4
"""Those that compute; a server of its own comes on top."""
STEPS = 24


@dataclass(frozen=True)
class Gradient:
    rank: int
    begin: float
    end: float


@dataclass(frozen=True)
class Averaging:
    """A learner's part in one averaging of weights: from its joining or sending to what it needed having come."""

    rank: int
    begin: float
    end: float


@dataclass(frozen=True)
class Mean:
    """A collective of a group: under way from when the last has joined."""

    group: tuple[int, ...]
    of_gradients: bool
    begin: float
    end: float


@dataclass(frozen=True)
class Message:
    """Weights or a gradient on their way to another learner."""

    sender: int
    receiver: int
    begin: float
    end: float


@dataclass(frozen=True)
class ShardWork:
    """A learner's reading or stepping of a piece of the model in host memory."""

    rank: int
    is_step: bool
    begin: float
    end: float


@dataclass
class Events:
    gradients: list[Gradient] = field(default_factory=list)
    staleness: dict[tuple[int, int], int] = field(default_factory=dict)
    """By rank and the gradient's number."""
    averagings: list[Averaging] = field(default_factory=list)
    means: list[Mean] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    shard_works: list[ShardWork] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    """When the averaging rounds opened, and last when it was clear that no other would."""
    claimed_last: dict[int, float] = field(default_factory=dict)
    """When a learner found the budget spent."""

    def of(self, rank: int) -> list[Gradient]:
        """A learner's gradients."""
        return [gradient for gradient in self.gradients if gradient.rank == rank]

    def on_shards(self, rank: int) -> list[ShardWork]:
        """What a learner did to pieces of the model in host memory."""
        return [work for work in self.shard_works if work.rank == rank]


class Watch:
    """Notes what one learner's strategy asks for and when it comes, by the engine's clock, and changes nothing."""

    def __init__(self, me: Any, events: Events, link: LinkModel) -> None:
        self._me, self._events, self._link = me, events, link
        self._not_stepped: deque[tuple[int, int]] = deque()  # gradients' numbers, and the weights' version then
        self._num_begun = 0
        self._arrived: deque[tuple[int, int]] = deque()  # at this server: whose gradient, which of its
        self._num_arrived: dict[int, int] = {}
        names = ("claim", "gradient", "step", "mean", "send", "receive", "round", "keep", "share")
        self._asked = {name: getattr(me, name) for name in names}
        for name in names:
            setattr(me, name, getattr(self, f"_{name}"))

    def _claim(self) -> bool:
        claimed: bool = self._asked["claim"]()
        if not claimed:
            self._events.claimed_last[self._me.rank] = self._me.now()
        return claimed

    def _gradient(self, at: Tensor) -> Any:
        begin = self._me.now()
        self._not_stepped.append((self._num_begun, self._me.replica.version))
        self._num_begun += 1
        handle = self._asked["gradient"](at)
        self._when(handle, lambda end: self._events.gradients.append(Gradient(self._me.rank, begin, end)))
        return handle

    def _step(self, gradient: Tensor, read_at: int | None = None, scale: float = 1.0) -> None:
        number, version = self._not_stepped.popleft()
        self._events.staleness[self._me.rank, number] = self._me.replica.version - version
        self._asked["step"](gradient, read_at, scale)

    def _mean(self, of: Any, group: Sequence[int] | None = None) -> Any:
        handle = self._asked["mean"](of, group)
        chosen = tuple(range(self._me.world) if group is None else group)
        size = of.nbytes if isinstance(of, Tensor) else self._me.weights.nbytes
        takes = self._link.reduce_seconds(size, len(chosen))
        joined = self._me.now() if isinstance(of, Tensor) else None

        def ended(end: float) -> None:
            if joined is not None:
                self._events.averagings.append(Averaging(self._me.rank, joined, end))
            if self._me.rank == chosen[0]:
                self._events.means.append(Mean(chosen, joined is None, end - takes, end))

        self._when(handle, ended)
        return handle

    def _send(self, peer: int, tensor: Tensor, tag: int) -> Any:
        begin = self._me.now()
        handle = self._asked["send"](peer, tensor, tag)
        if peer != self._me.rank and tensor.numel() > NUM_WEIGHTS / 8:  # else it is a word, or to oneself
            self._when(handle, lambda end: self._events.messages.append(Message(self._me.rank, peer, begin, end)))
        return handle

    def _receive(self, peer: int, like: Tensor, tag: int) -> Any:
        begin = self._me.now()
        handle = self._asked["receive"](peer, like, tag)

        def ended(end: float) -> None:
            self._events.averagings.append(Averaging(self._me.rank, begin, end))
            if self._me.own_shards.held and tag == GRADIENT:
                number = self._num_arrived[peer] = self._num_arrived.get(peer, -1) + 1
                self._arrived.append((peer, number))

        self._when(handle, ended)
        return handle

    def _keep(self, piece: slice, make_optimizer: Any = None) -> Any:
        shard = self._asked["keep"](piece, make_optimizer)
        self._watch_shard(shard, whose=lambda count: sorted(self._arrived.popleft() for _ in range(count)))
        return shard

    def _share(self, pieces: Sequence[slice]) -> Any:
        handle = self._asked["share"](pieces)
        for shard in self._me.own_shards.held:
            self._watch_shard(shard, whose=lambda _: [(self._me.rank, self._num_begun - 1)])
        return handle

    def _watch_shard(self, shard: Any, whose: Callable[[int], list[tuple[int, int]]]) -> None:
        """Note its work; `whose` tells which gradients (rank and number) a step of so many is made of."""
        read, step = shard.read, shard.step

        def watched_read() -> Any:
            begin, handle = self._me.now(), read()
            self._note_work(handle, is_step=False, begin=begin)
            return handle

        def watched_step(gradient: Tensor, step_metadata: Tensor, read_at: Sequence[int], scale: float = 1.0) -> Any:
            begin, handle = self._me.now(), step(gradient, step_metadata, read_at, scale)
            self._note_work(handle, is_step=True, begin=begin)

            def ended(_: float) -> None:
                for of, when in zip(whose(len(read_at)), read_at, strict=True):
                    self._events.staleness[of] = max(self._events.staleness.get(of, 0), shard.num_steps - when)

            if not self._me.job.strategy.steps_itself:  # else the learner's own step tells
                self._when(handle, ended)
            return handle

        shard.read, shard.step = watched_read, watched_step

    def _note_work(self, handle: Any, is_step: bool, begin: float) -> None:
        self._when(handle, lambda end: self._events.shard_works.append(ShardWork(self._me.rank, is_step, begin, end)))

    def _round(self, period: float) -> Any:
        handle = self._asked["round"](period)
        if self._me.rank == 0:
            self._when(handle, self._events.rounds.append)
        return handle

    def _when(self, handle: Any, then: Callable[[float], None]) -> None:
        if handle.event.processed:
            then(self._me.now())
        else:
            handle.event.callbacks.append(lambda _: then(self._me.now()))


class Line(Workload[Any]):
    """A problem of `NUM_WEIGHTS` weights; what it learns does not matter to the clock."""

    def make_model(self) -> nn.Module:
        return nn.Linear(NUM_WEIGHTS, 1, bias=False)

    def num_batches(self, epoch: int) -> int:
        return STEPS

    def load(self, ticket: Ticket) -> Sequence[Any]:
        return [_Numbers(torch.full((1, NUM_WEIGHTS), derive_seed(1, ticket.step) % 7 / 7.0))]

    def loss(self, model: nn.Module, examples: Any) -> Tensor:
        loss: Tensor = model(examples.inputs).square().mean()
        return loss


@dataclass(frozen=True)
class _Numbers:
    inputs: Tensor
    num_examples = 1
    num_frames = 1
    seconds = 0.0

    def to(self, device: torch.device) -> "_Numbers":
        return _Numbers(self.inputs.to(device))


def record(
    name: str,
    options: dict[str, Any],
    learners: int = LEARNERS,
    slower: float = SLOWER,
    weights_seconds: float = WEIGHTS_SECONDS,
    budget: Budget | None = None,
) -> Events:
    """Run a strategy on some learners, one of them slower, and tell what happened.

    A server of its own is a learner more. Without a budget, the run ends after `STEPS` mini-batches.
    """
    strategy = STRATEGIES[name]
    chosen: Config = strategy.options.model_validate(options)
    link = LinkModel(latency=0.0, bandwidth=NUM_WEIGHTS * 4 / weights_seconds)
    events = Events()

    def watched(me: Any, *arguments: Any) -> Coroutine[Any, Any, None]:
        Watch(me, events, link)
        return strategy.run(me, *arguments)

    job = Job(
        Line(),
        replace(strategy, run=watched),
        budget or Budget(steps=STEPS),
        lambda parameters: torch.optim.SGD(parameters, lr=0.001),
        options=chosen,
        stragglers=Stragglers(slow={SLOW: slower}),
        seed=4,
    )
    cluster = Cluster(
        compute=ComputeModel(distribution="uniform", seconds=GRADIENT_SECONDS, spread=0.2),
        link=link,
        memory=MemoryModel(bandwidth=NUM_WEIGHTS * 4 / PASS_SECONDS),
    )
    VirtualEngine(job, learners + (options.get("servers") == "own"), cluster).run()
    return events
