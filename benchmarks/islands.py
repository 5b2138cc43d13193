"""The published acoustic model (43 million parameters, 32,000 outputs) in islands of two, beside whole models.

`python -m benchmarks.islands [STEPS]` trains it on this machine in four ways: two learners that step together, each
with a whole model; two learners with one sharded model, which take as many mini-batches; one learner; and two learners
with the output layer cut by tensor parallelism, which take as many mini-batches as one. It prints memory, the time of a
step, and how far the weights of the second way differ from those of the first, and those of the fourth from the third.
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
from starling.speech.models import build_model, model_config
from starling.speech.training.workload import FrameBatch, frame_loss
from starling.strategies import STRATEGIES
from starling.strategies.islands import Island
from starling.training.flat import trainable
from starling.training.job import Job, Observer, StepReport
from starling.workload import Ticket, Workload

WORLD = 2
WAYS = {
    "two whole models": (WORLD, Island()),
    "an island of two, sharded": (WORLD, Island(sharded=WORLD)),
    "one whole model": (1, Island()),
    "an island of two, tensor": (WORLD, Island(tensor=WORLD)),
}
"""The number of learners, and their islands, in each way."""
NUM_FEATURES, NUM_OUTPUTS, FRAMES, BATCH = 140, 32_000, 21, 4


class Published(Workload[FrameBatch]):
    """The BLSTM of arXiv 1907.05701 on random sub-sequences of 21 frames."""

    def make_model(self) -> nn.Module:
        return build_model(model_config(name="blstm-hybrid", preset="ibm"), NUM_FEATURES, NUM_OUTPUTS, seed=1)

    def num_batches(self, epoch: int) -> int:
        return 1 << 20

    def load(self, ticket: Ticket) -> Sequence[FrameBatch]:
        generator = torch.Generator().manual_seed(ticket.step)
        features = torch.randn(BATCH, FRAMES, NUM_FEATURES, generator=generator)
        states = torch.randint(NUM_OUTPUTS, (BATCH, FRAMES), generator=generator)
        lengths = torch.full((BATCH,), FRAMES)
        return [FrameBatch(features, lengths, 0.2 * BATCH, tuple(map(str, range(BATCH))), states)]

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


class Measuring(Observer):
    """Records a learner's memory after its second step, and the times at which its steps ended."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.memory = 0

    def on_step(self, report: StepReport) -> None:
        self.times.append(time.monotonic())
        if len(self.times) == 3:  # the optimizer has its state, and the gradient is complete
            gc.collect()
            self.memory = bytes_of_tensors()


def learn(rank: int, folder: Path, name: str, steps: int) -> None:
    """Be one learner of a run."""
    torch.set_num_threads(1)
    world, island = WAYS[name]
    place = Place(rank, world, rank, world, FileStore(str(folder / f"{name}.store"), world))
    job = Job(
        Published(),
        STRATEGIES["allreduce"],
        Budget(steps=steps * world // island.tensor),
        partial(torch.optim.AdamW, lr=1e-3),
        island=island,
    )
    measuring = Measuring()
    state = run_learner(job, place, torch.device("cpu"), name, measuring)
    if not isinstance(state, LearnerState):
        raise SystemExit("the run lost a learner")
    told = torch.zeros(2, dtype=torch.float64)
    if measuring.times:  # not of the second rank of a tensor island, which reports no steps
        told[0] = measuring.memory
        told[1] = (measuring.times[-1] - measuring.times[2]) / (len(measuring.times) - 3)
    save_file({"weights": state.weights.clone(), "told": told}, folder / f"{name}-{rank}.safetensors")


def main(steps: int) -> None:
    """Train in all ways, and print their memory and time."""
    model = trainable(Published().make_model())
    shapes, begin = tuple(tuple(each.shape) for each in model), torch.cat([each.detach().reshape(-1) for each in model])
    print(
        f"{len(begin):,} parameters; weights, gradients and AdamW's moments of a whole model: {16 * len(begin):,} bytes"
    )
    before = begin
    with TemporaryDirectory() as folder:
        for name, (world, island) in WAYS.items():
            multiprocessing.spawn(learn, (Path(folder), name, steps), nprocs=world)
            found = [load_file(Path(folder) / f"{name}-{rank}.safetensors") for rank in range(world)]
            memory, seconds = (max(float(each["told"][place]) for each in found) for place in (0, 1))
            share = memory / (16 * len(begin))
            print(f"{name}: {memory:,.0f} bytes of tensors and shared memory ({share:.3f}), {seconds:.2f} s a step")
            weights = found[0]["weights"]
            if island.size > 1:  # no layer of this model is cut along its columns
                weights = Cut(world, shapes).whole([each["weights"] for each in found])
                moved, apart = ((weights - each).abs().max() for each in (begin, before))
                print(
                    f"  after {steps} steps: moved by up to {moved:.3g}, differs from the above by at most {apart:.2g}"
                )
            before = weights


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
