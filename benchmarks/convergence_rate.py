"""The convergence rate of ADPSGD by steps and learners on a smooth problem with known constants, beside the bound of
Lian et al. 2018 (arXiv 1710.06952). `python -m benchmarks.convergence_rate FOLDER` writes rate.md, rate.json and
rate.svg; with `--variants`, rate.md also compares ADPSGD's patterns and `delay-by-one`.

The problem has the constants that the bound needs::

    f(x) = sum_i x_i^2 / (1 + x_i^2)   of x in R^20, from x = (1, ..., 1)

is smooth and not convex; its gradient has the Lipschitz constant L = 2, its minimum is 0, and f(x_0) = 10. Gradients of
f have independent normal noise of variance sigma^2 = 4 added. All learners have the same f (varsigma = 0).
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from starling.budget import Budget
from starling.chance import derive_seed
from starling.comparing.table import Estimate, estimate
from starling.engines.virtual.cluster import Cluster, ComputeModel
from starling.engines.virtual.engine import VirtualEngine
from starling.learner import Learner
from starling.strategies import STRATEGIES, Strategy
from starling.training.job import Job, Observer, StepReport
from starling.workload import Ticket, Workload

DIMENSIONS = 20
LIPSCHITZ = 2.0
"""The Lipschitz constant L: the second derivative of t^2 / (1 + t^2) is (2 - 6 t^2) / (1 + t^2)^3, from -1/2 at t = 1
to 2 at t = 0."""
BEGIN = 0.5 * DIMENSIONS
"""The initial distance from the minimum, f(x_0) - f*."""
VARIANCE = 4.0
"""The variance of the noise, sigma^2 = E |g - grad f|^2."""
SECONDS = 0.1
"""Mean time of a gradient, on the simulated clock."""
STEPS, LEARNERS, SEEDS = (256, 1024, 4096), (1, 2, 4, 8, 16, 32, 64), (1, 2, 3)
VARIANTS: Mapping[str, tuple[str, str | None]] = {
    "`adpsgd`, random pairs": ("adpsgd", "pairs"),
    "`adpsgd`, ring": ("adpsgd", "ring"),
    "`adpsgd`, ring of random order": ("adpsgd", "random"),
    "`delay-by-one`": ("delay-by-one", None),
}
"""Strategies and patterns that are compared with one learner."""
LEARNERS_OF_VARIANTS = (4, 16, 64)


def objective(x: Tensor) -> Tensor:
    """The values of f for x `[..., P]`."""
    return (x.square() / (1.0 + x.square())).sum(-1)


def gradient(x: Tensor) -> Tensor:
    """The gradients of f for x `[..., P]`."""
    return 2.0 * x / (1.0 + x.square()).square()


def step_size(steps: int, learners: int) -> float:
    """The corollary's step size, n / (10 L + sigma sqrt(K)): with M = 1 gradient at a time, and varsigma = 0."""
    return learners / (10.0 * LIPSCHITZ + math.sqrt(VARIANCE * steps))


def bound(steps: int) -> float:
    """The corollary's bound of (1/K) sum_k E |grad f(mean of the learners)|^2, for any number of learners.

    Equation::

        20 (f(x_0) - f*) L / K  +  2 (f(x_0) - f* + L) sigma / sqrt(K)

    which is the theorem's 2 n (f(x_0) - f*) / (a K) + 2 a L sigma^2 / n at the corollary's step size a.
    """
    return 20.0 * BEGIN * LIPSCHITZ / steps + 2.0 * (BEGIN + LIPSCHITZ) * math.sqrt(VARIANCE / steps)


class Point(nn.Module):
    """A model whose weights are x `[P]`, and whose loss is f."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(DIMENSIONS))

    def forward(self, noise: Tensor) -> Tensor:
        """f(x) + <noise, x>, whose gradient is that of f plus the noise `[P]`."""
        return objective(self.x) + noise @ self.x


@dataclass(frozen=True)
class Noise:
    """A mini-batch that consists of the noise of one gradient."""

    noise: Tensor  # [P]
    num_examples: int = 1
    num_frames: int = 1
    seconds: float = 0.0

    def to(self, device: torch.device) -> "Noise":
        """A copy on `device`."""
        return replace(self, noise=self.noise.to(device))


class Noisy(Workload[Noise]):
    """A workload whose loss is f, with noise that depends on the seed and the ticket."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def make_model(self) -> nn.Module:
        return Point()

    def num_batches(self, epoch: int) -> int:
        return max(STEPS)

    def load(self, ticket: Ticket) -> Sequence[Noise]:
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "noise", ticket.step))
        return [Noise(math.sqrt(VARIANCE / DIMENSIONS) * torch.randn(DIMENSIONS, generator=generator))]

    def loss(self, model: nn.Module, examples: Noise) -> Tensor:
        loss: Tensor = model(examples.noise)
        return loss


class Watch(Observer):
    """Sums |grad f|^2 at the mean of the learners' weights before each gradient's step, and the learners' distance from
    the mean."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.gradients, self.distances, self.steps, self.seconds = 0.0, 0.0, 0, 0.0

    def before_step(self) -> None:
        """Record where the learners are."""
        every = torch.stack(self.weights)
        mean = every.mean(0)
        self.gradients += float(gradient(mean).square().sum())
        self.distances += float((every - mean).square().sum(1).mean())
        self.steps += 1

    def on_step(self, report: StepReport) -> None:
        self.seconds = 60.0 * report.minutes


class _Watched:
    """A learner whose steps are watched."""

    def __init__(self, me: Learner, watch: Watch) -> None:
        self._me, self._watch = me, watch
        watch.weights.append(me.weights)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._me, name)

    def step(self, gradient: Tensor | None, scale: float = 1.0) -> None:
        """Record where all learners are, and take a step."""
        self._watch.before_step()
        self._me.step(gradient, scale=scale)


@dataclass(frozen=True)
class Run:
    """Measurements of a run."""

    steps: int
    """Number of gradients of all learners together, K."""
    learners: int
    seed: int
    gradients: float
    """Mean squared gradient norm, (1/K) sum_k |grad f(mean)|^2."""
    distance: float
    """Mean consensus distance, (1/L) sum_l |w_l - mean|^2."""
    seconds: float
    """Duration on the simulated clock."""


def measure(
    steps: int, learners: int, seed: int, strategy: Strategy = STRATEGIES["adpsgd"], pattern: str | None = "pairs"
) -> Run:
    """A run of ADPSGD with random pairs, or of another strategy, at the corollary's step size."""
    watch = Watch()

    async def watched(me: Learner, *options: Any) -> None:
        await strategy.run(_Watched(me, watch), *options)

    job = Job(
        Noisy(seed),
        strategy=replace(strategy, run=watched),
        options=strategy.options(**({} if pattern is None else {"pattern": pattern})),
        budget=Budget(steps=steps),
        make_optimizer=partial(torch.optim.SGD, lr=step_size(steps, learners)),
        seed=seed,
    )
    compute = ComputeModel(distribution="log-normal", seconds=SECONDS, spread=0.1, batched=True)
    VirtualEngine(job, learners, Cluster(compute=compute), watch).run()
    if watch.steps != steps:
        raise RuntimeError(f"{watch.steps} steps were watched, of {steps}")
    return Run(steps, learners, seed, watch.gradients / steps, watch.distances / steps, watch.seconds)


def summarised(runs: Sequence[Run]) -> dict[tuple[int, int], Estimate]:
    """Means over seeds with intervals, by steps and learners."""
    found: dict[tuple[int, int], list[float]] = {}
    for run in runs:
        found.setdefault((run.steps, run.learners), []).append(run.gradients)
    return {key: estimate(values) for key, values in found.items()}


def increases(runs: Sequence[Run]) -> dict[tuple[int, int], Estimate]:
    """The increase, in per cent, of the mean squared gradient norm over one learner's with the same steps and seed,
    whose gradients have the same noise."""
    alone = {(run.steps, run.seed): run.gradients for run in runs if run.learners == 1}
    found: dict[tuple[int, int], list[float]] = {}
    for run in runs:
        if run.learners > 1 and (run.steps, run.seed) in alone:
            increase = 100.0 * (run.gradients / alone[run.steps, run.seed] - 1.0)
            found.setdefault((run.steps, run.learners), []).append(increase)
    return {key: estimate(values) for key, values in found.items()}


def table(runs: Sequence[Run]) -> list[str]:
    """A Markdown table of mean squared gradient norms, the bound, and the ratio of the bound to them."""
    found = summarised(runs)
    lines = [*_head(found, "bound", "bound / measured")]
    for steps in sorted({steps for steps, _ in found}):
        most = max(value.mean for (own, _), value in found.items() if own == steps)
        least = min(value.mean for (own, _), value in found.items() if own == steps)
        loose = f"{bound(steps) / most:.1f} to {bound(steps) / least:.1f}"
        lines.append(f"| {steps:,} | {_cells(found, steps, 4)} | {bound(steps):.3f} | {loose} |")
    return lines


def table_of_increases(runs: Sequence[Run]) -> list[str]:
    """A Markdown table of `increases`, in per cent."""
    found = increases(runs)
    steps = sorted({steps for steps, _ in found})
    return [*_head(found), *(f"| {each:,} | {_cells(found, each, 1, '+')} |" for each in steps)]


def table_of_variants(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """A Markdown table of `increases`, in per cent, with a row for each variant and number of gradients. Each variant's
    runs include those of one learner."""
    found = {name: increases(own) for name, own in runs.items()}
    lines = ["| K | variant | " + " | ".join(f"L = {count}" for count in LEARNERS_OF_VARIANTS) + " |"]
    lines.append("|---" * (2 + len(LEARNERS_OF_VARIANTS)) + "|")
    for steps in STEPS:
        for name, own in found.items():
            cells = " | ".join(text_of(own[steps, each], sign="+") for each in LEARNERS_OF_VARIANTS)
            lines.append(f"| {steps:,} | {name} | {cells} |")
    return lines


def measure_variants(alone: Sequence[Run], pairs: Sequence[Run]) -> dict[str, Sequence[Run]]:
    """The runs of all variants, given those of one learner and those with random pairs."""
    found: dict[str, Sequence[Run]] = {}
    for name, (strategy, pattern) in VARIANTS.items():
        own = pairs
        if (strategy, pattern) != ("adpsgd", "pairs"):
            cells = ((K, L, seed) for K in STEPS for L in LEARNERS_OF_VARIANTS for seed in SEEDS)
            own = [measure(*cell, STRATEGIES[strategy], pattern) for cell in cells]
        print(name, file=sys.stderr, flush=True)
        found[name] = [*alone, *own]
    return found


def text_of_runs(runs: Mapping[str, Sequence[Run]]) -> str:
    """Runs as JSON, a line for each run."""
    parts = [
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(vars(run)) for run in own) + "\n]"
        for name, own in runs.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read_runs(file: Path) -> dict[str, list[Run]]:
    """The runs that `main` kept: `runs`, which are those with random pairs, and the other variants."""
    return {name: [Run(**run) for run in own] for name, own in json.loads(file.read_text(encoding="utf-8")).items()}


def _head(found: Collection[tuple[int, int]], *more: str) -> list[str]:
    counts = sorted({learners for _, learners in found})
    titles = ["K", *(f"L = {count}" for count in counts), *more]
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]


def text_of(found: Estimate, digits: int = 1, sign: str = "") -> str:
    """The estimate as `12.3 ± 1.5`, or the mean alone."""
    mean = f"{found.mean:{sign}.{digits}f}"
    return mean if found.half is None else f"{mean} ± {found.half:.{digits}f}"


def _cells(found: Mapping[tuple[int, int], Estimate], steps: int, digits: int, sign: str = "") -> str:
    counts = sorted({learners for _, learners in found})
    return " | ".join(text_of(found[steps, each], digits, sign) if (steps, each) in found else "—" for each in counts)


def draw(runs: Sequence[Run], file: Path) -> None:
    """Plot the mean squared gradient norm against steps, and against simulated seconds, with a line for each number of
    learners."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    found = summarised(runs)
    counts = sorted({learners for _, learners in found})
    with mpl.rc_context({"svg.hashsalt": "starling", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(7.4, 3.6), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for index, count in enumerate(counts):
            colour = mpl.colormaps["viridis"](0.9 * index / max(1, len(counts) - 1))
            steps = sorted(steps for steps, learners in found if learners == count)
            values = [found[each, count].mean for each in steps]
            panels[0].loglog(steps, values, "o-", color=colour, markersize=3, label=f"L = {count}")
            panels[1].loglog([each * SECONDS / count for each in steps], values, "o-", color=colour, markersize=3)
        steps = sorted({steps for steps, _ in found})
        panels[0].loglog(steps, [bound(each) for each in steps], "k--", label="bound, any L")
        panels[0].set_xlabel("gradients of all learners, K")
        panels[1].set_xlabel("simulated seconds, K / L gradients of 0.1 s")
        panels[0].set_ylabel("mean squared gradient norm")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})


def main() -> None:
    """Measure everything, or what the arguments select."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS)
    parser.add_argument("--learners", type=int, nargs="+", default=LEARNERS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--variants", action="store_true", help="compare other patterns and delay-by-one, too")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    runs, began = [], time.process_time()
    for steps in chosen.steps:
        for learners in chosen.learners:
            runs += [measure(steps, learners, seed) for seed in chosen.seeds]
            print(f"{steps} steps, {learners} learners: {runs[-1].gradients:.4f}", file=sys.stderr, flush=True)
    variants: Mapping[str, Sequence[Run]] = {}
    if chosen.variants:
        alone = [run for run in runs if run.learners == 1]
        pairs = [run for run in runs if run.learners in LEARNERS_OF_VARIANTS]
        variants = measure_variants(alone, pairs)
    lines = [
        *table(runs),
        "",
        *table_of_increases(runs),
        "",
        *(table_of_variants(variants) if variants else ()),
        "",
        f"{len(runs)} runs, {time.process_time() - began:.0f} s of CPU",
    ]
    (chosen.folder / "rate.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    kept = {"runs": runs} | {name: [run for run in own if run.learners > 1] for name, own in variants.items()}
    (chosen.folder / "rate.json").write_text(text_of_runs(kept), encoding="utf-8")
    draw(runs, chosen.folder / "rate.svg")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
