"""`starling score`: one experiment or two, scored again, in groups, and normalised."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from starling.cli import app
from starling.experiment.simulate import simulate_recipe
from starling.recipe.run import dump_recipe
from starling.speech.recipe import check_recipe
from starling.speech.scoring import write_score_files
from starling.speech.task import SPEECH
from tests.runs.conftest import Tree

REFERENCES = {f"u{number}": f"one two three four {number % 3}" for number in range(12)}
FIRST = {name: text.replace("two", "to").replace("four", "for") for name, text in REFERENCES.items()}
SECOND = {name: text if number % 4 else f"{text} more" for number, (name, text) in enumerate(REFERENCES.items())}


def run(*arguments: object) -> tuple[int, list[str]]:
    found = CliRunner().invoke(app, ["score", *map(str, arguments)], env={"COLUMNS": "200"})
    return found.exit_code, (found.stdout + found.stderr).splitlines()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders of scored sets: the first has two errors in each utterance, the second has one in a quarter of
    them."""
    for name, texts in (("a", FIRST), ("b", SECOND)):
        write_score_files(tmp_path / name / "decode", "test", REFERENCES, texts, "as-is")
    return tmp_path / "a", tmp_path / "b"


def test_two_experiments_are_compared(pair: tuple[Path, Path]) -> None:
    """Both scores, the difference with its interval, and the test of matched pairs are printed."""
    first, second = pair
    code, lines = run(first, second)
    assert code == 0
    assert lines[0] == "test"
    assert lines[1].startswith(f"{first}: %WER 40.00 [ 24 / 60, 0 ins, 0 del, 24 sub ]")
    assert lines[4].startswith(f"{second}: %WER 5.00 [ 3 / 60, 3 ins, 0 del, 0 sub ]")
    assert lines[7].startswith("difference in WER, first - second: +35.00 % absolute, 95% interval +")
    assert lines[7].endswith("the second is better in 100.0% of bootstrap samples")
    assert lines[8].startswith("matched pairs (MAPSSWE): 12 segments, mean difference +1.750 errors, t = ")
    assert lines[8].endswith(": significant at 5%")
    assert run(second, first)[1][8].split("t = ")[1].startswith("-")


def test_groups_are_scored_one_by_one(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Groups follow a column of a table; an utterance that it lacks is in a separate group."""
    table = tmp_path / "domains.tsv"
    rows = [f"{name}\t{'news' if int(name[1:]) % 4 else 'talk'}" for name in REFERENCES if name != "u11"]
    table.write_text("\n".join(["id\tdomain", *rows]) + "\n", encoding="utf-8")
    code, lines = run(*pair, "--by", "domain", "--table", table)
    assert code == 0
    cells = {line.split()[1]: line.replace("│", " ").split() for line in lines if line.startswith("│")}
    assert cells["news"][:4] == ["news", "8", "40", "40.00"]
    assert cells["talk"][:4] == ["talk", "3", "15", "40.00"]
    assert cells["(none)"][:3] == ["(none)", "1", "5"]
    assert "20.00" in cells["talk"] and "0.00" in cells["news"]
    code, lines = run(pair[0], "--by", "domian", "--table", table)
    assert (code, "did you mean 'domain'?" in lines[-1]) == (2, True)
    code, lines = run(pair[0], "--table", table)
    assert (code, lines[-1]) == (2, "error: score: --table needs --by, the column to group by")


def test_several_sets_are_scored_together_too(pair: tuple[Path, Path]) -> None:
    """The sum over all sets, and a table of the sets, are printed."""
    write_score_files(pair[0] / "decode", "other", {"u0": "one two"}, {"u0": "one two"}, "as-is")
    code, lines = run(pair[0])
    assert code == 0
    assert [line for line in lines if line in ("other", "test", "all 2 sets")] == ["other", "test", "all 2 sets"]
    assert any(line.startswith("%WER 38.71 [ 24 / 62,") for line in lines)
    assert run(pair[0], "--set", "test")[1][1].startswith("%WER 40.00")
    assert run(*pair)[1][0] == "test"  # what both have


def test_normalisers_are_options(tmp_path: Path) -> None:
    """They are off by default."""
    pytest.importorskip("num2words", reason="the extra `decoding` is not installed")
    write_score_files(tmp_path, "test", {"a": "It's twenty-one."}, {"a": "it's 21"}, "as-is")
    assert run(tmp_path)[1][1].startswith("%WER 100.00")
    kinds = [part for kind in ("numbers", "punctuation", "case") for part in ("--normalise", kind)]
    assert run(tmp_path, *kinds)[1][1].startswith("%WER 0.00 [ 0 / 3,")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["{a}", "--set", "tset"], "set 'tset' is not scored; did you mean 'test'?"),
        (["{a}", "{a}/.."], "no set has been scored here; run `starling evaluate`"),
        (["{a}", "{other}"], "no scored set in common"),
        (["{a}", "{changed}"], "differ in 1 references, such as 'u3': 'one two three four 0' and None"),
        (["{a}", "--by", "speaker"], "no config.yaml here"),
        (["{a}", "--normalise", "spelling"], "no normaliser 'spelling'"),
    ],
)
def test_what_cannot_be_scored_is_an_error(
    pair: tuple[Path, Path], tmp_path: Path, arguments: list[str], problem: str
) -> None:
    """The error says what is wrong and what to do."""
    write_score_files(tmp_path / "other", "dev", REFERENCES, FIRST, "as-is")
    fewer = {name: text for name, text in REFERENCES.items() if name != "u3"}
    write_score_files(tmp_path / "changed", "test", fewer, {}, "as-is")
    places = {"a": pair[0], "other": tmp_path / "other", "changed": tmp_path / "changed"}
    code, lines = run(*(each.format(**places) for each in arguments))
    assert code in (2, 5)
    assert problem in " ".join(lines)


def test_an_experiment_knows_its_speakers_and_columns(tree: Tree) -> None:
    """They come from the prepared set, and from the table of the corpus."""
    recipe = check_recipe(tree, "songs")
    simulate_recipe(SPEECH, recipe, lambda line: None, Console(file=io.StringIO()))
    experiment = recipe.exp / f"{recipe.name}-virtual"
    code, lines = run(experiment, "--by", "speaker")
    assert code == 0
    assert any(line.startswith("│ singer ") for line in lines)
    code, lines = run(experiment, "--by", "split")
    assert code == 0
    assert any(line.startswith("│ test ") for line in lines)


def test_a_set_of_several_corpora_has_the_columns_of_its_own(tree: Tree, tmp_path: Path) -> None:
    """This holds even if it was scored through a codec."""
    tree["data"]["corpus"] = {"kind": "several", "corpora": {"songs": tree["data"]["corpus"]}}
    tree["data"] |= {"train": "songs-train", "test": ["songs-test"]}
    (tmp_path / "config.yaml").write_text(dump_recipe(check_recipe(tree, "songs")), encoding="utf-8")
    texts = {f"song-{number}": "do re" for number in range(24, 30)}
    write_score_files(tmp_path / "decode", "songs-test@gsm", texts, texts, "as-is")
    code, lines = run(tmp_path, "--by", "split")
    assert code == 0, lines
    (row,) = [line.split() for line in lines if line.startswith("│ test ")]
    assert row[3] == "6"


def test_utterances_that_preparation_dropped_are_reported(tree: Tree, tmp_path: Path) -> None:
    """A score without them looks too good: songs of three words are too long here, those of two are not."""
    tree["data"] |= {"folder": str(tmp_path / "short"), "filter": {"max_seconds": 0.9}}
    lines: list[str] = []
    simulate_recipe(SPEECH, check_recipe(tree, "songs"), lines.append, Console(file=io.StringIO()))
    (told,) = [line for line in lines if "dropped" in line]
    count, total = int(told.split()[0]), int(told.split()[2])
    assert 0 < count < total == 6
    assert told.endswith(
        f"were dropped in preparation and are not scored: {tmp_path / 'short' / 'test' / 'dropped.tsv'}"
    )
    assert len((tmp_path / "short" / "test" / "dropped.tsv").read_text().splitlines()) == count + 1
