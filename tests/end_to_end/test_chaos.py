"""Half an hour in which learners are killed, stopped and started, and whole runs stopped and gone on with, at random.

`SOAK_MINUTES` (30) and `SOAK_SEED` (1) change how long, and what happens when. Each run of the demo's recipe is
disturbed until it ends, and then must have seen everything once, left nothing behind, and recognise as well as an
undisturbed one.
"""

import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from starling.checkpoint.reader import checkpoints_in
from starling.experiment.record import audit
from tests.warm_start import learners_of

MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "demo.yaml"
STRATEGIES = ("adpsgd", "allreduce")
FEWEST, MOST = 4, 6
LONGEST_RUN = 1500.0  # seconds, undisturbed
LONGEST_SILENCE = 300.0
"""Seconds in which a run that was not restarted must have saved something; they save every 15 s."""
WORSE = 2.0  # per cent, absolute
KILLED, STOPPED, LOST = -signal.SIGKILL, 128 + signal.SIGTERM, 3


@dataclass
class Run:
    """One experiment, from its beginning to its end through all that happens to it."""

    folder: Path
    name: str
    strategy: str
    random: random.Random
    happened: Counter[str] = field(default_factory=Counter)
    learners: dict[int, psutil.Process] = field(default_factory=dict)
    """All that were ever seen, by process."""
    joining: list["subprocess.Popen[str]"] = field(default_factory=list)
    process: "subprocess.Popen[str]" = field(init=False)
    begun: float = 0.0

    @property
    def experiment(self) -> Path:
        return self.folder / "exp" / self.name

    def begin(self, learners: int, *overrides: str) -> None:
        """Start training, from the newest checkpoint if there is one."""
        resume = [f"resume=exp/{self.name}"] if checkpoints_in(self.experiment / "checkpoints") else []
        command = ["train", str(RECIPE), f"name={self.name}", f"strategy={self.strategy}", f"learners={learners}"]
        with (self.folder / f"{self.name}.log").open("a") as log:
            self.process = starling(self.folder, [*command, *overrides, *resume], log)
        self.begun = time.time()

    def living(self) -> list[psutil.Process]:
        """The learners there are now."""
        found = [process for _, process in learners_of(self.process.pid)]
        self.learners.update({each.pid: each for each in found})
        return found

    def disturb(self) -> None:
        """Let something happen."""
        living = self.living()
        possible = ["pause", "stop"] if len(living) >= FEWEST else []
        possible += ["kill"] * 3 if len(living) > FEWEST - 1 else []
        possible += ["join"] * 3 if len(living) < MOST else []
        possible += ["crash"] if self.random.random() < 0.3 else []
        what = self.random.choice(possible)
        self.happened[what] += 1
        getattr(self, f"_{what}")(living)

    def _kill(self, living: Sequence[psutil.Process]) -> None:
        self.random.choice(living).kill()

    def _pause(self, living: Sequence[psutil.Process]) -> None:
        chosen = self.random.choice(living)
        chosen.suspend()
        self.wait(self.random.uniform(0.2, 3.0))
        chosen.resume()

    def _join(self, living: Sequence[psutil.Process]) -> None:
        self.joining.append(starling(self.folder, ["join", f"exp/{self.name}"], subprocess.DEVNULL))

    def _stop(self, living: Sequence[psutil.Process]) -> None:
        self.process.send_signal(signal.SIGTERM)

    def _crash(self, living: Sequence[psutil.Process]) -> None:
        self.process.kill()

    def wait(self, seconds: float) -> bool:
        """Whether the run ended, for whatever reason, within some seconds."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def to_its_end(self) -> None:
        """Disturb it until it has ended well, starting it again whenever it was ended."""
        self.begin(5, *self._how())
        self._let_begin()
        while True:
            if not self.wait(2.0 + self.random.expovariate(1 / 8.0)):
                assert not self._stalls(), f"{self.name} hangs: {self._log()}"
                try:
                    self.disturb()
                except psutil.NoSuchProcess:
                    continue  # it had just ended
                continue
            self._leaves_nothing()
            if self.process.returncode == 0:
                return
            assert self.process.returncode in {KILLED, STOPPED, LOST}, self._log()
            self.happened[f"ended with {self.process.returncode}"] += 1
            self.begin(self.random.randint(FEWEST, MOST), *self._how())
            self._let_begin()

    def _let_begin(self) -> None:
        """Usually wait until all have met: a learner killed before that ends the run, and nothing would come of it."""
        if self.random.random() < 0.25:
            return
        while not (self._are_met() or self.wait(0.5)):
            assert not self._stalls(), f"{self.name} hangs: {self._log()}"

    def _are_met(self) -> bool:
        try:
            status = json.loads((self.experiment / "status.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return False
        states = [learner["state"] for learner in status["learners"]]
        return status["pid"] == self.process.pid and not any(
            state.startswith(("starting", "silent")) for state in states
        )

    def _stalls(self) -> bool:
        """Whether nothing has come of the run for too long."""
        newest = self.begun
        for path in checkpoints_in(self.experiment / "checkpoints"):
            with suppress(FileNotFoundError):  # it was removed meanwhile
                newest = max(newest, path.stat().st_mtime)
        return time.time() - newest > LONGEST_SILENCE

    def _how(self) -> list[str]:
        return [
            f"on_loss={self.random.choice(['continue', 'replace'])}",
            "checkpoints.minutes=0.25",
            "engine.timeout_seconds=60",
        ]

    def _leaves_nothing(self) -> None:
        """No learner outlives its launcher for more than 10 s, whatever ended it."""
        _, alive = psutil.wait_procs(list(self.learners.values()), timeout=10.0)
        assert not alive, [each.cmdline() for each in alive]
        for joining in self.joining:
            joining.wait(60.0)
        self.joining.clear()

    def _log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text(errors="replace")[-3000:]

    def word_error_rate(self) -> float:
        """Of the test set, in per cent."""
        found = re.search(r"%WER ([\d.]+)", (self.experiment / "decode" / "wer-summary-test.txt").read_text())
        assert found is not None
        return float(found[1])


def starling(folder: Path, arguments: Sequence[str], output: object) -> "subprocess.Popen[str]":
    """A command of Starling's, in a folder of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "starling", *arguments],
        cwd=folder,
        stdout=output,  # type: ignore[call-overload]
        stderr=subprocess.STDOUT,
        text=True,
    )


def shared_memory() -> set[Path]:
    """What lies in the memory that processes share by name."""
    return set(Path("/dev/shm").glob("*"))


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    """Those that were begun; a failure leaves none of them running."""
    begun: list[Run] = []
    yield begun
    for run in begun:
        run.process.kill()


@pytest.mark.soak
@pytest.mark.timeout(0)  # each run has a limit of its own
def test_runs_that_are_disturbed_at_random_end_as_well_as_others(
    runs: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No hang, no orphan, nothing seen twice or lost, and at most 2 % more word errors."""
    monkeypatch.chdir(tmp_path)  # the recipe's folders are relative
    memory = shared_memory()
    undisturbed: dict[str, float] = {}
    for strategy in STRATEGIES:
        run = Run(tmp_path, f"plain-{strategy}", strategy, random.Random(SEED))
        runs.append(run)
        run.begin(5)
        assert run.process.wait(LONGEST_RUN) == 0
        undisturbed[strategy] = run.word_error_rate()
    deadline = time.monotonic() + 60 * MINUTES
    for number in count():
        strategy = STRATEGIES[number % len(STRATEGIES)]
        run = Run(tmp_path, f"disturbed-{number}", strategy, random.Random(SEED + number))
        runs.append(run)
        run.to_its_end()
        told: list[str] = []
        audit(run.experiment, told.append, Console(file=io.StringIO()))
        rate, plain = run.word_error_rate(), undisturbed[strategy]
        with capsys.disabled():
            happened = ", ".join(f"{times} x {what}" for what, times in sorted(run.happened.items()))
            sys.stdout.write(f"\n{run.name} ({strategy}): %WER {rate} (undisturbed {plain}); {happened}; {told[-1]}\n")
            sys.stdout.flush()
        assert "exactly once" in told[-1]
        assert rate <= plain + WORSE
        if time.monotonic() > deadline:
            break
    assert shared_memory() <= memory
