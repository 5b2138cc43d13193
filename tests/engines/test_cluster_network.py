"""The simulated network: links inside and between nodes, uplinks that messages share, and how means are computed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import simpy
import torch

from benchmarks import by_cluster
from starling.engines.virtual.cluster import Cluster, ComputeModel, LinkModel, Links, NodeModel
from starling.engines.virtual.network import Network
from starling.engines.virtual.timing import simulate_timing
from starling.errors import ConfigError
from starling.predict.predict import AVERAGING
from starling.speech.recipe import check_recipe
from starling.strategies import STRATEGIES, Strategy
from starling.strategies.adpsgd import AsynchronousOptions
from starling.strategies.dpsgd import DpsgdOptions
from starling.strategies.hadpsgd import HierarchicalOptions

NUM_BYTES = 4000
LATENCY, BANDWIDTH, INSIDE_LATENCY, INSIDE_BANDWIDTH, UPLINK = 0.5, 1000.0, 0.125, 16000.0, 2000.0


def cluster(size: int = 1, uplink: float | str | None = "unlimited", seconds: float = 1e-9, **link: Any) -> Cluster:
    return Cluster(
        compute=ComputeModel(seconds=seconds),
        link=LinkModel(**{"latency": LATENCY, "bandwidth": BANDWIDTH, **link}),
        nodes=NodeModel(size=size, latency=INSIDE_LATENCY, bandwidth=INSIDE_BANDWIDTH, uplink=uplink),
    )


class Wire:
    """A network between learners that do nothing; notes when each message and each mean arrives."""

    def __init__(self, model: Cluster, world: int) -> None:
        self.environment = simpy.Environment()
        self.arrivals: dict[Any, float] = {}
        parts = {"environment": self.environment, "cluster": model, "job": SimpleNamespace(seed=0)}
        idle: Any = SimpleNamespace(**parts, record=lambda *_: None, apart=lambda _: False)
        self._network = Network(idle, range(world))

    def send(self, sender: int, receiver: int, num_bytes: int = NUM_BYTES, tag: int = 0) -> None:
        self._note((sender, receiver), self._network.send(sender, receiver, torch.empty(num_bytes // 4), tag))

    def mean(self, group: Sequence[int]) -> None:
        for rank in group:
            handle = self._network.mean(rank, group, "", 0, torch.empty(NUM_BYTES // 4))
        self._note("mean", handle)

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self.environment.timeout(seconds).callbacks.append(lambda _: do())

    def _note(self, what: Any, handle: Any) -> None:
        handle.event.callbacks.append(lambda _: self.arrivals.update({what: self.environment.now}))

    def run(self) -> dict[Any, float]:
        self.environment.run()
        return self.arrivals


@pytest.mark.parametrize(
    ("size", "uplink", "expected"),
    [
        (1, None, LATENCY + NUM_BYTES / BANDWIDTH),
        (2, None, INSIDE_LATENCY + NUM_BYTES / INSIDE_BANDWIDTH),
        (1, 100.0, LATENCY + NUM_BYTES / 100.0),
        (1, 1e6, LATENCY + NUM_BYTES / BANDWIDTH),
    ],
)
def test_one_message_takes_the_latency_and_its_bytes_over_the_slowest_link(
    size: int, uplink: float | None, expected: float
) -> None:
    """Inside a node that is the inner link; between nodes an uplink may be slower than the link."""
    wire = Wire(cluster(size, uplink), 2)
    wire.send(0, 1)
    assert wire.run()[0, 1] == pytest.approx(expected)


def test_messages_leave_over_a_shared_uplink_one_after_another() -> None:
    """Of n messages that begin together, the k-th arrives after k times its bytes; the last when it would under fair
    sharing. A message inside the node waits for none of them."""
    wire = Wire(cluster(4, UPLINK, bandwidth=1e9), 20)
    for peer in (4, 8, 12, 16):
        wire.send(peer % 3, peer)
    wire.send(3, 1)
    arrivals = wire.run()
    for place, peer in enumerate((4, 8, 12, 16), start=1):
        assert arrivals[peer % 3, peer] == pytest.approx(LATENCY + place * NUM_BYTES / UPLINK)
    assert arrivals[3, 1] == pytest.approx(INSIDE_LATENCY + NUM_BYTES / INSIDE_BANDWIDTH)


def test_messages_enter_over_a_shared_uplink_one_after_another() -> None:
    """As many senders that meet at one parameter server."""
    wire = Wire(cluster(1, UPLINK, bandwidth=1e9), 5)
    for sender in range(1, 5):
        wire.send(sender, 0)
    arrivals = wire.run()
    assert [arrivals[sender, 0] for sender in range(1, 5)] == pytest.approx(
        [LATENCY + place * NUM_BYTES / UPLINK for place in range(1, 5)]
    )


def test_both_directions_and_other_nodes_do_not_share_an_uplink() -> None:
    """Uplinks are full duplex, and each node has its own."""
    wire = Wire(cluster(1, UPLINK, bandwidth=1e9), 4)
    for sender, receiver in ((0, 1), (1, 0), (2, 3), (3, 2)):
        wire.send(sender, receiver)
    assert list(wire.run().values()) == pytest.approx([LATENCY + NUM_BYTES / UPLINK] * 4)


def test_messages_of_a_node_share_one_link_s_bandwidth_unless_another_cluster_is_asked_for() -> None:
    """Four messages to one learner: one after another by default, side by side only where that is asked for."""

    def last(nodes: dict[str, Any]) -> float:
        link = {"latency": LATENCY, "bandwidth": BANDWIDTH}
        wire = Wire(Cluster.model_validate({"link": link, "nodes": nodes}), 5)
        for sender in range(1, 5):
            wire.send(sender, 0)
        return max(wire.run().values())

    assert last({}) == pytest.approx(LATENCY + 4 * NUM_BYTES / BANDWIDTH)
    assert last({"uplink": "unlimited"}) == pytest.approx(LATENCY + NUM_BYTES / BANDWIDTH)
    assert last({"uplink": 4 * BANDWIDTH}) == pytest.approx(LATENCY + (1 + 3 / 4) * NUM_BYTES / BANDWIDTH)


@pytest.mark.wide
def test_64_workers_cannot_be_received_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's link carries one gradient per send time s: with its own learner, 1 / s + 1 of 64 learners' gradients.

    It is the server's column of docs/results/README.md, which once said 63 and 15 %.
    """
    monkeypatch.setattr(by_cluster, "FEWEST_ROUNDS", 16)
    monkeypatch.setattr(by_cluster, "GRADIENTS", 16)
    for send_time in (0.3, 3.0):
        limit = (1.0 / send_time + 1.0) / 64
        assert by_cluster.share("parameter-server", 64, "equal", send_time) == pytest.approx(limit, rel=0.05)
        assert by_cluster.share("adpsgd random", 16, "equal", send_time) <= min(1.0, 1.0 / send_time) * 1.01


@pytest.mark.wide
def test_the_table_of_speeds_that_the_documents_show_is_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row of it, with four equal learners and a slow link; the others come from the same function."""
    monkeypatch.setattr(by_cluster, "SPEEDS", ("equal",))
    monkeypatch.setattr(by_cluster, "SEND_TIMES", (3.0,))
    page = (Path(__file__).parents[2] / "docs" / "results" / "README.md").read_text(encoding="utf-8")
    head, *_, row = by_cluster.table(4)
    assert head in page and f"{row}\n" in page


def test_a_ring_of_all_learners_does_not_contend_with_itself() -> None:
    """Each node sends to one other and receives from one: strategies that only average have the same events, to the
    hash, as on links without contention."""
    for name in AVERAGING:
        found = []
        for uplink in (None, "unlimited"):
            model = cluster(4, uplink, seconds=1.0, jitter=0.3)
            model = model.model_copy(update={"compute": ComputeModel(distribution="log-normal", spread=0.4)})
            found.append(simulate_timing(STRATEGIES[name], None, 8, model, NUM_BYTES, 48).event_hash)
        assert found[0] == found[1], name


def test_learners_of_one_node_do_not_queue_at_the_link_between_nodes() -> None:
    """Gossip inside a single node takes as long as if its link to others were unlimited."""
    options = DpsgdOptions(pattern="complete")
    shared, free = (timed(STRATEGIES["dpsgd"], options, 8, cluster(8, each)) for each in (None, "unlimited"))
    assert shared == free


def test_a_link_slower_than_the_uplink_lets_messages_overlap() -> None:
    """The uplink carries two of these links at full speed, and is busy half the time with one."""
    wire = Wire(cluster(1, 2 * BANDWIDTH), 3)
    wire.send(0, 1)
    wire.send(0, 2)
    arrivals = wire.run()
    assert arrivals[0, 1] == pytest.approx(LATENCY + NUM_BYTES / BANDWIDTH)
    assert arrivals[0, 2] == pytest.approx(LATENCY + NUM_BYTES / (2 * BANDWIDTH) + NUM_BYTES / BANDWIDTH)


def test_a_message_that_waits_to_leave_does_not_keep_the_other_end_busy() -> None:
    """Learner 1 waits behind a long message of its node; learner 2 reaches their receiver meanwhile."""
    wire = Wire(cluster(2, UPLINK, bandwidth=1e9), 8)
    wire.send(0, 6, num_bytes=40_000)
    wire.send(1, 4)
    wire.after(1.0, lambda: wire.send(2, 5))
    arrivals = wire.run()
    assert arrivals[2, 5] == pytest.approx(1.0 + LATENCY + NUM_BYTES / UPLINK)
    assert arrivals[1, 4] == pytest.approx(LATENCY + 44_000 / UPLINK)


def ring(world: int, link: tuple[float, float], num_bytes: int = NUM_BYTES) -> float:
    latency, bandwidth = link
    return 2 * (world - 1) * (latency + -(-num_bytes // world) / bandwidth)


BETWEEN, INSIDE = (LATENCY, BANDWIDTH), (INSIDE_LATENCY, INSIDE_BANDWIDTH)


def test_a_ring_takes_the_steps_of_its_slowest_link() -> None:
    """2 (L - 1) steps of 1/L of the bytes, over the inner link where all learners are on one node."""
    assert Links(cluster()).reduce_seconds(range(5), NUM_BYTES) == pytest.approx(ring(5, BETWEEN))
    assert Links(cluster(8)).reduce_seconds(range(5), NUM_BYTES) == pytest.approx(ring(5, INSIDE))
    assert Links(cluster(4)).reduce_seconds(range(8), NUM_BYTES) == pytest.approx(ring(8, BETWEEN))
    assert Links(cluster(4, 100.0)).reduce_seconds(range(8), NUM_BYTES) == pytest.approx(ring(8, (LATENCY, 100.0)))
    assert Links(cluster(4)).reduce_seconds(range(4, 8), NUM_BYTES) == pytest.approx(ring(4, INSIDE))
    assert Links(cluster()).reduce_seconds([3], NUM_BYTES) == 0.0


def test_a_tree_takes_its_height_in_latencies_and_all_bytes_twice() -> None:
    """Up and down: 2 (log2 L latencies) + 2 bytes / bandwidth."""
    flat = Links(cluster(all_reduce="tree"))
    assert flat.reduce_seconds(range(8), NUM_BYTES) == pytest.approx(2 * (3 * LATENCY + NUM_BYTES / BANDWIDTH))
    assert flat.reduce_seconds(range(5), NUM_BYTES) == pytest.approx(2 * (3 * LATENCY + NUM_BYTES / BANDWIDTH))
    nodes = Links(cluster(4, 500.0, all_reduce="tree"))
    expected = 2 * (2 * INSIDE_LATENCY + LATENCY + NUM_BYTES / 500.0)
    assert nodes.reduce_seconds(range(8), NUM_BYTES) == pytest.approx(expected)
    assert nodes.reduce_seconds(range(4), NUM_BYTES) == pytest.approx(
        2 * (2 * INSIDE_LATENCY + NUM_BYTES / INSIDE_BANDWIDTH)
    )


def test_a_hierarchical_mean_sends_each_byte_of_a_node_over_its_uplink_once_a_step() -> None:
    """Inside 2 (G - 1) steps of 1/G of the bytes; between m nodes G rings of 1/G of them, which share the uplink."""
    inside = 2 * 3 * (INSIDE_LATENCY + NUM_BYTES / 4 / INSIDE_BANDWIDTH)
    wide = Links(cluster(4, all_reduce="hierarchical"))
    assert wide.reduce_seconds(range(20), NUM_BYTES) == pytest.approx(
        inside + 2 * 4 * (LATENCY + NUM_BYTES / 20 / BANDWIDTH)
    )
    shared = Links(cluster(4, BANDWIDTH, all_reduce="hierarchical"))
    assert shared.reduce_seconds(range(20), NUM_BYTES) == pytest.approx(
        inside + 2 * 4 * (LATENCY + NUM_BYTES / 5 / BANDWIDTH)
    )
    assert shared.reduce_seconds(range(4), NUM_BYTES) == pytest.approx(ring(4, INSIDE))


def test_the_fastest_way_is_a_tree_for_few_bytes_and_a_ring_for_many() -> None:
    """Latency decides about few bytes, bandwidth about many."""
    ways = {name: Links(cluster(all_reduce=name)) for name in ("ring", "tree", "fastest")}
    for num_bytes, best in ((64, "tree"), (4_000_000, "ring")):
        seconds = {name: way.reduce_seconds(range(64), num_bytes) for name, way in ways.items()}
        assert seconds["fastest"] == seconds[best] < max(seconds.values())


def test_a_mean_and_a_message_wait_for_each_other_at_an_uplink() -> None:
    """Whichever comes first; a mean inside a node waits for nothing."""
    seconds = ring(4, (LATENCY, BANDWIDTH))
    first = Wire(cluster(2, BANDWIDTH), 4)
    first.mean(range(4))
    first.send(0, 2)
    arrivals = first.run()
    assert arrivals["mean"] == pytest.approx(seconds)
    assert arrivals[0, 2] == pytest.approx(seconds + LATENCY + NUM_BYTES / BANDWIDTH)
    second = Wire(cluster(2, BANDWIDTH), 4)
    second.send(0, 2)
    second.mean(range(4))
    assert second.run()["mean"] == pytest.approx(NUM_BYTES / BANDWIDTH + seconds)
    inside = Wire(cluster(2, BANDWIDTH), 4)
    inside.send(0, 2)
    inside.mean(range(2))
    assert inside.run()["mean"] == pytest.approx(ring(2, INSIDE))


def timed(strategy: Strategy, options: Any, world: int, model: Cluster, rounds: int = 6) -> float:
    return simulate_timing(strategy, options, world, model, NUM_BYTES, rounds * world).seconds


def test_gossip_of_a_nodes_learners_contends_for_the_uplink() -> None:
    """On a ring through two nodes each node sends two messages at each step, one behind the other."""
    model = cluster(4, UPLINK, bandwidth=1e9)
    seconds = timed(STRATEGIES["dpsgd"], DpsgdOptions(pattern="ring"), 8, model)
    busy = 6 * 2 * NUM_BYTES / UPLINK
    assert busy + LATENCY <= seconds * (1 + 1e-9) and seconds < busy + 6 * LATENCY
    free = timed(STRATEGIES["dpsgd"], DpsgdOptions(pattern="ring"), 8, cluster(4, "unlimited", bandwidth=UPLINK))
    assert free == pytest.approx(6 * (LATENCY + NUM_BYTES / UPLINK), rel=1e-6)


def test_super_learners_on_nodes_average_their_gradients_over_the_inner_link() -> None:
    """With one super-learner per node, `hadpsgd` pays only the inner ring in its foreground."""
    options = HierarchicalOptions(per_node=4, pattern="ring", period=100.0)
    seconds = timed(STRATEGIES["hadpsgd"], options, 8, cluster(4, UPLINK, seconds=2.0))
    assert seconds == pytest.approx(6 * (2.0 + ring(4, INSIDE)))
    flat = timed(STRATEGIES["hadpsgd"], options, 8, cluster(1, UPLINK, seconds=2.0))
    assert flat == pytest.approx(6 * (2.0 + ring(4, BETWEEN)))


def test_slow_uplinks_slow_synchronous_training_but_not_what_is_hidden() -> None:
    """The gradients of `adpsgd` wait for their own background at most."""
    slow = cluster(4, 100.0, seconds=1.0, bandwidth=1e9)
    fast = cluster(4, 1e9, seconds=1.0, bandwidth=1e9)
    options = AsynchronousOptions(pattern="ring", max_lag=1000.0)
    assert timed(STRATEGIES["dpsgd"], DpsgdOptions(), 8, slow) > 10 * timed(STRATEGIES["dpsgd"], None, 8, fast)
    outcome = simulate_timing(STRATEGIES["adpsgd"], options, 8, slow, NUM_BYTES, 48)
    assert max(each.spent.waiting_for_peers for each in outcome.learners) == 0.0


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"nodes": {"size": 0}}, r"cluster\.nodes\.size.*greater than or equal to 1"),
        ({"nodes": {"uplink": 0.0}}, r"cluster\.nodes\.uplink.*greater than 0"),
        ({"nodes": {"uplink": "endless"}}, r"cluster\.nodes\.uplink.*unlimited"),
        ({"nodes": {"uplinks": 1e9}}, r"cluster\.nodes\.uplinks"),
        ({"link": {"all_reduce": "star"}}, r"cluster\.link\.all_reduce.*ring"),
        ({"link": {"all_reduce": "hierarchical"}}, r"hierarchical needs nodes of several learners; set nodes\.size"),
    ],
)
def test_a_recipe_with_an_impossible_cluster_is_refused(section: dict[str, Any], message: str) -> None:
    """The error names the key."""
    with pytest.raises(ConfigError, match=message):
        recipe(section)


def test_a_recipe_describes_nodes() -> None:
    """`starling simulate` runs on the cluster of its recipe."""
    made = recipe({"nodes": {"size": 8, "uplink": 1.25e10}, "link": {"all_reduce": "fastest"}})
    assert (made.cluster.nodes.size, made.cluster.uplink) == (8, 1.25e10)
    assert recipe({"link": {"bandwidth": 2e9}}).cluster.uplink == 2e9
    assert recipe({"nodes": {"uplink": "unlimited"}}).cluster.uplink is None


def recipe(section: dict[str, Any]) -> Any:
    corpus = {"kind": "synthetic", "sets": {"train": 1}}
    data = {"folder": "data", "corpus": corpus, "sampling_rate": 8000, "valid": None, "test": []}
    return check_recipe({"name": "scale", "budget": {"epochs": 1}, "data": data, "cluster": section}, "scale")
