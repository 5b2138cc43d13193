"""The registry of strategies, and the rule that a strategy's text stays readable."""

import ast
import inspect
from pathlib import Path

import pytest

from starling import strategies
from starling.errors import ConfigError
from starling.strategies import STRATEGIES, find_strategy

FILES = sorted(Path(strategies.__file__).parent.glob("[a-z]*.py"))


def test_an_unknown_strategy_names_the_nearest() -> None:
    """A typing error is answered with what was probably meant."""
    with pytest.raises(ConfigError, match="'all-reduce' is unknown; did you mean 'allreduce'"):
        find_strategy("all-reduce")


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_gives_its_equation_and_says_what_it_is(name: str) -> None:
    """The docstring of an algorithm holds the equation, and the registry one line about it."""
    strategy = STRATEGIES[name]
    assert "Equation" in (inspect.getdoc(strategy.run) or "")
    assert strategy.summary and "\n" not in strategy.summary


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_strategy_imports_nothing_but_learner_topology_and_torch(file: Path) -> None:
    """What a strategy may ask for is the learner: so one text can run on both engines."""
    allowed = {"starling.learner", "starling.topology", "starling.configuration", "torch", "pydantic"}
    allowed |= {"starling.errors", "collections", "collections.abc", "contextlib", "typing"}
    allowed |= {f"starling.strategies.{other.stem}" for other in FILES}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.module in allowed
        elif isinstance(node, ast.Import):
            assert {name.name for name in node.names} <= allowed


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_strategys_text_is_short(file: Path) -> None:
    """Under 60 lines, docstring included: it reads like its equation."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60
