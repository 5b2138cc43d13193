"""Goodput, which is the share of the machines' time that was spent on gradients that the model includes, and the causes
of the lost time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from starling.launch.roster import Roster

Seconds = float


@dataclass(frozen=True)
class Goodput:
    """The use of the time of all machines of a run, in seconds on the engine's clock."""

    machines: Seconds
    """Time for which the learners' processes existed and were not stopped, summed over all of them."""
    useful: Seconds
    """Time spent on gradients and steps whose mini-batches count as done."""
    lost_work: Seconds
    """Time spent on gradients and steps whose mini-batches were computed again or dropped, or were lost with a learner
    before another learner had their effect."""
    waiting_for_peers: Seconds
    waiting_for_data: Seconds
    entering: Seconds
    """Time for which processes started, restarted, or agreed on a membership."""

    @property
    def ratio(self) -> float:
        """The goodput, between 0 and 1."""
        return self.useful / self.machines

    @property
    def losses(self) -> dict[str, float]:
        """The shares of the machines' time that were lost, by cause."""
        known = {name: seconds for name, seconds in asdict(self).items() if name not in ("machines", "useful")}
        rest = max(0.0, self.machines - self.useful - sum(known.values()))
        return {name: seconds / self.machines for name, seconds in {**known, "rest": rest}.items()}

    def __str__(self) -> str:
        words = {"entering": "starting and regrouping", "rest": "averaging, saving and the rest"}
        parts = (f"{words.get(name, name.replace('_', ' '))} {part:.1%}" for name, part in self.losses.items())
        return f"goodput {self.ratio:.1%} of {self.machines:.0f} s of machine time; {', '.join(parts)}".replace(
            "%", " %"
        )


def goodput_of(roster: Roster, num_done: Mapping[int, int] | None = None) -> Goodput | None:
    """Return the goodput of a run so far, or None before a learner has reported work.

    `num_done` contains, for each learner, the number of its mini-batches that count as done. Without it, all computed
    mini-batches count as done, unless they were lost with a learner.
    """
    useful = lost = peers = data = machines = entering = 0.0
    with roster.lock:
        for record in roster.learners.values():
            work, number = record.done, max(record.num_steps, record.done.batches)
            kept = number if num_done is None else num_done.get(record.learner_id, 0)
            done = min(1.0, max(0.0, kept - record.num_lost) / number) if number else 1.0
            useful, lost = useful + done * work.computing, lost + (1.0 - done) * work.computing
            peers, data = peers + work.waiting_for_peers, data + work.waiting_for_data
            machines += roster.life(record) - work.stopped - record.stopped
            entering += record.entering
    return Goodput(machines, useful, lost, peers, data, entering) if machines and useful + lost else None
