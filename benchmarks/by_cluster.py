"""The share of their speed that learners keep, by strategy and cluster: `python -m benchmarks.by_cluster
[LEARNERS...]`.

Timing-only runs on the simulated clock; no gradient is computed. Each learner is a node, whose messages share one
link's bandwidth in each direction. The speed of a cluster is the sum of the speeds of its learners when alone.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starling.engines.virtual.cluster import Cluster
from starling.engines.virtual.timing import simulate_timing
from starling.strategies import STRATEGIES
from starling.training.speeds import Stragglers

LEARNERS = (4, 16, 64)
SEND_TIMES = (0.02, 0.3, 3.0)
"""Times to send the model to another learner, in units of the gradient time."""
STRATEGIES_SHOWN: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "allreduce": ("allreduce", {}),
    "delay-by-one": ("delay-by-one", {}),
    "dpsgd ring": ("dpsgd", {"pattern": "ring"}),
    "adpsgd random": ("adpsgd", {"pattern": "random"}),
    "adpsgd pairs": ("adpsgd", {"pattern": "pairs"}),
    "adpsgd pairs, period 8": ("adpsgd", {"pattern": "pairs", "period": 8}),
    "parameter-server": ("parameter-server", {"update": "asynchronous"}),
}
SPEEDS = ("equal", "random", "one 2 times slower", "one 10 times slower", "half 2 times slower")
MODEL_BYTES = 4_000_000
FEWEST_ROUNDS, GRADIENTS = 60, 1600
"""Minimum number of gradients of each learner in a simulation, and number of gradients of all learners; the middle half
counts."""


def main(counts: Sequence[int] = LEARNERS) -> None:
    """Print a table for each number of learners."""
    for learners in counts:
        print(f"\n### {learners} learners\n")
        print("\n".join(table(learners)))


def table(learners: int) -> Iterator[str]:
    """A Markdown table with a row for each kind of cluster; the best cell of a row, and all cells within 2 points of
    it, are bold."""
    yield "| speeds | send time | " + " | ".join(STRATEGIES_SHOWN) + " |"
    yield "|" + "---|" * (2 + len(STRATEGIES_SHOWN))
    for speeds in SPEEDS:
        for send_time in SEND_TIMES:
            found = [share(name, learners, speeds, send_time) for name in STRATEGIES_SHOWN]
            near = 100.0 * max(found) - 2.0
            cells = (f"**{100.0 * each:.0f}**" if 100.0 * each >= near else f"{100.0 * each:.0f}" for each in found)
            yield f"| {speeds} | {send_time:g} | " + " | ".join(cells) + " |"


def share(shown: str, learners: int, speeds: str, send_time: float) -> float:
    """Gradients per second of all learners, relative to the sum of their speeds when alone."""
    name, options = STRATEGIES_SHOWN[shown]
    strategy = STRATEGIES[name]
    spread = 0.3 if speeds == "random" else 0.0
    compute = {"distribution": "log-normal" if spread else "constant", "seconds": 1.0, "spread": spread}
    link = {"latency": 1e-4, "bandwidth": MODEL_BYTES / send_time}
    cluster = Cluster.model_validate({"compute": compute, "link": link})
    slow = slow_learners(speeds, learners)
    parsed = strategy.options.model_validate(options)

    rounds = max(FEWEST_ROUNDS, GRADIENTS // learners)
    outcome = simulate_timing(
        strategy, parsed, learners, cluster, MODEL_BYTES, rounds * learners, seed=1, stragglers=Stragglers(slow=slow)
    )
    times = sorted(at for learner in outcome.gradients_at.values() for at in learner)
    begin, end = rounds // 4 * learners, 3 * rounds // 4 * learners
    alone = sum(1.0 / slow.get(rank, 1.0) for rank in range(learners))
    return (end - begin) / (times[end] - times[begin]) / alone


def slow_learners(speeds: str, learners: int) -> dict[int, float]:
    """Factor by which each slow learner takes longer."""
    factor = 10.0 if "10" in speeds else 2.0
    if speeds.startswith("one"):
        return {learners - 1: factor}
    return dict.fromkeys(range(1, learners, 2), factor) if speeds.startswith("half") else {}


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]] or LEARNERS)
