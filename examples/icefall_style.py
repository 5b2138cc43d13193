"""A loop in the style of icefall, under any strategy: `torchrun --nproc-per-node 2 examples/icefall_style.py`.

It uses ScaledAdam, a GradScaler, an average of the model over its steps, and lhotse's dynamic buckets. The recordings
are tones that the dataset generates. docs/icefall.md shows how the loop differs from one under DistributedDataParallel.
"""

import argparse
import copy
from collections.abc import Iterable
from typing import Any

import torch
from lhotse import CutSet, Recording
from lhotse.dataset import DynamicBucketingSampler
from torch import Tensor, nn
from torch.utils.data import Dataset

import starling

RATE = 8000
NUM_CLASSES = 4


class ScaledAdam(torch.optim.Optimizer):
    """Adam as in icefall: its steps are relative to the size of each parameter, and it also learns these sizes."""

    def __init__(self, params: Iterable[Any], lr: float = 0.03, clipping_scale: float = 2.0) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.98), "eps": 1e-8, "clipping_scale": clipping_scale})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            trained = [each for each in group["params"] if each.grad is not None]
            norms = torch.stack([each.grad.norm() * _size(each) for each in trained]) if trained else torch.zeros(1)
            scale = self._clipping_scale(float(norms.norm()), group)
            for parameter in trained:
                self._step(parameter, parameter.grad * scale, group)

    def _clipping_scale(self, norm: float, group: dict[str, Any]) -> float:
        """Clip gradients to a multiple of the median norm of the last 100 steps."""
        norms = group.setdefault("norms", [])
        norms.append(norm)
        del norms[:-100]
        return min(1.0, group["clipping_scale"] * sorted(norms)[len(norms) // 2] / (norm + 1e-20))

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state.update(step=0, delta=torch.zeros_like(parameter), second=torch.zeros_like(parameter), scale=0.0)
        state["step"] += 1
        size = _size(parameter)
        state["second"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        corrected = state["second"] / (1 - beta2 ** state["step"])
        update = -group["lr"] * size * gradient / (corrected.sqrt() + group["eps"])
        growth = float((parameter * gradient).sum())  # of the parameter's size, a tenth as fast as its direction
        state["scale"] = beta2 * state["scale"] + (1 - beta2) * growth**2
        if parameter.numel() > 1:
            relative = growth / (state["scale"] / (1 - beta2 ** state["step"])) ** 0.5 if state["scale"] > 0.0 else 0.0
            update.add_(parameter, alpha=-0.1 * group["lr"] * relative)
        state["delta"].mul_(beta1).add_(update, alpha=1 - beta1)
        parameter.add_(state["delta"])


def _size(parameter: Tensor) -> float:
    return max(float(parameter.square().mean().sqrt()), 1e-5)


class Tones(Dataset[Any]):
    """Frames of noisy tones `[N, T, 16]` with their classes `[N]`, for the cuts of a mini-batch."""

    def __getitem__(self, cuts: CutSet) -> tuple[Tensor, Tensor]:
        waves, classes = [], []
        longest = max(cut.num_samples for cut in cuts) // 160 * 160
        for cut in cuts:
            number = int(cut.recording_id.removeprefix("tone"))
            generator = torch.Generator().manual_seed(number)
            times = torch.arange(longest) / RATE
            wave = torch.sin(2 * torch.pi * 250 * 2 ** (number % NUM_CLASSES) * times)
            waves.append((wave + 0.3 * torch.randn(longest, generator=generator)) * (times < cut.duration))
            classes.append(number % NUM_CLASSES)
        spectra = torch.fft.rfft(torch.stack(waves).reshape(len(waves), -1, 160)).abs()[:, :, 1:65]
        return spectra.reshape(len(waves), -1, 16, 4).mean(3).log1p(), torch.tensor(classes)


def make_cuts(num: int) -> CutSet:
    durations = [0.2 + 0.02 * (number * 7 % 20) for number in range(num)]
    recordings = [
        Recording(f"tone{number}", [], RATE, int(RATE * duration), int(RATE * duration) / RATE)
        for number, duration in enumerate(durations)
    ]
    return CutSet.from_cuts(recording.to_cut() for recording in recordings)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.output = nn.Linear(32, NUM_CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.output(self.frames(features).mean(1))
        return logits


def average(model_avg: nn.Module, model: nn.Module, weight: float) -> None:
    """Move the average of the model over its steps towards the model."""
    with torch.no_grad():
        for mean, now in zip(model_avg.parameters(), model.parameters(), strict=True):
            mean.add_(now.double() - mean, alpha=weight)


def main(strategy: str, epochs: int, use_fp16: bool) -> float:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Classifier()
    model_avg = copy.deepcopy(model).double()
    optimizer = ScaledAdam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, gamma=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=use_fp16, init_scale=64.0)
    cuts = make_cuts(400)
    with starling.join(model, optimizer, strategy) as learner:
        inner = DynamicBucketingSampler(cuts, max_duration=4.0, num_buckets=3, shuffle=True, rank=0, world_size=1)
        sampler = starling.SharedBatches(inner)
        data = Tones()
        num_steps = 0
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for batch in sampler:
                features, classes = data[batch]
                num_steps += 1
                with torch.autocast("cpu", torch.bfloat16, enabled=use_fp16):
                    loss = nn.functional.cross_entropy(model(features), classes)
                scaler.scale(loss).backward()
                learner.step(scaler)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad()
                if num_steps % 10 == 0:
                    average(model_avg, model, 10 / num_steps)
        with learner.consensus(final=True):
            features, classes = Tones()[cuts.subset(first=100)]
            accuracy = float((model(features).argmax(1) == classes).float().mean())
        if learner.rank == 0:
            print(f"accuracy {accuracy:.3f} after {num_steps} of its own steps under {strategy}", flush=True)
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="adpsgd", help="a name that `starling strategies` lists")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--use-fp16", action="store_true", help="mixed precision with a GradScaler")
    given = parser.parse_args()
    main(given.strategy, given.epochs, given.use_fp16)
