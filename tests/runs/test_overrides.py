"""`key=value` arguments change a recipe like an edit of the file."""

from typing import Any

import pytest

from starling.errors import ConfigError
from starling.recipe import apply_overrides


@pytest.mark.parametrize(
    ("argument", "result"),
    [
        ("learners=2", {"learners": 2}),
        ("optimizer.lr=1e-3", {"optimizer": {"lr": 1e-3}}),
        ("data.test=[test, other]", {"data": {"test": ["test", "other"]}}),
        ("data.valid=null", {"data": {"valid": None}}),
        ("data.valid=", {"data": {"valid": None}}),
        ("strategy={name: adpsgd, pattern: ring}", {"strategy": {"name": "adpsgd", "pattern": "ring"}}),
        ("text=a=b", {"text": "a=b"}),
    ],
)
def test_values_are_yaml(argument: str, result: dict[str, Any]) -> None:
    """Numbers, lists, mappings, null and texts that contain an equals sign are tested."""
    assert apply_overrides({}, [argument]) == result


def test_later_arguments_win_and_the_recipe_is_unchanged() -> None:
    """The given tree is not changed."""
    tree = {"a": {"b": 1, "c": 2}}
    assert apply_overrides(tree, ["a.b=3", "a.b=4"]) == {"a": {"b": 4, "c": 2}}
    assert tree == {"a": {"b": 1, "c": 2}}


def test_an_option_can_be_added_to_a_strategy_given_by_name() -> None:
    """`strategy: NAME` is short for `strategy: {name: NAME}`."""
    assert apply_overrides({"strategy": "adpsgd"}, ["strategy.pattern=ring"]) == {
        "strategy": {"name": "adpsgd", "pattern": "ring"}
    }


def test_all_wrong_arguments_are_listed() -> None:
    """One ConfigError names each."""
    with pytest.raises(ConfigError) as caught:
        apply_overrides({"seed": 1}, ["learners", "=3", "a..b=1", "seed.x=2", "ok=[1"])
    message = str(caught.value)
    for argument in ("'learners'", "'=3'", "'a..b=1'", "seed is the plain value 1", "'ok=[1'"):
        assert argument in message
    assert len(message.splitlines()) == 5
