"""The list of strategies, what each must say of itself, and the rule that its text stays readable."""

import ast
import doctest
import inspect
import random
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import starling
from starling import Config, Learner, Strategy, strategies, toy
from starling.errors import ConfigError, ProtocolError
from starling.recipe.run import StrategyChoice, strategy_problems
from starling.strategies import STRATEGIES, NoOptions, find_strategy
from starling.strategies.parts.mixing import one_ahead
from tools.house import code_lines

ROOM = Path(strategies.__file__).parent
FILES = sorted(path for folder in (ROOM, ROOM / "parts") for path in folder.glob("[a-z]*.py"))
every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOM).as_posix())
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def test_an_unknown_strategy_names_the_nearest() -> None:
    """So that a typing error is easy to correct."""
    with pytest.raises(ConfigError, match="'all-reduce' is unknown; did you mean 'allreduce'"):
        find_strategy("all-reduce")


async def _alone(me: Learner) -> None:
    """No options."""


async def _with_options(me: Learner, options: NoOptions) -> None:
    """Options."""


@pytest.mark.parametrize(
    ("run", "fields", "message"),
    [
        (_alone, {"averages_gradients": True}, "averages_gradients is True, but must be .* `lambda options: True`"),
        (_alone, {"sync_group_size": 1}, "sync_group_size is 1, but must be .* `lambda options, world: 1`"),
        (
            _with_options,
            {},
            r"must take \(me\), because the strategy has no `options`",
        ),
        (
            _alone,
            {"options": Config},
            r"must take \(me, options\), because the strategy has the field `options`",
        ),
    ],
)
def test_a_strategy_that_could_not_run_is_refused_when_it_is_made(
    run: Callable[..., Any], fields: dict[str, Any], message: str
) -> None:
    """Rather than in the learners, or only under some settings."""
    with pytest.raises(ConfigError, match=f"strategy 'mine': .*{message}"):
        Strategy("mine", "only in tests", run, **fields)
    Strategy("mine", "only in tests", _alone, averages_gradients=lambda options: True)


async def _counts(me: Learner) -> None:
    """Count steps, in common with all others."""
    count = me.strategy_state("count", torch.zeros(1, dtype=torch.int64))
    while me.claim():
        me.step(await me.gradient(me.weights))
        count += 1


def test_common_state_that_a_strategy_does_not_declare_is_refused() -> None:
    """Or learners could begin a membership with different values of it, which would show only after a loss."""
    strategy, model = Strategy("mine", "only in tests", _counts), nn.Linear(1, 1)
    refused = pytest.raises(ProtocolError, match=r"cannot keep 'count' in common with others.* set keeps_state=True")
    with refused:
        starling.simulate(toy.regression(strategy), learners=2)
    with refused:
        starling.join(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    starling.simulate(toy.regression(replace(strategy, keeps_state=True)), learners=2)


def test_the_readme_counts_the_strategies() -> None:
    """All that `starling strategies` lists without other packages."""
    assert f"**{len(STRATEGIES)} strategies**" in (ROOM.parents[2] / "README.md").read_text(encoding="utf-8")


@every_strategy
def test_a_strategys_docstring_has_all_parts_in_their_order(name: str) -> None:
    """`starling strategies NAME` prints them; the list has one line about each strategy."""
    text = inspect.getdoc(STRATEGIES[name].run) or ""
    sentence, *_ = text.split("\n\n")
    assert re.fullmatch(r"[A-Z][^.]*\.", sentence)
    parts = re.findall(
        r"^(Equation\b|(?:Waits|Use when|Args|References|Example|[A-Z][a-z]+)(?=:$))", text, re.MULTILINE
    )
    assert list(dict.fromkeys(parts)) == ["Equation", "Waits", "Use when", "Args", "References", "Example"]
    summary = STRATEGIES[name].summary
    assert summary and "\n" not in summary


@every_strategy
def test_a_reference_has_authors_a_year_a_title_and_a_place(name: str) -> None:
    """So that it can be found."""
    text = inspect.getdoc(STRATEGIES[name].run) or ""
    references = inspect.cleandoc(text.partition("\nReferences:\n")[2].partition("\nExample:\n")[0])
    for reference in re.split(r"\.\n(?=[A-Z])", references):
        assert re.match(r"[A-Z].+ \d{4}, \"[^\"]+\", \w", " ".join(reference.split())), reference


@every_strategy
def test_the_example_of_a_strategy_is_true(name: str) -> None:
    """It runs as it stands, of the strategy by its name."""
    text = inspect.getdoc(STRATEGIES[name].run) or ""
    assert f'regression("{name}"' in text
    run_example(text, name)


@pytest.mark.parametrize("documented", [toy.regression, starling.simulate], ids=["regression", "simulate"])
def test_the_example_of_a_function_is_true(documented: Callable[..., Any]) -> None:
    """Of those that the strategies' examples call."""
    run_example(inspect.getdoc(documented) or "", documented.__name__)


def run_example(text: str, name: str) -> None:
    """Fails unless each line of a docstring's example prints what it says."""
    example = doctest.DocTestParser().get_doctest(text, {"starling": starling}, name, None, None)
    assert any(each.want and not each.options for each in example.examples)
    said: list[str] = []
    failed, _ = doctest.DocTestRunner().run(example, out=said.append)
    assert not failed, "".join(said)


@pytest.mark.parametrize(
    ("name", "options", "members", "lost", "joined", "expected"),
    [
        ("adpsgd", {}, (0, 1, 2), [1], [], (0, 2)),
        ("adpsgd", {}, (0, 2), [], [1, 5], (0, 2, 1, 5)),
        ("hadpsgd", {"per_node": 2}, (0, 1, 2, 3), [1], [], (2, 3)),
        ("hadpsgd", {"per_node": 2}, (2, 3), [], [0, 1], (2, 3, 0, 1)),
        ("parameter-server", {"servers": "own", "shards": 2}, (0, 1, 2, 3), [], [4], (0, 1, 4, 2, 3)),
        ("parameter-server", {"servers": "own"}, (1, 4, 3), [4], [0, 4], (1, 0, 4, 3)),
        ("parameter-server", {"shards": 2}, (0, 1, 2), [2], [2, 3], (0, 2, 1, 3)),
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


@pytest.mark.parametrize(
    ("options", "members", "lost", "expected"),
    [
        ({"servers": "own"}, (0, 1, 2), [2], (1, 0)),
        ({"servers": "own", "shards": 2}, (0, 1, 2, 3, 4), [3], (1, 2, 0, 4)),
        ({"servers": "own", "shards": 2}, (0, 1, 2, 3, 4), [0, 4], (2, 3, 1)),
        ({"servers": "beside"}, (0, 1, 2), [0], (1, 2)),
        ({"servers": "beside", "shards": 2}, (0, 1, 2, 3), [0], (1, 2, 3)),
        ({"servers": "beside", "shards": 2}, (0, 1, 2, 3), [0, 1, 2], None),
        ({"servers": "own"}, (0, 1), [1], None),
    ],
)
def test_a_worker_takes_the_place_of_a_lost_server(
    options: dict[str, object], members: tuple[int, ...], lost: list[int], expected: tuple[int, ...] | None
) -> None:
    """Other servers keep their shards. Without a worker to spare, the run ends."""
    served = find_strategy("parameter-server")
    if expected is None:
        with pytest.raises(ConfigError, match=r"strategy\.shards"):
            served.successors(served.options.model_validate(options), members, lost)
        return
    assert served.successors(served.options.model_validate(options), members, lost) == expected


@pytest.mark.parametrize("servers", ["beside", "own"])
@pytest.mark.parametrize("seed", range(20))
def test_a_server_keeps_its_shard_whoever_leaves_or_joins(servers: str, seed: int) -> None:
    """In random memberships, servers are at their places, no learner is missing, and only lost servers are replaced."""
    served, draw = find_strategy("parameter-server"), random.Random(seed)
    options = served.options.model_validate({"servers": servers, "shards": draw.randint(1, 3)})
    shards, members, unused = range(options.shards), tuple(range(8)), 8
    for _ in range(30):
        before = [members[options.server(shard, len(members))] for shard in shards]
        lost = draw.sample(members, draw.randint(0, len(members) - options.shards - 1))
        joined = list(range(unused, unused + draw.randint(0, 3)))
        unused += len(joined)
        following = served.successors(options, members, lost, joined)
        assert sorted(following) == sorted([*(set(members) - set(lost)), *joined])
        now = [following[options.server(shard, len(following))] for shard in shards]
        assert len(set(now)) == len(now)
        assert all(old == new or old in lost for old, new in zip(before, now, strict=True))
        members = following


def test_half_a_super_learner_cannot_join() -> None:
    """It joins as a whole."""
    nodes = find_strategy("hadpsgd")
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


@every_file
def test_a_strategy_imports_nothing_but_learner_topology_and_torch(file: Path) -> None:
    """All that a strategy may use is the learner, so one text can run on both engines."""
    allowed = {"starling.learner", "starling.topology", "starling.configuration"}
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
    allowed |= {".".join(("starling.strategies", *other.relative_to(ROOM).with_suffix("").parts)) for other in FILES}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.module in allowed
        elif isinstance(node, ast.Import):
            assert {name.name for name in node.names} <= allowed


@every_file
def test_a_strategys_text_is_short(file: Path) -> None:
    """A coroutine has at most 40 code lines, so that it reads like its equation, and a file 250, as `make house` counts
    them."""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert code_lines(text, tree) <= 250
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef):
            own = textwrap.dedent("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]))
            assert code_lines(own, ast.parse(own)) <= 40, node.name


@every_file
def test_no_option_of_a_strategy_excludes_another(file: Path) -> None:
    """An option that must be left out because of another belongs to another strategy. (`Island` is no strategy's, and
    the message in `base` is about a key of `batches`.)"""
    if file.stem not in ("islands", "base"):
        said = re.sub(r'"\s+f?"', "", file.read_text(encoding="utf-8"))
        assert re.findall(r".*leave (?:\w+ )?out.*", said) == []


class MovedOptions(Config):
    """The options of a strategy, one of which is a strategy of its own now."""

    MOVED: ClassVar[Mapping[str, str]] = {"correction": "a strategy of its own: write `name: d2`"}

    every: int = 1
    """A period."""


MOVES = Strategy("moves", "move", find_strategy("adpsgd").run, options=MovedOptions)
WHERE = f"{__name__}:MOVES"


def joins(**options: Any) -> None:
    model = nn.Linear(1, 1)
    starling.join(model, torch.optim.SGD(model.parameters(), lr=0.1), MOVES, **options)


def compares(**options: Any) -> None:
    starling.compare(toy.regression("allreduce"), {"moved": {"strategy": {"name": WHERE, **options}}}, [2])


def plans(**options: Any) -> None:
    starling.plan(
        toy.regression("allreduce"), preset="v100-2019", learners=[2], strategies=[{"name": WHERE, **options}]
    )


def trains(**options: Any) -> None:
    starling.train(toy.regression("allreduce"), 2, strategy={"name": WHERE, **options})


def recipe(**options: Any) -> None:
    starling.load_recipe(Path("demo"), [f"strategy={{name: '{WHERE}', {', '.join(map(': '.join, options.items()))}}}"])


USES = (joins, compares, plans, trains, recipe, lambda **options: toy.regression(MOVES, **options))


@pytest.mark.parametrize("use", USES)
def test_an_option_that_moved_says_what_to_write_instead(use: Callable[..., None]) -> None:
    """Wherever options are given; beside it, other unknown ones name the nearest."""
    with pytest.raises(ConfigError) as raised:
        use(correction="d2", evry="3")
    said = str(raised.value)
    assert "correction: a strategy of its own: write `name: d2`" in said
    assert re.search(r"evry: unknown key; did you mean (strategy\.)?every\?", said)
    assert strategy_problems(StrategyChoice(name=WHERE, correction="d2")) == [  # type: ignore[call-arg]
        "strategy.correction: a strategy of its own: write `name: d2`"
    ]


def test_a_piece_is_started_before_its_predecessor_is_awaited() -> None:
    """But only one: pieces are there to keep copies small."""
    begun: list[int] = []

    def begin(number: int) -> int:
        begun.append(number)
        return number

    seen = [(number, len(begun)) for number in one_ahead(begin(number) for number in range(4))]
    assert seen == [(0, 2), (1, 3), (2, 4), (3, 4)]
    assert list(one_ahead(iter([]))) == []
