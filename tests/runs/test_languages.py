"""Several languages in one model, and the tags that name them."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from starling.cli import app
from starling.errors import ConfigError
from starling.speech.corpora.synthetic import LANGUAGES
from starling.speech.data import set_digest, set_settings
from starling.speech.recipe import load_recipe
from starling.speech.scoring import read_texts, without_tags
from starling.speech.store import SpeechSet

RECIPE = Path(__file__).parents[2] / "recipes" / "languages.yaml"
TAGS = "data.corpus.tags={english: Ⓔ, german: Ⓖ, spanish: Ⓢ}"


def smaller(folder: Path) -> list[str]:
    """Overrides for a run of seconds."""
    sets = "{train: 12, dev: 2, test: 4}"
    return [
        *(f"data.corpus.corpora.{language}.sets={sets}" for language in ("english", "german", "spanish")),
        *("data.valid=null", f"data.folder={folder / 'sets'}", f"exp={folder / 'exp'}", "budget.epochs=2"),
        *("learners=1", "model.preset=tiny", "engine.threads=1"),
    ]


@pytest.mark.wide
def test_one_model_is_trained_on_three_languages_and_scored_on_each(tmp_path: Path) -> None:
    """With tags, the model has tokens for them, every transcript begins with one, and none is scored as a word."""
    arguments = ["simulate", str(RECIPE), *smaller(tmp_path), TAGS]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("tags: ") == 3 and "of 4 utterances have the right one" in result.stdout
    decoded = next(tmp_path.rglob("recogs-english-test.txt")).parent
    for language, tag in (("english", "Ⓔ"), ("german", "Ⓖ"), ("spanish", "Ⓢ")):
        stored = SpeechSet.open(tmp_path / "sets" / f"{language}-test")
        references, _ = read_texts(decoded / f"recogs-{language}-test.txt")
        prepared = {stored.id(place): stored.text(place) for place in range(len(stored))}
        assert prepared == {name: f"{tag} {text}" for name, text in references.items()}
    tokens = next((tmp_path / "exp").rglob("tokens.json")).read_text(encoding="utf-8")
    assert all(f"\\u{ord(each):04x}" in tokens for each in "ⒺⒼⓈÜ")


def test_languages_are_spoken_in_their_own_words_by_unseen_voices(tmp_path: Path) -> None:
    """Each language is a different corpus; English is the same as before there were others."""
    recipe = load_recipe(RECIPE, smaller(tmp_path))
    for name, code in (("german", "de"), ("spanish", "es")):
        known = set(" ".join([*LANGUAGES[code].digits, *LANGUAGES[code].commands]).split())
        assert {word for each in recipe.data.utterances(f"{name}-test") for word in each.text.split()} <= known
    speakers = {name: {each.speaker for each in recipe.data.utterances(f"german-{name}")} for name in ("train", "test")}
    assert not speakers["train"] & speakers["test"]


def test_a_tag_asks_for_a_new_preparation_and_the_language_of_the_demo_does_not(tmp_path: Path) -> None:
    """Prepared sets of versions without languages stay valid."""
    usual, tagged = (load_recipe(RECIPE, [*smaller(tmp_path), *more]).data for more in ([], [TAGS]))
    assert set_digest(usual, "german-test") != set_digest(tagged, "german-test")
    demo = load_recipe(RECIPE.parent / "demo.yaml").data
    assert "language" not in set_settings(demo, "test")["corpus"]
    german = load_recipe(RECIPE.parent / "demo.yaml", ["data.corpus.language=de"]).data
    assert set_digest(demo, "test") != set_digest(german, "test")


@pytest.mark.parametrize(
    ("tags", "problem"),
    [
        ("{english: Ⓔ, german: Ⓖ}", r"tags\.spanish: missing"),
        ("{english: Ⓔ, german: Ⓖ, spanish: Ⓢ, dutch: Ⓓ}", r"tags\.dutch: there is no such corpus"),
        ("{english: E, german: Ⓖ, spanish: Ⓢ}", r"tags\.english: 'E' is not a single character other than"),
        ("{english: Ⓔ, german: ⒼⒼ, spanish: Ⓢ}", r"tags\.german: 'ⒼⒼ' is not a single character"),
        ("{english: Ⓔ, german: ⓔ, spanish: Ⓢ}", "two corpora have the same"),
    ],
)
def test_tags_that_cannot_be_told_from_words_or_each_other_are_refused(tags: str, problem: str, tmp_path: Path) -> None:
    """They are refused when the recipe is read."""
    with pytest.raises(ConfigError, match=problem):
        load_recipe(RECIPE, [*smaller(tmp_path), f"data.corpus.tags={tags}"])


def test_texts_are_scored_without_tags_and_right_tags_are_counted() -> None:
    """A tag counts wherever it is heard; a missing hypothesis has no tag."""
    references = {"a": "Ⓔ ONE TWO", "b": "Ⓖ EINS", "c": "Ⓢ UNO", "d": "Ⓔ SIX"}
    hypotheses = {"a": "ⒺONE Ⓖ TWO", "b": "Ⓔ EINS", "c": "UNO"}
    clean, heard, line = without_tags(references, hypotheses, "ⒺⒼⓈ")
    assert clean == {"a": "ONE TWO", "b": "EINS", "c": "UNO", "d": "SIX"}
    assert heard == {"a": "ONE TWO", "b": "EINS", "c": "UNO"}
    assert line == "tags: 1 of 4 utterances have the right one; not scored as words"
