"""Starling's `local-sgd` and `diloco` against torchft's, whether each rival of the benchmarks starts, and the storm of
torchft's DiLoCo. `make test-peers` runs it; elsewhere torchft is absent."""

import json
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks.peer_worker import Case
from benchmarks.peers import launched
from benchmarks.perceptron import perceptron
from benchmarks.rivals import COLUMNS
from benchmarks.runs import read_weights
from benchmarks.starting import Program, run_side_by_side
from benchmarks.storm_task import Sleeping
from benchmarks.torchft_storm import Attempt, figures, parse, weather
from starling.launch.launcher import loopback_store
from starling.launch.rendezvous import loopback_interface
from starling.training.faults import Join, Kill, Pause
from tests.torchft_process import WIDTHS

pytest.importorskip("torchft")
WORLD = 2
PAIRS = {"local_sgd": "torchft_local_sgd", "diloco": "torchft_diloco"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the models of two workers after three outer steps under each column."""
    folder = tmp_path_factory.mktemp("trained")
    columns = ",".join([*PAIRS, *PAIRS.values()])
    with loopback_store() as port:
        place = {
            "WORLD_SIZE": WORLD,
            "LOCAL_WORLD_SIZE": WORLD,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "GLOO_SOCKET_IFNAME": loopback_interface(),
        }
        program = [sys.executable, "-m", "tests.torchft_process", columns, str(folder)]
        programs = [Program(program, {**place, "RANK": rank, "LOCAL_RANK": rank}) for rank in range(WORLD)]
        run_side_by_side(programs, folder, limit=120.0)
    return folder


@pytest.mark.parametrize(("ours", "theirs"), PAIRS.items())
def test_three_outer_steps_are_those_of_torchft(trained: Path, ours: str, theirs: str) -> None:
    """The same data, inner SGD with momentum and outer optimizer give the same weights to 1e-6; they have moved."""
    begin = torch.nn.utils.parameters_to_vector(perceptron(WIDTHS).parameters()).detach()
    for rank in range(WORLD):
        expected = read_weights(trained / f"{theirs}-{rank}.bin")
        assert (expected - begin).abs().max() > 1e-2
        torch.testing.assert_close(read_weights(trained / f"{ours}-{rank}.bin"), expected, rtol=0.0, atol=1e-6)


def test_diloco_is_not_local_sgd(trained: Path) -> None:
    """The outer optimizer makes a difference that the comparison would see."""
    local, diloco = (read_weights(trained / f"{column}-0.bin") for column in PAIRS)
    assert (local - diloco).abs().max() > 1e-3


@pytest.mark.parametrize("column", [each for each in COLUMNS if each.startswith(("ddp", "decent", "torchft"))])
def test_each_rival_makes_its_first_steps(column: str, tmp_path: Path) -> None:
    (cell,), _ = launched([Case(column, (8, 16, 4), seconds=0.2)], tmp_path, WORLD)
    assert cell.ms_per_gradient > 0.0


def test_a_storm_of_torchft_has_a_goodput_and_leaves_no_process(tmp_path: Path) -> None:
    """A worker is killed, and another one paused; the replacement takes the state of its peers. The model learns."""
    faults = [Kill(kill=1, at_seconds=5.0), Join(join=1, at_seconds=7.0), Pause(pause=2, at_seconds=9.0, seconds=1.0)]
    workers = weather(faults, 14.0, tmp_path, parse(["--every", "5", "--seconds", "0.1"]))
    killed, replacement = workers.attempts[1], workers.attempts[4]
    assert len(workers.attempts) == 5 and not workers.mishaps
    assert [each.process.poll() for each in workers.attempts] == [0, -signal.SIGKILL, 0, 0, 0]
    assert killed.lines()[-1]["kind"] != "end"
    first = next(line for line in replacement.lines() if line["kind"] == "outer step")
    assert first["healed"] and first["committed"] and first["workers"] == 4
    assert workers.attempts[2].running(0.0, 1e9) == pytest.approx(1e9 - 1.0, abs=0.3)
    found = figures(workers.attempts, [])
    assert 0.0 < found["goodput"]["ratio"] < 1.0
    assert sum(found["goodput"].values()) == pytest.approx(1.0)
    task = Sleeping(0.0)
    assert found["loss"] < task.validation_loss(task.make_model()) - 0.1


def test_gradients_that_no_outer_step_has_are_lost_and_stopped_time_counts_nowhere(tmp_path: Path) -> None:
    """A worker makes two gradients for each of five outer steps, the last of them in a quorum beside a larger one. It
    is paused during a gradient for the fourth outer step, and is killed one gradient after the fifth."""
    lines: list[dict[str, Any]] = [{"kind": "ready", "at": 1.0}]
    results = [(True, False, 2), (False, False, 3), (True, True, 2), (True, False, 2), (True, False, 1)]
    for number, (committed, healed, workers) in enumerate(results):
        begin = 1.0 + 3.0 * number
        lines += [{"kind": "gradient", "loading": at, "begin": at, "at": at + 1.0} for at in (begin, begin + 1.0)]
        result = {"committed": committed, "healed": healed, "workers": workers, "regrouped": number == 0}
        step = number if committed else 0
        lines.append({"kind": "outer step", "begin": begin + 2.0, "at": begin + 3.0, "step": step, **result})
    other = {**lines[-1], "workers": 2, "at": 15.0}
    lines.append({"kind": "gradient", "loading": 16.0, "begin": 16.0, "at": 17.0})
    attempts = []
    for number, (noted, ended_at) in enumerate([(lines, 17.5), ([other], 0.0)]):
        log = tmp_path / f"worker-{number}.jsonl"
        log.write_text("".join(json.dumps(line) + "\n" for line in noted))
        attempts.append(Attempt(number, log, Mock(), Mock(), started_at=0.0, ended_at=ended_at))
    attempts[0].pauses.append((11.25, 11.75))
    assert figures(attempts, [])["seconds"] == {
        "machines": 17.0,
        "in_model": 3.5,
        "rolled_back": 6.0,
        "with_the_killed": 1.0,
        "waiting_for_peers": 4.0,
        "waiting_for_data": 0.0,
        "starting": 1.0,
        "regrouping": 1.0,
    }
