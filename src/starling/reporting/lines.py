"""Log lines. They count epochs and batches from 1."""

from collections.abc import Iterator, Mapping

from starling.launch.messages import Progress, Stretch

_BUSY = 90.0  # a learner that computes for at least this percentage of its time gets no advice
_LITTLE = 5.0  # waiting for less than this percentage of the time causes no advice
_ADVICE = {"data": "raise batches.num_workers if cores are idle", "peers": "another strategy may wait less"}
"""Advice about a learner's waits, by what it waits for."""


def progress_line(progress: Progress) -> str:
    """A line with a learner's progress: epoch, batch, loss and its number of frames, running loss, learning rate,
    speed, time left."""
    new = progress.new
    line = (
        f"epoch {progress.epoch + 1}, batch {progress.batch + 1}/{progress.num_batches}: loss {new.loss:.4f} over "
        f"{new.frames} frames, running {progress.so_far.loss:.4f}, lr {progress.learning_rate:.3g}"
    )
    if new.audio_rate > 0.0:  # unknown for the first mini-batch
        line += f", {new.audio_rate:.1f} s of audio per s"
    left = time_left(progress)
    return f"{line}, {left} left" if left else line


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
    """Advice for those of `world` learners that wait for a large part of an epoch, each piece once."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._given: set[str] = set()

    def line(self, progress: Progress) -> str | None:
        """A piece of advice with its reason, if there is one that has not been given."""
        work = progress.so_far
        for_data, for_peers = share(work, "waiting_for_data"), share(work, "waiting_for_peers")
        what, part = ("data", for_data) if for_data > for_peers else ("peers", for_peers)
        has_no_need = work.batches == 0 or share(work, "computing") >= _BUSY or part < _LITTLE
        if has_no_need or what in self._given or (what == "peers" and self._world == 1):
            return None
        self._given.add(what)
        return f"learner {progress.learner_id} waits for {what} {part:.0f} % of its time: {_ADVICE[what]}"


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
