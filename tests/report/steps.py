"""Reports of steps with known sums."""

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
