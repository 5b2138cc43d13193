"""`starling check` on the command line, and scores without near-duplicates of training."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner, Result

from starling.cli import app
from starling.experiment.claim import set_up_and_claim
from starling.experiment.folder import ExperimentFolder
from starling.recipe.run import dump_recipe
from starling.speech.commands import evaluate as evaluation
from starling.speech.recipe import Recipe, check_recipe
from starling.speech.recogniser import Heard
from starling.speech.store import SpeechSet
from starling.speech.task import SPEECH
from starling.speech.usable import read_left_out
from tests.runs.conftest import Tree
from tests.speech import planted as plants
from tests.speech.planted import Planted


def _starling(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})


@pytest.fixture
def corpus(tmp_path: Path) -> Planted:
    """A clean corpus."""
    return Planted(tmp_path / "corpus")


def _recipe(corpus: Planted, folder: Path, **data: object) -> Path:
    tree = {"name": "planted", "exp": str(folder / "exp"), "budget": {"epochs": 1}}
    path = folder / "planted.yaml"
    path.write_text(yaml.safe_dump(tree | {"data": corpus.tree(folder / "data") | data}), encoding="utf-8")
    return path


def test_a_clean_corpus_gives_an_empty_list(corpus: Planted, tmp_path: Path) -> None:
    """There is no table, the exit code is 0 even with `--strict`, and the list has only its header."""
    result = _starling("check", _recipe(corpus, tmp_path), "--strict")
    listed = tmp_path / "data" / "check.tsv"
    assert (result.exit_code, result.stdout) == (0, f"nothing found in 32 utterances, listed in {listed}\n")
    assert listed.read_text(encoding="utf-8") == "kind\tset\tid\tother_set\tother_id\tvalue\tlimit\tdetail\n"


def test_findings_are_shown_by_kind_and_set_and_listed(corpus: Planted, tmp_path: Path) -> None:
    """The table has counts; the list has each finding with the other utterance and the numbers."""
    plants.audio_in_training(corpus)
    plants.three_times_the_same_file(corpus)
    result = _starling("check", _recipe(corpus, tmp_path))
    assert result.exit_code == 0
    head = r"train, for training ┃ +test ┃\n┃ kind +┃ +27 utt., 1 min \d\d s ┃ +8 utt., [\d.]+ s ┃"
    assert re.search(head, result.stdout)
    assert "Equal texts are normal for digits and commands; equal audio is not" in " ".join(result.stdout.split())
    assert re.search(r"same-audio\s+│\s+2 │\s+- ", result.stdout)
    assert re.search(r"overlap-audio\s+│\s+1 │\s+1 ", result.stdout)
    assert f"4 findings in 35 utterances, listed in {tmp_path / 'data' / 'check.tsv'}" in result.stdout
    rows = (tmp_path / "data" / "check.tsv").read_text(encoding="utf-8").splitlines()
    assert "same-audio\ttrain\tthird\ttrain\ttrain-2\t\t\t" in rows
    assert "overlap-audio\ttest\ttest-1\ttrain\tleaked\t1\t0.95\t" in rows
    assert not [path for path in (tmp_path / "data").iterdir() if path.name.endswith(".partial")]


def test_strict_ends_with_the_exit_code_of_bad_data(corpus: Planted, tmp_path: Path) -> None:
    """The code is 5, for scripts, and the message has the first finding; the list is still written."""
    plants.silence(corpus)
    result = _starling("check", _recipe(corpus, tmp_path), "--strict")
    assert result.exit_code == 5
    assert "error: 2 findings in 33 utterances, listed in" in result.stderr
    assert "the first: silence, 'zeros' in train" in result.stderr
    assert (tmp_path / "data" / "check.tsv").is_file()


def test_preparation_leaves_out_what_check_drops(corpus: Planted, tmp_path: Path) -> None:
    """On the command line: check, prepare without the findings, and check again: nothing is left to drop."""
    for plant in (plants.audio_in_training, plants.three_times_the_same_file, plants.unreadable_files):
        plant(corpus)
    recipe = _recipe(corpus, tmp_path)
    listed = tmp_path / "data" / "check-dropped.tsv"
    first = _starling("check", recipe, "--drop")
    assert re.search(
        rf"7 utterances \([\d.]+ s\) to leave out; use it with data\.filter\.leave_out={listed}", first.stdout
    )
    leave_out = f"data.filter.leave_out={listed}"
    assert _starling("prepare", recipe).exit_code == 5  # unreadable files
    prepared = _starling("prepare", recipe, leave_out)
    assert prepared.exit_code == 0, prepared.stderr
    assert re.search(r"train: 24 utterances, .* dropped 7 \([\d.]+ s\), listed in", prepared.stdout)

    before = read_left_out(listed)
    for again in (_starling("check", recipe, leave_out, "--drop"), _starling("check", tmp_path / "data", "--drop")):
        assert again.stdout.startswith("nothing found in 32 utterances")
        assert read_left_out(listed) == before


def test_a_prepared_folder_is_checked_by_its_own_sets(corpus: Planted, tmp_path: Path) -> None:
    """All its sets are checked, with `train` for training unless told otherwise; keys that have no meaning there are
    refused."""
    plants.text_in_training(corpus)
    assert _starling("prepare", _recipe(corpus, tmp_path)).exit_code == 0
    found = _starling("check", tmp_path / "data")
    assert re.search(r"overlap-text\s+│\s+1 │\s+1 ", found.stdout.replace("train", ""))
    assert (
        "nothing found in 8 utterances"
        in _starling("check", tmp_path / "data", "data.train=test", "data.test=[]").stdout
    )
    for arguments, message in (
        (["data.chek.silence_db=-50"], "data.chek: unknown key; did you mean data.check?"),
        (["data.train=absent"], "has no set 'absent'; its sets: test, train; set data.train to one of them"),
        (["data.test=[absent]"], "no prepared data here"),
    ):
        refused = _starling("check", tmp_path / "data", *arguments)
        assert refused.exit_code in (2, 5)
        assert message in refused.stderr
    inside = _starling("check", tmp_path / "data" / "train")
    assert "give the folder above it" in inside.stderr


def test_a_model_adds_what_it_hears_and_what_its_training_means(tree: Tree, tmp_path: Path) -> None:
    """The model is an experiment, a checkpoint's model or a recogniser's folder; the data are a recipe and a folder
    prepared from it."""
    tree["data"]["folder"] = str(tmp_path / "data")  # other tests share the prepared data, and would find the check
    recipe = tmp_path / "songs.yaml"
    recipe.write_text(yaml.safe_dump(tree), encoding="utf-8")
    folder = set_up_and_claim(SPEECH, check_recipe(tree, "songs.yaml"), lambda line: None)
    folder.config.write_text(dump_recipe(check_recipe(tree, "songs.yaml")), encoding="utf-8")
    prepared = Path(tree["data"]["folder"])
    for data in (recipe, prepared):
        result = _starling("check", data, "data.check.kinds=[swapped,misfit]", "--model", folder.initial)
        assert result.exit_code == 0, result.stderr
        assert re.search(r"train: the model hears \d+\.\d% of the characters wrong; limit \d", result.stdout)
        assert "train: with so many errors, it finds little but swaps; use a better model" in result.stdout
        assert "train: the model was trained on these transcripts" in result.stdout
        assert "test: the model was trained" not in result.stdout
        assert (prepared / "check-heard.tsv").read_text(encoding="utf-8").count("\n") == 31
    assert '"heard"' in (prepared / "check.json").read_text(encoding="utf-8")
    _starling("check", recipe)
    assert not (prepared / "check-heard.tsv").exists()
    for path, message in (("absent", "absent: no config.yaml here"), (folder.path, "no complete checkpoint")):
        refused = _starling("check", recipe, "--model", path)
        assert (refused.exit_code != 0, message in refused.stderr) == (True, True), refused.stderr


class _Recogniser:
    """Gets every text right except those that it has not seen in training."""

    def __init__(self, seen: set[str]) -> None:
        self._seen = seen

    decoder = None

    def heard(
        self, speech_set: SpeechSet, progress: Callable[[int, int], None], codec: str | None
    ) -> Iterator[tuple[list[str], Heard]]:
        names = [speech_set.id(index) for index in range(len(speech_set))]
        self._texts = [speech_set.text(index) if name in self._seen else "" for index, name in enumerate(names)]
        yield names, Heard(torch.empty(0), torch.empty(0), None, torch.empty(0))

    def texts(self, *heard: object) -> list[str]:
        return self._texts


@pytest.fixture
def scored(corpus: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[list[str], str]]:
    """Evaluate an experiment on the corpus with two test utterances seen in training; returns the printed lines and the
    summary."""
    plants.audio_in_training(corpus)
    plants.text_in_training(corpus)
    recipe: Recipe = check_recipe(yaml.safe_load(_recipe(corpus, tmp_path).read_text(encoding="utf-8")), "r.yaml")
    folder = ExperimentFolder(recipe.folder)
    folder.path.mkdir(parents=True)
    folder.config.write_text(dump_recipe(recipe), encoding="utf-8")
    monkeypatch.setattr(evaluation, "load_recogniser", lambda *_: _Recogniser({"test-1", "test-3"}))

    def score() -> tuple[list[str], str]:
        lines: list[str] = []
        evaluation.evaluate(folder.path, None, lines.append, Console(stderr=True))
        return lines, (folder.decode / "wer-summary-test.txt").read_text(encoding="utf-8")

    return score


def test_scores_without_near_duplicates_of_training_are_reported_after_a_check(
    scored: Callable[[], tuple[list[str], str]], tmp_path: Path
) -> None:
    """They are below the score of the whole set, and in its summary; without a check, the output is the usual one."""
    lines, summary = scored()
    assert [line.split()[0] for line in lines] == ["test", "%WER", "%SER", "%CER"]
    assert _starling("check", tmp_path / "planted.yaml").exit_code == 0
    with_check, with_check_summary = scored()
    assert with_check[:4] == lines
    assert re.fullmatch(
        r"%WER 100\.00 \[ \d+ / \d+, 0 ins, \d+ del, 0 sub \].*, without 2 utterances whose audio or text also occurs "
        r"in training",
        with_check[4],
    )
    assert with_check_summary == summary + with_check[4] + "\n"


def test_a_check_of_other_data_is_not_used_and_this_is_reported(
    scored: Callable[[], tuple[list[str], str]], tmp_path: Path
) -> None:
    """One line replaces a score that would be wrong."""
    assert _starling("check", tmp_path / "planted.yaml", "data.filter.max_seconds=19").exit_code == 0
    lines, _ = scored()
    assert len(lines) == 5
    assert lines[4].startswith("no score without near-duplicates of training: ")
    assert lines[4].endswith("check.tsv was made for other data; run `starling check` again")
