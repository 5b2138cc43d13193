"""Real processes: started together, ended together, none left behind."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from starling.errors import DataError, PeerLost, StarlingError, Stopped
from starling.launch.launcher import launch
from starling.launch.messages import LearnerMessage, values_of
from tests.launch.unequal_process import STEPS
from tests.warm_start import WarmPopen, own_learner, own_learners, start_learners


def command(mode: str) -> list[str]:
    return [sys.executable, "-m", "tests.launch.learner_process", mode]


def learners_of(parent: int | None = None) -> list[psutil.Process]:
    """The learner processes of this test, and whatever they started."""
    others = OTHERS | WarmPopen.helpers()
    return [process for process in psutil.Process(parent).children(recursive=True) if process.pid not in others]


OTHERS: set[int] = set()
"""Children of this process that were there before the test, such as the resource tracker of multiprocessing."""


@pytest.fixture(autouse=True)
def only_own_processes() -> None:
    OTHERS.clear()
    OTHERS.update(process.pid for process in psutil.Process().children(recursive=True))


def step_of(message: LearnerMessage) -> int:
    """The step that a message tells of; -1 for any other."""
    step = values_of(message).get("step", -1)
    assert isinstance(step, int)
    return step


class At:
    """Does something, once, when a learner has reached a step."""

    def __init__(self, rank: int, step: int, action: Any) -> None:
        self.rank, self.step, self.action = rank, step, action
        self.fired = False
        self.seen: Counter[int] = Counter()

    def __call__(self, rank: int, message: LearnerMessage) -> None:
        self.seen[rank] += 1
        if not self.fired and rank == self.rank and step_of(message) >= self.step:
            self.fired = True
            self.action()


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory: pytest.TempPathFactory) -> dict[int, "GoodRun"]:
    """Two runs of different sizes at the same time, by their number of learners."""
    runs = {world: GoodRun(tmp_path_factory.mktemp(f"run-of-{world}")) for world in (2, 3)}
    threads = [threading.Thread(target=each.launch, args=[world]) for world, each in runs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return runs


class GoodRun:
    """A run without trouble: what its learners sent, and the processes that were left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights: dict[int, list[float]] = {}
        self.heard_of: set[int] = set()
        self.ended_well = False

    def launch(self, world: int) -> None:
        launch(command("allreduce/short"), world, self.folder, self._on_message)
        self.ended_well = True

    def _on_message(self, rank: int, message: LearnerMessage) -> None:
        self.heard_of.add(rank)
        told: dict[str, Any] = dict(values_of(message))
        if "weights" in told:
            self.weights[rank] = told["weights"]


def test_learners_that_finish_leave_nothing_behind(side_by_side: dict[int, GoodRun]) -> None:
    """A good run ends with exit code 0 of all, the same weights on all, a log each and no process."""
    for world, done in side_by_side.items():
        assert done.ended_well
        assert done.weights.keys() == set(range(world))
        assert all(weights == done.weights[0] for weights in done.weights.values())
        assert sorted(path.name for path in done.folder.iterdir()) == [f"learner-{rank}.log" for rank in range(world)]
    assert not list(own_learners())


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [1, pytest.param(0, marks=pytest.mark.wide)])
def test_a_learner_ten_times_slower_ends_at_most_about_one_of_its_gradients_after_the_others(
    num_workers: int, tmp_path: Path
) -> None:
    """Although it draws ahead, and its loading processes load ahead; every mini-batch is computed exactly once."""
    told: list[tuple[int, dict[str, Any]]] = []
    program = [sys.executable, "-m", "tests.launch.unequal_process", str(num_workers)]
    launch(program, 3, tmp_path, lambda rank, message: told.append((rank, dict(values_of(message)))))
    steps = [(rank, message) for rank, message in told if "step" in message]
    assert sorted(message["step"] for _, message in steps) == list(range(STEPS))
    assert all(message["is_loaded_ahead"] == (num_workers > 0) for _, message in steps)
    by = Counter(rank for rank, _ in steps)
    assert by[0] >= 6 and by[0] < by[1] / 4 and by[0] < by[2] / 4
    last_of_others = max(place for place, (rank, _) in enumerate(steps) if rank != 0)
    assert len(steps) - 1 - last_of_others <= 1


def test_two_runs_on_one_machine_never_meet(side_by_side: dict[int, GoodRun]) -> None:
    """Each launcher has a store and a port of its own."""
    assert {world: len(done.heard_of) for world, done in side_by_side.items()} == {2: 2, 3: 3}
    assert side_by_side[2].weights[0] != side_by_side[3].weights[0]


@pytest.mark.parametrize(
    "mode",
    [
        "allreduce",
        "adpsgd/loading",
        *(
            pytest.param(mode, marks=pytest.mark.soak)
            for mode in ("delay-by-one", "delay-by-one/loading", "dpsgd", "adpsgd")
        ),
    ],
)
def test_a_killed_learner_is_named_and_the_others_are_ended(mode: str, tmp_path: Path) -> None:
    """kill -9 of one learner: one message that says which learner, how and when; no orphan.

    One strategy in step, and one with threads and loading processes; `make soak` has the others.
    """
    kill = At(rank=1, step=30, action=lambda: own_learner(1).kill())
    with pytest.raises(
        PeerLost, match=r"learner 1 was killed by SIGKILL \(last reported: step \d+\); its log: .*learner-1.log"
    ):
        launch(command(mode), 3, tmp_path, kill)
    assert kill.fired
    assert not learners_of()


@pytest.mark.parametrize(
    ("mode", "where"),
    [
        ("delay-by-one/dies", "a mean, round 1"),
        pytest.param("dpsgd/dies", "(sending to|receiving from) learner [012], round 1", marks=pytest.mark.wide),
        ("adpsgd/dies", "(sending to|receiving from) learner [012], after [0-9]+ claims"),
    ],
)
def test_survivors_name_the_learner_they_lost(mode: str, where: str, tmp_path: Path) -> None:
    """gloo names a network address; without a launcher, the survivors find out which learner is silent and say when."""
    with start_learners(command(mode), 3, tmp_path) as learners:
        ends = [learners.end(rank) for rank in range(3)]
    assert ends[2][0] == -signal.SIGKILL
    for rank in (0, 1):
        assert re.search(f"PeerLost: learner {rank} lost learner 2 in {where}", ends[rank][1]), ends[rank]


@pytest.mark.parametrize("strategy", ["allreduce", pytest.param("adpsgd", marks=pytest.mark.soak)])
def test_an_error_of_one_learner_is_raised_by_the_launcher(strategy: str, tmp_path: Path) -> None:
    """The cause is reported, not the losses that it brought to the others, under whichever strategy (`make soak`)."""
    with pytest.raises(DataError, match=r"utterance u21: 0.0 s of audio"):
        launch(command(f"{strategy}/failing"), 2, tmp_path)
    assert not learners_of()


@pytest.mark.parametrize(
    ("mode", "difference"),
    [
        ("allreduce/digests", r"differ in configuration: 'seed \d' and 'seed \d'"),
        ("allreduce/strategies", r"differ in strategy: '(allreduce|delay-by-one)' and '(allreduce|delay-by-one)'"),
    ],
)
def test_learners_that_differ_are_refused_in_the_greeting(mode: str, difference: str, tmp_path: Path) -> None:
    """Both values are shown, before the first tensor travels."""
    with start_learners(command(mode), 2, tmp_path) as learners:
        ends = [learners.end(rank) for rank in range(2)]
    assert all(code > 0 for code, _ in ends), ends
    assert any(re.search(f"ProtocolError: .*{difference}", said) for _, said in ends), ends


def test_a_program_that_fails_to_start_is_named_with_its_log(tmp_path: Path) -> None:
    """For a learner that exits without a message, the error still says which one and where to look."""
    with pytest.raises(StarlingError, match=r"learner [01] exited with code 1 \(last reported: starting\); its log: "):
        launch([sys.executable, "-c", "raise SystemExit(1)"], 2, tmp_path)


def test_all_listening_sockets_are_on_loopback(tmp_path: Path) -> None:
    """The store and gloo listen on 127.0.0.1 and nowhere else."""
    addresses: set[str] = set()

    def look() -> None:
        for process in [psutil.Process(), *learners_of()]:
            listening = [c for c in process.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
            addresses.update(connection.laddr.ip for connection in listening)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        launch(command("delay-by-one"), 2, tmp_path, At(rank=0, step=10, action=look))
    assert addresses == {"127.0.0.1"}


WAITING = """
import signal
from starling.launch.link import Link
from starling.launch.messages import Activity
Link.from_environment().send(Activity(values={"step": 10}))
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("number", "program"),
    [(signal.SIGTERM, command("allreduce")), (signal.SIGINT, [sys.executable, "-c", WAITING])],
    ids=["SIGTERM", "SIGINT"],
)
def test_a_signal_ends_everything_with_the_shells_exit_code(
    number: signal.Signals, program: list[str], tmp_path: Path
) -> None:
    """128 + the signal, and no process left, be they learners at work or any program."""
    stop = At(rank=0, step=10, action=lambda: os.kill(os.getpid(), number))
    with pytest.raises(Stopped) as stopped:
        launch(program, 2, tmp_path, stop)
    assert stopped.value.exit_code == 128 + number
    assert not learners_of()


@pytest.mark.wide
def test_learners_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    """kill -9 of the launcher itself leaves no orphan, loading processes included."""
    program = (
        "import sys; from pathlib import Path; from starling.launch.launcher import launch\n"
        "from starling.launch.messages import values_of\n"
        f"launch({command('adpsgd/loading')!r}, 2, Path({str(tmp_path)!r}), "
        "lambda rank, message: print(rank, values_of(message).get('step', -1), flush=True))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    if launcher.stdout is None:
        raise RuntimeError("no pipe")
    for line in launcher.stdout:
        if int(line.split()[1]) > 20:
            break
    left = learners_of(launcher.pid)
    assert len(left) >= 4
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive


@pytest.mark.wide
def test_a_killed_learner_leaves_no_shared_memory_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading processes clean up their semaphores and sockets, however their learner ended."""
    temporary = Path(tempfile.mkdtemp())
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    semaphores: set[Path] = set()

    def harm() -> None:
        while not semaphores:  # loading processes start while their learners compute
            maps = (each.path for process in learners_of() for each in process.memory_maps())
            semaphores.update(Path(path) for path in maps if "/sem.mp-" in path)
        assert list(temporary.iterdir())
        own_learner(1).kill()

    kill = At(rank=1, step=10, action=harm)
    with pytest.raises(PeerLost):
        launch(command("delay-by-one/loading"), 2, tmp_path, kill)
    assert kill.fired
    assert semaphores
    assert not [path for path in semaphores if path.exists()]
    temporary.rmdir()  # it is empty


@pytest.mark.wide
@pytest.mark.parametrize(
    ("strategy", "where"),
    [("delay-by-one", "a mean"), pytest.param("adpsgd", "(sending|receiving) .*", marks=pytest.mark.wide)],
)
def test_a_learner_that_stops_for_longer_than_the_time_out_is_lost(strategy: str, where: str, tmp_path: Path) -> None:
    """Means of vectors obey `timeout_seconds` too; a stopped learner is named and then ended."""
    stopped: list[int] = []
    with pytest.raises(PeerLost, match=rf"learner 1 lost learner 0 in {where}, (round|after) \d+ "):
        launch(
            command(f"{strategy}/stops"),
            2,
            tmp_path,
            lambda rank, said: stopped.extend([rank] * ("stops" in values_of(said))),
        )
    assert stopped == [0]
    assert not learners_of()


@pytest.mark.wide
def test_a_second_signal_ends_at_once_even_a_learner_that_is_stopped(tmp_path: Path) -> None:
    """No process is left that could not see the launcher's end."""
    program = (
        "import sys; from pathlib import Path; from starling.launch.launcher import launch\n"
        "from starling.launch.messages import values_of\n"
        f"launch({command('delay-by-one/stops')!r}, 2, Path({str(tmp_path)!r}), "
        "lambda rank, message: print(rank, values_of(message).get('stops', False), flush=True))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    if launcher.stdout is None:
        raise RuntimeError("no pipe")
    assert any("True" in line for line in launcher.stdout)
    left = learners_of(launcher.pid)
    launcher.send_signal(signal.SIGTERM)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=4) in (128 + signal.SIGTERM, 128 + signal.SIGINT)
    launcher.stdout.close()
    _, alive = psutil.wait_procs(left, timeout=10)
    assert len(left) == 3  # one of them forked the learners
    assert not alive


FLOOD = """
import os, sys
from starling.launch.link import Link
from starling.launch.messages import Activity
line = Link.from_environment()
if os.environ["RANK"] == "0":
    line.send(Activity("x" * 20_000_000))
    sys.exit(9)
while True:
    line.send(Activity("talking"))
"""


@pytest.mark.wide
def test_a_learner_that_never_stops_talking_does_not_keep_a_failed_run_alive(tmp_path: Path) -> None:
    """After a failure the launcher listens for a moment only; a message of 20 MB takes no time worth the name."""
    with pytest.raises(StarlingError, match=r"learner 0 exited with code 9 \(last reported: x+\)"):
        launch([sys.executable, "-c", FLOOD], 2, tmp_path)
    assert not learners_of()
