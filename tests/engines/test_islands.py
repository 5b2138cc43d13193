"""Islands on real processes: their arithmetic is that of whole models, in 1/n of the memory."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from starling.chance import derive_seed
from starling.checkpoint.cut import Cut
from starling.checkpoint.reader import load
from starling.engines.virtual.engine import VirtualEngine
from starling.errors import CheckpointError
from starling.predict.costs import memory_of
from starling.strategies.islands import Island
from starling.training.flat import trainable
from starling.training.tensor_plan import traffic_of
from starling.workload import Ticket
from tests.engines.island_process import CASES, Planned
from tests.warm_start import run_learners, start_learners

PAIRS = ("alone", "large", "saved whole", "resumed from whole")
TENSOR = ("tensor", "tensor large", "tensor speech", "tensor of three", "tensor not finite")
OTHER_PAIRS = ("recurrent", "tied", "not finite", "weighted")
RUNS = [
    *((name, [2, 3]) for name in OTHER_PAIRS),
    *((name, [0, 1]) for name in PAIRS),
    ("tensor", [2, 3]),
    ("tensor speech", [2, 3]),
    ("tensor large", [0, 1]),
    ("tensor not finite", [0, 1]),
    ("tensor of three", [0, 1, 2]),
    *((name, [0, 1, 2, 3]) for name in CASES if name not in (*PAIRS, *OTHER_PAIRS, *TENSOR, "skipping")),
]
pytestmark = pytest.mark.wide
"""Four processes run all cases; tests/engines/test_virtual_islands.py and tests/training/test_islands.py are quick."""
Result = Callable[[str], list[tuple[Tensor, dict[str, Any]]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("islands")
    run_learners([sys.executable, "-m", "tests.engines.island_process", json.dumps(RUNS), str(folder)], 4, folder)
    return folder


@pytest.fixture(scope="module")
def result(folder: Path) -> Result:
    """The final weights of a case's learners and what they told, by rank."""

    def of(name: str) -> list[tuple[Tensor, dict[str, Any]]]:
        ranks = range(len(dict(RUNS)[name]))
        found = [load_file(folder / f"{name}-{rank}.safetensors")["weights"] for rank in ranks]
        return [
            (each, json.loads((folder / f"{name}-{rank}.json").read_text()))
            for rank, each in zip(ranks, found, strict=True)
        ]

    return of


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainable(model)])


def islands(result: Result, name: str) -> list[Tensor]:
    """The whole weights of each island."""
    size, told = CASES[name].size, result(name)
    assert not [each["error"] for _, each in told if "error" in each]
    shapes = tuple(tuple(each.shape) for each in trainable(CASES[name].workload().make_model()))
    cut = Cut(size, shapes, tuple(told[0][1]["dims"]) if CASES[name].is_tensor else ())
    return [cut.whole([part for part, _ in told[first : first + size]]) for first in range(0, len(told), size)]


class Oracle:
    """Whole models without any of Starling's engines: one for each learner, with its own buffers."""

    def __init__(self, name: str, num_models: int) -> None:
        self.case = CASES[name]
        self.workload = self.case.workload()
        self.models = [self.workload.make_model() for _ in range(num_models)]
        self.optimizers = [self.case.optimizer(trainable(model)) for model in self.models]

    def gradient(self, number: int, tickets: list[int]) -> list[Tensor]:
        """The mean gradient of some mini-batches at a model's weights, unclipped."""
        model = self.models[number]
        model.zero_grad()
        for step in tickets:
            batch = self.workload.load(Ticket(0, step, step))
            total = sum(each.num_examples for each in batch)
            for place, each in enumerate(batch):
                torch.manual_seed(derive_seed(5, "gradient", 0, step, place))
                (self.workload.loss(model, each) * each.num_examples / total / len(tickets)).backward()
        return [parameter.grad.clone() for parameter in trainable(model)]

    def step(self, number: int, gradient: list[Tensor]) -> None:
        for parameter, each in zip(trainable(self.models[number]), gradient, strict=True):
            parameter.grad = each.clone()
        if self.case.clip is not None:
            nn.utils.clip_grad_norm_(trainable(self.models[number]), self.case.clip)
        self.optimizers[number].step()

    def put(self, number: int, weights: Tensor) -> None:
        with torch.no_grad():
            nn.utils.vector_to_parameters(weights.clone(), trainable(self.models[number]))


@pytest.mark.parametrize("name", ["alone", "recurrent", "tied", "allreduce", "four"])
def test_an_island_steps_as_a_whole_model_with_the_mean_gradient_of_its_ranks(name: str, result: Result) -> None:
    world, oracle = len(result(name)), Oracle(name, 1)
    for first in range(0, CASES[name].steps, world):
        oracle.step(0, oracle.gradient(0, list(range(first, first + world))))
    start = flat(CASES[name].workload().make_model())
    assert (flat(oracle.models[0]) - start).abs().max() > 0.05  # training has moved the model
    for found in islands(result, name):
        torch.testing.assert_close(found, flat(oracle.models[0]), rtol=0.0, atol=1e-6)


def test_a_gradient_that_is_not_finite_is_skipped_by_all_ranks(result: Result) -> None:
    oracle = Oracle("not finite", 1)
    for first in range(0, CASES["not finite"].steps, 2):
        if first != 2 * 2:  # the third of learner 1
            oracle.step(0, oracle.gradient(0, [first, first + 1]))
    torch.testing.assert_close(islands(result, "not finite")[0], flat(oracle.models[0]), rtol=0.0, atol=1e-6)


def test_ranks_weigh_their_mini_batches_by_size(result: Result) -> None:
    oracle = Oracle("weighted", 1)
    for first in range(0, CASES["weighted"].steps, 2):
        tickets = [first, first + 1]
        sizes = [oracle.workload.planned_size(Ticket(0, step, step), "utterances") for step in tickets]
        gradients = [oracle.gradient(0, [step]) for step in tickets]
        whole = [
            sum(size * one for size, one in zip(sizes, ones, strict=True)) for ones in zip(*gradients, strict=True)
        ]
        oracle.step(0, [each / sum(sizes) for each in whole])
    torch.testing.assert_close(islands(result, "weighted")[0], flat(oracle.models[0]), rtol=0.0, atol=1e-6)


def test_delayed_gradients_are_those_of_whole_models(result: Result) -> None:
    oracle, late = Oracle("delayed", 1), []
    for first in range(0, CASES["delayed"].steps, 4):
        late.append(oracle.gradient(0, list(range(first, first + 4))))
        if len(late) > 1:
            oracle.step(0, late.pop(0))
    oracle.step(0, late.pop(0))
    for found in islands(result, "delayed"):
        torch.testing.assert_close(found, flat(oracle.models[0]), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("name", ["dpsgd", "delay-by-one"])
def test_islands_average_as_learners_with_whole_models(name: str, result: Result) -> None:
    """Two learners mix with their mean, whatever the pattern; gradients are taken before."""
    oracle = Oracle(name, 2)
    for first in range(0, CASES[name].steps, 4):
        gradients = [oracle.gradient(number, [first + 2 * number, first + 2 * number + 1]) for number in range(2)]
        mean = (flat(oracle.models[0]) + flat(oracle.models[1])) / 2
        for number, gradient in enumerate(gradients):
            oracle.put(number, mean)
            oracle.step(number, gradient)
    for number, found in enumerate(islands(result, name)):
        torch.testing.assert_close(found, flat(oracle.models[number]), rtol=0.0, atol=1e-6)
    assert not torch.equal(*islands(result, name))


@pytest.mark.parametrize("name", ["local-sgd", "diloco"])
def test_periodic_strategies_hold_between_islands(name: str, result: Result) -> None:
    """As on the virtual engine, where an island is one learner with a whole model."""
    expected = [state.weights for state in VirtualEngine(CASES[name].job(), 4).run().states]
    for found, whole in zip(islands(result, name), expected, strict=True):
        torch.testing.assert_close(found, whole, rtol=0.0, atol=1e-6)


def test_islands_of_another_size_begin_without_what_a_strategy_keeps(folder: Path, result: Result) -> None:
    """From the consensus; islands of the same size keep it."""
    assert islands(result, "diloco")
    (path,) = (folder / "diloco").glob("step-*")
    job = CASES["diloco"].job()
    saved, strategy = load(path), job.strategy.described(job.options)
    start = saved.start(3, 4, strategy, Island(sharded=4))
    assert start.strategy == {}
    assert torch.equal(start.weights, saved.consensus())
    assert saved.manifest.learners == 4
    assert saved.start(3, 4, strategy, Island(sharded=2)).strategy["momentum"].abs().max() > 0.0


@pytest.mark.parametrize("name", ["adpsgd", "hadpsgd"])
def test_asynchronous_islands_lose_no_step(name: str, result: Result) -> None:
    """Gradients of 1 count steps, and no averaging changes the mean of all islands."""
    found = islands(result, name)
    num_steps = CASES[name].steps / 2 if name == "adpsgd" else CASES[name].steps / 4 * 2
    torch.testing.assert_close(sum(found), torch.full_like(found[0], -0.5 * num_steps), rtol=0.0, atol=1e-3)
    assert all(told["rounds"] > 0 for _, told in result(name))


@pytest.mark.parametrize("machines", ["uneven", pytest.param("apart", marks=pytest.mark.soak)])
def test_islands_average_between_machines(machines: str, result: Result, tmp_path: Path) -> None:
    """By gloo, or by gloo for one shard and in shared memory for the other."""
    names = ("allreduce", "dpsgd", "adpsgd")
    runs = json.dumps([(name, [0, 1, 2, 3]) for name in names])
    run_learners([sys.executable, "-m", "tests.engines.island_process", runs, str(tmp_path), machines], 4, tmp_path)
    for name in names[:2]:
        for rank, (weights, _) in enumerate(result(name)):
            found = load_file(tmp_path / f"{name}-{rank}.safetensors")["weights"]
            torch.testing.assert_close(found, weights, rtol=0.0, atol=1e-6)
    steps = sum(load_file(tmp_path / f"adpsgd-{rank}.safetensors")["weights"][0] for rank in (0, 2))
    assert float(steps) == pytest.approx(-0.5 * CASES["adpsgd"].steps / 2, abs=1e-3)


def test_a_tensor_island_steps_as_a_whole_model(result: Result) -> None:
    """With one mini-batch for all its ranks; dropout inside and outside the cut layers is that of the whole model."""
    for name in ("tensor", "tensor speech", "tensor of three"):
        oracle = Oracle(name, 1)
        for step in range(CASES[name].steps):
            oracle.step(0, oracle.gradient(0, [step]))
        start = flat(CASES[name].workload().make_model())
        assert (flat(oracle.models[0]) - start).abs().max() > 0.05
        (found,) = islands(result, name)
        torch.testing.assert_close(found, flat(oracle.models[0]), rtol=0.0, atol=1e-6)


def test_a_gradient_that_one_rank_finds_not_finite_is_skipped_by_its_tensor_island(result: Result) -> None:
    oracle = Oracle("tensor not finite", 1)
    for step in range(CASES["tensor not finite"].steps):
        if step != 2:  # the third of learner 1
            oracle.step(0, oracle.gradient(0, [step]))
    torch.testing.assert_close(islands(result, "tensor not finite")[0], flat(oracle.models[0]), rtol=0.0, atol=1e-6)


def test_tensor_islands_average_as_learners_with_whole_models(result: Result) -> None:
    together, apart = Oracle("tensor allreduce", 1), Oracle("tensor dpsgd", 2)
    for first in range(0, 24, 2):
        together.step(0, together.gradient(0, [first, first + 1]))
        gradients = [apart.gradient(number, [first + number]) for number in range(2)]
        mean = (flat(apart.models[0]) + flat(apart.models[1])) / 2
        for number, gradient in enumerate(gradients):
            apart.put(number, mean)
            apart.step(number, gradient)
    for number, found in enumerate(islands(result, "tensor allreduce")):
        torch.testing.assert_close(found, flat(together.models[0]), rtol=0.0, atol=1e-6)
        own = islands(result, "tensor dpsgd")[number]
        torch.testing.assert_close(own, flat(apart.models[number]), rtol=0.0, atol=1e-6)


def test_tensor_islands_weigh_their_mini_batches_by_size(result: Result) -> None:
    oracle = Oracle("tensor weighted", 1)
    for first in range(0, CASES["tensor weighted"].steps, 2):
        sizes = [oracle.workload.planned_size(Ticket(0, step, step), "utterances") for step in (first, first + 1)]
        gradients = [oracle.gradient(0, [step]) for step in (first, first + 1)]
        mean = [(sizes[0] * one + sizes[1] * two) / sum(sizes) for one, two in zip(*gradients, strict=True)]
        oracle.step(0, mean)
    for found in islands(result, "tensor weighted"):
        torch.testing.assert_close(found, flat(oracle.models[0]), rtol=0.0, atol=1e-6)


def test_a_periodic_strategy_holds_between_tensor_islands(result: Result) -> None:
    expected = [state.weights for state in VirtualEngine(CASES["tensor diloco"].job(), 4).run().states]
    for found, whole in zip(islands(result, "tensor diloco"), expected, strict=True):
        torch.testing.assert_close(found, whole, rtol=0.0, atol=1e-6)


def test_asynchronous_tensor_islands_lose_no_step(result: Result) -> None:
    """Each ticket is one step of one island, of what is cut and of what is not."""
    found = islands(result, "tensor adpsgd")
    total = torch.full_like(found[0], -0.5 * CASES["tensor adpsgd"].steps)
    torch.testing.assert_close(sum(found), total, rtol=0.0, atol=1e-3)
    assert all(told["rounds"] > 0 for _, told in result("tensor adpsgd"))


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("tensor saved", "tensor resumed"),
        ("tensor saved", "tensor resumed as four"),
        ("tensor saved", "tensor resumed sharded"),
        ("sharded saved", "sharded resumed as tensor"),
    ],
)
def test_a_run_resumes_with_islands_of_another_kind(saved: str, resumed: str, result: Result) -> None:
    """Two islands of two, then one of four, or of the other kind: weights, moments and step counts are those of a whole
    model that takes as many mini-batches at a time."""
    oracle = Oracle(resumed, 1)
    for name, steps in ((saved, range(12)), (resumed, range(12, 24))):
        case = CASES[name]
        num_batches = 4 // case.size if case.is_tensor else 4
        for first in steps[::num_batches]:
            oracle.step(0, oracle.gradient(0, list(range(first, first + num_batches))))
    for found in islands(result, resumed):
        torch.testing.assert_close(found, flat(oracle.models[0]), rtol=0.0, atol=1e-6)


def test_a_checkpoint_of_tensor_islands_has_a_whole_model(folder: Path, result: Result) -> None:
    (path,) = (folder / "half tensor").glob("step-*")
    assert torch.equal(load(path).consensus(), islands(result, "tensor saved")[0])
    assert torch.equal(load_file(path / "model" / "model.safetensors")["weights"], islands(result, "tensor saved")[0])
    assert load(path).manifest.next_ticket.step == 12


def test_bytes_within_a_tensor_island_are_those_of_the_formula(result: Result) -> None:
    """As the virtual engine counts them, from the sizes of the first mini-batch; others have other sizes, and the 9
    outputs are padded to 10."""
    traffic, num_parts = traffic_of(Planned()), 1
    for told in result("tensor"):
        per_row = (sum(traffic.gathers) / 9 * 10 + 2 * sum(traffic.reductions)) / 4 / num_parts  # the first has 4 rows
        rows = sum(4 + (step + each) % 3 for step in range(12) for each in range(1 + step % 3))
        own = sum(-(-each.shape[0] // 2) * each[0].numel() for each in uncut(Planned().make_model()))
        assert told[1]["sent"] == pytest.approx(per_row / 2 * rows + 12 * 4 * own, rel=1e-6)


def uncut(model: nn.Module) -> list[Tensor]:
    cut = ("widening.weight", "widening.bias", "narrowing.weight", "output.weight", "output.bias")
    return [each for name, each in model.named_parameters() if name not in cut]


def test_a_rank_takes_its_share_of_memory(result: Result) -> None:
    """Weights, gradients and AdamW's two moments."""
    whole = 4 * flat(CASES["large"].workload().make_model()).nbytes
    for _, told in result("large"):
        assert whole / 4 < told["memory"] <= (0.5 + 0.1) * whole


@pytest.mark.parametrize("name", ["large", "tensor large"])
def test_the_memory_of_a_rank_is_as_predicted(name: str, result: Result) -> None:
    """When a gradient is complete: a sharded island has given back what it gathered by then."""
    predicted = memory_of(CASES[name].job())
    expected = predicted.weights + predicted.gradients + predicted.optimizer
    if CASES[name].is_tensor:
        expected += predicted.gathered
    assert result(name)[0][1]["memory"] == pytest.approx(expected, rel=0.05)
    assert predicted.optimizer == 2 * predicted.weights
    rows = 4  # of the one micro-batch of the first mini-batch, which pass seven layers of 350 units
    assert predicted.activations == pytest.approx(4 * rows * 7 * 350, rel=0.1)


def test_bytes_within_and_between_islands_are_counted(result: Result) -> None:
    """A pass gathers each unit for forward and again for backward, and scatters its gradient; the root keeps its own
    parameters between. Then the mean of the shard's gradient travels between the two islands."""
    numbers = Cut(
        2, tuple(tuple(each.shape) for each in trainable(CASES["large"].workload().make_model()))
    ).local_numbers
    passes = sum(max(1 + (first + rank) % 3 for rank in range(2)) for first in range(0, 8, 4))
    for rank in (0, 1):
        told = result("two large")[rank][1]
        between = 2 * 4 * numbers  # two steps; 2 (L - 1) / L of a vector for L = 2
        assert told["sent"] == pytest.approx(3 * 4 * numbers * passes + between, rel=0.01)


def test_a_parameter_left_out_of_a_mini_batch_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.engines.island_process", '[["skipping", [0, 1]]]', str(tmp_path)]
    with start_learners(command, 2, tmp_path) as started:
        for rank in range(2):
            started.end(rank, within=120.0)
    errors = [json.loads(path.read_text()).get("error", "") for path in tmp_path.glob("*.json")]
    assert any("ConfigError" in each and "second" in each and "leave out island" in each for each in errors)


def test_a_checkpoint_has_a_whole_model_and_a_file_for_each_shard(folder: Path, result: Result) -> None:
    (path,) = (folder / "half").glob("step-*")
    whole = load_file(path / "model" / "model.safetensors")["weights"]
    assert torch.equal(whole, islands(result, "saved")[0])
    assert torch.equal(load(path).consensus(), whole)
    assert len(list(path.glob("learner-*.safetensors"))) == 4
    assert load(path).manifest.consensus_distance == 0.0


@pytest.mark.parametrize(
    ("resumed", "straight", "atol"),
    [("resumed", "allreduce", 0.0), ("resumed as four", "allreduce", 1e-6), ("resumed whole", "allreduce", 1e-6)],
)
def test_a_run_resumes_with_islands_of_any_size(resumed: str, straight: str, atol: float, result: Result) -> None:
    """Weights, Adam's moments and step counts are those of the run that was not interrupted."""
    for found in islands(result, resumed):
        torch.testing.assert_close(found, islands(result, straight)[0], rtol=0.0, atol=atol)


def test_a_run_of_whole_models_resumes_with_islands(result: Result) -> None:
    torch.testing.assert_close(
        islands(result, "resumed from whole")[0], islands(result, "alone")[0], rtol=0.0, atol=1e-6
    )


def test_an_index_that_does_not_fit_its_file_is_refused(folder: Path, tmp_path: Path) -> None:
    from starling.checkpoint.reader import Checkpoint

    (path,) = (folder / "half").glob("step-*")
    for each in path.iterdir():
        if each.is_file():
            (tmp_path / each.name).write_bytes(each.read_bytes())
    for change in ({"member": 2}, {"size": 3}, {"order": [0, 0, 1, 2, 3, 4, 5, 6]}, {"shapes": [[5, 7]]}):
        index = json.loads((path / "learner-0.json").read_text())
        index["island"] |= change
        (tmp_path / "learner-0.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match="does not contain a learner's state"):
            Checkpoint(tmp_path, load(path).manifest).learner(0)
