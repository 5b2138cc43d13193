"""What happens in a short run on the virtual engine: who computes when, who waits, what travels."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from starling.budget import Budget
from starling.chance import derive_seed
from starling.configuration import Config
from starling.engines.cluster import Cluster, ComputeModel, LinkModel
from starling.engines.job import Job
from starling.engines.stragglers import Stragglers
from starling.engines.virtual import VirtualEngine
from starling.strategies import STRATEGIES, Strategy
from starling.workload import Ticket, Workload

NUM_WEIGHTS = 120
WEIGHTS_SECONDS = 0.03
"""The time that all weights take from one learner to another."""
GRADIENT_SECONDS = 0.1
SLOW = 0
SLOWER = 3.0
LEARNERS = 4
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
    sender: int
    receiver: int
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
    rounds: list[float] = field(default_factory=list)
    """When the averaging rounds opened, and last when it was clear that no other would."""
    claimed_last: dict[int, float] = field(default_factory=dict)
    """When a learner found the budget spent."""

    def of(self, rank: int) -> list[Gradient]:
        """A learner's gradients."""
        return [gradient for gradient in self.gradients if gradient.rank == rank]


class Watch:
    """Notes what one learner's strategy asks for and when it comes, by the engine's clock, and changes nothing."""

    def __init__(self, me: Any, events: Events, link: LinkModel) -> None:
        self._me, self._events, self._link = me, events, link
        self._version = 0
        self._asked = {
            name: getattr(me, name) for name in ("claim", "gradient", "step", "mean", "send", "receive", "round")
        }
        for name in self._asked:
            setattr(me, name, getattr(self, f"_{name}"))

    def _claim(self) -> bool:
        claimed: bool = self._asked["claim"]()
        if not claimed:
            self._events.claimed_last[self._me.rank] = self._me.now()
        return claimed

    def _gradient(self, at: Tensor) -> Any:
        begin, self._version = self._me.now(), self._me.replica.version
        handle = self._asked["gradient"](at)
        self._when(handle, lambda end: self._events.gradients.append(Gradient(self._me.rank, begin, end)))
        return handle

    def _step(self, gradient: Tensor) -> None:
        number = len(self._events.of(self._me.rank)) - 1
        self._events.staleness[self._me.rank, number] = self._me.replica.version - self._version
        self._asked["step"](gradient)

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
        self._when(handle, lambda end: self._events.messages.append(Message(self._me.rank, peer, begin, end)))
        return handle

    def _receive(self, peer: int, like: Tensor, tag: int) -> Any:
        begin = self._me.now()
        handle = self._asked["receive"](peer, like, tag)
        self._when(handle, lambda end: self._events.averagings.append(Averaging(self._me.rank, begin, end)))
        return handle

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


def record(name: str, options: dict[str, Any]) -> Events:
    """Run `STEPS` mini-batches of a strategy on `LEARNERS` learners, one of them slow, and tell what happened."""
    strategy = STRATEGIES[name]
    chosen: Config = strategy.options.model_validate(options)
    link = LinkModel(latency=0.0, bandwidth=NUM_WEIGHTS * 4 / WEIGHTS_SECONDS)
    events = Events()

    def watched(me: Any, *arguments: Any) -> Coroutine[Any, Any, None]:
        Watch(me, events, link)
        return strategy.run(me, *arguments)

    job = Job(
        Line(),
        Strategy(name, strategy.summary, watched, strategy.team_size, strategy.options),
        Budget(steps=STEPS),
        lambda parameters: torch.optim.SGD(parameters, lr=0.001),
        options=chosen,
        stragglers=Stragglers(slow={SLOW: SLOWER}),
        seed=4,
    )
    compute = ComputeModel(distribution="uniform", seconds=GRADIENT_SECONDS, spread=0.2)
    VirtualEngine(job, LEARNERS, Cluster(compute=compute, link=link)).run()
    return events
