"""The virtual engine at scale: thousands of learners timed without gradients, and many gradients in one call.

As a program, `python -m benchmarks.virtual_scale LEARNERS ROUNDS NUM_BYTES RESULT` makes one timing-only run of
`adpsgd`.
"""

import json
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from benchmarks.measuring import Bar, median_speed_up
from benchmarks.starting import Program, run_side_by_side
from benchmarks.workloads import Computing
from starling.budget import Budget
from starling.engines.virtual.cluster import Cluster, ComputeModel
from starling.engines.virtual.engine import VirtualEngine
from starling.engines.virtual.timing import simulate_timing
from starling.predict.measure import peak_memory
from starling.strategies import find_strategy
from starling.training.job import Job

ROUNDS = 3
MOST_SECONDS, MOST_MEBIBYTES = 20.0, 2048.0
MOST_SECONDS_OF_MANY = 60.0
NUM_BYTES = 13_000_000
"""Size of a model of 3.25 M weights, which fits into one message of adpsgd's default 16 MiB."""
WIDTHS = (40, 64, 64, 64, 64, 64, 64, 32)
"""Widths of a perceptron with seven layers and 25 k parameters."""
BATCH_SIZE = 8


def measure(folder: Path) -> list[Bar]:
    """Seconds and memory of timing-only runs, each in a separate process."""
    whole = [timed(1024, 100, folder) for _ in range(ROUNDS)]
    many = timed(10_000, 10, folder)
    seconds, mebibytes = (median(each[key] for each in whole) for key in ("seconds", "mebibytes"))
    what = "timing-only, 1,024 learners x 100 rounds of adpsgd"
    detail, detail_of_many = (
        f"{each['seconds']:.1f} s, {each['events']:,.0f} events, {each['rounds']:.0f} rounds, "
        f"{each['mebibytes']:.0f} MiB"
        for each in ({**whole[0], "seconds": seconds, "mebibytes": mebibytes}, many)
    )
    return [
        Bar.at_most(f"{what}: seconds / {MOST_SECONDS:g}", seconds / MOST_SECONDS, 1.0, detail),
        Bar.at_most(f"{what}: memory / {MOST_MEBIBYTES:g} MiB", mebibytes / MOST_MEBIBYTES, 1.0, detail),
        Bar.at_most(
            f"timing-only, 10,000 learners x 10 rounds of adpsgd: seconds / {MOST_SECONDS_OF_MANY:g}",
            many["seconds"] / MOST_SECONDS_OF_MANY,
            1.0,
            detail_of_many,
        ),
        together(),
    ]


def together() -> Bar:
    """How many times faster a whole run of 64 learners is that computes their gradients together."""
    pairs = {strategy: [pair(strategy, number) for number in range(4)] for strategy in ("allreduce", "adpsgd")}
    speed_ups = {strategy: median_speed_up(found) for strategy, found in pairs.items()}
    ours, theirs = (median(column) for column in zip(*pairs["allreduce"], strict=True))
    return Bar.at_least(
        "64 learners under allreduce, whole run: gradients together / one after another",
        speed_ups["allreduce"],
        3.0,
        f"{ours:.2f} and {theirs:.2f} s for 1,280 gradients; under adpsgd {speed_ups['adpsgd']:.2f} times faster",
    )


def pair(strategy: str, number: int) -> tuple[float, float]:
    """Seconds of both runs, in an order that alternates."""
    found = {is_batched: trained(strategy, is_batched) for is_batched in (number % 2 == 0, number % 2 == 1)}
    return found[True], found[False]


def trained(strategy: str, is_batched: bool) -> float:
    """Seconds of 20 gradients of each of 64 learners."""
    job = Job(
        Computing(WIDTHS, batch_size=BATCH_SIZE),
        find_strategy(strategy),
        Budget(steps=64 * 20),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
    compute = ComputeModel(distribution="log-normal", spread=0.3, batched=is_batched)
    engine = VirtualEngine(job, 64, Cluster(compute=compute))
    begin = time.perf_counter()
    engine.run()
    return time.perf_counter() - begin


def timed(world: int, rounds: int, folder: Path) -> dict[str, float]:
    """Seconds, events and peak memory of one run in a fresh process."""
    with TemporaryDirectory(dir=folder) as name:
        note = Path(name) / "note.json"
        arguments = [str(world), str(rounds), str(NUM_BYTES), str(note)]
        run_side_by_side([Program([sys.executable, "-m", "benchmarks.virtual_scale", *arguments], {})], Path(name))
        return dict(json.loads(note.read_text()))


def main(world: int, rounds: int, num_bytes: int, note: Path) -> None:
    cluster = Cluster(compute=ComputeModel(distribution="uniform", spread=0.05))
    begin = time.perf_counter()
    outcome = simulate_timing(find_strategy("adpsgd"), None, world, cluster, num_bytes, world * rounds)
    seconds = time.perf_counter() - begin
    peak = peak_memory() / 2**20
    num_rounds = max(learner.averaging.rounds for learner in outcome.learners)
    note.write_text(
        json.dumps({"seconds": seconds, "events": outcome.num_events, "rounds": num_rounds, "mebibytes": peak})
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
