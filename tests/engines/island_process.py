"""The program of a process in the tests of islands: a learner of every case that it is a member of, one by one."""

import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.optim import Optimizer

from benchmarks.islands import bytes_of_tensors
from starling.budget import Budget
from starling.chance import derive_seed
from starling.checkpoint.reader import load
from starling.checkpoint.state import LearnerState
from starling.checkpoint.writer import CheckpointWriter
from starling.engines.processes import island, links, tensor
from starling.engines.processes.member import run_learner
from starling.engines.processes.place import Place
from starling.engines.processes.tensor import CutDropout
from starling.launch.rendezvous import find_place
from starling.speech.models import build_model, model_config
from starling.speech.models.recurrent import BidirectionalLayer, reversal
from starling.strategies import find_strategy
from starling.strategies.islands import Island
from starling.training.faults import Fault, NotFinite
from starling.training.job import EpochReport, Job, Observer, StepReport
from starling.workload import Ticket, Unit, Weighting, Workload
from tests.contract.problems import Points

island.SMALLEST_UNIT = 20  # so that small models have several units, which are gathered one by one
tensor.GATHERED_TOGETHER = 20  # and what is not cut is gathered in several messages


class Uneven(Workload[Points]):
    """A network whose rows do not divide by two, on mini-batches of one to three micro-batches of unequal size."""

    def make_model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Sequential(nn.Linear(7, 9), nn.Tanh()), nn.Linear(9, 1))

    def num_batches(self, epoch: int) -> int:
        return 1 << 20

    def load(self, ticket: Ticket) -> Sequence[Points]:
        generator = torch.Generator().manual_seed(derive_seed(3, "points", ticket.step))
        sizes = [4 + (ticket.step + each) % 3 for each in range(1 + ticket.step % 3)]
        return [Points(torch.randn(n, 5, generator=generator), torch.randn(n, generator=generator)) for n in sizes]

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        return ((model(examples.inputs).squeeze(1) - examples.targets) ** 2).mean()


class Sized(Uneven):
    """The sizes of its mini-batches are known before they are loaded."""

    def planned_size(self, ticket: Ticket, unit: Unit) -> float:
        return float(sum(each.num_examples for each in self.load(ticket)))


class Normalised(Uneven):
    """With batch normalisation, whose buffers follow what each rank computed."""

    def make_model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([BidirectionalLayer(5, 3), BidirectionalLayer(6, 3)])
        self.output = nn.Linear(6, 1)

    def forward(self, frames: Tensor) -> Tensor:
        reverse = reversal(torch.tensor([frames.shape[1]] * len(frames)), frames.shape[1])
        for layer in self.layers:
            frames = layer(frames, reverse)
        found: Tensor = self.output(frames).squeeze(-1)
        return found


class Recurrent(Uneven):
    """Two bidirectional LSTM layers."""

    def make_model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return _Recurrent()

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        return ((model(examples.inputs[None]) - examples.targets) ** 2).mean()


class Tied(Uneven):
    """Two layers share a weight, a third is frozen."""

    def make_model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 7), nn.Linear(7, 1))
        model[2].weight = model[0].weight
        model[3].requires_grad_(False)
        return model


class Counting(Uneven):
    """Every gradient is 1 everywhere, so that the weights count the steps."""

    def make_model(self) -> nn.Module:
        model = nn.Linear(1, 5, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        return model(torch.ones(1, 1)).sum()


class _Planned(nn.Module):
    """An inner layer by units, with dropout inside and outside, an output layer whose rows do not divide by two, and
    what is not cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 7), nn.LayerNorm(7)
        self.widening, self.narrowing, self.output = nn.Linear(7, 12), nn.Linear(12, 7), nn.Linear(7, 9)
        self.wide_dropout, self.dropout = nn.Dropout(0.2), nn.Dropout(0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs))
        wide = self.wide_dropout(torch.tanh(self.widening(hidden)))
        found: Tensor = self.output(hidden + self.dropout(self.narrowing(wide))).log_softmax(1)
        return found

    def tensor_plan(self) -> dict[str, Any]:
        return {
            "widening": ColwiseParallel(),
            "wide_dropout": CutDropout(),
            "narrowing": RowwiseParallel(),
            "out*": ColwiseParallel(output_layouts=Replicate()),
        }


class Planned(Uneven):
    """A model that can be cut, with cross-entropy."""

    def make_model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return _Planned()

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        return nn.functional.nll_loss(model(examples.inputs), (4.0 + 2.0 * examples.targets).clamp(0, 8).long())


class PlannedSized(Planned, Sized):
    """The sizes of its mini-batches are known before they are loaded."""


class Speech(Uneven):
    """A Conformer with an attention decoder and dropout, which say themselves how they are cut."""

    def make_model(self) -> nn.Module:
        sizes = {"layers": 1, "width": 16, "heads": 2}
        decoder = {"kind": "attention", **sizes, "dropout": 0.2}
        config = {"name": "conformer", "preset": "tiny", **sizes, "feed_forward": 24, "channels": 8, "dropout": 0.2}
        return build_model(model_config(**{**config, "decoder": decoder}), 20, 11, seed=1)

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        features, lengths = torch.randn(2, 40, 20), torch.tensor([40, 32])
        tokens, token_lengths = torch.tensor([2, 3, 4, 5, 6, 7]), torch.tensor([3, 3])
        log_probs, lengths, loss = model(features, lengths, tokens, token_lengths)
        ctc = nn.functional.ctc_loss(log_probs.transpose(0, 1), tokens.view(2, 3), lengths, token_lengths)
        return ctc + loss / 6


class PlannedCounting(Counting):
    """Every gradient is 1, of what is cut and of what is not."""

    def make_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(1, 5, bias=False), nn.Linear(1, 5, bias=False))
        for each in model.parameters():
            nn.init.zeros_(each)
        model.tensor_plan = {"1": ColwiseParallel(output_layouts=Replicate())}
        return model

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        return sum(each(torch.ones(1, 1)).sum() for each in model.children())


class _Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, inputs: Tensor, skips: bool) -> Tensor:
        hidden = self.first(inputs)
        found: Tensor = self.last(hidden if skips else self.second(hidden))
        return found


class Skipping(Uneven):
    """Some mini-batches leave a layer out."""

    def make_model(self) -> nn.Module:
        return _Skipping()

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        return model(examples.inputs, bool(examples.targets[0] > 0)).square().mean()


class Large(Uneven):
    """3 MB of weights: what the model takes is more than what surrounds it."""

    def make_model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return nn.Sequential(nn.Linear(5, 350), *(nn.Linear(350, 350) for _ in range(6)), nn.Linear(350, 1))


class PlannedLarge(Large):
    """Three of its eight layers can be cut."""

    def make_model(self) -> nn.Module:
        model = super().make_model()
        whole = ColwiseParallel(output_layouts=Replicate())
        model.tensor_plan = {"1": whole, "3": ColwiseParallel(), "4": RowwiseParallel()}
        return model


def sgd(rate: float) -> Callable[[list[nn.Parameter]], Optimizer]:
    return partial(torch.optim.SGD, lr=rate)


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    """Decay for matrices only, as is usual: its order of the parameters is another than the model's."""
    matrices = [each for each in parameters if each.dim() > 1]
    others = [each for each in parameters if each.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=0.02, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    strategy: str = "allreduce"
    workload: type[Uneven] = Uneven
    steps: int = 24
    size: int = 2
    is_tensor: bool = False
    optimizer: Callable[[list[nn.Parameter]], Optimizer] = adamw
    options: dict[str, Any] = field(default_factory=dict)
    clip: float | None = 0.5
    faults: tuple[Fault, ...] = ()
    weighting: Weighting = "batches"
    saves: str = ""
    resumes: str = ""

    def job(self) -> Job:
        strategy = find_strategy(self.strategy)
        return Job(
            workload=self.workload(),
            strategy=strategy,
            options=strategy.options.model_validate(self.options),
            island=Island(tensor=self.size) if self.is_tensor else Island(sharded=self.size),
            budget=Budget(steps=self.steps),
            make_optimizer=self.optimizer,
            clip_norm=self.clip,
            faults=self.faults,
            weighting=self.weighting,
            seed=5,
        )


CASES = {
    "alone": Case(),
    "recurrent": Case(workload=Recurrent, steps=12),
    "tied": Case(workload=Tied),
    "not finite": Case(faults=(NotFinite(nan=1, at_step=3),)),
    "weighted": Case(workload=Sized, strategy="adpsgd", weighting="utterances"),
    "allreduce": Case(),
    "delayed": Case("delayed", options={"delay": 1}),
    "dpsgd": Case("dpsgd", workload=Normalised, optimizer=sgd(0.1), clip=None),
    "delay-by-one": Case("delay-by-one", workload=Normalised, optimizer=sgd(0.1), clip=None),
    "adpsgd": Case("adpsgd", workload=Counting, steps=80, optimizer=sgd(0.5), options={"pattern": "pairs"}, clip=None),
    "hadpsgd": Case("hadpsgd", workload=Counting, optimizer=sgd(0.5), options={"per_node": 2}, clip=None),
    "local-sgd": Case("local-sgd", optimizer=sgd(0.1), options={"every": 2}),
    "diloco": Case("diloco", optimizer=sgd(0.1), options={"every": 2}, saves="diloco"),
    "four": Case(size=4),
    "large": Case(workload=Large, steps=8),
    "two large": Case(workload=Large, steps=8),
    "saved": Case(steps=12, saves="half"),
    "resumed": Case(resumes="half"),
    "resumed as four": Case(size=4, resumes="half"),
    "resumed whole": Case(size=1, resumes="half"),
    "saved whole": Case(size=1, steps=12, saves="half whole"),
    "resumed from whole": Case(resumes="half whole"),
    "skipping": Case(workload=Skipping),
    "tensor": Case(workload=Planned, steps=12, is_tensor=True),
    "tensor of three": Case(workload=Planned, steps=12, size=3, is_tensor=True),
    "tensor not finite": Case(workload=Planned, steps=12, is_tensor=True, faults=(NotFinite(nan=1, at_step=3),)),
    "tensor allreduce": Case(workload=Planned, is_tensor=True),
    "tensor dpsgd": Case("dpsgd", Planned, is_tensor=True, optimizer=sgd(0.1), clip=None),
    "tensor speech": Case(workload=Speech, steps=6, is_tensor=True, optimizer=sgd(0.1)),
    "tensor large": Case(workload=PlannedLarge, steps=8, is_tensor=True),
    "tensor weighted": Case(workload=PlannedSized, steps=12, is_tensor=True, weighting="utterances"),
    "tensor diloco": Case("diloco", Planned, is_tensor=True, optimizer=sgd(0.1), options={"every": 2}),
    "tensor adpsgd": Case(
        "adpsgd",
        PlannedCounting,
        steps=40,
        is_tensor=True,
        optimizer=sgd(0.5),
        options={"pattern": "pairs"},
        clip=None,
    ),
    "tensor saved": Case(workload=Planned, steps=12, is_tensor=True, saves="half tensor"),
    "tensor resumed": Case(workload=Planned, is_tensor=True, resumes="half tensor"),
    "tensor resumed as four": Case(workload=Planned, size=4, is_tensor=True, resumes="half tensor"),
    "tensor resumed sharded": Case(workload=Planned, resumes="half tensor"),
    "sharded saved": Case(workload=Planned, steps=12, saves="half sharded"),
    "sharded resumed as tensor": Case(workload=Planned, is_tensor=True, resumes="half sharded"),
}


class Measuring(Observer):
    """Counts memory once the optimizer has a state, if it is asked to, and the bytes that this rank has sent."""

    def __init__(self, counts_memory: bool) -> None:
        self.memory = self.sent = self.rounds = 0
        self._counts_memory = counts_memory  # which takes longer than a step

    def on_step(self, report: StepReport) -> None:
        if self._counts_memory and report.ticket.step >= 4:
            gc.collect()
            self.memory = bytes_of_tensors()

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self.sent += report.averaging.bytes_sent
        self.rounds += report.averaging.rounds


def main(runs: list[tuple[str, list[int]]], folder: Path) -> None:
    """Each run is the name of a case and the processes that are its learners, by rank."""
    torch.set_num_threads(1)
    place = find_place()
    for number, (name, members) in enumerate(runs):
        if place.rank not in members:
            continue
        rank, world, case = members.index(place.rank), len(members), CASES[name]
        own = Place(rank, world, rank, world, PrefixStore(f"case{number}", place.store))
        start = None
        if case.resumes:
            job = case.job()
            strategy = job.strategy.described(job.options)
            saved = load(next((folder / case.resumes).glob("step-*")))
            start = saved.start(rank, world, strategy, job.island)
        measuring = Measuring(counts_memory=issubclass(case.workload, Large))
        before = 0
        if issubclass(case.workload, Large):
            gc.collect()  # what an earlier case has left
            before = bytes_of_tensors()
        told: dict[str, Any] = {}
        weights = torch.empty(0)
        try:
            state = run_learner(case.job(), own, torch.device("cpu"), name, measuring, start, timeout_seconds=60.0)
        except Exception as error:
            told["error"] = f"{type(error).__name__}: {error}"
        else:
            weights = state.weights.clone()
            told["dims"] = state.shard_of_island.cut.dims if state.shard_of_island else ()
            if case.saves:
                save(folder / case.saves, state, own.store)
        told |= {"memory": measuring.memory - before, "sent": measuring.sent, "rounds": measuring.rounds}
        save_file({"weights": weights}, folder / f"{name}-{rank}.safetensors")
        (folder / f"{name}-{rank}.json").write_text(json.dumps(told))


def save(folder: Path, state: LearnerState, store: Any) -> None:
    def write_model(path: Path, weights: Tensor, buffers: dict[str, Tensor]) -> None:
        path.mkdir()
        save_file({"weights": weights, **buffers}, path / "model.safetensors")

    CheckpointWriter(folder, lambda name: int(store.add(name, 1)), write_model, {}).save(state)
    store.set(f"saved/{state.rank}", "")
    store.wait([f"saved/{rank}" for rank in range(state.world)])  # the next case reads it


MACHINES = {
    "apart": lambda rank: None,
    "uneven": lambda rank: f"machine {rank // 3}",  # ranks 0 and 2 share memory, ranks 1 and 3 do not
}
"""On which machine each rank seems to be; None: on one of its own."""

if __name__ == "__main__":
    if len(sys.argv) > 3:
        links._machine = partial(MACHINES[sys.argv[3]], int(os.environ["RANK"]))
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
