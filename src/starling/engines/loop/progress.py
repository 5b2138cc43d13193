"""What a loop's learner keeps from one membership to the next, and how the learners of a membership begin."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from starling.training.job import Statistics


@dataclass(frozen=True)
class Consensus:
    """The mean of all learners' contributions `[P + B]`, and the distance of their weights `[P]` from it,
    (1/L) sum_l |w_l - mean|^2."""

    mean: Tensor
    distance: float


@dataclass
class NotFinite:
    """Counts gradients that are not finite, which make no optimizer step."""

    most: int
    """How many in a row end the run."""
    num: int = 0
    in_a_row: int = 0

    def count(self) -> bool:
        """Count one; returns whether it ends the run."""
        self.in_a_row += 1
        self.num += 1
        return self.in_a_row == self.most


@dataclass
class LoopProgress:
    """One loop's progress, across memberships."""

    not_finite: NotFinite
    statistics: Statistics = field(default_factory=Statistics)
    has_state: bool = False
    """Whether it has entered a membership; a joiner first copies the state of another learner."""
    has_joined: bool = False
    """Whether it was not there when the run began."""
    num_steps: int = 0
    """Steps of the run: a joiner begins with the number of the learner that it copies."""
    num_jumped: int = 0
    """Steps of the run that it skipped because others had made them when the membership changed."""
    gradient: Literal["none", "given", "alone", "used"] = "none"
    """The loop's gradient within `step`: given to the strategy; to be used without the others, which have already made
    this step; or used."""
    is_over: bool = False
    """Whether the loop has made its last step."""
    final: Consensus | None = None
    resumed_at: float = 0.0
    """When the loop began to compute, on the monotonic clock."""
    consensus_bytes: int = 0

    @property
    def steps_begun(self) -> int:
        """Steps of the run, with the one under way."""
        return self.num_steps + (self.gradient != "none")

    @property
    def past(self) -> "Past":
        """What the others need to know before the next membership."""
        num_done = self.num_steps + (self.gradient == "used")
        return Past(self.has_state, num_done, self.final is not None, self.has_joined)

    def continue_from(self, num_done: int, is_taker: bool) -> None:
        """Continue after `num_done` steps of the run. A taker has copied a state that includes its gradient."""
        if self.gradient == "given":
            behind = num_done > self.num_steps
            self.gradient = "used" if is_taker and self.has_state else "alone" if behind else "given"
        before, self.num_steps = self.num_steps, num_done - (self.gradient in ("used", "alone"))
        self.num_jumped += self.num_steps - before if self.has_state else 0
        self.has_state = True


@dataclass(frozen=True)
class Past:
    """A loop's progress before a membership."""

    has_state: bool
    num_done: int
    has_final: bool
    """Whether it has the final consensus."""
    has_joined: bool = False
    """Whether it was not there when the run began."""


@dataclass(frozen=True)
class LoopPlan:
    """How the learners of a membership begin, by rank."""

    source: int | None
    """The rank whose state the `takers` copy, and whose strategy state and final consensus all do; None: each has its
    own."""
    takers: tuple[int, ...]
    num_done: tuple[int, ...]
    """The steps of the run after which each continues."""


def plan(pasts: Sequence[Past], has_one_model: bool, is_in_step: bool, keeps_state: bool) -> LoopPlan:
    """The plan of a membership, the same on all learners.

    Joiners copy the learner that has made most steps. If all have the same model, so do those that were interrupted one
    step before it. Learners that step together continue after the same step. If one of them has the final consensus,
    it is final for all.
    """
    finals = [rank for rank, past in enumerate(pasts) if past.has_final]
    with_state = [rank for rank, past in enumerate(pasts) if past.has_state]
    source = finals[0] if finals else max(with_state, key=lambda rank: (pasts[rank].num_done, -rank), default=0)
    newest = pasts[source].num_done
    takers = tuple(
        rank
        for rank, past in enumerate(pasts)
        if rank != source and (not past.has_state or (has_one_model and past.num_done < newest))
    )
    num_done = tuple(newest if is_in_step or rank in takers else past.num_done for rank, past in enumerate(pasts))
    return LoopPlan(source if takers or keeps_state or finals else None, takers, num_done)
