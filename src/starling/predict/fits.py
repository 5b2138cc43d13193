"""The costs that simulations use, from the figures that learners measured: distributions and lines that fit best."""

import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import NormalDist, fmean, median

import numpy as np
import torch
from numpy.typing import NDArray

from starling.engines.processes.place import cores_here
from starling.engines.virtual.cluster import ComputeModel, LinkModel
from starling.predict.costs import (
    SHORTEST,
    Costs,
    GradientTimes,
    JobFacts,
    MachineFacts,
    MeasuredLink,
    MeasuredRun,
    Profile,
    Seconds,
    with_step,
)
from starling.predict.measure import Figures

RESAMPLES = 2000
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
HARDLY_ANY = 0.002
"""Standard deviation / mean below which the gradient times of a profile are taken to be constant."""
STEADY = 0.1
"""Standard deviation / mean up to which the few gradient times of a run are taken to be constant, so that one
simulation is enough."""
DRAWS_OF_A_ROUND = 1000


def profile_of(alone: Figures, pair: Sequence[Figures], facts: JobFacts, command: str) -> Profile:
    """The profile made from the figures of a lone learner and those of two learners that ran together."""
    exchanges, means = (
        {num_bytes: fmean(getattr(each, name)[num_bytes] for each in pair) for num_bytes in getattr(pair[0], name)}
        for name in ("exchanges", "means")
    )
    halves = fit_link(means)
    # a mean of two learners is simulated as two messages of half the bytes
    of_means = halves.model_copy(update={"latency": halves.latency / 2.0})
    longer = max(SHORTEST, fmean(median(each.synchronous) for each in pair) - median(alone.gradients))
    of_gradients = LinkModel(latency=0.0, bandwidth=alone.num_bytes / longer)
    return Profile(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        command=command,
        machine=_machine(alone.device),
        job=facts.model_copy(update={"model_bytes": alone.num_bytes}),
        gradient=gradient_times(alone.gradients),
        step_seconds=fmean(alone.steps),
        mixing_bandwidth=alone.num_bytes / max(median(alone.applies), 1e-9),
        exchange=MeasuredLink(seconds_by_bytes=exchanges, fitted=fit_link(exchanges)),
        mean=MeasuredLink(seconds_by_bytes=means, fitted=of_means),
        gradient_mean=MeasuredLink(seconds_by_bytes={alone.num_bytes: longer}, fitted=of_gradients),
        memory_per_learner_bytes=max(each.memory_bytes for each in (alone, *pair)),
    )


def _machine(device: str) -> MachineFacts:
    try:
        named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:  # another system
        named = None
    processor = named[1] if named else platform.processor() or platform.machine()
    return MachineFacts(
        processor=processor,
        cores=cores_here(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        device=processor if device == "cpu" else device,
        torch=torch.__version__,
        starling=version("starling-asr"),
    )


def costs_of(figures: Sequence[Figures], per_node: int) -> Costs:
    """The costs of a run from the figures of all its learners, by rank; a node has `per_node` learners."""
    world, num_bytes = len(figures), figures[0].num_bytes
    means = [fmean(each.gradients) for each in figures]
    relative = np.concatenate([np.asarray(each.gradients) / mean for each, mean in zip(figures, means, strict=True)])
    varies = len(relative) > 2 * world and float(relative.std()) > STEADY
    gradient = fit_compute(min(means) * relative) if varies else ComputeModel(seconds=min(means))
    longer = mean = max(SHORTEST, fmean(each.means[num_bytes] for each in figures))
    if all(each.synchronous for each in figures):
        synchronous = fmean(median(each.synchronous) for each in figures)
        longer = max(SHORTEST, synchronous - _slowest_of_a_round(figures))
    measured = MeasuredRun(
        gradient_seconds=tuple(means),
        gradients_measured=tuple(len(each.gradients) for each in figures),
        step_seconds=median(seconds for each in figures for seconds in each.steps),
        mean_seconds=mean,
        mean_of_gradients_seconds=longer,
        exchange_seconds={name: fmean(each.rounds[name] for each in figures) for name in figures[0].rounds},
        lost_to_exchanges=tuple(each.lost for each in figures),
        model_bytes=num_bytes,
    )
    return Costs(
        job=JobFacts(trains="the run's model", model_bytes=num_bytes, batches_per_epoch=1),
        compute=with_step(gradient, measured.step_seconds),
        messages=LinkModel(latency=0.0, bandwidth=num_bytes / max(SHORTEST, measured.exchange_seconds["ring"])),
        means=_ring(mean, num_bytes, world),
        gradient_means=_ring(longer, num_bytes, world),
        devices_per_node=per_node,
        measured=measured,
        source="what the learners of this run measured",
    )


def _slowest_of_a_round(figures: Sequence[Figures]) -> Seconds:
    """The expected time of the slowest gradient of a round, from the distributions of all learners."""
    generator = np.random.default_rng(0)
    drawn = [generator.choice(np.asarray(each.gradients), DRAWS_OF_A_ROUND) for each in figures]
    return float(np.max(drawn, axis=0).mean())


def _ring(seconds: Seconds, num_bytes: int, world: int) -> LinkModel:
    """The link on which a ring all-reduce of `world` learners takes `seconds`."""
    messages = 2 * (world - 1)
    return LinkModel(latency=0.0, bandwidth=messages * -(-num_bytes // world) / seconds)


def gradient_times(seconds: Sequence[float]) -> GradientTimes:
    """Mean, interval, quantiles and the best-fitting distribution of gradient times."""
    times = np.asarray(seconds, dtype=np.float64)
    generator = np.random.default_rng(0)
    means = generator.choice(times, (RESAMPLES, len(times))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return GradientTimes(
        num_measured=len(times),
        seconds=float(times.mean()),
        low=float(low),
        high=float(high),
        jitter=float(times.std() / times.mean()),
        quantiles={f"{share:g}": float(np.quantile(times, share)) for share in QUANTILES},
        fitted=fit_compute(times),
    )


def fit_compute(times: NDArray[np.float64]) -> ComputeModel:
    """The best-fitting distribution with the mean and deviation of `times`: its distribution function is nearest to
    theirs."""
    mean, relative = float(times.mean()), float(times.std() / times.mean())
    if relative < HARDLY_ANY:
        return ComputeModel(seconds=mean)
    spread = math.sqrt(math.log1p(relative**2))
    candidates = [ComputeModel(distribution="log-normal", seconds=mean, spread=spread)]
    if (half_width := math.sqrt(3.0) * relative) < 1.0:
        candidates.append(ComputeModel(distribution="uniform", seconds=mean, spread=half_width))
    return min(candidates, key=lambda model: _distance(np.sort(times), model))


def _distance(times: NDArray[np.float64], model: ComputeModel) -> float:
    """The Kolmogorov distance between a distribution and the empirical one of `times`, which must be ascending."""
    if model.distribution == "uniform":
        expected = np.clip((times / model.seconds - (1.0 - model.spread)) / (2.0 * model.spread), 0.0, 1.0)
    else:
        normal = NormalDist(math.log(model.seconds) - 0.5 * model.spread**2, model.spread)
        expected = np.array([normal.cdf(math.log(each)) for each in times])
    steps = np.arange(len(times) + 1) / len(times)
    return float(max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max()))


def fit_link(seconds_by_bytes: Mapping[int, float]) -> LinkModel:
    """The line seconds = latency + bytes / bandwidth that fits best, neither of them below 0.

    Each squared error is weighted by 1 / seconds, a compromise: with equal weights, the largest message would decide,
    and with 1 / seconds**2, a few slow small messages would spoil the bandwidth.
    """
    sizes, seconds = (np.array(list(each), dtype=np.float64) for each in (seconds_by_bytes, seconds_by_bytes.values()))
    if len(sizes) > 1:
        per_byte, latency = np.polyfit(sizes, seconds, 1, w=seconds**-0.5)
        if latency < 0.0 < per_byte:
            latency, per_byte = 0.0, float(sizes.sum() / (sizes**2 / seconds).sum())
        if per_byte > 0.0:
            return LinkModel(latency=float(latency), bandwidth=float(1.0 / per_byte))
    return LinkModel(latency=float(seconds.min()), bandwidth=1e15)
