"""Plans: speeds meet closed forms, crossing points meet their equations, published hours are what is printed."""

import csv
import io
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import starling
from starling.budget import Budget
from starling.cli import app
from starling.engines.virtual.cluster import ComputeModel, LinkModel
from starling.errors import ConfigError
from starling.experiment.planning import plan_table, profile
from starling.predict import published
from starling.predict.costs import (
    Costs,
    JobFacts,
    Profile,
    Validation,
    dump,
    facts_of,
    find_preset,
    read_profile,
)
from starling.predict.measure import fit_compute, fit_link, gradient_times
from starling.predict.plan import TIE, Plan, plan, ranked, read_cluster
from starling.predict.predict import WORTH, Arm, Machines, Prediction, bisect, data_need, simulate
from starling.strategies import NoOptions
from starling.toy import regression
from starling.training.faults import Kill
from starling.training.speeds import Stragglers

PAGE = Path(__file__).parents[2] / "docs" / "results" / "published-hours.md"
MEGABYTE = 1 << 20
GRADIENT, LATENCY, BANDWIDTH = 0.1, 1e-4, 1e8


def costs(**changes: object) -> Costs:
    link = LinkModel(latency=LATENCY, bandwidth=BANDWIDTH)
    return Costs(
        job=JobFacts(trains="a test", model_bytes=4 * MEGABYTE, batches_per_epoch=3600),
        compute=ComputeModel(seconds=GRADIENT),
        messages=link,
        means=link,
        source="a test",
    ).model_copy(update=changes)


def machines(stragglers: Stragglers = Stragglers(), **changes: object) -> Machines:  # noqa: B008 - frozen
    return Machines(costs(**changes), stragglers)


def arm(name: str, **options: object) -> Arm:
    strategy = starling.STRATEGIES[name]
    return Arm(strategy, strategy.options.model_validate(options))


def ring_seconds(world: int) -> float:
    """A ring all-reduce: 2 (L - 1) messages of 1/L of the bytes."""
    return 2 * (world - 1) * (LATENCY + 4 * MEGABYTE / world / BANDWIDTH)


def test_allreduce_takes_a_gradient_and_a_ring_for_each_step() -> None:
    """The closed form holds for four equal learners, and gives the shares of computing and waiting."""
    found = simulate(arm("allreduce"), 4, machines())
    step = GRADIENT + ring_seconds(4)
    assert found.seconds_per_gradient == pytest.approx(step / 4, rel=1e-6)
    assert 1.0 - found.waiting == pytest.approx(GRADIENT / step, rel=0.02)
    assert found.bytes_sent == pytest.approx(2 * 3 / 4 * 4 * MEGABYTE)


def test_delay_by_one_hides_the_shorter_of_gradient_and_mean() -> None:
    """The time is max(gradient, ring): here the gradient, and with a tenth of the bandwidth the ring."""
    assert simulate(arm("delay-by-one"), 4, machines()).seconds_per_gradient == pytest.approx(GRADIENT / 4, rel=1e-6)
    slower = replace(machines(), bandwidth=0.1)
    ring = 6 * (LATENCY + MEGABYTE / (BANDWIDTH / 10))
    assert simulate(arm("delay-by-one"), 4, slower).seconds_per_gradient == pytest.approx(ring / 4, rel=1e-6)


def test_a_slow_learner_sets_the_pace_of_allreduce_and_not_that_of_adpsgd() -> None:
    """It is four times slower: this sets the time of every step of one, and a quarter of one learner's share in the
    other."""
    slow = machines(Stragglers(slow={0: 4.0}))
    assert simulate(arm("allreduce"), 4, slow).seconds_per_gradient == pytest.approx(
        (4 * GRADIENT + ring_seconds(4)) / 4, rel=1e-6
    )
    rate = 1.0 / simulate(arm("adpsgd", pattern="pairs"), 4, slow).seconds_per_gradient
    assert rate == pytest.approx(3.25 / GRADIENT, rel=0.03)


def test_a_learner_whose_gradient_outlasts_a_simulation_slows_only_itself() -> None:
    """Both halves then end with the same gradient, and have no difference to divide by."""
    slow = machines(Stragglers(slow={0: 100.0}))
    rate = 1.0 / simulate(arm("adpsgd", pattern="pairs"), 4, slow, rounds=12).seconds_per_gradient
    assert rate == pytest.approx(3.01 / GRADIENT, rel=0.03)


@pytest.mark.wide
def test_a_plan_without_contention_has_to_be_asked_for() -> None:
    """The link of 16 learners' server carries a gradient in each send time, and its own learner needs no link."""
    served = arm("parameter-server", update="asynchronous")
    send_seconds = 4 * MEGABYTE / BANDWIDTH
    rate = 1.0 / simulate(served, 16, machines()).seconds_per_gradient
    assert rate == pytest.approx(1.0 / send_seconds + 1.0 / GRADIENT, rel=0.05)
    given = read_cluster({"nodes": {"uplink": "unlimited"}})
    assert 1.0 / simulate(served, 16, Machines(costs(), given=given)).seconds_per_gradient > 2 * rate


def test_learners_that_form_super_learners_without_nodes_keep_a_link_each() -> None:
    """Four machines in two groups: the nodes of the simulation only make means inside a group cheaper."""
    groups = arm("hadpsgd", per_node=2)
    assert machines().cluster(groups, 4).uplink == 2 * BANDWIDTH
    given = Machines(costs(), given=read_cluster({"link": {"bandwidth": 1e6}}))
    assert given.cluster(groups, 4).uplink == 2e6
    assert replace(given, bandwidth=3.0).cluster(groups, 4).uplink == 6e6
    assert replace(machines(), bandwidth=3.0).cluster(arm("adpsgd"), 4).uplink == 3 * BANDWIDTH


def test_without_exchange_allreduce_only_computes() -> None:
    """The remaining waiting is 0 if learners are equal."""
    found = simulate(arm("allreduce"), 4, replace(machines(), at_once=True))
    assert found.seconds_per_gradient == pytest.approx(GRADIENT / 4)
    assert found.waiting == pytest.approx(0.0, abs=1e-6)


def test_a_plan_has_hours_shares_bytes_and_cost_that_follow_from_the_closed_form() -> None:
    """The plan is for an epoch of 3,600 mini-batches with four learners under `allreduce`, at 2 per device hour, for 10
    epochs."""
    preset = plan_of(["allreduce"], price=2.0, budget=starling.Budget(epochs=10))
    (row,) = preset.rows
    step = GRADIENT + ring_seconds(4)
    assert row.hours_per_epoch == pytest.approx(step / 4, rel=1e-6)  # 3,600 seconds an hour
    assert row.hours == pytest.approx(10 * row.hours_per_epoch)
    assert row.cost == pytest.approx(2.0 * 4 * row.hours)
    assert row.computing + row.waiting + row.exchanging == pytest.approx(1.0)
    assert row.exchanging == pytest.approx(ring_seconds(4) / step, rel=0.02)
    assert row.waiting == pytest.approx(0.0, abs=0.01)
    assert row.gigabytes_per_link == pytest.approx(3600 * 1.5 * 4 * MEGABYTE / 4 / 1e9)
    assert (row.staleness_mean, row.staleness_max) == (0.0, 0)


def plan_of(strategies: list[str], **options: object) -> starling.Plan:
    measured = measured_profile()
    given = {"learners": [4], "crossings": False, **options}
    return plan(profile=measured, strategies=strategies, **given)  # type: ignore[arg-type]


def measured_profile(validation: Validation | None = None) -> Profile:
    """A profile of the machine that `costs` describes."""
    times = gradient_times([GRADIENT] * 10)
    link = {"seconds_by_bytes": {4: 1.0}, "fitted": LinkModel(latency=LATENCY, bandwidth=BANDWIDTH)}
    return Profile.model_validate(
        {
            "date": "2026-01-01",
            "command": "starling profile test",
            "machine": {
                "processor": "x",
                "cores": 2,
                "memory_bytes": 1,
                "device": "x",
                "torch": "2",
                "starling": "0",
            },
            "job": costs().job,
            "gradient": times,
            "step_seconds": 0.0,
            "mixing_bandwidth": 1e9,
            "exchange": link,
            "mean": link,
            "gradient_mean": link,
            "memory_per_learner_bytes": 10**9,
            "validation": validation,
        }
    )


def test_an_interval_contains_the_prediction_and_grows_with_the_validation_s_error() -> None:
    """A validation that was 10 % off leaves at least 10 % on either side."""
    bare, checked = (
        plan(profile=measured_profile(validation), learners=[4], strategies=["allreduce"], crossings=False)
        for validation in (None, Validation(error=0.1, against="a test"))
    )
    assert bare.rows[0].hours_low == pytest.approx(bare.rows[0].hours_high)
    assert checked.rows[0].hours_low <= checked.rows[0].hours / 1.1 * 1.001
    assert checked.rows[0].hours_high >= checked.rows[0].hours / 0.9 * 0.999
    assert "10% off" in checked.reason[-1]


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_of_a_plan_can_be_read_at_any_width(width: int) -> None:
    """With few columns where there is little room; of a budget in minutes, with epochs instead of equal times."""
    found = plan(profile=measured_profile(), learners=[4, 16], strategies=["allreduce", "adpsgd", "parameter-server"])
    for budget, column in (
        (Budget(epochs=2), "2 epochs"),
        (Budget(epochs=1), "run min"),
        (Budget(minutes=30), "epochs"),
    ):
        said = io.StringIO()
        Console(file=said, width=width).print(plan_table(found, budget, width, is_trusted=True))
        assert "…" not in said.getvalue()
        assert {*column.split(), "parameter-server"} <= set(said.getvalue().replace(",", " ").split())
        assert ("MB/s" in said.getvalue()) == (width == 160)


def test_a_narrow_table_drops_columns_instead_of_digits() -> None:
    """A price of four digits is whole, and so is each header."""
    found = plan_of(["allreduce", "adpsgd"], price=1234567.0)
    said = io.StringIO()
    Console(file=said, width=80).print(plan_table(found, Budget(epochs=2), 80, is_trusted=True))
    assert {f"{row.cost:,.2f}" for row in found.rows} <= set(said.getvalue().split())
    header = " ".join(said.getvalue().splitlines()[:2]).split()
    assert {"strategy", "learners", "compute", "cost"} <= set(header)
    assert "memory" not in header and "exchange" not in header


def test_every_header_of_a_plan_is_whole_whatever_its_figures_are() -> None:
    (row,) = plan_of(["adpsgd"]).rows
    for width, memory, cost, name, options, hours, epochs in product(
        *((80, 120), (None, 12.5), (None, 12345.67)),
        *(("adpsgd", "parameter-server"), ("", "pattern: pairs, period: 0.25"), (0.01, 4.9, 22500.0), (None, 1, 16)),
    ):
        every = {"hours": hours, "hours_low": hours / 2, "hours_high": 12 * hours, "strategy": name, "options": options}
        shown = replace(row, memory_gigabytes=memory, cost=cost, **every)
        table = plan_table(Plan((shown,), shown, (), (), ()), Budget(steps=100, epochs=epochs), width, is_trusted=True)
        said = io.StringIO()
        Console(file=said, width=width).print(table)
        assert max(map(len, said.getvalue().splitlines())) <= width
        words = said.getvalue().split()
        assert all(word in words for column in table.columns for word in str(column.header).split())


def test_one_learner_is_planned_without_averaging() -> None:
    found = plan(profile=measured_profile(), learners=[1], strategies=["adpsgd"])
    assert (found.rows[0].options, found.rows[0].staleness_max) == ("", 0)
    assert found.reason[0].startswith("adpsgd with 1 learner: ")


@pytest.mark.wide
def test_the_bandwidth_at_which_another_strategy_is_faster_solves_its_equation() -> None:
    """`adpsgd` makes more progress where the ring takes so long that `allreduce` makes fewer than WORTH times as many
    mini-batches, less 5 %."""
    fast = measured_profile().model_copy(update={"step_seconds": 0.0})
    link = LinkModel(latency=0.0, bandwidth=1e10)
    of_link = fast.mean.model_copy(update={"fitted": link})
    fast = fast.model_copy(update={"mean": of_link, "gradient_mean": of_link, "exchange": of_link})
    found = plan(profile=fast, learners=[4], strategies=["allreduce", "adpsgd"])
    assert found.recommended.strategy == "allreduce"
    (bandwidth,) = [each for each in found.crossings if each.what == "bandwidth"]
    behind = 1.0 / (WORTH * (1.0 - TIE))
    exact = 1.5 * 4 * MEGABYTE / ((behind - 1.0) * GRADIENT)
    assert bandwidth.faster == "adpsgd" and bandwidth.value < bandwidth.now
    assert bandwidth.value == pytest.approx(exact, rel=0.05)
    (slowness,) = [each for each in found.crossings if each.what == "slowness"]
    # `allreduce` takes s gradients for 4, `adpsgd` 4 / (3 + 1 / s): so far apart where s (3 + 1 / s) / 4 = behind
    assert slowness.value == pytest.approx((behind * 4 - 1) / 3, rel=0.08)
    assert "adpsgd makes more progress than allreduce" in str(bandwidth) and "times slower" in str(slowness)


def test_bisection_finds_a_root_on_either_side() -> None:
    """It is found to 3 %, whichever end is larger."""
    assert bisect(lambda x: x * x > 2.0, 0.1, 10.0) == pytest.approx(2**0.5, rel=0.03)
    assert bisect(lambda x: x * x > 2.0, 10.0, 0.1) == pytest.approx(2**0.5, rel=0.03)


def test_the_most_progress_is_recommended_and_of_equals_what_is_worth_most() -> None:
    """Progress is speed times worth; within a tie the worth decides, and then the order."""

    def found(name: str, progress: float) -> Prediction:
        made = Prediction(arm(name), 4, (1.0,), 0.0, 0.0, Counter())
        return replace(made, seconds=(made.worth / progress,))

    def order(*candidates: Prediction) -> list[str]:
        return [each.arm.name for each in ranked(candidates)]

    plain = found("allreduce", 1.0)
    assert (plain.worth, found("dpsgd", 1.0).worth) == (1.0, WORTH)
    assert order(plain, found("dpsgd", 1.04)) == ["allreduce", "dpsgd"]
    assert order(plain, found("dpsgd", 1.1)) == ["dpsgd", "allreduce"]
    first, second = found("dpsgd", 1.0), found("adpsgd", 1.01)
    assert order(first, second, plain) == ["allreduce", "adpsgd", "dpsgd"]
    assert order(first, second) == ["dpsgd", "adpsgd"]


def test_a_plan_tries_the_options_that_auto_would_try() -> None:
    """On a link over which a message takes four gradients, a period of 1 makes learners wait."""
    slow = LinkModel(latency=0.0, bandwidth=4 * MEGABYTE / (4 * GRADIENT))
    own = measured_profile()
    own = own.model_copy(update={"exchange": own.exchange.model_copy(update={"fitted": slow})})
    (row,) = plan(profile=own, learners=[4], strategies=["adpsgd"], crossings=False).rows
    assert row.options == "pattern: pairs, period: 2" and row.exchanging < 0.05
    assert str(row) == "adpsgd (pattern: pairs, period: 2)"
    given = {"name": "adpsgd", "pattern": "ring"}
    (row,) = plan(profile=own, learners=[4], strategies=[given], crossings=False).rows
    assert row.options == "pattern: ring" and row.exchanging > 0.5


def test_gradient_times_are_fitted_by_the_distribution_that_they_are_drawn_from() -> None:
    """Log-normal, uniform and constant times are fitted, each with its mean and spread."""
    generator = np.random.default_rng(1)
    drawn = 0.2 * generator.lognormal(-0.5 * 0.4**2, 0.4, 4000)
    fitted = fit_compute(drawn)
    assert fitted.distribution == "log-normal"
    assert (fitted.seconds, fitted.spread) == (pytest.approx(0.2, rel=0.03), pytest.approx(0.4, rel=0.06))
    fitted = fit_compute(generator.uniform(0.15, 0.25, 4000))
    assert fitted.distribution == "uniform"
    assert (fitted.seconds, fitted.spread) == (pytest.approx(0.2, rel=0.03), pytest.approx(0.25, rel=0.06))
    assert fit_compute(np.full(8, 0.25)) == ComputeModel(seconds=0.25)


def test_the_interval_of_the_mean_holds_the_true_mean() -> None:
    """It does in about 95 of 100 experiments; the standard error gives its width."""
    generator = np.random.default_rng(2)
    found = [gradient_times(generator.normal(1.0, 0.1, 40).tolist()) for _ in range(100)]
    assert 88 <= sum(each.low <= 1.0 <= each.high for each in found) <= 100
    widths = [each.high - each.low for each in found]
    assert np.mean(widths) == pytest.approx(2 * 1.96 * 0.1 / 40**0.5, rel=0.1)


def test_a_link_is_the_line_through_what_its_messages_took() -> None:
    """A planted latency and bandwidth are found; a line that would begin below 0 begins at 0."""
    planted = LinkModel(latency=2e-4, bandwidth=3e8)
    sizes = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
    found = fit_link({size: planted.send_seconds(size) for size in sizes})
    assert (found.latency, found.bandwidth) == (pytest.approx(2e-4), pytest.approx(3e8))
    steeper = fit_link({1000: 1e-6, 2000: 3e-6, 4000: 7e-6})
    assert steeper.latency == 0.0 and 4e8 < steeper.bandwidth < 2e9
    assert fit_link({1000: 1e-3}).latency == 1e-3


def test_a_profile_comes_back_from_its_file_unchanged(tmp_path: Path) -> None:
    """All errors in a file are reported at once."""
    found = measured_profile(Validation(error=0.04, against="a test"))
    file = tmp_path / "profile.yaml"
    file.write_text(dump(found, "a comment"), encoding="utf-8")
    assert read_profile(file) == found
    file.write_text(dump(found, "").replace("step_seconds: 0.0", "step_second: -1"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"2 problems(?s:.*)did you mean step_seconds"):
        read_profile(file)
    with pytest.raises(ConfigError, match=r"cannot be read.*make one with `starling profile"):
        read_profile(tmp_path / "absent.yaml")


def test_wrong_arguments_of_a_plan_are_reported_in_one_message() -> None:
    """Each comes with what to do."""
    with pytest.raises(ConfigError, match="either a profile, made by `starling profile`, or a preset"):
        plan(learners=[4])
    with pytest.raises(ConfigError, match="preset 'v100' is unknown; did you mean 'v100-2019'"):
        plan(costs().job, preset="v100")
    with pytest.raises(ConfigError, match="a preset knows no job"):
        plan(preset="v100-2019")
    with pytest.raises(ConfigError, match="the operations of a test are unknown"):
        plan(costs().job, preset="v100-2019")
    with pytest.raises(ConfigError, match=r"learners:.*at least 1"):
        plan(profile=measured_profile(), learners=[0])
    with pytest.raises(ConfigError, match=r"strategy\.perod: unknown key; did you mean strategy\.period"):
        plan(profile=measured_profile(), strategies=[{"name": "adpsgd", "perod": 2}])
    with pytest.raises(ConfigError, match=r"cluster: a problem\n  link\.bandwith: unknown key"):
        plan(profile=measured_profile(), cluster={"link": {"bandwith": 1}})
    other = costs().job.model_copy(update={"model_bytes": 8})
    with pytest.raises(ConfigError, match=r"it is of a model of 4,194,304 bytes.*has 8; profile this job"):
        plan(other, profile=measured_profile())


def test_strategies_that_do_not_fit_a_number_of_learners_are_left_out_with_a_note() -> None:
    """Three learners cannot form super-learners of two."""
    found = plan(profile=measured_profile(), learners=[3], strategies=["allreduce", "hadpsgd"], crossings=False)
    assert [row.strategy for row in found.rows] == ["allreduce"]
    assert any(note.startswith("hadpsgd with 3 learners is left out") for note in found.notes)


@pytest.mark.wide
def test_periodic_strategies_are_planned_over_whole_periods_and_only_if_named() -> None:
    """Bytes are those of one mean, or of one push, in H steps, however long H is; a warm-up does not count."""
    found = plan(profile=measured_profile(), learners=[4], crossings=False)
    assert not {"local-sgd", "diloco", "async-diloco"} & {row.strategy for row in found.rows}
    assert any("periodic strategies are left out unless they are named" in note for note in found.notes)
    mean = 2 * 3 / 4 * 4 * MEGABYTE
    assert simulate(arm("diloco", every=70), 4, machines()).bytes_sent == pytest.approx(mean / 70)
    assert simulate(arm("bmuf"), 4, machines()).bytes_sent == pytest.approx(mean / 50)
    assert simulate(arm("gossip-pga", every=30), 4, machines()).bytes_sent == pytest.approx(
        (29 * 2 * 4 * MEGABYTE + mean) / 30
    )
    served = simulate(arm("async-diloco", every=25, servers="own"), 5, machines())
    assert served.bytes_sent == pytest.approx(2 * 4 * MEGABYTE / 25, rel=1e-3)


async def _looks(me: starling.Learner) -> None:
    while me.claim():
        me.step(await me.gradient(me.weights))
        float(me.weights[0])


def test_a_strategy_that_looks_at_numbers_cannot_be_planned() -> None:
    """The message says what can be done."""
    looking = Arm(starling.Strategy("looking", "only in tests", _looks), NoOptions())
    with pytest.raises(ConfigError, match=r"strategy looking: cannot be planned.*simulate it with `starling simulate`"):
        simulate(looking, 2, machines())


def test_a_cluster_s_file_changes_only_what_it_says() -> None:
    """The link is as given, and the gradient times are as measured."""
    given = read_cluster({"link": {"bandwidth": 1e6}})
    cluster = Machines(costs(), given=given).cluster(arm("adpsgd"), 4)
    assert cluster.link.bandwidth == 1e6 and cluster.compute == costs().compute


def test_a_plan_says_how_long_sending_takes_and_what_worth_would_make_two_strategies_equal() -> None:
    """The model is 4 MiB, and gradients of 0.1 s; the second choice needs as much worth as it takes longer."""
    found = plan_of(["allreduce", "adpsgd"], cluster={"link": {"bandwidth": 4 * MEGABYTE / 0.05, "latency": 0.0}})
    assert "sending the model to another node takes 50 ms, or 0.5 gradients of 100 ms" in found.notes
    assert any("but for the cluster as given below" in note for note in found.notes)
    second = next(row for row in found.rows if row != found.recommended)
    ratio = second.hours / found.recommended.hours
    assert f"takes {ratio:.2f} times as long" in found.reason[1]
    assert f"equally if they count {ratio * found.recommended.worth:.2f})" in found.reason[1]


def test_a_plan_for_several_numbers_of_learners_names_the_choice_for_each() -> None:
    """The recommendation is that for the most."""
    found = plan_of(["allreduce", "adpsgd"], learners=(2, 8, 4))
    named = next(line for line in found.reason if line.startswith("for other numbers of learners: "))
    assert found.recommended.learners == 8
    assert [int(number) for number in re.findall(r" with (\d+) \(", named)] == [2, 4]
    assert not any("for other numbers" in line for line in plan_of(["allreduce"], learners=(8,)).reason)


def test_a_preset_is_distrusted_where_it_predicts_very_short_gradients() -> None:
    """Data sheets say nothing about the time that it takes to start an operation."""
    for flops, is_warned in ((1e9, True), (1e12, False)):
        facts = costs().job.model_copy(update={"flops_per_gradient": flops})
        found = plan(facts, preset="v100-2019", strategies=["allreduce"], crossings=False)
        assert any(note.startswith("warning: by its data sheet") for note in found.notes) == is_warned


def test_a_plan_is_a_table_for_other_programs(tmp_path: Path) -> None:
    """Records with one key for each column, and a CSV file with the same."""
    found = plan_of(["allreduce", "adpsgd"])
    found.write_csv(tmp_path / "plan.csv")
    with (tmp_path / "plan.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["strategy"] for row in rows] == ["allreduce", "adpsgd"]
    assert [float(row["hours"]) for row in rows] == [row.hours for row in found.rows]
    assert list(rows[0]) == list(found.records()[0])


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def job() -> starling.Job:
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(640, 16, generator=generator), torch.randint(4, (640,), generator=generator)
    )
    return starling.Job(
        starling.DataWorkload(make_model, loss, data, batch_size=32),
        strategy=starling.STRATEGIES["adpsgd"],
        budget=starling.Budget(epochs=2),
        make_optimizer=partial(torch.optim.SGD, lr=0.1),
    )


def test_the_facts_of_a_job_are_its_bytes_mini_batches_and_operations() -> None:
    """For a perceptron, there are 2 operations for each weight and example forward, and as many backward for weights
    and inputs, except the inputs of the first layer."""
    found = facts_of(job(), counts_flops=True)
    assert found.model_bytes == 4 * (17 * 64 + 65 * 4)
    assert found.batches_per_epoch == 20
    assert found.flops_per_gradient == 2 * 32 * (16 * 64 + 64 * 4) * 2 + 2 * 32 * 64 * 4


def test_a_recurrent_layer_s_operations_are_counted() -> None:
    """An LSTM has 6 for each weight and frame, up to the elementwise rest."""

    def recurrent() -> nn.Module:
        return nn.LSTM(8, 16, batch_first=True)

    def of_outputs(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(batch)[0].sum()
        return found

    data = [torch.zeros(5, 8) for _ in range(4)]
    recurring = starling.Job(
        starling.DataWorkload(recurrent, of_outputs, data, batch_size=4),
        strategy=starling.STRATEGIES["allreduce"],
        budget=starling.Budget(epochs=1),
        make_optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    counted = facts_of(recurring, counts_flops=True).flops_per_gradient
    assert counted is not None
    assert 0.7 < counted / (6 * (8 + 16) * 64 * 4 * 5) < 1.05


@pytest.mark.wide
def test_real_learners_are_measured_as_they_are_started_and_planned_with() -> None:
    """One learner and two are measured in separate processes: every figure exists, and the plan rests on them."""
    said: list[str] = []
    found = profile(job(), gradients=12, engine={"threads": 1}, command="a test", say=said.append)
    assert found.gradient.num_measured == 12
    assert 0.0 < found.gradient.low <= found.gradient.seconds <= found.gradient.high < 1.0
    assert found.job.model_bytes == 4 * (17 * 64 + 65 * 4)
    assert set(found.exchange.seconds_by_bytes) == set(found.mean.seconds_by_bytes)
    assert max(found.exchange.seconds_by_bytes) == found.job.model_bytes
    assert all(0.0 < seconds < 1.0 for seconds in found.exchange.seconds_by_bytes.values())
    assert found.memory_per_learner_bytes > 10**7 and found.mixing_bandwidth > 1e6
    measured, checked = "two learners: exchanges and means", "two learners: validation with {}".format
    assert said == ["one learner: gradients", measured, checked("allreduce"), checked("adpsgd")]
    assert found.validation is not None and found.validation.error > 0.0
    planned = plan(job(), profile=found, learners=[2], strategies=["allreduce", "adpsgd"], crossings=False)
    assert all(row.hours > 0.0 for row in planned.rows)


def test_the_published_network_has_the_published_size() -> None:
    """43.15 M weights, as many as torch's own layers of these sizes have."""
    with torch.device("meta"):
        layers = [nn.LSTM(260, 512, 6, bidirectional=True), nn.Linear(1024, 256), nn.Linear(256, 32_000)]
    assert published.network_weights() == sum(each.numel() for layer in layers for each in layer.parameters())
    assert published.network_weights() == pytest.approx(43.15e6, rel=2e-4)


@pytest.mark.wide
def test_published_hours_are_fitted_on_one_row_and_predicted_on_all_others() -> None:
    """No row is left out; the presets contain the fitted number; comparable rows are those without a reason."""
    found = published.ROWS
    assert [each.hours for each in found] == [192.0, 14.0, 11.5, 5.2, 5.0, 3.0, *[2.28] * 3, *[1.98] * 3]
    assert Counter(each is published.FITTED for each in found) == {False: 11, True: 1}
    (fitted,) = [each for each in found if each is published.FITTED]
    assert fitted.predicted == pytest.approx(5.2, rel=1e-3)
    for row in published.ROWS:
        assert find_preset(row.preset).efficiency == pytest.approx(published.fitted_efficiency(), rel=5e-3)
    for name in {row.preset for row in published.ROWS}:
        errors = [abs(each.error) for each in found if each.preset == name and each is not published.FITTED]
        if name == "v100-2019":
            errors = [abs(each.error) for each in found if not each.not_comparable]
        validation = find_preset(name).validation
        assert validation is not None and validation.error == pytest.approx(max(errors), abs=0.015)
    assert {each.system for each in found if each.not_comparable} == {
        row.system for row in published.ROWS if row.system.startswith(("16", "48", "96")) or "P9" in row.system
    }


def test_comparable_hours_and_the_speed_up_of_64_devices_are_near_the_published_ones() -> None:
    """Within 25 % from one fitted row; the speed-up within 20 % of 37 to 40."""
    assert all(abs(each.error) < 0.25 for each in published.ROWS if not each.not_comparable)
    assert 0.8 * 37 < published.ROWS[0].predicted / published.FITTED.predicted < 1.2 * 40


def test_devices_that_share_a_node_keep_a_share_of_their_speed_for_each_doubling() -> None:
    """Here 64 %, of four devices; further nodes cost nothing. Learners on their own nodes lose nothing."""
    shared = {"devices_per_node": 4, "kept_per_doubling": 0.8}
    beside = [simulate(arm("adpsgd"), world, machines(**shared)).seconds_per_gradient * world for world in (1, 4, 8)]
    assert beside == pytest.approx([GRADIENT, GRADIENT / 0.64, GRADIENT / 0.64], rel=0.02)
    alone = simulate(arm("adpsgd"), 4, machines(kept_per_doubling=0.8)).seconds_per_gradient * 4
    assert alone == pytest.approx(GRADIENT, rel=0.03)  # and not GRADIENT / 0.64


def test_a_published_model_is_planned_without_a_corpus(tmp_path: Path) -> None:
    """Hours are in proportion to the hours of speech, and delay-by-one and random pairs have rows of their own."""
    hours = []
    for given in ("2000", "500"):
        table = tmp_path / f"{given}.csv"
        command = ["plan", "--hours", given, "--model", "ibm", "--preset", "v100-2019", "--learners", "8"]
        result = CliRunner().invoke(app, [*command, "--output", str(table)])
        assert result.exit_code == 0, result.output
        assert "delay-by-one" in result.output
        with table.open(newline="") as file:
            rows = {(row["strategy"], "pairs" in row["options"]): float(row["hours"]) for row in csv.DictReader(file)}
        hours.append(rows["adpsgd", True])
    assert hours[0] == pytest.approx(4 * hours[1], rel=1e-3)
    assert CliRunner().invoke(app, ["plan", "--model", "ibn", "--preset", "v100-2019"]).exit_code == 2


@pytest.mark.parametrize("ignored", [["cluster.link.bandwidth=1e6"], ["demo", "budget.epochs=3"], ["--profile", "x"]])
def test_what_a_published_model_cannot_use_is_an_error(ignored: list[str]) -> None:
    """Recipes, keys and profiles would otherwise be ignored; the message names the options to use instead."""
    result = CliRunner().invoke(app, ["plan", "--model", "ibm", "--preset", "v100-2019", *ignored])
    assert result.exit_code == 2
    assert "would have no effect" in result.output and "--cluster" in result.output


def test_the_page_of_published_hours_is_what_the_command_prints() -> None:
    """They agree to the letter."""
    result = CliRunner().invoke(app, ["plan", "--published"])
    assert result.exit_code == 0, result.output
    assert result.stdout == PAGE.read_text(encoding="utf-8")


@pytest.mark.wide
def test_the_memory_of_a_process_is_its_own_and_not_that_of_the_one_which_started_it() -> None:
    """On Linux, a process inherits the peak that `getrusage` reports, including that of a large notebook."""
    code = "from starling.predict.measure import peak_memory\nprint(peak_memory())"
    large = bytearray(1 << 30)
    large[:: 1 << 12] = b"1" * len(large[:: 1 << 12])  # each page is in memory
    found = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert 50 * MEGABYTE < found < len(large)


def test_a_simulation_has_each_learners_counters_and_refuses_learners_that_do_not_exist() -> None:
    """Of 96 mini-batches, a learner that is ten times slower makes fewer; its stale gradients are counted."""
    job = replace(regression("adpsgd", pattern="ring"), stragglers=Stragglers(slow={3: 10.0}))
    found = starling.simulate(job, learners=4, cluster={"compute": {"seconds": 0.5}})
    stats = found.stats()
    assert sum(each.steps for each in stats.values()) == 96
    assert stats[3].steps < stats[0].steps
    assert sum(stats[0].staleness.values()) == stats[0].steps and stats[0].seconds_computing <= found.seconds
    assert repr(found) == f"<adpsgd, 4 learners, {found.seconds:.4g} simulated seconds>"
    with pytest.raises(ConfigError, match="there is no learner 3; the 2 learners count from 0"):
        starling.simulate(job, learners=2)
    with pytest.raises(ConfigError, match="there is no learner 9; the 4 learners count from 0"):
        starling.simulate(replace(job, faults=(Kill(kill=9, at_step=3),)), learners=4)
    with pytest.raises(ConfigError, match="compute"):
        starling.simulate(job, learners=4, cluster={"computing": {"seconds": 0.5}})


def test_the_need_of_data_is_interpolated_between_the_studys_numbers_of_learners() -> None:
    arm = Arm.of({"name": "adpsgd", "pattern": "random"})
    alone, eight, between, most, beyond = (data_need(arm, count) for count in (1, 8, 16, 128, 512))
    assert alone and eight and between and most and beyond
    assert (alone.mean, alone.low, alone.high) == (1.0, 1.0, 1.0)
    assert 1.0 < eight.low < eight.mean < between.mean < most.mean == beyond.mean
    assert [each.is_extrapolated for each in (alone, eight, between, most, beyond)] == [False] * 4 + [True]
    assert beyond.short == f"~{most.short}"


def test_other_options_are_marked_and_sizes_of_a_cluster_are_not() -> None:
    other = data_need(Arm.of({"name": "adpsgd", "pattern": "random", "period": 4}), 8)
    sizes = (
        data_need(Arm.of({"name": "hadpsgd", "per_node": 8}), 8),
        data_need(Arm.of({"name": "parameter-server", "shards": 4}), 8),
    )
    assert other and other.is_extrapolated
    assert all(each and not each.is_extrapolated for each in sizes)
    assert data_need(Arm.of({"name": "bmuf"}), 8) is None


def test_records_have_the_parts_of_the_need_of_data() -> None:
    found = plan(regression("allreduce"), preset="v100-2019", learners=[8], strategies=["allreduce", "bmuf"])
    first, other = sorted(found.records(), key=lambda row: row["strategy"])
    assert first["data_mean"] == data_need(Arm.of({"name": "allreduce"}), 8).mean  # type: ignore[union-attr]
    assert first["data_is_extrapolated"] is False and other["data_mean"] is None
    assert "data" not in first
