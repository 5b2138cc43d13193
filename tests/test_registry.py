"""Parts from outside: by `module:name` and by the entry points of an installed package."""

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError
from typer.testing import CliRunner

from starling import load_recipe, registry
from starling.cli import app
from starling.errors import ConfigError
from starling.recipe.run import dump_recipe
from starling.registry import Registry, did_you_mean
from starling.speech.corpora import CorpusConfig
from starling.speech.models import build_model, model_config
from starling.speech.recipe import check_recipe
from starling.strategies import STRATEGIES, find_strategy
from starling.topology import find_topology
from starling.training.job import Job
from tests.contract.cases import sgd
from tests.contract.problems import TinyRegression

OUTSIDE = '''
from typing import Literal

from torch import nn

from starling import Config, Learner, Strategy, Topology
from starling.speech.corpora import NamedSets, Utterance
from starling.speech.models import Architecture


class AloneOptions(Config):
    patience: float = 0.5
    """How long it waits for others, in vain."""


async def alone(me: Learner, options: AloneOptions) -> None:
    """Never average.

    Waits:
        No learner waits for another.
    """
    while me.claim():
        me.step(await me.gradient(me.weights))


ALONE = Strategy("alone", "never average", alone, options=AloneOptions)


def crossed(k, rank, world):
    return {(rank + world // 2) % world: 0.5} if k % 2 else {rank ^ 1: 0.5}


class Linear(nn.Module):
    def __init__(self, config: Architecture, num_features: int, vocab_size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(num_features, vocab_size)

    def forward(self, features, lengths):
        return self.layer(features).log_softmax(dim=-1), lengths


class LINEAR(Architecture):
    """A linear layer."""

    NETWORK = Linear
    PRESETS = {"small": {"subsampling": 1}, "tiny": {"units": 3}}

    units: int = 2
    """A size of its own."""


class Lines(NamedSets):
    """A corpus of this package."""

    kind: Literal["outside:Lines", "lines"]
    encoding: str = "utf-8"

    def utterances(self, set_name: str) -> list[Utterance]:
        return []
'''
ENTRY_POINTS = """
[starling.strategies]
alone = outside:ALONE
allreduce = outside:ALONE
[starling.topologies]
crossed = outside:crossed
[starling.models]
linear = outside:LINEAR
[starling.corpora]
lines = outside:Lines
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A package that Python can import, installed with entry points."""
    (tmp_path / "outside.py").write_text(OUTSIDE, encoding="utf-8")
    installed = tmp_path / "outside-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n", encoding="utf-8")
    (installed / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._installed.cache_clear()
    import outside

    yield outside
    registry._installed.cache_clear()
    del sys.modules["outside"]


@pytest.mark.parametrize(
    ("body", "keys", "message"),
    [
        ("PRESETS = {'small': {}}", {}, r"model\.name: Mine has no NETWORK; set it to the class of the network"),
        ("NETWORK = 'own:Net'", {}, r"model: own:Mine has no preset 'small'; known are none: add PRESETS = "),
        ("NETWORK = 'own:Ned'; PRESETS = {'small': {}}", {}, r"model\.name: NETWORK: 'own:Ned' .* did you mean 'Net'"),
        (
            "NETWORK = 'owm:Net'; PRESETS = {'small': {}}",
            {},
            r"model\.name: NETWORK: 'owm:Net' .* is owm installed, or",
        ),
        (
            "NETWORK = 'own:Net'; PRESETS = {'small': {}}",
            {"phones": {"layer": 1}},
            r"model: phones: own:Mine has no layer for them; .*, and classes that set CAN_HAVE_PHONES",
        ),
    ],
)
def test_what_an_architecture_from_outside_lacks_is_said_with_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, keys: dict[str, Any], message: str
) -> None:
    """Before anything is written."""
    text = f"from starling.speech.models import Architecture\n\nNet = dict\n\nclass Mine(Architecture):\n    {body}\n"
    (tmp_path / "own.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(ConfigError, match=message):
            load_recipe(
                Path("demo"), [f"model={yaml.safe_dump({'name': 'own:Mine', **keys}, default_flow_style=True)}"]
            )
    finally:
        del sys.modules["own"]


def _is_number(found: object) -> TypeGuard[float]:
    return isinstance(found, float)


NUMBERS = Registry({"two": 2.0, "three": 3.0}, "starling.nothing", accepts=_is_number, wanted="a number", prefix="n: ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("thre", r"^n: 'thre' is unknown; did you mean 'three'\? known are two, three, or module:name$"),
        ("", r"^n: '' is unknown; known are two, three, or module:name$"),
        ("math:", r"^n: 'math:' is unknown; known are"),
        (":pi", r"^n: ':pi' is unknown; known are"),
        (
            "maths:pi",
            r"^n: 'maths:pi' cannot be imported: No module named 'maths'; is maths installed, or on",
        ),
        ("math:pie", r"^n: 'math:pie' cannot be imported: math has no 'pie'; did you mean 'pi'\?$"),
        ("math:floor", r"^n: 'math:floor' is the builtin_function_or_method floor, not a number$"),
        ("threes:x", r"No module named 'threes'; did you mean 'three'\? is threes installed"),
    ],
)
def test_one_error_says_what_was_not_found_and_the_nearest_name(name: str, message: str) -> None:
    """Whether the name, the module, the object in it, or its kind is wrong."""
    with pytest.raises(ConfigError, match=message):
        NUMBERS.find(name)


def test_a_module_that_fails_while_it_is_imported_is_named_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake in it is not mistaken for its absence."""
    (tmp_path / "mistaken.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="'mistaken:x' cannot be imported: mistaken raised ZeroDivisionError: div"):
        NUMBERS.find("mistaken:x")


def test_a_known_name_and_a_number_elsewhere_are_found() -> None:
    """By name, by module, and by a dotted attribute."""
    assert (NUMBERS.find("two"), NUMBERS.find("math:tau")) == (2.0, pytest.approx(6.28, abs=0.01))
    assert NUMBERS.find("sys:float_info.max") == sys.float_info.max
    assert NUMBERS.names() == ["two", "three"]
    assert did_you_mean("tow", ["two"]) == "did you mean 'two'? "
    assert did_you_mean("xyz", ["two"]) == ""


@pytest.mark.parametrize("name", ["outside:ALONE", "alone"])
def test_a_strategy_from_outside_is_found_by_both_names(outside: Any, name: str) -> None:
    """In a recipe, and as the strategy of a job."""
    assert find_strategy(name) is outside.ALONE
    assert Job(TinyRegression(), name, None, sgd(0.1)).strategy is outside.ALONE  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["outside:ALONE", "alone"])
def test_a_strategy_from_outside_is_described(outside: Any, name: str) -> None:
    """By its own docstrings, like Starling's."""
    shown = " ".join(CliRunner().invoke(app, ["strategies", name]).stdout.split())
    assert shown == (
        "alone: never average Never average. Waits No learner waits for another. "
        "Options patience (0.5): How long it waits for others, in vain."
    )


def test_starlings_own_part_wins_over_an_entry_point_of_its_name(outside: Any) -> None:
    """A package cannot change what a recipe means."""
    assert find_strategy("allreduce") is STRATEGIES["allreduce"]


def test_names_of_installed_packages_are_suggested(outside: Any) -> None:
    """They are known names like Starling's own."""
    with pytest.raises(ConfigError, match=r"'alonne' is unknown; did you mean 'alone'\? known are allreduce, .*alone"):
        find_strategy("alonne")


def test_an_object_of_another_kind_is_refused(outside: Any) -> None:
    """With what it is, and what it must be."""
    with pytest.raises(ConfigError, match=r"strategy: 'outside:alone' is the function alone, not a starling\.Strategy"):
        find_strategy("outside:alone")


@pytest.mark.parametrize("name", ["outside:crossed", "crossed"])
def test_a_pattern_from_outside_is_found_by_both_names(outside: Any, name: str) -> None:
    """And is checked."""
    assert find_topology(name, 4, seed=0).sources(1, 0) == {2: 0.5}
    with pytest.raises(ConfigError, match="pattern crossed, round 0"):
        find_topology(name, 5, seed=0)


@pytest.mark.parametrize("name", ["outside:LINEAR", "linear"])
def test_a_model_from_outside_is_found_by_both_names(outside: Any, name: str) -> None:
    """Its presets and sizes are checked like those of Starling's own."""
    config = model_config(name=name, dropout=0.5)
    assert (config.dropout, config.subsampling, config.units) == (0.5, 1, 2)
    assert model_config(name=name, preset="tiny").units == 3
    assert isinstance(build_model(config, num_features=3, vocab_size=5, seed=1), outside.Linear)
    with pytest.raises(ValidationError, match=r"layers\n +Extra inputs are not permitted"):
        model_config(name=name, layers=2)
    with pytest.raises(ValidationError, match=f"{name} has no preset 'huge'; known are small, tiny"):
        model_config(name=name, preset="huge")


@pytest.mark.parametrize("kind", ["outside:Lines", "lines"])
def test_a_corpus_from_outside_is_found_by_both_names(outside: Any, kind: str, tmp_path: Path) -> None:
    """Its settings are checked by its own class, and come back from what is written of them."""
    settings = {"kind": kind, "path": str(tmp_path), "sets": {"train": "."}}
    adapter: TypeAdapter[Any] = TypeAdapter(CorpusConfig)
    corpus = adapter.validate_python({**settings, "encoding": "latin-1"})
    assert isinstance(corpus, outside.Lines)
    written = adapter.dump_python(corpus, mode="json")
    assert written["encoding"] == "latin-1"
    assert adapter.validate_python(written) == corpus == adapter.validate_python(corpus)
    with pytest.raises(ValidationError, match="encodign"):
        adapter.validate_python({**settings, "encodign": "latin-1"})
    with pytest.raises(ValidationError, match="outside has no 'Line'; did you mean 'Lines'"):
        adapter.validate_python({**settings, "kind": "outside:Line"})


def test_a_whole_recipe_of_parts_from_outside_is_complete(outside: Any, tmp_path: Path) -> None:
    """What is written into the experiment's folder loads as the same recipe."""
    tree = {
        "name": "outside",
        "learners": 2,
        "budget": {"epochs": 1},
        "strategy": {"name": "adpsgd", "pattern": "outside:crossed"},
        "model": {"name": "outside:LINEAR"},
        "data": {
            "folder": str(tmp_path),
            "corpus": {"kind": "outside:Lines", "path": str(tmp_path), "sets": {"train": ".", "test": "."}},
            "valid": None,
        },
    }
    recipe = check_recipe(tree, "r.yaml")
    assert check_recipe(yaml.safe_load(dump_recipe(recipe)), "dumped") == recipe
    for wrong, message in (
        ({"strategy": "outsid:ALONE"}, r"strategy: 'outsid:ALONE' cannot be imported: No module named 'outsid'"),
        ({"model": {"name": "outside:LINEA"}}, r"model\.name: 'outside:LINEA' .* did you mean 'LINEAR'"),
        ({"data": {**tree["data"], "corpus": {"kind": "outside:alone"}}}, r"data\.corpus: 'outside:alone' is the func"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_recipe({**tree, **wrong}, "r.yaml")
