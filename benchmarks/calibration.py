"""Predictions compared with four real learners on emulated devices, calibrated only with one and with two learners.

A run of some 24 gradients a learner is a small sample of random gradient times and of random rings, of which some cross
a link twice as often as others. So the prediction simulates exactly this run, with its seed, and counts the same
gradients.

Four settings: equal learners, one of them three times slower, jitter, and a throttled link between two namespaces with
two learners in each. For each strategy, the bar is a prediction within 10 % of the measured gradients per second.
`python -m benchmarks.calibration NAME...` measures only the named strategies.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measuring import Bar
from benchmarks.namespaces import INTERFACE, Namespace, NoNamespacesError, Throttle, joined_namespaces
from benchmarks.runs import Outcome, Run, Seconds, total_rate
from benchmarks.starting import (
    Outcomes,
    Program,
    launched,
    learner_command,
    read_outcomes,
    run_side_by_side,
)
from starling.engines.virtual.timing import simulate_timing
from starling.predict.costs import JobFacts, Profile
from starling.predict.measure import MEASURE, Figures, profile_of
from starling.predict.predict import Arm, Machines
from starling.recipe.run import StrategyChoice

WORLD, ROUNDS = 4, 2
NUM_PARAMETERS = 1 << 18
GRADIENT_SECONDS: Seconds = 0.2
STEPS = 96
"""Gradients of all learners together in a run; a limit in seconds would include the time to start."""
GRADIENTS = 20
"""Number of gradients measured for the calibration."""
MOST_WRONG = 0.10
THROTTLE = Throttle(rate="40mbit", burst="64kb", latency="1s", congestion_control="cubic")
"""A throttled link with cubic congestion control, because kernels differ in their default: BBR's paced flows leave part
of a shared link unused."""
PORT = 29500
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "allreduce": {},
    "dpsgd": {},
    "adpsgd": {},
    "hadpsgd": {"per_node": 2},
    "parameter-server": {},
    "sgp": {},
    "local-sgd": {"every": 4},
    "diloco": {"every": 4, "compression": "int4"},
    "streaming-diloco": {"every": 8, "fragments": 2, "overlap": 2},
    "noloco": {"every": 4},
    "async-diloco": {"every": 4},
}
SETTINGS: Mapping[str, Mapping[str, float]] = {
    "equal": {},
    "one slow": {"last_is_slower": 3.0},
    "jitter": {"jitter": 0.5},
}
Make = Callable[[Sequence[Run]], Outcomes]


@dataclass(frozen=True)
class Calibration:
    """Measurements of one and of two learners in a setting."""

    profile: Profile
    across: Profile | None = None
    """The profile of two learners on either side of a link that the others share; None if there is no such link."""

    def predict(self, run: Run) -> float:
        """Predicted gradients per second of all learners of a run together."""
        choice = StrategyChoice.model_validate({"name": run.strategy, **run.options})
        costs = self.profile.costs
        if self.across is not None:
            sides = {"inside": costs.messages, "devices_per_node": run.world // 2}
            links = {"messages": self.across.exchange.fitted, "means": self.across.mean.fitted}
            means = {"gradient_means": self.across.gradient_mean.fitted}
            costs = costs.model_copy(update={**sides, **links, **means})
        cluster = Machines(costs, run.stragglers).cluster(Arm(choice.strategy, choice.options), run.world)
        job, num_bytes = run.job(), costs.job.model_bytes
        if job.budget.steps is None:
            raise ValueError("only a run of a number of steps can be simulated")
        found = simulate_timing(
            choice.strategy,
            choice.options,
            run.world,
            cluster,
            num_bytes,
            job.budget.steps,
            seed=job.seed,
            stragglers=run.stragglers,
        )
        return total_rate([Outcome(list(stamps)) for stamps in found.gradients_at.values()])


def measure(folder: Path, names: Sequence[str] = tuple(STRATEGIES)) -> list[Bar]:
    """The relative error of each prediction, by setting and strategy."""
    here = _calibrated(lambda runs: launched(runs, folder), folder)
    bars = [bar for setting in SETTINGS for bar in _bars(setting, here, lambda runs: launched(runs, folder), names)]
    try:
        with joined_namespaces(THROTTLE) as ends:
            make = _across(ends, folder)
            found = replace(here, across=_calibrated(make, folder).profile)
            bars += _bars("throttled link", found, make, names)
    except NoNamespacesError:
        pass  # this machine, or this user, may not have them
    return bars


def _calibrated(make: Make, folder: Path) -> Calibration:
    """Measure one learner, then two."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        folders = [Path(name) / str(world) for world in (1, 2)]
        runs = []
        for world, own in enumerate(folders, start=1):
            own.mkdir()
            steps = (GRADIENTS if world == 1 else 10) * world
            options = {"folder": str(own)}
            runs.append(Run(MEASURE, world, NUM_PARAMETERS, GRADIENT_SECONDS, steps=steps, options=options))
        make(runs)
        alone, *pair = (
            Figures.read(own, rank) for own, ranks in zip(folders, (1, 2), strict=True) for rank in range(ranks)
        )
    facts = JobFacts(trains="an emulated device", model_bytes=4 * NUM_PARAMETERS, batches_per_epoch=1)
    return Calibration(profile_of(alone, pair, facts, "python -m benchmarks.run --only calibration"))


def _bars(setting: str, calibration: Calibration, make: Make, names: Sequence[str]) -> list[Bar]:
    runs = {
        name: Run(name, WORLD, NUM_PARAMETERS, GRADIENT_SECONDS, steps=STEPS, options=STRATEGIES[name], **_of(setting))
        for name in names
    }
    order = [name for _ in range(ROUNDS) for name in runs]
    found: dict[str, list[float]] = {name: [] for name in runs}
    for name, outcomes in zip(order, make([runs[name] for name in order]), strict=True):
        found[name].append(total_rate(outcomes))
    bars = []
    for name, run in runs.items():
        predicted, measured = calibration.predict(run), median(found[name])
        bars.append(
            Bar.at_most(
                f"prediction for four learners, {setting}, {name}: |predicted / measured - 1|",
                abs(predicted / measured - 1.0),
                MOST_WRONG,
                f"predicted {predicted:.1f}, measured {measured:.1f} gradients/s "
                f"({min(found[name]):.1f} to {max(found[name]):.1f})",
            )
        )
    return bars


def _of(setting: str) -> dict[str, Any]:
    return dict(SETTINGS.get(setting, {}))


def _across(ends: Sequence[Namespace], folder: Path) -> Make:
    """A function that makes runs with the first half of the learners in one namespace, and the others in the other."""

    def make(runs: Sequence[Run]) -> Outcomes:
        world = max(run.world for run in runs)
        with tempfile.TemporaryDirectory(dir=folder) as name:
            command = learner_command(runs, Path(name))
            half = world // len(ends)
            programs = [
                Program(
                    ends[rank // half].inside(command),
                    {
                        "RANK": rank,
                        "WORLD_SIZE": world,
                        "LOCAL_RANK": rank % half,
                        "LOCAL_WORLD_SIZE": half,
                        "MASTER_ADDR": ends[0].address,
                        "MASTER_PORT": PORT,
                        "GLOO_SOCKET_IFNAME": INTERFACE,
                    },
                )
                for rank in range(world)
            ]
            run_side_by_side(programs, Path(name))
            return read_outcomes(runs, Path(name))

    return make


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own:
        for bar in measure(Path(own), sys.argv[1:] or tuple(STRATEGIES)):
            print(bar.name, f"{bar.ratio:.3f}", bar.detail, sep="; ")
