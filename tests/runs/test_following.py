"""A launcher's records of its run do not harm the run, whatever happens to them."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import starling.experiment.following
from starling.engines.processes.stalls import Stall, Waits
from starling.errors import ConfigError, DataError, NonFiniteError
from starling.experiment.folder import ExperimentFolder
from starling.experiment.following import Following, describe, is_alive, read_record, read_status, recorded
from starling.experiment.learning import HeartbeatSource, beating
from starling.experiment.observers import Recorder
from starling.experiment.record import begin_segment
from starling.launch.messages import Activity, Ended, Heartbeat
from starling.speech.recipe import Recipe, check_recipe
from starling.workload import Position, Ticket
from tests.engines.test_waits import Clock

Tree = dict[str, Any]


@pytest.fixture
def recipe(tree: Tree) -> Recipe:
    return check_recipe(tree, "r.yaml")


@pytest.fixture
def folder(recipe: Recipe) -> ExperimentFolder:
    """An experiment that is set up, but did not run."""
    folder = ExperimentFolder(recipe.folder)
    begin_segment(folder.seen, Position())
    folder.config.write_text("name: songs\n")
    return folder


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@contextmanager
def followed(recipe: Recipe, folder: ExperimentFolder, screen: Console) -> Generator[Following, None, None]:
    """The context in which `starling train` follows a run."""
    with recorded(recipe, folder, screen.print) as events, Following(recipe, folder, screen, events) as following:
        yield following


def test_a_run_that_fails_is_summed_up_and_its_status_says_how(recipe: Recipe, folder: ExperimentFolder) -> None:
    """The status has the exit code of the error, which is raised again."""
    screen = console()
    with pytest.raises(NonFiniteError), followed(recipe, folder, screen) as following:
        assert is_alive(read_status(folder.path))
        following.roster.hear(0, Activity("computing batch 1 of epoch 1"))
        raise NonFiniteError("learner 0: the loss is nan\nand more")
    assert "songs, allreduce: learner 0: the loss is nan; whole run " in said(screen)
    assert (folder.log / "summary.txt").read_text().startswith("songs, allreduce: learner 0: the loss is nan")
    status = read_status(folder.path)
    assert (status.stage, status.exit_code, status.message) == ("ended", 4, "learner 0: the loss is nan")
    began, ended = (json.loads(line) for line in (folder.log / "events.jsonl").read_text().splitlines())
    assert (began["kind"], began["strategy"]) == ("start", "allreduce")
    assert (ended["kind"], ended["exit_code"], ended["message"]) == ("end", 4, "learner 0: the loss is nan")


def test_a_stall_that_ends_just_before_the_run_is_reported(
    tree: Tree, folder: ExperimentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds although nothing checks again while learners train."""
    monkeypatch.setattr(starling.experiment.following, "LOOK_EVERY", 3600.0)
    screen = console()
    with followed(check_recipe(tree | {"engine": {"explain_seconds": 1}}, "r.yaml"), folder, screen) as following:
        following.roster.hear(1, Heartbeat(7, Stall("a mean", (0,), True, False, 5.0, 0.1, 1)))
        following._report_stalls()
        following.roster.hear(1, Ended(90))
        following.end_training()
    assert "learner 1 continues after waiting 5.0 s for learner 0" in said(screen)
    assert [json.loads(line)["kind"] for line in (folder.log / "events.jsonl").read_text().splitlines()][1:] == [
        "stall",
        "stall-over",
        "end",
    ]


def test_a_joiner_that_did_not_join_is_not_waited_for(recipe: Recipe, folder: ExperimentFolder) -> None:
    """It is not a loss of the run, and no heartbeat of it is expected; one that never started is not shown."""
    with followed(recipe, folder, console()) as following:
        following.roster.hear(2, Activity("starting"))
        following.roster.lose(2)
        following.roster.lose(3)
    status = read_status(folder.path)
    assert {learner.learner_id: learner.state for learner in status.learners}[2] == "lost"
    assert 3 not in {learner.learner_id for learner in status.learners}
    assert status.losses == ()


def test_a_status_whose_launcher_has_ended_is_not_alive(recipe: Recipe, folder: ExperimentFolder) -> None:
    """This holds however recent it is; an old one is not alive either, whatever process has that number now."""
    with followed(recipe, folder, console()):
        status = read_status(folder.path)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
        assert is_alive(status)
        assert not is_alive(replace(status, pid=ended.pid))
        assert not is_alive(replace(status, written=status.written - 60.0))


def test_a_run_ends_when_its_test_sets_are_scored(recipe: Recipe, folder: ExperimentFolder) -> None:
    """Until then its status is written, and an error while scoring becomes its outcome."""
    with pytest.raises(DataError), followed(recipe, folder, console()) as following:
        following.end_training()
        assert read_status(folder.path).stage == "scoring"
        raise DataError("no test set")
    status = read_status(folder.path)
    assert (status.stage, status.exit_code, status.message) == ("ended", 5, "no test set")


def test_a_model_that_does_not_work_is_named_first_and_is_not_a_success(
    recipe: Recipe, folder: ExperimentFolder
) -> None:
    """It is in the status during training and at the end; in the summary it is one line, however long it is."""
    screen, verdict = console(), "it does not work, " + "for this and that reason, " * 20
    with followed(recipe, folder, screen) as following:
        following.events.judge(verdict, lambda line: None)
        following._write()
        shown = Console(file=io.StringIO(), width=2000)
        shown.print(describe(read_status(folder.path), 0.0, True))
        assert verdict.strip() in said(shown)
        following.end_training()
        assert said(screen) == ""
    summary = (folder.log / "summary.txt").read_text().splitlines()
    assert summary[0] == verdict
    assert re.match(r"songs, allreduce: ended; start and training \d+\.\d s, whole run \d+\.\d s$", summary[1])
    assert "ended well" not in said(screen)
    status = read_status(folder.path)
    assert (status.exit_code, status.message) == (0, verdict)


def test_a_run_whose_model_does_not_work_can_end_with_an_error(recipe: Recipe, folder: ExperimentFolder) -> None:
    """The summary has the verdict before the error."""
    with pytest.raises(DataError), followed(recipe, folder, console()) as following:
        following.events.judge("it does not work", lambda line: None)
        raise DataError("no test set")
    first, second, *_ = (folder.log / "summary.txt").read_text().splitlines()
    assert first == "it does not work"
    assert second.startswith("songs, allreduce: no test set; whole run ")
    assert read_status(folder.path).message == "no test set"


def test_a_status_that_cannot_be_written_is_one_warning(recipe: Recipe, folder: ExperimentFolder) -> None:
    """The run continues without it, and without its events."""
    screen = console()
    folder.log.write_text("in the way")
    (folder.status / "in the way").mkdir(parents=True)
    with followed(recipe, folder, screen) as following:
        following.end_training()
    assert said(screen).count("warning: ") == 1
    assert "cannot be used" in said(screen)


def test_an_experiment_that_never_ran_has_no_status(folder: ExperimentFolder) -> None:
    """The error says which runs write one; a damaged one is named."""
    with pytest.raises(ConfigError, match=r"songs: no status.json, because it never ran under `starling train`"):
        read_status(folder.path)
    folder.status.write_text('{"format": 1')
    with pytest.raises(DataError, match=r"status.json: cannot be read"):
        read_status(folder.path)


def test_the_record_of_a_resumed_run_begins_at_its_start(folder: ExperimentFolder) -> None:
    """What was re-issued or skipped counts. Earlier runs, incomplete lines, and mini-batches that a learner had
    claimed but not finished when its membership ended do not."""
    first, second = folder.seen / "from-00000000", begin_segment(folder.seen, Position(Ticket(1, 0, 4)))
    (first / "learner-0.tsv").write_text("header\n" + "1\t1\t0\n" * 4)
    (second / "learner-0.tsv").write_text("header\n2\t1\t4\n2\t2\t5\n2\t8\t11\n2\t0\t4\n2\t")
    third = begin_segment(folder.seen, Position(Ticket(1, 3, 7), (Ticket(1, 1, 5), Ticket(1, 2, 6))))
    (third / "learner-0.tsv").write_text("header\n")
    (third / "learner-3.tsv").write_text("header\n2\t2\t5\n2\t3\t6\n")
    (third / "skipped-3.tsv").write_text("header\n2\tu1\tsilent\n")
    record = read_record(folder.seen, second.name)
    assert record.num_computed == {0: 2, 3: 2}
    assert (record.num_again, record.num_skipped) == (2, 1)


def test_a_learner_writes_what_it_knows_into_its_own_log_and_not_too_often(tmp_path: Path) -> None:
    """Once, again when the wait has doubled, and when it is over; the time in which it did not run is no wait."""
    clock, lines = Clock(), list[str]()
    waits = Waits(clock)
    heartbeat = HeartbeatSource(3, Recorder(tmp_path), lines.append, waits, 10.0)

    def go_on(seconds: float) -> None:
        for _ in range(int(seconds / 0.5)):
            clock.now += 0.5
            heartbeat.beat()

    with waits.waiting("receiving from learner 2", [2]):
        go_on(30.0)
    go_on(1.0)
    with waits.waiting("a mean", [0, 1, 2], is_group=True):
        clock.now += 40.0
        assert heartbeat.beat().stall is None
    assert lines == [
        "learner 3 has waited 10.5 s in receiving from learner 2: see its log",
        "learner 3 has waited 21.0 s in receiving from learner 2: see its log",
        "learner 3 continues after waiting 30.0 s",
        "learner 3 did not run for 39.5 s: it was stopped or got no processor time",
    ]


def test_without_a_launcher_the_learner_looks_at_itself(tmp_path: Path) -> None:
    """Under torchrun its log is all there is; the heartbeat runs in a thread, and ends with the context."""
    looked: list[float] = []

    class Looking(HeartbeatSource):
        def beat(self) -> Heartbeat:
            looked.append(0.0)
            return super().beat()

    with beating(Looking(0, Recorder(tmp_path), lambda line: None, Waits()), None):
        while not looked:
            pass
