"""What a message and a mean cost on the links of the simulated cluster: inside a node, between nodes, through uplinks.

An uplink is first in, first out in each direction: messages leave a node, and enter one, whole and in the order in
which they come. TCP would share it fairly; both are done with a burst at the same moment, because neither leaves the
uplink idle, and they differ only in when the burst's earlier messages arrive. Fair sharing would have to reschedule
every message under way whenever one begins or ends; this costs one event more for each message, and no message's
arrival depends on a later one.
"""

from collections import Counter
from collections.abc import Sequence

from starling.engines.virtual.cluster import Cluster, LinkModel


class Uplinks:
    """Until when the nodes' uplinks are busy, in one direction; `bandwidth` is in bytes per second."""

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._free: dict[int, float] = {}

    def take(self, node: int, now: float, num_bytes: int) -> float:
        """Queue a message that comes at `now`; seconds until its first byte is let through."""
        begin = max(now, self._free.get(node, 0.0))
        self._free[node] = begin + num_bytes / self._bandwidth
        return begin - now

    def free_at(self, node: int) -> float:
        """When the last message that was queued has passed."""
        return self._free.get(node, 0.0)

    def hold(self, node: int, until: float) -> None:
        """Let nothing else through until then."""
        self._free[node] = until


class Links:
    """The links between learners, which are known by their names."""

    def __init__(self, cluster: Cluster) -> None:
        nodes, link = cluster.nodes, cluster.link
        self._size, self._algorithm = nodes.size, link.all_reduce
        self._inside = LinkModel(latency=nodes.latency, bandwidth=nodes.bandwidth)
        self._uplink = uplink = cluster.uplink
        rate = link.bandwidth if uplink is None else min(link.bandwidth, uplink)
        self._between = link if rate == link.bandwidth else link.model_copy(update={"bandwidth": rate})
        self._leaving = None if uplink is None else Uplinks(uplink)
        self._entering = None if uplink is None else Uplinks(uplink)

    def node(self, name: int) -> int:
        """The node that a learner is on."""
        return name // self._size

    def between(self, sender: int, receiver: int) -> LinkModel:
        """The link that carries a message, as fast as it is when nothing else is under way."""
        return self._inside if self.node(sender) == self.node(receiver) else self._between

    def leave(self, sender: int, receiver: int, now: float, num_bytes: int) -> float | None:
        """Queue a message at its sender's uplink; seconds until its first byte leaves. None: it needs no uplink,
        or uplinks are unlimited."""
        if self._leaving is None or self.node(sender) == self.node(receiver):
            return None
        return self._leaving.take(self.node(sender), now, num_bytes)

    def enter(self, receiver: int, now: float, num_bytes: int) -> float:
        """Queue a message at its receiver's uplink, which it has reached; seconds until its first byte comes in."""
        return 0.0 if self._entering is None else self._entering.take(self.node(receiver), now, num_bytes)

    def reduce(self, group: Sequence[int], now: float, num_bytes: int, longer: float = 1.0) -> float:
        """Seconds until an all-reduce is done that begins now and takes `longer` times as long as the links are fast.

        One between nodes waits until their uplinks are free in both directions, and has them to itself until it ends.
        """
        seconds = self.reduce_seconds(group, num_bytes) * longer
        nodes = sorted({self.node(name) for name in group})
        if self._leaving is None or self._entering is None or len(nodes) == 1:
            return seconds
        directions = self._leaving, self._entering
        free = max(uplinks.free_at(node) for uplinks in directions for node in nodes)
        seconds += max(0.0, free - now)  # to the bit what the ring takes where nothing else is under way
        for uplinks in directions:
            for node in nodes:
                uplinks.hold(node, now + seconds)
        return seconds

    def reduce_seconds(self, group: Sequence[int], num_bytes: int) -> float:
        """Seconds of an all-reduce over links on which nothing else is under way."""
        sizes = Counter(self.node(name) for name in group)
        shape = len(group), max(sizes.values()), len(sizes), num_bytes
        ways = {"ring": self._ring, "tree": self._tree, "hierarchical": self._hierarchical}
        return min(way(*shape) for name, way in ways.items() if self._algorithm in (name, "fastest"))

    def _ring(self, world: int, per_node: int, num_nodes: int, num_bytes: int) -> float:
        """2 (L - 1) steps, in each of which every learner sends 1/L of the bytes to the next; the slowest link sets the
        pace. The ring goes through one node after another, so that it crosses each uplink once."""
        used = [link for link, count in ((self._inside, per_node), (self._between, num_nodes)) if count > 1]
        return max((link.reduce_seconds(num_bytes, world) for link in used), default=0.0)

    def _tree(self, world: int, per_node: int, num_nodes: int, num_bytes: int) -> float:
        """A sum up and a copy down a double binary tree, in a pipeline: every link passes on all bytes twice.

        2 (h_in latency_in + h_out latency_out) + 2 bytes / bandwidth, with h the heights of the tree inside a node and
        between nodes, and the bandwidth of the slowest link (Sanders, Speck & Träff 2009; NCCL from 2.4 on).
        """
        used = [(link, count) for link, count in ((self._inside, per_node), (self._between, num_nodes)) if count > 1]
        height_seconds = sum(link.latency * (count - 1).bit_length() for link, count in used)
        return 2.0 * (height_seconds + max((num_bytes / link.bandwidth for link, _ in used), default=0.0))

    def _hierarchical(self, world: int, per_node: int, num_nodes: int, num_bytes: int) -> float:
        """A reduce-scatter inside each node, rings between the nodes, one for each of the G parts and all at once, and
        an all-gather inside: the uplink carries the bytes of one learner instead of a learner's turn each.

        The rings share the uplink.
        """
        part = -(-num_bytes // per_node)
        inside = 2 * (per_node - 1) * self._inside.send_seconds(part)
        rate = self._between.bandwidth
        if self._uplink is not None:
            rate = min(rate, self._uplink / per_node)
        between = 2 * (num_nodes - 1) * (self._between.latency + -(-part // num_nodes) / rate)
        return inside + between
