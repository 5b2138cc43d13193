"""The program of a learner process in the tests of joined loops that survive losses."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import starling
from tests.contract.problems import TinyRegression
from tests.engines.drop_in_process import flat, take_gradient


def main(case: dict[str, Any], folder: Path) -> None:
    """A loop as the documentation wants it: `num_steps` counts, and `learner_id` chooses the data."""
    torch.set_num_threads(1)
    rank, is_restarted = int(os.environ["RANK"]), "restarted" in sys.argv
    deadly = {} if is_restarted else case.get("deaths", {})
    model = TinyRegression().make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank + 10.0 * is_restarted)
    model.register_buffer("level", torch.tensor(float(rank)))
    optimizer = torch.optim.SGD(model.parameters(), lr=case.get("lr", 0.05), momentum=0.5)
    times, worlds = [], []
    options = case.get("options", {})
    with starling.join(
        model,
        optimizer,
        case["strategy"],
        seed=11,
        timeout_seconds=60.0,
        on_loss=case.get("on_loss", "continue"),
        **options,
    ) as learner:
        began = learner.num_steps
        start = flat(model).clone()
        while learner.num_steps < case["steps"]:
            take_gradient(model, learner.num_steps * 4 + learner.learner_id)
            time.sleep(case.get("seconds", 0.0))
            if deadly.get(str(rank)) == learner.num_steps:
                (folder / f"died-{rank}").write_text(f"{time.time()}\n{learner.num_steps}")
                os.kill(os.getpid(), signal.SIGKILL)
            if case.get("fails") == rank and learner.num_steps == 5:
                raise ValueError("a bad mini-batch")
            while case.get("until") and learner.num_steps == case["steps"] - 5 and not _has_joined(folder, case):
                time.sleep(0.02)
            learner.step()
            times.append(time.time())
            worlds.append(learner.world)
            if is_restarted:
                (folder / f"joined-{rank}").touch()
            (folder / f"at-{rank}").write_text(str(learner.num_steps))
        if deadly.get(str(rank)) == "evaluating":
            (folder / f"died-{rank}").write_text(f"{time.time()}\n-1")
            os.kill(os.getpid(), signal.SIGKILL)
        with learner.consensus(final=True):
            final = flat(model).clone()
        seen = {
            "start": start,
            "final": final,
            "times": torch.tensor(times, dtype=torch.float64),
            "worlds": torch.tensor(worlds),
            "membership": torch.tensor(learner.membership),
            "steps": torch.tensor([began, learner.num_steps, learner.stats().steps]),
            "loss": torch.tensor(loss_of(model)),
        }
    save_file(seen, folder / f"result-{rank}.safetensors")


def _has_joined(folder: Path, case: dict[str, Any]) -> bool:
    return (folder / f"joined-{case['until']}").exists()


def loss_of(model: nn.Module) -> float:
    """The mean loss over the contract's problem."""
    workload, losses = TinyRegression(), []
    with torch.no_grad():
        for number in range(12):
            (points,) = workload.load(starling.Ticket(0, number, number))
            losses.append(float(workload.loss(model, points)))
    return sum(losses) / len(losses)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
