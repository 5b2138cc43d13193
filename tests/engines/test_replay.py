"""A recorded run, replayed in its order, ends with the same bits: on both engines, through deaths and for each kind of
strategy."""

import dataclasses
import functools
import json
import random
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import starling
from starling.budget import Budget
from starling.checkpoint.reader import checkpoints_in
from starling.engines.virtual.cluster import Cluster
from starling.engines.virtual.engine import VirtualEngine
from starling.engines.virtual.replay import Moment, ReplayEngine
from starling.errors import CheckpointError, ConfigError, NonFiniteError, PeerLost, ReplayError
from starling.events import Stream
from starling.experiment.folder import ExperimentFolder
from starling.experiment.replay import Watching, read_runs, replay, replay_runs
from starling.experiment.train import Trained
from starling.toy import regression
from starling.training.faults import Join, Kill, NotFinite
from starling.training.job import ClaimReport, Job, Observer
from starling.training.order import Script, turns_in
from starling.training.speeds import Stragglers
from tests.code_blocks import code_blocks
from tests.engines.unlinked import unlinked
from tests.sessions import run_to_end
from tests.test_documents import ROOT, environment

STRATEGIES = (
    "a2cid2", "adpsgd", "aeasgd", "ako", "allreduce", "async-diloco", "decoupled-diloco",
    "delay-by-one", "diloco", "dpsgd", "local-sgd",
    "parameter-server", "sgp",
)  # fmt: skip
KILLED = (
    "a2cid2", "adpsgd", "aeasgd", "ako", "allreduce", "async-diloco", "decoupled-diloco",
    "delay-by-one", "diloco", "dpsgd", "local-sgd",
    "noloco", "parameter-server", "sgp",
)  # fmt: skip


class Recorded(Observer):
    """The events of a run in memory."""

    def __init__(self, saves: bool = True) -> None:
        self._saves = saves
        self.events: dict[int, list[dict[str, Any]]] = defaultdict(list)
        """The events of all learners, in order, by membership."""
        self._number = 0

    @property
    def records(self) -> bool:
        return True

    @property
    def saves(self) -> bool:
        return self._saves

    def on_event(self, rank: int, kind: str, **fields: Any) -> None:
        self._number = fields["number"] if kind == "membership" else self._number
        self.events[self._number].append({"kind": kind, "learner": rank, **fields})

    def on_claim(self, report: ClaimReport) -> None:
        self.on_event(report.rank, "batch", step=report.ticket.step, minutes=report.minutes)

    def scripts(self) -> list[list[Script]]:
        found = []
        for number in sorted(self.events):
            scripts: dict[int, Script] = {}
            for event in self.events[number]:
                scripts.setdefault(event["learner"], Script(event["learner"])).add(event, "the record")
            members = next(iter(scripts.values())).members
            found.append([scripts[learner] for learner in members])
        return found


def restless(job: Job, seed: int, **changes: Any) -> tuple[Job, Cluster]:
    """A job with checkpoint barriers, on a cluster whose learners' speeds vary much."""
    generator = random.Random(seed)
    slow = {learner: generator.choice([1.0, 1.7, 4.0]) for learner in range(4)}
    stragglers = Stragglers(slow={learner: factor for learner, factor in slow.items() if factor > 1.0})
    latency = generator.choice([1e-4, 0.02])
    settings = {"compute": {"distribution": "log-normal", "spread": 0.5}, "link": {"latency": latency, "jitter": 0.5}}
    cluster = Cluster.model_validate(settings)
    return dataclasses.replace(job, stragglers=stragglers, checkpoint_every=20, seed=seed, **changes), cluster


def record_and_replay(job: Job, cluster: Cluster) -> tuple[Recorded, Recorded]:
    recorded, again = Recorded(), Recorded()
    first = VirtualEngine(job, 4, cluster, recorded).run()
    second = ReplayEngine(job, recorded.scripts(), again).run()
    assert len(first.states) == len(second.states)
    for mine, theirs in zip(first.states, second.states, strict=True):
        assert torch.equal(mine.weights, theirs.weights)
    return recorded, again


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_order_is_replayed_to_the_bit(strategy: str, seed: int) -> None:
    job, cluster = restless(regression(strategy), seed)
    recorded, again = record_and_replay(job, cluster)
    states = [script.states for script in recorded.scripts()[0]]
    assert states == [script.states for script in again.scripts()[0]]
    assert all(len(each) > 2 for each in states)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strategy", KILLED)
def test_a_run_that_lost_a_learner_is_replayed_to_the_bit(strategy: str, seed: int) -> None:
    kill = Kill(kill=1, at_event=random.Random(seed).randrange(40, 200))
    recorded, again = record_and_replay(*restless(regression(strategy), seed, faults=(kill,)))
    assert len(recorded.events) == 2
    for before, after in zip(recorded.scripts(), again.scripts(), strict=True):
        assert [script.states for script in before] == [script.states for script in after]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strategy", KILLED)
def test_a_run_that_others_joined_is_replayed_to_the_bit(strategy: str, seed: int) -> None:
    join = Join(join=4, at_seconds=random.Random(seed).uniform(0.5, 2.0))
    recorded, again = record_and_replay(*restless(regression(strategy), seed, faults=(join,)))
    assert [len(scripts) for scripts in recorded.scripts()] == [4, 5]
    for before, after in zip(recorded.scripts(), again.scripts(), strict=True):
        assert [script.states for script in before] == [script.states for script in after]


@pytest.mark.parametrize("strategy", ["allreduce", "dpsgd"])
def test_batch_shares_are_replayed_to_the_bit(strategy: str) -> None:
    recorded, again = record_and_replay(*restless(regression(strategy), 0, batch_shares={1: 2, 3: 3}))
    assert [script.states for script in recorded.scripts()[0]] == [script.states for script in again.scripts()[0]]


def marked(strategies: Sequence[str], narrow: str) -> list[Any]:
    return [pytest.param(each, marks=() if each == narrow else pytest.mark.wide) for each in strategies]


def trained(strategy: str, folder: Path, faults: Sequence[Kill] = ()) -> tuple[Job, Trained]:
    job = dataclasses.replace(regression(strategy), faults=tuple(faults), checkpoint_every=20)
    return job, starling.train(job, learners=3, name=strategy, exp=folder)


@pytest.mark.parametrize(
    "strategy",
    [
        "adpsgd",
        "parameter-server",
        *(
            pytest.param(each, marks=pytest.mark.wide)
            for each in STRATEGIES
            if each not in ("adpsgd", "parameter-server")
        ),
    ],
)
def test_processes_are_replayed_to_the_bit(strategy: str, tmp_path: Path) -> None:
    """The hashes are of weights that the learners' processes computed."""
    job, run = trained(strategy, tmp_path)
    replayed = starling.replay(job, run.folder)
    assert sorted(replayed.states) == [0, 1, 2]
    assert min(replayed.states.values()) > 2


@pytest.mark.parametrize("strategy", marked(KILLED, "ako"))
def test_processes_of_which_one_was_killed_are_replayed_to_the_bit(strategy: str, tmp_path: Path) -> None:
    job, run = trained(strategy, tmp_path, [Kill(kill=1, at_step=2)])
    replayed = starling.replay(job, run.folder)
    assert {script.number for script in replayed.runs[0].scripts} == {0, 1}
    assert {0, 2} <= replayed.states.keys()


def resumed(strategy: str, folder: Path, then: str, learners: int, **killed: Any) -> tuple[dict[int, Job], Path]:
    """A run that ended, and its resume from the newest checkpoint; the optimizers have momentum."""
    keep = {"checkpoints": {"keep": 100}, "name": "run", "exp": folder}
    common: dict[str, Any] = {
        "checkpoint_every": 12,
        "make_optimizer": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    }
    first = dataclasses.replace(regression(strategy), **common, **killed)
    with pytest.raises(PeerLost) if killed else nullcontext():
        starling.train(first, learners=3, on_loss="stop", **keep)
    more = Budget(epochs=(first.budget.epochs or 0) + 3)
    job = dataclasses.replace(regression(then), **common, budget=more)
    path = starling.train(job, learners=learners, resume=folder / "run", **keep).folder
    return {3: first, learners: job}, path


@pytest.mark.parametrize("strategy", marked(STRATEGIES, "adpsgd"))
def test_processes_that_were_resumed_are_replayed_to_the_bit(strategy: str, tmp_path: Path) -> None:
    jobs, folder = resumed(strategy, tmp_path, strategy, 3)
    replayed = replay(jobs[3], folder)
    assert len(replayed.runs) == 2
    assert all(len(script.states) > 1 for run in replayed.runs for script in run.scripts)
    in_second = sum(len(script.batches) for script in replayed.runs[0].scripts) + 5
    assert replay(jobs[3], folder, watch=Watching(str(in_second), None)).outcome is None
    from_one = folder / "checkpoints" / f"step-{replayed.runs[1].plan.position.num_done:08d}"
    assert len(replay(jobs[3], folder, checkpoint=from_one).runs) == 1
    with pytest.raises(ReplayError, match="is not the checkpoint"):
        replay(jobs[3], folder, checkpoint=checkpoints_in(folder / "checkpoints")[-1])


@pytest.mark.parametrize("strategy", marked(STRATEGIES, "local-sgd"))
def test_processes_that_were_lost_and_resumed_are_replayed_to_the_bit(strategy: str, tmp_path: Path) -> None:
    """Wherever the others were when learner 0 was killed."""
    killed = {"faults": (Kill(kill=0, at_step=20),), "stragglers": Stragglers(slow={1: 4.0, 2: 4.0})}
    try:
        jobs, folder = resumed(strategy, tmp_path, strategy, 3, **killed, budget=Budget(epochs=12))
    except CheckpointError as error:
        assert "no complete checkpoint" in str(error)
        pytest.skip("a learner was so late that no checkpoint is complete")
    assert len(replay(jobs[3], folder).runs) == 2


@pytest.mark.parametrize(
    ("strategy", "then"),
    [
        ("diloco", "a2cid2"),
        pytest.param("async-diloco", "adpsgd", marks=pytest.mark.wide),
        pytest.param("adpsgd", "parameter-server", marks=pytest.mark.wide),
    ],
)
def test_a_resume_with_another_strategy_and_fewer_learners_is_replayed(
    strategy: str, then: str, tmp_path: Path
) -> None:
    jobs, folder = resumed(strategy, tmp_path, then, 2)
    runs = read_runs(ExperimentFolder(folder))
    replayed = replay_runs(lambda run: jobs[len(run.memberships[0])], runs, lambda name, done, total: None)
    assert [len(run.memberships[0]) for run in replayed.runs] == [3, 2]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Path]:
    """A recorded run of two simulated learners, with its streams as `starling train` writes them."""
    job = dataclasses.replace(regression("adpsgd"), checkpoint_every=20)
    return job, recorded_on_disk(job, tmp_path_factory.mktemp("replay") / "run")


def recorded_on_disk(job: Job, folder: Path, saves: bool = True) -> Path:
    """The folder of a simulation of two learners."""
    segment = folder / "seen" / "from-00000000"
    segment.mkdir(parents=True)
    position = '{"next_ticket": {"epoch": 0, "index": 0, "step": 0}, "outstanding": []}'
    (segment / "start.json").write_text(position, encoding="utf-8")
    (folder / "config.yaml").write_text("name: run\n", encoding="utf-8")
    recorded = Recorded(saves)
    VirtualEngine(job, 2, observer=recorded).run()
    for event in recorded.events[0]:
        fields = {name: value for name, value in event.items() if name not in ("kind", "learner")}
        Stream(segment / f"learner-{event['learner']}.jsonl").append(event["kind"], **fields)
    return folder


def test_a_record_on_disk_is_replayed(experiment: tuple[Job, Path]) -> None:
    job, folder = experiment
    assert sorted(replay(job, folder).states) == [0, 1]


def test_a_replay_stops_where_a_figure_exceeds_a_limit(experiment: tuple[Job, Path]) -> None:
    job, folder = experiment
    moments: list[Moment] = []
    replay(job, folder, watch=lambda moment: moments.append(moment) is not None)
    assert [each.number for each in moments] == list(range(1, 97))
    limit = sorted(each.distance for each in moments if each.learner == 1)[-3]
    first = next(each for each in moments if each.learner == 1 and each.distance > limit)
    watching = Watching(f"distance>{limit!r}", learner=1)
    assert replay(job, folder, watch=watching).outcome is None
    assert watching.newest[1] == first
    assert max(each.number for each in watching.newest.values()) == first.number


@pytest.mark.parametrize(("until", "number"), [("17", 17), ("loss > inf", 96), ("weights>0", 3)])
def test_conditions(until: str, number: int, experiment: tuple[Job, Path]) -> None:
    watching = Watching(until, None)
    replay(*experiment, watch=watching)
    assert max(each.number for each in watching.newest.values()) == number


def test_an_expression_is_one_more_figure(experiment: tuple[Job, Path]) -> None:
    """As in `--watch largest=...`: it can stop a replay, and sees the gradient, the weights and their mean."""
    job, folder = experiment
    expressions = ["largest=g.abs().max()", "apart = float(torch.linalg.vector_norm(w - mean)) - distance"]
    watching = Watching("largest > 0", None, expressions=expressions)
    assert replay(job, folder, watch=watching).outcome is None
    (figures,) = watching.figures.values()
    assert [moment.number for moment in watching.newest.values()] == [1]
    assert 0.0 < figures["largest"] <= figures["gradient"]
    assert figures["apart"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("loss=g.sum()", "give a new name"),
        ("g.sum()", "give a new name"),
        ("a=g.", "invalid syntax"),
        ("a=h.sum()", "'h' is not defined"),
        ("a=g", "ValueError: only one element"),
    ],
)
def test_an_expression_that_is_no_figure_is_refused(
    expression: str, message: str, experiment: tuple[Job, Path]
) -> None:
    job, folder = experiment
    with pytest.raises(ConfigError, match=message):
        replay(job, folder, watch=Watching(None, None, expressions=[expression]))


@pytest.mark.parametrize("until", ["x>1", "loss>x", "1.5", "loss", "-1"])
def test_other_conditions_are_refused(until: str) -> None:
    with pytest.raises(ConfigError, match="give the number of a gradient"):
        Watching(until, None)


def test_a_learner_without_a_condition_is_refused() -> None:
    with pytest.raises(ConfigError, match="give --until, too"):
        Watching(None, 1)


def test_another_learning_rate_in_the_same_order(experiment: tuple[Job, Path]) -> None:
    job, folder = experiment
    own, other = replay(job, folder), replay(dataclasses.replace(job, make_optimizer=slower), folder, check=False)
    assert len(own.losses) == len(other.losses) == 1
    assert other.losses[0] > own.losses[0]
    again = replay(dataclasses.replace(job, make_optimizer=slower), folder, check=False)
    assert other.losses == again.losses


@pytest.mark.parametrize(
    "strategy", ["allreduce", *(pytest.param(each, marks=pytest.mark.wide) for each in ("diloco", "adpsgd"))]
)
def test_learners_of_several_machines_that_sum_in_order_are_replayed_to_the_bit(strategy: str, tmp_path: Path) -> None:
    job = unlinked(strategy)
    run = starling.train(job, learners=3, name="run", exp=tmp_path, engine={"reduce": "ordered"})
    assert sorted(replay(job, run.folder).states) == [0, 1, 2]


def test_sums_of_a_backend_are_replayed_up_to_rounding(tmp_path: Path) -> None:
    """Without an order of the sums; with one, the test above would otherwise show nothing."""
    job = unlinked("allreduce")
    run = starling.train(job, learners=3, name="run", exp=tmp_path)
    assert 0.0 < (replay(job, run.folder).difference or 0.0) < 1e-4
    with pytest.raises(ReplayError, match="rounding explains at most"):
        replay(dataclasses.replace(job, make_optimizer=slower), run.folder)


@pytest.mark.wide
def test_the_page_finds_the_mini_batch_that_made_a_run_diverge(tmp_path: Path) -> None:
    said = []
    for block in code_blocks(ROOT / "docs" / "diverging.md"):
        if block.saved_as:
            (tmp_path / block.saved_as).write_text(block.text, encoding="utf-8")
        elif block.language == "sh":
            code, output, left = run_to_end(["bash", "-c", block.text.strip()], tmp_path, environment())
            assert (code, left) == (0, []), output
            said.append(output)
    assert float(re.findall(r"loss of new rows: (\S+)", said[0])[0]) > 10.0
    (found,) = (line.split() for line in said[1].splitlines() if "e+09" in line)
    assert found[2:4] == ["1", "11"]
    losses = [line.split()[3::2] for line in said[2].splitlines() if re.match(r"│ \d+ +│ \S+ +│ \S+ +│$", line)]
    assert float(losses[0][0]) > 1e3 * float(losses[0][1])


def changed(experiment: tuple[Job, Path], tmp_path: Path, change: Any) -> Path:
    """A copy of the experiment with a change to the lines of learner 1's stream."""
    source, copied = experiment[1], tmp_path / "run"
    for path in source.rglob("*.*"):
        if path.is_file():
            target = copied / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    stream = copied / "seen" / "from-00000000" / "learner-1.jsonl"
    stream.write_text("".join(change(stream.read_text(encoding="utf-8").splitlines(keepends=True))), encoding="utf-8")
    return copied


def test_a_flipped_character_is_named(experiment: tuple[Job, Path], tmp_path: Path) -> None:
    flipped = changed(experiment, tmp_path, lambda lines: [*lines[:4], lines[4].replace('"', "'", 1), *lines[5:]])
    with pytest.raises(ReplayError, match=r"learner-1\.jsonl:5: damaged"):
        replay(experiment[0], flipped)


def test_a_record_without_its_end_is_said_to_be_stuck(experiment: tuple[Job, Path], tmp_path: Path) -> None:
    cut = changed(experiment, tmp_path, lambda lines: lines[: len(lines) // 2])
    with pytest.raises(starling.StarlingError, match=r"the replay stops|the record ends"):
        replay(experiment[0], cut)


def test_a_run_that_ended_with_an_error_is_replayed_with_a_change(tmp_path: Path) -> None:
    job = dataclasses.replace(regression("adpsgd"), faults=(NotFinite(nan=1, at_step=5),), most_not_finite=1)
    with pytest.raises(NonFiniteError):
        starling.train(job, learners=2, name="run", exp=tmp_path)
    with pytest.raises(ReplayError, match="ended with an error"):
        replay(job, tmp_path / "run")
    other = replay(dataclasses.replace(job, make_optimizer=slower), tmp_path / "run", check=False)
    assert other.ended is not None
    assert len(other.losses) == 1


def test_another_job_is_noticed(experiment: tuple[Job, Path]) -> None:
    job, folder = experiment
    with pytest.raises(ReplayError, match="learner 0: its state number 2"):
        replay(dataclasses.replace(job, make_optimizer=slower), folder)


def slower(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def test_another_arithmetic_is_refused(experiment: tuple[Job, Path], tmp_path: Path) -> None:
    def elsewhere(lines: list[str]) -> list[str]:
        event = json.loads(lines[0])
        assert event.pop("crc")
        event["processor"] = "NEON"
        return [json.dumps(event) + "\n", *lines[1:]]

    with pytest.raises(ReplayError, match="computed with processor NEON"):
        replay(experiment[0], changed(experiment, tmp_path, elsewhere))


def test_hogwild_is_refused(experiment: tuple[Job, Path]) -> None:
    with pytest.raises(ConfigError, match="hogwild cannot be replayed"):
        replay(regression("hogwild"), experiment[1])


def test_islands_are_refused(experiment: tuple[Job, Path]) -> None:
    with pytest.raises(ConfigError, match="islands cannot be replayed"):
        replay(dataclasses.replace(regression("allreduce"), island=starling.Island(sharded=2)), experiment[1])


def test_turns_that_are_none_are_refused() -> None:
    assert list(turns_in("ffb3rex")) == ["f", "f", "b3", "r", "e", "x"]
    with pytest.raises(ValueError, match="is no turn"):
        list(turns_in("ffz"))
