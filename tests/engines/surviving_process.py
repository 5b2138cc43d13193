"""The program of a learner process in the tests of joined loops that survive losses."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

import starling
from tests.engines.drop_in_process import flat


def main(case: dict[str, Any], folder: Path) -> None:
    """A loop as the documentation wants it: `num_steps` counts, and `learner_id` chooses the data."""
    torch.set_num_threads(1)
    rank, is_restarted = int(os.environ["RANK"]), "restarted" in sys.argv
    deadly = {} if is_restarted else case.get("deaths", {})
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank + 10.0 * is_restarted)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.get("rate", 0.03), momentum=0.5)
    times, worlds = [], []
    options = case.get("options", {})
    with starling.join(
        model,
        optimizer,
        case["strategy"],
        seed=11,
        timeout_seconds=case.get("timeout", 60.0),
        on_loss=case.get("on_loss", "continue"),
        **options,
    ) as learner:
        if is_restarted:
            (folder / "joined").touch()
        if case.get("helped") == rank:
            _fork_helper(folder)
        if case.get("loads") == rank:
            _fork_loaders(folder)
        began = learner.num_steps
        start = flat(model).clone()
        num_own = case["epochs"][rank] if "epochs" in case else None
        if "samples" in case:
            _share(case, learner, model, optimizer, folder, is_restarted)
            return
        while learner.num_steps < case["steps"] if num_own is None else len(times) < num_own:
            optimizer.zero_grad()
            loss_of(model, 1 + learner.num_steps * 8 + learner.learner_id).backward()  # type: ignore[no-untyped-call]
            time.sleep(case.get("seconds", 0.0))
            if learner.num_steps >= deadly.get(str(rank), case["steps"]):
                (folder / f"died-{rank}").write_text(f"{time.time()}\n{learner.num_steps}")
                os.kill(os.getpid(), signal.SIGKILL)
            if case.get("forks") == rank and learner.num_steps == 5:
                _fork_and_exit(folder)
            if case.get("fails") == rank and learner.num_steps == 5:
                raise ValueError("a bad mini-batch")
            while case.get("until") == learner.num_steps and not is_restarted and not (folder / "joined").exists():
                time.sleep(0.02)
            learner.step()
            if "saves" in case and learner.num_steps % case["saves"] == 0:
                learner.save()
            times.append(time.time())
            worlds.append(learner.world)
            (folder / f"at-{rank}").write_text(str(learner.num_steps))
        if deadly.get(str(rank)) == case["steps"]:
            (folder / f"died-{rank}").write_text(f"{time.time()}\n{learner.num_steps}")
            os.kill(os.getpid(), signal.SIGKILL)
        with learner.consensus(final=True):
            final = flat(model).clone()
            if case.get("stopped") == rank:
                (folder / "stopped").write_text("1")
                os.kill(os.getpid(), signal.SIGSTOP)
        seen = {
            "start": start,
            "final": final,
            "times": torch.tensor(times, dtype=torch.float64),
            "worlds": torch.tensor(worlds),
            "membership": torch.tensor(learner.membership),
            "steps": torch.tensor([began, learner.num_steps, learner.stats().steps]),
            "loss": loss_of(model, 0).detach(),
        }
    save_file(seen, folder / f"result-{rank}.safetensors")


def _share(
    case: dict[str, Any],
    learner: starling.JoinedLearner,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    is_restarted: bool,
) -> None:
    """Four epochs of shared samples, from a loader with a process of its own. Samples are noted as trained on after
    their step. The learners in `dies` die before that, each after a number of batches in the epoch 1."""
    rank = learner.learner_id
    sampler = starling.SharedSampler(case["samples"], claim_size=4)
    loader = DataLoader(list(range(case["samples"])), sampler=sampler, batch_size=3, num_workers=1)
    num_left = None if is_restarted else case["dies"].get(str(rank))
    while sampler.epoch < 4:
        (folder / f"at-{rank}").write_text(str(sampler.epoch))
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, int(batch[0])).backward()  # type: ignore[no-untyped-call]
            time.sleep(case["seconds"][rank])
            if sampler.epoch == 1 and num_left is not None:
                num_left -= 1
                if num_left < 0:
                    (folder / f"died-{rank}").write_text(f"{time.time()}\n{learner.num_steps}")
                    os.kill(os.getpid(), signal.SIGKILL)
            learner.step()
            sampler.done(len(batch))
            with (folder / f"trained-{rank}").open("a") as noted:
                noted.write("".join(f"{number}\n" for number in batch.tolist()))


_loaders: list[Iterator[Tensor]] = []


def _fork_helper(folder: Path) -> None:
    """A child that outlives this process; the test ends it."""
    if (pid := os.fork()) == 0:
        while True:
            signal.pause()
    (folder / "children").write_text(str(pid))


def _fork_loaders(folder: Path) -> None:
    """The loading processes of a `DataLoader`, which find out within five seconds that this process has ended."""
    loader = DataLoader(list(range(1000)), num_workers=2, persistent_workers=True, multiprocessing_context="fork")
    _loaders.append(iter(loader))
    next(_loaders[0])
    children = psutil.Process().children()
    (folder / "children").write_text(" ".join(str(each.pid) for each in children))


def _fork_and_exit(folder: Path) -> None:
    """A child that ends as a program does, with its exit handlers; its exit code is its own."""
    if (pid := os.fork()) == 0:
        sys.exit(7)
    (folder / "children").write_text(str(pid))
    (folder / "child-ended").write_text(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def make_model() -> nn.Module:
    """A model to be trained, the same in all processes."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1.0, 1.0, parameter.numel()).view(parameter.shape) + 0.1 * number)
    return model


def loss_of(model: nn.Module, number: int) -> Tensor:
    """The loss on mini-batch `number` of a problem that the model can solve."""
    points = torch.randn(64, 4, generator=torch.Generator().manual_seed(number))
    targets = points @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])
    return nn.functional.mse_loss(model(points), targets)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
