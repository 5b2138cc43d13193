"""The budget that all learners share, the progress of a run, and the learning rate schedule.

A budget belongs to the run, not to a learner: if each learner had to make a fixed number of steps, the slowest one
would determine the duration of the run.
"""

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from starling.configuration import PublicConfig

LOWEST = 1e-3
"""Lowest factor during the warm-up. It is needed because with a budget in minutes, the fraction of the budget that the
first mini-batch uses is unknown."""


@dataclass(frozen=True)
class Progress:
    """The progress of a run: mini-batches claimed by all learners together, passes over the data, and minutes."""

    steps: int
    epochs: float
    minutes: float


class Budget(PublicConfig):
    """The limits of a run. The run ends when it reaches the first of them."""

    epochs: int | None = Field(default=None, ge=0)
    """Passes over the training set."""
    steps: int | None = Field(default=None, ge=0)
    """Mini-batches of all learners together; each is one gradient."""
    minutes: float | None = Field(default=None, ge=0)
    """Minutes of training, in real time or, in a simulation, in simulated time."""

    @model_validator(mode="after")
    def _is_limited(self) -> "Budget":
        if self.epochs is None and self.steps is None and self.minutes is None:
            raise ValueError("a budget needs at least one of epochs, steps, minutes")
        return self

    def fraction(self, progress: Progress) -> float:
        """Return the spent fraction of the budget, in [0, 1]. It is the largest of the fractions of the limits."""
        limits = ((self.epochs, progress.epochs), (self.steps, progress.steps), (self.minutes, progress.minutes))
        shares = [spent / limit if limit > 0 else 1.0 for limit, spent in limits if limit is not None]
        return min(1.0, max(shares))

    def is_spent(self, progress: Progress) -> bool:
        """Return whether any limit has been reached."""
        return self.fraction(progress) >= 1.0

    def num_batches(self, per_epoch: int) -> int | None:
        """Return the number of mini-batches after which the budget is spent at the latest, or None if the budget has no
        limit other than `minutes`."""
        limits = [self.steps, None if self.epochs is None else self.epochs * per_epoch]
        return min((each for each in limits if each is not None), default=None)

    def seconds(self, per_epoch: int, per_batch: float) -> float:
        """Return the duration, in seconds, of a run whose learners together need `per_batch` seconds for each
        mini-batch."""
        batches = self.num_batches(per_epoch)
        in_time = math.inf if self.minutes is None else 60.0 * self.minutes
        return in_time if batches is None else min(in_time, per_batch * batches)


class Schedule(PublicConfig):
    """The learning rate as a factor of its peak; a pure function of progress, and therefore equal on all learners.

    During the warm-up the factor rises linearly: over the fraction `warmup` of the budget, n mini-batches, from 1/n for
    the first to 1 for the n-th; or over `warmup_epochs` passes over the data, from `warmup_from`. Then it follows
    `decay`:

    - `constant`: it stays at 1;
    - `cosine`: it falls to `floor` at the end of the budget (Loshchilov & Hutter 2017);
    - `sqrt2-per-epoch`: it stays at 1 for `hold_epochs` epochs, and is then multiplied by 1/sqrt(2) at the start of
      every epoch (as for IBM's acoustic models: Zhang et al. 2019, arXiv 1904.04956). These warm up for 10 epochs,
      from the rate of a single learner, and train for 16: `warmup_epochs: 10`, `hold_epochs: 10`.
    """

    warmup: float = Field(default=0.0, ge=0.0, le=1.0)
    """The fraction of the budget over which the factor rises."""
    warmup_epochs: float | None = Field(default=None, gt=0.0)
    """Number of epochs over which the factor rises, in place of `warmup` and whatever the budget is."""
    warmup_from: float = Field(default=0.0, ge=0.0, le=1.0)
    """The factor that `warmup` and `warmup_epochs` rise from."""
    decay: Literal["constant", "cosine", "sqrt2-per-epoch"] = "cosine"
    """How the factor falls after the warm-up."""
    floor: float = Field(default=0.0, ge=0.0, le=1.0)
    """The factor at the end of `decay: cosine`."""
    hold_epochs: int = Field(default=10, ge=0)
    """Epochs before `decay: sqrt2-per-epoch` begins to lower the factor."""
    budget: Budget | None = None
    """The budget that the schedule follows; afterwards the factor stays at its final value. None uses the run's budget;
    if a resume changes that budget, the schedule is stretched over the new one."""

    @model_validator(mode="after")
    def _has_one_warmup(self) -> "Schedule":
        if self.warmup and self.warmup_epochs is not None:
            raise ValueError("warmup is a share of the budget, warmup_epochs a number of epochs: leave one of them out")
        if self.decay == "cosine" and self.warmup_epochs is not None:
            raise ValueError("decay: cosine begins after a share of the budget: give warmup in place of warmup_epochs")
        return self

    def at(self, progress: Progress, run: Budget, following: Progress | None = None) -> float:
        """Return the factor at `progress` of a run with the budget `run`. `following` is the progress after the
        mini-batches to which the factor applies; None means that it is unchanged."""
        budget, following = self.budget or run, following or progress
        fraction = budget.fraction(progress)
        if self.warmup_epochs is not None and progress.epochs < self.warmup_epochs:
            return self._risen(following.epochs / self.warmup_epochs)
        if fraction < self.warmup:
            return self._risen(budget.fraction(following) / self.warmup)
        if self.decay == "constant":
            return 1.0
        if self.decay == "cosine":
            remaining = 1.0 - self.warmup
            position = (fraction - self.warmup) / remaining if remaining > 0.0 else 0.0
            return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * position))
        return float(2.0 ** (-0.5 * max(0, math.floor(progress.epochs) - self.hold_epochs + 1)))

    def _risen(self, share: float) -> float:
        """Return the factor after the fraction `share` of the warm-up."""
        return min(1.0, max(LOWEST, self.warmup_from + (1.0 - self.warmup_from) * share))
