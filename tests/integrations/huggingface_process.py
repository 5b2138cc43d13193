"""Hugging Face's trainers in forked processes: `python -m tests.integrations.huggingface_process CASES FOLDER`."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what the first optimizer of a process loads
import transformers
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    Trainer,
    TrainingArguments,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from starling.integrations.accelerate import StarlingSGD
from starling.integrations.huggingface import StarlingArguments, StarlingTrainer
from tests.integrations.forked import in_processes
from tests.integrations.recordings import waveforms

BATCH = 4


def make_wav2vec2() -> nn.Module:
    """A miniature with random weights, and no chance in its forward pass."""
    torch.manual_seed(1)
    return Wav2Vec2ForSequenceClassification(
        Wav2Vec2Config(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            conv_dim=(16, 16),
            conv_stride=(10, 8),
            conv_kernel=(20, 16),
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
            classifier_proj_size=16,
            num_labels=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            feat_proj_dropout=0.0,
            final_dropout=0.0,
            layerdrop=0.0,
            apply_spec_augment=False,
        )
    )


def make_whisper() -> nn.Module:
    torch.manual_seed(1)
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=16,
            num_mel_bins=8,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_source_positions=32,
            max_target_positions=8,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    )


def data(num: int) -> list[dict[str, Tensor]]:
    return [{"input_values": wave, "labels": torch.tensor(label)} for wave, label in waveforms(num)]


def settings(folder: Path, **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": BATCH,
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "learning_rate": 3e-3,
        "logging_steps": 5,
        "dataloader_pin_memory": False,
        "average_tokens_across_devices": False,  # multiplies the loss by the number of processes, under DDP
    }
    return defaults | options


def fit(folder: Path, strategy: str, num: int, resume: str | None = None, **options: Any) -> StarlingTrainer:
    chosen = {"seed": 3, "timeout_seconds": 60.0}
    trainer = StarlingTrainer(
        model=make_wav2vec2(),
        args=StarlingArguments(**settings(folder, **options)),
        train_dataset=data(num),
        eval_dataset=data(16),
        strategy=strategy,
        options=chosen,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().reshape(-1).clone() for each in model.parameters()])


def equal(rank: int, folder: Path) -> None:
    """The same training under the Trainer's own DDP and under allreduce, from the whole and from a checkpoint."""
    found = {}
    args = TrainingArguments(ddp_backend="gloo", **settings(folder, max_steps=20))
    trainer = Trainer(model=make_wav2vec2(), args=args, train_dataset=data(64))
    trainer.train()
    found["ddp"] = weights(trainer.model)
    torch.distributed.destroy_process_group()
    saved, options = folder / "saved", {"max_steps": 20, "save_strategy": "steps", "save_steps": 10}
    found["starling"] = weights(fit(saved, "allreduce", 64, **options).model)
    resumed = fit(folder / "again", "allreduce", 64, resume=str(saved / "checkpoint-10"), **options)
    found["resumed"] = weights(resumed.model)
    save_file(found, folder / f"equal-{rank}.safetensors")


def train(rank: int, folder: Path) -> None:
    """Asynchronous learners that share an epoch's samples."""
    options: dict[str, Any] = {"num_train_epochs": 4, "eval_strategy": "epoch", "save_strategy": "epoch"}
    trainer = fit(folder / "kept", "adpsgd", 96, train_sampling_strategy="random", max_grad_norm=1.0, **options)
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    trainer.save_model(str(folder / "final"))
    outcome = {
        "steps": trainer.learner.stats().steps,
        "first": losses[0],
        "last": losses[-1],
        "evaluated": trainer.evaluate()["eval_loss"],
    }
    (folder / f"train-{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")
    save_file({"final": weights(trainer.model)}, folder / f"train-{rank}.safetensors")


class Fails(StarlingTrainer):
    def training_step(self, *args: Any, **options: Any) -> Tensor:
        if self.state.global_step == 3 and self.args.process_index == 1:
            raise ValueError("a bad mini-batch")
        return super().training_step(*args, **options)


def fail(rank: int, folder: Path) -> None:
    """One learner fails."""
    args = StarlingArguments(**settings(folder, num_train_epochs=1000))
    try:
        Fails(model=make_wav2vec2(), args=args, train_dataset=data(16), options={"timeout_seconds": 60.0}).train()
    except BaseException as error:
        (folder / f"fail-{rank}.txt").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        raise


def spectra(num: int) -> list[dict[str, Tensor]]:
    """Whisper's features `[8, 64]` of recordings, and tokens that name their class."""
    found = []
    for wave, label in waveforms(num):
        frames = wave[:2048].reshape(64, 32)
        powers = torch.fft.rfft(frames).abs()[:, 1:17].reshape(64, 8, 2).sum(2).T
        found.append({"input_features": powers.log1p(), "labels": torch.tensor([3 + label, 2])})
    return found


def accelerated(rank: int, folder: Path) -> None:
    """accelerate's own loop: DDP, and StarlingSGD."""
    found = {}
    for name in ("ddp", "allreduce", "adpsgd"):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model: Any = make_whisper()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        own = DataLoader(spectra(96)[rank::2], batch_size=BATCH)
        optimizer = accelerator.prepare(optimizer)
        if name == "ddp":
            model = accelerator.prepare(model)
            found[name] = weights(accelerated_loop(accelerator, model, optimizer, own, None).module)
            continue
        model = accelerator.prepare_model(model, evaluation_mode=True)
        with StarlingSGD(accelerator, model, optimizer, name, timeout_seconds=60.0) as learner:
            accelerated_loop(accelerator, model, optimizer, own, learner)
        found[name] = weights(model)
        assert float(accelerator.reduce(torch.ones(()), "sum")) == 2.0  # its collectives work again
        assert learner.learner.stats().steps == 24
    save_file(found, folder / f"accelerated-{rank}.safetensors")


def accelerated_loop(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, local: Any) -> Any:
    for _ in range(4):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if local is not None:
                    local.step()
    return model


CASES = {"equal": equal, "train": train, "fail": fail, "accelerated": accelerated}

if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    folder = Path(sys.argv[2])
    codes = {}
    for name in sys.argv[1].split(","):
        codes[name] = in_processes(2, lambda rank, work=CASES[name]: work(rank, folder))  # type: ignore[misc]
    (folder / "codes.json").write_text(json.dumps(codes), encoding="utf-8")
