"""The simulated network. It contains messages that take time, means that learners join, and rounds that open."""

import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar
from weakref import WeakValueDictionary, ref

import simpy
from torch import Tensor

from starling.engines.virtual.cluster import Links
from starling.engines.virtual.simulation import Simulation
from starling.errors import ProtocolError
from starling.learner import EncodedMean, Handle

T = TypeVar("T")
_ORDER = count()
"""Counter that numbers events in the order in which they happen."""


class VirtualHandle(Handle[T]):
    """Work that is done when `event` happens.

    `waits_for` says, for the deadlock report, for what the work waits. `computing` is the part of the seconds until the
    event that is the learner's own computation.
    """

    is_own = False
    """Whether the work waits only for a gradient of the learner itself."""

    def __init__(
        self,
        event: simpy.Event,
        result: Callable[[], T],
        waits_for: Callable[[], str],
        computing: float = 0.0,
    ) -> None:
        self.event = event
        self.waits_for = waits_for
        self.computing = computing
        self.place: int | None = None
        """Position of the event in the order of events; None until the event has happened."""
        self._result = result
        if event.callbacks is None:
            self._happened(event)
        else:
            event.callbacks.append(self._happened)

    def result(self) -> T:
        return self._result()

    def _happened(self, _: object) -> None:
        self.place = next(_ORDER)


def first_of(
    environment: simpy.Environment, handles: Mapping[int, Handle[Any]], tell: Callable[[int], object]
) -> VirtualHandle[int]:
    """Return a handle of the key of the handle whose work is done first. `tell` is called with that key when the result
    is taken."""
    work = {key: handle for key, handle in handles.items() if isinstance(handle, VirtualHandle)}

    def result() -> int:
        _, key = min((handle.place, key) for key, handle in work.items() if handle.place is not None)
        tell(key)
        return key

    return VirtualHandle(
        simpy.AnyOf(environment, [handle.event for handle in work.values()]),
        result,
        lambda: " or ".join(handle.waits_for() for handle in work.values()) or "nothing",
    )


class VirtualGradient(VirtualHandle[Tensor]):
    """A gradient. Once it has been passed to `mean`, only the mean may be awaited, as on the `processes` engine."""

    is_own = True
    refusal: ProtocolError | None = None
    """Error that is raised when the gradient is awaited."""

    def result(self) -> Tensor:
        if self.refusal is not None:
            raise self.refusal
        return super().result()


class _Content:
    """The content of a message at the time at which it was sent. All receivers share one copy, to which no learner may
    write."""

    def __init__(self, sent: Tensor) -> None:
        self._sent, self._version, self.copy = ref(sent), sent._version, sent.clone()

    def is_still(self, tensor: Tensor) -> bool:
        """Return whether the copy equals the present values of `tensor`."""
        return self._sent() is tensor and self._version == tensor._version


@dataclass(slots=True)
class _Message:
    event: simpy.Event
    is_sent: bool
    content: _Content | None = None


class Mean:
    """A mean of a group's vectors. Vectors are added in rank order; a vector that arrives before its turn is copied and
    kept. Vectors may also be sent encoded; the mean is then computed once the parts of all learners have arrived."""

    def __init__(self, event: simpy.Event, group: Sequence[int]) -> None:
        self.event = event
        self.group = group
        self.result: Tensor | None = None
        self._brought = ""  # description of the vectors, which must be the same for all learners
        self._num_summed = 0
        self._early: dict[int, Any] = {}  # parts that arrived before their turn, by position in the group

    def join(self, rank: int, part: Tensor | EncodedMean) -> bool:
        """Add the present values of a learner's part, and return whether it was the last part."""
        brought = (
            f"{list(part.shape)}"
            if isinstance(part, Tensor)
            else f"{len(part.vector)} numbers in {part.message_bytes} bytes"
        )
        self._brought = self._brought or brought
        if brought != self._brought:
            raise ProtocolError(f"learner {rank} cannot join a mean with {brought}: others brought {self._brought}")
        place = self.group.index(rank)
        if not isinstance(part, Tensor):
            self._early[place] = part
            if len(self._early) == len(self.group):
                self.result = self._decode(part)
        elif place != self._num_summed:
            self._early[place] = part.clone()
        else:
            self.result = part.clone() if self.result is None else self.result.add_(part)
            self._num_summed += 1
            while self._num_summed in self._early:
                self.result.add_(self._early.pop(self._num_summed))
                self._num_summed += 1
            if self._num_summed == len(self.group):
                self.result.div_(len(self.group))
        return self._num_summed + len(self._early) == len(self.group)

    def _decode(self, last: EncodedMean) -> Tensor:
        if last.vector.is_meta:
            return last.vector
        parts: list[EncodedMean] = [self._early[place] for place in range(len(self.group))]
        sent = [each.messages() for each in parts]
        return last.result([each.combine([row[place] for row in sent]) for place, each in enumerate(parts)])

    def missing(self) -> list[int]:
        """Return the ranks that have not joined."""
        places = range(self._num_summed, len(self.group))
        return [self.group[place] for place in places if place not in self._early]


class Network:
    """Carries messages between learners over the links of the cluster, and records each arrival.

    `names` contains the learners' names, by rank. While a partition separates some of the learners, messages between
    them wait until `heal` is called.
    """

    def __init__(self, simulation: Simulation, names: Sequence[int]) -> None:
        self._environment, self._cluster = simulation.environment, simulation.cluster
        self._links = Links(simulation.cluster, simulation.job.seed)
        self._record, self._names, self._apart = simulation.record, names, simulation.apart
        self._held: list[tuple[simpy.Event, Sequence[int]]] = []
        self._channels: dict[tuple[int, int, int], deque[_Message]] = {}
        """Messages, in order, that were sent but not yet requested, or requested but not yet sent. The key consists of
        sender, receiver and tag."""
        self._means: dict[tuple[int, str, int], Mean] = {}
        self._sent: WeakValueDictionary[int, _Content] = WeakValueDictionary()  # last content that each learner sent

    def send(self, rank: int, peer: int, tensor: Tensor, tag: int) -> Handle[None]:
        """Deliver `tensor` to `peer` after the time that the message takes."""
        message = self._match((rank, peer, tag), is_sent=True)
        content = self._sent.get(rank)
        if content is None or not content.is_still(tensor):
            content = self._sent[rank] = _Content(tensor)
        message.content = content
        if rank == peer:
            self._happen(message.event, self._cluster.memory.seconds(tensor.nbytes, 1), [rank, peer])
        else:
            self._carry(message.event, tensor.nbytes, rank, peer)
        return VirtualHandle(message.event, lambda: None, lambda: f"its message to learner {self._names[peer]}")

    def _match(self, channel: tuple[int, int, int], is_sent: bool) -> _Message:
        """Return the first message of a channel whose other side is already known, or a new message."""
        messages = self._channels.get(channel)
        if messages is None or messages[0].is_sent == is_sent:
            message = _Message(self._environment.event(), is_sent)
            self._channels.setdefault(channel, deque()).append(message)
            return message
        if len(messages) == 1:
            del self._channels[channel]
        return messages.popleft()

    def _carry(self, event: simpy.Event, num_bytes: int, rank: int, peer: int) -> None:
        """Trigger `event` after the time that a message takes on its link, including the waits for uplinks."""
        sender, receiver = self._names[rank], self._names[peer]
        link = self._links.between(sender, receiver)
        seconds = link.send_seconds(num_bytes) * self._links.jitter(sender, receiver)
        waited = self._links.leave(sender, receiver, self._environment.now, num_bytes)
        if waited is None:
            self._happen(event, seconds, [rank, peer])
            return

        def reach(_: object = None) -> None:
            queued = self._links.enter(receiver, self._environment.now, num_bytes)
            self._happen(event, queued + seconds - link.latency, [rank, peer])

        if waited + link.latency > 0.0:
            self._environment.timeout(waited + link.latency).callbacks.append(reach)
        else:
            reach()

    def receive(self, rank: int, peer: int, tag: int, check: Callable[[Tensor], None]) -> Handle[Tensor]:
        """Receive the tensor that `peer` sends under `tag`. `check` raises an error if the tensor is not as
        expected."""
        message = self._match((peer, rank, tag), is_sent=False)

        def result() -> Tensor:
            self._record(self._names[rank], "receive", struct.pack("<qq", peer, tag))
            if message.content is None:
                raise ProtocolError(f"learner {rank} read a message of learner {peer} before it had come")
            check(message.content.copy)
            return message.content.copy

        return VirtualHandle(message.event, result, lambda: f"learner {self._names[peer]} to send under tag {tag}")

    def mean(
        self, rank: int, group: Sequence[int], activity: str, number: int, of: Tensor | Handle[Tensor] | EncodedMean
    ) -> Handle[Tensor]:
        """Join the mean of a group that has this number. `of` is a vector, whose present values are used; a gradient,
        which is used once it is complete; or a part of a mean whose vectors are sent encoded.

        Means of a learner's foreground and of its background are numbered separately.
        """
        name = (group[0], activity, number)
        mean = self._means.setdefault(name, Mean(self._environment.event(), group))

        def join(part: Tensor | EncodedMean) -> None:
            if mean.join(rank, part):
                del self._means[name]
                names = [self._names[each] for each in group]
                num_bytes = part.nbytes if isinstance(part, Tensor) else len(group) * part.message_bytes
                longer = self._links.jitter(names[0], names[-1])
                self._happen(mean.event, self._links.reduce(names, self._environment.now, num_bytes, longer), group)

        computing = 0.0
        if isinstance(of, VirtualHandle) and not of.event.processed:
            computing = of.computing
            of.event.callbacks.append(lambda _: join(VirtualHandle.result(of)))
        else:
            join(of.result() if isinstance(of, Handle) else of)

        def result() -> Tensor:
            self._record(self._names[rank], "mean", struct.pack("<q", number))
            if mean.result is None:
                raise ProtocolError(f"learner {rank} read a mean before all learners had joined it")
            return mean.result

        return VirtualHandle(
            mean.event, result, lambda: f"mean {number}, which {self._named(mean.missing())} did not join", computing
        )

    def heal(self) -> None:
        """Deliver the messages that have waited for the end of a partition, if they can now arrive."""
        held, self._held = self._held, []
        for event, ranks in held:
            self._happen(event, self._cluster.link.latency, ranks)

    def _happen(self, event: simpy.Event, seconds: float, ranks: Sequence[int]) -> None:
        """Trigger `event` after some simulated seconds, if the learners can then reach each other."""

        def arrive(_: object) -> None:
            if self._apart([self._names[rank] for rank in ranks]):
                self._held.append((event, ranks))
            else:
                event.succeed()

        self._environment.timeout(seconds).callbacks.append(arrive)

    def _named(self, ranks: Sequence[int]) -> str:
        return " and ".join(f"learner {self._names[rank]}" for rank in ranks) or "the network"
