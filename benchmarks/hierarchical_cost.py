"""What super-learners cost a host, beside flat ADPSGD: `python -m benchmarks.hierarchical_cost`.

Four learners on emulated devices, which compute nothing and only wait, average 4 M weights: as four learners in a ring
of random order, or as two super-learners of two. The table has memory, bytes sent and processor time.
"""

import tempfile
from pathlib import Path

from benchmarks.averaging_cost import cpu_seconds, megabytes_sent
from benchmarks.runs import Outcome, Run, rounds_per_gradient
from benchmarks.starting import launched
from starling.comparing.table import Estimate, estimate

ROUNDS, WORLD, PARAMETERS, SECONDS, GRADIENTS = 5, 4, 1 << 22, 0.4, 16
ARMS = {
    "`adpsgd`, random order": ("adpsgd", {"pattern": "random"}),
    "`adpsgd`, random pairs": ("adpsgd", {"pattern": "pairs"}),
    "`hadpsgd`, two super-learners of two": ("hadpsgd", {"per_node": 2}),
    "`allreduce`": ("allreduce", {}),
}
"""Strategies, with their options."""


def main() -> None:
    """Print the table."""
    titles = (
        "memory of a learner, MB",
        "sent per gradient, MB",
        "processor time per gradient, ms",
        "rounds per gradient",
    )
    print(f"| strategy | {' | '.join(titles)} |")
    print("|---|---|---|---|---|")
    found: dict[str, list[list[Outcome]]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            for name, (strategy, options) in ARMS.items():
                run = Run(strategy, WORLD, PARAMETERS, SECONDS, steps=WORLD * GRADIENTS, options=options)
                found[name] += launched([run], Path(folder))
    for name, runs in found.items():
        gradients = WORLD * GRADIENTS
        cells = (
            _text(estimate([sum(each.megabytes for each in outcomes) / WORLD for outcomes in runs]), 0),
            _text(estimate([megabytes_sent(outcomes) / gradients for outcomes in runs]), 1),
            _text(estimate([1000.0 * cpu_seconds(outcomes) / gradients for outcomes in runs]), 1),
            _text(estimate([rounds_per_gradient(outcomes) for outcomes in runs]), 2),
        )
        print(f"| {name} | {' | '.join(cells)} |")


def _text(found: Estimate, decimals: int) -> str:
    return f"{found.mean:.{decimals}f} ± {found.half or 0.0:.{decimals}f}"


if __name__ == "__main__":
    main()
