"""Who waits for whom: a run on the virtual engine (events.py) as rows over simulated time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from events import LEARNERS, SLOW, STEPS, Events, Message, record
from svg import WIDTH, Picture

SHOWN = ("every", "fragments", "overlap", "update", "sum", "delay", "pattern", "per_node")
"""The options that a timeline's title gives."""
LEFT, TOP, PITCH, BAR, LANE = 96.0, 82.0, 58.0, 24.0, 9.0
SECONDS, SCALE = 2.4, (WIDTH - 96 - 28) / 2.4
DASHED = 'stroke-dasharray="4 2"'
"""How a gradient's arrow differs from that of weights."""


@dataclass(frozen=True)
class Waits:
    """A timeline to draw."""

    strategy: str
    options: Mapping[str, Any]
    what: str
    """What there is to see."""


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
    has_server = waits.options.get("servers") == "own"
    rows = LEARNERS + has_server
    bottom = TOP + PITCH * rows
    name = ", ".join([waits.strategy, *(f"{key} {waits.options[key]}" for key in SHOWN if key in waits.options)])
    picture = Picture(
        WIDTH,
        int(bottom) + 74,
        f"Who waits for whom: {name}",
        f"{waits.what}. {LEARNERS} learners make {STEPS} gradients in {end:.2f} simulated seconds; learner {SLOW} "
        "takes three times as long for each.",
    )
    picture.text(20, 30, name, size=16, bold=True)
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
        if has_server and message.begin < end:
            _to_or_from_server(picture, message, server=rows - 1)
        elif not has_server:
            _between_lanes(picture, message)
    picture.line("axis", x_of(end), TOP - 4, x_of(end), bottom, 'stroke-width="1.5"')
    for rank in range(LEARNERS):
        _learner(picture, events, rank, has_lane=not events.shard_works)
    if has_server:
        picture.text(20, bar_top(LEARNERS) + 16, "server", bold=True)
        _shard_steps(picture, events, LEARNERS)
    _legend(picture, events, has_server, bottom + 50)
    return picture


def _between_lanes(picture: Picture, message: Message) -> None:
    down = message.receiver > message.sender
    picture.arrow(
        x_of(message.begin),
        lane_top(message.sender) + (LANE if down else 0),
        x_of(message.end),
        lane_top(message.receiver) + (0 if down else LANE),
        'stroke-width="1"',
    )


def _to_or_from_server(picture: Picture, message: Message, server: int) -> None:
    """A gradient down to the server's row, or weights up from it."""
    begin, end = x_of(message.begin), x_of(message.end)
    if message.receiver == server:
        picture.arrow(begin, bar_top(message.sender) + BAR, end, bar_top(server), 'stroke-width="1" ' + DASHED)
    else:
        picture.arrow(begin, bar_top(server), end, bar_top(message.receiver) + BAR, 'stroke-width="1"')


def _axis(picture: Picture, bottom: float) -> None:
    picture.line("axis", x_of(0), bottom, x_of(SECONDS), bottom)
    for tenth in range(0, int(SECONDS * 10) + 1, 2):
        x = x_of(tenth / 10)
        picture.line("axis", x, bottom, x, bottom + 4)
        picture.text(x, bottom + 18, f"{tenth / 10:.1f}" + (" s" if tenth == 20 else ""), "muted", 11, "middle")


def _learner(picture: Picture, events: Events, rank: int, has_lane: bool) -> None:
    """One row: gradients and waiting above, averaging below."""
    top = bar_top(rank)
    picture.text(20, top + 16, f"learner {rank}", bold=True)
    if rank == SLOW:
        picture.text(20, top + 31, "3 × slower", "muted", 11)
    for place, gradient in enumerate(events.of(rank)):
        x, width = x_of(gradient.begin), SCALE * (gradient.end - gradient.begin)
        picture.rectangle("slow" if rank == SLOW else "fast", x + 0.5, top, width - 1, BAR, 'rx="2"')
        picture.text(x + width / 2, top + 16, str(events.staleness[rank, place]), "on", 12, "middle")
    over = events.claimed_last[rank]
    works = sorted((work.begin, work.end) for work in (*events.of(rank), *events.on_shards(rank)) if work.begin < over)
    for free, begin in zip([0.0, *(end for _, end in works)], [*(begin for begin, _ in works), over], strict=True):
        _wait(picture, free, begin, top)
    _shard_steps(picture, events, rank)
    lane = [(part.begin, part.end) for part in events.averagings if part.rank == rank and has_lane]
    for begin, end in joined(lane):
        x = x_of(begin)
        if end - begin > 1e-6:
            picture.rectangle("averaging", x, lane_top(rank), SCALE * (end - begin) - 0.6, LANE, 'rx="1"')


def _shard_steps(picture: Picture, events: Events, rank: int) -> None:
    """Where a row changes the model in host memory; the much shorter reading is left out."""
    for begin, end in joined((work.begin, work.end) for work in events.on_shards(rank) if work.is_step):
        picture.rectangle("averaging", x_of(begin), bar_top(rank), SCALE * (end - begin) - 0.4, BAR, 'rx="1"')


def _wait(picture: Picture, begin: float, end: float, top: float) -> None:
    if SCALE * (end - begin) > 2.5:
        picture.waiting(x_of(begin) + 1, top + 3, SCALE * (end - begin) - 2, BAR - 6)


def joined(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Stretches of time, those that overlap as one."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(stretches):
        if joined and begin < joined[-1][1] - 1e-9:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _legend(picture: Picture, events: Events, has_server: bool, y: float) -> None:
    x = 20.0
    entries = [("fast", "gradient, its staleness"), ("waits", "waits")]
    entries += [("shard", "the server steps" if has_server else "changes the model")] if events.shard_works else []
    entries += [("averaging", "averages")] if events.averagings and not events.shard_works else []
    entries += [("means", "a mean travels")] if events.means else []
    entries += [("gradient", "gradient travels")] if has_server else []
    entries += [("message", "weights travel")] if events.messages else []
    entries += [("round", "a round opens")] if events.rounds else []
    for kind, words in entries:
        if kind == "waits":
            picture.waiting(x, y - 10, 22, 12)
        elif kind == "message":
            picture.arrow(x, y - 8, x + 20, y, 'stroke-width="1.2"')
        elif kind == "gradient":
            picture.arrow(x, y - 8, x + 20, y, 'stroke-width="1.2" ' + DASHED)
        elif kind == "shard":
            picture.rectangle("averaging", x + 8, y - 11, 7, 14, 'rx="1"')
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
