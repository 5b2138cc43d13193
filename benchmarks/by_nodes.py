"""Centralised, decentralised or hierarchical: which wins on which cluster, `python -m benchmarks.by_nodes FILE.json`.

Timing-only runs on the simulated clock, on nodes of four learners that share a link. The file has the share of their
speed that learners keep, by strategy, number of nodes, and the time in which the model passes a node's link; cells that
it has already are not computed again. `--tables` prints its tables.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starling.engines.virtual.cluster import Cluster
from starling.engines.virtual.timing import simulate_timing
from starling.strategies import STRATEGIES

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "topology" / "nodes.json"
PER_NODE = 4
NODES = (2, 4, 8, 16, 32)
SEND_TIMES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Times in which the model passes a node's link, in gradients. Inside a node, it takes a tenth of that."""
INSIDE = 0.1
ARMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "all-reduce": ("allreduce", {}),
    "one server": ("parameter-server", {}),
    "a server on each node": ("parameter-server", {"shards": "nodes"}),
    "ring": ("adpsgd", {"pattern": "ring"}),
    "random order": ("adpsgd", {"pattern": "random"}),
    "super-learners": ("hadpsgd", {"per_node": PER_NODE}),
}
"""Strategies, with their options."""
MODEL_BYTES = 4_000_000
ROUNDS = 24
"""Gradients of each learner in a simulation; the middle half counts."""


def share(arm: str, nodes: int, send_time: float) -> float:
    """Gradients per second of all learners, relative to those of as many learners alone."""
    name, given = ARMS[arm]
    strategy, learners = STRATEGIES[name], nodes * PER_NODE
    options = strategy.options.model_validate({**given, "shards": nodes} if "shards" in given else given)
    bandwidth = MODEL_BYTES / send_time
    cluster = Cluster.model_validate(
        {
            "compute": {"distribution": "log-normal", "seconds": 1.0, "spread": 0.1},
            "link": {"latency": 1e-4, "bandwidth": bandwidth, "all_reduce": "fastest"},
            "nodes": {"size": PER_NODE, "latency": 1e-5, "bandwidth": bandwidth / INSIDE, "uplink": bandwidth},
        }
    )
    outcome = simulate_timing(strategy, options, learners, cluster, MODEL_BYTES, ROUNDS * learners, seed=1)
    times = sorted(at for learner in outcome.gradients_at.values() for at in learner)
    begin, end = ROUNDS // 4 * learners, 3 * ROUNDS // 4 * learners
    return (end - begin) / (times[end] - times[begin]) / learners


def tables(found: Mapping[str, float]) -> str:
    """A Markdown table with a row for each number of nodes and send time; the best cell of a row, and all within 2
    points of it, are bold."""
    lines = ["| nodes | send time | " + " | ".join(ARMS) + " |", "|" + "---|" * (2 + len(ARMS))]
    for nodes in NODES:
        for send_time in SEND_TIMES:
            shares = [100.0 * found[key(arm, nodes, send_time)] for arm in ARMS]
            cells = [f"**{each:.0f}**" if each >= max(shares) - 2.0 else f"{each:.0f}" for each in shares]
            lines.append(f"| {nodes} | {send_time:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def key(arm: str, nodes: int, send_time: float) -> str:
    """The name of a cell in the file."""
    return f"{arm}, {nodes} nodes, {send_time:g}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute the cells that are missing in the file, or print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--tables", action="store_true")
    chosen = parser.parse_args(arguments)
    found: dict[str, float] = json.loads(chosen.file.read_text(encoding="utf-8")) if chosen.file.exists() else {}
    if chosen.tables:
        print(tables(found))
        return
    for nodes in NODES:
        for arm in ARMS:
            for send_time in SEND_TIMES:
                if (name := key(arm, nodes, send_time)) not in found:
                    found[name] = round(share(arm, nodes, send_time), 4)
                    chosen.file.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
                    print(name, found[name], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
