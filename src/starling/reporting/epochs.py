"""The statistics of learners: of one from the reports of its gradients, and of all in one line for each epoch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

from starling.launch.messages import EpochEnd, Snapshot
from starling.reporting.lines import agreement, duration, mean_staleness, share

if TYPE_CHECKING:
    from starling.training.job import EpochReport, StepReport

Seconds = float
SPENT = ("computing", "waiting_for_data", "waiting_for_peers")
"""The kinds of a learner's time."""
FAR = 255
"""The index of the last entry of `EpochEnd.staleness`, which counts this and any larger staleness."""
_MUCH = 5.0
"""A learner is named if its share of time spent computing is so many percentage points below that of all learners."""
_EPOCHS_BEHIND = 2
"""A learner that is so many epochs behind another is not waited for."""


@dataclass
class Stretch:
    """Consecutive mini-batches of one learner, or of several as if one had computed them. A loss that is not finite is
    excluded, and counted elsewhere. Times are seconds of training since the beginning of the run."""

    learner: int = -1
    begin: Seconds = 0.0
    end: Seconds = 0.0
    step: int = -1
    """Of the last mini-batch: its number among those of all learners, from 0."""
    batches: int = 0
    examples: int = 0
    frames: int = 0
    losses: float = 0.0
    """Losses times frames."""
    audio: Seconds = 0.0
    computing: Seconds = 0.0
    waiting_for_data: Seconds = 0.0
    waiting_for_peers: Seconds = 0.0

    def add(self, report: StepReport) -> None:
        """Add one gradient, but not what was spent on it."""
        self.learner, self.step, self.end = report.rank, report.ticket.step, 60.0 * report.minutes
        self.batches += 1
        self.examples += report.num_examples
        self.audio += report.audio_seconds
        if math.isfinite(report.loss):
            self.frames += max(1, report.num_frames)
            self.losses += report.loss * max(1, report.num_frames)

    @property
    def loss(self) -> float:
        """The mean loss per frame; NaN without frames."""
        return self.losses / self.frames if self.frames else math.nan

    @property
    def seconds(self) -> Seconds:
        """From its beginning to its end."""
        return self.end - self.begin

    def share(self, what: Literal["computing", "waiting_for_data", "waiting_for_peers"]) -> float | None:
        """In per cent of the recorded time."""
        recorded = self.computing + self.waiting_for_data + self.waiting_for_peers
        return 100.0 * float(getattr(self, what)) / recorded if recorded > 0.0 else None


_OF_STRETCHES = ("batches", "examples", "frames", "losses", "audio", *SPENT)


def merged(group: Sequence[Stretch]) -> Stretch:
    """Stretches as one, from the first beginning to the last end."""
    if len(group) == 1:
        return group[0]
    sums: dict[str, Any] = {name: sum(getattr(each, name) for each in group) for name in _OF_STRETCHES}
    begin, end = min((each.begin for each in group), default=0.0), max((each.end for each in group), default=0.0)
    step = max((each.step for each in group), default=-1)
    return Stretch(group[-1].learner if group else -1, begin, end, step, **sums)


class Meter:
    """Sums up one learner's steps between its snapshots."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._last: StepReport | None = None
        self._new, self._epoch = Stretch(), Stretch()

    def add(self, report: StepReport) -> None:
        """Count one gradient."""
        if self._last is None or self._last.ticket.epoch != report.ticket.epoch:
            self._epoch = Stretch()
        self._epoch.add(report)
        self._new.add(report)
        if self._last is None:  # the first batch has no known start
            self._new.audio, self._new.begin = 0.0, self._new.end
        self._last = report

    def take(self) -> Snapshot | None:
        """A snapshot of the gradients since the previous one; None if there was no finite loss."""
        new, last = self._new, self._last
        if last is None or not new.frames:
            return None
        snapshot = Snapshot(
            learner_id=last.rank,
            world=self._world,
            epoch=last.ticket.epoch,
            batch=last.ticket.index,
            num_batches=last.num_batches,
            step=last.ticket.step,
            loss=new.loss,
            num_frames=new.frames,
            running_loss=self._epoch.loss,
            learning_rate=last.learning_rate,
            audio_rate=new.audio / new.seconds if new.seconds > 0.0 else 0.0,
            fraction=last.fraction,
            minutes=last.minutes,
            num_examples=new.examples,
            **vars(last.spent),
        )
        self._new = Stretch(begin=new.end)
        return snapshot

    def end_epoch(self, report: EpochReport, step: int) -> EpochEnd:
        """The learner's statistics of an epoch that ended after `step` mini-batches of all learners."""
        averaging, staleness, last = report.averaging, report.averaging.staleness, self._last
        own = self._epoch if last is not None and last.ticket.epoch == report.epoch else Stretch()
        return EpochEnd(
            learner_id=report.rank,
            world=self._world,
            epoch=report.epoch,
            num_steps=report.num_steps,
            seconds=report.seconds,
            **vars(report.spent),
            step=step,
            num_rounds=averaging.rounds,
            bytes_sent=averaging.bytes_sent,
            staleness=_counts(staleness),
            mean_staleness=mean_staleness(staleness),
            largest_staleness=max(staleness, default=0),
            consensus_distance=report.consensus_distance,
            num_not_finite=report.num_not_finite,
            loss=own.loss if own.frames else None,
            num_frames=own.frames,
            learning_rate=last.learning_rate if last is not None else None,
        )


def _counts(staleness: Mapping[int, int]) -> tuple[int, ...]:
    """The number of gradients with a staleness of 0, 1, 2, … up to the largest one, at most `FAR`."""
    counts = [0] * (1 + min(FAR, max(staleness, default=-1)))
    for value, count in staleness.items():
        counts[min(value, FAR)] += count
    return tuple(counts)


@dataclass(frozen=True)
class Score:
    """The score of a model of this run on the validation set."""

    set_name: str
    wer: float
    """Word error rate in per cent."""
    epochs: int | None
    """Epochs for which it was trained; None unless it was saved at the end of an epoch."""
    steps: int
    """Mini-batches on which it was trained."""
    line: str
    """The summary in Kaldi's format."""

    @property
    def trained(self) -> str:
        """How long the model was trained, as text."""
        return f"epoch {self.epochs}" if self.epochs is not None else f"{self.steps} steps"

    @property
    def told(self) -> str:
        """The score as a separate line."""
        return f"after {self.trained}, {self.set_name}: {self.line}"


_SUMMED = ("num_steps", "seconds", *SPENT, "num_rounds", "bytes_sent", "num_not_finite", "num_frames")
_GREATEST = ("epoch", "step", "largest_staleness")
_IN_EVENT = (
    *("num_steps", "seconds", *SPENT, "loss", "num_rounds", "bytes_sent"),
    *("mean_staleness", "largest_staleness", "num_not_finite"),
)
"""What the event of an epoch tells of each learner."""


def together(ends: Sequence[EpochEnd]) -> EpochEnd:
    """The statistics of several learners or epochs as if they were those of one. Times are sums, too; the learning rate
    is the smallest one and thus the newest, as schedules decay."""
    sums: dict[str, Any] = {name: sum(getattr(each, name) for each in ends) for name in _SUMMED}
    last: dict[str, Any] = {name: max((getattr(each, name) for each in ends), default=0) for name in _GREATEST}
    staleness = tuple(sum(counts) for counts in zip_longest(*(each.staleness for each in ends), fillvalue=0))
    summed = sum(each.mean_staleness * sum(each.staleness) for each in ends)
    losses, frames = sum(each.loss * each.num_frames for each in ends if each.loss is not None), sums["num_frames"]
    return EpochEnd(
        learner_id=-1,
        world=len(ends),
        **sums,
        **last,
        staleness=staleness,
        mean_staleness=summed / max(1, sum(staleness)),
        consensus_distance=next(
            (each.consensus_distance for each in ends if each.consensus_distance is not None), None
        ),
        loss=losses / frames if frames else None,
        learning_rate=min((each.learning_rate for each in ends if each.learning_rate is not None), default=None),
    )


@dataclass(frozen=True)
class EpochSummary:
    """The combined statistics of an epoch."""

    ends: tuple[EpochEnd, ...]
    """The statistics of each learner, in order of `learner_id`."""
    missing: tuple[int, ...] = ()
    """Members that are too far behind and have not reported the epoch."""

    def line(self, score: Score | None = None) -> str:
        """The line to print, with `score` if it is new."""
        every, workers = together(self.ends), together(self._computing)
        begin = f"epoch {every.epoch + 1} ended after {duration(max(each.seconds for each in self.ends))}"
        if self.missing:
            begin += f" (without learner {', '.join(map(str, self.missing))})"
        parts = [f"loss {every.loss:.4f}"] if every.loss is not None else []
        if workers.learning_rate is not None:
            parts.append(f"lr {workers.learning_rate:.3g}")
        computing = share(workers, "computing")
        worst = min(self._computing, key=lambda each: share(each, "computing"))
        least = share(worst, "computing")
        named = f" (learner {worst.learner_id}: {least:.0f} %)" if computing - least >= _MUCH else ""
        parts += [
            f"computing {computing:.0f} %{named}",
            f"waiting {share(workers, 'waiting_for_data'):.0f} % for data",
            f"{share(workers, 'waiting_for_peers'):.0f} % for peers",
            *agreement(every),
        ]
        if score is not None:
            parts.append(f"{score.set_name} WER {score.wer:.2f} % after {score.trained}")
        return f"{begin}: {', '.join(parts)}"

    def fields(self) -> dict[str, Any]:
        """The fields of the event."""
        every = together(self.ends)
        return {
            "epoch": every.epoch + 1,
            "step": every.step,
            "steps_in_epoch": every.num_steps,
            "seconds": max(each.seconds for each in self.ends),
            "loss": every.loss,
            "learning_rate": together(self._computing).learning_rate,
            "staleness": every.staleness,
            "consensus_distance": every.consensus_distance,
            "learners": {
                str(each.learner_id): {name.removeprefix("num_"): getattr(each, name) for name in _IN_EVENT}
                for each in self.ends
            },
        }

    @property
    def _computing(self) -> tuple[EpochEnd, ...]:
        return tuple(each for each in self.ends if each.num_steps) or self.ends


class EpochCollector:
    """Collects the learners' statistics, which arrive at different times.

    An epoch is complete when every member has reported it or a later one. A learner that is `_EPOCHS_BEHIND` another
    one is not waited for; its statistics are then only in its own log.
    """

    def __init__(self) -> None:
        self._pending: dict[int, dict[int, EpochEnd]] = {}
        self._newest: dict[int, int] = {}
        self._told = -1

    def add(self, end: EpochEnd) -> None:
        """Add one learner's statistics."""
        self._newest[end.learner_id] = max(end.epoch, self._newest.get(end.learner_id, -1))
        if end.epoch > self._told:
            self._pending.setdefault(end.epoch, {})[end.learner_id] = end

    def complete(self, members: Collection[int] | None) -> Iterator[EpochSummary]:
        """Remove and yield the epochs that are complete, given the members of the present membership; None: the run is
        over, and all are."""
        all_at = min((self._newest.get(each, -1) for each in members or ()), default=-1)
        newest = max(self._newest.values(), default=-1)
        due = newest if members is None else max(all_at, newest - _EPOCHS_BEHIND)
        for epoch in sorted(each for each in self._pending if each <= due):
            self._told = max(self._told, epoch)
            ends = self._pending.pop(epoch)
            missing = tuple(sorted(each for each in members or () if self._newest.get(each, -1) < epoch))
            yield EpochSummary(tuple(ends[learner_id] for learner_id in sorted(ends)), missing)
