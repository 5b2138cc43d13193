"""Two learners that average rarely, on a slow link, against a lone one: what DiLoCo's periods and fragments save.

Sending the model takes as long as eight gradients. DDP, and DDP with `no_sync`, are in the same table.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measuring import Bar
from benchmarks.runs import DDP, WARM_UP, Outcome, Run, Seconds, total_rate
from benchmarks.starting import alternately
from benchmarks.throttled_link import WORLD, SlowLink, slow_link

ROUNDS = 3
NUM_PARAMETERS = 1 << 20
GRADIENTS_PER_SENDING = 8.0
BAR = 0.95
ARMS: dict[str, tuple[str, Mapping[str, Any], int, float | None]] = {
    "diloco, every 500": ("diloco", {"every": 500}, 1_000, BAR),
    "diloco, every 100, int4": ("diloco", {"every": 100, "compression": "int4"}, 300, BAR),
    "streaming-diloco, every 100": ("streaming-diloco", {"every": 100}, 300, BAR),
    "diloco, every 100": ("diloco", {"every": 100}, 300, None),
    "DDP with no_sync, every 8": (DDP, {"sync_every": 8}, 80, None),
    "DDP": (DDP, {"sync_every": 1}, 20, None),
}
"""The strategy, its options, a learner's number of gradients, and the required share of a lone learner's speed."""


def measure(folder: Path) -> list[Bar]:
    """Samples per second of a learner / of a lone learner."""
    with slow_link(folder) as link:
        return _measure(link)


def _measure(link: SlowLink) -> list[Bar]:
    sending = link.seconds_to_send(NUM_PARAMETERS)
    gradient = sending / GRADIENTS_PER_SENDING

    def run(strategy: str, world: int, steps: int, options: Mapping[str, Any]) -> Run:
        total = world * (steps + WARM_UP + 1)  # with the last mean among what is timed
        speed = link.bytes_per_second
        return Run(strategy, world, NUM_PARAMETERS, gradient, steps=total, options=options, bytes_per_second=speed)

    runs = {name: run(strategy, WORLD, steps, options) for name, (strategy, options, steps, _) in ARMS.items()}
    found = alternately({"alone": run("allreduce", 1, 100, {}), **runs}, ROUNDS, link.make)
    rates = {name: [total_rate(outcomes) / len(outcomes) for outcomes in each] for name, each in found.items()}
    shares = {name: median(a / b for a, b in zip(rates[name], rates["alone"], strict=True)) for name in ARMS}
    return [
        Bar.at_least(
            f"two learners, {link.name}: {name} / a lone learner, samples per second of each",
            share,
            BAR if bar is not None else 0.0,
            _in_words(rates[name], rates["alone"], sending, gradient, found[name][0][0]),
        )
        for (name, share), (_, _, _, bar) in zip(shares.items(), ARMS.values(), strict=True)
    ]


def _in_words(own: list[float], alone: list[float], sending: Seconds, gradient: Seconds, outcome: Outcome) -> str:
    return (
        f"{median(own):.1f} and {median(alone):.1f} samples/s; {1000 * sending:.0f} ms to send the model once, "
        f"{1000 * gradient:.0f} ms a gradient, {outcome.bytes_sent / 1e6 / len(outcome.stamps):.3g} MB sent a gradient"
    )
