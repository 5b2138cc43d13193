"""What Hugging Face's trainers do in processes forked by tests.integrations.host_process."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
    WhisperConfig,
    WhisperForAudioClassification,
    WhisperForConditionalGeneration,
)

from starling import SharedSampler
from starling.errors import ConfigError
from starling.integrations.accelerate import StarlingSGD
from starling.integrations.huggingface import StarlingArguments, StarlingTrainer
from tests.code_blocks import code_blocks, run_python
from tests.integrations import recordings
from tests.integrations.recordings import DIGITS, make_classifier, spoken_digits, waveforms

BATCH = 4
FEW_ROUNDS = {"every": 10, "momentum": 0.5}
"""DiLoCo's options for a short training: with its usual momentum, 24 rounds are too few."""
PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


def make_wav2vec2() -> nn.Module:
    """A miniature with random weights, and no chance in its forward pass."""
    torch.manual_seed(1)
    return Wav2Vec2ForSequenceClassification(
        Wav2Vec2Config(
            num_labels=4,
            hidden_size=16,
            conv_dim=(16, 16),
            conv_stride=(10, 8),
            conv_kernel=(20, 16),
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
            classifier_proj_size=16,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            feat_proj_dropout=0.0,
            final_dropout=0.0,
            layerdrop=0.0,
            apply_spec_augment=False,
        )
    )


def small_whisper(**options: Any) -> WhisperConfig:
    chosen: dict[str, Any] = {
        "d_model": 16,
        "num_mel_bins": 8,
        "encoder_ffn_dim": 32,
        "max_source_positions": 32,
    }
    return WhisperConfig(
        vocab_size=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=32,
        max_target_positions=8,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **chosen | options,
    )


def make_whisper() -> nn.Module:
    torch.manual_seed(1)
    return WhisperForConditionalGeneration(small_whisper())


def make_listener(seed: int) -> nn.Module:
    """A miniature of Whisper's encoder that tells spoken digits apart."""
    torch.manual_seed(seed)
    size = {"d_model": 32, "num_mel_bins": 20, "encoder_ffn_dim": 64, "max_source_positions": 20}
    return WhisperForAudioClassification(small_whisper(**size, classifier_proj_size=32, num_labels=len(DIGITS)))


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


def fit(
    folder: Path,
    strategy: str,
    num: int,
    resume: str | None = None,
    callbacks: tuple[TrainerCallback, ...] = (),
    on_loss: str = "stop",
    **options: Any,
) -> StarlingTrainer:
    trainer = StarlingTrainer(
        model=make_wav2vec2(),
        args=StarlingArguments(**settings(folder, **options)),
        train_dataset=data(num),
        eval_dataset=data(16),
        strategy=strategy,
        options={"seed": 3, "timeout_seconds": 60.0, "on_loss": on_loss},
        callbacks=list(callbacks),
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
    save_file(found, folder / f"hf-equal-{rank}.safetensors")


class Late(TrainerCallback):
    """Learner 1 makes one step and waits until learner 0 has reached the last of four epochs, which both share."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank, self._reached, self._back = rank, folder / "reached", folder / "back"

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._rank == 0 and state.epoch == 3.0:
            self._reached.touch()
            await_file(self._back)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._rank == 1 and state.global_step == 1:
            await_file(self._reached)
        elif self._rank == 1 and state.epoch > 3.0:
            self._back.touch()


def train(rank: int, folder: Path) -> None:
    """Asynchronous learners that share an epoch's samples, one of them late."""
    options: dict[str, Any] = {"num_train_epochs": 4, "eval_strategy": "epoch", "save_strategy": "epoch"}
    options |= {"train_sampling_strategy": "random", "max_grad_norm": 1.0, "logging_first_step": True}
    trainer = fit(folder / "hf-kept", "adpsgd", 96, callbacks=(Late(rank, folder),), **options)
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    trainer.save_model(str(folder / "final"))
    outcome = {
        "steps": trainer.learner.stats().steps,
        "first": losses[0],
        "last": losses[-1],
        "evaluated": trainer.evaluate()["eval_loss"],
        "rate": trainer.optimizer.param_groups[0]["lr"] / trainer.args.learning_rate,
    }
    (folder / f"hf-train-{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")
    save_file({"final": weights(trainer.model)}, folder / f"hf-train-{rank}.safetensors")


class Start(TrainerCallback):
    """Notes the weights and the optimizer's state with which training begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.weights = weights(others["model"])
        self.moments = moments(others["optimizer"], others["model"])


def moments(optimizer: Any, model: nn.Module) -> Tensor:
    return torch.cat(
        [optimizer.state[each]["exp_avg"].reshape(-1) for each in model.parameters() if each in optimizer.state]
    )


class Wait(TrainerCallback):
    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        await_file(self._path)


def resume(rank: int, folder: Path) -> None:
    """Asynchronous learners resume from a checkpoint in the middle of an epoch."""
    options = {"num_train_epochs": 1, "save_strategy": "steps", "save_steps": 3}
    waits = (Wait(folder / "hf-middle" / "checkpoint-3"),) if rank == 1 else ()
    fit(folder / "hf-middle", "adpsgd", 64, callbacks=waits, **options)
    start = Start()
    saved = str(folder / "hf-middle" / "checkpoint-3")
    trainer = fit(folder / "resumed", "adpsgd", 64, resume=saved, callbacks=(start,), num_train_epochs=2)
    found = {"weights": start.weights, "moments": start.moments, "final": weights(trainer.model)}
    found["steps"] = torch.tensor(trainer.learner.stats().steps)
    found["epoch"] = torch.tensor(trainer.state.epoch)
    save_file(found, folder / f"hf-resume-{rank}.safetensors")


class Note(TrainerCallback):
    """Notes the samples of each step in a file once the step is made: here the sums of their waveforms."""

    def __init__(self, path: Path) -> None:
        self._path, self._seen = path, list[str]()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, model: nn.Module, args: Any, inputs: dict[str, Tensor]) -> None:
        if model.training:
            self._seen += [f"{float(each.double().sum()):.9g}\n" for each in inputs["input_values"]]

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(self._seen)
        self._seen.clear()


class Kill(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == 3 and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if args.should_save:  # an own count: after an epoch without a sample a checkpoint has the name of the last
            Path(args.output_dir, f"saved-{state.epoch:g}").touch()


def survive(rank: int, folder: Path, strategy: str = "adpsgd") -> None:
    """The others continue without learner 0; one of them saves in its place."""
    options = {"num_train_epochs": 3, "save_strategy": "epoch", "on_loss": "continue"}
    callbacks = (Note(folder / f"hf-{strategy}-noted-{rank}"), Kill())
    trainer = fit(folder / f"{strategy}-survivors", strategy, 96, callbacks=callbacks, **options)
    trainer.save_model(str(folder / f"{strategy}-saved"))
    learner = trainer.learner
    outcome = {"world": learner.world, "membership": learner.membership, "epoch": trainer.state.epoch}
    (folder / f"hf-{strategy}-survive-{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")
    save_file({"final": weights(trainer.model)}, folder / f"hf-{strategy}-survive-{rank}.safetensors")


def survive_in_step(rank: int, folder: Path) -> None:
    survive(rank, folder, "allreduce")


class Fails(StarlingTrainer):
    def training_step(self, *args: Any, **options: Any) -> Tensor:
        if self.state.global_step == 3 and self.args.process_index == 1:
            raise ValueError("a bad mini-batch")
        return super().training_step(*args, **options)


def fail(rank: int, folder: Path) -> None:
    """What the Trainer refuses; and one learner fails."""
    args = StarlingArguments(**settings(folder, num_train_epochs=1000))
    for refused, said in ((object(), "use StarlingArguments"), (replace(args, auto_find_batch_size=True), "cannot be")):
        with pytest.raises(ConfigError, match=said):
            StarlingTrainer(model=make_wav2vec2(), args=refused, train_dataset=data(16))
    try:
        Fails(model=make_wav2vec2(), args=args, train_dataset=data(16), options={"timeout_seconds": 60.0}).train()
    except BaseException as error:
        (folder / f"hf-fail-{rank}.txt").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
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
        own = DataLoader(spectra(80)[rank :: accelerator.num_processes], batch_size=BATCH)
        optimizer = accelerator.prepare(optimizer)
        if name == "ddp":
            model = accelerator.prepare(model)
            found[name] = weights(accelerated_loop(accelerator, model, optimizer, own, None).module)
            with pytest.raises(ConfigError, match="evaluation_mode=True"):
                StarlingSGD(accelerator, model, optimizer, "adpsgd")
            continue
        model = accelerator.prepare_model(model, evaluation_mode=True)
        with StarlingSGD(accelerator, model, optimizer, name, timeout_seconds=60.0) as learner:
            accelerated_loop(accelerator, model, optimizer, own, learner)
        found[name] = weights(model)
        assert (
            float(accelerator.reduce(torch.ones(()), "sum")) == accelerator.num_processes
        )  # its collectives work again
        assert learner.learner.stats().steps == 4 * len(own) // 2  # epochs, and accumulation
    accelerator.prepare(own)
    with pytest.raises(ConfigError, match=r"do not prepare it, and give its DataLoader a starling\.SharedSampler"):
        StarlingSGD(accelerator, model, optimizer, "adpsgd")
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


def sgd(accelerator: Accelerator, model: nn.Module, **options: Any) -> Any:
    """A prepared optimizer, and the context in which it trains the model under `adpsgd`."""
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=3e-3))
    model = accelerator.prepare_model(model, evaluation_mode=True)
    return optimizer, StarlingSGD(accelerator, model, optimizer, timeout_seconds=60.0, **options)


def step(accelerator: Accelerator, model: Any, optimizer: Any, local: Any, batch: Any) -> None:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
    local.step()


def await_file(path: Path) -> None:
    """So that a slow machine cannot let the other learner take the whole epoch before learner 0 saves."""
    deadline = time.monotonic() + 240.0
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def accelerated_resume(rank: int, folder: Path) -> None:
    """Asynchronous learners resume from a state that accelerate saved in the middle of an epoch."""
    found = {}
    for part in ("first", "second"):
        accelerator = Accelerator(cpu=True)
        model: Any = make_whisper()
        dataset = spectra(64)
        sampler = SharedSampler(dataset)
        optimizer, context = sgd(accelerator, model)
        accelerator.register_for_checkpointing(sampler)
        if part == "second":
            accelerator.load_state(str(folder / "state"))
            found["weights"], found["moments"] = weights(model), moments(optimizer.optimizer, model)
        with context as local:
            for number, batch in enumerate(DataLoader(dataset, batch_size=BATCH, sampler=sampler), start=1):
                step(accelerator, model, optimizer, local, batch)
                if part == "first" and rank == 1:
                    await_file(folder / "state" / "custom_checkpoint_0.pkl")
                if part == "first" and number == 4:  # by own count, so that it saves once
                    with local.learner.consensus():
                        if accelerator.is_main_process:
                            accelerator.save_state(str(folder / "state"))
                            found["saved"] = weights(model)
                    accelerator.wait_for_everyone()  # is local, and waits for nothing
            assert float(accelerator.gather(torch.ones(1)).sum()) == 1.0
        accelerator.wait_for_everyone()
        if part == "second":
            found["steps"] = torch.tensor(local.learner.stats().steps)
    save_file(found, folder / f"accelerated-resume-{rank}.safetensors")


def accelerated_survive(rank: int, folder: Path) -> None:
    """The others continue without learner 0; one of them becomes the main process."""
    accelerator = Accelerator(cpu=True)
    model: Any = make_whisper()
    optimizer, context = sgd(accelerator, model, on_loss="continue")
    dataset = spectra(96)
    sampler = SharedSampler(dataset)
    with context as local:
        for epoch in range(3):
            for number, batch in enumerate(DataLoader(dataset, batch_size=BATCH, sampler=sampler)):
                if (rank, epoch, number) == (0, 0, 3):
                    os.kill(os.getpid(), signal.SIGKILL)
                step(accelerator, model, optimizer, local, batch)
    if accelerator.is_main_process:
        accelerator.save_model(model, str(folder / "accelerated-saved"))
    accelerator.wait_for_everyone()
    learner = local.learner
    outcome = {"world": learner.world, "membership": learner.membership, "is_main": accelerator.is_main_process}
    (folder / f"accelerated-survive-{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")
    save_file({"final": weights(model)}, folder / f"accelerated-survive-{rank}.safetensors")


RATES = {"ddp": 32e-3, "adpsgd": 16e-3, "diloco": 16e-3}
"""Of each the best on recordings and seeds that `accuracies` has not: decision 0011. `rates` repeats the search."""


def accuracies(rank: int, folder: Path) -> None:
    """On real recordings: of the Trainer's DDP, and of other strategies after as many epochs, for each seed."""
    test = words("test", 300)
    found = {name: learnt(name, rate, range(6), test, folder) for name, rate in RATES.items()}
    (folder / f"huggingface-accuracies-{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def rates(rank: int, folder: Path) -> None:
    """The accuracies at each learning rate, on other recordings and for other seeds."""
    valid = words("train", 300, first=1200)
    found: dict[str, dict[str, list[float]]] = {}
    for name in RATES:
        for rate in (8e-3, 16e-3, 32e-3):
            found.setdefault(name, {})[f"{rate:g}"] = learnt(name, rate, range(100, 104), valid, folder)
    (folder / f"huggingface-rates-{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def words(part: str, num: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Features `[N, 20, 40]` of spoken digits, as Whisper takes them, and their classes `[N]`."""
    waves, classes = spoken_digits(part, DIGITS, num, first)
    return nn.functional.pad(recordings.spectra(waves), (0, 1)), classes


def learnt(name: str, rate: float, seeds: range, test: tuple[Tensor, Tensor], folder: Path) -> list[float]:
    """The accuracies on `test` of models trained on 1,200 recordings, for each seed. DDP comes first."""
    keys = ("input_features", "labels")
    train = [dict(zip(keys, each, strict=True)) for each in zip(*words("train", 1200), strict=True)]
    if name != "ddp" and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    found = []
    for seed in seeds:
        chosen = {"num_train_epochs": 10, "seed": seed, "train_sampling_strategy": "random", "max_grad_norm": 1.0}
        chosen |= {"per_device_train_batch_size": 16, "learning_rate": rate, "logging_steps": 100}
        model: Any = make_listener(seed)
        if name == "ddp":
            args = TrainingArguments(ddp_backend="gloo", **settings(folder, **chosen))
            Trainer(model=model, args=args, train_dataset=train).train()
        else:
            options = {"seed": seed, "timeout_seconds": 60.0} | (FEW_ROUNDS if name == "diloco" else {})
            args = StarlingArguments(**settings(folder, **chosen))
            StarlingTrainer(model=model, args=args, train_dataset=train, strategy=name, options=options).train()
        with torch.no_grad():
            right = model.eval()(input_features=test[0]).logits.argmax(1) == test[1]
        found.append(float(right.float().mean()))
    return found


def accelerated_accuracies(rank: int, folder: Path) -> None:
    """On real recordings: of accelerate's DDP, and of other strategies after as many epochs, for each seed."""
    waves, classes = spoken_digits("train", DIGITS, 1200)
    data = TensorDataset(recordings.spectra(waves), classes)
    waves, classes = spoken_digits("test", DIGITS, 300)
    found: dict[str, list[float]] = {}
    for name in ("ddp", "adpsgd", "diloco"):
        for seed in range(4):
            accelerator = Accelerator(cpu=True)
            torch.manual_seed(seed)
            model: Any = make_classifier(len(DIGITS))
            plain = torch.optim.AdamW(model.parameters(), lr=4e-3)
            num_steps = 10 * len(data) // accelerator.num_processes // 16
            decay = torch.optim.lr_scheduler.LambdaLR(plain, lambda at, last=num_steps: max(0.02, 1.0 - at / last))
            optimizer = accelerator.prepare(plain)
            if name == "ddp":
                wrapped, loader = accelerator.prepare(model, DataLoader(data, 16, shuffle=True))
                classify(accelerator, wrapped, optimizer, decay, loader)
            else:
                model = accelerator.prepare_model(model, evaluation_mode=True)
                if name == "adpsgd":
                    loader = DataLoader(data, 16, sampler=SharedSampler(data, seed=seed))
                else:  # learners that step together
                    loader = accelerator.prepare(DataLoader(data, 16, shuffle=True))
                options = {"seed": seed, "timeout_seconds": 60.0} | (FEW_ROUNDS if name == "diloco" else {})
                with StarlingSGD(accelerator, model, optimizer, name, **options):
                    classify(accelerator, model, optimizer, decay, loader)
            with torch.no_grad():
                right = model(recordings.spectra(waves)).argmax(1) == classes
            found.setdefault(name, []).append(float(right.float().mean()))
    (folder / f"accelerate-accuracies-{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def classify(accelerator: Accelerator, model: Any, optimizer: Any, decay: Any, loader: Any) -> None:
    for _ in range(10):
        for features, classes in loader:
            accelerator.backward(nn.functional.cross_entropy(model(features), classes))
            optimizer.step()
            decay.step()
            optimizer.zero_grad()


def page(rank: int, folder: Path) -> None:
    """The page's examples, with two learners."""
    os.chdir(folder)
    trainer, loop = (block.text for block in code_blocks(PAGE) if block.language == "python")
    assert run_python(trainer)["trainer"].learner.world == 2
    found = run_python(loop)
    assert found["local"].learner.world == 2
    points, wanted = found["dataset"].tensors
    assert nn.functional.mse_loss(found["model"](points), wanted) < 0.2
    assert Path("state", "model.safetensors").exists()


CASES = {
    "page": page,
    "equal": equal,
    "train": train,
    "fail": fail,
    "resume": resume,
    "survive": survive,
    "survive_in_step": survive_in_step,
    "accuracies": accuracies,
    "rates": rates,
    "accelerated": accelerated,
    "accelerated_resume": accelerated_resume,
    "accelerated_survive": accelerated_survive,
    "accelerated_accuracies": accelerated_accuracies,
}
