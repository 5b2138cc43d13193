"""The program of a worker that trains one case after another and writes down what it measured: `peer_worker CASES
FOLDER`.

It does not import Starling itself, because a rival's start must not include that time.
"""

import itertools
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store
from torch.nn.utils import parameters_to_vector

from benchmarks.perceptron import perceptron
from benchmarks.rivals import COLUMNS, LOCAL_STEPS, Loop, Worker, case_store

Seconds = float
BATCH_SIZE, NUM_BATCHES = 32, 64
WARM_UP_STEPS, WARM_UP_SECONDS = 2 * LOCAL_STEPS, 0.5
"""Untimed steps of columns in step, and untimed seconds of other columns."""
LAST_STEPS = LOCAL_STEPS // 2
"""Number of untimed steps before the models are compared: LocalSGD is caught halfway between two averagings."""
SYNCHRONOUS_START: Seconds = 0.02


@dataclass(frozen=True)
class Case:
    """One measurement of a column."""

    column: str
    widths: Sequence[int]
    slow_seconds: Seconds = 0.0
    """Seconds that the last worker sleeps before each gradient."""
    seconds: Seconds = 2.0
    """Approximate seconds to measure; 0 stops after the first step."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the column."""


@dataclass(frozen=True)
class Measured:
    """The measurements of one worker for one case."""

    steps: int
    seconds: Seconds
    rounds: float
    """Number of exchanges within these steps."""
    first_step_at: Seconds
    """Time of the first step, on the clock that all processes of a machine share."""


def main(cases: list[Case], folder: Path) -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    found = []
    for number, case in enumerate(cases):
        model = perceptron(case.widths)
        worker = Worker(rank, world, case_store(store, number), model, case.options)
        with COLUMNS[case.column].open(worker) as loop:
            found.append(measure(case, worker, loop))
            if case.seconds:
                parameters_to_vector(model.parameters()).detach().numpy().tofile(folder / f"{number}-{rank}.bin")
    (folder / f"measured-{rank}.json").write_text(json.dumps([asdict(each) for each in found]))
    meet(store, world, "the end")


def measure(case: Case, worker: Worker, loop: Loop) -> Measured:
    """Warm up, wait for the others, and count and time this worker's steps."""
    column = COLUMNS[case.column]
    sleep = case.slow_seconds if worker.rank == worker.world - 1 else 0.0
    batches = draw_batches(case.widths, worker.rank)

    def step() -> None:
        inputs, targets = next(batches)
        if sleep:
            time.sleep(sleep)
        loop.zero_grad()
        loss = nn.functional.mse_loss(loop.model(inputs), targets)
        loss.backward()
        loop.step()

    step()
    first = time.monotonic()
    if not case.seconds:
        return Measured(1, 0.0, 0.0, first)
    if not column.in_step:
        begin = begin_together(worker.store, worker.rank, worker.world)
        warm_rounds = warm_up_until(begin + WARM_UP_SECONDS, step, loop)
        begin, deadline = time.monotonic(), begin + WARM_UP_SECONDS + case.seconds
        steps = 0
        while time.monotonic() < deadline:
            step()
            steps += 1
        end = time.monotonic()
        rounds = column.rounds_per_gradient
        made = float(loop.num_rounds() - warm_rounds) if loop.num_rounds and rounds is None else steps * (rounds or 0.0)
        return Measured(steps, end - begin, made, first)
    for _ in range(WARM_UP_STEPS - LOCAL_STEPS):
        step()
    begin = time.monotonic()
    for _ in range(LOCAL_STEPS):
        step()
    usual = (time.monotonic() - begin) / LOCAL_STEPS
    steps = agree_on_steps(worker.store, worker.rank, case.seconds / usual)
    begin = begin_together(worker.store, worker.rank, worker.world)
    for _ in range(steps):
        step()
    end = time.monotonic()
    for _ in range(LAST_STEPS):
        step()
    return Measured(steps, end - begin, steps * (column.rounds_per_gradient or 0.0), first)


def warm_up_until(when: Seconds, step: Callable[[], None], loop: Loop) -> int:
    """Make steps until `when`, and return the number of rounds made by then."""
    while time.monotonic() < when:
        step()
    return loop.num_rounds() if loop.num_rounds else 0


def draw_batches(widths: Sequence[int], rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of worker `rank`, repeated forever. They are drawn once, so that no column spends time on
    drawing."""
    generator = torch.Generator().manual_seed(100 + rank)
    drawn = [
        (
            torch.randn(BATCH_SIZE, widths[0], generator=generator),
            torch.randn(BATCH_SIZE, widths[-1], generator=generator),
        )
        for _ in range(NUM_BATCHES)
    ]
    return itertools.cycle(drawn)


def agree_on_steps(store: Store, rank: int, steps: float) -> int:
    """The number of steps that worker 0 asks for, rounded up to whole periods of LocalSGD."""
    if rank == 0:
        store.set("steps", str(LOCAL_STEPS * max(1, math.ceil(steps / LOCAL_STEPS))))
    return int(store.get("steps"))


def begin_together(store: Store, rank: int, world: int) -> Seconds:
    """Wait for all workers, and return the time, the same for all of them, at which this returns."""
    meet(store, world, "begin")
    if rank == 0:
        store.set("moment", repr(time.monotonic() + SYNCHRONOUS_START))
    moment = float(store.get("moment"))
    time.sleep(max(0.0, moment - time.monotonic()))
    return moment


def meet(store: Store, world: int, name: str) -> None:
    """Wait until all workers have arrived."""
    if store.add(f"{name}/number", 1) == world:
        store.set(f"{name}/all", "")
    store.wait([f"{name}/all"])


def end_with_launcher() -> None:
    """End this process when the other end of the launcher's pipe is closed."""
    end_with(socket.socket(fileno=int(os.environ.pop("STARLING_LINK_FD"))))


def end_with(line: socket.socket) -> None:
    """End this process when the other end of `line` is closed."""

    def watch() -> None:
        while line.recv(1):
            pass
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with_launcher()
    main([Case(**values) for values in json.loads(sys.argv[1])], Path(sys.argv[2]))
