"""Promises about learners that real processes keep: ends that are clear, however odd the run and whenever one dies."""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from starling.engines.processes.handshake import Handshake, Peers
from starling.engines.processes.place import Place
from starling.errors import PeerLost, ProtocolError
from starling.launch.joiners import Changes
from starling.launch.launcher import launch
from starling.launch.messages import LearnerMessage, values_of
from starling.launch.rendezvous import find_place
from starling.launch.roster import Loss
from tests.launch.promise_process import NUM_STEPS
from tests.warm_start import Learners, own_learner, own_learners, start_learners

FENCE = 60.0
"""Seconds within which a run of a second has to be over, on a machine that others use."""


def command(strategy: str, trouble: str) -> list[str]:
    return [sys.executable, "-m", "tests.launch.promise_process", strategy, trouble]


def steps_of(strategy: str, trouble: str, world: int, folder: Path) -> list[int]:
    """How many mini-batches each learner of a run computed, which ended well."""
    with start_learners(command(strategy, trouble), world, folder) as learners:
        ends = [learners.end(rank, within=FENCE) for rank in range(world)]
    assert all(code == 0 for code, _ in ends), ends
    return [json.loads(said.splitlines()[-1])["steps"] for _, said in ends]


@pytest.mark.wide
def test_ten_times_as_slow_a_learner_slows_those_in_step_and_not_the_others(tmp_path: Path) -> None:
    """By counted steps of runs of the same time, in which learners sleep, so that cores are not the limit.

    In step all take a tenth of the steps; under adpsgd the others lose less than 5 %, for which the fence is wider:
    others use the machine. The slow one is far behind, and the end is clean.
    """
    in_step = {trouble: steps_of("allreduce", trouble, 3, tmp_path) for trouble in ("alike", "slow")}
    free = {trouble: steps_of("adpsgd", trouble, 3, tmp_path) for trouble in ("alike", "slow")}
    assert 0.04 < in_step["slow"][1] / in_step["alike"][1] < 0.25, in_step
    others, before = sum(free["slow"][1:]), sum(free["alike"][1:])
    assert others / before > 0.8, free
    assert free["slow"][0] < 0.3 * free["slow"][1], free


@pytest.mark.parametrize("strategy", ["allreduce", "adpsgd", pytest.param("parameter-server", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("trouble", "total"),
    [
        pytest.param("zero", 0, marks=pytest.mark.wide),
        pytest.param("one", 1, marks=pytest.mark.wide),
        ("unequal", NUM_STEPS),
    ],
)
def test_no_step_one_step_and_unequal_shares_are_a_clean_end(
    strategy: str, trouble: str, total: int, tmp_path: Path
) -> None:
    """A budget smaller than the number of learners, and epochs that no number of learners divides."""
    steps = steps_of(strategy, trouble, 3, tmp_path)
    assert total <= sum(steps) < total + 3
    if total == 0:
        assert sum(steps) == 0


@pytest.mark.parametrize("is_borne", [False, pytest.param(True, marks=pytest.mark.wide)], ids=["stop", "continue"])
def test_a_learner_killed_while_starting_is_a_clear_end(is_borne: bool, tmp_path: Path) -> None:
    """Before all have met the run cannot continue: one message says which learner and when, soon; no orphan."""
    fired = threading.Event()

    def kill() -> None:
        while not fired.is_set():
            try:
                own_learner(1).kill()
            except (StopIteration, psutil.Error):
                continue
            fired.set()

    killer = threading.Thread(target=kill)
    killer.start()
    begin = time.monotonic()
    losses: list[Loss] = []
    changes = Changes("continue" if is_borne else "stop", on_lost=losses.append)
    with pytest.raises(
        PeerLost, match=r"learner 1 was killed by SIGKILL \(last reported: starting\); its log: .*learner-1.log"
    ):
        launch(command("adpsgd", "unequal"), 3, tmp_path, changes=changes)
    killer.join()
    assert fired.is_set()
    assert time.monotonic() - begin < FENCE
    assert losses == []
    assert not list(own_learners())


@pytest.mark.parametrize("strategy", ["adpsgd", pytest.param("allreduce", marks=pytest.mark.soak)])
def test_a_learner_killed_after_its_last_step_is_a_clear_end(strategy: str, tmp_path: Path) -> None:
    """All mini-batches are done, but the closing barrier is not: the others end well and name it."""
    said: dict[int, dict[str, Any]] = {}
    begin = time.monotonic()

    def on_message(rank: int, message: LearnerMessage) -> None:
        told = dict(values_of(message))
        if "dies" in told or "num_done" in told:
            said[rank] = told

    losses = launch(command(strategy, "dies-at-the-end"), 3, tmp_path, on_message, Changes("continue"))
    assert said[2] == {"dies": True}
    assert [loss.learner for loss in losses] == [2]
    assert {rank: message["num_done"] >= NUM_STEPS for rank, message in said.items() if rank != 2} == {0: True, 1: True}
    assert time.monotonic() - begin < FENCE
    assert not list(own_learners())


@pytest.mark.soak
def test_a_learner_killed_after_saying_goodbye_ends_the_run_clearly(tmp_path: Path) -> None:
    """It has nothing left to do: the others end well, and the run ends well or names it."""
    said: dict[int, int] = {}

    def on_message(rank: int, message: LearnerMessage) -> None:
        told: dict[str, Any] = dict(values_of(message))
        if "num_done" in told:
            said[rank] = told["num_done"]

    begin = time.monotonic()
    try:
        losses = launch(command("adpsgd", "dies-after-the-end"), 3, tmp_path, on_message, Changes("continue"))
        assert [loss.learner for loss in losses] == [2]
    except PeerLost as error:
        assert "learner 2 was killed by SIGKILL" in str(error)
    assert said[2] >= NUM_STEPS
    assert time.monotonic() - begin < FENCE
    assert not list(own_learners())


@pytest.mark.wide
def test_a_late_riser_finds_the_others_gone_and_ends(tmp_path: Path) -> None:
    """Without a launcher a stalled learner is not killed: the others name it and end, and it ends when it wakes."""
    stops = [sys.executable, "-m", "tests.launch.learner_process", "delay-by-one/stops"]
    with start_learners(stops, 2, tmp_path) as learners:
        code, said = learners.end(1, within=FENCE)
        assert code == PeerLost.exit_code or "PeerLost" in said, said
        assert "lost learner 0" in said
        assert psutil.Process(learners.pids[0]).status() == psutil.STATUS_STOPPED
        code, said = woken(learners)
    assert code != 0
    assert re.search(r"PeerLost: learner 0 lost", said), said


def woken(learners: Learners) -> tuple[int, str]:
    """The end of learner 0, which stops itself at each of its steps, of which it may have one or two left."""
    for _ in range(int(FENCE)):
        os.kill(learners.pids[0], signal.SIGCONT)
        with suppress(TimeoutError):
            return learners.end(0, within=1.0)
    raise AssertionError("a late riser hangs")


@pytest.mark.soak
def test_a_learner_paused_for_too_long_is_dead_before_the_others_continue(tmp_path: Path) -> None:
    """So a late riser can corrupt nothing: when its loss is told there is no such process."""
    there: list[bool] = []
    stopped: list[int] = []

    def on_message(rank: int, message: LearnerMessage) -> None:
        told: dict[str, Any] = dict(values_of(message))
        if not stopped and rank == 1 and told.get("step", 0) >= 10:
            stopped.append(own_learner(1).pid)
            os.kill(stopped[0], signal.SIGSTOP)

    def on_loss(loss: Loss) -> None:
        there.append(psutil.pid_exists(stopped[0]))

    ends = [sys.executable, "-m", "tests.launch.learner_process", "adpsgd/ends"]
    losses = launch(ends, 3, tmp_path, on_message, Changes("continue", 4.0, on_lost=on_loss))
    assert [loss.learner for loss in losses] == [1]
    assert there == [False]


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where learner 0 is to own the store, and something else listens there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ProtocolError, match=rf"learner 0 cannot reach the store at 127.0.0.1:{port}: .*port free"):
            find_place(timeout_seconds=5.0)


MINE = Handshake(
    world=2,
    strategy="allreduce",
    num_parameters=29,
    dtype="torch.float32",
    configuration="a1",
    starling="0.1.0",
    torch="2.13",
)


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("strategy", "adpsgd"),
        ("num_parameters", 30),
        ("dtype", "torch.float64"),
        ("configuration", "b2"),
        ("starling", "0.2.0"),
        ("torch", "2.14"),
    ],
)
def test_whatever_differs_is_refused_by_both_with_both_values(field: str, theirs: object) -> None:
    """Before the first tensor: gloo would abort, or reinterpret, in silence."""
    assert {field} < asdict(MINE).keys()
    store, errors = HashStore(), {}

    def meet(rank: int, greeting: Handshake) -> None:
        try:
            Peers(Place(rank, 2, rank, 2, store), 20.0).shake_hands(greeting)
        except ProtocolError as error:
            errors[rank] = str(error)

    threads = [
        threading.Thread(target=meet, args=(rank, greeting))
        for rank, greeting in enumerate([MINE, replace(MINE, **{field: theirs})])  # type: ignore[arg-type]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = asdict(MINE)[field]
    assert f"learner 0 and learner 1 differ in {field}: {own!r} and {theirs!r}" in errors[0]
    assert f"learner 1 and learner 0 differ in {field}: {theirs!r} and {own!r}" in errors[1]


@pytest.mark.parametrize(
    ("trouble", "difference"),
    [
        ("sizes", r"differ in num_parameters: (22 and 29|29 and 22)"),
        ("dtypes", r"differ in dtype: 'torch.float(32|64)' and 'torch.float(32|64)'"),
    ],
)
def test_models_that_differ_are_refused_by_real_learners(trouble: str, difference: str, tmp_path: Path) -> None:
    """Of another size, or in another precision: no process aborts, and both values are shown."""
    with start_learners(command("adpsgd", trouble), 2, tmp_path) as learners:
        ends = [learners.end(rank, within=FENCE) for rank in range(2)]
    assert all(code > 0 for code, _ in ends), ends
    assert all(re.search(f"ProtocolError: .*{difference}", said) for _, said in ends), ends
