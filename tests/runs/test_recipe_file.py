"""Recipes are YAML without its pitfalls."""

from pathlib import Path

import pytest

from starling.errors import ConfigError
from starling.recipe import merge, parse_yaml, read_recipe


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.e-3", ".1e-2", "+1e-3"])
def test_numbers_are_numbers_however_they_are_written(text: str) -> None:
    """YAML 1.1 would read 1e-3 as text."""
    assert parse_yaml(text, "here") == pytest.approx(1e-3)


@pytest.mark.parametrize("text", ["e3", "1e", "v1e5", "1e5x"])
def test_names_that_look_a_little_like_numbers_stay_names(text: str) -> None:
    """Only whole numbers in scientific notation are affected."""
    assert parse_yaml(text, "here") == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3\n", r"line 1: .*the key 'a' is given twice"),
        ("a: [1\nb: 2\n", r"r\.yaml, line \d: not valid YAML"),
        ("- a\n", "must be a YAML mapping"),
        ("3: a\n", "must be a YAML mapping"),
        ("", "must be a YAML mapping"),
        ("a: !!python/name:os.system\n", "not valid YAML"),
        ("a: 2024-13-45\n", "not valid YAML"),
        ("base: 3\n", "base must be the path or the name of another recipe, got 3"),
    ],
)
def test_an_invalid_recipe_is_refused_with_its_place(tmp_path: Path, text: str, problem: str) -> None:
    """Broken YAML, doubled keys, and anything but a mapping are ConfigErrors."""
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_recipe(tmp_path / "r.yaml")


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    """A recipe that is missing, not text or not a file causes such an error."""
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"absent\.yaml: no such file"):
        read_recipe(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match=r"binary\.yaml: cannot be read as UTF-8"):
        read_recipe(tmp_path / "binary.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recipe(tmp_path)


def test_a_recipe_builds_on_its_base(tmp_path: Path) -> None:
    """Mappings of the base are merged with the recipe's own, everything else is replaced; bases may have bases."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "root.yaml").write_text("a: {x: 1, y: 2}\nlist: [1, 2]\nb: 1\n")
    (tmp_path / "parts" / "middle.yaml").write_text("base: root.yaml\nb: {z: 3}\n")
    (tmp_path / "top.yaml").write_text("base: parts/middle.yaml\na: {y: 5}\nlist: [3]\n")
    assert read_recipe(tmp_path / "top.yaml") == {"a": {"x": 1, "y": 5}, "list": [3], "b": {"z": 3}}


def test_a_section_of_another_kind_replaces_that_of_the_base(tmp_path: Path) -> None:
    """Its keys have no meaning for another kind. A section of the same kind, or without a kind, is merged."""
    (tmp_path / "base.yaml").write_text("data: {corpus: {kind: several, corpora: {a: {kind: tsv, id: x}}}, train: a}")
    path = tmp_path / "own.yaml"
    path.write_text("base: base.yaml\ndata: {corpus: {kind: kaldi, path: k}}")
    assert read_recipe(path) == {"data": {"corpus": {"kind": "kaldi", "path": "k"}, "train": "a"}}
    path.write_text("base: base.yaml\ndata: {corpus: {corpora: {a: {kind: tsv, path: y}}}}")
    assert read_recipe(path)["data"]["corpus"]["corpora"]["a"] == {"kind": "tsv", "id": "x", "path": "y"}
    (tmp_path / "base.yaml").write_text("features: {pauses: 0.3}")  # of a kind that is not stated
    path.write_text("base: base.yaml\nfeatures: {kind: log-mel, num_mels: 40}")
    assert read_recipe(path)["features"] == {"pauses": 0.3, "kind": "log-mel", "num_mels": 40}


def test_a_base_may_be_named_as_in_a_command(tmp_path: Path) -> None:
    """It is the recipe of the package, wherever the user's recipe is; a file of that name takes precedence."""
    (tmp_path / "own.yaml").write_text("base: small\nseed: 7\n")
    assert read_recipe(tmp_path / "own.yaml") == {**read_recipe(Path("small")), "seed": 7}
    (tmp_path / "small").write_text("learners: 3\n")
    assert read_recipe(tmp_path / "own.yaml") == {"learners": 3, "seed": 7}


def test_circular_bases_are_refused(tmp_path: Path) -> None:
    """Two recipes that build on each other would never end."""
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ConfigError, match="leads back"):
        read_recipe(tmp_path / "a.yaml")


def test_merging_changes_neither_side() -> None:
    """The result is a new mapping."""
    below, above = {"a": {"x": 1}}, {"a": {"y": 2}}
    assert merge(below, above) == {"a": {"x": 1, "y": 2}}
    assert (below, above) == ({"a": {"x": 1}}, {"a": {"y": 2}})
