"""The list of strategies, what each must say of itself, and the rule that its text stays readable."""

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
    """So that a typing error is easy to correct."""
    with pytest.raises(ConfigError, match="'all-reduce' is unknown; did you mean 'allreduce'"):
        find_strategy("all-reduce")


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_gives_its_equation_and_says_what_it_is(name: str) -> None:
    """The docstring of an algorithm holds the equation, its arguments and references; the list one line about it."""
    strategy = STRATEGIES[name]
    docstring = inspect.getdoc(strategy.run) or ""
    assert all(part in docstring for part in ("Equation", "Args:", "References:"))
    assert strategy.summary and "\n" not in strategy.summary


@pytest.mark.parametrize(
    ("name", "options", "members", "lost", "joined", "expected"),
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
def test_joiners_get_ranks_after_the_workers_and_before_the_servers(
    name: str,
    options: dict[str, object],
    members: tuple[int, ...],
    lost: list[int],
    joined: list[int],
    expected: object,
) -> None:
    """So a server stays a server, with its part of the model, and a super-learner keeps its own learners."""
    strategy = find_strategy(name)
    assert strategy.successors(strategy.options.model_validate(options), members, lost, joined) == expected


def test_a_lost_server_ends_the_run_and_half_a_super_learner_cannot_join() -> None:
    """The part of the model that a server kept is lost with it; a super-learner joins as a whole."""
    served, nodes = find_strategy("parameter-server"), find_strategy("hadpsgd")
    with pytest.raises(PeerLost, match="was a server"):
        served.successors(served.options.model_validate({"servers": "own"}), (0, 1, 2), [2])
    with pytest.raises(ConfigError, match="3 learners cannot be divided"):
        nodes.successors(nodes.options.model_validate({"per_node": 2}), (0, 1), [], [2])


@pytest.mark.parametrize(
    ("name", "options", "world", "message"),
    [
        ("hadpsgd", {"per_node": 2}, 3, "strategy.per_node: 3 learners cannot be divided into super-learners of 2"),
        (
            "parameter-server",
            {"shards": 3},
            2,
            "strategy.shards: 3 servers, but only 2 learners to run them; choose at most 2",
        ),
        ("parameter-server", {"shards": 2, "servers": "own"}, 2, "none of the 2 learners is a worker"),
        ("dpsgd", {"pattern": f"{__name__}:lonely"}, 4, "pattern lonely: not connected within 64 rounds"),
    ],
)
def test_validating_says_what_does_not_fit_and_counting_never_does(
    name: str, options: dict[str, object], world: int, message: str
) -> None:
    """`validate` raises, and the counts of the same options are numbers."""
    strategy = find_strategy(name)
    checked = strategy.options.model_validate(options)
    with pytest.raises(ConfigError, match=message):
        strategy.validate(checked, world)
    groups = strategy.sync_groups(checked, world)
    assert groups.num_workers >= 0 and groups.size >= 1


def lonely(k: int, rank: int, world: int) -> dict[int, float]:
    """A pattern under which no learner averages with another."""
    return {}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_strategy_imports_nothing_but_learner_topology_and_torch(file: Path) -> None:
    """All that a strategy may use is the learner, so one text can run on both engines."""
    allowed = {"starling.learner", "starling.topology", "starling.topology.analysis", "starling.configuration"}
    allowed |= {"torch", "pydantic"}
    allowed |= {
        "starling.errors",
        "__future__",
        "abc",
        "collections",
        "collections.abc",
        "contextlib",
        "copy",
        "dataclasses",
        "functools",
        "itertools",
        "math",
        "typing",
    }
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


def test_a_piece_is_started_before_its_predecessor_is_awaited() -> None:
    """But only one: pieces are there to keep copies small."""
    begun: list[int] = []

    def begin(number: int) -> int:
        begun.append(number)
        return number

    seen = [(number, len(begun)) for number in one_ahead(begin(number) for number in range(4))]
    assert seen == [(0, 2), (1, 3), (2, 4), (3, 4)]
    assert list(one_ahead(iter([]))) == []
