"""The program of a learner process in the tests of the drop-in: a plain PyTorch loop, over and over."""

import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import starling
from starling.engines.loop.learner import LoopLearner
from starling.errors import PeerLost
from starling.launch.link import Link, reported_errors
from starling.training.flat import trainable
from starling.workload import Ticket
from tests.contract.problems import TinyRegression

STEPS = 12
"""Of each learner, unless a case says otherwise."""
MIDDLE = 6
"""The step before which trouble happens."""


def flat(model: nn.Module, every: bool = False) -> Tensor:
    """The trainable parameters, or every one."""
    return torch.cat([each.detach().reshape(-1) for each in (model.parameters() if every else trainable(model))])


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
        if case.get("fails") == "evaluating":
            with learner.consensus(final=True):
                _misbehave(case, rank, STEPS)
        elif case.get("asks", rank) == rank:
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


def run_troubled(rank: int, case: dict[str, Any]) -> dict[str, Tensor]:
    """One joining whose loop does to the model and its gradients what `case` says."""
    model = make_troubled()
    model[0].requires_grad_(case.get("frozen") != "before")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=bool(case.get("scaler")))
    seen: dict[str, Tensor] = {}
    options = case.get("options", {})
    with starling.join(model, optimizer, case["strategy"], seed=11, timeout_seconds=30.0, **options) as learner:
        model[0].requires_grad_("frozen" not in case)
        for step in range(STEPS):
            if step == MIDDLE:
                seen["middle"] = flat(model, every=True)
                model[0].requires_grad_(True)
                if case.get("moves"):
                    model[3].weight.data = model[3].weight.data.clone()
            model.zero_grad()
            loss = troubled_loss(model, step * learner.world + rank)
            if case.get("not_finite") == rank and step == MIDDLE:
                loss = loss * math.inf
            scaler.scale(loss).backward()
            if case.get("slow") == rank:
                time.sleep(0.03)
            if case.get("scaler"):
                learner.step(scaler)
                scaler.update()
            else:
                learner.step()
        if case.get("final") and case.get("asks", rank) == rank:
            with learner.consensus(final=True):
                seen["final"] = flat(model, every=True)
    seen["weights"] = flat(model, every=True)
    stats = learner.stats()
    seen["steps"], seen["skipped"] = torch.tensor(stats.steps), torch.tensor(stats.steps_skipped)
    seen["rounds"] = torch.tensor(stats.rounds)
    return seen


def make_troubled() -> nn.Sequential:
    """The contract's model, a layer that is used for every third mini-batch, and one that is never used."""
    model = TinyRegression().make_model()
    assert isinstance(model, nn.Sequential)
    for _ in range(2):
        model.append(nn.Linear(1, 1))
        nn.init.ones_(model[-1].weight)
        nn.init.ones_(model[-1].bias)
    return model


def troubled_loss(model: nn.Sequential, number: int) -> Tensor:
    """The contract's loss on mini-batch `number`; every third goes through the layer that is sometimes used."""
    (points,) = TinyRegression().load(Ticket(number // 12, number % 12, number))
    used = [*model[:4], model[4]] if number % 3 == 0 else model[:4]
    return TinyRegression().loss(nn.Sequential(*used), points)


def _misbehave(case: dict[str, Any], rank: int, step: int) -> None:
    if rank == 1 and step == 5 and case.get("fails") == "raises":
        raise ValueError("a bad mini-batch")
    if rank == 1 and step == 5 and case.get("fails") == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and step == STEPS and case.get("fails") == "evaluating":
        os.kill(os.getpid(), signal.SIGKILL)


def _begin_late() -> None:
    """Let this process's strategies begin only some time after another learner has requested a consensus."""
    proceed = LoopLearner._proceed

    def proceed_late(learner: LoopLearner) -> None:
        learner.peers.store.wait(["announced/0"])
        time.sleep(0.2)  # for a contribution that does not wait; one that waits passes without it, too
        proceed(learner)

    LoopLearner._proceed = proceed_late  # type: ignore[method-assign]


def main(cases: dict[str, Any], folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if any(case.get("late") == rank for case in cases.values()):
        _begin_late()
    for name, case in cases.items():
        try:
            outcome = run_troubled(rank, case) if case.get("troubled") else run(rank, case)
        except (ValueError, PeerLost) as error:
            if not case.get("is_caught"):
                raise
            outcome = {"is_own_error": torch.tensor(isinstance(error, ValueError))}
        save_file(outcome, folder / f"{name}-{rank}.safetensors")


if __name__ == "__main__":
    with reported_errors(Link.from_environment()):
        main(json.loads(sys.argv[1]), Path(sys.argv[2]))
