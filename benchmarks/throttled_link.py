"""Two learners on a link so slow that sending the model takes four times as long as a gradient: `adpsgd` against DDP
that averages every gradient, and against DDP that averages as rarely as `adpsgd` does there.

The link is real if this machine allows network namespaces, and otherwise emulated by waiting.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.measuring import Bar
from benchmarks.namespaces import INTERFACE, Namespace, NoNamespacesError, Throttle, joined_namespaces
from benchmarks.runs import (
    DDP,
    SENDING,
    WARM_UP,
    Outcome,
    Run,
    Seconds,
    averaging_in_words,
    median_ratio,
    rounds_per_gradient,
    total_rate,
)
from benchmarks.starting import (
    Outcomes,
    Program,
    alternately,
    launched,
    learner_command,
    read_outcomes,
    run_side_by_side,
)

ROUNDS, WORLD = 3, 2
NUM_PARAMETERS = 1 << 21
THROTTLE = Throttle(rate="200mbit", burst="256kb", latency="20ms")
EMULATED_BYTES_PER_SECOND = 25e6
GRADIENTS_PER_SENDING = 4.0
RUN_SECONDS: Seconds = 8.0
EVERY_GRADIENT, AS_RARELY = "DDP", "DDP with no_sync, as many means per gradient"
BARS = {EVERY_GRADIENT: 3.0, AS_RARELY: 1.0}
PORT = 29500
"""Port of the store, in its own namespace."""


@dataclass(frozen=True)
class SlowLink:
    """Makes runs of two learners with a slow link between them."""

    make: Callable[[Sequence[Run]], Outcomes]
    bytes_per_second: float | None
    """Speed of the link that runs have to emulate; None if the link is real."""
    name: str

    def seconds_to_send(self, num_parameters: int) -> Seconds:
        """Seconds that a model takes from one learner to the other, while nothing else is sent."""
        trial = Run(SENDING, WORLD, num_parameters, steps=5, bytes_per_second=self.bytes_per_second)
        return seconds_between(self.make([trial])[0][0])


@contextmanager
def slow_link(folder: Path) -> Iterator[SlowLink]:
    """A throttled link between network namespaces or, without them, an emulated link."""
    try:
        with joined_namespaces(THROTTLE) as ends:
            yield SlowLink(lambda runs: _run_in(ends, runs, folder), None, "throttled link between namespaces")
    except NoNamespacesError:
        yield SlowLink(lambda runs: launched(runs, folder), EMULATED_BYTES_PER_SECOND, "emulated slow link")


def measure(folder: Path) -> list[Bar]:
    """Samples per second of both learners under `adpsgd` / under DDP, which spends at least the time of a sending on
    each mean."""
    with slow_link(folder) as link:
        return _measure(link)


def _measure(link: SlowLink) -> list[Bar]:
    speed = link.bytes_per_second
    sending = link.seconds_to_send(NUM_PARAMETERS)
    gradient = sending / GRADIENTS_PER_SENDING
    adpsgd = Run("adpsgd", WORLD, NUM_PARAMETERS, gradient, seconds=RUN_SECONDS, bytes_per_second=speed)
    sync_every = max(1, round(1.0 / rounds_per_gradient(link.make([adpsgd])[0])))
    found = alternately(
        {
            "adpsgd": adpsgd,
            EVERY_GRADIENT: _ddp(1, sending, gradient, speed),
            AS_RARELY: _ddp(sync_every, sending, gradient, speed),
        },
        ROUNDS,
        link.make,
    )
    rates = {name: [total_rate(outcomes) for outcomes in found[name]] for name in found}
    times = f"{1000 * sending:.0f} ms to send the model once, {1000 * gradient:.0f} ms a gradient"
    words = {name: f"{median(rates[name]):.1f} samples/s ({averaging_in_words(found[name])})" for name in found}
    return [
        Bar.at_least(
            f"two learners, {link.name}: adpsgd / {rival}, samples per second",
            median_ratio(rates["adpsgd"], rates[rival]),
            bar,
            f"{words['adpsgd']} and {words[rival]}; {times}",
        )
        for rival, bar in BARS.items()
    ]


def _ddp(sync_every: int, sending: Seconds, gradient: Seconds, speed: float | None) -> Run:
    """A run with DDP for about `RUN_SECONDS`: for a mean of two learners, it sends as much data as the model has."""
    periods = max(WARM_UP, round(RUN_SECONDS / (sending + sync_every * gradient)))
    steps = WORLD * sync_every * periods
    options = {"sync_every": sync_every}
    return Run(DDP, WORLD, NUM_PARAMETERS, gradient, steps=steps, options=options, bytes_per_second=speed)


def seconds_between(outcome: Outcome) -> Seconds:
    """The median time between consecutive stamps."""
    return median(after - before for before, after in zip(outcome.stamps, outcome.stamps[1:], strict=False))


def _run_in(ends: Sequence[Namespace], runs: Sequence[Run], folder: Path) -> Outcomes:
    """Make `runs` with a learner in each namespace; learner 0 keeps the store."""
    with TemporaryDirectory(dir=folder) as name:
        command = learner_command(runs, Path(name))
        programs = [
            Program(
                end.inside(command),
                {
                    "RANK": rank,
                    "WORLD_SIZE": len(ends),
                    "LOCAL_RANK": 0,
                    "LOCAL_WORLD_SIZE": 1,
                    "MASTER_ADDR": ends[0].address,
                    "MASTER_PORT": PORT,
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                },
            )
            for rank, end in enumerate(ends)
        ]
        run_side_by_side(programs, Path(name))
        return read_outcomes(runs, Path(name))
