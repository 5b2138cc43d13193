"""Reports of steps with known sums."""

from typing import Any

from starling.launch.messages import Progress, Stretch
from starling.reporting.epochs import Tally
from starling.training.job import StepReport
from starling.workload import Ticket


def step(number: int, epoch: int = 0, rank: int = 0, loss: float = 1.0, frames: int = 100) -> StepReport:
    """Step `number` of `rank`, a tenth of a minute after the one before, with 3 s of audio, of 20 in the budget."""
    return StepReport(
        rank=rank,
        ticket=Ticket(epoch, number % 10, number),
        num_batches=10,
        fraction=number / 20,
        minutes=0.1 * number,
        loss=loss,
        learning_rate=0.5,
        num_examples=2,
        num_frames=frames,
        audio_seconds=3.0,
    )


def progress_of(*reports: StepReport) -> Progress:
    """What a learner tells after some steps."""
    tally = Tally()
    for report in reports:
        tally.add(report)
    return tally.progress(Stretch())


def ended(
    learner_id: int,
    epoch: int,
    batches: int,
    seconds: float,
    *spent: float,
    step: int = 0,
    learning_rate: float | None = None,
    consensus_distance: float | None = None,
    **of_stretch: Any,
) -> Progress:
    """The end of an epoch that took so many `seconds`, `spent` computing, waiting for data and for peers."""
    times: dict[str, Any] = dict(zip(("computing", "waiting_for_data", "waiting_for_peers"), spent, strict=True))
    so_far = Stretch(learner_id, seconds, seconds, batches=batches, **times, **of_stretch)
    return Progress(
        learner_id,
        Stretch(learner_id),
        so_far,
        epoch,
        learning_rate=learning_rate,
        ended_at=step,
        consensus_distance=consensus_distance,
    )
