"""Log lines, in which epochs and batches are counted from 1."""

from collections.abc import Iterator, Mapping

from starling.launch.messages import EpochEnd, Snapshot

_BUSY = 90.0  # a learner that computes for at least this percentage of its time gets no advice
_LITTLE = 5.0  # waiting for less than this percentage of the time causes no advice
_ADVICE = {"data": "raise batches.num_workers if cores are idle", "peers": "another strategy may wait less"}
"""By what a learner waits for."""


def progress_line(snapshot: Snapshot) -> str:
    """A learner's progress: epoch, batch, loss and its number of frames, running loss, learning rate, speed, time
    left."""
    line = (
        f"({snapshot.learner_id}/{snapshot.world}) epoch {snapshot.epoch + 1}, "
        f"batch {snapshot.batch + 1}/{snapshot.num_batches}: loss {snapshot.loss:.4f} over {snapshot.num_frames} "
        f"frames, running {snapshot.running_loss:.4f}, lr {snapshot.learning_rate:.3g}"
    )
    if snapshot.audio_rate > 0.0:  # unknown for the first mini-batch
        line += f", {snapshot.audio_rate:.1f} s of audio per s"
    left = time_left(snapshot)
    return f"{line}, {left} left" if left else line


def epoch_line(end: EpochEnd) -> str:
    """A learner's statistics of an epoch: steps, time, the shares of computing and waiting, and those of asynchronous
    averaging."""
    steps = "step" if end.num_steps == 1 else "steps"
    begin = f"({end.learner_id}/{end.world}) epoch {end.epoch + 1} ended: {end.num_steps} {steps}"
    parts = [
        f"{begin} in {duration(end.seconds)}",
        f"{share(end, 'computing'):.1f} % computing",
        f"{share(end, 'waiting_for_data'):.1f} % waiting for data",
        f"{share(end, 'waiting_for_peers'):.1f} % waiting for peers",
        *agreement(end),
    ]
    if end.num_rounds or end.largest_staleness:
        parts.append(f"{end.bytes_sent / 1e6:,.1f} MB sent")
    return ", ".join(parts)


def agreement(end: EpochEnd) -> Iterator[str]:
    """Averaging rounds and staleness, unless the strategy is synchronous, and gradients that were left out."""
    if end.num_rounds and end.num_steps:
        yield f"{rounds_per_gradient(end):.2f} rounds per gradient"
    if end.num_rounds or end.largest_staleness:
        yield f"staleness {end.mean_staleness:.1f} (at most {end.largest_staleness})"
    if end.num_not_finite:
        yield f"{end.num_not_finite} gradients not finite and left out"


class Advice:
    """Advice for learners that wait for much of an epoch, each piece once."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def line(self, end: EpochEnd) -> str | None:
        """A piece of advice with its reason, if there is one that has not been given."""
        for_data, for_peers = share(end, "waiting_for_data"), share(end, "waiting_for_peers")
        what, part = ("data", for_data) if for_data > for_peers else ("peers", for_peers)
        has_no_need = end.num_steps == 0 or share(end, "computing") >= _BUSY or part < _LITTLE
        if has_no_need or what in self._given or (what == "peers" and end.world == 1):
            return None
        self._given.add(what)
        return f"learner {end.learner_id} waits for {what} {part:.0f} % of its time: {_ADVICE[what]}"


def share(end: EpochEnd, what: str) -> float:
    """`computing`, `waiting_for_data` or `waiting_for_peers` as a percentage of a learner's time in an epoch."""
    return 100.0 * float(getattr(end, what)) / end.seconds if end.seconds > 0.0 else 0.0


def rounds_per_gradient(end: EpochEnd) -> float:
    """Averaging rounds per gradient; 0 without gradients."""
    return end.num_rounds / end.num_steps if end.num_steps else 0.0


def time_left(snapshot: Snapshot) -> str:
    """The estimated time left; empty while it is unknown."""
    if snapshot.fraction <= 0.0 or snapshot.minutes <= 0.0:
        return ""
    return duration(60.0 * snapshot.minutes * (1.0 - snapshot.fraction) / snapshot.fraction)


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
    """The mean over gradients that are counted by staleness; 0 without any."""
    total = sum(counts.values())
    return sum(staleness * count for staleness, count in counts.items()) / total if total else 0.0
