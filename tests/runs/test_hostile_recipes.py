"""Damaged or malicious recipes raise one ConfigError, quickly, and nothing else happens."""

import os
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from starling.errors import ConfigError
from starling.recipe import parse_yaml, read_recipe
from starling.speech.recipe import load_recipe
from tests.computing import computing_below

RECIPES = [
    text
    for path in sorted((Path(__file__).parents[2] / "recipes").glob("[df]*.yaml"))
    if b"\nbase:" not in (text := path.read_bytes())  # a copy elsewhere would be refused for the missing base alone
]
PIECES = [
    *(
        b"!!python/object/apply:os.system [x]",
        b"!!bool maybe",
        b"!!timestamp 9",
        b'!!int ""',
        b"!!binary x",
        b"!!set {a}",
    ),
    *(
        b"*a",
        b"&a ",
        b"&a [*a]",
        b"<<: ",
        b"? [a]\n: ",
        b"{",
        b"[",
        b"- ",
        b'"',
        b"'",
        b": ",
        b"\n",
        b"\t",
        b"%YAML 3.0\n",
    ),
    *(b".nan", b"-.inf", b"1e400", b"9" * 5000, b"0x" + b"f" * 99, b"1:30:00", b"-1", b"null", b"true", b"2024-13-45"),
    *(b"\xff", b"\0", b"\xed\xa0\x80", b'"\\ud800"', b"\xe2\x80\xa8", b"!!set {a}"),
]
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 12)
)
"""A text of 700 characters with 10**12 values."""


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Allow this process 2 GiB more than it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def _mutated(content: bytes, random: np.random.Generator) -> bytes:
    """A recipe with a few bytes changed, removed or repeated, or with something foreign inserted, also as the value of
    a key."""
    spoilt = bytearray(content)
    for _ in range(random.integers(1, 4)):
        place, other = (int(each) for each in random.integers(0, len(spoilt), 2))
        piece = PIECES[random.integers(len(PIECES))]
        how = random.integers(6)
        if how == 0:
            spoilt[place] = random.integers(256)
        elif how == 1:
            del spoilt[place : place + int(random.integers(1, 30))]
        elif how == 2:
            spoilt[place:place] = spoilt[other : other + 40]
        elif how == 3:
            spoilt[place:place] = piece
        elif (colon := spoilt.find(b": ", place)) >= 0:
            end = spoilt.find(b"\n", colon)
            spoilt[colon + 2 : end if end >= 0 else None] = piece
    return bytes(spoilt or b"\0")


@pytest.mark.wide
def test_500_mutated_recipes_are_recipes_or_config_errors(tmp_path: Path) -> None:
    """They raise nothing but ConfigError, each within a second of computing; some of them are still recipes."""
    random = np.random.default_rng(17)
    path = tmp_path / "r.yaml"
    ends: Counter[str] = Counter()
    for number in range(500):
        path.write_bytes(_mutated(RECIPES[number % len(RECIPES)], random))
        with computing_below(1.0):
            try:
                load_recipe(path)
                ends["accepted"] += 1
            except ConfigError as error:
                assert str(tmp_path) in str(error)
                ends["refused"] += 1
    assert ends["accepted"] > 10 and ends["refused"] > 300


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LAUGHS, "more than 20,000 values"),
        (LAUGHS + "name: *a11\n", "more than 20,000 values"),
        ("a: &a {x: 1}\n" + "b: &b {<<: [*a, *a]}\n" + LAUGHS, "more than 20,000 values"),
        ("a: &a [*a]", "line 1: an alias refers to a value that contains it"),
        ("a: &a {b: {c: *a}}", "line 1: an alias refers to a value that contains it"),
        ("a: " + "[" * 60 + "]" * 60, "nested more than 50 deep"),
        ("a: " + "[" * 20_000, "nested more than 50 deep"),
        ("a: " + "{a: " * 20_000, "nested more than 50 deep"),
        ("".join(" " * depth + "a:\n" for depth in range(1000)), "nested too deeply"),
        ("name: " + "x" * 10_000_000, "characters, but a recipe may have at most 1,048,576"),
        ("seed: " + "9" * 10_000, "not valid YAML"),
        ("name: a\nname: b", "the key 'name' is given twice"),
        ("data:\n  folder: a\n  folder: b", "the key 'folder' is given twice"),
        ("name: !!python/object/apply:os.system [touch ran]", "not valid YAML: could not determine a constructor"),
        ("name: !!python/name:os.system", "not valid YAML"),
        ("name: !!python/object:starling.errors.ConfigError {}", "not valid YAML"),
        ("name: !!bool maybe", "a tag does not fit its value"),
        ("name: !!timestamp soon", "a tag does not fit its value"),
        ('name: !!int ""', "a tag does not fit its value"),
        ("? [a]\n: b", "not valid YAML"),
        ("budget: {minutes: .nan}", "budget.minutes"),
        ("budget: {minutes: .inf}", "budget.minutes"),
        ("optimizer: {lr: .nan}", "optimizer.lr"),
        ("budget: {epochs: 1e400}", "budget.epochs"),
        ("learners: " + "9" * 30, "learners"),
        ('base: "a\\0b"', "base must be the path"),
        ("base: .", "not a regular file"),
        ("base: /dev/zero", "not a regular file"),
        ("base: pipe", "not a regular file"),
    ],
)
def test_what_is_made_to_do_harm_is_refused(
    text: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bombs of aliases, endless depth, tags that would call something, invalid numbers, and devices as files are
    refused."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("r.yaml").write_text(text, encoding="utf-8")
    with computing_below(1.0), pytest.raises(ConfigError, match=problem):
        load_recipe(tmp_path / "r.yaml")
    assert not Path("ran").exists()


def test_aliases_may_still_be_used() -> None:
    """A few aliases, as in YAML, are allowed."""
    assert parse_yaml("a: &a {x: 1}\nb: *a\nc: [*a, *a]", "here") == {
        "a": {"x": 1},
        "b": {"x": 1},
        "c": [{"x": 1}, {"x": 1}],
    }
    assert parse_yaml("", "here") is None


@pytest.mark.parametrize("content", [b"\xff\xfen\0", b"name: \xc3", "name: ü".encode("latin-1"), b"\xed\xa0\x80: a"])
def test_text_that_is_not_utf_8_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    """Other encodings and halves of characters are refused."""
    (tmp_path / "r.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"r\.yaml: cannot be read as UTF-8"):
        read_recipe(tmp_path / "r.yaml")


def test_a_folder_a_pipe_and_a_device_are_not_recipes(tmp_path: Path) -> None:
    """Reading one of them may never end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"recipe {path}: cannot be read"):
            read_recipe(path)
