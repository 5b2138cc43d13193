"""Divides training data among learners, for studies in which learners see different data.

Usually all learners take mini-batches from one stream that contains each utterance once per epoch. With divided data
each learner draws its mini-batches at random from its own part, and an epoch is only a number of mini-batches.
"""

import heapq
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from starling.chance import derive_seed
from starling.configuration import Config
from starling.errors import ConfigError


class DirichletConfig(Config):
    """Parts in which speakers or domains have different frequencies, to a degree set by `alpha`."""

    kind: Literal["dirichlet"]
    alpha: float = Field(gt=0.0, le=1e6)
    """Concentration of the Dirichlet distribution: with a large value, each part is like the whole set; near 0, each
    part has only a few of the speakers or domains."""
    by: Literal["speaker", "domain"] = "speaker"
    """The labels that are divided: speakers, or the domains of the mixture."""


PartitionConfig = Literal["identical", "speaker", "domain"] | DirichletConfig
"""Which utterances a learner may see; the `partition:` key of a recipe."""


def divided_by(config: PartitionConfig) -> Literal["speaker", "domain"]:
    """The labels that are divided: the domains of a mixture, or otherwise speakers."""
    by = config.by if isinstance(config, DirichletConfig) else config
    return "domain" if by == "domain" else "speaker"


def divide(
    labels: NDArray[np.int32], seconds: NDArray[np.float32], num_parts: int, config: PartitionConfig, seed: int
) -> NDArray[np.int32]:
    """The part of each utterance, `[N]` in 0 ... num_parts - 1; no part is empty.

    `labels` (`[N]`) are the numbers of speakers or domains. Whole speakers, or whole domains if there are enough, are
    assigned in descending order of their audio, each to the part with the least audio so far. If there are fewer
    domains than parts, each domain gets a number of parts in proportion to its audio, and its utterances are divided
    among them at random.

    Raises ConfigError if there are too few utterances or speakers.
    """
    if len(labels) < num_parts:
        raise ConfigError(f"{len(labels)} utterances cannot be divided into {num_parts} parts: use fewer learners")
    labels = np.unique(labels, return_inverse=True)[1].astype(np.int32)
    generator = np.random.default_rng(derive_seed(seed, "partition"))
    if isinstance(config, DirichletConfig):
        return _dirichlet(labels, num_parts, config.alpha, generator)
    amounts = np.bincount(labels, weights=seconds).astype(np.float64)
    if len(amounts) >= num_parts:
        return _to_the_lightest(amounts, num_parts)[labels]
    if config == "speaker":
        raise ConfigError(
            f"{len(amounts)} speakers cannot be divided among {num_parts} learners: use at most {len(amounts)}, "
            "or another partition"
        )
    return _domains_among_more_parts(labels, amounts, num_parts, generator)


def _to_the_lightest(amounts: NDArray[np.float64], num_parts: int) -> NDArray[np.int32]:
    """The part of each label: labels are assigned in descending order of their audio, each to the part with the least
    audio so far."""
    lightest = [(0.0, 0, part) for part in range(num_parts)]  # its audio, its labels, its number
    chosen = np.empty(len(amounts), np.int32)
    for label in np.argsort(-amounts, kind="stable").tolist():
        amount, count, part = lightest[0]
        chosen[label] = part
        heapq.heapreplace(lightest, (amount + float(amounts[label]), count + 1, part))
    return chosen


def _domains_among_more_parts(
    labels: NDArray[np.int32], amounts: NDArray[np.float64], num_parts: int, generator: np.random.Generator
) -> NDArray[np.int32]:
    """The part of each utterance. Each domain has its own parts; every additional part goes to the domain with the most
    audio per part."""
    counts = np.bincount(labels)
    owned = np.ones(len(amounts), np.int64)
    for _ in range(num_parts - len(amounts)):
        owned[int(np.argmax(np.where(owned < counts, amounts / owned, -1.0)))] += 1
    chosen = np.empty(len(labels), np.int32)
    for domain, first in enumerate(np.cumsum(owned) - owned):
        members = np.flatnonzero(labels == domain)
        chosen[generator.permutation(members)] = first + np.arange(len(members)) % owned[domain]
    return chosen


def _dirichlet(
    labels: NDArray[np.int32], num_parts: int, alpha: float, generator: np.random.Generator
) -> NDArray[np.int32]:
    """Equal numbers of utterances for each part, whose labels have the proportions q ~ Dir(alpha p).

    p (`[L]`) are the labels' proportions among all utterances. As in Hsu et al. 2019 (arXiv 1909.06335, section 3),
    utterances are drawn without replacement: when a label is used up, q is restricted to the others, and redrawn if it
    is then 0.
    """
    counts = np.bincount(labels)
    left = counts.copy()
    proportions = counts / counts.sum()
    by_label = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    members = [generator.permutation(each) for each in by_label]
    chosen = np.empty(len(labels), np.int32)
    for part, size in enumerate(np.diff(np.arange(num_parts + 1) * len(labels) // num_parts).tolist()):
        wanted = generator.dirichlet(alpha * proportions)
        missing = size
        while missing:
            wanted = np.where(left > 0, wanted, 0.0)
            if wanted.sum() == 0:
                others = np.flatnonzero(left)
                wanted[others] = generator.dirichlet(alpha * proportions[others])
            taken = np.minimum(generator.multinomial(missing, wanted / wanted.sum()), left)
            for label in np.flatnonzero(taken).tolist():
                begin = counts[label] - left[label]
                chosen[members[label][begin : begin + taken[label]]] = part
            left -= taken
            missing -= int(taken.sum())
    return chosen


def describe_parts(parts: NDArray[np.int32], seconds: NDArray[np.float32], labels: NDArray[np.int32]) -> str:
    """A description of the range of audio and of labels per part; all arguments are `[N]`."""
    amounts = np.bincount(parts, weights=seconds) / 3600
    numbers = np.bincount(np.unique(np.stack([parts, labels]), axis=1)[0])
    return (
        f"{amounts.min():.2f} to {amounts.max():.2f} h, "
        f"with {numbers.min()} to {numbers.max()} of {len(np.unique(labels))}"
    )
