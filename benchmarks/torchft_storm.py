"""torchft's DiLoCo in the storm of `starling storm benchmarks/storm.yaml --real`: its goodput, as ours is counted.

Run as `make bench-storm`; the figures are also in `torchft-storm.json`. A lighthouse and four workers, each a replica
group of its own, train the task of `storm_task`. Workers are killed, replaced and paused at the times that `starling
storm` draws. Like our learners, they are forked from a process that has imported torch.
"""

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from starling.experiment.simulate import storm
from starling.launch.process import Forked, Preloaded, preloading
from starling.launch.rendezvous import loopback_interface
from starling.reporting.goodput import Goodput
from starling.training.faults import Fault, Kill, Pause, at_times

Seconds = float
WORLD = 4
MODULES = ("torchft", "torchft.local_sgd", "benchmarks.peer_worker", "benchmarks.storm_task")
LOOK_EVERY: Seconds = 0.02
GRACE: Seconds = 90.0
"""Time after the storm within which all workers must have made their last outer step."""


@dataclass
class Attempt:
    """One process of a worker."""

    worker: int
    log: Path
    process: Forked
    line: socket.socket
    started_at: float
    ended_at: float = 0.0
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """Times at which the process was stopped and continued."""

    def lines(self) -> list[dict[str, Any]]:
        """What the process noted; a line that it could not finish is left out."""
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def kill(self) -> None:
        """Kill the process, if it runs."""
        self.process.kill()
        self.process.wait()
        self.line.close()
        self.ended_at = self.ended_at or time.monotonic()

    def running(self, begin: float, end: float) -> Seconds:
        """The part of an interval in which the process was not stopped."""
        return end - begin - sum(max(0.0, min(end, to) - max(begin, at)) for at, to in self.pauses)


@dataclass
class Sums:
    """The time of all workers, in seconds. Time in which a worker is stopped counts nowhere."""

    machines: Seconds = 0.0
    in_model: Seconds = 0.0
    """Time for gradients that an outer step has put into the model."""
    rolled_back: Seconds = 0.0
    """Time for gradients that torchft threw away: the outer step was not committed, the worker took the state of
    another one, or a larger quorum made the same outer step without it."""
    with_the_killed: Seconds = 0.0
    """Time for gradients that a killed worker had finished since its last outer step."""
    waiting_for_peers: Seconds = 0.0
    waiting_for_data: Seconds = 0.0
    starting: Seconds = 0.0
    regrouping: Seconds = 0.0

    def add(self, attempt: Attempt, largest: Mapping[int, int]) -> None:
        """Add the time of one process; `largest` contains the size of the largest quorum of each outer step."""
        pending, lines = 0.0, attempt.lines()
        if lines and lines[-1]["kind"] == "end":
            attempt.ended_at = lines[-1]["at"]
        self.machines += attempt.running(attempt.started_at, attempt.ended_at)
        for line in lines:
            seconds = attempt.running(line.get("begin", attempt.started_at), line["at"])
            match line["kind"]:
                case "ready":
                    self.starting += seconds
                case "gradient":
                    pending += seconds
                    self.waiting_for_data += attempt.running(line["loading"], line["begin"])
                case "outer step":
                    if line["regrouped"]:
                        self.regrouping += seconds
                    else:
                        self.waiting_for_peers += seconds
                    if line["committed"] and not line["healed"] and line["workers"] == largest[line["step"]]:
                        self.in_model += pending
                    else:
                        self.rolled_back += pending
                    pending = 0.0
        self.with_the_killed += pending

    @property
    def goodput(self) -> Goodput:
        return Goodput(
            machines=self.machines,
            useful=self.in_model,
            lost_work=self.rolled_back + self.with_the_killed,
            waiting_for_peers=self.waiting_for_peers,
            waiting_for_data=self.waiting_for_data,
            entering=self.starting + self.regrouping,
        )


def main() -> int:
    given = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all is cleaned up
    faults = storm(WORLD, 60.0 * given.minutes, faults_per_hour=given.faults_per_hour, seed=given.seed)
    with tempfile.TemporaryDirectory(prefix="starling-bench-") as name:
        folder = given.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        workers = weather(faults, 60.0 * given.minutes, folder, given)
        found = figures(workers.attempts, workers.mishaps)
    versions = {package: version(package) for package in ("torchft", "torch")}
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    given.output.write_text(json.dumps({"settings": settings, "versions": versions, **found}, indent=2))
    for line in found["text"]:
        print(line)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the storm, torchft's settings, and where to write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("torchft-storm.json"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--faults-per-hour", type=float, default=100.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=20, help="gradients between two outer steps")
    parser.add_argument("--seconds", type=float, default=0.6, help="time that each gradient sleeps")
    parser.add_argument("--heartbeat-ms", type=int, default=1000, help="silence after which a worker counts as lost")
    parser.add_argument("--join-ms", type=int, default=20000, help="longest wait of a quorum for others that live")
    parser.add_argument("--timeout", type=float, default=20.0, help="longest all-reduce, in seconds")
    parser.add_argument("--folder", type=Path, help="keeps the logs here")
    return parser.parse_args(arguments)


@dataclass
class Workers:
    """The workers of a storm: their newest processes, and what becomes of these."""

    preloaded: Preloaded
    folder: Path
    settings: dict[str, Any]
    """The settings of all workers."""
    attempts: list[Attempt] = field(default_factory=list)
    newest: dict[int, Attempt] = field(default_factory=dict)
    mishaps: list[str] = field(default_factory=list)
    """What happened that was not planned."""
    begin: float = 0.0
    until: float = 0.0

    def begin_storm(self, length: Seconds) -> None:
        """Start all workers; when they are ready, the storm begins, which lasts `length` seconds."""
        for worker in range(WORLD):
            self.start(worker, joins=False)
        for each in self.attempts:
            if not each.line.recv(1):
                raise RuntimeError(f"worker {each.worker} did not start; see {self._output(each.worker)}")
        self.begin = time.monotonic()
        self.until = self.begin + length
        for each in self.attempts:
            each.line.send(str(self.until).encode())

    def start(self, worker: int, joins: bool = True) -> None:
        """Fork a worker; `joins` if it replaces another one."""
        log, started_at = self.folder / f"worker-{worker}-{len(self.attempts)}.jsonl", time.monotonic()
        place = {"worker": worker, "attempt": len(self.attempts), "log": str(log), "joins": joins}
        ours, theirs = socket.socketpair()
        ours.settimeout(GRACE)
        environment = {**os.environ, "RANK": str(worker), "GLOO_SOCKET_IFNAME": loopback_interface()}
        with theirs, self._output(worker).open("ab") as output:
            module = ["benchmarks.torchft_worker", json.dumps({**self.settings, **place})]
            process = self.preloaded.fork(module, environment, output, theirs, Path.cwd())
        if process is None:
            raise RuntimeError("the process that forks workers is gone")
        self.newest[worker] = Attempt(worker, log, process, ours, started_at)
        self.attempts.append(self.newest[worker])
        if joins:
            ours.send(str(self.until).encode())

    def kill(self, worker: int) -> None:
        self.newest[worker].kill()

    def kill_all(self) -> None:
        for each in self.newest.values():
            each.kill()

    def stop(self, worker: int) -> None:
        self.newest[worker].process.send_signal(signal.SIGSTOP)
        self.newest[worker].pauses.append((time.monotonic(), float("inf")))

    def resume(self, worker: int) -> None:
        self.newest[worker].process.send_signal(signal.SIGCONT)
        self.newest[worker].pauses[-1] = (self.newest[worker].pauses[-1][0], time.monotonic())

    def planned(self, faults: Sequence[Fault]) -> deque[tuple[float, Callable[[int], None], int]]:
        """What to do to which worker, and when, in order. Nothing but the end of a pause comes after the storm."""
        found: list[tuple[float, Callable[[int], None], int]] = []
        for fault in at_times(faults):
            at = self.begin + (fault.at_seconds or 0.0)
            if isinstance(fault, Pause):
                found += [(at, self.stop, fault.learner), (at + fault.seconds, self.resume, fault.learner)]
            else:
                found.append((at, self.kill if isinstance(fault, Kill) else self.start, fault.learner))
        kept = [each for each in found if each[0] < self.until or each[1] == self.resume]
        return deque(sorted(kept, key=lambda each: each[0]))

    def look(self) -> bool:
        """Replace workers that have failed, and return whether any process runs."""
        now = time.monotonic()
        for each in [each for each in self.newest.values() if not each.ended_at]:
            if (code := each.process.poll()) is not None:
                each.ended_at = now
                if code:
                    self.mishaps.append(f"worker {each.worker} failed with code {code} after {now - self.begin:.0f} s")
                    if now < self.until:
                        self.start(each.worker)
        return any(not each.ended_at for each in self.newest.values())

    def _output(self, worker: int) -> Path:
        return self.folder / f"worker-{worker}.log"


def weather(faults: Sequence[Fault], length: Seconds, folder: Path, given: argparse.Namespace) -> Workers:
    """Train for `length` seconds while the faults happen, and return the workers, which have ended."""
    from torchft.coordination import LighthouseServer

    with ExitStack() as stack:
        lighthouse = LighthouseServer(
            bind="[::]:0",
            min_replicas=1,
            join_timeout_ms=given.join_ms,
            quorum_tick_ms=10,
            heartbeat_timeout_ms=given.heartbeat_ms,
        )
        stack.callback(lighthouse.shutdown)
        settings = {
            "lighthouse": lighthouse.address(),
            "every": given.every,
            "seconds": given.seconds,
            "timeout": given.timeout,
        }
        if (preloaded := stack.enter_context(preloading(MODULES))) is None:
            raise RuntimeError("this system cannot fork workers: it needs Linux 5.3")
        workers = Workers(preloaded, folder, settings)
        stack.callback(workers.kill_all)
        workers.begin_storm(length)
        planned = workers.planned(faults)
        while workers.look() or planned:
            while planned and planned[0][0] <= time.monotonic():
                _, act, worker = planned.popleft()
                act(worker)
            if time.monotonic() > workers.until + GRACE:
                late = [each.worker for each in workers.newest.values() if not each.ended_at]
                workers.mishaps += [f"worker {worker} did not end within {GRACE:.0f} s" for worker in late]
                break
            time.sleep(LOOK_EVERY)
    return workers


def figures(attempts: Sequence[Attempt], mishaps: Sequence[str]) -> dict[str, Any]:
    """The figures for the file, with the lines for the screen as `text`."""
    lines = [line for attempt in attempts for line in attempt.lines()]
    outer = [line for line in lines if line["kind"] == "outer step"]
    sums, largest = Sums(), dict[int, int]()
    for line in (each for each in outer if each["committed"]):
        largest[line["step"]] = max(largest.get(line["step"], 0), line["workers"])
    for attempt in attempts:
        sums.add(attempt, largest)
    goodput = sums.goodput
    last = max((line for line in lines if line["kind"] == "end"), key=lambda line: line["step"], default=None)
    gradients = [line["at"] - line["begin"] for line in lines if line["kind"] == "gradient"]
    counts = {
        "gradients": len(gradients),
        "outer_steps": max((line["step"] for line in outer), default=0),
        "not_committed": sum(not line["committed"] for line in outer),
        "healed": sum(line["healed"] for line in outer),
        "beside_a_larger_quorum": sum(line["workers"] < largest[line["step"]] for line in outer if line["committed"]),
    }
    causes = ("rolled_back", "with_the_killed", "starting", "regrouping")
    text = [
        *mishaps,
        str(goodput),
        ", ".join(f"{cause.replace('_', ' ')} {getattr(sums, cause) / sums.machines:.1%}" for cause in causes),
        ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in counts.items())
        + f"; {median(gradients or [0.0]):.3f} s a gradient",
        f"loss on new points: {last['loss']:.4f}" if last else "no worker has ended with a model",
    ]
    return {
        "goodput": {"ratio": goodput.ratio, **goodput.losses},
        "loss": last and last["loss"],
        "seconds": asdict(sums),
        "counts": counts,
        "outer_steps": outer,
        "mishaps": list(mishaps),
        "text": text,
    }


if __name__ == "__main__":
    sys.exit(main())
