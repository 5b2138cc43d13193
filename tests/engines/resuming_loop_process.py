"""The program of a learner process in the tests of loops that save and resume: one loop after another."""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import starling
from starling.launch.link import Link, reported_errors
from tests.contract.cases import CHOICES
from tests.contract.problems import TinyRegression
from tests.engines.drop_in_process import flat, take_gradient

HALF = 7
"""Steps before the save; no multiple of the periods of the strategies."""
NUM_STEPS, SAVED = 40, (20, 25)
ONCE_EACH: dict[str, dict[str, Any]] = {
    "async-diloco": {"every": 3, "rate": 1.0, "momentum": 0.0, "delay": 1, "shards": 2},
    "decoupled-diloco": {"every": 6, "fragments": 3, "overlap": 2, "quorum": 1, "rate": 1.0, "momentum": 0.0},
}
"""Strategies whose servers keep all that learners push, with their options."""
RATE = 2.0**-6
"""A power of 2, so that steps of this size are counted without rounding."""


def run(name: str, phase: str, folder: Path) -> dict[str, Tensor]:
    """One loop under the strategy `name`, from the newest checkpoint if there is one. It makes `2 * HALF` steps in all,
    and saves after half of them; in the phases `first` and `still`, it ends there."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    choice = CHOICES[name]
    torch.manual_seed(rank)
    model = TinyRegression().make_model()
    model.register_buffer("level", torch.tensor(float(rank)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    options = choice.options(world).model_dump()
    seen: dict[str, Tensor] = {}
    with starling.join(
        model,
        optimizer,
        choice.strategy,
        seed=11,
        timeout_seconds=30.0,
        checkpoints=folder / name,
        stateful=[scheduler],
        **options,
    ) as learner:
        seen["began after"] = torch.tensor(learner.num_steps)
        if phase == "still":
            with learner.consensus():
                seen["start"] = flat(model).clone()
        while learner.num_steps < (HALF if phase in ("first", "still") else 2 * HALF):
            take_gradient(model, learner.num_steps * learner.world + learner.rank)
            learner.step()
            scheduler.step()
            if learner.num_steps == HALF:
                dict(model.named_buffers())["level"].fill_(rank + 10.0)
                learner.save()
        seen["own"] = flat(model).clone()
        seen["level"] = dict(model.named_buffers())["level"].clone()
        with learner.consensus(final=True):
            seen["final"] = flat(model).clone()
    seen["steps"] = torch.tensor([learner.num_steps, learner.stats().steps])
    seen["rate"] = torch.tensor(optimizer.param_groups[0]["lr"])
    return seen


def run_counted(name: str, folder: Path) -> None:
    """A loop whose every step lowers each of the learner's weights by `RATE`, whatever they are, and that saves every
    five steps. Learner 1 is ahead of the others when they save."""
    choice = CHOICES[name]
    model = nn.Linear(500, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    options = choice.options(int(os.environ["WORLD_SIZE"])).model_dump()
    with starling.join(model, optimizer, choice.strategy, seed=11, checkpoints=folder / name, **options) as learner:
        for number in range(1, 41):
            for _ in range(3 if learner.rank == 1 else 1):
                model.zero_grad()
                model.weight.sum().backward()
                learner.step()
            if number % 5 == 0:
                learner.save(number)


def run_once_each(name: str, folder: Path) -> None:
    """A loop whose every step lowers one weight by 1, and no other step of any learner changes that weight. All
    learners save twice; learner 1 is ahead of the others, and learner 2 behind them."""
    rank = int(os.environ["RANK"])
    model = nn.Linear(3 * NUM_STEPS, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with starling.join(model, optimizer, name, checkpoints=folder / name, **ONCE_EACH[name]) as learner:
        for number in range(NUM_STEPS):
            time.sleep((0.002, 0.0, 0.004)[rank] * random.random())
            model.zero_grad()
            model.weight[0, rank * NUM_STEPS + number].backward()
            learner.step()
            if number + 1 in SAVED:
                learner.save()


def main(phase: str, names: list[str], folder: Path, saved_in: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    for name in names:
        if phase == "counted":
            run_counted(name, folder)
        elif phase == "once-each":
            run_once_each(name, folder)
        else:
            save_file(run(name, phase, saved_in), folder / f"{name}-{phase}-{rank}.safetensors")


if __name__ == "__main__":
    with reported_errors(Link.from_environment()):
        arguments: Any = sys.argv[1:]
        main(arguments[0], json.loads(arguments[1]), Path(arguments[2]), Path(arguments[3]))
