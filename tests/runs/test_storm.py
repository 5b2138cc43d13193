"""`starling storm`: the same seed is the same storm, and training goes through it."""

import io
import json
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from starling.errors import ConfigError
from starling.experiment.simulate import storm, storm_recipe
from starling.training.faults import Join, Kill, Pause, Split
from tests.runs.conftest import Tree

HOUR = 3600.0


@settings(deadline=None)  # it draws up to thousands of faults
@given(st.integers(1, 6), st.floats(0.0, 500.0), st.floats(0.0, 500.0), st.floats(0.5, 300.0), st.integers(0, 1000))
def test_nobody_is_hit_while_away_and_one_learner_always_works(
    learners: int, faults: float, cuts: float, away: float, seed: int
) -> None:
    found = storm(learners, HOUR, faults_per_hour=faults, cuts_per_hour=cuts, away=away, seed=seed)
    assert found == storm(learners, HOUR, faults_per_hour=faults, cuts_per_hour=cuts, away=away, seed=seed)
    hits = [each for each in found if not isinstance(each, Join)]
    times = [each.at_seconds or 0.0 for each in hits]
    assert times == sorted(times) and max(times, default=0.0) <= HOUR
    for learner in range(learners):
        own = [time for each, time in zip(hits, times, strict=True) if each.learner == learner]
        assert all(later - earlier >= away - 0.1001 for earlier, later in pairwise(own))
    for now in times:
        assert sum(now - away + 0.1 < time <= now for time in times) < max(2, learners)
    joins = {(each.join, each.at_seconds) for each in found if isinstance(each, Join)}
    killed = [(each.kill, each.at_seconds or 0.0) for each in hits if isinstance(each, Kill)]
    assert len(joins) == len(killed)
    assert all(any(name == own and abs(at - time - away) < 0.11 for own, at in joins) for name, time in killed)


def test_a_storm_has_as_many_faults_as_were_asked_for() -> None:
    """On average: of so many learners, hardly any fault is left out because its learner is away."""
    found = storm(500, 20 * HOUR, faults_per_hour=70.0, pauses=0.25, cuts_per_hour=30.0, seed=3)
    count = {kind: sum(isinstance(each, kind) for each in found) for kind in (Kill, Pause, Split)}
    assert count[Kill] == pytest.approx(20 * 70 * 0.75, rel=0.1)
    assert count[Pause] == pytest.approx(20 * 70 * 0.25, rel=0.1)
    assert count[Split] == pytest.approx(20 * 30, rel=0.1)


def through(tree: Tree, folder: Path, is_real: bool, **settings: float) -> tuple[str, Path]:
    """What was said of a storm of six seconds, and the experiment."""
    path, said = folder / "recipe.yaml", io.StringIO()
    path.write_text(yaml.safe_dump({**tree, "learners": 3, "strategy": "adpsgd"}), encoding="utf-8")
    console = Console(file=said, force_terminal=False, width=300)
    storm_recipe(
        path,
        [],
        lambda line: print(line, file=said),
        console,
        minutes=0.1,
        slow=1.5,
        seed=2,
        is_real=is_real,
        settings={"faults_per_hour": 2400.0, "pauses": 0.3, "away": 1.0, **settings},
    )
    return said.getvalue(), Path(tree["exp"]) / f"{tree['name']}-storm"


def test_a_simulation_goes_through_a_storm_and_reports_its_goodput(tree: Tree, tmp_path: Path) -> None:
    said, experiment = through(tree, tmp_path, is_real=False, cuts_per_hour=600.0)
    assert "storm of seed 2, 0.1 minutes, 3 learners: " in said
    assert "goodput " in said
    config = yaml.safe_load((experiment.with_name(f"{experiment.name}-virtual") / "config.yaml").read_text())
    expected = storm(3, 6.0, faults_per_hour=2400.0, pauses=0.3, cuts_per_hour=600.0, away=1.0, seed=2)
    assert config["faults"] == [each.model_dump(mode="json") for each in expected]
    assert list(config["stragglers"]["slow"].values()) == [1.5]
    assert "ended without" not in said  # those that were killed came back


def test_a_process_that_takes_time_to_start_costs_goodput(tree: Tree, tmp_path: Path) -> None:
    """`watch.start` for each of three learners that begin, and for each one that is killed and comes back in time."""

    def spent(start: float) -> tuple[float, int]:
        changed = {**tree, "exp": str(tmp_path / f"exp-{start}"), "cluster": {"watch": {"start": start}}}
        said, experiment = through(changed, tmp_path, is_real=False)
        lines = (experiment.with_name(f"{experiment.name}-virtual") / "log" / "events.jsonl").read_text().splitlines()
        (goodput,) = (each for each in map(json.loads, lines) if each["kind"] == "goodput")
        return float(goodput["entering"]), said.count(" came; ")

    assert spent(0.0)[0] == 0.0
    seconds, num_joined = spent(0.25)
    assert num_joined > 0
    assert seconds == pytest.approx(0.25 * (3 + num_joined), rel=1e-6)


def test_cuts_of_the_network_need_a_simulation(tree: Tree, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only `starling simulate` supports split"):
        through(tree, tmp_path, is_real=True, cuts_per_hour=6000.0)
