"""Distributions and lines through measured times, for simulations to draw from."""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from starling.engines.virtual.cluster import ComputeModel, LinkModel
from starling.predict.costs import GradientTimes

RESAMPLES = 2000
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
HARDLY_ANY = 0.002
"""Standard deviation / mean below which gradient times are taken to be constant."""


def gradient_times(seconds: Sequence[float]) -> GradientTimes:
    """Mean, interval, quantiles and the distribution that fits best."""
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


def fit_compute(times: "np.ndarray[Any, np.dtype[np.float64]]") -> ComputeModel:
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


def _distance(times: "np.ndarray[Any, np.dtype[np.float64]]", model: ComputeModel) -> float:
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
    weights = seconds**-0.5
    rows, wanted = np.stack([weights, sizes * weights], axis=1), seconds * weights
    latency, per_byte = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    if len(sizes) < 2 or per_byte <= 0.0:
        latency, per_byte = float(seconds.min()), 1e-15
    elif latency < 0.0:
        latency, per_byte = 0.0, float((rows[:, 1] @ wanted) / (rows[:, 1] @ rows[:, 1]))
    return LinkModel(latency=float(latency), bandwidth=float(1.0 / per_byte))
