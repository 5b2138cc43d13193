"""The planner beside published measurements of GPUs: what is read, what is predicted, and that errors are complete."""

import csv
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import published_gpus
from benchmarks.published_gpus import (
    A100,
    BACKWARD,
    FORWARD,
    MODELS,
    VOCABULARY,
    AllReduce,
    Fit,
    Training,
    compare,
    fitted,
    predicted_iteration,
    read,
)
from starling.errors import ConfigError

MEASURED = Path(__file__).parents[2] / "shared/reference/vtrain"
HEADER = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,"
    "data parallelism,pipeline parallelism,iteration time (ms)"
)
ROW = Training("file.csv", 8, 32, 2, 1024, 16, 12, 1024, 2, 4, 0.2)


def test_rows_without_a_pipeline_are_read_from_both_forms(tmp_path: Path) -> None:
    """The columns may be in another order, and more columns may come first, as in the file across nodes."""
    times = tmp_path / "times.csv"
    times.write_text(f"{HEADER}\n8,32,2,1024,16,12,1024,2,4,1,200\n8,32,2,1024,16,12,1024,2,2,2,300\n")
    more = tmp_path / "more.csv"
    more.write_text(f"Parameters (billion),{HEADER}\n1,8,32,2,1024,16,12,1024,2,4,1,200\n")
    reduced = tmp_path / "allreduce_v100_4.csv"
    reduced.write_text("size(B),count,type,time(ns),busbw(GB/s),time(ns),busbw(GB/s)\n1024,256,float,2000,1,3000,1\n")
    assert [replace(each, where="file.csv") for path in (times, more) for each in read(path)] == [ROW, ROW]
    assert read(reduced) == [
        AllReduce(reduced.name, "v100", 4, 1024, 2e-6),
        AllReduce(reduced.name, "v100", 4, 1024, 3e-6),
    ]
    with pytest.raises(ConfigError, match="neither iteration times"):
        read(reduced.rename(tmp_path / "renamed.csv"))


@pytest.mark.parametrize("tensor", [1, 4])
def test_the_operations_of_a_layer_add_up_to_the_formula_of_megatron(tensor: int) -> None:
    """72 B s l h^2 (1 + s / 6h + V / 12lh) floating-point operations, or 96 with a repeated forward pass."""
    row, large = (
        replace(ROW, tensor=tensor),
        replace(ROW, tensor=tensor, hidden=12288, heads=96, layers=96, length=2048),
    )
    assert not row.recomputes
    assert large.recomputes
    for each, factor in ((row, 72), (large, 96)):
        of_layers = each.layers * sum(map(each.flops, each.passes)) * tensor
        tokens, h = each.length * each.micro_batch, each.hidden
        assert of_layers == pytest.approx(factor * tokens * each.layers * h**2 * (1 + each.length / (6 * h)))
        assert each.head_flops * tensor == pytest.approx(
            72 * tokens * each.layers * h**2 * VOCABULARY / (12 * each.layers * h)
        )


def test_a_prediction_is_the_sum_that_its_parts_give_by_hand() -> None:
    """Gradients, all-reduces of activations within islands, and one all-reduce of half-precision gradients."""
    fit = Fit(1e-4, (0.5, 0.5))
    host = (len(FORWARD) + len(BACKWARD)) * 1e-4
    row = replace(ROW, hidden=64, length=64)  # so small that the host determines all times
    head = 3 * 2 * row.activation * VOCABULARY / 2 / (0.5 * A100.peak_flops)
    activation = A100.inside.reduce_seconds(2 * row.activation, 2)
    weights = row.num_weights / 2
    # four ranks of different islands in one node average their halves, next to the other ranks
    mean = A100.inside.reduce_seconds(round(2 * weights), 4)
    by_hand = 4 * (12 * (host + 4 * activation) + head) + mean + 28 * weights / A100.memory_bandwidth
    assert predicted_iteration(row, fit=fit) == pytest.approx(by_hand, rel=1e-3)


def test_gradients_cross_the_uplink_of_a_node_only_between_nodes() -> None:
    """A slower uplink changes the time of 16 devices and not that of 8."""
    in_one_node, across = replace(ROW, tensor=1, data=8), replace(ROW, num_gpus=16, tensor=1, data=16, global_batch=64)
    slower = A100.model_copy(update={"uplink": A100.uplink.model_copy(update={"bandwidth": 1e9})})
    before = [predicted_iteration(each) for each in (in_one_node, across)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published_gpus, "A100", slower)
        after = [predicted_iteration(each) for each in (in_one_node, across)]
    assert after[0] == before[0]
    longer = 2 * 15 / 16 * 2 * across.num_weights * (1 / 1e9 - 1 / A100.uplink.bandwidth)
    assert after[1] - before[1] == pytest.approx(longer, rel=1e-3)


def test_every_row_is_counted_and_the_worst_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row is as predicted, one took twice, and one four times as long."""
    expected = predicted_iteration(ROW)
    times = tmp_path / "times.csv"
    times.write_text(
        HEADER + "".join(f"\n8,32,2,1024,16,12,1024,2,4,1,{1e3 * factor * expected!r}" for factor in (1, 2, 4))
    )
    (found,) = compare(read(times))
    assert found.errors == pytest.approx([0.0, -0.5, -0.75])
    monkeypatch.setattr(sys, "argv", ["published_gpus", str(times), "--rows"])
    published_gpus.main()
    printed = capsys.readouterr().out
    assert "| iteration, one node | 3 | 50.0 | 41.7 | 75.0 | -75.0: 8 GPUs, hidden 1024" in printed
    assert printed.count("measured ") == 3
    assert "vTrain: 8.4 %" in printed


@pytest.mark.skipif(not MEASURED.is_dir(), reason="the published measurements are not part of Starling")
@pytest.mark.parametrize("name", MODELS)
def test_the_fitted_numbers_are_those_of_the_two_rows(name: str) -> None:
    """Each is the first row without a pipeline: of its file in one node, and of 64 GPUs across nodes."""
    in_one_node, across = (read(MEASURED / f"measured_{each}_node.csv") for each in ("single", "multi"))
    first = next(row for row in across if isinstance(row, Training) and row.num_gpus == 64)
    assert isinstance(in_one_node[0], Training)
    fit = fitted(name, in_one_node[0], first)
    assert fit.host_seconds == pytest.approx(MODELS[name][1].host_seconds, rel=2e-3)
    assert fit.efficiency == pytest.approx(MODELS[name][1].efficiency, rel=2e-3)


@pytest.mark.skipif(not MEASURED.is_dir(), reason="the published measurements are not part of Starling")
def test_median_errors_are_within_their_limits_and_those_of_the_page() -> None:
    """15 % in one node and 25 % across nodes; rows across nodes are all there are."""
    paths = [MEASURED / f"measured_{each}_node.csv" for each in ("single", "multi")]
    with paths[1].open(newline="") as file:
        num_across = sum(row["pipeline parallelism"] == "1" for row in csv.DictReader(file))
    found = compare([row for path in paths for row in read(path)])
    page = (Path(__file__).parents[1] / "docs/results/published-gpus.md").read_text(encoding="utf-8")
    assert [(each.kind, len(each.rows)) for each in found] == [
        ("iteration, one node", 363),
        ("iteration, across nodes", num_across),
    ]
    for each in found:
        assert each.line.rsplit(" (", 1)[0] in page
    one, across_nodes = (sorted(each.sizes)[len(each.sizes) // 2] for each in found)
    assert one < 0.15
    assert across_nodes < 0.25
