"""What trainers of Lightning do in processes forked by tests.integrations.host_process."""

import importlib
import json
import os
import signal
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from starling import SharedSampler
from starling.errors import ConfigError, PeerLost
from starling.integrations import close_host_group, open_host_group
from starling.integrations.lightning import StarlingStrategy
from tests.code_blocks import code_blocks, run_python
from tests.integrations.recordings import DIGITS, make_classifier, spectra, spoken_digits

STEPS = 20
PAGE = Path(__file__).parents[2] / "docs" / "lightning.md"


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
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
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
    """Lightning's own DistributedSampler, of which an asynchronous learner is warned; and `all_gather`, an error."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(rank, starling("adpsgd"), folder, use_distributed_sampler=True, data=loader(0, 4))
    assert any("SharedSampler" in str(each.message) for each in said)
    with pytest.raises((ConfigError, PeerLost), match=r"step together.*use a DistributedSampler"):
        fit(rank, starling("allreduce"), folder, data=shared(80).train_dataloader())
    assert not torch.distributed.is_initialized()  # whichever learner failed first: the next fit connects all of them
    with pytest.raises((ConfigError, PeerLost), match=r"evaluate after fit|learner \d") as raised:
        make_trainer(starling("adpsgd"), folder).fit(Gathers(), loader(rank, 4))
    (folder / f"gathers-{rank}").write_text(type(raised.value).__name__)


class Gathers(Tones):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.all_gather(batch[1])
        return super().training_step(batch, index)


class Counts(Tones):
    """Notes what a fit begins with, and its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[float] = []
        self.start: dict[str, Tensor] = {}

    def on_train_start(self) -> None:
        momentum = self.optimizers().optimizer.state  # type: ignore[union-attr]
        self.start = {"weights": weights(self)}
        if momentum:
            buffers = [momentum[each]["momentum_buffer"] for each in self.parameters()]
            self.start["momentum"] = torch.cat([each.reshape(-1) for each in buffers])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.samples += batch[0][:, 0].tolist()  # which tell samples apart
        return super().training_step(batch, index)


def shared(num: int) -> Any:
    """A data module of the page's class."""
    text = next(block.text for block in code_blocks(PAGE) if "class SharedData" in block.text)
    return run_python(text)["SharedData"](tones(0, num))


class Wait(Callback):
    """Lets learner 1 wait until learner 0 has saved: otherwise it could take the whole epoch on a slow machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        deadline = time.monotonic() + 60.0
        while trainer.global_rank == 1 and not self._path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)


def resume(rank: int, folder: Path) -> None:
    """Asynchronous learners resume from a checkpoint in the middle of an epoch."""
    keep = ModelCheckpoint(dirpath=folder / "middle", every_n_train_steps=3, save_top_k=-1)
    callbacks = [keep, Wait(folder / "middle" / "epoch=0-step=3.ckpt")]
    make_trainer(starling("adpsgd"), folder, callbacks=callbacks, enable_checkpointing=True).fit(Counts(), shared(160))
    resumed = Counts()
    saved = folder / "middle" / "epoch=0-step=3.ckpt"
    make_trainer(starling("adpsgd"), folder, max_epochs=2).fit(resumed, shared(160), ckpt_path=saved)
    found = {**resumed.start, "samples": torch.tensor(resumed.samples), "final": weights(resumed)}
    save_file(found, folder / f"resume-{rank}.safetensors")


class Killed(Tones):
    """Kills process 0 in the middle of an epoch."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if len(self.losses) == 3 and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, index)


def killed(rank: int, folder: Path) -> None:
    """Without `on_loss`, the other processes end when one is killed."""
    make_trainer(starling("adpsgd"), folder, max_epochs=10_000).fit(Killed(), loader(rank, 10))


def survive(rank: int, folder: Path, strategy: str = "adpsgd") -> None:
    """The others continue without learner 0; one of them validates and saves in its place."""
    keep = ModelCheckpoint(dirpath=folder / "survivors", monitor="accuracy", mode="max", save_last=True)
    module = Killed()
    data = shared(480).train_dataloader() if strategy == "adpsgd" else loader(rank, STEPS)
    trainer = make_trainer(
        starling(strategy, on_loss="continue"), folder, max_epochs=4, callbacks=[keep], enable_checkpointing=True
    )
    trainer.fit(module, data, loader(9, 4))
    trainer.save_checkpoint(folder / f"{strategy}-survived.ckpt")
    (tested,) = trainer.validate(module, loader(9, 4), verbose=False)
    learner = trainer.strategy.learner
    outcome = {"world": learner.world, "membership": learner.membership, "accuracy": tested["accuracy"]}
    (folder / f"{strategy}-survive-{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")
    save_file({"final": weights(module)}, folder / f"{strategy}-survive-{rank}.safetensors")


def survive_in_step(rank: int, folder: Path) -> None:
    survive(rank, folder, "allreduce")


class Words(LightningModule):
    """Tells spoken digits apart."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.net, self.num_steps = make_classifier(len(DIGITS)), num_steps

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=4e-3)
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.02, 1.0 - step / self.num_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}


def accuracies(rank: int, folder: Path) -> None:
    """On real recordings: of DDP, and of other strategies after as many epochs, for each seed."""
    waves, classes = spoken_digits("train", DIGITS, 1200)
    data, world = TensorDataset(spectra(waves), classes), int(os.environ["LOCAL_WORLD_SIZE"])
    waves, classes = spoken_digits("test", DIGITS, 300)
    found: dict[str, list[float]] = {}
    for name in ("ddp", "adpsgd", "diloco"):
        for seed in range(4):
            if name == "ddp" and not torch.distributed.is_initialized():
                open_host_group("gloo")
            strategy = ddp() if name == "ddp" else starling(name, **{"every": 10} if name == "diloco" else {})
            seed_everything(seed, verbose=False)
            module = Words(10 * len(data) // world // 16)
            is_own = name != "adpsgd"  # Lightning divides the data for learners that step together
            batches = DataLoader(data, 16, shuffle=is_own, sampler=None if is_own else SharedSampler(data, seed=seed))
            make_trainer(strategy, folder, max_epochs=10, use_distributed_sampler=is_own).fit(module, batches)
            right = module.eval().net(spectra(waves)).argmax(1) == classes
            found.setdefault(name, []).append(float(right.float().mean()))
        if name == "ddp":
            close_host_group()
    (folder / f"lightning-accuracies-{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def configured(page: str) -> dict[str, Any]:
    """The strategy of the configuration for NeMo in a page, as hydra's `instantiate` makes it."""
    (text,) = [each.split("```")[0] for each in page.split("```yaml\n")[1:] if "_target_" in each]
    config = yaml.safe_load(text)["trainer"]["strategy"]
    module, _, name = config.pop("_target_").rpartition(".")
    strategy = getattr(importlib.import_module(module), name)(**config)
    is_ddp = isinstance(strategy, DDPStrategy)
    return {"strategy": strategy._host.strategy, "options": strategy._host.options, "is_ddp": is_ddp}


def prepare(folder: Path) -> None:
    """What needs one process only."""
    (folder / "nemo.json").write_text(json.dumps(configured(PAGE.read_text(encoding="utf-8"))), encoding="utf-8")


def page(rank: int, folder: Path) -> None:
    """The page's example, with two learners on this machine."""
    text = next(block.text for block in code_blocks(PAGE) if "trainer.fit(" in block.text)
    found = run_python(text.replace("devices=1", "devices=2"))
    assert found["trainer"].strategy.learner.world == 2
    points, wanted = found["data"].tensors
    assert nn.functional.mse_loss(found["model"].layer(points), wanted) < 0.2


CASES = {
    "page": page,
    "equal": equal,
    "train": train,
    "fail": fail,
    "sampler": sampler,
    "resume": resume,
    "killed": killed,
    "survive": survive,
    "survive_in_step": survive_in_step,
    "accuracies": accuracies,
}
