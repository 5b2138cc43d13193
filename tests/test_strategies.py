"""The registry of strategies, and the rule that a strategy's text stays readable."""

import ast
import inspect
from pathlib import Path

import pytest

from starling import strategies
from starling.errors import ConfigError, PeerLost
from starling.strategies import STRATEGIES, find_strategy
from starling.strategies.mixing import one_ahead

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


@pytest.mark.parametrize(
    ("name", "options", "members", "lost", "came", "expected"),
    [
        ("adpsgd", {}, (0, 1, 2), [1], [], (0, 2)),
        ("adpsgd", {}, (0, 2), [], [1, 5], (0, 2, 1, 5)),
        ("hadpsgd", {"per_node": 2}, (0, 1, 2, 3), [1], [], (2, 3)),
        ("hadpsgd", {"per_node": 2}, (2, 3), [], [0, 1], (2, 3, 0, 1)),
        ("parameter-server", {"servers": "own", "shards": 2}, (0, 1, 2, 3), [], [4], (0, 1, 4, 2, 3)),
        ("parameter-server", {"servers": "own"}, (1, 4, 3), [4], [0, 4], (1, 0, 4, 3)),
        ("parameter-server", {"shards": 2}, (0, 1, 2), [2], [2, 3], (0, 1, 2, 3)),
    ],
)
def test_who_comes_stands_behind_those_who_compute_and_before_those_who_serve(
    name: str, options: dict[str, object], members: tuple[int, ...], lost: list[int], came: list[int], expected: object
) -> None:
    """So a server stays one, with its part of the model, and a super-learner keeps its own learners."""
    strategy = find_strategy(name)
    assert strategy.successors(strategy.options.model_validate(options), members, lost, came) == expected


def test_nobody_succeeds_a_server_and_half_a_super_learner_does_not_come() -> None:
    """The part of the model that a server kept is lost with it; a super-learner comes whole."""
    served, nodes = find_strategy("parameter-server"), find_strategy("hadpsgd")
    with pytest.raises(PeerLost, match="was a server"):
        served.successors(served.options.model_validate({"servers": "own"}), (0, 1, 2), [2])
    with pytest.raises(ConfigError, match="do not divide 3 learners"):
        nodes.successors(nodes.options.model_validate({"per_node": 2}), (0, 1), [], [2])


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


def test_a_piece_is_begun_before_the_one_before_it_is_waited_for() -> None:
    """And no more than one: pieces are there to keep copies small."""
    begun: list[int] = []

    def begin(number: int) -> int:
        begun.append(number)
        return number

    seen = [(number, len(begun)) for number in one_ahead(begin(number) for number in range(4))]
    assert seen == [(0, 2), (1, 3), (2, 4), (3, 4)]
    assert list(one_ahead(iter([]))) == []
