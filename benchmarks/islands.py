"""The published acoustic model (43 million parameters, 32,000 outputs) in an island of two, beside two whole models.

`python -m benchmarks.islands [STEPS]` trains it on this machine with two learners that step together, once each with a
model of its own and once with one model in shards, and prints memory, the time of a step, and how far weights differ.
"""

import gc
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, multiprocessing, nn
from torch.distributed import FileStore

from starling.budget import Budget
from starling.checkpoint.cut import Cut
from starling.checkpoint.state import LearnerState
from starling.engines.processes.member import run_learner
from starling.engines.processes.place import Place
from starling.speech.hybrid.losses import FrameBatch, frame_loss
from starling.speech.models import ModelConfig, build_model
from starling.strategies import STRATEGIES
from starling.strategies.islands import Island
from starling.training.flat import trainable
from starling.training.job import Job, Silence, StepReport
from starling.workload import Ticket, Workload

WORLD, NUM_FEATURES, NUM_OUTPUTS, FRAMES, BATCH = 2, 140, 32_000, 21, 4


class Published(Workload[FrameBatch]):
    """The BLSTM of arXiv 1907.05701 on random sub-sequences of 21 frames."""

    def make_model(self) -> nn.Module:
        return build_model(ModelConfig(name="blstm-hybrid", preset="ibm"), NUM_FEATURES, NUM_OUTPUTS, seed=1)

    def num_batches(self, epoch: int) -> int:
        return 1 << 20

    def load(self, ticket: Ticket) -> Sequence[FrameBatch]:
        generator = torch.Generator().manual_seed(ticket.step)
        features = torch.randn(BATCH, FRAMES, NUM_FEATURES, generator=generator)
        states = torch.randint(NUM_OUTPUTS, (BATCH, FRAMES), generator=generator)
        lengths = torch.full((BATCH,), FRAMES)
        return [FrameBatch(features, lengths, states, 0.2 * BATCH, tuple(map(str, range(BATCH))))]

    def loss(self, model: nn.Module, examples: FrameBatch) -> Tensor:
        return frame_loss(model, examples)


def bytes_of_tensors() -> int:
    """The memory of all tensors of this process, each counted once."""
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and each.device.type == "cpu":
            own = getattr(each, "_local_tensor", each).untyped_storage()
            storages[own.data_ptr()] = own.nbytes()
    return sum(storages.values())


class Measuring(Silence):
    """Counts a learner's memory after its second step, and notes when its steps ended."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.memory = 0

    def on_step(self, report: StepReport) -> None:
        self.times.append(time.monotonic())
        if len(self.times) == 3:  # the optimizer has its state, and the gradient is complete
            gc.collect()
            self.memory = bytes_of_tensors()


def learn(rank: int, folder: Path, size: int, steps: int) -> None:
    """One learner of a run with islands of `size`."""
    torch.set_num_threads(1)
    name = f"island-{size}"
    place = Place(rank, WORLD, rank, WORLD, FileStore(str(folder / f"{name}.store"), WORLD))
    job = Job(
        Published(),
        STRATEGIES["allreduce"],
        Budget(steps=steps * WORLD),
        partial(torch.optim.AdamW, lr=1e-3),
        island=Island(sharded=size),
    )
    measuring = Measuring()
    state = run_learner(job, place, torch.device("cpu"), name, measuring)
    if not isinstance(state, LearnerState):
        raise SystemExit("the run lost a learner")
    took = (measuring.times[-1] - measuring.times[2]) / (len(measuring.times) - 3)
    told = torch.tensor([measuring.memory, took], dtype=torch.float64)
    save_file({"weights": state.weights.clone(), "told": told}, folder / f"{name}-{rank}.safetensors")


def main(steps: int) -> None:
    """Train in both ways, and print what they took."""
    shapes = tuple(tuple(each.shape) for each in trainable(Published().make_model()))
    found = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        for size in (1, WORLD):
            multiprocessing.spawn(learn, (folder, size, steps), nprocs=WORLD)
            found[size] = [load_file(folder / f"island-{size}-{rank}.safetensors") for rank in range(WORLD)]
    whole, parts = found[1][0]["weights"], [each["weights"] for each in found[WORLD]]
    print(
        f"{len(whole):,} parameters; weights, gradients and AdamW's moments of a whole model: {16 * len(whole):,} bytes"
    )
    for size, each in found.items():
        memory, seconds = (max(float(learner["told"][place]) for learner in each) for place in (0, 1))
        share = memory / (16 * len(whole))
        print(
            f"islands of {size}: {memory:,.0f} bytes of tensors and shared memory ({share:.3f}), {seconds:.2f} s a step"
        )
    moved = (whole - torch.cat([each.detach().reshape(-1) for each in trainable(Published().make_model())])).abs().max()
    apart = (Cut(WORLD, shapes).whole(parts) - whole).abs().max()
    print(f"after {steps} steps the weights have moved by up to {moved:.3g}, and differ by at most {apart:.2g}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
