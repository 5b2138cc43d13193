"""A process of the adapters' benchmark: `python -m benchmarks.adapter_process HOST FILE`.

It trains alternately with a host's own DistributedDataParallel and with Starling's adapter, and writes the seconds per
step of both, by round.
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from starling.integrations import close_host_group, open_host_group

ROUNDS, STEPS, WARM_UP = 4, 60, 10
WIDTH, BATCH = 512, 64
SLEEP = 0.03
"""Seconds that a gradient takes on an emulated device; the slow device takes ten times as long."""
WORLD = int(os.environ.get("WORLD_SIZE", "1"))  # Lightning deletes the variable after a fit


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def batches() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH * STEPS, WIDTH), torch.randint(10, (BATCH * STEPS,))


def seconds_of(stamps: list[float]) -> float:
    return median(after - before for before, after in pairwise(stamps[WARM_UP:]))


def lightning(folder: Path, is_ours: bool, sleep: float = 0.0, strategy: str = "allreduce") -> float:
    """Seconds per step in Lightning's training loop."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader, TensorDataset

    from starling.integrations.lightning import StarlingStrategy

    stamps: list[float] = []

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            if sleep:
                time.sleep(sleep)
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def on_train_batch_end(self, *_: object) -> None:
            stamps.append(time.perf_counter())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    chosen = StarlingStrategy(strategy) if is_ours else DDPStrategy(gradient_as_bucket_view=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD,
        max_epochs=1,
        strategy=chosen,
        plugins=[LightningEnvironment()],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(*batches()), batch_size=BATCH))
    return seconds_of(stamps)


def huggingface(folder: Path, is_ours: bool) -> float:
    """Seconds per step in Hugging Face's training loop."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from starling.integrations.huggingface import StarlingArguments, StarlingTrainer

    stamps: list[float] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def forward(self, points: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.cross_entropy(self.model(points), labels)}

    class Stamps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            stamps.append(time.perf_counter())

    options: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "max_grad_norm": 0.0,
    }
    points, labels = batches()
    data = [{"points": point, "labels": label} for point, label in zip(points, labels, strict=True)]
    others = {"model": Model(), "train_dataset": data, "callbacks": [Stamps()]}
    if is_ours:
        StarlingTrainer(args=StarlingArguments(**options), strategy="allreduce", **others).train()
    else:
        Trainer(args=TrainingArguments(ddp_backend="gloo", **options), **others).train()
    return seconds_of(stamps)


def accelerate(folder: Path, is_ours: bool) -> float:
    """Seconds per step in a loop with Accelerate."""
    from accelerate import Accelerator

    from starling.integrations.accelerate import StarlingSGD

    accelerator = Accelerator(cpu=True)
    model: Any = make_model()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    points, labels = batches()
    stamps: list[float] = []

    def train() -> None:
        for step in range(STEPS):
            rows = slice(step * BATCH, (step + 1) * BATCH)
            accelerator.backward(nn.functional.cross_entropy(model(points[rows]), labels[rows]))
            optimizer.step()
            optimizer.zero_grad()
            stamps.append(time.perf_counter())

    if is_ours:
        model = accelerator.prepare_model(model, evaluation_mode=True)
        with StarlingSGD(accelerator, model, optimizer, "allreduce"):
            train()
    else:
        model = accelerator.prepare(model)
        train()
    return seconds_of(stamps)


def slow(folder: Path, is_ours: bool) -> float:
    """Seconds per step under `adpsgd`, on an emulated device."""
    is_slow = os.environ["RANK"] == "1"
    return lightning(folder, is_ours=True, sleep=SLEEP * (10 if is_slow else 1), strategy="adpsgd")


HOSTS: dict[str, Callable[[Path, bool], float]] = {
    "lightning": lightning,
    "huggingface": huggingface,
    "accelerate": accelerate,
    "slow": slow,
}


def main(host: str, note: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: list[tuple[float, float]] = []
    for number in range(1 if host == "slow" else ROUNDS):
        pair = {}
        for is_ours in (True, False) if number % 2 else (False, True):
            if host == "slow" and not is_ours:
                continue
            if not is_ours and WORLD > 1:
                open_host_group("gloo")  # one store for all rounds: a host's own could not be opened twice
            pair[is_ours] = HOSTS[host](note.parent, is_ours)
            close_host_group()
        found.append((pair[True], pair.get(False, 0.0)))
    note.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
