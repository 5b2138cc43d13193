"""A run whose recogniser does not work says so in one line, with the likeliest cause and the remedy."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from starling.experiment.folder import existing
from starling.experiment.report import collect
from starling.speech.corpora.lines import read_table, write_table
from starling.speech.recipe import check_recipe
from starling.speech.training.validate import Looked, likeliest_cause
from tests.end_to_end.test_train import Tree, starling, written

Audio = NDArray[np.float32]
Row = dict[str, str]


@pytest.fixture
def recipe(tree: Tree, tmp_path: Path) -> str:
    """The recipe of the songs for one learner, with a valid set."""
    tree["data"]["valid"] = "test"
    return written(tree | {"learners": 1}, tmp_path)


def changed(
    songs: Path, folder: Path, text: Callable[[Row], str], audio: Callable[[Audio], Audio] = lambda samples: samples
) -> list[str]:
    """What makes a recipe use a copy of the songs, with other texts and audio."""
    (folder / "copy").mkdir()
    rows = []
    for _, row in read_table(songs, ("id", "speaker", "split", "audio", "text")):
        samples, rate = soundfile.read(songs.parent / row["audio"], dtype="float32")
        soundfile.write(folder / "copy" / row["audio"], audio(samples), rate)
        rows.append((row["id"], row["speaker"], row["split"], row["audio"], text(row)))
    write_table(folder / "copy" / "songs.tsv", ("id", "speaker", "split", "audio", "text"), rows)
    return [f"data.corpus.path={folder / 'copy' / 'songs.tsv'}", f"data.folder={folder / 'copy' / 'prepared'}"]


def as_it_was(row: Row) -> str:
    return row["text"]


def run(folder: Path, *arguments: str) -> tuple[str, list[Mapping[str, Any]]]:
    """Train; what was said, and the events."""
    done = starling(folder, "train", *arguments, "overwrite=true", "strategy=allreduce")
    assert done.returncode == 0, done.stderr
    return done.stderr, events_of(folder)


def events_of(folder: Path) -> list[Mapping[str, Any]]:
    lines = (folder / "exp" / "songs" / "log" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def verdict_of(folder: Path, said: str, events: list[Mapping[str, Any]]) -> str:
    """The verdict on a model that does not work: the same in events, at the beginning of the summary and of the report,
    and in the status, none of which says that the run ended well."""
    verdict = str([each["text"] for each in events if each["kind"] == "verdict"][-1])
    assert verdict.startswith("the recogniser does not work: ")
    assert "; likeliest cause: " in verdict and "; remedy: " in verdict and "\n" not in verdict
    experiment = existing(folder / "exp" / "songs")
    first, title, *rest = (experiment.log / "summary.txt").read_text(encoding="utf-8").splitlines()
    assert first == verdict
    assert title.startswith("songs, allreduce: ended; start and training ")
    assert f"\n{verdict}\n{title}" in said and rest
    assert (events[-1]["kind"], events[-1]["message"], events[-1]["exit_code"]) == ("end", verdict, 0)
    evidence = collect(experiment, "songs")
    assert evidence.verdict == evidence.outcome == verdict
    assert verdict in " ".join(starling(folder, "status", "exp/songs").stdout.split())
    assert "ended well" not in said
    return verdict


@pytest.mark.wide
def test_a_budget_that_is_much_too_small_is_named_and_a_resumed_run_that_works_is_well(
    recipe: str, tmp_path: Path
) -> None:
    """On the screen it is said once while training, after a tenth of the budget, and once more with the summary."""
    said, events = run(tmp_path, recipe, "budget.epochs=2")
    verdict = verdict_of(tmp_path, said, events)
    assert "its output is empty on test after 2 epochs (36 mini-batches, " in verdict
    assert "100% of the budget (epochs 2)" in verdict
    assert "too little time: training is still on the plateau of blanks with which CTC begins" in verdict
    assert "remedy: a larger budget, or a higher or lower optimizer.lr (now 0.02)" in verdict
    assert 2 <= said.count("the recogniser does not work: ") <= 3
    again = starling(tmp_path, "train", "exp/songs/config.yaml", "resume=exp/songs", "budget.epochs=14")
    assert again.returncode == 0, again.stderr
    assert "songs, allreduce: ended well; start and training" in again.stderr
    evidence = collect(existing(tmp_path / "exp" / "songs"), "songs")
    assert (evidence.verdict, evidence.outcome) == ("", "ended well")


def test_too_little_time_is_no_cause_before_half_of_the_budget(recipe: str, tmp_path: Path) -> None:
    """A run whose loss has hardly changed after a quarter of its budget may still end well."""
    _, events = run(tmp_path, recipe, "budget.epochs=4", "optimizer.lr=1e-4")
    assert len([each for each in events if each["kind"] == "validation"]) > 1
    told = [str(each["text"]) for each in events if each["kind"] == "verdict"]
    assert told and all("; likeliest cause: too little time" in each for each in told)
    assert all("25%" not in each for each in told)


def test_a_verdict_inside_an_epoch_names_it(recipe: str, tmp_path: Path) -> None:
    """Two epochs and a part are not two epochs."""
    _, events = run(tmp_path, recipe, "budget={steps: 40}", "optimizer.lr=1e-4")
    assert (
        " on test in epoch 3 (40 mini-batches, " in [each["text"] for each in events if each["kind"] == "verdict"][-1]
    )


def test_a_set_that_is_not_learnt_yet_is_no_reason_to_doubt_its_transcripts(tree: Tree) -> None:
    """Without a word recognised in the training data, the loss falls there first; with some, there is a difference."""
    recipe = check_recipe(tree, "demo.yaml")
    held_out = Looked(32, [], 100.0, is_empty=False, ratio=0.95)
    cause, _ = likeliest_cause(recipe, Looked(32, [], 103.0, is_empty=False, ratio=0.7), held_out, "dev", 100)
    assert "the loss is falling, but nothing is recognised yet, not even in the training data, WER 103 %" in cause
    cause, _ = likeliest_cause(recipe, Looked(32, [], 60.0, is_empty=False, ratio=0.5), held_out, "dev", 100)
    assert "does not carry over to dev" in cause


@pytest.mark.wide
def test_a_run_that_works_ends_well(recipe: str, tmp_path: Path) -> None:
    """Nothing is said about the blanks with which it begins, before a tenth of its budget is spent."""
    said, events = run(tmp_path, recipe, "budget.epochs=14", "validate_every=14")
    assert "does not work" not in said
    assert "songs, allreduce: ended well; start and training" in said
    assert "verdict" not in {each["kind"] for each in events}


@pytest.mark.wide
def test_transcripts_of_other_recordings_are_to_be_checked(recipe: str, songs: Path, tmp_path: Path) -> None:
    """The model learns them by heart, of no use for other recordings."""
    letters = np.random.default_rng(5)

    def wrong(row: Row) -> str:
        return " ".join("".join(letters.choice(list("ABCDEFGH"), 2)) for _ in row["text"].split())

    data = changed(songs, tmp_path, wrong)
    verdict = verdict_of(tmp_path, *run(tmp_path, recipe, *data, "budget.epochs=40"))
    assert "does not carry over to test: transcripts do not belong to their recordings" in verdict
    assert "look for wrong transcripts with `starling check exp/songs/config.yaml`" in verdict
    assert starling(tmp_path, "check", "exp/songs/config.yaml").returncode == 0


@pytest.mark.wide
def test_recordings_that_are_almost_silent_are_named(recipe: str, songs: Path, tmp_path: Path) -> None:
    """Of samples of -1, 0 and 1 alone; such as a microphone records that is switched off."""
    generator = np.random.default_rng(1)

    def hiss(samples: Audio) -> Audio:
        return (generator.integers(-1, 2, len(samples)) / 32768).astype(np.float32)

    data = changed(songs, tmp_path, as_it_was, hiss)
    verdict = verdict_of(tmp_path, *run(tmp_path, recipe, *data, "budget.epochs=2"))
    assert "24 of 24 recordings of train are almost silent (below -60 dB), such as song-" in verdict
    assert "record or export them again" in verdict


def test_recordings_of_zeros_are_refused_before_training(recipe: str, songs: Path, tmp_path: Path) -> None:
    """They are named, and nothing ends well."""
    done = starling(tmp_path, "train", recipe, *changed(songs, tmp_path, as_it_was, np.zeros_like))
    assert done.returncode == 5
    assert "the audio is silent: all 5920 samples are 0" in done.stderr
    assert "ended well" not in done.stderr


@pytest.mark.wide
@pytest.mark.parametrize(
    ("settings", "cause", "remedy"),
    [
        (["optimizer.lr=3"], "the learning rate is too high", "lower optimizer.lr (now 3)"),
        (["optimizer.lr=1e-6"], "or too low a learning rate", "a higher optimizer.lr (now 1e-06)"),
        (
            [
                "features.frame_shift=0.04",
                "features.frame_length=0.05",
                "data.filter.max_skipped=1",
                "optimizer.lr=1e-5",
            ],
            "the encoder has too few frames for the tokens",
            "lower model.subsampling (now 4)",
        ),
        (
            [f"faults=[{', '.join(f'{{nan: 0, at_step: {step}}}' for step in range(2, 8))}]"],
            " gradients were not finite (NaN or infinity) and were left out",
            "lower optimizer.lr (now 0.02), and look for broken recordings with `starling check",
        ),
    ],
    ids=["too high a rate", "too low a rate", "too few frames", "not finite"],
)
def test_the_likeliest_cause_is_found_by_looking(
    recipe: str, tmp_path: Path, settings: list[str], cause: str, remedy: str
) -> None:
    """Each has its own remedy."""
    verdict = verdict_of(tmp_path, *run(tmp_path, recipe, "budget.epochs=2", *settings))
    found, told = verdict.split("; remedy: ")
    assert cause in found
    assert remedy in told


@pytest.mark.wide
def test_without_a_valid_set_the_test_sets_tell(recipe: str, tmp_path: Path) -> None:
    """Once they are scored; with the summary."""
    said, events = run(tmp_path, recipe, "budget.epochs=2", "data.valid=null")
    assert "its output is empty on test after 2 epochs" in verdict_of(tmp_path, said, events)
    assert said.count("the recogniser does not work: ") == 1
