"""The program of a learner process in the tests of `starling.attach`: a loop that knows nothing of learners."""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import starling
from tests.contract.problems import TinyRegression
from tests.engines.drop_in_process import flat, take_gradient

CASES = [("allreduce", False), ("delay-by-one", False), ("dpsgd", False), ("allreduce", True), ("dpsgd", True)]
"""Strategies whose results are the same in every run, and whether the loop uses a scaler."""


def run(rank: int, strategy: str, is_scaled: bool, is_attached: bool) -> Tensor:
    """The weights after 10 steps of a loop that `join` changes, or `attach` does not change."""
    model = TinyRegression().make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=is_scaled)
    if is_attached:
        learner = starling.attach(optimizer, model, strategy, scaler=scaler, seed=11, timeout_seconds=30.0)
    else:
        learner = starling.join(model, optimizer, strategy, seed=11, timeout_seconds=30.0)
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    seen: list[int] = []
    for step in range(10):
        take_gradient(model, step * learner.world + rank)
        for parameter in model.parameters():
            if parameter.grad is not None and is_scaled:
                parameter.grad.mul_(scaler.scale(torch.ones(())))
                if rank == 1 and step == 4:
                    parameter.grad.fill_(torch.inf)
        if not is_attached:
            learner.step(scaler if is_scaled else None)
        elif is_scaled:
            scaler.step(optimizer)
        else:
            optimizer.step()
        scaler.update()
        scheduler.step()
    assert len(seen) == learner.stats().steps - learner.stats().steps_skipped
    with learner.consensus(final=True):
        pass
    learner.close()
    assert "step" not in vars(scaler)
    return flat(model).clone()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    found = {
        f"{strategy}-{is_scaled}-{is_attached}": run(rank, strategy, is_scaled, is_attached)
        for strategy, is_scaled in CASES
        for is_attached in (False, True)
    }
    save_file(found, folder / f"{rank}.safetensors")
    model = nn.Linear(2, 1)  # this learner does not close: the end of the process does
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    starling.attach(optimizer, model, "adpsgd", timeout_seconds=30.0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
