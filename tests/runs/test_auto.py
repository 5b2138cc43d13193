"""`strategy: auto`: the choice follows from the measurements, is reported and recorded, and stays."""

import io
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import starling
from benchmarks.workloads import EmulatedDevice
from starling.engines.virtual.cluster import LinkModel
from starling.errors import ConfigError
from starling.experiment.auto import Choice, choice, kept, simulated_choice
from starling.experiment.folder import ExperimentFolder
from starling.experiment.planning import plan_recipe, show_plan
from starling.experiment.simulate import simulate_recipe
from starling.predict import predict
from starling.predict.costs import Validation, dump, facts_of
from starling.predict.measure import ACROSS, INSIDE, Allowance, Figures, costs_of, profile_of, topologies
from starling.predict.plan import TIE, Decision, choose
from starling.predict.predict import WORTH, WORTH_OF_A_DOUBLING, Arm, Machines, Prediction, simulate
from starling.recipe.run import CANDIDATES, RunConfig, StrategyChoice
from starling.speech.recipe import check_recipe
from starling.speech.task import SPEECH
from starling.topology import is_doubly_stochastic
from starling.training.speeds import Stragglers
from starling.workload import Weighting
from tests.runs.test_planning import measured_profile
from tests.warm_start import run_learners

Tree = dict[str, Any]
MEGABYTE, GRADIENT = 1 << 20, 0.05
FAST, SLOW_LINK = 0.001, 0.3


def figures(slowest: float = 1.0, link: float = FAST, world: int = 4, per_node: int = 1) -> list[Figures]:
    """The measurements of learners whose last one's gradients take `slowest` times as long; a mean of the model takes
    `link` seconds."""
    rounds = {"ring": link, "pairs": link / 2}
    if per_node > 1:
        rounds |= {INSIDE: FAST, ACROSS: link / per_node}
    return [
        Figures(
            gradients=[GRADIENT * (slowest if rank == world - 1 else 1.0)] * 4,
            steps=[0.0005] * 3,
            synchronous=[GRADIENT * slowest + link] * 3,
            means={MEGABYTE: link},
            rounds=rounds,
            num_bytes=MEGABYTE,
        )
        for rank in range(world)
    ]


def decided(measured: list[Figures], per_node: int = 1, among: Sequence[str] = CANDIDATES) -> Decision:
    """The choice, followed by the other strategies."""
    choices = [StrategyChoice(name=name) for name in among]
    return choose(Machines(costs_of(measured, per_node)), len(measured), choices)


def compared(measured: list[Figures], per_node: int = 1, among: Sequence[str] = CANDIDATES) -> Sequence[Prediction]:
    """The compared strategies, with the choice first."""
    return decided(measured, per_node, among).predictions


def rate(found: Prediction) -> float:
    return 1.0 / found.seconds_per_gradient


def worth(arm: Arm, learners: int, staleness: Counter[int]) -> float:
    return Prediction(arm, learners, (1.0,), 0.0, 0.0, staleness).worth


def chosen(measured: list[Figures], per_node: int = 1, weighting: Weighting = "batches", **options: Any) -> Choice:
    """The records and messages of a run about its choice."""
    run = RunConfig(
        name="r", learners=len(measured), strategy={"name": "auto", **options}, budget=starling.Budget(epochs=1)
    )
    return choice(Machines(costs_of(measured, per_node)), run, replace(emulated(), weighting=weighting))


def reasons(measured: list[Figures], **options: Any) -> tuple[str, ...]:
    return chosen(measured, **options).lines


@pytest.mark.wide
def test_equal_learners_on_a_fast_link_choose_allreduce() -> None:
    """No strategy can be much faster than learners that compute all the time."""
    found = compared(figures())[0]
    assert (found.arm.name, found.arm.given) == ("allreduce", {})
    assert rate(found) == pytest.approx(4 / (GRADIENT + 0.0005 + FAST), rel=0.01)


@pytest.mark.wide
@pytest.mark.parametrize("link", [FAST, SLOW_LINK])
def test_a_slow_learner_makes_the_choice_asynchronous(link: float) -> None:
    """It makes nearly as many mini-batches as the learners compute alone, 3.1 times those of a fast one; `allreduce`
    waits for the slowest."""
    found, *others = compared(figures(slowest=10.0, link=link))
    assert found.arm.name == "adpsgd"
    assert rate(found) == pytest.approx(3.1 / GRADIENT, rel=0.1)
    (synchronous,) = [each for each in others if each.arm.name == "allreduce"]
    assert rate(synchronous) == pytest.approx(4 / (10 * GRADIENT + link), rel=0.02)


@pytest.mark.wide
def test_a_slow_link_makes_learners_average_in_the_background_and_rarely() -> None:
    """A round of averaging takes six gradients, so averaging each gradient would make learners wait."""
    found = compared(figures(link=SLOW_LINK))[0]
    assert found.arm.name == "adpsgd"
    assert found.arm.given["period"] >= 2
    assert found.waiting < 0.05
    assert rate(found) > 5 * 4 / (GRADIENT + SLOW_LINK)


@pytest.mark.wide
def test_a_period_that_is_just_long_enough_is_too_short() -> None:
    """Rounds of 3.6 gradients fit in the 4 that a period of 2 allows a learner to be ahead; rounds that take 1.5 times
    as long do not, and make it wait."""
    found = compared(figures(link=2 * 3.6 * GRADIENT))  # of pairs: half of it
    by_period = {each.arm.given.get("period"): each for each in found if each.arm.name == "adpsgd"}
    assert by_period[2].caution < 0.9
    assert by_period[8].caution == pytest.approx(1.0, rel=0.01)
    assert found[0].arm.given["period"] >= 4


def test_a_link_too_slow_for_the_longest_period_makes_learners_wait() -> None:
    """Rounds take 60 gradients; with a period of 16, a learner may be 32 ahead."""
    found = compared(figures(link=2 * 60 * GRADIENT), among=("adpsgd",))[0]
    assert found.arm.given["period"] == 16
    assert found.waiting > 0.2


def test_rounds_that_were_measured_while_all_sent_do_not_queue_a_second_time() -> None:
    """A round of the ring, with two messages in and two out, takes as long as measured."""
    strategy = starling.STRATEGIES["dpsgd"]
    arm = Arm(strategy, strategy.options(pattern="ring"))
    machines = Machines(costs_of(figures(link=SLOW_LINK), 1))
    assert machines.cluster(arm, 4).uplink is None
    assert simulate(arm, 4, machines).seconds_per_gradient == pytest.approx(SLOW_LINK / 4, rel=0.01)


@pytest.mark.parametrize("period", [4.0, 16.0])
def test_gradients_that_rounds_slow_down_are_predicted_slower(period: float) -> None:
    """Two learners lose half of their time while a round is in progress. The oracle iterates the duration of their
    gradients and the share of the time in which a round is in progress, until they agree."""
    rounds, alone = 2.5 * GRADIENT, GRADIENT + 0.0005
    measured = [
        each.model_copy(update={"lost": 0.5 if rank > 1 else 0.0})
        for rank, each in enumerate(figures(link=2 * rounds, world=4))
    ]
    strategy = starling.STRATEGIES["adpsgd"]
    arm = Arm(strategy, strategy.options(pattern="pairs", period=period))
    found = simulate(arm, 4, Machines(costs_of(measured, 1)))
    under_way = min(1.0, rounds / (period * GRADIENT))  # the learners that lose nothing open the rounds
    slower = alone
    for _ in range(50):
        slower = alone + 0.5 * under_way * slower
    assert 1.0 / found.seconds_per_gradient == pytest.approx(2 / alone + 2 / slower, rel=0.02)


@pytest.mark.parametrize("world", [3, 4, 5, 8])
def test_measured_pairs_meet_once(world: int) -> None:
    """This holds for any first round, so that all links are measured equally often."""
    pairs = topologies(world, 1)["pairs"]
    assert pairs.period == (world if world % 2 else world - 1)
    met = [(rank, peer) for k in range(7, 7 + pairs.period) for rank in range(world) for peer in pairs.targets(k, rank)]
    assert sorted(met) == [(rank, peer) for rank in range(world) for peer in range(world) if rank != peer]
    for k in range(pairs.period):
        assert is_doubly_stochastic(pairs.matrix(k))
        assert all(list(pairs.sources(k, rank)) == list(pairs.targets(k, rank)) for rank in range(world))


@pytest.mark.wide
def test_nodes_are_tried_as_super_learners() -> None:
    """There are two nodes of two; `hadpsgd` is not tried without nodes, nor if learners cannot be divided."""
    names = {each.arm.name for each in compared(figures(link=SLOW_LINK, per_node=2), per_node=2)}
    assert names == set(CANDIDATES)
    only = compared(figures(link=SLOW_LINK, per_node=2), per_node=2, among=("hadpsgd",))
    assert only[0].arm.given["per_node"] == 2
    assert (
        "no other strategy was compared"
        in reasons(figures(link=SLOW_LINK, per_node=2), per_node=2, among=["hadpsgd"])[2]
    )
    assert "hadpsgd" not in {each.arm.name for each in compared(figures(link=SLOW_LINK))}


@pytest.mark.parametrize(("saved", "name"), [(0.02, "allreduce"), (0.6, "allreduce"), (0.9, "delay-by-one")])
def test_a_stale_strategy_is_chosen_only_if_it_makes_up_for_what_its_mini_batches_are_worth(
    saved: float, name: str
) -> None:
    """`delay-by-one` hides the mean, a share `saved` of the gradient."""
    assert 1 / (1 + 0.9) < WORTH * (1 - TIE) < WORTH < 1 / (1 + 0.6)
    found = compared(figures(link=saved * GRADIENT), among=("allreduce", "delay-by-one"))
    assert found[0].arm.name == name


def test_longer_periods_are_worth_less() -> None:
    """Each doubling of the period reduces the worth a little; a period below 1 is worth no more."""
    strategy = starling.STRATEGIES["adpsgd"]
    arms = [Arm(strategy, strategy.options(period=period)) for period in (0.5, 1.0, 2.0, 8.0)]
    values = [worth(arm, 4, Counter({1: 1})) for arm in arms]
    assert values[0] == values[1] == WORTH
    assert values[2:] == pytest.approx([WORTH * WORTH_OF_A_DOUBLING, WORTH * WORTH_OF_A_DOUBLING**3])


@pytest.mark.parametrize(
    ("name", "options", "staleness", "expected"),
    [
        ("allreduce", {}, {0: 5}, 1.0),
        ("parameter-server", {"update": "hybrid"}, {0: 5}, 1.0),
        ("delayed", {"delay": 2}, {1: 1, 2: 4}, WORTH),
        ("delay-by-one", {}, {1: 5}, WORTH),
        ("local-sgd", {"every": 4}, {0: 5}, WORTH),
        ("hadpsgd", {"per_node": 2}, {0: 5}, WORTH),
        ("parameter-server", {"update": "asynchronous"}, {3: 5}, WORTH),
    ],
)
def test_a_mini_batch_is_worth_less_where_gradients_are_stale_or_models_differ(
    name: str, options: Tree, staleness: dict[int, int], expected: float
) -> None:
    """This depends on what the strategy does, not on its name; with one learner there is nothing stale."""
    strategy = starling.STRATEGIES[name]
    arm = Arm(strategy, strategy.options.model_validate(options))
    assert worth(arm, 4, Counter(staleness)) == expected
    assert worth(arm, 1, Counter(staleness)) == 1.0


@pytest.mark.parametrize(
    ("world", "slowest", "send_time", "expected"),
    [
        (4, 1.0, 0.2, "allreduce"),
        (4, 1.08, 0.02, "allreduce"),
        (2, 10.0, 0.4, "adpsgd"),
        pytest.param(4, 1.0, 0.02, "allreduce", marks=pytest.mark.wide),
        pytest.param(4, 3.0, 0.4, "adpsgd", marks=pytest.mark.wide),
        pytest.param(4, 10.0, 0.02, "adpsgd", marks=pytest.mark.wide),
        pytest.param(4, 1.0, 3.0, "adpsgd", marks=pytest.mark.wide),
        pytest.param(8, 2.0, 2.0, "adpsgd", marks=pytest.mark.wide),
    ],
)
def test_plan_and_auto_choose_the_same_strategy_for_the_same_cluster(
    world: int, slowest: float, send_time: float, expected: str
) -> None:
    """Both use one rule and the costs of a profile. The two once disagreed on the second and the third."""
    slow = Stragglers(slow={} if slowest == 1.0 else {world - 1: slowest})
    own = measured_profile()
    link = LinkModel(latency=1e-4, bandwidth=own.job.model_bytes / (send_time * own.gradient.seconds))
    of_link = own.exchange.model_copy(update={"fitted": link})
    own = own.model_copy(update={"exchange": of_link, "mean": of_link, "gradient_mean": of_link})
    among = ("allreduce", "delay-by-one", "dpsgd", "adpsgd")
    planned = starling.plan(profile=own, learners=[world], strategies=among, stragglers=slow, crossings=False)
    found = choose(Machines(own.costs, slow), world, [StrategyChoice(name=name) for name in among])
    assert (planned.recommended.strategy, found.chosen.arm.name) == (expected, expected)
    assert {row.strategy for row in planned.rows} == {each.arm.name for each in found.predictions}


@pytest.mark.wide
@settings(max_examples=10, deadline=None)
@given(
    st.integers(2, 4),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([{"distribution": "constant"}, {"distribution": "log-normal", "spread": 0.3}]),
    st.floats(-2.0, 1.0),
    st.sampled_from([1.0, 1.2, 1.5, 2.0, 3.0, 10.0]),
    st.sampled_from([None, 1e7, "unlimited"]),
)
def test_plan_and_auto_choose_the_same_strategy_with_the_same_options_for_any_cluster(
    world: int, per_node: int, times: Tree, send_time: float, slowest: float, uplink: Any
) -> None:
    """The two front ends get the same figures in different ways: `plan` from a profile and a cluster's description,
    `auto` from the cluster of a simulation. A message of the model takes 10 ** `send_time` gradients."""
    job = emulated(stragglers=Stragglers(slow={world - 1: slowest}))
    bandwidth = 4 * (1 << 12) / (10.0**send_time * GRADIENT)
    cluster = starling.Cluster.model_validate(
        {
            "compute": {"seconds": GRADIENT, **times},
            "link": {"latency": 1e-4, "bandwidth": bandwidth},
            "nodes": {"size": per_node, "bandwidth": 10 * bandwidth, "uplink": uplink},
        }
    )
    own = measured_profile()
    own = own.model_copy(update={"job": own.job.model_copy(update={"model_bytes": 4 * (1 << 12)})})
    run = RunConfig(name="r", learners=world, strategy="auto", stragglers=job.stragglers, budget=job.budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "GRADIENTS", 16 * world)
        planned = starling.plan(
            job, profile=own, cluster=dict(cluster), learners=[world], strategies=CANDIDATES, crossings=False
        ).recommended
        found = simulated_choice(run, cluster, job).strategy
    assert (planned.strategy, planned.options) == (found.name, Arm.of(found).words)


@pytest.mark.wide
@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4),
    *[st.floats(-2.0, 0.7)] * 3,
    st.sampled_from([1.0, 2.0, 4.0]),
)
def test_plan_and_auto_choose_the_same_strategy_with_the_same_options_for_any_measured_figures(
    gradients: list[float], exchange: float, mean: float, synchronous: float, slowest: float
) -> None:
    """The figures are a profile's; exchanges and means take powers of ten of gradients."""
    sizes = (1 << 12, 1 << 14)
    of_size = [{size: 10.0**each * GRADIENT * size / sizes[-1] for size in sizes} for each in (exchange, mean)]
    alone = Figures(
        gradients=[GRADIENT * each for each in gradients], steps=[1e-3], applies=[1e-4], num_bytes=sizes[-1]
    )
    longest = GRADIENT * (max(gradients) + 10.0**synchronous)
    pair = Figures(exchanges=of_size[0], means=of_size[1], synchronous=[longest], num_bytes=sizes[-1])
    job = emulated(stragglers=Stragglers(slow={2: slowest}))
    own = profile_of(alone, [pair, pair], facts_of(job), "a test")
    run = RunConfig(name="r", learners=3, strategy="auto", stragglers=job.stragglers, budget=job.budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "GRADIENTS", 16 * 3)
        planned = starling.plan(job, profile=own, learners=[3], strategies=CANDIDATES, crossings=False).recommended
        found = choice(Machines(own.costs, job.stragglers), run, job).strategy
    assert (planned.strategy, planned.options) == (found.name, Arm.of(found).words)


def test_a_weighting_leaves_only_what_averages_gradients() -> None:
    """The other strategies would ignore it."""
    predicted = chosen(figures(slowest=10.0), weighting="utterances").notes["predicted"]
    assert [each["strategy"]["name"] for each in predicted] == ["allreduce"]


def test_three_lines_say_what_and_why_and_how_far_the_second_choice_is_behind() -> None:
    """The second choice is a different strategy, not the same with other options."""
    what, why, behind = reasons(figures(slowest=10.0))
    assert what.startswith("strategy auto: adpsgd (pattern: pairs) for 4 learners, ")
    assert "a gradient takes 50 ms (500 ms on learner 3)" in why
    found, *others = compared(figures(slowest=10.0))
    second = next(each for each in others if each.arm.name != "adpsgd")
    assert second.arm.name == "allreduce"
    assert f"allreduce is the second choice: {rate(second):.3g} mini-batches/s" in behind
    assert f"{1 - second.progress / found.progress:.0%} behind" in behind
    assert "1.5 times" not in behind
    cautious = reasons(figures(link=SLOW_LINK), among=("dpsgd", "allreduce"))[2]
    assert cautious.endswith(", and rounds may take 1.5 times as long")


def test_jitter_is_not_counted_twice() -> None:
    """The time that `allreduce` takes beyond the slowest gradient of each round is the mean, not the spread of the
    gradients."""
    generator = torch.Generator().manual_seed(1)
    times = (0.05 + 0.05 * torch.rand(4, 200, generator=generator)).tolist()
    rounds = [max(each) + 0.01 for each in zip(*times, strict=True)]
    measured = [
        Figures(
            gradients=each,
            steps=[0.0],
            synchronous=rounds,
            means={MEGABYTE: 0.01},
            rounds={"ring": 0.01},
            num_bytes=MEGABYTE,
        )
        for each in times
    ]
    found = costs_of(measured, 1).measured
    assert found is not None and found.mean_of_gradients_seconds == pytest.approx(0.01, rel=0.2)


@pytest.mark.parametrize(
    ("gradients", "minutes", "seconds"),
    [(1000, None, 0.03 * 1000 * 0.05 / 4), (10**9, None, 60.0), (None, 10.0, 18.0), (1000, 1e-3, 0.03 * 0.06)],
)
def test_measuring_takes_a_small_share_of_the_run(gradients: int | None, minutes: float | None, seconds: float) -> None:
    """It takes 3 % of the expected time, and at most a minute."""
    assert Allowance(starling.Budget(steps=gradients, minutes=minutes), 1, 60.0).seconds([0.05] * 4) == pytest.approx(
        seconds
    )


def test_a_recipe_that_auto_cannot_handle_has_one_clear_problem(tree: Tree) -> None:
    """The problem is reported before anything is measured."""
    with pytest.raises(ConfigError, match=r"strategy.among.0: input should be 'allreduce', .* or 'hadpsgd', got 'hogw"):
        check_recipe(tree | {"strategy": {"name": "auto", "among": ["hogwild"]}}, "r.yaml")
    with pytest.raises(ConfigError, match=r"strategy\.secnds"):
        check_recipe(tree | {"strategy": {"name": "auto", "secnds": 3}}, "r.yaml")
    with pytest.raises(ConfigError, match="none of hadpsgd fits 4 learners"):
        chosen(figures(), among=["hadpsgd"])


def test_a_job_is_not_run_before_a_strategy_has_been_chosen(tree: Tree) -> None:
    """The placeholder says where `auto` works."""
    placeholder = check_recipe(tree | {"strategy": "auto"}, "r.yaml").strategy
    job = starling.Job(
        EmulatedDevice(8, 0.0), placeholder.strategy, starling.Budget(steps=1), partial(torch.optim.SGD, lr=0.1)
    )
    with pytest.raises(ConfigError, match="strategy: auto is chosen by `starling train` and `starling simulate`"):
        starling.simulate(job, learners=2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "does not name it"),
        ({"strategy": {"name": "auto"}}, "was written before a strategy was chosen"),
        ({"strategy": {"name": "hadpsgd", "per_node": 3}}, "hadpsgd, which does not fit 2 learners"),
    ],
)
def test_a_resume_that_cannot_keep_its_strategy_says_why(tree: Tree, tmp_path: Path, config: Any, message: str) -> None:
    """A resume never chooses again."""
    if config is not None:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    run = check_recipe(tree | {"strategy": "auto", "resume": str(tmp_path / "checkpoints" / "step-1")}, "r.yaml")
    with pytest.raises(ConfigError, match=message):
        kept(run, lambda line: None)


def test_a_simulation_with_auto_is_that_of_the_strategy_it_chooses(tree: Tree) -> None:
    """They agree to the event hash; the choice uses the simulated cluster, without measuring."""
    tree |= {
        "learners": 3,
        "overwrite": True,
        "budget": {"steps": 9},
        "cluster": {"compute": {"seconds": 0.1}},
        "stragglers": {"slow": {2: 10.0}},
    }
    said = io.StringIO()

    def hash_with(strategy: Any) -> str:
        lines: list[str] = []
        simulate_recipe(SPEECH, check_recipe(tree | {"strategy": strategy}, "r.yaml"), lines.append, Console(file=said))
        return lines[-1]

    found = hash_with("auto")
    folder = ExperimentFolder(Path(tree["exp"]) / "songs-virtual")
    recorded = yaml.safe_load(folder.config.read_text())["strategy"]
    assert recorded["name"] == "adpsgd"
    assert "because a gradient takes 100 ms (10 times as long on the slowest learner)" in said.getvalue()
    assert found == hash_with(recorded)


@pytest.mark.wide
@pytest.mark.parametrize(("error", "first"), [(0.4, "recommended: "), (1.97, "no strategy is recommended")])
def test_a_plan_of_a_recipe_with_auto_compares_the_existing_strategies(
    error: float, first: str, tree: Tree, tmp_path: Path
) -> None:
    """The placeholder is not one of them. Nothing is recommended where predictions were far off."""
    validated = measured_profile().model_copy(update={"validation": Validation(error=error, against="two learners")})
    (tmp_path / "profile.yaml").write_text(dump(validated, ""))
    lines: list[str] = []
    found = plan_recipe(
        SPEECH,
        check_recipe(tree | {"strategy": "auto"}, "r.yaml"),
        Console(file=io.StringIO()),
        profile=tmp_path / "profile.yaml",
        preset=None,
        cluster=None,
        learners="2",
        strategies=None,
        price=None,
    )
    show_plan(*found, lines.append, False, tmp_path / "plan.csv")
    assert lines[0].startswith(first)
    assert f"predictions were at most {error:.0%} off" in " ".join(lines)
    table = (tmp_path / "plan.csv").read_text()
    assert "auto" not in table and "local-sgd" not in table
    assert any("periodic strategies are left out unless they are named" in line for line in lines)


def emulated(**changes: Any) -> starling.Job:
    """Gradients of 20 ms that need no processor, of a model of 16 KiB."""
    given = {"budget": starling.Budget(steps=60), "stragglers": Stragglers(slow={2: 10.0})} | changes
    return starling.Job(
        EmulatedDevice(1 << 12, 0.02),
        starling.STRATEGIES["allreduce"],
        make_optimizer=partial(torch.optim.SGD, lr=0.1),
        **given,
    )


@pytest.mark.wide
def test_real_learners_measure_choose_train_and_resume_with_the_same_choice(tmp_path: Path) -> None:
    """Three processes, one ten times slower: it is found, `adpsgd` is chosen, noted and run; a resume keeps it."""
    said = io.StringIO()
    how: dict[str, Any] = {"strategy": "auto", "exp": tmp_path, "console": Console(file=said), "engine": {"threads": 1}}
    trained = starling.train(emulated(), learners=3, name="slow", **how)
    assert trained.job.strategy.name == "adpsgd"
    lines = [line for line in said.getvalue().splitlines() if "auto" in line]
    assert lines[1].startswith("strategy auto: adpsgd (")
    note = yaml.safe_load((trained.folder / "auto.yaml").read_text())
    first, _, slowest = note["measured"]["gradient_seconds"]
    assert first >= 0.02
    assert slowest >= max(0.2, 3.0 * first)
    config = yaml.safe_load((trained.folder / "config.yaml").read_text())
    assert config["strategy"]["name"] == "adpsgd"
    assert config["strategy"] == note["predicted"][0]["strategy"]

    said.truncate(0)
    again = starling.train(
        emulated(budget=starling.Budget(steps=90)), learners=3, name="slow", resume=trained.folder, **how
    )
    assert "strategy auto: the run resumes with adpsgd (" in said.getvalue()
    assert "learners measure" not in said.getvalue()
    assert again.job.strategy.name == "adpsgd"
    assert yaml.safe_load((again.folder / "auto.yaml").read_text()) == note


def test_one_learner_needs_no_measuring(tmp_path: Path) -> None:
    """One line reports this."""
    said = io.StringIO()
    job = emulated(budget=starling.Budget(steps=3), stragglers=Stragglers())
    trained = starling.train(job, strategy="auto", exp=tmp_path, console=Console(file=said))
    assert "strategy auto: allreduce, because a single learner" in said.getvalue()
    assert trained.job.strategy.name == "allreduce"


@pytest.mark.wide
def test_learners_of_another_launcher_agree_on_the_choice(tree: Tree, tmp_path: Path) -> None:
    """As under torchrun, they measure, learner 0 chooses and records the choice, and all train with it."""
    (tmp_path / "songs.yaml").write_text(yaml.safe_dump(tree | {"strategy": "auto"}))
    run_learners([sys.executable, "-m", "starling", "train", str(tmp_path / "songs.yaml")], 2, tmp_path)
    folder = ExperimentFolder(Path(tree["exp"]) / "songs")
    note, config = (yaml.safe_load(path.read_text()) for path in (folder.auto, folder.config))
    assert config["strategy"] == note["predicted"][0]["strategy"]
    assert note["learners"] == 2
    assert "strategy auto: " in (tmp_path / "learner-0.log").read_text()
    assert "strategy auto: " not in (tmp_path / "learner-1.log").read_text()
