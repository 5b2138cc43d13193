"""`starling report` shows what an experiment's folder contains, and says what is missing."""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("plotly", reason="the extra `report` is not installed")

import starling
from starling.cli import app
from starling.errors import ConfigError, DataError
from starling.experiment.folder import ExperimentFolder
from starling.experiment.report import PAGE, collect, read_events, report
from starling.experiment.simulate import simulate_recipe
from starling.reporting.evidence import MAX_EVENTS, Evidence
from starling.speech.commands.score import chosen, encoded
from starling.speech.recipe import check_recipe
from starling.speech.scoring import align_words, error_rates, read_texts
from starling.speech.task import SPEECH
from tests.runs.compare_results import made_up
from tests.runs.conftest import Tree, data_of


def simulated(tree: Tree, **changes: Any) -> Path:
    """The experiment of a simulation on a network that costs nothing."""
    given = {
        "cluster": {"compute": {"seconds": 0.5}, "link": {"latency": 0.0, "bandwidth": 1e15}},
        "batches": {"max_duration": 2},
    }
    recipe = check_recipe({**tree, **given, **changes}, "r.yaml")
    simulate_recipe(SPEECH, recipe, lambda line: None, Console(file=io.StringIO()))
    return recipe.exp / f"{recipe.name}-virtual"


@pytest.fixture(scope="module")
def flock(songs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four learners under `allreduce`, of which learner 0 takes three times as long."""
    tree = {
        "name": "flock",
        "exp": str(tmp_path_factory.mktemp("flock") / "exp"),
        "learners": 4,
        "budget": {"epochs": 2},
        "data": data_of(songs),
        "model": {"preset": "tiny", "subsampling": 4},
        "optimizer": {"lr": 0.01},
        "stragglers": {"slow": {0: "3x"}},
    }
    return simulated(tree)


@pytest.fixture(scope="module")
def seen_in_flock(flock: Path) -> Evidence:
    """The findings of the report in it."""
    return collect(ExperimentFolder(flock), "flock")


def events_of(experiment: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind, read apart from the report."""
    lines = (experiment / "log" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def test_a_timeline_shows_who_waited_for_the_straggler(seen_in_flock: Evidence) -> None:
    """Each step takes 1.5 s: learner 0 computes all of it, the others a third, and wait for it in the rest."""
    stretches = seen_in_flock.stretches
    for learner in range(4):
        own = [each for each in stretches if each.learner == learner][1:]  # the first has no step before it
        assert len(own) >= 2
        for each in own:
            computing, waiting = (1.5, 0.0) if learner == 0 else (0.5, 1.0)
            assert each.computing == pytest.approx(computing, abs=2e-3)
            assert each.waiting_for_peers == pytest.approx(waiting, abs=2e-3)
            assert each.end - each.begin == pytest.approx(1.5, abs=2e-3)


def test_stretches_and_epochs_agree(flock: Path, seen_in_flock: Evidence) -> None:
    """Loss, mini-batches and seconds of computing, summed over the run in two ways, agree."""
    epochs = events_of(flock, "epoch")
    stretches = seen_in_flock.stretches
    assert sum(each.batches for each in stretches) == sum(each["steps_in_epoch"] for each in epochs)
    frames = sum(each.frames for each in stretches)
    losses = [each["loss"] for each in epochs]
    mean = sum(each.loss * each.frames for each in stretches) / frames
    assert min(losses) < mean < max(losses)
    for learner in "0123":
        told = sum(each["learners"][learner]["computing"] for each in epochs)
        own = sum(each.computing for each in stretches if each.learner == int(learner))
        assert own == pytest.approx(told, abs=1e-3)
    assert sum(seen_in_flock.staleness) == seen_in_flock.num_batches
    assert seen_in_flock.whole.examples == 48
    assert seen_in_flock.curve[-1].examples == 48


def test_the_page_of_a_simulation_is_complete(flock: Path, tmp_path: Path) -> None:
    """It has figures, scores, commands and environment; what simulations lack is a sentence."""
    page = report(flock, tmp_path / "page.html").path.read_text(encoding="utf-8")
    assert set(re.findall(r'class="plot" id="([\w-]+)"', page)) == {"time", "samples", "timeline-0"}
    assert "No staleness above 0: all gradients were computed at the newest weights." in page
    assert "No WER by epoch: simulations score no valid set while they train." in page
    assert "No consensus distance is drawn: allreduce keeps learners&#39; weights equal." in page
    summary = (flock / "decode" / "wer-summary-test.txt").read_text(encoding="utf-8")
    wer, low, high = re.findall(r"%WER (\S+) .*interval (\S+) - (\S+)", summary)[0]
    assert f'<td data-of="WER"><span class="whole">{wer} %</span></td>' in page
    assert f'<span class="whole">{low} – {high} %</span>' in page
    assert page.count("<audio ") == 6
    assert "torch 2" in page and "0.5" in page


def test_a_report_is_an_object_too(flock: Path, tmp_path: Path) -> None:
    """`starling.report(...)` gives the page's path and contents, whatever of `starling` was imported before."""
    result = starling.report([str(flock), flock], tmp_path / "deep" / "page.html")
    assert result.path == tmp_path / "deep" / "page.html"
    (only,) = result.experiments
    assert (only.label, only.learners, only.is_virtual, only.strategy) == ("flock-virtual", 4, True, "allreduce")
    assert only.outcome.startswith("the recogniser does not work: ")  # after two epochs


def test_more_learners_are_faster_where_nothing_costs_time(tree: Tree, tmp_path: Path) -> None:
    """One learner and three run on a network without latency: three make three times the utterances per second."""
    tree |= {"batches": {"max_duration": 1}, "budget": {"epochs": 1}}
    folders = [simulated(tree, name=f"l{learners}", learners=learners, strategy="adpsgd") for learners in (1, 3)]
    result = report(folders, tmp_path / "page.html")
    one, three = (each.throughput or 0.0 for each in result.experiments)
    assert 2.5 < three / one <= 3.01
    assert 'id="speed-up"' in result.path.read_text(encoding="utf-8")
    assert [each.label for each in result.experiments] == ["l1-virtual", "l3-virtual"]


def test_an_experiment_of_an_older_version_is_shown(kept: Path) -> None:
    """It has no events and no times, but sentences instead; once it is scored, WER, utterances and audio are shown."""
    folder = kept / "exp" / "kept"
    found = report(folder).experiments[0]
    assert {"training", "timeline", "staleness", "consensus", "scores", "events"} <= found.missing.keys()
    assert found.outcome == "not on record"
    assert CliRunner().invoke(app, ["evaluate", "exp/kept"]).exit_code == 0
    result = CliRunner().invoke(app, ["report", "exp/kept"])
    assert result.exit_code == 0, result.stderr
    assert "kept: No training loss was recorded." in result.stdout
    assert re.search(r"wrote exp/kept/report\.html \([\d.]+ MB\)", result.stdout)
    page = (folder / PAGE).read_text(encoding="utf-8")
    assert "data:audio/flac;base64," in page  # MP3 has no rate of 4 kHz
    assert 'id="wer"' in page


def test_a_run_that_was_killed_is_shown(flock: Path, tmp_path: Path) -> None:
    """Files end in the middle of a line, and no end is recorded."""
    folder = tmp_path / "killed"
    (folder / "log").mkdir(parents=True)
    (folder / "seen" / "from-00000000").mkdir(parents=True)
    (folder / "config.yaml").write_bytes((flock / "config.yaml").read_bytes())
    lines = (flock / "log" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "log" / "events.jsonl").write_text("\n".join([*lines[:2], "[1]", '{"kind": 3}', lines[2][:30]]))
    record = (flock / "seen" / "from-00000000" / "learner-1.jsonl").read_text(encoding="utf-8")
    (folder / "seen" / "from-00000000" / "learner-1.jsonl").write_text(record[: len(record) // 2])
    found = report(folder).experiments[0]
    assert found.outcome == "no end on record: it still runs, or was killed"
    assert found.curve and {each.learner for each in found.stretches} == {1}
    assert "scores" in found.missing


def test_without_a_timeline_the_loss_comes_from_tensorboard_and_else_from_epochs(flock: Path, tmp_path: Path) -> None:
    """The records of Starling 0.2 are shown from the beginning, too."""
    folder = tmp_path / "older"
    (folder / "log").mkdir(parents=True)
    for name in ("config.yaml", "log/events.jsonl"):
        (folder / name).write_bytes((flock / name).read_bytes())
    by_epoch = collect(ExperimentFolder(folder), "older")
    assert [point.loss for point in by_epoch.curve] == [each["loss"] for each in events_of(flock, "epoch")]
    (folder / "tensorboard").symlink_to(flock / "tensorboard")
    drawn = collect(ExperimentFolder(folder), "older")
    assert len(drawn.curve) >= len(by_epoch.curve)
    assert all(point.seconds is not None for point in drawn.curve)
    assert drawn.missing["training"].startswith("The loss is drawn from its TensorBoard curves")


def test_utterances_without_audio_are_shown_without(flock: Path, tmp_path: Path) -> None:
    """The prepared data may be missing, or relative to another folder."""
    folder = tmp_path / "moved"
    (folder / "decode").mkdir(parents=True)
    config = (flock / "config.yaml").read_text(encoding="utf-8")
    (folder / "config.yaml").write_text(re.sub(r"folder: \S+prepared", "folder: gone", config))
    for file in (flock / "decode").iterdir():
        (folder / "decode" / file.name).write_bytes(file.read_bytes())
    found = report(folder).experiments[0]
    assert found.missing["audio"].startswith("No audio of test: ")
    assert found.sets[0].utterances and not any(each.audio for each in found.sets[0].utterances)
    (folder / "decode" / "recogs-test.txt").write_text("u1:\tref=['A']\nu1:\thyp=[open('x')]\n")
    found = report(folder).experiments[0]
    assert not found.sets
    assert "recogs-test.txt:2" in found.missing["scores"]


def test_many_events_are_cut_in_the_middle(flock: Path, tmp_path: Path) -> None:
    """The page does not grow with the run."""
    folder = tmp_path / "long"
    (folder / "log").mkdir(parents=True)
    (folder / "config.yaml").write_bytes((flock / "config.yaml").read_bytes())
    lines = [json.dumps({"time": 100.0 + number, "kind": "message", "text": f"line {number}"}) for number in range(999)]
    (folder / "log" / "events.jsonl").write_text("\n".join(lines))
    told = collect(ExperimentFolder(folder), "long").happenings
    assert len(told) == MAX_EVENTS + 1
    assert (told[0].text, told[0].at, told[-1].text, told[-1].at) == ("line 0", 0.0, "line 998", 998.0)
    assert told[MAX_EVENTS // 2].text.startswith("799 events are not shown")


def test_a_folder_that_is_not_an_experiment_is_one_error(tmp_path: Path) -> None:
    """The error comes before anything is written, also if another experiment is valid."""
    result = CliRunner().invoke(app, ["report", str(tmp_path / "absent"), "--output", str(tmp_path / "p.html")])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {tmp_path / 'absent'}: no config.yaml here")
    assert not (tmp_path / "p.html").exists()
    with pytest.raises(ConfigError, match="name an experiment"):
        report([])


def test_a_page_that_cannot_be_written_is_one_error(flock: Path, tmp_path: Path) -> None:
    """The error has the place, and what to do."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"page\.html: cannot be written .*--output"):
        report(flock, tmp_path / "file" / "page.html")


def test_scored_texts_come_back_unchanged(flock: Path) -> None:
    """Scoring them again gives the same as the summary; a damaged file names its line."""
    references, hypotheses = read_texts(flock / "decode" / "recogs-test.txt")
    assert len(references) == 6
    first = error_rates(references, hypotheses).lines()[0]
    assert first in (flock / "decode" / "wer-summary-test.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text",
    [
        "u1:\tref=['A']\n",
        "u1:\tref=['A']\nu2:\thyp=['A']\n",
        "u1:\tref=['A'\nu1:\thyp=[]\n",
        "",
        "x\ny\n",
        "u:\tref=[1]\n",
    ],
)
def test_a_damaged_file_of_texts_is_an_error(tmp_path: Path, text: str) -> None:
    """There is never a wrong score."""
    file = tmp_path / "recogs-test.txt"
    file.write_text(text)
    with pytest.raises(DataError, match=r"recogs-test\.txt"):
        read_texts(file)


def test_best_median_and_worst_are_by_errors_per_word() -> None:
    """Each utterance occurs once; the longest without errors is best, and of those all wrong, the one with the most
    errors is worst."""
    references = {f"u{number}": " ".join("ABCDEFGHIJ"[: number + 1]) for number in range(10)}
    wrong = {"u0": "X", "u9": "X X X X X X X X X X", "u5": "X B C D E F", "u4": "X X C D E"}
    alignments = align_words(references, references | wrong)
    shown = chosen(references, alignments)
    assert [each.rank for each in shown] == ["best"] * 3 + ["median"] * 3 + ["worst"] * 3
    assert [each.name for each in shown] == ["u8", "u7", "u6", "u3", "u2", "u1", "u4", "u0", "u9"]
    assert [each.errors for each in shown] == [0, 0, 0, 0, 0, 0, 2, 1, 10]
    assert len(chosen({"u0": "A"}, {"u0": [("A", "A")]})) == 1
    assert len(chosen(dict(list(references.items())[:2]), alignments)) == 2


@pytest.mark.parametrize(("rate", "media"), [(16000, "mpeg"), (4000, "flac")])
def test_audio_travels_in_the_page(rate: int, media: str) -> None:
    """It sounds as long as before, except for the frames that MP3 adds, and is small."""
    samples = (0.3 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)).astype(np.float32)
    kind, _, packed = encoded(samples, rate).partition(";base64,")
    assert kind == f"data:audio/{media}"
    heard, heard_rate = soundfile.read(io.BytesIO(base64.b64decode(packed)))
    assert heard_rate == rate
    assert 0 <= len(heard) - rate <= (0.2 * rate if media == "mpeg" else 0)
    assert abs(float(np.sqrt((heard**2).mean())) - 0.3 / np.sqrt(2)) < 0.02
    assert len(packed) < 12_000


def test_the_events_of_a_run_begin_with_its_command(flock: Path) -> None:
    """A shell could run it again."""
    (start,) = events_of(flock, "start")
    assert start["command"].startswith(("python ", "starling "))
    assert read_events(flock / "log" / "absent.jsonl") == []


def test_only_the_environment_in_env_txt_is_shown(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No page has the values of variables."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-7f3a91c2e5")
    page = report(simulated(tree), tmp_path / "page.html").path.read_text(encoding="utf-8")
    assert "canary-7f3a91c2e5" not in page
    assert "platform " in page


def test_a_comparison_is_drawn_as_the_mean_and_the_range_of_its_seeds(tmp_path: Path) -> None:
    """Each row is drawn at its best rate, against time, mini-batches and samples; an experiment beside it has its own
    name."""
    table = made_up({("", "one", 1): [10.0, 11.0], ("", "adpsgd", 4): [20.0, None]}, tmp_path)
    (tmp_path / "results.json").write_text(json.dumps(table.content()))
    (tmp_path / "compare.yaml").write_text("compare: {}")
    found = report(tmp_path, tmp_path / "page.html")
    one, four = found.experiments
    assert (one.label, four.label) == (f"{tmp_path.name}: one, 1", f"{tmp_path.name}: adpsgd, 4")
    assert (four.learners, four.is_virtual, four.outcome) == (4, True, "inconclusive")
    assert [(point.seconds, point.step, point.examples) for point in one.curve] == [(1.0, 25, 25), (3.0, 75, 75)]
    assert one.curve[1].loss == pytest.approx(1.15) and (one.curve[1].low, one.curve[1].high) == (1.1, 1.2)
    page = found.path.read_text(encoding="utf-8")
    assert set(re.findall(r'class="plot" id="([\w-]+)"', page)) == {"time", "samples"}
