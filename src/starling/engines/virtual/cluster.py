"""The cluster that the virtual engine simulates: how long gradients, messages and memory accesses take."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from starling.chance import derive_seed
from starling.configuration import Config, PublicConfig


class ComputeModel(Config):
    """The time that a gradient takes, which is drawn for each gradient. The section `stragglers` makes some learners
    slower."""

    distribution: Literal["constant", "uniform", "log-normal"] = "constant"
    """Distribution of the seconds of a gradient."""
    seconds: float = Field(default=0.1, gt=0.0)
    """Mean of the distribution in seconds."""
    spread: float = Field(default=0.0, ge=0.0)
    """Spread of the distribution. uniform: half the width as a fraction of the mean, below 1; log-normal: the standard
    deviation of the logarithm."""
    batched: bool = False
    """Whether gradients that are under way at the same time are computed in one call, if the model allows it. This is
    faster with many learners and a small model. Events stay the same, but gradients agree only up to rounding, so the
    event hash differs."""
    processes: int = Field(default=1, ge=1, le=256)
    """Number of processes on this machine that compute gradients. Results do not depend on this number. With 1, the
    process of the simulation computes them."""

    @model_validator(mode="after")
    def _is_possible(self) -> "ComputeModel":
        if self.batched and self.processes > 1:
            raise ValueError("batched gradients are computed in one process; leave out batched or processes")
        if self.distribution == "uniform" and self.spread >= 1.0:
            raise ValueError(f"a uniform spread of {self.spread} would give negative times; it must be below 1")
        if self.distribution == "constant" and self.spread > 0.0:
            raise ValueError("a constant time has no spread; choose uniform or log-normal")
        return self


class ComputeTimes:
    """The gradient times of one learner. They come from a random stream that depends on the learner and the seed."""

    communication_seconds = 0.0
    """Seconds of communication within an island that every gradient needs; 0 without islands."""
    communication_bytes = 0

    def __init__(self, model: ComputeModel, seed: int, rank: int) -> None:
        self._model = model
        self._random = random.Random(derive_seed(seed, "compute time", rank))

    def draw(self) -> float:
        """Draw the seconds that the next gradient takes."""
        mean, spread = self._model.seconds, self._model.spread
        if self._model.distribution == "uniform":
            return mean * self._random.uniform(1.0 - spread, 1.0 + spread)
        if self._model.distribution == "log-normal":
            return mean * self._random.lognormvariate(-0.5 * spread * spread, spread)
        return mean


AllReduce = Literal["ring", "tree", "hierarchical", "fastest"]
"""Algorithm of a mean. `Links` contains the equations. fastest: the fastest of the others, chosen for each mean."""


class LinkModel(Config):
    """The link between any two learners on different nodes. It is the same in both directions. By default each learner
    is a node, and all messages of a node share the bandwidth of one link (`nodes.uplink`)."""

    latency: float = Field(default=50e-6, ge=0.0)
    """Seconds before the first byte of a message arrives."""
    bandwidth: float = Field(default=1.25e9, gt=0.0)
    """Bytes per second (the default is 10 Gbit/s)."""
    jitter: float = Field(default=0.0, ge=0.0)
    """Random delay of messages. Each message takes longer by an exponentially distributed random fraction of its time;
    this is the mean of that fraction. Messages can then overtake each other."""
    all_reduce: AllReduce = "ring"
    """Algorithm that computes a mean of all learners. fastest: the fastest of the others, chosen for each mean."""

    def send_seconds(self, num_bytes: int) -> float:
        """Return the seconds that one message takes."""
        return self.latency + num_bytes / self.bandwidth

    def reduce_seconds(self, num_bytes: int, world: int) -> float:
        """Return the seconds that a ring all-reduce takes, which consists of 2 (L - 1) messages of 1/L of the bytes."""
        return 2 * (world - 1) * self.send_seconds(-(-num_bytes // world))


class NodeModel(Config):
    """Nodes of several learners. Links inside a node are faster, and the learners of a node share its uplink."""

    size: int = Field(default=1, ge=1)
    """Number of learners on a node. Learners 0 to size - 1 are on the first node. The last node may have fewer
    learners."""
    latency: float = Field(default=5e-6, ge=0.0)
    """Seconds before the first byte of a message inside a node arrives."""
    bandwidth: float = Field(default=5e10, gt=0.0)
    """Bytes per second between any two learners of a node."""
    uplink: Annotated[float, Field(gt=0.0)] | Literal["unlimited"] | None = None
    """Bytes per second in each direction between a node and all other nodes. The messages of the node's learners share
    this bandwidth. None means the bandwidth of one link. unlimited: each message has a separate link, which is
    unrealistic."""


class MemoryModel(Config):
    """The host memory that servers and learners on one machine read and write. The model has no contention for this
    memory."""

    bandwidth: float = Field(default=1e10, gt=0.0)
    """Bytes per second."""

    def seconds(self, num_bytes: int, passes: int) -> float:
        """Return the seconds that `passes` passes over `num_bytes` take."""
        return num_bytes * passes / self.bandwidth


class WatchModel(Config):
    """The times after which a loss is noticed and the survivors continue. The defaults are roughly the times of the
    `processes` engine on one machine (decision 0005)."""

    notice: float = Field(default=0.05, ge=0.0)
    """Seconds from the death of a learner until the survivors are notified."""
    regroup: float = Field(default=0.3, ge=0.0)
    """Seconds that the survivors take to form a new membership, once all of them have left the old one."""
    silence: float = Field(default=600.0, gt=0.0)
    """Seconds without a heartbeat after which a learner is treated as killed."""
    start: float = Field(default=0.0, ge=0.0)
    """Seconds that a process takes to start, before its learner joins. They count in the goodput."""


class Cluster(PublicConfig):
    """The machines and links that `starling simulate` simulates; the `cluster:` section of a recipe.

    Links are finite: messages queue at their node's uplink, in each direction, unless `nodes` has
    `uplink: unlimited`. Times are in seconds, bandwidths in bytes per second. By default a gradient takes 0.1 s, each
    learner is a node, and links have a latency of 50 µs and 1.25e9 bytes per second.

    Each part is a mapping:

    - compute: `seconds` of a gradient, `distribution` and `spread`
    - link: `latency`, `bandwidth`, `jitter` and `all_reduce` of links between nodes
    - nodes: `size`, and the `latency`, `bandwidth` and `uplink` of nodes with several learners
    - memory: `bandwidth` of a machine's memory
    - watch: `notice`, `regroup`, `silence` and `start` of a run that loses learners

    Example:
        >>> nodes = {"size": 8, "latency": 5e-6, "bandwidth": 150e9}
        >>> cluster = starling.Cluster(compute={"seconds": 0.25}, link={"bandwidth": 12.5e9}, nodes=nodes)
        >>> cluster.link.latency
        5e-05
    """

    compute: ComputeModel = Field(default_factory=ComputeModel)
    """The time that a gradient takes."""
    link: LinkModel = Field(default_factory=LinkModel)
    """The links between nodes."""
    nodes: NodeModel = Field(default_factory=NodeModel)
    """The nodes on which learners are placed."""
    memory: MemoryModel = Field(default_factory=MemoryModel)
    """The memory of a machine, for servers and shared memory."""
    watch: WatchModel = Field(default_factory=WatchModel)
    """The time after which a loss is noticed."""

    @property
    def uplink(self) -> float | None:
        """Bytes per second in each direction that the messages of a node share. None if the recipe makes uplinks
        unlimited."""
        if self.nodes.uplink == "unlimited":
            return None
        return self.link.bandwidth if self.nodes.uplink is None else self.nodes.uplink

    @model_validator(mode="after")
    def _has_nodes(self) -> "Cluster":
        if self.link.all_reduce == "hierarchical" and self.nodes.size == 1:
            raise ValueError(
                "link.all_reduce: hierarchical needs nodes of several learners; set nodes.size, or choose ring, tree "
                "or fastest"
            )
        return self


class Links:
    """The times of messages and means on the links between learners: inside a node, between nodes, and through uplinks.
    Learners are identified by their names.

    An uplink is first in, first out: messages leave a node, or enter it, whole and in the order in which they arrive at
    the uplink. TCP would share the uplink fairly. Both methods finish a burst of messages at the same moment, because
    neither leaves the uplink idle; they differ only in the arrival times of the earlier messages of the burst. Fair
    sharing would have to reschedule every message under way whenever a message begins or ends. The queue costs only one
    more event for each message, and the arrival of a message does not depend on later messages.
    """

    def __init__(self, cluster: Cluster, seed: int = 0) -> None:
        nodes, link = cluster.nodes, cluster.link
        self._seed = seed
        self._random: dict[tuple[int, int], random.Random] = {}
        self._size, self._algorithm = nodes.size, link.all_reduce
        self._inside = LinkModel(latency=nodes.latency, bandwidth=nodes.bandwidth)
        self._uplink = math.inf if cluster.uplink is None else cluster.uplink
        rate = min(link.bandwidth, self._uplink)
        self._between = link if rate == link.bandwidth else link.model_copy(update={"bandwidth": rate})
        self._free: dict[tuple[str, int], float] = {}
        """Time at which the last queued message will have passed each uplink, by direction and node."""

    def node(self, name: int) -> int:
        """Return the node on which a learner is."""
        return name // self._size

    def between(self, sender: int, receiver: int) -> LinkModel:
        """Return the link that carries a message, with the speed that it has if there is no other traffic."""
        return self._inside if self.node(sender) == self.node(receiver) else self._between

    def jitter(self, sender: int, receiver: int) -> float:
        """Draw the factor by which the next message takes longer, from a random stream that depends on the two learners
        and the seed."""
        if self._between.jitter == 0.0:
            return 1.0
        pair = sender, receiver
        if pair not in self._random:
            self._random[pair] = random.Random(derive_seed(self._seed, "message time", *pair))
        return 1.0 + self._between.jitter * self._random[pair].expovariate(1.0)

    def leave(self, sender: int, receiver: int, now: float, num_bytes: int) -> float | None:
        """Queue a message at its sender's uplink, and return the seconds until its first byte leaves the node. Return
        None if the message needs no uplink, or if uplinks are unlimited."""
        if self._uplink == math.inf or self.node(sender) == self.node(receiver):
            return None
        return self._queue(("leaving", self.node(sender)), now, num_bytes)

    def enter(self, receiver: int, now: float, num_bytes: int) -> float:
        """Queue a message that has reached its receiver's uplink, and return the seconds until its first byte enters
        the node."""
        return self._queue(("entering", self.node(receiver)), now, num_bytes)

    def _queue(self, uplink: tuple[str, int], now: float, num_bytes: int) -> float:
        begin = max(now, self._free.get(uplink, 0.0))
        self._free[uplink] = begin + num_bytes / self._uplink
        return begin - now

    def reduce(self, group: Sequence[int], now: float, num_bytes: int, longer: float = 1.0) -> float:
        """Return the seconds until an all-reduce that begins now is done. `longer` multiplies the time that the
        all-reduce takes on the links.

        An all-reduce between nodes waits until their uplinks are free in both directions, and then occupies them until
        it ends.
        """
        seconds = self.reduce_seconds(group, num_bytes) * longer
        nodes = {self.node(name) for name in group}
        if self._uplink == math.inf or len(nodes) == 1:
            return seconds
        uplinks = [(direction, node) for direction in ("leaving", "entering") for node in nodes]
        free = max(self._free.get(each, 0.0) for each in uplinks)
        seconds += max(0.0, free - now)  # without other traffic, the result is bit-identical to the time of the ring
        self._free |= dict.fromkeys(uplinks, now + seconds)
        return seconds

    def reduce_seconds(self, group: Sequence[int], num_bytes: int) -> float:
        """Return the seconds that an all-reduce takes on links without other traffic."""
        sizes = Counter(self.node(name) for name in group)
        shape = len(group), max(sizes.values()), len(sizes), num_bytes
        ways = {"ring": self._ring, "tree": self._tree, "hierarchical": self._hierarchical}
        return min(way(*shape) for name, way in ways.items() if self._algorithm in (name, "fastest"))

    def _ring(self, world: int, per_node: int, num_nodes: int, num_bytes: int) -> float:
        """Return the seconds that a ring takes. It consists of 2 (L - 1) steps, in each of which every one of the L
        learners sends 1/L of the bytes to the next learner. The slowest link determines the time of a step. The ring
        passes through one node after another, so that it crosses each uplink once."""
        used = [link for link, count in ((self._inside, per_node), (self._between, num_nodes)) if count > 1]
        return max((link.reduce_seconds(num_bytes, world) for link in used), default=0.0)

    def _tree(self, world: int, per_node: int, num_nodes: int, num_bytes: int) -> float:
        """Return the seconds that a double binary tree takes. The vectors are added on the way up the tree, and the sum
        is copied on the way down, in a pipeline; every link transfers all bytes twice.

        The time is 2 (h_in latency_in + h_out latency_out) + 2 bytes / bandwidth, where h_in and h_out are the heights
        of the tree inside a node and between nodes, and the bandwidth is that of the slowest link (Sanders, Speck &
        Träff 2009; NCCL from version 2.4).
        """
        used = [(link, count) for link, count in ((self._inside, per_node), (self._between, num_nodes)) if count > 1]
        height_seconds = sum(link.latency * (count - 1).bit_length() for link, count in used)
        return 2.0 * (height_seconds + max((num_bytes / link.bandwidth for link, _ in used), default=0.0))

    def _hierarchical(self, world: int, per_node: int, num_nodes: int, num_bytes: int) -> float:
        """Return the seconds that a hierarchical all-reduce takes. It consists of a reduce-scatter inside each node,
        simultaneous rings between the nodes, one for each of the G parts, and an all-gather inside each node. The
        uplink carries the bytes of one learner instead of those of each learner in turn.

        The rings share the uplink.
        """
        part = -(-num_bytes // per_node)
        inside = 2 * (per_node - 1) * self._inside.send_seconds(part)
        rate = min(self._between.bandwidth, self._uplink / per_node)
        between = 2 * (num_nodes - 1) * (self._between.latency + -(-part // num_nodes) / rate)
        return inside + between
