"""The planner against published measurements of GPUs: `python -m benchmarks.published_gpus FILE.csv...`.

It reads two forms of CSV, those of vTrain (arXiv 2312.12391): iteration times of GPT-like models, of which the rows
without a pipeline are predicted, and all-reduce times of NCCL, in files named such as `allreduce_a100_8.csv`. Links,
all-reduces, islands of tensor parallelism and the waiting for the slowest are the planner's own
(`starling.predict.predict.simulate`). The time that a device computes comes from one of three models, `MODELS`. Each
has numbers that are fitted to two rows, and the other constants come from data sheets and papers.
"""

import argparse
import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean, median

from scipy.optimize import brentq

from starling.engines.virtual.cluster import ComputeModel, Links
from starling.errors import ConfigError
from starling.predict.costs import Costs, JobFacts, find_preset
from starling.predict.predict import Arm, Machines, simulate
from starling.strategies.islands import Island
from starling.training.tensor_plan import Traffic

PRESETS = {"a100": "a100-2020", "v100": "v100-2019"}
A100 = find_preset(PRESETS["a100"])
VOCABULARY = 51_200
"""Size of the vocabulary in the GPT models of Megatron-LM (Narayanan et al. 2021)."""
HALF = 2
"""Bytes of an activation, or of a gradient that is averaged, in half precision."""
BYTES_OF_A_STATE = 18
"""Bytes that mixed precision with Adam keeps for each weight: weight and gradient in half precision and in single
precision, two moments, and a copy (Rajbhandari et al. 2020, plus the gradient in single precision)."""
BYTES_OF_A_STEP = 28
"""Bytes that Adam reads and writes for each weight: the gradient, and the weight and two moments in single precision
twice, and the weight in half precision."""
ROUNDS = 2
"""Number of iterations in half a simulation; devices are equal, so their pace is steady from the beginning."""
CLAIMS = (
    "vTrain: 8.4 % mean in one node, 14.7 % across nodes (a profile of each operation); SimAI 2 %, Multiverse below "
    "3 %, Proteus 3 %, Charon 3.7 %, Maya below 5 %, Echo 8 % (each on its own rows)"
)


@dataclass(frozen=True)
class Operation:
    """An operation of a Transformer layer. `x` is the number of an activation's elements (sequence length x micro-batch
    x hidden size), and `u` is the number of attention scores divided by `x`."""

    name: str
    products: float = 0.0
    """Floating-point operations divided by `x` and the hidden size, for products with weights."""
    attention: float = 0.0
    """Floating-point operations divided by `x` and the sequence length, for products among activations."""
    read_and_written: float = 0.0
    """Bytes divided by `x`."""
    of_scores: float = 0.0
    """Bytes divided by `x` and `u`."""
    is_divided: bool = True
    """Whether tensor parallelism divides the operation; it repeats the others on each device."""


_WHOLE = partial(Operation, is_divided=False)
_PROJECT, _EXPAND = (2.0, 0.0, 4.0), (8.0, 0.0, 10.0)
_QKV, _ATTEND = (6.0, 0.0, 8.0), (0.0, 2.0, 4.0, 2.0)
FORWARD = (
    *(_WHOLE("layer norm", read_and_written=4), Operation("query, key, value", *_QKV)),
    *(Operation("scores", *_ATTEND), Operation("softmax", of_scores=4), Operation("dropout of scores", of_scores=5)),
    *(Operation("attention", *_ATTEND), Operation("transpose", read_and_written=4), Operation("project", *_PROJECT)),
    *(_WHOLE("bias, dropout, add", read_and_written=7), _WHOLE("layer norm", read_and_written=4)),
    *(Operation("expand", *_EXPAND), Operation("GELU", read_and_written=16), Operation("contract", *_EXPAND)),
    _WHOLE("bias, dropout, add", read_and_written=7),
)
BACKWARD = (
    *(_WHOLE("dropout", read_and_written=5), _WHOLE("add", read_and_written=6), _WHOLE("bias", read_and_written=2)),
    *(Operation("contract: input", *_EXPAND), Operation("contract: weight", *_EXPAND)),
    *(Operation("GELU", read_and_written=24), Operation("bias", read_and_written=8)),
    *(Operation("expand: input", *_EXPAND), Operation("expand: weight", *_EXPAND)),
    *(_WHOLE("layer norm: input", read_and_written=6), _WHOLE("layer norm: weight", read_and_written=4)),
    *(_WHOLE("dropout", read_and_written=5), _WHOLE("add", read_and_written=6), _WHOLE("bias", read_and_written=2)),
    *(Operation("project: input", *_PROJECT), Operation("project: weight", *_PROJECT)),
    *(Operation("transpose", read_and_written=4), Operation("attention: scores", *_ATTEND)),
    *(Operation("attention: value", *_ATTEND), Operation("dropout of scores", of_scores=5)),
    *(Operation("softmax", of_scores=6), Operation("query", *_ATTEND), Operation("key", *_ATTEND)),
    *(Operation("query, key, value: input", *_QKV), Operation("query, key, value: weight", *_QKV)),
    *(Operation("bias", read_and_written=6), _WHOLE("layer norm: input", read_and_written=6)),
    _WHOLE("layer norm: weight", read_and_written=4),
)
"""The operations of one layer of Megatron-LM with fused kernels, and what they read and write: 2 bytes an element, 1
byte in a dropout mask (Korthikanti et al. 2022, section 4.1). Backward has two products for each product of forward."""
REDUCTIONS, RECOMPUTED_REDUCTIONS = 4, 2
"""All-reduces of a layer under tensor parallelism (Shoeybi et al. 2019), and those of a repeated forward pass."""


@dataclass(frozen=True)
class Training:
    """One measured training iteration of a GPT-like model."""

    where: str
    num_gpus: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    length: int
    tensor: int
    data: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.num_gpus} GPUs, hidden {self.hidden}, {self.layers} layers, batch {self.global_batch}, "
            f"micro-batch {self.micro_batch}, tensor {self.tensor} x data {self.data}"
        )

    @property
    def is_in_one_node(self) -> bool:
        """Whether all devices are in one node."""
        return self.num_gpus <= A100.devices_per_node

    @property
    def num_micro_batches(self) -> float:
        """Number of micro-batches that each device computes in an iteration."""
        return self.global_batch / (self.data * self.micro_batch)

    @property
    def activation(self) -> int:
        """Number of elements of a micro-batch's hidden activation."""
        return self.length * self.micro_batch * self.hidden

    @property
    def num_weights(self) -> float:
        """Number of weights (Narayanan et al. 2021, equation 2)."""
        wide = 12 * self.layers * self.hidden**2 * (1 + 13 / (12 * self.hidden))
        return wide + (VOCABULARY + self.length) * self.hidden

    @property
    def recomputes(self) -> bool:
        """Whether backward repeats the forward pass. It is assumed where the state of the weights and the activations
        of a micro-batch, s b h (34 + 5 a s / h) bytes a layer (Korthikanti et al. 2022, equation 1), do not fit one
        device. A study is assumed to set this once for a model, and not for each degree of tensor parallelism."""
        kept = self.layers * self.activation * (34 + 5 * self.heads * self.length / self.hidden)
        return BYTES_OF_A_STATE * self.num_weights + kept > A100.memory_bytes

    @property
    def passes(self) -> list[Operation]:
        """The operations of a layer for one micro-batch."""
        return [*FORWARD * (2 if self.recomputes else 1), *BACKWARD]

    def flops(self, operation: Operation) -> float:
        """Return the floating-point operations of an operation on one device."""
        each = operation.products * self.hidden + operation.attention * self.length
        return each * self.activation / self._parts(operation)

    def num_bytes(self, operation: Operation) -> float:
        """Return the bytes that an operation reads and writes on one device."""
        each = operation.read_and_written + operation.of_scores * self.heads * self.length / self.hidden
        return each * self.activation / self._parts(operation)

    def _parts(self, operation: Operation) -> int:
        return self.tensor if operation.is_divided else 1

    @property
    def head_flops(self) -> float:
        """Floating-point operations of the output layer, forward and backward, on one device."""
        return 6.0 * self.activation * VOCABULARY / self.tensor


@dataclass(frozen=True)
class Fit:
    """The fitted numbers of a model of a device. Everything else comes from data sheets and papers."""

    host_seconds: float
    """Time for which an operation keeps the device at least, because the host has to start its kernels."""
    efficiency: tuple[float, float]
    """Share of the peak that matrix products reach, in one node and across nodes."""


Model = Callable[[Training, Fit, float], float]
"""A model of a device: the seconds of one layer for one micro-batch, given the operations per second."""


def share_of_the_peak(row: Training, fit: Fit, rate: float) -> float:
    """All floating-point operations at one share of the peak, as in the planner's other presets."""
    return sum(map(row.flops, row.passes)) / rate


def layer_by_layer(row: Training, fit: Fit, rate: float) -> float:
    """The host starts kernels ahead of the device: the slower of the two determines the time of a layer."""
    device = sum(row.flops(each) / rate + row.num_bytes(each) / A100.memory_bandwidth for each in row.passes)
    return max(device, fit.host_seconds * len(row.passes))


def operation_by_operation(row: Training, fit: Fit, rate: float) -> float:
    """Each operation takes as long as its products, its memory accesses, or its start by the host; the longest."""
    return sum(
        max(fit.host_seconds, row.flops(each) / rate, row.num_bytes(each) / A100.memory_bandwidth)
        for each in row.passes
    )


MODELS: dict[str, tuple[Model, Fit]] = {
    "peak": (share_of_the_peak, Fit(0.0, (0.0528, 0.4516))),
    "layer": (layer_by_layer, Fit(82.9e-6, (0.6295, 0.6295))),
    "operation": (operation_by_operation, Fit(82.7e-6, (A100.efficiency, A100.efficiency))),
}
"""Models of a device, with the numbers that were fitted to `measured_single_node.csv` and `measured_multi_node.csv`: to
the first row without a pipeline of the one, and to the first such row of 64 GPUs of the other."""


def predicted_iteration(row: Training, name: str = "operation", fit: Fit | None = None) -> float:
    """Return the predicted seconds of an iteration: the planner's simulation of `allreduce` among islands of tensor
    parallelism, whose gradients take the device's time."""
    model, frozen = MODELS[name]
    fit = fit or frozen
    rate = A100.peak_flops * fit.efficiency[0 if row.is_in_one_node else 1]
    of_micro_batch = row.layers * model(row, fit, rate) + row.head_flops / rate
    step = BYTES_OF_A_STEP * row.num_weights / row.tensor / A100.memory_bandwidth
    job = JobFacts(trains=str(row), model_bytes=round(HALF * row.num_weights), batches_per_epoch=1)
    costs = Costs(
        job=job,
        compute=ComputeModel(seconds=row.num_micro_batches * of_micro_batch + step),
        messages=A100.uplink,
        means=A100.uplink,
        inside=A100.inside,
        devices_per_node=A100.devices_per_node,
        source=A100.summary,
    )
    each = REDUCTIONS + (RECOMPUTED_REDUCTIONS if row.recomputes else 0)
    times = round(row.num_micro_batches * row.layers) * each
    traffic = Traffic(0, (), (HALF * row.activation,) * times) if row.tensor > 1 else None
    machines = Machines(costs, island=Island(tensor=row.tensor), traffic=traffic)
    found = simulate(Arm.of({"name": "allreduce"}), row.num_gpus, machines, rounds=ROUNDS)
    return found.seconds_per_gradient * row.data


def fitted(name: str, in_one_node: Training, across_nodes: Training) -> Fit:
    """Return the numbers with which a model meets two rows. The model `peak` has a share of the peak for each of them;
    the others have the host's time, from the row in one node, and one share of the peak, from the other row."""

    def efficiency(row: Training, host_seconds: float) -> float:
        def error(share: float) -> float:
            return predicted_iteration(row, name, Fit(host_seconds, (share, share))) - row.seconds

        return float(brentq(error, 0.01, 1.0, rtol=1e-4))

    if name == "peak":
        return Fit(0.0, (efficiency(in_one_node, 0.0), efficiency(across_nodes, 0.0)))
    fit = MODELS[name][1]
    for _ in range(3):
        share = fit.efficiency

        def error(host_seconds: float, share: tuple[float, float] = share) -> float:
            return predicted_iteration(in_one_node, name, Fit(host_seconds, share)) - in_one_node.seconds

        host_seconds = float(brentq(error, 1e-6, 1e-2, rtol=1e-4))
        fit = Fit(host_seconds, (efficiency(across_nodes, host_seconds),) * 2)
    return fit


@dataclass(frozen=True)
class AllReduce:
    """One measured all-reduce inside a node."""

    where: str
    device: str
    num_gpus: int
    num_bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.num_gpus} {self.device.upper()}, {self.num_bytes / 2**20:.0f} MiB"

    @property
    def predicted(self) -> float:
        """The predicted seconds of the planner's links."""
        preset = find_preset(PRESETS[self.device])
        job = JobFacts(trains="an all-reduce", model_bytes=self.num_bytes, batches_per_epoch=1, flops_per_gradient=1.0)
        cluster = Machines(preset.costs(job, PRESETS[self.device])).cluster(
            Arm.of({"name": "allreduce"}), self.num_gpus
        )
        return Links(cluster).reduce_seconds(range(self.num_gpus), self.num_bytes)


def read(path: Path) -> list[Training] | list[AllReduce]:
    """Return the measurements in a file, without those of training with a pipeline. Raises `ConfigError` if the file
    has neither form."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = [line for line in csv.reader(file) if line]
    header = [name.strip() for name in lines[0]] if lines else []
    if "iteration time (ms)" in header:
        rows = [dict(zip(header, line, strict=True)) for line in lines[1:]]
        return [_training(path.name, row) for row in rows if int(row["pipeline parallelism"]) == 1]
    named = re.search(r"(a100|v100)_(\d+)", path.stem.lower())
    if header[:1] == ["size(B)"] and named is not None:
        measured = [(int(line[0]), float(line[at]) / 1e9) for line in lines[1:] for at in (3, 5)]
        return [AllReduce(path.name, named[1], int(named[2]), *each) for each in measured]
    raise ConfigError(
        f"{path}: neither iteration times (with a column 'iteration time (ms)') nor all-reduce times (with a column "
        "'size(B)', in a file named such as allreduce_a100_8.csv)"
    )


def _training(where: str, row: dict[str, str]) -> Training:
    names = ("# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length")
    degrees = ("tensor parallelism", "data parallelism")
    numbers = [int(row[name]) for name in (*names, *degrees)]
    return Training(where, *numbers, float(row["iteration time (ms)"]) / 1e3)


@dataclass(frozen=True)
class Errors:
    """The relative errors of the predictions of some measurements, in the order of the measurements."""

    kind: str
    rows: Sequence[Training | AllReduce]
    predicted: Sequence[float]

    @cached_property
    def errors(self) -> list[float]:
        """Predicted / measured - 1, for each measurement."""
        return [seconds / row.seconds - 1.0 for row, seconds in zip(self.rows, self.predicted, strict=True)]

    @cached_property
    def sizes(self) -> list[float]:
        """The absolute values of the errors."""
        return [abs(each) for each in self.errors]

    @property
    def line(self) -> str:
        """A line of the table, in Markdown."""
        worst = self.sizes.index(max(self.sizes))
        figures = (median(self.sizes), fmean(self.sizes), sorted(self.sizes)[int(0.9 * len(self.sizes))])
        shown = " | ".join(f"{100.0 * each:.1f}" for each in figures)
        return (
            f"| {self.kind} | {len(self.rows)} | {shown} | {100.0 * self.errors[worst]:+.1f}: {self.rows[worst]} "
            f"({self.rows[worst].where}) |"
        )


def compare(rows: Sequence[Training | AllReduce], model: str = "operation") -> list[Errors]:
    """Return the errors of all rows, with iterations in one node, iterations across nodes, and all-reduces apart."""
    kinds: dict[str, tuple[list[Training | AllReduce], list[float]]] = {}
    for row in rows:
        if isinstance(row, AllReduce):
            kind, seconds = f"all-reduce, {row.device.upper()}", row.predicted
        else:
            kind = f"iteration, {'one node' if row.is_in_one_node else 'across nodes'}"
            seconds = predicted_iteration(row, model)
        of_kind = kinds.setdefault(kind, ([], []))
        of_kind[0].append(row)
        of_kind[1].append(seconds)
    return [Errors(kind, *kinds[kind]) for kind in sorted(kinds, reverse=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the planner's predictions with measurements of GPUs.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.csv")
    parser.add_argument("--model", choices=MODELS, default="operation", help="model of a device")
    parser.add_argument("--rows", action="store_true", help="print the error of each row, too")
    given = parser.parse_args()
    found = compare([row for path in given.files for row in read(path)], given.model)
    if given.rows:
        for each in found:
            for row, error in zip(each.rows, each.errors, strict=True):
                print(f"{100.0 * error:+7.1f} %  {row.where}: {row}, measured {1e3 * row.seconds:.4g} ms")
    print("| kind of row | rows | median error, % | mean, % | 90 % quantile, % | worst error, % |")
    print("|---|---|---|---|---|---|")
    print("\n".join(each.line for each in found))
    print(f"\nPublished planners claim: {CLAIMS}.")


if __name__ == "__main__":
    main()
