"""The record of when learners computed and waited: exact at first, bounded, and without what a resume drops."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from starling.experiment.observers import EXACT, Recorder
from starling.experiment.record import begin_segment, read_timeline, segments
from starling.training.job import EpochReport, Spent, StepReport
from starling.workload import Position, Ticket
from tests.checkpoint.test_checkpoints import state
from tests.report.steps import step


def timed(number: int, spent: Spent, minutes: float | None = None, rank: int = 0, loss: float = 1.0) -> StepReport:
    """Step `number` at its time, with 50 frames."""
    report = replace(step(number, rank=rank, loss=loss, frames=50), spent=spent)
    return report if minutes is None else replace(report, minutes=minutes)


class Recorded:
    """A recorder that is shown each step."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self._recorder = Recorder(*given, **options)
        self.on_step, self.close = self._recorder.on_step, self._recorder.close

    def on_epoch(self, report: EpochReport) -> None:
        self._recorder.on_epoch(report, state(0, 1, Ticket(1, 0, 10)))


def epoch_of(spent: Spent, rank: int = 0) -> EpochReport:
    """The end of an epoch."""
    return EpochReport(rank=rank, epoch=0, num_steps=1, seconds=1.0, spent=spent)


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """Where a run that has just started records."""
    return begin_segment(tmp_path / "seen", Position())


def test_each_mini_batch_is_a_stretch_at_first(segment: Path) -> None:
    """The stretch has the loss, and the time spent since the previous one; an epoch's end loses nothing."""
    timeline = Recorded(segment, clock=None)
    timeline.on_step(timed(0, Spent(4.0, 1.0, 1.0)))
    timeline.on_step(timed(1, Spent(7.0, 1.5, 2.5), loss=3.0))
    timeline.on_epoch(epoch_of(Spent(7.0, 1.5, 3.0)))
    timeline.on_step(timed(2, Spent(5.0, 0.25, 0.0)))
    timeline.close()
    first, second, third = read_timeline(segment.parent)
    assert (first.computing, first.waiting_for_data, first.waiting_for_peers) == (4.0, 1.0, 1.0)
    assert (second.computing, second.waiting_for_data, second.waiting_for_peers) == (3.0, 0.5, 1.5)
    assert (third.computing, third.waiting_for_data, third.waiting_for_peers) == (5.0, 0.25, 0.5)
    assert (first.begin, first.end, second.begin, second.end) == (-6.0, 0.0, 0.0, 6.0)
    assert [(each.step, each.batches, each.examples, each.loss) for each in (first, second, third)] == [
        (0, 1, 2, 1.0), (1, 1, 2, 3.0), (2, 1, 2, 1.0),
    ]  # fmt: skip


@pytest.mark.wide
def test_the_file_grows_with_the_logarithm_of_the_time(segment: Path) -> None:
    """For 100,000 mini-batches of equal length, at most 1000 (1 + ln 100) lines are written, and nothing is lost."""
    timeline = Recorded(segment, clock=None)
    total = 100_000
    for number in range(total):
        spent = Spent(0.75 * number, 0.0, 0.25 * number)
        timeline.on_step(timed(number, spent, minutes=number / 60.0, loss=float(number)))
    timeline.close()
    found = read_timeline(segment.parent)
    assert EXACT * 4 < len(found) <= EXACT * (1 + math.log(total / EXACT)) + 2
    assert {each.batches for each in found[:EXACT]} == {1}
    assert found[-10].batches > 50
    assert sum(each.batches for each in found) == total
    assert sum(each.computing for each in found) == pytest.approx(0.75 * (total - 1), rel=1e-6)
    assert sum(each.waiting_for_peers for each in found) == pytest.approx(0.25 * (total - 1), rel=1e-6)
    mean = sum(each.loss * each.frames for each in found) / sum(each.frames for each in found)
    assert mean == pytest.approx((total - 1) / 2, rel=1e-4)  # six digits of each loss are written


def test_many_learners_of_one_process_share_the_exact_stretches(segment: Path) -> None:
    """A thousand virtual learners do not write a thousand times as much."""
    timeline = Recorded(segment, world=1000, clock=None)
    for number in range(400):
        timeline.on_step(timed(number, Spent(float(number)), minutes=number / 60.0))
    timeline.close()
    assert len(read_timeline(segment.parent)) <= 50 * (1 + math.log(400 / 50)) + 2


def test_a_loss_that_is_not_finite_does_not_count(segment: Path) -> None:
    """Its stretch has no loss, and other stretches are unaffected."""
    timeline = Recorded(segment, clock=None)
    timeline.on_step(timed(0, Spent(1.0), loss=float("nan")))
    timeline.on_step(timed(1, Spent(2.0), loss=2.0))
    timeline.close()
    first, second = read_timeline(segment.parent)
    assert math.isnan(first.loss) and first.frames == 0
    assert second.loss == 2.0


def test_learners_are_aligned_by_the_time_of_day(segment: Path) -> None:
    """Each has its own clock, here 3 s apart; what ended at the same moment is recorded at the same moment."""
    for learner, late in ((0, 0.0), (1, 3.0)):
        now = iter([1006.0, 1012.0])
        timeline = Recorded(segment, clock=lambda now=now: next(now))  # type: ignore[misc]
        for number in range(2):
            timeline.on_step(timed(number, Spent(6.0 * number), (6.0 * (number + 1) - late) / 60.0, learner))
        timeline.close()
    ends = {
        learner: [each.end for each in read_timeline(segment.parent) if each.learner == learner] for learner in (0, 1)
    }
    assert ends[0] == pytest.approx(ends[1])


def test_what_a_resume_drops_is_not_in_the_timeline(segment: Path) -> None:
    """Mini-batches after the checkpoint were computed twice; the second time counts."""
    timeline = Recorded(segment, clock=None)
    for number in range(6):
        timeline.on_step(timed(number, Spent(float(number))))
    timeline.close()
    resumed = begin_segment(segment.parent, Position(Ticket(0, 4, 4)))
    timeline = Recorded(resumed, clock=None)
    timeline.on_step(timed(4, Spent(1.0), loss=9.0))
    timeline.close()
    assert len(segments(segment.parent)) == 2
    assert [(each.step, each.loss) for each in read_timeline(segment.parent)] == [
        (0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0), (4, 9.0),
    ]  # fmt: skip


def test_invalid_lines_are_left_out(segment: Path) -> None:
    """The last line of a killed learner may be invalid."""
    timeline = Recorded(segment, clock=None)
    timeline.on_step(timed(0, Spent(1.0)))
    timeline.on_step(timed(1, Spent(2.0)))
    timeline.close()
    file = segment / "learner-0.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    changed = lines[1].replace('"seconds":', '"seconds":1')
    partial = '{"kind": "stretch", "step": 5}\n'
    file.write_text("".join([*lines[:2], changed, "no event\n", partial, lines[2], lines[2][:40]]))
    assert [each.step for each in read_timeline(segment.parent)] == [0, 1]


def test_tables_of_earlier_versions_are_read(segment: Path) -> None:
    """Each stretch was a row; rows that make no sense are left out."""
    rows = ["6.0\t6.0\t0\t1\t2\t50\t1.0\t4.0\t1.0\t1.0\n", "12.0\t12.0\t1\t1\t2\t0\tnan\t3.0\t0.5\t2.5\n"]
    wrong = ["1\t2\n", "a\t" * 9 + "b\n", "nan\t" * 9 + "1\n"]
    (segment / "times-0.tsv").write_text("".join(["header\n", rows[0], *wrong, rows[1], "12.0\t6"]))
    (segment / "times-x.tsv").write_text("header\n1\n")
    first, second = read_timeline(segment.parent)
    assert (first.step, first.loss, first.begin, first.end, first.waiting_for_data) == (0, 1.0, 0.0, 6.0, 1.0)
    assert (second.step, second.frames, second.begin, second.end, second.waiting_for_peers) == (1, 0, 6.0, 12.0, 2.5)


def test_a_record_that_cannot_be_written_costs_one_warning(tmp_path: Path) -> None:
    """The run is not affected."""
    warned: list[Path] = []
    timeline = Recorded(tmp_path / "absent", clock=None, warn=lambda path, error: warned.append(path))
    for number in range(3):
        timeline.on_step(timed(number, Spent(float(number))))
    timeline.close()
    assert warned == [tmp_path / "absent"]
    assert read_timeline(tmp_path) == []
