"""Draw the pictures of docs/strategies: `python docs/pictures/draw.py [FOLDER]`, by default into this folder.

Who talks to whom comes from `starling.topology` (talks.py), who waits for whom from a run on the virtual engine
(timelines.py, events.py).
"""

import sys
from collections.abc import Callable
from pathlib import Path

from events import LEARNERS, NUM_WEIGHTS
from svg import Picture
from talks import hub, pattern, servers, super_learners
from timelines import Waits, timeline

from starling.topology import Topology, custom, find_topology

HERE = Path(__file__).resolve().parent
SEED = 1

TIMELINES = {
    "allreduce": Waits("allreduce", {}, "all learners wait for the slowest at each step, then for the mean"),
    "delay-by-one": Waits(
        "delay-by-one", {}, "the mean travels during the next gradient; the slowest still sets the pace"
    ),
    "dpsgd": Waits("dpsgd", {"pattern": "ring"}, "neighbours wait for each other; waiting spreads around the ring"),
    "dpsgd-adapt-first": Waits(
        "dpsgd", {"order": "adapt-first"}, "each learner steps first, and then averages with its neighbours"
    ),
    "sgp": Waits("sgp", {}, "each learner sends its weights to one other after its step, and waits for one message"),
    "sgp-overlap": Waits("sgp", {"overlap": True}, "the same, but messages travel during the next gradient"),
    "adpsgd": Waits(
        "adpsgd", {"pattern": "random"}, "no gradient waits for another gradient; a random ring averages meanwhile"
    ),
    "adpsgd-pairs": Waits(
        "adpsgd", {"pattern": "pairs"}, "no gradient waits for another gradient; pairs average meanwhile"
    ),
    "hadpsgd": Waits(
        "hadpsgd",
        {"per_node": 2, "pattern": "pairs"},
        "in step within a super-learner; super-learners do not wait for each other",
    ),
    "parameter-server": Waits(
        "parameter-server",
        {"update": "asynchronous", "servers": "own"},
        "the server steps with each gradient as it arrives; messages queue at the server's link",
    ),
    "parameter-server-hybrid": Waits(
        "parameter-server",
        {"update": "hybrid", "servers": "own"},
        "the server waits for the gradients of all workers, so all wait for the slowest",
    ),
    "parameter-server-summed": Waits(
        "parameter-server",
        {"update": "summed", "sum": LEARNERS, "servers": "own"},
        "the server steps with the sum of any four gradients; workers continue with the current weights",
    ),
    "hogwild": Waits(
        "hogwild",
        {"piece_megabytes": NUM_WEIGHTS * 4 / 3 / 2**20},
        "all learners read and change one shared model, here in three pieces; none waits",
    ),
    "local-sgd": Waits("local-sgd", {"every": 3}, "learners step alone, and wait for the mean of all every third step"),
    "noloco": Waits("noloco", {"every": 3}, "learners step alone, and agree with one other every third step"),
    "streaming-diloco": Waits(
        "streaming-diloco",
        {"every": 4, "fragments": 2, "overlap": 1},
        "halves of the weights are averaged in turn, beneath the next gradient",
    ),
    "decoupled-diloco": Waits(
        "decoupled-diloco",
        {"every": 4, "fragments": 2, "overlap": 1, "quorum": 3},
        "a half of the weights is merged once three of four have pushed it; the slow learner is left out",
    ),
    "ako": Waits("ako", {"parts": 4}, "no gradient waits for another gradient; each learner sends parts to all others"),
    "async-diloco": Waits(
        "async-diloco",
        {"every": 3, "servers": "own"},
        "each learner pushes what it has moved, and a slow one soon makes fewer steps for that",
    ),
    "delayed": Waits(
        "delayed",
        {"delay": 2},
        "as allreduce, but each step uses the mean gradient of two steps ago; this saves no time",
    ),
}


def _own() -> Topology:
    sys.path.insert(0, str(HERE.parent / "strategies"))
    from hypercube import hypercube

    return custom(8, hypercube)


def _unbalanced() -> Topology:
    sys.path.insert(0, str(HERE.parent / "strategies"))
    from loud import loud

    return custom(8, loud, is_balanced=False)


PATTERNS = {
    "ring": "each learner mixes itself, left and right, 1/3 each; every round is the same",
    "random": "a ring in a fresh random order each round, 1/3 each",
    "pairs": "a random perfect matching each round, 1/2 each; of an odd number, one sits out",
    "exponential": "learner l hears of learner l - 1, l - 2, l - 4, in turn, 1/2 each; an arrow goes to who listens",
    "complete": "everybody mixes everybody, 1/L each",
}


def pictures() -> dict[str, Callable[[], Picture]]:
    """All pictures by file name."""
    drawn: dict[str, Callable[[], Picture]] = {}
    for name, waits in TIMELINES.items():
        drawn[f"waits-{name}.svg"] = lambda waits=waits: timeline(waits)  # type: ignore[misc]
    for name, what in PATTERNS.items():
        drawn[f"talks-{name}.svg"] = lambda name=name, what=what: pattern(name, what, find_topology(name, 8, SEED))  # type: ignore[misc]
    drawn["talks-own.svg"] = lambda: pattern(
        "hypercube", "in round k each learner pairs with the one whose rank differs in bit k", _own()
    )
    drawn["talks-sgp.svg"] = lambda: pattern(
        "loud", "each learner hears its left neighbour, and one in each round also learner 0", _unbalanced()
    )
    drawn["talks-hadpsgd.svg"] = lambda: super_learners(find_topology("random", 4, seed=3), 2)
    drawn["talks-allreduce.svg"] = lambda: hub(
        "allreduce",
        "one mean of all gradients, at each step",
        (
            "Each learner gives its gradient and gets the mean of all.",
            "The mean is no process of its own: learners pass parts of the sum to each other.",
            "All weights stay the same on all learners.",
        ),
        ("mean of", "gradients"),
    )
    drawn["talks-delay-by-one.svg"] = lambda: hub(
        "delay-by-one",
        "one mean of all weights, at each step, while the gradients are computed",
        (
            "Each learner gives its weights, computes its gradient meanwhile,",
            "puts the mean in their place and steps with its gradient.",
            "No extra process computes the mean: each learner sums one part of the weights.",
        ),
        ("mean of", "weights"),
    )
    drawn["talks-hogwild.svg"] = lambda: hub(
        "hogwild",
        "one model in memory, which all learners of a machine read and change",
        (
            "Each learner reads the model, computes a gradient, and steps on the model.",
            "There is no lock: the parts that a learner reads may differ in age.",
            "Each learner has an optimizer of its own.",
        ),
        ("shared", "weights"),
    )
    drawn["talks-parameter-server.svg"] = servers
    return drawn


def main(folder: Path) -> None:
    """Write every picture into a folder."""
    for name, drawing in pictures().items():
        (folder / name).write_text(drawing().finished(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
