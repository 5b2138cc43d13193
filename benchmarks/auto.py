"""`strategy: auto` against fixed strategies: seconds until four learners' consensus model reaches a validation loss.

Four settings: equal learners, one ten times slower, a throttled link between two and two learners, and both. The time
of `auto` includes choosing. The gradients are real; emulated devices take longer for each gradient than this machine.
"""

import json
import signal
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import vector_to_parameters

from benchmarks.auto_learner import EVERY, Training
from benchmarks.auto_task import Imitation
from benchmarks.measuring import Bar
from benchmarks.namespaces import INTERFACE, Namespace, NoNamespacesError, Throttle, joined_namespaces
from benchmarks.starting import Program, run_side_by_side
from starling.launch.launcher import launch

Seconds = float
Strategy = Mapping[str, Any]
WORLD = 4
GRADIENT_SECONDS: Seconds = 0.025
SLOWEST = 10.0
TARGET = 0.7
"""The validation loss to reach."""
STEPS, MINUTES = 6500, 1.25
"""Budget of each run: it ends at whichever limit comes first. A run that misses the target counts as having taken the
whole time."""
THROTTLE = Throttle(rate="20mbit", burst="32kb", latency="1s")
PORT = 29500
LIMIT: Seconds = 900.0
WARM_UP_STEPS = 40
"""Number of steps of a first run, in which the processes load what the first optimizer and the first averaging need."""
AUTO: Strategy = {"name": "auto"}
ALLREDUCE: Strategy = {"name": "allreduce"}
RARELY: Strategy = {"name": "adpsgd", "pattern": "pairs", "period": 4}
OFTEN: Strategy = {"name": "adpsgd"}
BY_NODES: Strategy = {"name": "hadpsgd", "per_node": 2, "period": 4}
WITHIN, BETTER = 1.10, 1.0


@dataclass(frozen=True)
class Setting:
    """A set of machines, and the fixed strategies that are plausible on it."""

    name: str
    slowest: float
    is_throttled: bool
    fixed: tuple[Strategy, ...]
    beats_allreduce: bool = True
    """Whether the bar requires `auto` to be faster than `allreduce`."""


SETTINGS = (
    Setting("equal", 1.0, False, (ALLREDUCE, {"name": "delay-by-one"}, OFTEN), beats_allreduce=False),
    Setting("one ten times slower", SLOWEST, False, (ALLREDUCE, OFTEN, {"name": "adpsgd", "pattern": "pairs"})),
    Setting("a throttled link", 1.0, True, (ALLREDUCE, RARELY, BY_NODES, {"name": "adpsgd", "period": 8})),
    Setting("both", SLOWEST, True, (ALLREDUCE, RARELY, {"name": "adpsgd", "period": 8})),
)


@dataclass(frozen=True)
class Reached:
    """The time at which a run reached the target."""

    strategy: Strategy
    seconds: Seconds
    has_reached: bool
    choosing: Seconds

    def __str__(self) -> str:
        options = " ".join(f"{key}={value}" for key, value in self.strategy.items() if key != "name")
        more = "" if self.has_reached else " at least"
        return f"{self.strategy['name']}{' ' if options else ''}{options}{more} {self.seconds:.1f} s"


def measure(folder: Path, settings: Sequence[Setting] = SETTINGS) -> list[Bar]:
    """Ratios by setting: seconds of `auto` / of the best fixed strategy, and of `auto` / of `allreduce`."""
    return [bar for setting in settings for bar in _bars(setting, folder)]


def _bars(setting: Setting, folder: Path) -> list[Bar]:
    try:
        with joined_namespaces(THROTTLE) if setting.is_throttled else nullcontext() as ends:
            auto, *fixed = _made(setting, [AUTO, *setting.fixed], ends, folder)
    except NoNamespacesError:
        return []  # this machine, or this user, may not have them
    best = min(fixed, key=lambda each: each.seconds)
    synchronous = fixed[0]
    detail = f"auto: {auto}, of them {auto.choosing:.1f} s to choose; {', '.join(map(str, fixed))}"
    name = f"auto, {setting.name}: seconds to a validation loss of {TARGET} / of"
    bars = [Bar.at_most(f"{name} the best fixed strategy", _ratio(auto, best), WITHIN, detail)]
    if setting.beats_allreduce:
        bars.append(Bar.at_most(f"{name} allreduce", _ratio(auto, synchronous), BETTER, f"{auto}, {synchronous}"))
    return bars


def _ratio(auto: Reached, other: Reached) -> float:
    """The ratio of the times; infinite if `auto` missed the target, so that no bar holds."""
    return auto.seconds / other.seconds if auto.has_reached else float("inf")


def _made(
    setting: Setting, strategies: Sequence[Strategy], ends: Sequence[Namespace] | None, folder: Path
) -> list[Reached]:
    """The outcomes of a setting's runs, made one after another in the same processes."""
    warm_up = Training(dict(OFTEN), GRADIENT_SECONDS, 1.0, WARM_UP_STEPS, MINUTES)
    runs = [Training(dict(each), GRADIENT_SECONDS, setting.slowest, STEPS, MINUTES) for each in strategies]
    with tempfile.TemporaryDirectory(dir=folder) as name:
        own = Path(name)
        command = [
            sys.executable,
            "-m",
            "benchmarks.auto_learner",
            json.dumps([asdict(run) for run in (warm_up, *runs)]),
            name,
        ]
        if ends is None:
            launch(command, WORLD, own)
        else:
            run_side_by_side([_program(ends, command, rank) for rank in range(WORLD)], own, LIMIT)
        return [_reached(own, number) for number in range(1, 1 + len(runs))]


def _program(ends: Sequence[Namespace], command: Sequence[str], rank: int) -> Program:
    """The program of a learner in the first or the second namespace."""
    half = WORLD // len(ends)
    variables = {
        "RANK": rank,
        "WORLD_SIZE": WORLD,
        "LOCAL_RANK": rank % half,
        "LOCAL_WORLD_SIZE": half,
        "MASTER_ADDR": ends[0].address,
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    return Program(ends[rank // half].inside(command), variables)


def _reached(folder: Path, number: int) -> Reached:
    """The time at which the mean of the learners' weights reached the target, from the copies that they kept."""
    times, weights = [], []
    for rank in range(WORLD):
        file = folder / f"run-{number}-{rank}"
        times.append(json.loads(file.with_suffix(".times").read_text()))
        content = file.with_suffix(".weights")
        found = torch.from_file(str(content), size=content.stat().st_size // 4, dtype=torch.float32)
        weights.append(found.view(len(times[-1]), -1))
    said = json.loads((folder / f"said-{number}.json").read_text())
    task = Imitation(0.0)
    model, now, end = task.make_model(), max(each[0] for each in times), max(each[-1] for each in times)
    while now <= end:
        places = [bisect_right(each, now) - 1 for each in times]
        consensus = torch.stack([each[place] for each, place in zip(weights, places, strict=True)]).mean(dim=0)
        vector_to_parameters(consensus, model.parameters())
        if task.validation_loss(model) <= TARGET:
            return Reached(said["strategy"], now, True, said["choosing"])
        now += EVERY / 2
    return Reached(said["strategy"], end, False, said["choosing"])


def main(names: Sequence[str]) -> None:
    """Measure the settings of these names, or all settings if there are none."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all is cleaned up
    with tempfile.TemporaryDirectory() as folder:
        for bar in measure(Path(folder), [each for each in SETTINGS if not names or each.name in names]):
            print(f"{bar.name}: {bar.ratio:.3g}, bar {bar.bar:g}; {bar.detail}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
