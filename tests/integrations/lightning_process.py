"""Trainers of Lightning in forked processes: `python -m tests.integrations.lightning_process CASE FOLDER`."""

import importlib
import json
import os
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what the first optimizer of a process loads
import yaml
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from starling.integrations.host_group import close_host_group, open_host_group
from starling.integrations.lightning import StarlingStrategy
from tests.integrations.forked import in_processes

STEPS = 20
WORLD = int(sys.argv[3]) if len(sys.argv) > 3 else 2


class Tones(LightningModule):
    """Tells four tones apart."""

    def __init__(self, lr: float = 0.05, has_sync: bool = False) -> None:
        super().__init__()
        self.lr, self.has_sync = lr, has_sync
        self.net = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
        self.losses: list[float] = []
        self.validated: list[Tensor] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        if self.has_sync:
            self.log("loss", loss.detach(), sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.validated.append(self.net[0].weight.detach().clone())
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=self.has_sync)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def tones(seed: int, num: int) -> TensorDataset:
    """Noisy sines of four frequencies `[N, 32]`, and which of them `[N]`."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(4, (num,), generator=generator)
    phases = torch.rand(num, 1, generator=generator)
    waves = torch.sin((classes[:, None] + 1) * 0.4 * torch.arange(32) + phases)
    return TensorDataset(waves + 0.1 * torch.randn(num, 32, generator=generator), classes)


def loader(rank: int, batches: int, seed: int = 0) -> DataLoader[Any]:
    return DataLoader(tones(100 * seed + rank, 8 * batches), batch_size=8)


def fit(rank: int, strategy: Any, folder: Path, **options: Any) -> tuple[Tones, Trainer]:
    """A fit on data of its own for each process."""
    seed_everything(rank, verbose=False)  # models differ: learner 0's must reach the others
    module = Tones(has_sync=options.pop("has_sync", False))
    data, valid = options.pop("data", loader(rank, STEPS)), options.pop("valid", None)
    checkpoint = options.pop("ckpt_path", None)
    trainer = make_trainer(strategy, folder, **options)
    trainer.fit(module, data, valid, ckpt_path=checkpoint)
    return module, trainer


def make_trainer(strategy: Any, folder: Path, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    plugins = [LightningEnvironment(), *options.pop("plugins", [])]
    return Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        plugins=plugins,
        default_root_dir=folder,
        **defaults | options,
    )


def weights(module: nn.Module) -> Tensor:
    return torch.cat([each.detach().reshape(-1).clone() for each in module.parameters()])


def ddp() -> DDPStrategy:
    return DDPStrategy(process_group_backend="gloo", broadcast_buffers=False, timeout=timedelta(seconds=60))


def starling(strategy: str, **options: Any) -> StarlingStrategy:
    return StarlingStrategy(strategy, seed=5, timeout_seconds=60.0, **options)


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))


def equal(rank: int, folder: Path) -> None:
    """The same training under DDP and under allreduce."""
    found = {}
    for host, strategy in (("ddp", ddp), ("starling", lambda: starling("allreduce"))):
        settings: dict[str, dict[str, Any]] = {
            "plain": {},
            "accumulated": {"accumulate_grad_batches": 2},
            "bf16": {"precision": "bf16-mixed"},
            "fp16": {"plugins": [scaled()]},
        }
        for name, options in settings.items():
            found[f"{name}-{host}"] = weights(fit(rank, strategy(), folder, **options)[0])
        if host == "ddp":  # whose process group stays
            torch.distributed.destroy_process_group()
    short = loader(rank, STEPS // 2)
    _, trainer = fit(rank, starling("allreduce"), folder, data=short)
    trainer.save_checkpoint(folder / "half.ckpt")
    resumed = fit(rank, starling("allreduce"), folder, max_epochs=2, data=short, ckpt_path=folder / "half.ckpt")[0]
    found["resumed"] = weights(resumed)
    found["straight"] = weights(fit(rank, starling("allreduce"), folder, max_epochs=2, data=short)[0])
    save_file(found, folder / f"equal-{rank}.safetensors")


def train(rank: int, folder: Path) -> None:
    """Asynchronous learners with unequal numbers of batches, validation, checkpoints, and traps."""
    keep = ModelCheckpoint(dirpath=folder / "kept", monitor="accuracy", mode="max", save_last=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module, trainer = fit(
            rank,
            starling("adpsgd", pattern="random"),
            folder,
            max_epochs=4,
            has_sync=True,
            data=loader(rank, 20 + 20 * rank),
            valid=loader(9, 4),
            callbacks=[keep],
            enable_checkpointing=True,
            gradient_clip_val=5.0,
        )
    trainer.save_checkpoint(folder / "final.ckpt")
    learner = trainer.strategy.learner
    outcome = {
        "steps": learner.stats().steps,
        "first": sum(module.losses[:5]) / 5,
        "last": sum(module.losses[-5:]) / 5,
        "warned": [str(each.message) for each in said if "sync_dist" in str(each.message)][:1],
        "best": str(keep.best_model_path),
    }
    found = {"final": weights(module), "validated": module.validated[-1], "own": module.net[0].weight.detach().clone()}
    (tested,) = make_trainer(starling("adpsgd"), folder).validate(module, loader(9, 4), verbose=False)
    outcome["accuracy"] = tested["accuracy"]
    (folder / f"train-{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")
    save_file(found, folder / f"train-{rank}.safetensors")


class Fails(Tones):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if index == 3 and self.global_rank == 1:
            raise ValueError("a bad mini-batch")
        return super().training_step(batch, index)


def fail(rank: int, folder: Path) -> None:
    """One learner fails, in the middle of an epoch."""
    trainer = make_trainer(starling("adpsgd"), folder, max_epochs=10_000)
    try:
        trainer.fit(Fails(), loader(rank, 10))
    except BaseException as error:
        (folder / f"fail-{rank}.txt").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        raise


def sampler(rank: int, folder: Path) -> None:
    """Lightning's own DistributedSampler, of which an asynchronous learner is warned."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(rank, starling("adpsgd"), folder, use_distributed_sampler=True, data=loader(0, 4))
    assert any("SharedSampler" in str(each.message) for each in said)


def accuracies(rank: int, folder: Path) -> None:
    """Of DDP, and of other strategies after as many steps on the same data, for three seeds."""
    found: dict[str, list[float]] = {}
    for name in ("ddp", "adpsgd", "diloco"):
        for seed in range(3):
            if name == "ddp" and not torch.distributed.is_initialized():
                open_host_group("gloo")
            strategy = ddp() if name == "ddp" else starling(name, **{"every": 10} if name == "diloco" else {})
            options = {"max_epochs": 6, "data": loader(rank, STEPS, seed)}
            module, _ = fit(rank, strategy, folder, **options)
            points, classes = tones(999, 400).tensors
            found.setdefault(name, []).append(float((module.eval().net(points).argmax(1) == classes).float().mean()))
        if name == "ddp":
            close_host_group()
    (folder / f"accuracies-{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def killed(rank: int, folder: Path) -> None:
    """One process is killed."""
    trainer = make_trainer(starling("adpsgd"), folder, max_epochs=10_000)
    trainer.fit(Killed(), loader(rank, 10))


class Killed(Tones):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if index == 3 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, index)


def configured(page: str) -> dict[str, Any]:
    """The strategy of the configuration for NeMo in a page, as hydra's `instantiate` makes it."""
    (text,) = [each.split("```")[0] for each in page.split("```yaml\n")[1:] if "_target_" in each]
    config = yaml.safe_load(text)["trainer"]["strategy"]
    module, _, name = config.pop("_target_").rpartition(".")
    strategy = getattr(importlib.import_module(module), name)(**config)
    is_ddp = isinstance(strategy, DDPStrategy)
    return {"strategy": strategy._name, "options": strategy._options, "is_ddp": is_ddp}


CASES = {"equal": equal, "train": train, "fail": fail, "sampler": sampler, "accuracies": accuracies, "killed": killed}

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])
    page = Path(__file__).parents[2] / "docs" / "lightning.md"
    (folder / "nemo.json").write_text(json.dumps(configured(page.read_text(encoding="utf-8"))), encoding="utf-8")
    codes = {}
    for name in sys.argv[1].split(","):
        codes[name] = in_processes(WORLD, lambda rank, work=CASES[name]: work(rank, folder))  # type: ignore[misc]
    (folder / "codes.json").write_text(json.dumps(codes), encoding="utf-8")
