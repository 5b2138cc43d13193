"""Which utterances form which mini-batch of an epoch: a pure function, so that every process agrees."""

import heapq
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from starling.configuration import Config
from starling.errors import DataError

MiniBatch = list[np.ndarray]  # its micro-batches, each an array of utterance indices

_MICRO_BATCHES_PER_BUCKET = 4  # fewer, and small sets would be cut into needlessly small batches


class BatchConfig(Config):
    """How utterances are grouped; the `batches:` section of a recipe."""

    max_duration: float = Field(
        default=60.0, gt=0, description="seconds of audio in a micro-batch, padding included: what is in memory at once"
    )
    accumulate: int = Field(default=1, ge=1, description="micro-batches whose gradients form one mini-batch")
    num_buckets: int = Field(default=20, ge=1, description="groups of similar duration that batches are drawn from")
    num_workers: int = Field(
        default=0,
        ge=0,
        description="processes per learner that load batches ahead; 0: the learner loads, best when it has one core",
    )


@dataclass
class _Bucket:
    """Utterances of similar duration, and the number of micro-batches they are dealt to."""

    members: np.ndarray
    longest: float
    groups: int

    def duration_of_a_group(self) -> float:
        return self.longest * len(self.members) / self.groups


def plan_epoch(
    durations: np.ndarray, config: BatchConfig, seed: int, epoch: int, round_size: int = 1
) -> list[MiniBatch]:
    """The mini-batches of one epoch, in order; a pure function of its arguments.

    Every index of `durations` (`[N]`, seconds) is in exactly one micro-batch. The number of mini-batches is a
    multiple of `round_size`: mini-batches `k * round_size ... (k + 1) * round_size - 1` form a round and have
    similar durations; rounds come in random order. Each mini-batch has `accumulate` micro-batches (fewer when
    the set has less than `accumulate * round_size` utterances). A micro-batch, counted with its padding, stays
    within `max_duration` unless it is one longer utterance, or the set is so small that the multiple can only
    be reached by merging.

    Raises DataError when there are fewer utterances than `round_size`.
    """
    count = len(durations)
    if count < round_size or count == 0:
        raise DataError(
            f"{count} utterances cannot be shared by {round_size} learners that step together: "
            f"use at most {count} learners or a larger training set"
        )
    generator = np.random.default_rng([seed, epoch])
    accumulate = min(config.accumulate, count // round_size)
    buckets = _fill_buckets(np.asarray(durations, dtype=np.float64), config)
    buckets = _round_up(buckets, accumulate * round_size, count)
    micro_batches: list[np.ndarray] = []
    for bucket in buckets:
        micro_batches += np.array_split(generator.permutation(bucket.members), bucket.groups)
    minis = [micro_batches[k : k + accumulate] for k in range(0, len(micro_batches), accumulate)]
    plan: list[MiniBatch] = []
    for number in generator.permutation(len(minis) // round_size):
        plan += [minis[number * round_size + place] for place in generator.permutation(round_size)]
    return plan


def _fill_buckets(durations: np.ndarray, config: BatchConfig) -> list[_Bucket]:
    """Buckets of about equal total duration, shortest first, each with as many groups as it needs."""
    order = np.argsort(durations, kind="stable")
    ends = np.cumsum(durations[order])
    total = float(ends[-1])
    wanted = int(total / (_MICRO_BATCHES_PER_BUCKET * config.max_duration))
    num_buckets = max(1, min(config.num_buckets, wanted))
    numbers = np.minimum((ends / total * num_buckets).astype(np.int64), num_buckets - 1) if total else ends.astype(int)
    buckets = []
    for members in np.split(order, np.flatnonzero(np.diff(numbers)) + 1):
        longest = float(durations[members[-1]])
        size = max(1, int(config.max_duration / longest)) if longest else len(members)
        buckets.append(_Bucket(members, longest, groups=-(-len(members) // size)))
    return buckets


def _round_up(buckets: list[_Bucket], multiple: int, count: int) -> list[_Bucket]:
    """Bring the number of groups to a multiple: split the longest ones; where that is impossible, merge."""
    groups = sum(bucket.groups for bucket in buckets)
    wanted = -(-groups // multiple) * multiple
    if wanted > count:
        everything = np.concatenate([bucket.members for bucket in buckets])
        return [_Bucket(everything, buckets[-1].longest, groups=count // multiple * multiple)]
    splittable = [
        (-bucket.duration_of_a_group(), number)
        for number, bucket in enumerate(buckets)
        if bucket.groups < len(bucket.members)
    ]
    heapq.heapify(splittable)
    for _ in range(wanted - groups):
        _, number = heapq.heappop(splittable)
        bucket = buckets[number]
        bucket.groups += 1
        if bucket.groups < len(bucket.members):
            heapq.heappush(splittable, (-bucket.duration_of_a_group(), number))
    return buckets
