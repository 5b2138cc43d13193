"""A simulated run is trained, scored, and the same every time."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import soundfile
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from starling.checkpoint.reader import latest, load
from starling.errors import ConfigError, DataError, PeerLost
from starling.experiment.record import audit
from starling.experiment.simulate import simulate_recipe
from starling.speech.commands.evaluate import evaluate
from starling.speech.recipe import check_recipe
from starling.speech.task import SPEECH
from starling.speech.transcribing.files import transcribe_files

Tree = dict[str, Any]


def simulated(tree: Tree) -> list[str]:
    """The results of a simulation, line by line."""
    lines: list[str] = []
    simulate_recipe(SPEECH, check_recipe(tree, "r.yaml"), lines.append, Console(file=io.StringIO()))
    return lines


def test_a_simulation_says_where_it_writes_and_which_cluster_it_assumes(tree: Tree, tmp_path: Path) -> None:
    """This comes first; all times depend on the cluster. Only what differs from the defaults is listed."""
    said = io.StringIO()
    tree |= {"name": "flock", "cluster": {"compute": {"seconds": 0.25}, "link": {"jitter": 0.5}}}
    simulate_recipe(SPEECH, check_recipe(tree, "r.yaml"), lambda line: None, Console(file=said))
    first = said.getvalue().splitlines()[0]
    changed = "compute.seconds=0.25, link.jitter=0.5"
    where = tmp_path / "exp" / "flock-virtual"
    assert first.startswith(f"2 virtual learners in {where}, on the default cluster but for {changed}; change it with")


@pytest.mark.parametrize("strategy", ["allreduce", "delay-by-one"])
def test_two_simulations_of_one_recipe_agree_in_every_event(tree: Tree, strategy: str) -> None:
    """Scores, simulated time and event hash are the same; a different seed gives a different hash."""
    tree |= {"strategy": strategy, "overwrite": True, "learners": 3}
    first, second = simulated(tree), simulated(tree)
    assert first == second
    assert [line.split()[0] for line in first] == ["test", "%WER", "%SER", "%CER", "simulated", "event"]
    assert simulated({**tree, "seed": 2})[-1] != first[-1]


@pytest.mark.wide
def test_a_simulation_can_be_evaluated_and_used(tree: Tree, songs: Path, tmp_path: Path) -> None:
    """Its consensus model is a checkpoint, and learns the songs."""
    tree |= {
        "budget": {"epochs": 30},
        "batches": {"max_duration": 2},
        "augment": {"speed": [1.0], "spec_augment": None},
        "optimizer": {"lr": 0.02},
    }
    results = simulated(tree)
    experiment = tmp_path / "exp" / "songs-virtual"
    assert load(latest(experiment)).manifest.learners == 0
    again: list[str] = []
    evaluate(experiment, ["test"], again.append, Console(file=io.StringIO()))
    assert again == results[:4]
    assert float(again[1].split()[1]) <= 20.0
    assert (experiment / "decode" / "errs-test.txt").is_file()
    assert (experiment / "log" / "virtual.log").read_text().count("ended") == 60

    samples, rate = soundfile.read(songs.parent / "0.flac", dtype="float32")
    soundfile.write(tmp_path / "stereo.wav", samples[:, None].repeat(2, axis=1), rate)
    texts: list[str] = []
    transcribe_files(experiment, [songs.parent / "0.flac", tmp_path / "stereo.wav"], texts.append)
    (first, spoken), (second, also) = (line.split("\t") for line in texts)
    assert (first, second) == (str(songs.parent / "0.flac"), str(tmp_path / "stereo.wav"))
    assert spoken == also
    assert spoken in {line.split("\t")[4] for line in songs.read_text().splitlines()}

    with pytest.raises(ConfigError, match=r"set 'tset' is not in data\.corpus\.sets; did you mean 'test'"):
        evaluate(experiment, ["tset"], texts.append, Console(file=io.StringIO()))
    (tmp_path / "noise.wav").write_bytes(b"RIFF of nothing")
    with pytest.raises(DataError, match=r"noise\.wav"):
        transcribe_files(experiment, [tmp_path / "noise.wav"], texts.append)
    soundfile.write(tmp_path / "nan.wav", [float("nan")] * 8000, 8000, subtype="FLOAT")
    with pytest.raises(DataError, match=r"nan\.wav: .*not finite"):
        transcribe_files(experiment, [tmp_path / "nan.wav"], texts.append)


def test_an_asynchronous_simulation_reports_rounds_staleness_and_distance(tree: Tree, tmp_path: Path) -> None:
    """They are in the log, the events, the curves and the manifest."""
    tree |= {"strategy": "adpsgd", "learners": 3, "batches": {"max_duration": 2}}
    simulated(tree)
    experiment = tmp_path / "exp" / "songs-virtual"
    ends = [line for line in (experiment / "log" / "virtual.log").read_text().splitlines() if "ended" in line]
    assert len(ends) == 3
    assert all(
        re.search(r"\d rounds per gradient, staleness \d+\.\d \(at most \d+\), .* MB sent", line) for line in ends
    )
    happened = [json.loads(line) for line in (experiment / "log" / "events.jsonl").read_text().splitlines()]
    (epoch,) = [each for each in happened if each["kind"] == "epoch"]
    assert epoch["learners"].keys() == {"0", "1", "2"}
    assert all(each["rounds"] > 0 for each in epoch["learners"].values())
    curves = EventAccumulator(str(experiment / "tensorboard" / "learner-0")).Reload()
    (drawn,) = curves.Scalars("consensus/distance")
    manifest = load(latest(experiment)).manifest
    assert (drawn.step, manifest.sync_group_size) == (manifest.next_ticket.step, 1)
    assert drawn.value > 0.0
    assert manifest.consensus_distance is not None and manifest.consensus_distance > 0.0


def test_a_straggler_of_the_recipe_delays_a_synchronous_simulation(tree: Tree) -> None:
    """All learners wait for a pause of ten simulated minutes."""
    tree |= {"overwrite": True}
    without = simulated(tree)[-2]
    delayed = simulated({**tree, "stragglers": {"pauses": [{"learner": 1, "after": 1, "seconds": 600}]}})[-2]
    assert without.startswith("simulated time: 0.")
    assert delayed.startswith("simulated time: 10 min 0")


def test_a_folder_that_is_not_an_experiment_is_named(tmp_path: Path) -> None:
    """The message gives an example of one."""
    with pytest.raises(ConfigError, match=r"no config\.yaml here"):
        transcribe_files(tmp_path, [], print)


@pytest.mark.wide
def test_a_simulation_survives_a_dead_learner_and_the_audit_agrees(tree: Tree, tmp_path: Path) -> None:
    """Another learner sees its unfinished mini-batches; one that comes back takes part; the events are the same each
    time."""
    tree |= {
        "strategy": {"name": "adpsgd"},
        "learners": 3,
        "budget": {"epochs": 8},
        "overwrite": True,
        "faults": [
            {"kill": 2, "at_step": 2},
            {"split": [0], "at_event": 30, "seconds": 1},
            {"join": 2, "at_seconds": 1.5},
        ],
    }
    screen = io.StringIO()
    lines: list[str] = []
    simulate_recipe(SPEECH, check_recipe(tree, "r.yaml"), lines.append, Console(file=screen, width=300))
    said = screen.getvalue()
    assert re.search(
        r"learner 2 was killed on purpose after [\d.]+ simulated seconds; learners 0, 1 continue after", said
    )
    assert "learner 2 came; learners 0, 1, 2 continue after" in said
    assert "ended without" not in said
    assert simulated(tree) == lines
    told: list[str] = []
    audit(tmp_path / "exp" / "songs-virtual", told.append, Console(file=io.StringIO()))
    assert "exactly once" in told[-1]


def test_a_simulation_that_tolerates_no_loss_names_the_lost_learner(tree: Tree) -> None:
    """As in training, the exit code is 3."""
    tree |= {"learners": 3, "budget": {"epochs": 8}, "on_loss": "stop", "faults": [{"kill": 1, "at_seconds": 0.25}]}
    with pytest.raises(PeerLost, match=r"learner 1 was killed on purpose after 0\.25 simulated seconds"):
        simulated(tree)
