"""A simulated run is trained, scored, and the same every time."""

import io
from pathlib import Path
from typing import Any

import pytest
import soundfile
from rich.console import Console

from starling.checkpoint.reader import latest, load
from starling.errors import CheckpointError, ConfigError, DataError
from starling.experiment.evaluate import evaluate, transcribe
from starling.experiment.recipe import check_recipe
from starling.experiment.simulate import simulate

Tree = dict[str, Any]


def simulated(tree: Tree) -> list[str]:
    """The results of a simulation, line by line."""
    lines: list[str] = []
    simulate(check_recipe(tree, "r.yaml"), lines.append, Console(file=io.StringIO()))
    return lines


@pytest.mark.parametrize("strategy", ["allreduce", "delay-by-one"])
def test_two_simulations_of_one_recipe_agree_in_every_event(tree: Tree, strategy: str) -> None:
    """The same scores, simulated time and event hash; another seed gives another hash."""
    tree |= {"strategy": strategy, "overwrite": True, "learners": 3}
    first, second = simulated(tree), simulated(tree)
    assert first == second
    assert [line.split()[0] for line in first] == ["test", "%WER", "%SER", "%CER", "simulated", "event"]
    assert simulated({**tree, "seed": 2})[-1] != first[-1]


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
    transcribe(experiment, [songs.parent / "0.flac", tmp_path / "stereo.wav"], texts.append)
    (first, spoken), (second, also) = (line.split("\t") for line in texts)
    assert (first, second) == (str(songs.parent / "0.flac"), str(tmp_path / "stereo.wav"))
    assert spoken == also
    assert spoken in {line.split("\t")[4] for line in songs.read_text().splitlines()}

    with pytest.raises(ConfigError, match=r"set 'tset' is not in data\.corpus\.sets; did you mean test"):
        evaluate(experiment, ["tset"], texts.append, Console(file=io.StringIO()))
    (tmp_path / "noise.wav").write_bytes(b"RIFF of nothing")
    with pytest.raises(DataError, match=r"noise\.wav"):
        transcribe(experiment, [tmp_path / "noise.wav"], texts.append)
    soundfile.write(tmp_path / "nan.wav", [float("nan")] * 8000, 8000, subtype="FLOAT")
    with pytest.raises(DataError, match=r"nan\.wav: .*not finite"):
        transcribe(experiment, [tmp_path / "nan.wav"], texts.append)


def test_a_folder_that_is_no_experiment_is_named(tmp_path: Path) -> None:
    """With an example of one."""
    with pytest.raises(CheckpointError, match=r"is not an experiment.*exp/demo"):
        transcribe(tmp_path, [], print)
