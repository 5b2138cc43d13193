"""Two learners on a link so slow that sending the model takes four times a gradient: `adpsgd` against plain DDP.

The link is real where this machine allows network namespaces, and otherwise emulated by waiting.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.measuring import Bar
from benchmarks.namespaces import INTERFACE, Namespace, NoNamespacesError, Throttle, joined_namespaces
from benchmarks.runs import DDP, SENDING, Outcome, Run, Seconds, median_ratio, total_rate
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
PORT = 29500
"""Of the store, in a namespace of its own."""


def measure(folder: Path) -> list[Bar]:
    """Samples per second of both learners under `adpsgd` / under DDP, which spends a sending and more on each step."""
    try:
        with joined_namespaces(THROTTLE) as ends:
            return [_measure(folder, ends)]
    except NoNamespacesError:
        return [_measure(folder, None)]


def _measure(folder: Path, ends: Sequence[Namespace] | None) -> Bar:
    speed = EMULATED_BYTES_PER_SECOND if ends is None else None

    def make(runs: Sequence[Run]) -> Outcomes:
        return launched(runs, folder) if ends is None else _run_in(ends, runs, folder)

    trial = Run(SENDING, WORLD, NUM_PARAMETERS, steps=5, bytes_per_second=speed)
    sending = seconds_between(make([trial])[0][0])
    gradient = sending / GRADIENTS_PER_SENDING
    ddp_steps = WORLD * round(RUN_SECONDS / (sending + gradient))
    found = alternately(
        {
            "adpsgd": Run("adpsgd", WORLD, NUM_PARAMETERS, gradient, seconds=RUN_SECONDS, bytes_per_second=speed),
            DDP: Run(DDP, WORLD, NUM_PARAMETERS, gradient, steps=ddp_steps, bytes_per_second=speed),
        },
        ROUNDS,
        make,
    )
    rates = {name: [total_rate(outcomes) for outcomes in found[name]] for name in found}
    rounds = median(outcomes[0].rounds / len(outcomes[0].stamps) for outcomes in found["adpsgd"])
    which = "emulated slow link" if ends is None else "throttled link between namespaces"
    return Bar.at_least(
        f"two learners, {which}: adpsgd / plain DDP, samples per second",
        median_ratio(rates["adpsgd"], rates[DDP]),
        3.0,
        f"{median(rates['adpsgd']):.1f} and {median(rates[DDP]):.1f} samples/s; {1000 * sending:.0f} ms to send the "
        f"model once, {1000 * gradient:.0f} ms a gradient, {rounds:.2f} rounds a gradient",
    )


def seconds_between(outcome: Outcome) -> Seconds:
    """The median time from one thing noted to the next."""
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
