"""The pages of the strategies say what the source does: text, options, commands and figures."""

import ast
import inspect
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from starling.configuration import owners
from starling.speech.recipe import Recipe, load_recipe
from starling.strategies import STRATEGIES, Strategy
from starling.topology import (
    PATTERNS,
    accelerated_contraction,
    acceleration_constants,
    custom,
    mixing_product,
    spectral_gap,
)
from tests.contract.oracle import expected_contraction, pairs_contraction, random_ring_contraction, ring_eigenvalues

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "strategies"
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))


def page_of(name: str) -> str:
    """The name of a strategy's page: that of its coroutine, which several strategies may share."""
    return STRATEGIES[name].run.__name__.replace("_", "-")


def page(name: str) -> str:
    return (PAGES / f"{page_of(name)}.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)\n```", text, re.DOTALL)


def text_of(strategy: Strategy) -> str:
    """The coroutines of a strategy's module as they stand there, less their docstrings."""
    source = Path(inspect.getsourcefile(strategy.run) or "").read_text(encoding="utf-8")
    lines, found = source.splitlines(), []
    for node in ast.parse(source).body:
        if isinstance(node, ast.AsyncFunctionDef):
            first = node.body[0]
            is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            skipped = range(first.lineno, (first.end_lineno or 0) + 1) if is_docstring else range(0)
            rows = range(node.lineno, (node.end_lineno or 0) + 1)
            found.append("\n".join(lines[row - 1] for row in rows if row not in skipped))
    return "\n\n\n".join(found)


def commands() -> list[tuple[str, str]]:
    """Every command of every page, with the page's name."""
    return [
        (file.stem, line)
        for file in sorted(PAGES.glob("*.md"))
        for block in blocks(file.read_text(encoding="utf-8"), "sh")
        for line in block.splitlines()
    ]


def recipe_of(command: str) -> Recipe:
    """The recipe that a command would run."""
    words = [word for word in shlex.split(command) if not word.startswith("PYTHONPATH=")]
    assert words[0] == "starling" and words[1] in ("train", "simulate"), command
    return load_recipe(ROOT / words[2], words[3:])


def test_every_strategy_has_a_page_and_every_page_a_strategy() -> None:
    """The only other page is the overview."""
    assert {file.stem for file in PAGES.glob("*.md")} == {*map(page_of, STRATEGIES), "README"}


@every_strategy
def test_a_page_shows_the_whole_text_of_its_strategy(strategy: Strategy) -> None:
    """Line by line as in the source, less the docstring."""
    assert blocks(page(strategy.name), "python")[0] == text_of(strategy)


@every_strategy
def test_a_page_names_every_option_with_its_default(strategy: Strategy) -> None:
    """One row of the table for each field of the options, and no other rows. Methods that share a page have a table of
    the defaults in which they differ from the first."""
    _, _, text = page(strategy.name).partition("## Options")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", text, re.MULTILINE))
    of_method = re.search(rf"^\| `{strategy.name}` \| (.+?) \|", page(strategy.name), re.MULTILINE)
    if page_of(strategy.name) != strategy.name:
        assert of_method is not None
        rows |= {name: f"`{value}`" for name, value in re.findall(r"`(\w+): (.+?)`", of_method[1])}
    fields = {name: kind.model_fields[name] for name, kind in owners(strategy.options).items()}
    expected = {name: "required" if field.is_required() else f"`{field.default}`" for name, field in fields.items()}
    assert {name: default for name, default in rows.items() if name not in PATTERNS} == expected


@every_strategy
def test_a_page_shows_communication_and_waiting(strategy: Strategy) -> None:
    """With a description for readers that do not see the pictures; the link test checks that the files exist."""
    shown = re.findall(r"!\[(.+?)\]\(\.\./pictures/(\w+)-", page(strategy.name))
    assert {kind for _, kind in shown} == {"talks", "waits"}
    assert all(len(description) > 10 for description, _ in shown)


def test_every_picture_is_on_a_page() -> None:
    """Else it is drawn for nothing."""
    shown = set(re.findall(r"\(\.\./pictures/([\w-]+\.svg)\)", "".join(page(name) for name in STRATEGIES)))
    assert shown == {file.name for file in (ROOT / "docs" / "pictures").glob("*.svg")}


@pytest.mark.parametrize(("name", "command"), commands())
def test_a_command_of_a_page_is_accepted(name: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipe and arguments fit, and the strategy is the page's own."""
    monkeypatch.syspath_prepend(str(PAGES))
    recipe = recipe_of(command)
    assert name in ("README", page_of(recipe.strategy.name))


@every_strategy
def test_a_page_trains_and_simulates_with_a_slow_learner(strategy: Strategy) -> None:
    """Two commands at least, for both engines."""
    mine = [command for name, command in commands() if name == page_of(strategy.name)]
    assert any(command.startswith("starling train ") for command in mine)
    assert any(command.startswith("starling simulate ") and "stragglers.slow" in command for command in mine)


def test_the_example_of_a_pattern_is_the_file_and_averages_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page shows `hypercube.py` as it is; log2 L rounds make every learner the mean."""
    monkeypatch.syspath_prepend(str(PAGES))
    from hypercube import hypercube  # type: ignore[import-not-found]

    assert blocks(page("adpsgd"), "python")[1] == inspect.getsource(hypercube).rstrip()
    for world in (2, 4, 16):
        together = mixing_product(custom(world, hypercube), world.bit_length() - 1)
        assert abs(together - 1 / world).max() < 1e-12


def ring_contraction(world: int) -> float:
    return float(abs(ring_eigenvalues(world)[1:]).max()) ** 2


def test_the_table_of_contractions_is_what_the_topologies_do() -> None:
    """Each figure of adpsgd.md is computed."""
    factors: dict[str, Callable[[int], float]] = {
        "ring": ring_contraction,
        "random": random_ring_contraction,
        "pairs": pairs_contraction,
        "exponential": lambda world: expected_contraction(PATTERNS["exponential"](world, 1)),
        "complete": lambda world: expected_contraction(PATTERNS["complete"](world, 1)),
    }
    rows = dict(re.findall(r"^\| `(\w+)` \| ((?:[\d.]+ \| ){4})", page("adpsgd"), re.MULTILINE))
    assert set(rows) == set(PATTERNS)
    for name, row in rows.items():
        assert row.split(" | ")[:4] == [f"{factors[name](world):.3f}" for world in (4, 8, 16, 64)], name


def noise_keeps(learners: int, rate: float, step: float) -> float:
    """The consensus distance on a ring after many accelerated rounds: C = A C A^T + e e^T for each of its waves."""
    mixes, total = -math.expm1(-2.0 * rate) / 2.0, 0.0
    for eigenvalue in ring_eigenvalues(learners)[1:]:
        pushed = (2.0 * step - 1.0) * (eigenvalue - 1.0)
        of_round = np.array([[eigenvalue + mixes * pushed, mixes], [(1.0 - 2.0 * mixes) * pushed, 1.0 - 2.0 * mixes]])
        total += float(np.linalg.solve(np.eye(4) - np.kron(of_round, of_round), np.array([1.0, 0.0, 0.0, 0.0]))[0])
    return total / learners


def test_the_table_of_accelerated_rings_is_computed() -> None:
    """Constants, factors of a round and distances under noise, each with and without."""
    text = page("a2cid2").partition("## Constants")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", text, re.MULTILINE)
    assert [row[0] for row in rows] == ["4", "8", "16", "64"]
    for number, figures in rows:
        learners, mixing = int(number), PATTERNS["ring"](int(number), 1).matrix(0)
        rate, step = acceleration_constants(mixing)
        factors = accelerated_contraction(mixing, rate, step), ring_contraction(learners)
        expected = [f"{each:.3f}" for each in (rate, step, *factors)]
        expected += [f"{noise_keeps(learners, rate, each):.2f}" for each in (step, 0.5)]
        assert figures.split(" | ") == expected


def test_the_rounds_and_gaps_in_words_are_what_the_closed_forms_say() -> None:
    """Rounds until the worst mode is below 1 %, for 64 learners; the ring's gap."""
    text = " ".join(page("adpsgd").split())
    ring, random, pairs = (
        math.ceil(math.log(0.01) / math.log(factor(64)))
        for factor in (ring_contraction, random_ring_contraction, pairs_contraction)
    )
    assert f"shrinks to 1 % in {ring} rounds of `ring`, {random} of `random` or {pairs} of `pairs`" in text
    of_eight, of_many = (spectral_gap(PATTERNS["ring"](world, 1).matrix(0)) for world in (8, 64))
    assert f"{of_eight:.3f} for 8 learners, {of_many:.4f} for 64" in text


@pytest.mark.parametrize("file", sorted(PAGES.glob("*.md")), ids=lambda file: file.stem)
def test_links_to_sections_lead_to_headings(file: Path) -> None:
    """`page.md#section` names a heading of that page."""
    for target, section in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", file.read_text(encoding="utf-8")):
        there = (file.parent / target) if target else file
        headings = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.MULTILINE)
        assert section in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
