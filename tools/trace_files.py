"""Print the source files of Starling that one mini-batch passes through on the `processes` engine.

    python tools/trace_files.py [STRATEGY]

One learner runs a toy job. From the beginning of a claim to the end of the step that follows, the file of every called
function is noted, in the learner's thread and in its background. The job's own workload does not count.
"""

import sys
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import starling
from starling.budget import Budget
from starling.engines.processes import member
from starling.strategies import find_strategy
from starling.training.job import Job, Silence
from starling.workload import Ticket, Workload

PACKAGE = Path(starling.__file__).parent
STEPS, TRACED = 6, 3


@dataclass(frozen=True)
class Numbers:
    """Inputs `[B, 2]`."""

    inputs: Tensor
    num_examples = 4
    num_frames = 4
    seconds = 0.0

    def to(self, device: torch.device) -> "Numbers":
        return Numbers(self.inputs.to(device))


class Toy(Workload[Numbers]):
    """A linear model that learns to give 0."""

    def make_model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def num_batches(self, epoch: int) -> int:
        return STEPS

    def load(self, ticket: Ticket) -> Sequence[Numbers]:
        return [Numbers(torch.full((4, 2), float(ticket.step)))]

    def loss(self, model: nn.Module, examples: Numbers) -> Tensor:
        loss: Tensor = model(examples.inputs).square().mean()
        return loss


class Tracer:
    """Notes the files of called functions between the claim and the step of mini-batch `TRACED`."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}  # in the order of their first calls
        self._num_claims = 0
        self._is_tracing = False

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """Called by Python at every call and return."""
        if self._is_tracing and event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                self.files[path.relative_to(PACKAGE).as_posix()] = None

    def watch(self, learner: Any) -> None:
        """Trace a learner's mini-batch."""
        claim, step = learner.claim, learner.step

        def watched_claim() -> bool:
            self._num_claims += 1
            self._is_tracing = self._num_claims == TRACED
            claimed: bool = claim()
            return claimed

        def watched_step(*given: Any, **named: Any) -> None:
            step(*given, **named)
            self._is_tracing = False

        learner.claim, learner.step = watched_claim, watched_step


def trace(name: str) -> list[str]:
    """The files that a mini-batch passes through under a strategy."""
    tracer, strategy = Tracer(), find_strategy(name)

    def watched(learner: Any, *options: Any) -> Coroutine[Any, Any, None]:
        tracer.watch(learner)
        return strategy.run(learner, *options)

    job = Job(
        Toy(),
        replace(strategy, run=watched),
        Budget(steps=STEPS),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        options=strategy.options(),
    )
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = member.Place(0, 1, 0, 1, store)
    threading.setprofile(tracer.profile)  # for the background
    sys.setprofile(tracer.profile)
    try:
        member.run_learner(job, place, torch.device("cpu"), "traced", Silence())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return list(tracer.files)


if __name__ == "__main__":
    found = trace(*(sys.argv[1:] or ["allreduce"]))
    sys.stdout.write("".join(f"{each}\n" for each in found) + f"{len(found)} files\n")
