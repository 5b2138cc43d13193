"""Runs that are asked to stop, or save by the clock: what is in the checkpoint, and how each process ends."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from starling.checkpoint.reader import checkpoints_in, load
from starling.errors import Stopped
from starling.launch import launcher
from starling.launch.joiners import Changes
from starling.launch.launcher import launch
from starling.launch.messages import CanStop, LearnerMessage, values_of
from starling.launch.roster import Loss
from tests.launch.stopping_process import Run
from tests.warm_start import own_learner, own_learners, run_learners, start_learners

Noted = dict[str, Any]
OWN_SERVERS = {"servers": "own"}


def run_for(folder: Path, name: str, **what: Any) -> Run:
    """A run with a folder of its own."""
    (folder / name).mkdir()
    return Run(str(folder / name), **what)


def noted(run: Run, world: int) -> list[Noted]:
    """What each learner noted; none went wrong."""
    return [json.loads((Path(run.folder) / f"noted-{rank}.json").read_text()) for rank in range(world)]


def newest(run: Run) -> Path:
    return checkpoints_in(Path(run.folder) / "checkpoints")[-1]


def stop_by_themselves(run: Run, world: int, code: int) -> None:
    """Let learners without a launcher run until a signal reaches one of them; all end with the exit code given."""
    with start_learners(run.command(), world, Path(run.folder)) as learners:
        ends = [learners.end(rank) for rank in range(world)]
    assert [each for each, _ in ends] == [code] * world, ends


def assert_same_states(one: Path, other: Path, world: int) -> None:
    for rank in range(world):
        mine, theirs = (load_file(folder / f"learner-{rank}.safetensors") for folder in (one, other))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def assert_seen_once(runs: list[Run], world: int) -> None:
    """Runs that resume each other computed each mini-batch of the stream once, up to where the last one ended."""
    together = [each for run in runs for each in noted(run, world)]
    seen = Counter(step for each in together for step in each["seen"])
    assert set(seen.values()) == {1}
    for each in noted(runs[-1], world):
        assert each["num_done"] == len(seen)
        assert sorted(seen) + each["outstanding"] == list(range(len(seen)))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("strategy", "world", "number", "options", "workers"),
    [
        ("delay-by-one", 2, signal.SIGTERM, {}, 0),
        pytest.param("allreduce", 2, signal.SIGINT, {}, 0, marks=pytest.mark.soak),
        pytest.param("delay-by-one", 2, signal.SIGTERM, {}, 1, marks=pytest.mark.soak),
        pytest.param("dpsgd", 3, signal.SIGTERM, {}, 0, marks=pytest.mark.soak),
        pytest.param("delayed", 2, signal.SIGTERM, {"delay": 0}, 0, marks=pytest.mark.soak),
    ],
)
def test_synchronous_learners_that_stop_and_resume_end_in_the_same_bits(
    strategy: str, world: int, number: int, options: dict[str, Any], workers: int, tmp_path: Path
) -> None:
    """Without a launcher, one of them hears the signal and all stop at one barrier, with 128 + the signal; weights,
    moments and place in the data are then those of a run that was not stopped. Under `allreduce` that is so with two:
    torch sums the gradients of more in an order that it changes after its first step."""
    how: dict[str, Any] = {"strategy": strategy, "options": options, "workers": workers}
    stopped = run_for(tmp_path, "stopped", signals={world - 1: number}, **how)
    stop_by_themselves(stopped, world, 128 + number)
    done = noted(stopped, world)[0]["num_done"]
    assert 100 <= done == load(newest(stopped)).manifest.position.num_done
    resumed = run_for(tmp_path, "resumed", resume=str(newest(stopped)), steps=done + 30 * world, **how)
    straight = run_for(tmp_path, "straight", steps=done + 30 * world, **how)
    for run in (resumed, straight):
        run_learners(run.command(), world, Path(run.folder))
    assert newest(resumed).name == newest(straight).name
    assert_same_states(newest(resumed), newest(straight), world)
    assert_seen_once([stopped, resumed], world)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("strategy", "world", "options"),
    [
        ("adpsgd", 3, {}),
        ("parameter-server", 3, OWN_SERVERS),
        pytest.param("hogwild", 2, {}, marks=pytest.mark.soak),
        pytest.param("parameter-server", 2, {}, marks=pytest.mark.soak),
        pytest.param("parameter-server", 3, OWN_SERVERS | {"update": "hybrid"}, marks=pytest.mark.soak),
        pytest.param("parameter-server", 3, {"update": "synchronous"}, marks=pytest.mark.soak),
        pytest.param("hadpsgd", 4, {"per_node": 2}, marks=pytest.mark.soak),
        pytest.param("delayed", 2, {"delay": 3}, marks=pytest.mark.soak),
    ],
)
def test_asynchronous_learners_that_stop_and_resume_see_everything_once(
    strategy: str, world: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """All of them hear the signal, as from Slurm; nothing is left unfinished, and a resume does the rest."""
    how: dict[str, Any] = {"strategy": strategy, "options": options}
    everybody = dict.fromkeys(range(world), signal.SIGTERM)
    stopped = run_for(tmp_path, "stopped", signals={0: signal.SIGTERM} if world == 2 else everybody, **how)
    stop_by_themselves(stopped, world, 128 + signal.SIGTERM)
    assert_seen_once([stopped], world)
    done = noted(stopped, world)[0]["num_done"]
    resumed = run_for(tmp_path, "resumed", resume=str(newest(stopped)), steps=done + 60, **how)
    run_learners(resumed.command(), world, Path(resumed.folder))
    assert_seen_once([stopped, resumed], world)


@pytest.mark.wide
def test_checkpoints_by_the_clock_hold_what_a_run_to_that_place_ends_in(tmp_path: Path) -> None:
    """In step, each is exact: the state of all after the mini-batches that it counts, and of none behind them."""
    timed = run_for(
        tmp_path, "timed", strategy="delay-by-one", minutes=0.002, signals={0: signal.SIGTERM}, at_step=1, at_barrier=3
    )
    stop_by_themselves(timed, 2, 128 + signal.SIGTERM)
    saved = checkpoints_in(Path(timed.folder) / "checkpoints")
    assert [len(each["barriers"]) for each in noted(timed, 2)] == [len(saved) - 1] * 2
    assert len(saved) >= 4
    middle = saved[1]
    position = load(middle).manifest.position
    assert not position.outstanding
    assert 0 < position.num_done < noted(timed, 2)[0]["num_done"]
    short = run_for(tmp_path, "short", strategy="delay-by-one", steps=position.num_done)
    run_learners(short.command(), 2, Path(short.folder))
    assert_same_states(middle, newest(short), 2)


@pytest.mark.soak
def test_no_learner_waits_for_a_slow_one_to_agree_on_a_barrier(tmp_path: Path) -> None:
    """While one asynchronous learner computes for seconds, the other passes several barriers, which it saves when both
    have passed them."""
    pause = {"learner": 1, "after": 20, "seconds": 3.0}
    run = run_for(tmp_path, "run", strategy="adpsgd", options={"pattern": "pairs"}, minutes=0.005, pause=pause,
                  signals={1: signal.SIGTERM}, at_step=100)  # fmt: skip
    stop_by_themselves(run, 2, 128 + signal.SIGTERM)
    fast, slow = noted(run, 2)
    begin, end = max(pairwise(slow["steps_at"]), key=lambda pair: pair[1] - pair[0])
    assert end - begin >= 3.0
    meanwhile = [step for step, at in zip(fast["seen"], fast["steps_at"], strict=True) if begin < at < end]
    assert sum(meanwhile[0] < place < meanwhile[-1] for place in fast["barriers"]) >= 3
    assert fast["barriers"] == slow["barriers"]
    for checkpoint in checkpoints_in(Path(run.folder) / "checkpoints"):
        assert load(checkpoint).manifest.world == 2


class When:
    """Does something once a learner has come to some step of a run that can be stopped."""

    def __init__(self, do: Any, world: int, from_step: int = 100) -> None:
        self.do, self.world, self.from_step = do, world, from_step
        self.can_stop: set[int] = set()
        self.is_done = False

    def __call__(self, rank: int, message: LearnerMessage) -> None:
        told: dict[str, Any] = dict(values_of(message))
        if isinstance(message, CanStop):
            self.can_stop.add(rank)
        if not self.is_done and len(self.can_stop) == self.world and told.get("step", 0) >= self.from_step:
            self.is_done = True
            self.do()


@pytest.mark.parametrize(
    ("number", "workers"), [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 1, marks=pytest.mark.soak)]
)
def test_a_signal_to_the_launcher_lets_all_learners_save_and_end(
    number: signal.Signals, workers: int, tmp_path: Path
) -> None:
    """The launcher says which signal it was, and everything that was computed is in the newest checkpoint."""
    run = run_for(tmp_path, "run", strategy="adpsgd", workers=workers)
    when = When(lambda: os.kill(os.getpid(), number), 2)
    with pytest.raises(Stopped, match=f"^stopped by {number.name}$") as stopped:
        launch(run.command(), 2, tmp_path, when)
    assert stopped.value.exit_code == 128 + number
    assert stopped.value.has_saved
    assert_seen_once([run], 2)
    assert load(newest(run)).manifest.position.num_done == noted(run, 2)[0]["num_done"]
    assert not list(own_learners())


def test_learners_that_have_learnt_enough_save_and_end_without_an_error(tmp_path: Path) -> None:
    """Before their budget is spent; everything that was computed is in the newest checkpoint."""
    run = run_for(tmp_path, "run", strategy="adpsgd")
    when = When(lambda: None, 2)
    assert launch(run.command(), 2, tmp_path, when, Changes(is_enough=lambda: when.is_done)) == []
    assert_seen_once([run], 2)
    assert 0 < noted(run, 2)[0]["num_done"] == load(newest(run)).manifest.position.num_done
    assert not list(own_learners())


@pytest.mark.parametrize("whom", ["one learner", pytest.param("everybody", marks=pytest.mark.soak)])
def test_a_signal_to_the_learners_stops_all_of_them_as_one_to_the_launcher_does(whom: str, tmp_path: Path) -> None:
    """Slurm and systemd may signal every process there is, loading processes included: no learner ends before all
    have saved."""
    run = run_for(tmp_path, "run", strategy="delay-by-one", workers=1 if whom == "everybody" else 0)

    def signal_them() -> None:
        if whom == "one learner":
            own_learner(1).terminate()
            return
        for each in (own_learner(0), own_learner(1)):
            os.killpg(each.pid, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match=r"^stopped by SIGTERM$"):
        launch(
            run.command(), 2, tmp_path, when := When(signal_them, 2, from_step=100 if whom == "one learner" else 8000)
        )
    assert when.is_done
    assert_seen_once([run], 2)
    assert load(newest(run)).manifest.position.num_done == noted(run, 2)[0]["num_done"]
    assert not list(own_learners())


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["adpsgd", "delay-by-one"])
def test_survivors_of_a_learner_that_dies_while_a_barrier_is_wanted_save_and_end(strategy: str, tmp_path: Path) -> None:
    """The checkpoint barrier requested in one membership is agreed on in the next, by the learners that are left."""
    run = run_for(tmp_path, "run", strategy=strategy, minutes=0.002)
    losses: list[Loss] = []
    changes = Changes("continue", on_lost=losses.append)

    def harm() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        own_learner(2).kill()

    with pytest.raises(Stopped, match=r"^stopped by SIGTERM$"):
        launch(run.command(), 3, tmp_path, when := When(harm, 3), changes)
    assert when.is_done
    assert [loss.learner for loss in losses] == [2]
    ends = noted(run, 2)
    position = load(newest(run)).manifest.position
    assert {each["num_done"] for each in ends} == {position.num_done}
    assert load(newest(run)).manifest.world == 2
    resumed = run_for(tmp_path, "resumed", strategy=strategy, resume=str(newest(run)), steps=position.num_done + 20)
    run_learners(resumed.command(), 2, Path(resumed.folder))
    assert not list(own_learners())


@pytest.mark.soak
def test_learners_that_do_not_save_in_time_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is stopped: everything ends before a scheduler would end it."""
    monkeypatch.setattr(launcher, "STOP", 1.0)
    run = run_for(tmp_path, "run", strategy="delay-by-one")

    def harm() -> None:
        own_learner(1).suspend()
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="stopped by SIGTERM; the learners had not saved after 1 s") as stopped:
        launch(run.command(), 2, tmp_path, when := When(harm, 2))
    assert when.is_done
    assert not stopped.value.has_saved
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert not list(own_learners())


@pytest.mark.soak
def test_a_second_signal_does_not_wait_for_anybody_to_save(tmp_path: Path) -> None:
    """Of learners that would save, one is stopped: the second signal ends the launcher and all of them at once."""
    run = replace(run_for(tmp_path, "run", strategy="delay-by-one"), signals={1: signal.SIGSTOP})
    program = (
        "import sys; from pathlib import Path; from starling.launch.launcher import launch\n"
        "from starling.launch.messages import values_of\n"
        f"launch({run.command()!r}, 2, Path({str(tmp_path)!r}), "
        "lambda rank, message: print(rank, values_of(message).get('step', -1), flush=True))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    left = []
    for text in launcher.stdout:
        rank, step = map(int, text.split())
        if rank == 1 and step >= 100:
            left = psutil.Process(launcher.pid).children(recursive=True)
            break
    launcher.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(timeout=1.0)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=4) == 128 + signal.SIGTERM
    launcher.stdout.close()
    _, alive = psutil.wait_procs(left, timeout=10)
    assert len(left) == 3  # one of them forked the learners
    assert not alive


def test_a_second_signal_ends_a_learner_without_a_launcher_at_once(tmp_path: Path) -> None:
    """Though it waits for another that does not come to the barrier."""
    run = run_for(tmp_path, "run", strategy="delay-by-one", signals={1: signal.SIGSTOP})
    with start_learners(run.command(), 2, Path(run.folder)) as learners:
        other = psutil.Process(learners.pids[1])
        while other.status() != psutil.STATUS_STOPPED:
            assert learners.is_running(0)
        os.kill(learners.pids[0], signal.SIGTERM)
        with pytest.raises(TimeoutError):
            learners.end(0, within=1.0)
        os.kill(learners.pids[0], signal.SIGINT)
        assert learners.end(0, within=5.0)[0] == 128 + signal.SIGINT
