"""Who talks to whom: graphs, mixing matrices, a mean that all share, servers, super-learners."""

from collections.abc import Sequence
from math import cos, pi, sin

from svg import WIDTH, Picture, number

from starling.strategies.hadpsgd import SideBySide
from starling.topology import Matrix, Topology, mixing_product

ROUNDS = 3


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


def hub(name: str, what: str, notes: Sequence[str], inside: tuple[str, str]) -> Picture:
    """All learners and the one thing that all share: a mean, or memory."""
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
    for line, word in enumerate(inside):
        picture.text(x, y - 3 + 14 * line, word, "", 11, "middle")
    for line, note in enumerate(notes):
        picture.text(350, 134 + 24 * line, note)
    return picture


def servers() -> Picture:
    """Workers above, two servers below, each of which keeps half of the model."""
    what = "each worker pushes a part of its gradient to each server and pulls that part of the weights"
    picture = Picture(WIDTH, 330, "Who talks to whom: parameter-server, 5 workers and 2 servers", f"{what}.")
    picture.text(20, 30, "parameter-server, shards 2, servers own, 7 learners", size=16, bold=True)
    picture.text(20, 50, what[0].upper() + what[1:], "muted")
    num_workers, halves = 5, ("first half", "second half")
    workers = [(70.0 + 90 * rank, 104.0) for rank in range(num_workers)]
    boxes = [(150.0, 238.0), (350.0, 238.0)]
    for place, (x, y) in enumerate(boxes):
        for wx, wy in workers:
            kind = "message" if place == 0 else "other"
            top = (x + (wx - x) * 0.18, y - 22)
            share = 15 / ((wx - top[0]) ** 2 + (wy - top[1]) ** 2) ** 0.5
            picture.line(kind, wx + share * (top[0] - wx), wy + share * (top[1] - wy), *top, 'stroke-width="1.4"')
        picture.rectangle("rim", x - 82, y - 22, 164, 44, 'rx="8" stroke-width="1.5"')
        picture.text(x, y - 3, f"learner {num_workers + place}, a server", "", 11, "middle")
        picture.text(x, y + 12, f"{halves[place]} of the weights", "muted", 11, "middle")
    for rank, (x, y) in enumerate(workers):
        node(picture, x, y, str(rank))
    for line, note in enumerate(
        (
            "Down a line: a piece of a gradient.",
            "Up a line: that piece of the weights.",
            "A server holds the optimizer of its piece.",
            "Workers do not talk to each other, nor do servers.",
            "servers: beside puts the first server into learner 0,",
            "the second into learner 1, and all seven compute.",
        )
    ):
        picture.text(500, 118 + 24 * line, note)
    x = 20.0
    for kind, words in (("message", "first half of the weights"), ("other", "second half")):
        picture.line(kind, x, 306, x + 22, 306, 'stroke-width="1.4"')
        picture.text(x + 28, 310, words, "muted")
        x += 220
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
