"""Draw the pictures of docs/strategies: `python docs/pictures/draw.py [FOLDER]`, by default into this folder.

Who talks to whom comes from `starling.topology`, who waits for whom from a run on the virtual engine (events.py).
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import cos, pi, sin
from pathlib import Path
from typing import Any

from events import LEARNERS, SLOW, STEPS, Events, record
from svg import Picture, number

from starling.strategies.hadpsgd import SideBySide
from starling.topology import Matrix, Topology, custom, find_topology, mixing_product

HERE = Path(__file__).resolve().parent
WIDTH = 880
SEED = 1
ROUNDS = 3


@dataclass(frozen=True)
class Waits:
    """A timeline to draw."""

    strategy: str
    options: Mapping[str, Any]
    what: str
    """What there is to see."""


TIMELINES = {
    "allreduce": Waits("allreduce", {}, "everybody waits for the slowest at each step, then for the mean"),
    "delay-by-one": Waits(
        "delay-by-one", {}, "the mean travels behind the next gradient; the slowest still sets the pace"
    ),
    "dpsgd": Waits("dpsgd", {"pattern": "ring"}, "neighbours wait for each other; waiting spreads around the ring"),
    "adpsgd": Waits("adpsgd", {"pattern": "random"}, "gradients wait for nobody; the random ring averages beside them"),
    "adpsgd-pairs": Waits("adpsgd", {"pattern": "pairs"}, "gradients wait for nobody; pairs average beside them"),
    "hadpsgd": Waits(
        "hadpsgd", {"per_node": 2, "pattern": "pairs"}, "in step inside a super-learner, nobody waits between them"
    ),
}
LEFT, TOP, PITCH, BAR, LANE = 96.0, 82.0, 58.0, 24.0, 9.0
SECONDS, SCALE = 2.1, (WIDTH - 96 - 28) / 2.1


def x_of(seconds: float) -> float:
    return LEFT + SCALE * seconds


def bar_top(rank: int) -> float:
    return TOP + PITCH * rank


def lane_top(rank: int) -> float:
    return bar_top(rank) + BAR + 3


def timeline(waits: Waits) -> Picture:
    """Who computes, who waits and who averages with whom, over simulated time."""
    events = record(waits.strategy, dict(waits.options))
    end = max(events.claimed_last.values())
    bottom = TOP + PITCH * LEARNERS
    pattern = f", pattern {waits.options['pattern']}" if "pattern" in waits.options else ""
    inside = ", per_node 2" if waits.strategy == "hadpsgd" else ""
    picture = Picture(
        WIDTH,
        int(bottom) + 74,
        f"Who waits for whom: {waits.strategy}{pattern}{inside}",
        f"{waits.what}. {LEARNERS} learners make {STEPS} gradients in {end:.2f} simulated seconds; learner {SLOW} "
        "takes three times as long for each.",
    )
    picture.text(20, 30, f"{waits.strategy}{pattern}{inside}", size=16, bold=True)
    picture.text(20, 50, waits.what[0].upper() + waits.what[1:], "muted")
    picture.text(x_of(end), TOP - 8, f"{STEPS} gradients: {end:.2f} s", "", 12, "end" if end > 0.5 else "", True)
    _axis(picture, bottom)
    for opened in events.rounds[:-1]:
        picture.line(
            "round", x_of(opened), TOP - 4, x_of(opened), bottom - 12, 'stroke-width=".8" stroke-dasharray="1 3"'
        )
    for mean in events.means:
        first = bar_top(mean.group[0]) if mean.of_gradients else lane_top(mean.group[0])
        last = bar_top(mean.group[-1]) + BAR if mean.of_gradients else lane_top(mean.group[-1]) + LANE
        x = x_of(mean.begin)
        picture.rectangle("averaging", x, first, SCALE * (mean.end - mean.begin), last - first, 'opacity=".25"')
    for message in events.messages:
        down = message.receiver > message.sender
        picture.arrow(
            x_of(message.begin),
            lane_top(message.sender) + (LANE if down else 0),
            x_of(message.end),
            lane_top(message.receiver) + (0 if down else LANE),
            'stroke-width="1"',
        )
    picture.line("axis", x_of(end), TOP - 4, x_of(end), bottom, 'stroke-width="1.5"')
    for rank in range(LEARNERS):
        _learner(picture, events, rank)
    _legend(picture, events, bottom + 50)
    return picture


def _axis(picture: Picture, bottom: float) -> None:
    picture.line("axis", x_of(0), bottom, x_of(SECONDS), bottom)
    for tenth in range(0, int(SECONDS * 10) + 1, 2):
        x = x_of(tenth / 10)
        picture.line("axis", x, bottom, x, bottom + 4)
        picture.text(x, bottom + 18, f"{tenth / 10:.1f}" + (" s" if tenth == 20 else ""), "muted", 11, "middle")


def _learner(picture: Picture, events: Events, rank: int) -> None:
    """One row: gradients and waiting above, averaging below."""
    top = bar_top(rank)
    picture.text(20, top + 16, f"learner {rank}", bold=True)
    if rank == SLOW:
        picture.text(20, top + 31, "3 × slower", "muted", 11)
    free = 0.0
    for place, gradient in enumerate(events.of(rank)):
        _wait(picture, free, gradient.begin, top)
        x, width = x_of(gradient.begin), SCALE * (gradient.end - gradient.begin)
        picture.rectangle("slow" if rank == SLOW else "fast", x + 0.5, top, width - 1, BAR, 'rx="2"')
        picture.text(x + width / 2, top + 16, str(events.staleness[rank, place]), "on", 12, "middle")
        free = gradient.end
    _wait(picture, free, events.claimed_last[rank], top)
    for begin, end in _joined((part.begin, part.end) for part in events.averagings if part.rank == rank):
        x = x_of(begin)
        if end - begin > 1e-6:
            picture.rectangle("averaging", x, lane_top(rank), SCALE * (end - begin) - 0.6, LANE, 'rx="1"')


def _wait(picture: Picture, begin: float, end: float, top: float) -> None:
    if end - begin > 1e-6:
        picture.waiting(x_of(begin) + 1, top + 3, SCALE * (end - begin) - 2, BAR - 6)


def _joined(stretches: Iterator[tuple[float, float]]) -> list[tuple[float, float]]:
    """Stretches of time, those that overlap as one."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(stretches):
        if joined and begin < joined[-1][1] - 1e-9:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _legend(picture: Picture, events: Events, y: float) -> None:
    x = 20.0
    entries = [("fast", "gradient, its staleness"), ("waits", "waits")]
    entries += [("averaging", "averages")] if events.averagings else []
    entries += [("means", "a mean travels")] if events.means else []
    entries += [("message", "weights travel")] if events.messages else []
    entries += [("round", "a round opens")] if events.rounds else []
    for kind, words in entries:
        if kind == "waits":
            picture.waiting(x, y - 10, 22, 12)
        elif kind == "message":
            picture.arrow(x, y - 8, x + 20, y, 'stroke-width="1.2"')
        elif kind == "round":
            picture.line("round", x + 10, y - 12, x + 10, y + 3, 'stroke-dasharray="1 3"')
        elif kind == "means":
            picture.rectangle("averaging", x, y - 11, 22, 14, 'opacity=".25"')
        elif kind == "averaging":
            picture.rectangle("averaging", x, y - 8, 22, LANE, 'rx="1"')
        else:
            picture.rectangle("fast", x, y - 11, 22, 14, 'rx="2"')
            picture.text(x + 11, y, "1", "on", 11, "middle")
        picture.text(x + 28, y, words, "muted")
        x += 44 + 6.4 * len(words)


def around(place: int, count: int, x: float, y: float, radius: float) -> tuple[float, float]:
    """Where number `place` of `count` stands on a circle, the first at the top, clockwise."""
    angle = 2 * pi * place / count
    return x + radius * sin(angle), y - radius * cos(angle)


def node(picture: Picture, x: float, y: float, name: str) -> None:
    """A learner."""
    picture.circle("node", x, y, 12)
    picture.text(x, y + 4, name, "", 12, "middle")


def link(
    picture: Picture, start: tuple[float, float], end: tuple[float, float], is_arrow: bool, kind: str = "message"
) -> None:
    """A line between two learners' circles; an arrow where only one hears of the other."""
    length = ((end[0] - start[0]) ** 2 + (end[1] - start[1]) ** 2) ** 0.5
    dx, dy = 13 * (end[0] - start[0]) / length, 13 * (end[1] - start[1]) / length
    ends = (start[0] + dx, start[1] + dy, end[0] - dx, end[1] - dy)
    if is_arrow:
        picture.arrow(*ends, 'stroke-width="1.4"')
    else:
        picture.line(kind, *ends, 'stroke-width="1.4"')


def matrix(picture: Picture, mixing: Matrix, x: float, y: float, cell: float) -> None:
    """A mixing matrix as shades, row j and column l; 0 is empty, 1/2 and above full."""
    size = len(mixing)
    shades: dict[str, list[str]] = {}
    for row in range(size):
        for column in range(size):
            if mixing[row, column] > 1e-12:
                shade = f"{min(1.0, 0.12 + 1.76 * mixing[row, column]):.2f}"
                at = f"M{number(x + cell * column)} {number(y + cell * row)}"
                shades.setdefault(shade, []).append(f"{at}h{number(cell)}v{number(cell)}h{number(-cell)}z")
    for shade, cells in sorted(shades.items()):
        picture.path("averaging", "".join(cells), f'opacity="{shade}"')
    picture.rectangle("axis", x, y, cell * size, cell * size)


def graph(picture: Picture, topology: Topology, k: int, x: float, y: float, radius: float) -> None:
    """Who mixes whom in round k."""
    at = [around(rank, topology.world, x, y, radius) for rank in range(topology.world)]
    for rank in range(topology.world):
        for peer in topology.sources(k, rank):
            is_mutual = rank in topology.sources(k, peer)
            if not is_mutual or peer < rank:
                link(picture, at[peer], at[rank], is_arrow=not is_mutual)
    for rank, (px, py) in enumerate(at):
        node(picture, px, py, str(rank))


def pattern(name: str, what: str, topology: Topology) -> Picture:
    """Three rounds of a pattern as graphs and matrices, and what they do together."""
    picture = Picture(
        WIDTH,
        352,
        f"Who talks to whom: pattern {name}",
        f"{what}. Rounds 0 to {ROUNDS - 1} for {topology.world} learners, each as a graph and as its mixing matrix, "
        "and the product of the three matrices.",
    )
    picture.text(20, 30, f"pattern {name}, {topology.world} learners", size=16, bold=True)
    picture.text(20, 50, what[0].upper() + what[1:], "muted")
    for k in range(ROUNDS):
        x = 116 + 208 * k
        picture.text(x, 82, f"round {k}", "", 12, "middle", True)
        graph(picture, topology, k, x, 172, 68)
        matrix(picture, topology.matrix(k), x - 28, 268, 8)
        picture.text(x + 46, 304, f"T{'₀₁₂'[k]}", "muted")
    x = 688.0
    picture.text(x + 72, 82, "rounds 0 to 2 together", "", 12, "middle", True)
    matrix(picture, mixing_product(topology, ROUNDS), x, 100, 18)
    picture.text(x + 72, 264, "T₀ T₁ T₂", "muted", 12, "middle")
    for line, words in enumerate(
        ("column: a learner; rows: how much", "of whose weights is in its own;", "full shade: 1/2 or more")
    ):
        picture.text(x + 72, 290 + 17 * line, words, "muted", 11, "middle")
    return picture


def hub(name: str, what: str, notes: Sequence[str], inside: str) -> Picture:
    """All learners and the one mean that all get."""
    picture = Picture(WIDTH, 290, f"Who talks to whom: {name}", f"{what}. {' '.join(notes)}")
    picture.text(20, 30, name, size=16, bold=True)
    picture.text(20, 50, what[0].upper() + what[1:], "muted")
    x, y = 190.0, 172.0
    for rank in range(8):
        px, py = around(rank, 8, x, y, 88)
        share = 34 / 88
        end = (x + share * (px - x), y + share * (py - y))
        rim = (x + 74 / 88 * (px - x), y + 74 / 88 * (py - y))
        picture.line("message", *rim, *end, 'stroke-width="1.4" marker-end="url(#to)" marker-start="url(#to)"')
        node(picture, px, py, str(rank))
    picture.circle("rim", x, y, 30, 'stroke-width="1.5"')
    for line, word in enumerate(("mean of", inside)):
        picture.text(x, y - 3 + 14 * line, word, "", 11, "middle")
    for line, note in enumerate(notes):
        picture.text(350, 134 + 24 * line, note)
    return picture


def super_learners(topology: Topology, per_node: int) -> Picture:
    """Super-learners as boxes; which of their learners talk in three rounds."""
    what = "learners of a box share their gradients at each step; each talks to its like in other boxes, beside them"
    picture = Picture(WIDTH, 330, "Who talks to whom: hadpsgd, 4 super-learners of 2", f"{what}.")
    picture.text(20, 30, "hadpsgd, pattern random, 4 super-learners of 2 learners", size=16, bold=True)
    picture.text(20, 50, what[0].upper() + what[1:], "muted")
    corners = [(-68.0, -50.0), (68.0, -50.0), (68.0, 58.0), (-68.0, 58.0)]
    beside = SideBySide(topology, per_node)
    for k in range(ROUNDS):
        middle = 160 + 280 * k
        picture.text(middle, 86, f"round {k}", "", 12, "middle", True)
        at = {}
        for box, (dx, dy) in enumerate(corners):
            x, y = middle + dx, 186 + dy
            picture.rectangle("rim", x - 46, y - 28, 92, 56, 'rx="10" stroke-width="1.2"')
            picture.line("rim", x - 24, y - 8, x + 24, y + 8, 'stroke-width="4"')
            for place in range(per_node):
                at[box * per_node + place] = (x - 24 + 48 * place, y - 8 + 16 * place)
        for rank, peers in ((rank, beside.sources(k, rank)) for rank in range(beside.world)):
            for peer in (peer for peer in peers if peer < rank):
                link(picture, at[peer], at[rank], False, "message" if rank % per_node == 0 else "other")
        for rank, (x, y) in at.items():
            node(picture, x, y, str(rank))
    x = 20.0
    for kind, words, wide in (
        ("rim", "a super-learner; inside: mean of gradients, and of what came", 420),
        ("message", "first half of the weights", 200),
        ("other", "second half", 120),
    ):
        picture.line(kind, x, 318, x + 22, 318, f'stroke-width="{4 if kind == "rim" else 1.4}"')
        picture.text(x + 28, 322, words, "muted")
        x += wide
    return picture


def _own() -> Topology:
    sys.path.insert(0, str(HERE.parent / "strategies"))
    from hypercube import hypercube

    return custom(8, hypercube)


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
    drawn["talks-hadpsgd.svg"] = lambda: super_learners(find_topology("random", 4, seed=3), 2)
    drawn["talks-allreduce.svg"] = lambda: hub(
        "allreduce",
        "one mean of all gradients, at each step",
        (
            "Each learner gives its gradient and gets the mean of all.",
            "The mean is no process of its own: learners pass parts of the sum to each other.",
            "All weights stay the same on all learners.",
        ),
        "gradients",
    )
    drawn["talks-delay-by-one.svg"] = lambda: hub(
        "delay-by-one",
        "one mean of all weights, at each step, while the gradients are computed",
        (
            "Each learner gives its weights, computes its gradient meanwhile,",
            "puts the mean in their place and steps with its gradient.",
            "The mean is no process of its own: each learner sums one part of the weights.",
        ),
        "weights",
    )
    return drawn


def main(folder: Path) -> None:
    """Write every picture into a folder."""
    for name, drawing in pictures().items():
        (folder / name).write_text(drawing().finished(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
