"""The arithmetic and the clean-up of the benchmarks; `make bench` makes the measurements themselves."""

import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import run
from time import monotonic

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.nn.utils import parameters_to_vector

from benchmarks import auto
from benchmarks.auto_task import Imitation
from benchmarks.fairness import spread
from benchmarks.measuring import Bar, median_speed_up
from benchmarks.namespaces import NoNamespacesError, Throttle, joined_namespaces
from benchmarks.plain_loop import plain_loop, tickets_of
from benchmarks.run import BENCHMARKS, parse, table
from benchmarks.runs import (
    DDP,
    SENDING,
    Outcome,
    Run,
    averaging_in_words,
    median_ratio,
    relative_distance,
    total_rate,
    weights_file,
)
from benchmarks.slow_link import SlowLink
from benchmarks.starting import (
    Outcomes,
    Program,
    alternately,
    launched,
    learner_command,
    read_outcomes,
    run_side_by_side,
)
from benchmarks.workloads import EmulatedDevice
from starling.workload import Ticket

THROTTLE = Throttle(rate="100mbit", burst="256kb", latency="20ms", congestion_control="reno")


def test_the_order_of_measurement_does_not_matter() -> None:
    """The first to be measured takes a tenth longer; equals come out equal, and twice as fast comes out as 2."""
    equals = [(1.1, 1.0), (1.0, 1.1)] * 20
    assert median_speed_up(equals) == pytest.approx(1.0)
    twice_as_fast = [(1.1, 2.0), (1.0, 2.2)] * 20
    assert median_speed_up(twice_as_fast) == pytest.approx(2.0)


def test_a_bar_is_held_or_missed_at_its_own_value() -> None:
    """`holds` is the comparison and nothing else, and the JSON has exactly the four keys."""
    assert Bar.at_least("a", 0.97, 0.97).holds and not Bar.at_least("a", 0.9699, 0.97).holds
    assert Bar.at_most("a", 0.2, 0.2).holds and not Bar.at_most("a", 0.2001, 0.2).holds
    assert Bar.at_most("a", 0.1, 0.2, "3 s").as_json() == {"name": "a", "ratio": 0.1, "bar": 0.2, "holds": True}


def test_a_rate_leaves_the_warm_up_out() -> None:
    """Ten gradients per second after three slow ones are a rate of 10; at least two of them must be timed."""
    steady = [100.0 + 0.1 * number for number in range(20)]
    assert Outcome([0.0, 40.0, 80.0, *steady]).rate == pytest.approx(10.0)
    assert total_rate([Outcome([0.0, 1.0, 2.0, *steady])] * 4) == pytest.approx(40.0)
    with pytest.raises(ValueError, match="4 gradients are too few"):
        _ = Outcome([0.0, 1.0, 2.0, 3.0]).rate


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    """A round on a busy machine slows both sides, and a round that slows only one side is an outlier."""
    assert median_ratio([10.0, 5.0, 1.0], [5.0, 2.5, 5.0]) == 2.0
    assert spread([100, 104, 98, 98]) == pytest.approx(0.06)


def test_runs_alternate_and_come_back_by_name_and_round() -> None:
    """Every round makes each run once, and every second round does so in reverse order."""
    made: list[str] = []

    def make(runs: Sequence[Run]) -> Outcomes:
        made.extend(run.strategy for run in runs)
        return [[Outcome(stamps=[float(number)])] for number in range(len(runs))]

    found = alternately({"a": Run("adpsgd", 1), "b": Run(DDP, 1)}, 3, make)
    assert made == ["adpsgd", DDP, DDP, "adpsgd", "adpsgd", DDP]
    assert [outcomes[0].stamps for outcomes in found["a"]] == [[0.0], [3.0], [4.0]]
    assert [outcomes[0].stamps for outcomes in found["b"]] == [[1.0], [2.0], [5.0]]


def test_runs_travel_to_the_learners_as_they_are(tmp_path: Path) -> None:
    """A learner's command line encodes the same runs."""
    runs = [Run("adpsgd", 4, 13_000, 0.03, seconds=3.0, last_is_slower=10.0), Run(DDP, 2, widths=(8, 4), steps=6)]
    *_, text, folder = learner_command(runs, tmp_path)
    assert Run.from_json(text) == runs and folder == str(tmp_path)
    assert runs[0].job().stragglers.slow == {3: 10.0}


def test_an_emulated_device_takes_its_time_and_gives_a_gradient() -> None:
    """The loss and its gradient take at least the requested time, for any blocks; every parameter has a gradient."""
    workload = EmulatedDevice(num_parameters=1 << 19, seconds=0.03)
    model = workload.make_model()
    (batch,) = workload.load(Ticket(0, 0, 0))
    begin = monotonic()
    workload.loss(model, batch).backward()
    assert monotonic() - begin >= 0.03
    gradients = [parameter.grad for parameter in model.parameters()]
    assert sum(gradient.numel() for gradient in gradients if gradient is not None) == 1 << 19


@pytest.mark.wide
def test_learners_note_what_they_did(tmp_path: Path) -> None:
    """One learner alone, two that average, and two under plain DDP run in the same two processes."""
    runs = [
        Run("allreduce", 1, 1000, 0.001, steps=6),
        Run("adpsgd", 2, 1000, 0.001, steps=12),
        Run(DDP, 2, widths=(8, 4), steps=12),
        Run(DDP, 2, widths=(8, 4), steps=12, options={"sync_every": 3}),
        Run(SENDING, 2, 1000, steps=5),
    ]
    alone, averaging, in_step, rarely, sending = launched(runs, tmp_path)
    assert [len(outcome.stamps) for outcome in alone] == [6]
    assert sum(len(outcome.stamps) for outcome in averaging) == 12
    assert averaging[0].rounds == averaging[1].rounds > 0
    assert all(outcome.bytes_sent == 4000 * outcome.rounds for outcome in averaging)
    assert all(outcome.distance is not None for outcome in averaging)
    assert [(len(outcome.stamps), outcome.rounds) for outcome in in_step] == [(6, 6), (6, 6)]
    assert [(len(outcome.stamps), outcome.rounds) for outcome in rarely] == [(6, 2), (6, 2)]
    assert [len(outcome.stamps) for outcome in sending] == [6, 0]
    assert list(tmp_path.iterdir()) == []


def test_what_is_sent_over_an_emulated_link_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two messages of 1,000 bytes at 50,000 per second do not complete before 40 ms; after the context nothing is
    late."""

    class Sent:
        def wait(self) -> None: ...

    def send_at_once(tensor: torch.Tensor, peer: int) -> Sent:
        return Sent()

    monkeypatch.setattr(dist, "isend", send_at_once)
    begin = monotonic()
    with SlowLink(bytes_per_second=50_000.0).under_messages():
        sendings = [dist.isend(torch.zeros(250), 1) for _ in range(2)]
        for sending in sendings:
            assert sending is not None
            sending.wait()
    assert monotonic() - begin >= 0.04
    assert dist.isend is send_at_once


def test_a_gradient_that_is_summed_up_is_that_of_the_whole() -> None:
    """Three mini-batches before one step give the same weights as their mean gradient."""
    job = Run(DDP, 1, widths=(8, 4), steps=3).job()
    models: list[torch.nn.Module] = []

    def keep(model: torch.nn.Module) -> torch.nn.Module:
        models.append(model)
        return model

    assert len(list(plain_loop(job, tickets_of(job, 3, 0, 1), torch.device("cpu"), keep, sync_every=3))) == 3
    expected = job.workload.make_model()
    optimizer = job.make_optimizer(list(expected.parameters()))
    batches = [batch for ticket in tickets_of(job, 3, 0, 1) for batch in job.workload.load(ticket)]
    torch.stack([job.workload.loss(expected, batch) for batch in batches]).mean().backward()
    optimizer.step()
    for parameter, wanted in zip(models[0].parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, wanted)


def test_the_distance_between_models_is_a_share_of_their_means_norm(tmp_path: Path) -> None:
    """Two models at a distance of 3 on either side of a mean of norm 10 are tested; equal models are 0 apart; outcomes
    have it, too."""
    mean, apart = torch.tensor([6.0, 8.0]), torch.tensor([3.0, 0.0])
    assert relative_distance([mean + apart, mean - apart]) == pytest.approx(0.3)
    assert relative_distance([mean, mean, mean]) == 0.0
    for rank, weights in enumerate([mean + apart, mean - apart]):
        (tmp_path / f"outcomes-{rank}.json").write_text('[{"stamps": [1.0], "rounds": 1}]')
        weights.numpy().tofile(weights_file(tmp_path, 0, rank))
    (outcomes,) = read_outcomes([Run("adpsgd", 2)], tmp_path)
    assert [outcome.distance for outcome in outcomes] == pytest.approx([0.3, 0.3])
    assert averaging_in_words([outcomes]) == "1.00 rounds per gradient, distance between models 3.0e-01"


def program(text: str) -> Program:
    return Program([sys.executable, "-c", text], {"WORD": "here"})


def test_programs_get_their_variables_and_succeed(tmp_path: Path) -> None:
    """Both have run when the call returns."""
    text = "import os, pathlib; pathlib.Path({!r}).write_text(os.environ['WORD'])"
    files = [tmp_path / "a", tmp_path / "b"]
    run_side_by_side([program(text.format(str(file))) for file in files], tmp_path)
    assert [file.read_text() for file in files] == ["here", "here"]


def test_when_a_program_fails_none_is_left(tmp_path: Path) -> None:
    """The error shows the end of its log, and the program that would have continued is gone."""
    note = tmp_path / "pid"
    goes_on = f"import os, pathlib, time; pathlib.Path({str(note)!r}).write_text(str(os.getpid())); time.sleep(600)"
    fails = (
        f"import pathlib, sys, time; note = pathlib.Path({str(note)!r})\n"
        "while not note.exists() or not note.read_text(): time.sleep(0)\n"
        "sys.exit('no such word')"
    )
    with pytest.raises(RuntimeError, match="program 1 ended with exit code 1:\nno such word"):
        run_side_by_side([program(goes_on), program(fails)], tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def test_programs_that_take_too_long_are_ended(tmp_path: Path) -> None:
    """The limit applies to all programs together."""
    with pytest.raises(RuntimeError, match=r"did not end within 0\.1 s"):
        run_side_by_side([program("import time; time.sleep(600)")], tmp_path, limit=0.1)


def namespaces_here() -> set[str]:
    """This machine's network namespaces of benchmarks."""
    folder = Path("/run/netns")
    return {file.name for file in folder.glob("starling-bench-*")} if folder.exists() else set()


def test_no_namespace_outlives_an_error_among_the_learners() -> None:
    """If this machine allows namespaces, they see each other; in any case, none is left."""
    mine: set[str] = set()
    try:
        with joined_namespaces(THROTTLE) as (first, second):
            mine = {first.name, second.name}
            assert mine <= namespaces_here()
            seen = run(first.inside(["ip", "route", "get", second.address]), capture_output=True, text=True, check=True)
            assert f"dev bench0 src {first.address}" in seen.stdout
            routes = run(first.inside(["ip", "route"]), capture_output=True, text=True, check=True)
            assert "congctl reno" in routes.stdout
            raise ZeroDivisionError
    except (ZeroDivisionError, NoNamespacesError):
        pass
    assert not mine & namespaces_here()


@pytest.mark.parametrize("failing", range(10))
def test_namespaces_that_were_made_are_removed_whatever_fails(failing: int) -> None:
    """Whichever command fails, one namespace is removed for each that was added, and the failure is raised."""
    there: set[str] = set()
    commands: list[Sequence[str]] = []

    def execute(command: Sequence[str]) -> None:
        commands.append(command)
        if len(commands) == failing + 1:
            raise NoNamespacesError("not permitted")
        if "netns" in command and command[2] == "add":
            there.add(command[3])
        elif "delete" in command:
            there.remove(command[3])

    with pytest.raises(NoNamespacesError, match="not permitted"), joined_namespaces(THROTTLE, execute):
        pass
    assert len(commands) > failing
    assert not there or commands[failing][2] == "delete"  # the one whose removal failed
    assert len(there) <= 1


def test_benchmarks_are_chosen_by_name() -> None:
    """Without names, all are chosen; named ones come in the usual order; an unknown name is refused."""
    assert parse([]) == (list(BENCHMARKS), Path("bench.json"))
    chosen, output = parse(["--only", "start_up", "stragglers", "--output", "elsewhere.json"])
    assert (chosen, output) == (["stragglers", "start_up"], Path("elsewhere.json"))
    with pytest.raises(SystemExit):
        parse(["--only", "speed"])


def test_the_table_shows_absolute_figures_and_what_is_missed() -> None:
    """It has a row for each bar; small ratios keep two digits."""
    bars = [Bar.at_least("throughput", 0.5, 0.97, "12 of 24 steps/s"), Bar.at_most("cost", 0.00123, 0.02)]
    text = io.StringIO()
    Console(file=text, width=120).print(table(bars, "here"))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.getvalue().splitlines() if "│" in line]
    assert rows == [["throughput", "0.500", "0.97", "NO", "12 of 24 steps/s"], ["cost", "0.0012", "0.02", "yes", ""]]


def test_outcomes_leave_out_learners_that_took_no_part(tmp_path: Path) -> None:
    """A run of one of two learners has one outcome."""
    (tmp_path / "outcomes-0.json").write_text('[{"stamps": [1.0]}, {"stamps": [2.0]}]')
    (tmp_path / "outcomes-1.json").write_text('[null, {"stamps": [3.0]}]')
    found = read_outcomes([Run("allreduce", 1), Run("adpsgd", 2)], tmp_path)
    assert [[outcome.stamps for outcome in outcomes] for outcomes in found] == [[[1.0]], [[2.0], [3.0]]]


@pytest.mark.parametrize(("target", "seconds", "has_reached"), [(3.0, 0.2, True), (0.1, 1.0, False)])
def test_a_loss_is_reached_when_the_consensus_of_all_learners_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: float, seconds: float, has_reached: bool
) -> None:
    """It counts from the time at which each learner has kept a copy; a run that never reaches it counts to its end. The
    untrained model's loss is about 2.3."""
    monkeypatch.setattr(auto, "TARGET", target)
    untrained = parameters_to_vector(Imitation(0.0).make_model().parameters()).detach()
    for rank in range(auto.WORLD):
        (tmp_path / f"run-1-{rank}.times").write_text(json.dumps([0.05 * (rank + 1), 1.0]))
        torch.stack([untrained, untrained]).numpy().tofile(tmp_path / f"run-1-{rank}.weights")
    (tmp_path / "said-1.json").write_text(json.dumps({"strategy": {"name": "allreduce"}, "choosing": 0.0}))
    found = auto._reached(tmp_path, 1)
    assert (found.seconds, found.has_reached) == (pytest.approx(seconds), has_reached)
    assert auto._ratio(found, found) == (1.0 if has_reached else float("inf"))
