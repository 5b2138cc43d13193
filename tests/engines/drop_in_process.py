"""The program of a learner process in the tests of the drop-in: a plain PyTorch loop, over and over."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import starling
from starling.engines.flat import trainable
from starling.launch.link import Link, reported_errors
from starling.workload import Ticket
from tests.contract.problems import TinyRegression

STEPS = 12
"""Of each learner, unless a case says otherwise."""


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainable(model)])


def take_gradient(model: nn.Module, number: int) -> None:
    """Leave in `model` the gradient of mini-batch `number` of the contract's problem."""
    workload = TinyRegression()
    (points,) = workload.load(Ticket(number // 12, number % 12, number))
    model.zero_grad()
    workload.loss(model, points).backward()  # type: ignore[no-untyped-call]


def make_model(rank: int) -> nn.Module:
    """The contract's model; learners other than 0 begin with something else, and must be given learner 0's."""
    model = TinyRegression().make_model()
    model.register_buffer("level", torch.tensor(float(rank)))
    model.register_buffer("count", torch.tensor(7 + rank))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    return model


def run(rank: int, case: dict[str, Any]) -> dict[str, Tensor]:
    """One joining: steps, a consensus if the case wants it, and what came out."""
    model = make_model(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.get("lr", 0.1))
    steps = case.get("steps", {}).get(str(rank), STEPS)
    seen: dict[str, Tensor] = {}
    options = case.get("options", {})
    with starling.join(model, optimizer, case["strategy"], seed=11, timeout_seconds=30.0, **options) as learner:
        seen["start"], seen["count"] = flat(model).clone(), dict(model.named_buffers())["count"].clone()
        for step in range(steps):
            take_gradient(model, step * learner.world + rank)
            learner.step()
            _misbehave(case, rank, step)
        if case.get("asks", rank) == rank:
            dict(model.named_buffers())["level"].fill_(rank)
            before = flat(model).clone()
            with learner.consensus():
                seen["consensus"] = flat(model).clone()
                seen["level"] = dict(model.named_buffers())["level"].clone()
            seen["restored"] = torch.tensor(torch.equal(flat(model), before))
    learner.close()  # again: nothing happens
    seen["weights"] = flat(model).clone()
    stats = learner.stats()
    seen["stats"] = torch.tensor([stats.steps, stats.rounds, sum(stats.staleness.values()), stats.bytes_sent])
    seen["seconds"] = torch.tensor([stats.seconds_computing, stats.seconds_waiting])
    return seen


def _misbehave(case: dict[str, Any], rank: int, step: int) -> None:
    if rank == 1 and step == 5 and case.get("fails") == "raises":
        raise ValueError("a bad mini-batch")
    if rank == 1 and step == 5 and case.get("fails") == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def main(cases: dict[str, Any], folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    for name, case in cases.items():
        save_file(run(rank, case), folder / f"{name}-{rank}.safetensors")


if __name__ == "__main__":
    with reported_errors(Link.from_environment()):
        main(json.loads(sys.argv[1]), Path(sys.argv[2]))
