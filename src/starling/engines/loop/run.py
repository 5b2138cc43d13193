"""The state of a loop's learner that outlives a membership, and how the learners of a membership begin."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from starling.checkpoint.state import counted
from starling.configuration import Config
from starling.engines.loop.replica import Consensus, LoopReplica
from starling.strategies import Strategy
from starling.training.job import Statistics

Result = TypeVar("Result")


@dataclass(frozen=True)
class Past:
    """A loop's progress before a membership."""

    has_state: bool
    num_done: int
    has_final: bool
    """Whether the learner has the final consensus."""
    has_joined: bool = False
    """Whether the learner joined after the run had begun."""
    counted: int = 0
    """Sum of the strategy's common counts."""


@dataclass(frozen=True)
class LoopPlan:
    """How the learners of a membership begin, by rank."""

    source: int | None
    """Rank whose state the `takers` copy, and whose strategy state and final consensus all learners copy; None if each
    learner has its own."""
    takers: tuple[int, ...]
    num_done: tuple[int, ...]
    """Number of steps of the run after which each learner continues."""


class LoopRun:
    """One loop's part in a run, across memberships: what it trains and how, and its progress."""

    def __init__(
        self, strategy: Strategy, options: Config, replica: LoopReplica, seed: int, most_not_finite: int
    ) -> None:
        self.strategy, self.options, self.replica, self.seed = strategy, options, replica, seed
        self.statistics = Statistics()
        self.has_state = False
        """Whether the loop has entered a membership; a joiner first copies the state of another learner."""
        self.has_joined = False
        """Whether the loop joined after the run had begun."""
        self.num_steps = 0
        """Number of steps of the run: a joiner begins with the number of the learner that it copies."""
        self.num_jumped = 0
        """Number of steps of the run that the loop skipped because others had made them when the membership changed."""
        self.gradient: Literal["none", "given", "alone", "used"] = "none"
        """State of the loop's gradient within `step`: given to the strategy; to be used without the others, which have
        already made this step; or used."""
        self.is_over = False
        """Whether the loop has made its last step."""
        self.final: Consensus | None = None
        self.consensus_bytes = 0
        self.most_not_finite = most_not_finite
        """Number of consecutive non-finite gradients that ends the run."""

    @property
    def steps_begun(self) -> int:
        """Number of steps of the run, including the one under way."""
        return self.num_steps + (self.gradient != "none")

    def with_steps(self, read: Callable[[], Result]) -> tuple[Result, float]:
        """The result of `read`, which another thread reads from the replica, and the number of steps in it; NaN while a
        step is under way, which may or may not be in it."""
        num_steps = self.num_steps
        found = read()
        is_between = self.steps_begun == num_steps == self.num_steps
        return found, num_steps if is_between else math.nan

    @property
    def past(self) -> Past:
        """The learner's progress, which the others need to know before the next membership."""
        num_done = self.num_steps + (self.gradient == "used")
        counts = counted(self.replica.strategy_state)
        return Past(self.has_state, num_done, self.final is not None, self.has_joined, counts)

    def continue_from(self, num_done: int, is_taker: bool) -> None:
        """Continue after `num_done` steps of the run. A taker has copied a state that includes its gradient."""
        if self.gradient == "given":
            behind = num_done > self.num_steps
            self.gradient = "used" if is_taker and self.has_state else "alone" if behind else "given"
        before, self.num_steps = self.num_steps, num_done - (self.gradient in ("used", "alone"))
        self.num_jumped += self.num_steps - before if self.has_state else 0
        self.has_state = True


def plan(pasts: Sequence[Past], has_one_model: bool, is_in_step: bool, keeps_state: bool) -> LoopPlan:
    """The plan of a membership, the same on all learners.

    Joiners copy the learner that has made the most steps. If all have the same model, learners that were interrupted
    one step before it copy it too. Learners that step together continue after the same step. If one of them has the
    final consensus, it is final for all.
    """
    finals = [rank for rank, past in enumerate(pasts) if past.has_final]
    with_state = [rank for rank, past in enumerate(pasts) if past.has_state]
    source = (
        finals[0]
        if finals
        else max(with_state, key=lambda rank: (pasts[rank].num_done, pasts[rank].counted, -rank), default=0)
    )
    newest = pasts[source].num_done
    takers = tuple(
        rank
        for rank, past in enumerate(pasts)
        if rank != source and (not past.has_state or (has_one_model and past.num_done < newest))
    )
    num_done = tuple(newest if is_in_step or rank in takers else past.num_done for rank, past in enumerate(pasts))
    return LoopPlan(source if takers or keeps_state or finals else None, takers, num_done)
