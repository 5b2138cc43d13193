"""The statistics of learners. Those of one learner come from the reports of its gradients; those of all learners are
combined in one line for each epoch. Lines count epochs and batches from 1."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from starling.launch.messages import Progress, Stretch
from starling.launch.roster import Roster

if TYPE_CHECKING:
    from starling.training.job import EpochReport, Spent, StepReport


Seconds = float
SPENT = ("computing", "waiting_for_data", "waiting_for_peers")
"""Kinds of a learner's time."""
FAR = 255
"""Index of the last count of `by_staleness`, which includes any larger staleness."""
_MUCH = 5.0
"""Percentage points by which a learner's share of time spent computing must be below that of all learners for the
learner to be named."""
_EPOCHS_BEHIND = 2
"""Number of epochs by which a learner may be behind another learner before reports no longer wait for it."""


def merged(group: Iterable[Stretch]) -> Stretch:
    """Merge several stretches into one."""
    every = Stretch()
    for each in group:
        every.add(each)
    return every


class Tally:
    """Adds up the work of one learner. Readers keep copies of `all`, and report the work that was added later."""

    def __init__(self) -> None:
        self.all = self._epoch_began = Stretch()
        self.ended: EpochReport | None = None
        """Epoch that has ended since the last gradient, if any."""
        self._num_done = 0  # number of mini-batches of all learners at the end of that epoch
        self._last: StepReport | None = None
        self._booked: Mapping[str, Seconds] = {}  # the part of `all` that was spent in the epoch under way

    def add(self, report: StepReport) -> None:
        """Count one gradient, and the time since the previous gradient."""
        end, last, self.ended = 60.0 * report.minutes, self._last, None
        if last is None:  # the time at which the first gradient began is unknown
            self.all.learner, self.all.end = report.rank, end
        else:
            self.all.audio += report.audio_seconds
        if last is None or last.ticket.epoch != report.ticket.epoch:
            self._epoch_began = replace(self.all)
        self._book(report.spent)
        self.all.seconds += end - self.all.end
        self.all.end, self.all.step = end, report.ticket.step
        self.all.batches += 1
        self.all.examples += report.num_examples
        if math.isfinite(report.loss):
            self.all.frames += max(1, report.num_frames)
            self.all.losses += report.loss * max(1, report.num_frames)
        self._last = report

    def end_epoch(self, report: EpochReport, num_done: int) -> None:
        """Count the rest of an epoch. By the end of the epoch, all learners have done `num_done` mini-batches."""
        self._book(report.spent)
        self.all.add(Stretch(report.rank, **_agreed(report)))
        self.ended, self._num_done, self._booked = report, num_done, {}

    def progress(self, before: Stretch) -> Progress:
        """Return the progress since `all` was `before`, and the progress in the epoch."""
        progress = Progress(self.all.learner, self.all.since(before), self.all.since(self._epoch_began))
        if (last := self._last) is not None:
            progress = replace(
                progress,
                epoch=last.ticket.epoch,
                batch=last.ticket.index,
                num_batches=last.num_batches,
                learning_rate=last.learning_rate,
                fraction=last.fraction,
            )
        if (report := self.ended) is None:
            return progress
        num_here = self._num_done - (progress.new.step - progress.batch)  # of the epoch of the last gradient
        is_cut = report.is_last and progress.epoch == report.epoch and num_here < progress.num_batches
        computed = progress.so_far if progress.epoch == report.epoch else Stretch(report.rank)
        spent = {"seconds": report.seconds, **vars(report.spent)}
        return replace(
            progress,
            epoch=report.epoch,
            so_far=replace(computed, batches=report.num_steps, **spent, **_agreed(report)),
            ended_at=self._num_done,
            left_after=num_here if is_cut else None,
            consensus_distance=report.consensus_distance,
        )

    def _book(self, spent: Spent) -> None:
        """Add the times spent in the epoch since the last call."""
        for name, seconds in vars(spent).items():
            more = max(0.0, seconds - self._booked.get(name, 0.0))
            setattr(self.all, name, getattr(self.all, name) + more)
        self._booked = vars(spent)


def _agreed(report: EpochReport) -> dict[str, Any]:
    """Return the fields that are counted when an epoch ends."""
    return {**vars(report.averaging), "num_not_finite": report.num_not_finite}


@dataclass(frozen=True)
class Score:
    """The score of a model of this run on the validation set."""

    set_name: str
    wer: float
    """Word error rate in per cent."""
    cer: float
    """Character error rate in per cent."""
    epochs: int | None
    """Number of epochs for which the model was trained; None unless it was saved at the end of an epoch."""
    steps: int
    """Number of mini-batches on which the model was trained."""
    line: str
    """Both rates in Kaldi's format."""
    verdict: str = ""
    """Reason why the model does not work, and the remedy. The text is empty if the model works, or if it is too early
    to tell."""

    @property
    def trained(self) -> str:
        """The amount of training of the model as text."""
        return f"epoch {self.epochs}" if self.epochs is not None else f"{self.steps} steps"

    @property
    def told(self) -> str:
        """The score as a separate line."""
        return f"after {self.trained}, {self.set_name}: {self.line}"


@dataclass(frozen=True)
class EpochSummary:
    """The combined statistics of an epoch."""

    ends: tuple[Progress, ...]
    """Ends of the epoch that the learners have reported, in order of `learner_id`."""
    missing: tuple[int, ...] = ()
    """Members that are too far behind and have not reported the epoch."""

    @property
    def epoch(self) -> int:
        """The epoch's number, from 0."""
        return self.ends[0].epoch

    def line(self, score: Score | None = None) -> str:
        """The line to print, with `score` if it is new."""
        workers = [each.so_far for each in self._workers]
        cut = next((each for each in self.ends if each.left_after is not None), None)
        how = "ended after"
        if cut is not None:  # tickets of earlier epochs may be outstanding, too
            done = max(cut.left_after or 0, sum(each.so_far.batches for each in self.ends))
            how = f"was left after {done} of {cut.num_batches} mini-batches and"
        begin = f"epoch {self.epoch + 1} {how} {duration(self._seconds)}"
        if self.missing:
            begin += f" (without learner {', '.join(map(str, self.missing))})"
        every, work = merged(each.so_far for each in self.ends), merged(workers)
        parts = [f"loss {every.loss:.4f}"] if every.frames else []
        if (rate := self._learning_rate) is not None:
            parts.append(f"lr {rate:.3g}")
        computing = share(work, "computing")
        worst = min(workers, key=lambda each: share(each, "computing"))
        least = share(worst, "computing")
        named = f" (learner {worst.learner}: {least:.0f} %)" if computing - least >= _MUCH else ""
        parts += [
            f"computing {computing:.0f} %{named}",
            f"waiting {share(work, 'waiting_for_data'):.0f} % for data",
            f"{share(work, 'waiting_for_peers'):.0f} % for peers",
            *agreement(every),
        ]
        if score is not None:
            parts.append(f"{score.set_name} WER {score.wer:.2f} %, CER {score.cer:.2f} % after {score.trained}")
        return f"{begin}: {', '.join(parts)}"

    def fields(self) -> dict[str, Any]:
        """The fields of the epoch's event."""
        work = merged(each.so_far for each in self.ends)
        distances = (each.consensus_distance for each in self.ends if each.consensus_distance is not None)
        return {
            "epoch": self.epoch + 1,
            "step": max(each.ended_at or 0 for each in self.ends),
            "steps_in_epoch": work.batches,
            "seconds": self._seconds,
            "loss": work.loss,
            "learning_rate": self._learning_rate,
            "staleness": by_staleness(work.staleness),
            "consensus_distance": next(distances, None),
            "learners": {str(each.learner_id): _fields_of(each.so_far) for each in self.ends},
        }

    @property
    def _workers(self) -> Sequence[Progress]:
        """The learners that computed anything; all of them if none did."""
        return [each for each in self.ends if each.so_far.batches] or self.ends

    @property
    def _seconds(self) -> Seconds:
        return max(each.so_far.seconds for each in self.ends)

    @property
    def _learning_rate(self) -> float | None:
        """The smallest learning rate, which is the newest one, as schedules decay."""
        return min((each.learning_rate for each in self._workers if each.learning_rate is not None), default=None)


def _fields_of(work: Stretch) -> dict[str, Any]:
    """The fields of one learner in the event of an epoch."""
    return {
        "steps": work.batches,
        "seconds": work.seconds,
        **{name: getattr(work, name) for name in SPENT},
        "loss": work.loss,
        "rounds": work.rounds,
        "bytes_sent": work.bytes_sent,
        "mean_staleness": mean_staleness(work.staleness),
        "largest_staleness": max(work.staleness, default=0),
        "not_finite": work.num_not_finite,
    }


def by_staleness(counts: Mapping[int, int]) -> list[int]:
    """Return the number of gradients with a staleness of 0, 1, 2, … up to the largest staleness, at most `FAR`."""
    by_number = [0] * (1 + min(FAR, max(counts, default=-1)))
    for value, count in counts.items():
        by_number[min(value, FAR)] += count
    return by_number


def ended_epochs(roster: Roster, after: int, is_over: bool = False) -> Iterator[EpochSummary]:
    """Yield the epochs after epoch `after` that have ended, in order.

    An epoch has ended when every member has reported it or a later epoch. A learner that is `_EPOCHS_BEHIND` epochs
    behind another learner is ignored; its statistics are then only in its own log. If the run `is_over`, no learner has
    to report.
    """
    last = {learner: each.epochs[-1].epoch for learner, each in roster.learners.items() if each.epochs}
    newest = max(last.values(), default=-1)
    by_all = min((last.get(member, -1) for member in roster.members), default=-1)
    for epoch in range(after + 1, 1 + (newest if is_over else max(by_all, newest - _EPOCHS_BEHIND))):
        found = (end for _, each in sorted(roster.learners.items()) for end in each.epochs if end.epoch == epoch)
        ends = {end.learner_id: end for end in found}
        missing = [] if is_over else sorted(member for member in roster.members if last.get(member, -1) < epoch)
        if ends:
            yield EpochSummary(tuple(ends.values()), tuple(missing))


_BUSY = 90.0  # a learner that computes for at least this percentage of its time gets no advice
_LITTLE = 10.0  # waiting for less than this percentage of the time causes no advice
_ADVICE = {
    "data": "raise batches.num_workers if cores are idle",
    "peers": "another strategy, such as adpsgd or local-sgd, may wait less",
}
"""Advice about a learner's waits, by what it waits for."""


def progress_line(progress: Progress) -> str:
    """A line with a learner's progress: epoch, batch, loss and its number of frames, running loss, learning rate,
    speed, time left."""
    new = progress.new
    line = (
        f"epoch {progress.epoch + 1}, batch {progress.batch + 1}/{progress.num_batches}: loss {new.loss:.4f} over "
        f"{new.frames} frames, running {running_loss(progress):.4f}, lr {progress.learning_rate:.3g}"
    )
    if new.audio_rate > 0.0:  # unknown for the first mini-batch
        line += f", {new.audio_rate:.1f} s of audio per s"
    left = time_left(progress)
    return f"{line}, {left} left" if left else line


def running_loss(progress: Progress) -> float:
    """The mean loss of the epoch so far; the newest loss if the epoch has only begun."""
    return progress.so_far.loss if progress.so_far.frames else progress.new.loss


def epoch_line(progress: Progress) -> str:
    """A line with a learner's statistics of an epoch: steps, time, the shares of computing and waiting, and the figures
    of asynchronous averaging."""
    work = progress.so_far
    steps = "step" if work.batches == 1 else "steps"
    parts = [
        f"epoch {progress.epoch + 1} ended: {work.batches} {steps} in {duration(work.seconds)}",
        f"{share(work, 'computing'):.1f} % computing",
        f"{share(work, 'waiting_for_data'):.1f} % waiting for data",
        f"{share(work, 'waiting_for_peers'):.1f} % waiting for peers",
        *agreement(work),
    ]
    if work.rounds or any(work.staleness):
        parts.append(f"{work.bytes_sent / 1e6:,.1f} MB sent")
    return ", ".join(parts)


def agreement(work: Stretch) -> Iterator[str]:
    """Texts about averaging rounds and staleness, unless the strategy is synchronous, and about gradients that were
    left out."""
    if work.rounds and work.batches:
        yield f"{work.rounds / work.batches:.2f} rounds per gradient"
    if work.rounds or any(work.staleness):
        yield f"staleness {mean_staleness(work.staleness):.1f} (at most {max(work.staleness, default=0)})"
    if work.num_not_finite:
        yield f"{work.num_not_finite} gradients not finite and left out"


class Advice:
    """Advice for learners, out of `world` learners, that wait for a large part of an epoch. Each piece of advice is
    given once."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._given: set[str] = set()

    def line(self, progress: Progress) -> str | None:
        """Return a piece of advice that has not been given, with its reason, or None if there is none."""
        work = progress.so_far
        for_data, for_peers = share(work, "waiting_for_data"), share(work, "waiting_for_peers")
        what, part = ("data", for_data) if for_data > for_peers else ("peers", for_peers)
        has_no_need = work.batches == 0 or share(work, "computing") >= _BUSY or part < _LITTLE
        is_asynchronous = work.rounds > 0 or any(work.staleness)
        if has_no_need or what in self._given or (what == "peers" and (self._world == 1 or is_asynchronous)):
            return None
        self._given.add(what)
        learner, epoch = progress.learner_id, progress.epoch + 1
        return f"in epoch {epoch}, learner {learner} waited for {what} {part:.0f} % of its time: {_ADVICE[what]}"


def share(work: Stretch, what: str) -> float:
    """`computing`, `waiting_for_data` or `waiting_for_peers` as a percentage of the time that was spent."""
    return 100.0 * float(getattr(work, what)) / work.seconds if work.seconds > 0.0 else 0.0


def time_left(progress: Progress) -> str:
    """The estimated time left; empty while it is unknown."""
    if progress.fraction <= 0.0 or progress.new.end <= 0.0:
        return ""
    return duration(progress.new.end * (1.0 - progress.fraction) / progress.fraction)


def duration(seconds: float) -> str:
    """A duration as text: 4.2 s, 3 min 05 s, 2 h 07 min."""
    if seconds < 60.0:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def mean_staleness(counts: Mapping[int, int]) -> float:
    """The mean over gradients that are counted by staleness; 0 if there are none."""
    total = sum(counts.values())
    return sum(staleness * count for staleness, count in counts.items()) / total if total else 0.0
