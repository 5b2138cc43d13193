"""A learner's reports reach the launcher unchanged, but not more often than people can read."""

import io
from collections import Counter
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from starling.checkpoint.reader import load
from starling.checkpoint.writer import CheckpointWriter
from starling.errors import CheckpointError, PeerLost
from starling.experiment.observers import Keep, Log, Paced, Recorder, Saver
from starling.launch.messages import (
    LearnerMessage,
    ModelSaved,
    Progress,
    Saved,
    decode_from_learner,
    encode,
)
from starling.launch.roster import Roster
from starling.reporting.epochs import FAR
from starling.reporting.progress import Display
from starling.training.job import Averaging, EpochReport, Spent
from starling.workload import Ticket
from tests.checkpoint.test_checkpoints import state, write_model, writer
from tests.report.steps import ended, step
from tests.report.test_progress import NOWHERE


class Kept:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[Progress] = []

    def __call__(self, message: Progress) -> None:
        self.heard.append(message)


def recorder_of(folder: Path, *readers: Paced) -> Recorder:
    made = Recorder(folder)
    made.readers = readers
    return made


def shown(message: LearnerMessage) -> str:
    """What the launcher prints of a message."""
    text = io.StringIO()
    with Display("demo", Roster(2), Console(file=text, force_terminal=False, width=200), NOWHERE) as display:
        display.hear(decode_from_learner(encode(message), 0))
    return text.getvalue()


def test_no_step_is_lost_between_two_reports(tmp_path: Path) -> None:
    """At most one every two seconds; the frames of all steps are counted, the last ones at the epoch's end."""
    now = 0.0
    kept = Kept()
    observer = recorder_of(tmp_path, Paced(kept, 2.0, clock=lambda: now))
    for number in range(10):
        now = 0.5 * number
        observer.on_step(step(number, frames=100))
    observer.on_epoch(EpochReport(0, 0, 10, 5.0, Spent(4.0, 0.5, 0.5)), state(0, 2, Ticket(1, 0, 10)))
    assert [each.ended_at is not None for each in kept.heard] == [False, False, False, True]
    assert kept.heard[-1].so_far.batches == 10
    assert [each.new.frames for each in kept.heard] == [100, 400, 400, 100]


def test_messages_arrive_as_json_and_are_shown(tmp_path: Path) -> None:
    """The other end of the line shows an epoch of all learners as one line; a learner's own log has its own."""
    sent: list[bytes] = []
    here, there = io.StringIO(), io.StringIO()
    for listener in (Log(here, 2), lambda message: sent.append(encode(message))):
        for rank in range(2):
            observer = recorder_of(tmp_path, Paced(listener, 0.0))
            observer.on_step(step(3, rank=rank))
            averaging = Averaging(rounds=6, bytes_sent=3_000_000, staleness=Counter({0: 1, 2: 3}))
            report = EpochReport(rank, 0, 4, 5.0, Spent(4.7, 0.1, 0.2), averaging)
            observer.on_epoch(report, state(rank, 2, Ticket(1, 0, 10)))
    console = Console(file=there, force_terminal=False, width=200)
    roster = Roster(2)
    with Display("demo", roster, console, NOWHERE) as display:
        for message in (decode_from_learner(line, 0) for line in sent):
            assert isinstance(message, Progress)
            roster.hear(message.learner_id, message)
            display.hear(message)
    assert there.getvalue() == (
        "epoch 1 ended after 5.0 s: loss 1.0000, lr 0.5, computing 94 %, waiting 2 % for data, 4 % for peers, "
        "1.50 rounds per gradient, staleness 1.5 (at most 2)\n"
    )
    assert "1.50 rounds per gradient, staleness 1.5 (at most 2), 3.0 MB sent" in here.getvalue().splitlines()[-1]


def test_a_log_gives_each_piece_of_advice_once() -> None:
    """Advice is not repeated at the end of each epoch."""
    text = io.StringIO()
    log = Log(text, 2)
    for epoch in range(3):
        log(ended(1, epoch, 4, 10.0, 5.0, 4.0, 1.0))
    lines = text.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "(1/2) epoch 1 ended",
        "in epoch 1, learner 1 waited for data 40 % of its time",
        "(1/2) epoch 2 ended",
        "(1/2) epoch 3 ended",
    ]


def test_the_end_of_an_epoch_arrives_as_it_was(tmp_path: Path) -> None:
    """Through JSON, the histogram and the distance included."""
    kept, sent = Kept(), list[bytes]()
    averaging = Averaging(rounds=6, bytes_sent=3, staleness=Counter({0: 1, 2: 3, 10 * FAR: 1}))
    report = EpochReport(0, 0, 5, 5.0, Spent(4.0, 0.5, 0.5), averaging, 0.25)
    readers = [Paced(listener, 0.0) for listener in (kept, lambda message: sent.append(encode(message)))]
    recorder_of(tmp_path, *readers).on_epoch(report, state(0, 2, Ticket(1, 0, 10)))
    (progress,) = kept.heard
    assert decode_from_learner(sent[0], 0) == progress
    assert (progress.ended_at, progress.so_far.rounds, progress.consensus_distance) == (10, 6, 0.25)
    assert progress.new.staleness == averaging.staleness


def test_a_checkpoint_is_shown_with_the_consensus_distance() -> None:
    """The distance has three digits; it is left out if it is unknown."""
    assert shown(Saved("exp/demo/checkpoints/step-00000010", "barrier", 0.0123456)) == (
        "saved exp/demo/checkpoints/step-00000010, consensus distance 0.0123\n"
    )
    assert shown(Saved("step-00000010", "barrier")) == "saved step-00000010\n"


def test_the_learner_that_completes_a_checkpoint_reports_and_draws_how_far_learners_are_apart(tmp_path: Path) -> None:
    """Only this learner does, and the points of different learners form one curve by the step of the run."""
    told: list[tuple[int, Saved]] = []
    together = writer(tmp_path)
    savers = [Saver(together, lambda message, rank=rank: told.append((rank, message)), tmp_path) for rank in range(2)]
    for epoch, order in ((1, (0, 1)), (2, (1, 0))):
        for rank in order:
            end = state(rank, 2, Ticket(epoch, 0, 8 * epoch), [4.0 * rank * epoch, 1.0, 2.0])
            savers[rank].on_epoch(EpochReport(rank, epoch - 1, 4, 5.0, Spent()), end)
            savers[rank].close()
    assert [rank for rank, _ in told] == [1, 0]
    distances = [message.consensus_distance for _, message in told]
    assert [message.folder for _, message in told] == [
        str(tmp_path / "checkpoints" / name) for name in ("step-00000008", "step-00000016")
    ]
    assert distances == [load(Path(message.folder)).manifest.consensus_distance for _, message in told]
    assert distances[1] > distances[0] > 0.0
    drawn = [
        (each.step, each.value)
        for file in (tmp_path / "consensus").iterdir()
        for each in EventAccumulator(str(file)).Reload().Scalars("consensus/distance")
    ]
    assert sorted(drawn) == [(8, pytest.approx(distances[0])), (16, pytest.approx(distances[1]))]


def saver_of(folder: Path, told: list[Saved]) -> Saver:
    """A saver of a single learner."""
    return Saver(writer(folder), told.append, folder)


def test_what_was_begun_is_finished_when_the_training_fails(tmp_path: Path) -> None:
    """This is reported, and the error of the training is the one that counts."""
    told: list[Saved] = []
    with pytest.raises(PeerLost, match="learner 1") as caught, saver_of(tmp_path, told) as saver:
        saver.on_barrier(state(0, 1, Ticket(0, 4, 4)))
        raise PeerLost("learner 1 was lost")
    assert [message.folder for message in told] == [str(tmp_path / "checkpoints" / "step-00000004")]
    load(tmp_path / "checkpoints" / "step-00000004")
    assert not hasattr(caught.value, "__notes__")


def test_a_save_that_fails_after_the_training_did_is_a_note(tmp_path: Path) -> None:
    """The cause comes first."""
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(PeerLost, match="learner 1") as caught, saver_of(tmp_path, []) as saver:
        saver.on_barrier(state(0, 1, Ticket(0, 4, 4)))
        raise PeerLost("learner 1 was lost")
    assert "step-00000004: a checkpoint cannot be written" in caught.value.__notes__[0]


@pytest.mark.parametrize("when", ["at the next mini-batch", "at the end"])
def test_a_save_that_fails_ends_the_training(when: str, tmp_path: Path) -> None:
    """It ends at the learner's next mini-batch, or when it has none."""
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"), saver_of(tmp_path, []) as saver:
        saver.on_barrier(state(0, 1, Ticket(0, 4, 4)))
        while when == "at the next mini-batch":
            saver.on_step(step(5))


def test_what_a_learner_does_is_told_to_the_launcher(tmp_path: Path) -> None:
    """So that it can say when a learner was lost."""
    sent: list[LearnerMessage] = []
    observer = recorder_of(tmp_path, Paced(sent.append, 0.0))
    observer.on_step(step(13, epoch=1))
    (progress,) = sent
    assert isinstance(progress, Progress)
    roster = Roster(2)
    roster.hear(progress.learner_id, progress)
    assert roster.learners[progress.learner_id].attempt.doing == "computing batch 4 of epoch 2"


def test_an_epoch_that_needs_no_checkpoint_writes_only_the_model_or_nothing(tmp_path: Path) -> None:
    """The optimizer's state is left out; the launcher is told where the model is."""
    told: list[LearnerMessage] = []
    kept: list[Keep] = ["", "model", "checkpoint"]
    models = CheckpointWriter(tmp_path / "validation", lambda name: 1, write_model, {})
    with Saver(writer(tmp_path), told.append, tmp_path, lambda report: kept[report.epoch], models) as saver:
        for epoch in range(3):
            report = EpochReport(0, epoch, 4, 5.0, Spent(), is_last=epoch == 2)
            saver.on_epoch(report, state(0, 1, Ticket(epoch + 1, 0, 8 * epoch + 8)))
    assert [type(message) for message in told] == [ModelSaved, Saved]
    assert told[0] == ModelSaved(str(tmp_path / "validation" / "step-00000016"))
    assert told[1] == Saved(str(tmp_path / "checkpoints" / "step-00000024"), "end", 0.0)
    whole, slim = (
        load(tmp_path / name).learner(0) for name in ("checkpoints/step-00000024", "validation/step-00000016")
    )
    assert whole.optimizer
    assert not slim.optimizer
    assert torch.equal(slim.weights, whole.weights)
