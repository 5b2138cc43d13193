"""Starling's `local-sgd` and `diloco` against torchft's, whether each rival of the benchmarks starts, and the storm of
torchft's DiLoCo. `make test-peers` runs it; elsewhere torchft is absent."""

import signal
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.peer_worker import Case
from benchmarks.peers import launched
from benchmarks.perceptron import perceptron
from benchmarks.rivals import COLUMNS
from benchmarks.runs import read_weights
from benchmarks.starting import Program, run_side_by_side
from benchmarks.torchft_storm import figures, parse, weather
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
    """A worker is killed, and another one paused; the replacement takes the state of its peers."""
    faults = [Kill(kill=1, at_seconds=5.0), Join(join=1, at_seconds=7.0), Pause(pause=2, at_seconds=9.0, seconds=1.0)]
    given = parse(["--every", "5", "--slow", "3", "--utterances", "60"])
    workers = weather(faults, 14.0, tmp_path, given)
    killed, replacement = workers.attempts[1], workers.attempts[4]
    assert len(workers.attempts) == 5 and not workers.mishaps
    assert [each.process.poll() for each in workers.attempts] == [0, -signal.SIGKILL, 0, 0, 0]
    assert killed.lines()[-1]["kind"] != "end"
    first = next(line for line in replacement.lines() if line["kind"] == "outer step")
    assert first["healed"] and first["committed"] and first["workers"] == 4
    assert workers.attempts[2].paused(0.0, float("inf")) == pytest.approx(1.0, abs=0.3)
    for goodput in (figures(workers.attempts, [])[name] for name in ("goodput", "strict")):
        assert 0.0 < goodput["ratio"] < 1.0
        assert sum(goodput.values()) == pytest.approx(1.0)
