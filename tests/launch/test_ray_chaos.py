"""Half an hour in which machines of a Ray cluster die, are cut off and are added at random, while they train.

`SOAK_MINUTES` (30) and `SOAK_SEED` (1) change how long, and what happens when. Each run of the digits' recipe is
disturbed until the time is up or it ends. It must end well, see everything once, and recognise as runs usually do.
"""

import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import psutil
import pytest

from benchmarks.namespaces import NoNamespacesError
from benchmarks.ray_namespaces import Machine, Machines, environment, machines
from starling.launch.messages import Status, decode_file
from starling.timeouts import NODE_SILENT, UNREACHABLE
from tests.launch.test_ray import assert_all_seen_once, num_training

MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
ROOT = Path(__file__).parents[2]
TABLES = (ROOT / "data" / "fsdd.tsv", ROOT.parent / "shared" / "data" / "fsdd.tsv")
RECIPE = str(ROOT / "recipes" / "fsdd.yaml")
MACHINES, LEARNERS = 4, 4
WORST = 8.0
"""The highest word error rate in per cent; undisturbed runs have 1 to 4."""
SILENCE = 300.0
"""Seconds in which some learner must have made progress."""
STRATEGIES = ("adpsgd", "allreduce")


def has_learners(machine: Machine) -> bool:
    """Whether learner processes run there."""
    for process in machine.processes():
        with suppress(psutil.Error):
            if "RANK" in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


class Chaos:
    """A run on machines that come and go."""

    def __init__(self, cluster: Machines, folder: Path, strategy: str, data: list[str], dice: random.Random) -> None:
        self.cluster, self.dice = cluster, dice
        self.experiment = folder / "exp" / strategy
        self.happened: Counter[str] = Counter()
        launch = f"launch={{kind: ray, address: '{cluster.address}'}}"
        options = [f"name={strategy}", f"strategy={strategy}", f"learners={LEARNERS}", "on_loss=replace"]
        more = ["engine.threads=1", "engine.timeout_seconds=60", "batches.max_duration=10"]
        command = [sys.executable, "-m", "starling", "train", RECIPE, *data, launch]
        self.said = folder / f"{strategy}.log"
        with self.said.open("w") as said:
            inside = cluster.all[0].inside([*command, *options, *more], folder)
            self.process = subprocess.Popen(inside, stdout=said, stderr=subprocess.STDOUT, env=environment())

    def disturb_until(self, end: float) -> None:
        """Let things happen to it until a moment of `time.monotonic`, and then let it end undisturbed."""
        self._wait_until_they_train()
        while self.process.poll() is None and time.monotonic() < end:
            self._let_something_happen()
            self._wait(self.dice.uniform(5.0, 30.0))
        for machine in self.cluster.all[1:]:
            if machine.process is None:
                self.cluster.start(machine)
        newest, when = -1, time.monotonic()
        while not self._wait(5.0):
            if (done := sum(each.num_steps for each in self._status().learners)) != newest:
                newest, when = done, time.monotonic()
            assert time.monotonic() - when < SILENCE, f"it hangs: {self.text()}"

    def text(self) -> str:
        return self.said.read_text(errors="replace")[-4000:]

    def _let_something_happen(self) -> None:
        running = [machine for machine in self.cluster.all[1:] if machine.process is not None]
        absent = [machine for machine in self.cluster.all[1:] if machine.process is None]
        possible = ["add"] * 2 * len(absent) + (["kill", "vanish", "cut", "blink"] if len(running) > 1 else [])
        what = self.dice.choice(possible)
        getattr(self, f"_{what}")(self.dice.choice(absent if what == "add" else running))
        self.happened[what] += 1

    def _add(self, machine: Machine) -> None:
        self.cluster.start(machine)

    def _kill(self, machine: Machine) -> None:
        """Its processes die, and its kernel says so."""
        had = self._learners_on(machine)
        assert self.cluster.kill(machine) > 0
        self._assert_lost(machine, had)

    def _vanish(self, machine: Machine) -> None:
        """It loses its power: its kernel says nothing any more."""
        had = self._learners_on(machine)
        self.cluster.plug(machine, False)
        assert self.cluster.kill(machine) > 0
        self._assert_lost(machine, had)
        self.cluster.plug(machine, True)

    def _cut(self, machine: Machine) -> None:
        """Its cable is pulled out for longer than anybody waits: its learners end as well."""
        had = self._learners_on(machine)
        self.cluster.plug(machine, False)
        self._assert_lost(machine, had)
        deadline = time.monotonic() + UNREACHABLE + NODE_SILENT + 10.0
        while has_learners(machine) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not has_learners(machine)
        self.cluster.plug(machine, True)
        self.cluster.kill(machine)

    def _blink(self, machine: Machine) -> None:
        """Its cable is pulled out for less than that: nothing may be lost, though something may."""
        self.cluster.plug(machine, False)
        time.sleep(self.dice.uniform(0.2, 0.4 * UNREACHABLE))
        self.cluster.plug(machine, True)

    def _learners_on(self, machine: Machine) -> set[int]:
        return {
            each.learner_id
            for each in self._status().learners
            if each.rank is not None and each.node.split(" ")[0] == machine.address
        }

    def _assert_lost(self, machine: Machine, had: set[int]) -> None:
        """The learners that it had are members no more, or are on other machines, unless the run has just ended."""
        deadline = time.monotonic() + 30.0
        while had & self._learners_on(machine) and self.process.poll() is None and not self._is_over():
            assert time.monotonic() < deadline, f"{had} on {machine.address} were not lost: {self.text()}"
            time.sleep(0.2)

    def _is_over(self) -> bool:
        return self._status().stage != "training"

    def _wait_until_they_train(self) -> None:
        deadline = time.monotonic() + 600.0
        file = self.experiment / "status.json"
        while not file.exists() or sum(each.num_steps > 2 for each in self._status().learners) < LEARNERS:
            assert self.process.poll() is None and time.monotonic() < deadline, self.text()
            time.sleep(0.5)

    def _status(self) -> Status:
        return decode_file(Status, (self.experiment / "status.json").read_bytes())

    def _wait(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def word_error_rate(self) -> float:
        summary = (self.experiment / "decode" / "wer-summary-test.txt").read_text()
        found = re.search(r"%WER ([\d.]+)", summary)
        assert found is not None
        return float(found[1])


DRIVER = """
import sys
from pathlib import Path
import starling
from tests.launch.ray_job import make_job
if __name__ == "__main__":
    launch = {"kind": "ray", "address": sys.argv[1]}
    starling.train(make_job(Path("slow")), 2, name="toy", launch=launch, engine={"threads": 1})
"""


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_only_the_launcher_s_side_of_a_cut_cable_finishes(tmp_path: Path) -> None:
    """A machine is cut off: its learner ends, the other one finishes without it, and everything is seen once."""
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    (tmp_path / "slow").touch()
    (tmp_path / "driver.py").write_text(DRIVER, encoding="utf-8")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    experiment = tmp_path / "exp" / "toy"

    def wait_until(holds: Callable[[Status], bool], seconds: float) -> None:
        file, deadline = experiment / "status.json", time.monotonic() + seconds
        while not (file.exists() and holds(decode_file(Status, file.read_bytes()))):
            assert driver.poll() is None and time.monotonic() < deadline, (tmp_path / "said").read_text()
            time.sleep(0.1)

    try:
        with machines(2, tmp_path) as cluster, (tmp_path / "said").open("w") as said:
            other = cluster.all[1]
            cluster.start(other)
            command = cluster.all[0].inside([sys.executable, "driver.py", cluster.address], tmp_path)
            driver = subprocess.Popen(
                command, stdout=said, stderr=subprocess.STDOUT, env={**environment(), "PYTHONPATH": path}
            )
            try:
                wait_until(lambda status: num_training(status) == 2, 300.0)
                assert has_learners(other)
                cluster.plug(other, False)
                cut_at = time.monotonic()
                wait_until(lambda status: bool(status.losses), UNREACHABLE + NODE_SILENT + 5.0)
                while has_learners(other):
                    assert time.monotonic() - cut_at < UNREACHABLE + NODE_SILENT + 10.0
                    time.sleep(0.1)
                (tmp_path / "slow").unlink()
                assert driver.wait(300.0) == 0, (tmp_path / "said").read_text()
            finally:
                driver.kill()
                driver.wait()
    except NoNamespacesError as error:
        pytest.skip(f"no network namespaces here: {error}")
    assert_all_seen_once(experiment)


@pytest.mark.soak
@pytest.mark.timeout(60 * MINUTES + 3600)
def test_machines_that_die_are_cut_off_and_are_added_at_random(tmp_path: Path) -> None:
    """Runs end as well as others, `starling audit` finds nothing, and machines that were killed have nothing left."""
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    table = next((path for path in TABLES if path.exists()), None)
    if table is None:
        pytest.skip("no recordings of digits here")
    data = [f"data.corpus.path={table}", f"data.folder={tmp_path / 'data'}"]
    subprocess.run([sys.executable, "-m", "starling", "prepare", RECIPE, *data], check=True, stdout=subprocess.DEVNULL)
    end, happened, rates = time.monotonic() + 60 * MINUTES, Counter[str](), []
    for number in count():
        strategy, dice = STRATEGIES[number % 2], random.Random(SEED + number)
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            with machines(MACHINES, folder) as cluster:
                for machine in cluster.all[1:]:
                    cluster.start(machine)
                chaos = Chaos(cluster, folder, strategy, data, dice)
                try:
                    chaos.disturb_until(end)
                finally:
                    chaos.process.kill()
                    chaos.process.wait()
        except NoNamespacesError as error:
            pytest.skip(f"no network namespaces here: {error}")
        assert chaos.process.returncode == 0, chaos.text()
        happened += chaos.happened
        rates.append(chaos.word_error_rate())
        assert rates[-1] <= WORST, chaos.text()
        audit = [sys.executable, "-m", "starling", "audit", f"exp/{strategy}"]
        found = subprocess.run(audit, cwd=folder, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout + found.stderr
        if time.monotonic() > end:
            break
    sys.stdout.write(f"{dict(happened)}; WER {rates}\n")
    wanted = (happened["kill"] + happened["vanish"], happened["cut"], happened["add"])
    assert all(wanted) or MINUTES < 10, happened
