"""Joined loops that continue when one of them is lost: real processes, killed with SIGKILL at a known step."""

import json
import os
import random
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import starling
from starling.checkpoint.reader import checkpoints_in, load
from starling.engines.loop.run import Past, plan
from starling.errors import ConfigError, FinishedApart
from starling.launch.coordinator import listen
from tests.engines.drop_in_process import flat
from tests.engines.surviving_process import loss_of, make_model
from tests.warm_start import WarmPopen

PROGRAM = "tests.engines.surviving_process"
WITHIN = 100.0
"""Seconds within which learners end; the machine may be busy."""


class Loops:
    """Processes that join a loop by environment variables alone, as an operator or `srun` would start them."""

    def __init__(self, case: dict[str, Any], world: int, folder: Path, is_warm: bool) -> None:
        self.folder, self._case, self._world = folder, case, world
        self.processes: dict[int, WarmPopen] = {}
        self._all: list[WarmPopen] = []
        self.held, theirs = socket.socketpair()
        with theirs, listen("127.0.0.1", 0) as store, listen("127.0.0.1", 0) as link:
            self.port = int(store.getsockname()[1])
            if is_warm:  # otherwise learner 0 starts it, and loads torch
                files = [each.fileno() for each in (store, link, theirs)]
                self.coordinator = self._popen(-1, ["starling.launch.coordinator", *map(str, files)], files)

    def start(self, rank: int, *more: str) -> WarmPopen:
        """Start the process with a RANK."""
        process = self._popen(rank, [PROGRAM, json.dumps(self._case), str(self.folder), *more])
        self.processes[rank] = process
        return process

    def _popen(self, rank: int, arguments: list[str], files: Sequence[int] = ()) -> WarmPopen:
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }
        with (self.folder / f"learner-{rank}.log").open("ab") as log:
            process = WarmPopen(
                [sys.executable, "-m", *arguments], env={**os.environ, **place}, stdout=log, pass_fds=files
            )
        self._all.append(process)
        return process

    def said(self, rank: int) -> str:
        return (self.folder / f"learner-{rank}.log").read_text(encoding="utf-8")

    def await_file(self, name: str) -> str:
        """The content of a file that a learner writes."""
        deadline = time.monotonic() + WITHIN
        while not (path := self.folder / name).exists() or not path.read_text():
            assert time.monotonic() < deadline, f"no {name}: " + "".join(self.said(rank) for rank in self.processes)
            time.sleep(0.01)
        return path.read_text()

    def results(self, *ranks: int) -> list[dict[str, Tensor]]:
        """What these learners report; all of them must have ended well."""
        for rank in ranks:
            assert self.processes[rank].wait(WITHIN) == 0, self.said(rank)
        return [load_file(self.folder / f"result-{rank}.safetensors") for rank in ranks]

    def died(self, rank: int) -> float:
        """When a learner killed itself; it must have been killed."""
        assert self.processes[rank].wait(WITHIN) == -signal.SIGKILL, self.said(rank)
        return float(self.await_file(f"died-{rank}").split()[0])

    def kill(self) -> None:
        for process in self._all:
            process.kill()


@contextmanager
def loops(case: dict[str, Any], world: int, folder: Path, is_warm: bool = True) -> Iterator[Loops]:
    """Learners `0` to `world - 1` of one loop. In the end no process is left, nor the port in use."""
    started = Loops(case, world, folder, is_warm)
    try:
        for rank in range(world):
            started.start(rank)
        yield started
        started.held.close()
        if is_warm:
            assert started.coordinator.wait(WITHIN) == 0
        assert_nothing_is_left(started.port)
    finally:
        started.kill()


def assert_nothing_is_left(port: int) -> None:
    """Neither a process that has the port on its command line or in its environment, nor anything that listens."""
    deadline = time.monotonic() + WITHIN
    while left := [each for each in psutil.process_iter() if _belongs(each, port)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def _belongs(process: psutil.Process, port: int) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE or process.pid in WarmPopen.helpers():
            return False
        return process.environ().get("MASTER_PORT") == str(port) or str(port) in process.cmdline()
    except psutil.Error:
        return False


def check_survivors(
    results: list[dict[str, Tensor]], died: float, within: float, steps: int, is_alone: bool = True
) -> None:
    """They noticed, paused for less than `within` seconds, made all their steps, and agree. Unless they were alone for
    a while, the lost learner may have come back before their next step."""
    for each in results:
        assert int(each["membership"]) >= 1
        assert each["steps"].tolist()[1] >= steps
        assert each["worlds"].max() > each["worlds"].min() or not is_alone
        times = each["times"].tolist()
        pause = max(after - before for before, after in pairwise(times) if after >= died)
        assert pause <= within, pause
        assert torch.equal(each["final"], results[0]["final"])
        assert bool(each["final"].isfinite().all())
        assert float(each["loss"]) < 0.1 * float(loss_of(make_model(), 0).detach())


@pytest.mark.wide
@pytest.mark.parametrize(("strategy", "lost", "within"), [("adpsgd", 2, 2.0), ("allreduce", 0, 5.0)])
def test_three_of_four_finish_when_one_is_killed(strategy: str, lost: int, within: float, tmp_path: Path) -> None:
    """Any of them may be the one, also learner 0; the pause is within the bar."""
    case = {"strategy": strategy, "steps": 80, "seconds": 0.002, "deaths": {str(lost): 20}}
    with loops(case, 4, tmp_path) as started:
        died = started.died(lost)
        survivors = [rank for rank in range(4) if rank != lost]
        check_survivors(started.results(*survivors), died, within, 80)


@pytest.mark.parametrize(
    ("strategy", "children", "within"),
    [
        ("adpsgd", "helped", 2.0),
        pytest.param("allreduce", "helped", 5.0, marks=pytest.mark.wide),
        pytest.param("adpsgd", "loads", 2.0, marks=pytest.mark.wide),
    ],
)
def test_a_child_that_a_learner_forked_does_not_hide_its_death(
    strategy: str, children: str, within: float, tmp_path: Path
) -> None:
    """Whether a helper or the loading processes of a `DataLoader`: they live on, and the pause is as short as ever."""
    case = {"strategy": strategy, "steps": 80, "seconds": 0.002, "deaths": {"1": 20}, children: 1}
    with loops(case, 3, tmp_path) as started:
        died = started.died(1)
        pids = [int(pid) for pid in started.await_file("children").split()]
        assert all(psutil.pid_exists(pid) for pid in pids) and pids
        try:
            check_survivors(started.results(0, 2), died, within, 80)
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("strategy", "given"),
    [
        ("adpsgd", {}),
        ("allreduce", {}),
        pytest.param("async-diloco", {"every": 4}, marks=pytest.mark.wide),
        pytest.param(
            "decoupled-diloco", {"every": 8, "fragments": 2, "overlap": 2, "momentum": 0.5}, marks=pytest.mark.wide
        ),
    ],
)
def test_the_survivors_save_and_two_of_three_resume(strategy: str, given: dict[str, Any], tmp_path: Path) -> None:
    """And then three: the third is new."""
    options = {"checkpoints": str(tmp_path / "saved")} | given
    case = {"strategy": strategy, "steps": 60, "seconds": 0.002, "saves": 10, "options": options}
    (tmp_path / "first").mkdir()
    with loops(case | {"deaths": {"1": 25}}, 3, tmp_path / "first") as started:
        died = started.died(1)
        check_survivors(started.results(0, 2), died, 5.0, 60)
    newest = load(checkpoints_in(tmp_path / "saved")[-1])
    assert (newest.folder.name, newest.manifest.learners) == ("step-00000060", 2)
    for world, steps in ((2, 80), (3, 100)):
        (folder := tmp_path / str(world)).mkdir()
        with loops(case | {"steps": steps}, world, folder) as started:
            for each in started.results(*range(world)):
                assert each["steps"].tolist() == [steps - 20, steps, 20]
                assert bool(each["final"].isfinite().all())


@pytest.mark.parametrize("on_loss", ["continue", pytest.param("stop", marks=pytest.mark.wide)])
def test_a_child_that_a_learner_forked_may_end_as_any_program(on_loss: str, tmp_path: Path) -> None:
    """Its exit handlers end nobody's run, and its exit code is its own."""
    case = {"strategy": "adpsgd", "steps": 30, "forks": 0, "on_loss": on_loss}
    with loops(case, 2, tmp_path, is_warm=on_loss == "continue") as started:
        results = started.results(0, 1)
        assert started.await_file("child-ended") == "7"
    assert all(int(each["membership"]) == 0 and int(each["steps"][1]) == 30 for each in results)
    assert torch.equal(results[0]["final"], results[1]["final"])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("strategy", "options"),
    [("diloco", {"every": 8}), ("streaming-diloco", {"every": 8, "fragments": 2, "overlap": 2})],
)
def test_loops_of_epochs_end_together_after_a_loss(strategy: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Each process counts its own mini-batches, and the loss lets some of them skip a step: the last step is one for
    all, and so is the model."""
    case = {"strategy": strategy, "options": options, "steps": 10**6, "epochs": [61, 62, 63, 61], "deaths": {"3": 21}}
    with loops(case, 4, tmp_path) as started:
        started.died(3)
        results = started.results(0, 1, 2)
    assert len({int(each["steps"][1]) for each in results}) == 1
    assert [int(each["steps"][2]) for each in results] == [61, 62, 63]
    assert all(torch.equal(each["final"], results[0]["final"]) for each in results)


@pytest.mark.parametrize(("strategy", "options"), [("diloco", {"every": 4}), ("allreduce", {})])
def test_loops_whose_ends_are_too_far_apart_all_fail_alike(
    strategy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The same error on all of them, with one number for each learner, although others were lost before."""
    epochs = [60, 40, 60, 60]
    case = {"strategy": strategy, "options": options, "steps": 10**6, "epochs": epochs, "deaths": {"0": 21}}
    with loops(case, 4, tmp_path) as started:
        started.died(0)
        codes = [started.processes[rank].wait(WITHIN) for rank in (1, 2, 3)]
        said = [re.search("ProtocolError: (.*)", started.said(rank)) for rank in (1, 2, 3)]
    assert codes == [1, 1, 1]
    messages = {each[1] for each in said if each}
    assert len(messages) == 1 and None not in said
    message = r"learner 1 has closed after 4\d steps, but learner [23] (is in step|has closed after) \d+: under "
    assert re.match(message, messages.pop())


@pytest.mark.wide
def test_a_learner_that_finishes_apart_says_so_and_exits_with_a_code_of_its_own(tmp_path: Path) -> None:
    """It was stopped after the final consensus for longer than the time-out, and the others ended without it."""
    case = {"strategy": "adpsgd", "steps": 30, "stopped": 2, "timeout": 2.0}
    with loops(case, 3, tmp_path) as started:
        started.await_file("stopped")
        started.results(0, 1)
        os.kill(started.processes[2].pid, signal.SIGCONT)
        assert started.processes[2].wait(WITHIN) == FinishedApart.exit_code == 9
        assert "FinishedApart: learner 2 has finished apart from the others" in started.said(2)


def test_a_restarted_process_joins_and_continues_from_a_survivor(tmp_path: Path) -> None:
    """Learner 0 again, under the same RANK: with the others' weights and step, and the same model in the end."""
    case = {"strategy": "adpsgd", "steps": 60, "seconds": 0.002, "deaths": {"0": 10}, "until": 50}
    with loops(case, 3, tmp_path) as started:
        started.died(0)
        started.start(0, "restarted")
        results = started.results(0, 1, 2)
    began, reached, own = results[0]["steps"].tolist()
    assert 10 <= began < reached == 60
    assert own == reached - began
    assert set(results[0]["worlds"].tolist()) == {3}
    assert not torch.equal(results[0]["start"], flat(make_model()) + 10.0)
    for each in results:
        assert torch.equal(each["final"], results[0]["final"])
        assert float(each["loss"]) < 0.1 * float(loss_of(make_model(), 0).detach())
    assert all(int(each["membership"]) == 2 for each in results)


@pytest.mark.soak
@pytest.mark.parametrize(
    "strategy",
    ["delay-by-one", "delayed", "d2", "sgp", "local-sgd", "diloco", "streaming-diloco", "noloco"],
)
def test_every_strategy_of_equals_survives(strategy: str, tmp_path: Path) -> None:
    """One is killed, restarted, and joins; learners in step make their last step together."""
    options: dict[str, Any] = {"every": 4} if strategy in ("local-sgd", "diloco", "noloco") else {}
    options |= {"overlap": True} if strategy == "sgp" else {}
    case = {"strategy": strategy, "options": options, "steps": 60, "deaths": {"1": 21}, "until": 50}
    with loops(case, 4, tmp_path) as started:
        died = started.died(1)
        started.start(1, "restarted")
        results = started.results(0, 1, 2, 3)
    check_survivors([results[0], *results[2:]], died, WITHIN, 60, is_alone=False)
    assert results[1]["steps"].tolist()[1] == 60
    assert torch.equal(results[1]["final"], results[0]["final"])


@pytest.mark.parametrize("victim", [0, 3])
def test_a_super_learner_leaves_with_its_lost_learner_and_comes_back_whole(victim: int, tmp_path: Path) -> None:
    """The other super-learner continues, and its learners keep the same weights."""
    case = {"strategy": "hadpsgd", "options": {"per_node": 2}, "steps": 60, "deaths": {str(victim): 20}, "until": 40}
    with loops(case, 4, tmp_path) as started:
        started.died(victim)
        sibling = victim ^ 1
        assert started.processes[sibling].wait(WITHIN) == 1
        left = f"so learners {victim & 2} to {victim | 1} leave the run"
        assert f"PeerLost: learner {victim} was lost: its connection closed, {left}" in started.said(sibling)
        started.start(victim, "restarted")
        started.start(sibling, "restarted")
        results = started.results(0, 1, 2, 3)
    assert all(torch.equal(each["final"], results[0]["final"]) for each in results)
    assert all(int(each["steps"][1]) == 60 for each in results)
    others = [rank for rank in range(4) if rank not in (victim, sibling)]
    assert all(set(results[rank]["worlds"].tolist()) == {4, 2} for rank in others)
    assert all(float(each["loss"]) < 0.2 * float(loss_of(make_model(), 0).detach()) for each in results)


def test_half_a_super_learner_waits_for_the_other_half_and_the_last_super_learner_ends_whole(tmp_path: Path) -> None:
    """A restarted process that is alone takes no part; with nobody left to continue with, it hears so."""
    case: dict[str, Any] = {"strategy": "hadpsgd", "options": {"per_node": 2}, "steps": 900, "seconds": 0.01}
    case |= {"deaths": {"3": 20, "1": 500}, "timeout": 20.0}
    with loops(case, 4, tmp_path) as started:
        started.died(3)
        assert started.processes[2].wait(WITHIN) == 1
        started.start(3, "restarted")
        started.died(1)
        assert started.processes[0].wait(WITHIN) == 1
        assert "so learners 0 to 1 leave the run" in started.said(0)
        assert started.processes[3].wait(WITHIN) == 1
        # on a busy machine, it comes only when the run has ended
        assert re.search("no learner is left to continue with|the run is ending", started.said(3))


@pytest.mark.parametrize(("strategy", "world"), [("adpsgd", 3), pytest.param("local-sgd", 4, marks=pytest.mark.wide)])
def test_what_killed_learners_had_of_shared_samples_is_trained_on_by_the_others(
    strategy: str, world: int, tmp_path: Path
) -> None:
    """Each sample once in each epoch, without a call in the loop. One of the killed processes is started again."""
    seconds = [0.01, 0.003, 0.002, 0.002]
    case = {"strategy": strategy, "samples": 120, "dies": {"1": 0, "2": 4}, "seconds": seconds}
    with loops(case, world, tmp_path) as started:
        started.died(2)
        started.start(2, "restarted")
        started.died(1)
        for rank in {*range(world)} - {1}:
            assert started.processes[rank].wait(WITHIN) == 0, started.said(rank)
    trained = Counter(int(line) for path in tmp_path.glob("trained-*") for line in path.read_text().split())
    assert trained == dict.fromkeys(range(120), 4)


@pytest.mark.parametrize("victim", [0, 2], ids=["server", "other"])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        # with the default momentum, 0.9, the loss still swings after 80 steps
        ("decoupled-diloco", {"every": 4, "fragments": 2, "overlap": 1, "momentum": 0.5}),
        ("parameter-server", {}),
        ("async-diloco", {"every": 4, "rate": 0.7}),
        pytest.param("aeasgd", {"every": 4}, marks=pytest.mark.wide),
        pytest.param("parameter-server", {"update": "hybrid"}, marks=pytest.mark.wide),
        pytest.param("parameter-server", {"update": "summed", "sum": 2, "shards": 2}, marks=pytest.mark.wide),
    ],
)
def test_learners_survive_the_loss_of_a_server_or_another(
    strategy: str, options: dict[str, Any], victim: int, tmp_path: Path
) -> None:
    """In the end all have the same model, which has learnt."""
    rate = 0.01 if "sum" in options else 0.03  # a step with the sum of two stale gradients is twice as long
    case = {"strategy": strategy, "options": options, "rate": rate, "steps": 80, "deaths": {str(victim): 21}}
    with loops(case, 3, tmp_path) as started:
        started.died(victim)
        results = started.results(*(rank for rank in range(3) if rank != victim))
    assert torch.equal(results[0]["final"], results[1]["final"])
    worlds = {world for each in results for world in each["worlds"].tolist()}  # one may have ended before the loss
    assert worlds == {3, 2}
    assert all(float(each["loss"]) < 0.2 * float(loss_of(make_model(), 0).detach()) for each in results)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce"])
def test_learner_0_starts_the_coordinator_which_survives_it_and_ends_with_the_last(
    strategy: str, tmp_path: Path
) -> None:
    """Two die at once, learner 0 among them; another when all have made their last steps."""
    case = {"strategy": strategy, "steps": 60, "deaths": {"0": 20, "3": 20, "1": 60}}
    with loops(case, 5, tmp_path, is_warm=False) as started:
        for rank in (0, 1, 3):
            started.died(rank)
        results = started.results(2, 4)
    assert torch.equal(results[0]["final"], results[1]["final"])
    assert all(set(each["worlds"].tolist()) >= {5, 3} for each in results)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(12))
def test_any_deaths_at_any_steps_leave_survivors_with_one_model(seed: int, tmp_path: Path) -> None:
    """One or two learners, together or one soon after the other, also while the others regroup or have finished."""
    chance = random.Random(seed)
    strategy = ["adpsgd", "allreduce", "dpsgd", "delay-by-one", "local-sgd", "delayed"][seed % 6]
    world, first = chance.choice([3, 4, 5]), chance.randrange(40)
    lost = chance.sample(range(world), chance.choice([1, 2]))
    steps = [first, chance.choice([first, first + 1, first + 2, 44])]
    case = {"strategy": strategy, "steps": 44, "deaths": dict(zip(map(str, lost), steps, strict=False))}
    with loops(case, world, tmp_path) as started:
        for rank in lost:
            started.died(rank)
        results = started.results(*(rank for rank in range(world) if rank not in lost))
    assert all(torch.equal(each["final"], results[0]["final"]) for each in results)
    assert all(bool(each["final"].isfinite().all()) and int(each["steps"][1]) == 44 for each in results)


@pytest.mark.soak
def test_nothing_is_left_when_all_are_killed(tmp_path: Path) -> None:
    """Not even the coordinator, and its port is free."""
    case = {"strategy": "adpsgd", "steps": 10**6, "seconds": 0.01}
    with loops(case, 3, tmp_path, is_warm=False) as started:
        for rank in range(3):
            started.await_file(f"at-{rank}")
        for process in started.processes.values():
            process.kill()


@pytest.mark.soak
def test_without_the_coordinator_all_end_with_a_named_error(tmp_path: Path) -> None:
    """Soon, and no half of them continues."""
    case = {"strategy": "adpsgd", "steps": 10**6, "seconds": 0.01}
    with loops(case, 3, tmp_path) as started:
        for rank in range(3):
            started.await_file(f"at-{rank}")
        os.kill(started.coordinator.pid, signal.SIGKILL)
        for rank, process in started.processes.items():
            assert process.wait(30.0) == 1
            assert f"PeerLost: learner {rank} lost the coordinator of its run" in started.said(rank)
        assert started.coordinator.wait(WITHIN) == -signal.SIGKILL
        started.coordinator.returncode = 0


@pytest.mark.soak
def test_a_loop_that_fails_leaves_and_the_others_continue(tmp_path: Path) -> None:
    """Its own error is its own; the others say what it was."""
    case = {"strategy": "allreduce", "steps": 40, "fails": 1}
    with loops(case, 3, tmp_path) as started:
        assert started.processes[1].wait(WITHIN) == 1
        assert "ValueError: a bad mini-batch" in started.said(1)
        results = started.results(0, 2)
        assert "learner 1 failed: ValueError: a bad mini-batch: 2 learners continue" in started.said(0)
    assert torch.equal(results[0]["final"], results[1]["final"])


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce"])
def test_a_learner_stopped_for_too_long_is_lost_and_cannot_come_back(strategy: str, tmp_path: Path) -> None:
    """The others continue after the time-out; when it wakes, it ends with an error."""
    case = {"strategy": strategy, "steps": 200, "seconds": 0.005, "timeout": 8.0}
    with loops(case, 3, tmp_path) as started:
        started.await_file("at-2")
        os.kill(started.processes[2].pid, signal.SIGSTOP)
        results = started.results(0, 1)
        assert all(int(each["membership"]) == 1 for each in results)
        assert started.processes[2].poll() is None
        os.kill(started.processes[2].pid, signal.SIGCONT)
        assert started.processes[2].wait(WITHIN) == 1
        assert "PeerLost: learner 2 lost" in started.said(2)


def test_a_plan_copies_whom_it_must_and_keeps_steps_together() -> None:
    """Joiners copy the newest; with one model, so do those a step behind; what is final is final for all."""
    past = [Past(True, 7, False), Past(True, 8, False), Past(False, 0, False)]
    one_model = plan(past, has_one_model=True, is_in_step=True, keeps_state=False)
    assert (one_model.source, one_model.takers, one_model.num_done) == (1, (0, 2), (8, 8, 8))
    asynchronous = plan(past, has_one_model=False, is_in_step=False, keeps_state=False)
    assert (asynchronous.source, asynchronous.takers, asynchronous.num_done) == (1, (2,), (7, 8, 8))
    assert plan(past[:2], has_one_model=False, is_in_step=True, keeps_state=False).source is None
    assert plan(past[:2], has_one_model=False, is_in_step=True, keeps_state=True).source == 1
    at_first = plan([Past(False, 0, False)] * 3, has_one_model=False, is_in_step=False, keeps_state=False)
    assert (at_first.source, at_first.takers) == (0, (1, 2))
    ended = plan([Past(True, 9, False), Past(True, 8, True)], has_one_model=False, is_in_step=False, keeps_state=False)
    assert (ended.source, ended.takers) == (1, ())
    nodes = [Past(True, 7, False), Past(True, 6, False), Past(True, 3, False), Past(True, 4, False)] + past[2:] * 2
    found = plan(nodes, has_one_model=False, is_in_step=False, keeps_state=False, size_of_unit=2)
    assert (found.source, found.takers, found.num_done) == (0, (4, 5), (7, 7, 4, 4, 7, 7))
    assert found.within == ((0, (1,)), (3, (2,)))


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("adpsgd", {"on_loss": "restart"}, "on_loss: must be 'stop' or 'continue', got 'restart'"),
    ],
)
def test_what_cannot_survive_is_refused(strategy: str, options: dict[str, Any], message: str) -> None:
    """When joining, and by name."""
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=message):
        starling.join(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, **{"on_loss": "continue"} | options)


def test_a_single_loop_needs_no_coordinator() -> None:
    """Under plain python, `on_loss="continue"` changes nothing."""
    model = nn.Linear(2, 2)
    with starling.join(model, torch.optim.SGD(model.parameters(), lr=0.1), on_loss="continue") as learner:
        model(torch.ones(1, 2)).sum().backward()
        learner.step()
        assert (learner.num_steps, learner.learner_id, learner.membership, learner.world) == (1, 0, 0, 1)
