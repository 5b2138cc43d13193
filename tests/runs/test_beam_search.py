"""`starling evaluate` with a beam search: tuned on the validation set, recorded, and read again."""

import io
import json
import shutil
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from starling import errors
from starling.cli import app
from starling.errors import ConfigError, DataError
from starling.experiment.folder import ExperimentFolder
from starling.experiment.report import collect
from starling.experiment.simulate import simulate_recipe
from starling.speech.commands.evaluate import evaluate
from starling.speech.recipe import check_recipe
from starling.speech.scoring import read_texts
from starling.speech.task import SPEECH
from starling.speech.transcribing.files import transcribe_files
from tests.runs.conftest import Tree
from tests.speech.tones import WORDS

pytest.importorskip("flashlight.lib.text.decoder.kenlm", reason="the extra `decoding` is not installed")


@pytest.fixture
def songs_tree(tree: Tree) -> Tree:
    """A recipe that simulates, with a validation set."""
    tree["data"]["corpus"]["sets"]["dev"] = {"split": "test"}
    tree["data"]["valid"] = "dev"
    return tree | {
        "budget": {"epochs": 12},
        "learners": 1,
        "batches": {"max_duration": 2},
        "augment": {"speed": [1.0], "spec_augment": None},
        "optimizer": {"lr": 0.02},
    }


def simulated(tree: Tree) -> tuple[Path, list[str]]:
    lines: list[str] = []
    recipe = check_recipe(tree, "songs")
    simulate_recipe(SPEECH, recipe, lines.append, Console(file=io.StringIO()))
    return recipe.exp / f"{recipe.name}-virtual", lines


def scored(experiment: Path, **options: object) -> list[str]:
    lines: list[str] = []
    evaluate(experiment, ["test"], lines.append, Console(file=io.StringIO()), **options)  # type: ignore[arg-type]
    return lines


@pytest.mark.wide
def test_both_decodings_are_scored_tuned_on_the_validation_set_alone(songs_tree: Tree) -> None:
    """The weights are recorded, and read again as long as nothing they depend on changes."""
    experiment, at_end = simulated(songs_tree)
    assert [line.split()[0] for line in at_end] == ["test", "%WER", "%SER", "%CER", "simulated", "event"]
    lines = scored(experiment, with_beam=True)
    assert lines[:4] == at_end[:4]
    assert [line.split()[0] for line in lines[4:]] == ["test,", "%WER", "%SER", "%CER", "greedy"]
    assert "tuned on 6 utterances of dev" in lines[4]
    greedy, searched = (float(lines[place].split()[1]) for place in (1, 5))
    assert searched < greedy

    home = experiment / "decode" / "beam"
    stored = json.loads((home / "search.json").read_text())
    fewest = min((each["word_errors"], each["character_errors"]) for each in stored["trials"])
    chosen = [
        each
        for each in stored["trials"]
        if (each["vocabulary"], each["weights"]) == (stored["vocabulary"], stored["weights"])
    ]
    assert [(each["word_errors"], each["character_errors"]) for each in chosen] == [fewest]
    _, texts = read_texts(home / "recogs-test.txt")
    best = [json.loads(line) for line in (home / "nbest-test.jsonl").read_text(encoding="utf-8").splitlines()]
    firsts = {each["id"]: each for each in best if each["rank"] == 1}
    assert {name: each["text"] for name, each in firsts.items()} == texts
    for each in firsts.values():
        assert [word["word"] for word in each["words"]] == each["text"].split()
        assert 0 <= each["words"][0]["start"] < each["words"][-1]["end"] < 3
    assert {each["rank"] for each in best} > {1, 2}

    sets = collect(ExperimentFolder(experiment), "songs").sets  # the report page shows both searches
    assert [(each.folder, f"{each.wer:.2f}") for each in sets] == [
        (folder, lines[place].split()[1]) for folder, place in (("decode", 1), ("decode/beam", 5))
    ]
    assert sets[0].utterances and not sets[1].utterances

    written = (home / "search.json").stat().st_mtime_ns
    assert scored(experiment, with_beam=True, jobs=2) == lines
    assert (home / "search.json").stat().st_mtime_ns == written
    change(experiment, beam=3)
    assert ", beam 3; tuned" in scored(experiment)[4]


@pytest.mark.wide
def test_phrases_are_boosted_in_both_decodings(songs_tree: Tree, songs: Path, tmp_path: Path) -> None:
    """They are scored beside the texts without them, and are the same as `transcribe` writes."""
    experiment, _ = simulated(songs_tree)
    words = tmp_path / "words.txt"
    words.write_text("".join(f"{word}\t-9\n" for word in WORDS))
    plain = scored(experiment, with_beam=True)
    lines = scored(experiment, with_beam=True, boost=words)
    assert lines[: len(plain)] == plain
    titles = [f"test, {title}, --boost {words}" for title in ("greedy decoding", "beam search")]
    assert [line for line in lines[len(plain) :] if line.startswith("test")] == titles
    for folder in ("boosted", "beam/boosted"):
        home = experiment / "decode" / folder
        assert read_texts(home / "recogs-test.txt") == read_texts(home.parent / "recogs-test.txt")
    words.write_text("LALALA\t9\n")
    with pytest.raises(DataError, match="line 1: 'LALALA' has the character 'L'"):
        scored(experiment, boost=words)
    words.write_text("RADO\t30\n")
    scored(experiment, with_beam=True, boost=words)
    for folder, with_beam in (("boosted", False), ("beam/boosted", True)):
        _, texts = read_texts(experiment / "decode" / folder / "recogs-test.txt")
        assert any("RADO" in text for text in texts.values())
        lines = []
        transcribe_files(
            experiment,
            [songs.parent / f"{name.removeprefix('song-')}.flac" for name in texts],
            lines.append,
            with_beam=with_beam,
            boost=words,
        )
        assert [line.split("\t")[1] for line in lines] == list(texts.values())


def change(experiment: Path, **decoding: object) -> None:
    """Set keys of `decoding` in the experiment's own recipe."""
    path = experiment / "config.yaml"
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump({**tree, "decoding": decoding}), encoding="utf-8")


@pytest.mark.wide
def test_files_are_transcribed_by_the_search_that_evaluate_has_tuned(
    songs_tree: Tree, songs: Path, tmp_path: Path
) -> None:
    """The text of each file is the one scored; a file that is not audio is named after all others are done."""
    experiment, _ = simulated(songs_tree)
    scored(experiment, with_beam=True)
    home = experiment / "decode" / "beam"
    written = (home / "search.json").read_bytes()
    _, texts = read_texts(home / "recogs-test.txt")
    broken = tmp_path / "noise.wav"
    broken.write_bytes(b"RIFF of nothing")
    files = [broken, *(songs.parent / f"{number}.flac" for number in range(24, 30))]
    lines: list[str] = []
    with pytest.raises(DataError, match=r"^1 of 7 files cannot be transcribed: .*noise\.wav"):
        transcribe_files(experiment, files, lines.append, with_beam=True, console=Console(file=io.StringIO()))
    assert lines == [f"{file}\t{texts[f'song-{number}']}" for number, file in enumerate(files[1:], start=24)]
    assert (home / "search.json").read_bytes() == written


def test_a_recipe_chooses_words_model_and_weights(songs_tree: Tree, tmp_path: Path) -> None:
    """The recipe gives a list of words, its own language model and fixed weights; without a validation set, nothing is
    tuned."""
    songs_tree["data"]["valid"] = None
    songs_tree["budget"] = {"epochs": 1}
    (tmp_path / "words.txt").write_text("DO\nRE\nNAÏVE\n", encoding="utf-8")
    songs_tree["decoding"] = {"word_list": str(tmp_path / "words.txt"), "lm_weight": 0.25, "word_penalty": -3}
    experiment, lines = simulated(songs_tree)
    assert lines[4] == (
        "test, beam search: closed vocabulary of 2 words, 3-grams of words with weight 0.25, word penalty -3, beam 64; "
        "not tuned"
    )
    _, texts = read_texts(experiment / "decode" / "beam" / "recogs-test.txt")
    assert {word for text in texts.values() for word in text.split()} <= {"DO", "RE"}
    change(experiment, lm=str(experiment / "decode" / "beam" / "words.arpa"))
    assert f"closed vocabulary of {len(WORDS)} words" in scored(experiment)[4]
    change(experiment, vocabulary="open", order=4)
    assert "open vocabulary, 4-grams of tokens with weight 0.5, beam 64; not tuned" in scored(experiment)[4]
    change(experiment)
    assert "closed vocabulary of" in scored(experiment, with_beam=True)[4]  # no word is rare
    (tmp_path / "words.txt").write_text("naïve\n", encoding="utf-8")
    change(experiment, word_list=str(tmp_path / "words.txt"))
    with pytest.raises(ConfigError, match=r"no word that the recogniser's tokens can spell, such as 'naïve'"):
        scored(experiment)


def test_keys_of_another_loss_and_contradictions_are_refused(tree: Tree) -> None:
    """One error names all of them."""
    wrong = tree | {"decoding": {"words": "one", "vocabulary": "open", "lm": "x.arpa"}}
    with pytest.raises(ConfigError, match=r"(?s)decoding\.words: only for loss: frames.*decoding\.lm: known words"):
        check_recipe(wrong, "r")
    frames = tree | {"loss": "frames", "model": {"name": "blstm-hybrid", "preset": "tiny"}, "decoding": {"beam": 3}}
    with pytest.raises(ConfigError, match=r"decoding\.beam: only for loss: ctc"):
        check_recipe(frames, "r")


def test_without_the_training_set_greedy_decoding_remains_unless_the_recipe_asks_for_more(songs_tree: Tree) -> None:
    """A model may be scored where only the test set exists."""
    songs_tree["data"]["folder"] += "-some"
    songs_tree["budget"] = {"epochs": 1}
    experiment, at_end = simulated(songs_tree)
    shutil.rmtree(Path(songs_tree["data"]["folder"]) / "train")
    lines = scored(experiment, with_beam=True)
    assert lines[0].startswith("only greedy decoding: ")
    assert "starling prepare" in lines[0]
    assert lines[1:] == at_end[:4]
    change(experiment, beam=8)
    with pytest.raises(DataError, match="starling prepare"):
        scored(experiment)


def test_without_the_extra_greedy_decoding_remains_and_the_reason_is_reported(
    songs_tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command still scores; with `--greedy` it does not mention the search."""
    songs_tree["budget"] = {"epochs": 1}
    experiment, _ = simulated(songs_tree)
    find = errors.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "flashlight" else find(name))
    found = CliRunner().invoke(app, ["evaluate", str(experiment)])
    assert found.exit_code == 0, found.output
    first, *rest = found.stdout.splitlines()
    assert first == "only greedy decoding: the beam search needs flashlight: pip install 'starling-asr[decoding]'"
    alone = CliRunner().invoke(app, ["evaluate", str(experiment), "--greedy"])
    assert alone.stdout.splitlines() == rest
