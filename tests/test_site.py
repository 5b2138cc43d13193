"""The documentation site: its reference is complete, its links lead somewhere, and every page has its place."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from pydantic import Field
from typer.models import OptionInfo, ParameterInfo

import starling
from starling import cli
from starling.configuration import Config, known_keys, owners
from starling.errors import StarlingError
from starling.recipe import SHIPPED, read_recipe
from starling.speech.recipe import Recipe, check_recipe
from starling.strategies import STRATEGIES
from tests.sessions import run_to_end
from tools.documentation import __main__ as site
from tools.documentation import commands, links, public_names, recipe_keys

ROOT = Path(__file__).parents[1]
PAGE = recipe_keys.page().replace("[]", "")
KEYS = {key.path.replace("[]", ""): key for section in recipe_keys.sections() for key in section.keys}
FREE = (
    *("data.corpus.sets", "data.corpus.options", "data.storage_options", "data.strings.copies", "optimizer.options"),
    *("stragglers.slow", "compare.settings", "data.corpus.tags", "data.corpus.corpora.<NAME>.sets"),
)
"""Keys whose value is a mapping with names of the user's, or of another library."""


def dotted(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a tree, `<NAME>` for the name of a domain or an arm."""
    for name, value in tree.items():
        named = "<NAME>" if prefix in ("mixture.domains.", "compare.arms.", "data.corpus.corpora.") else name
        key = prefix + named
        if named == name:
            yield key
        inside = value if isinstance(value, list | tuple) else [value]
        for each in inside:
            if isinstance(each, dict) and key not in FREE:
                yield from dotted(each, f"{key}.")


@pytest.mark.parametrize("key", sorted({*known_keys(Recipe), "base", "compare"}))
def test_every_key_that_recipes_may_have_is_in_the_reference(key: str) -> None:
    """By the list that suggests the nearest key for a wrong one."""
    assert key in KEYS
    assert f"| `{key}` |" in PAGE


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_option_of_a_strategy_is_in_the_reference(name: str) -> None:
    """In a section of the strategy's own."""
    (section,) = [each for each in recipe_keys.sections() if each.title == f"`strategy`, `name: {name}`"]
    assert [key.path for key in section.keys] == [
        f"strategy.{each}" for each in ("name", *owners(STRATEGIES[name].options))
    ]


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_key_of_a_shipped_recipe_is_in_the_reference(path: Path) -> None:
    """As it stands in the file, without the keys of arms, which are keys of the recipe."""
    found = {key for key in dotted(read_recipe(path)) if not key.startswith("compare.arms.<NAME>")}
    assert found <= KEYS.keys()


def test_every_key_of_a_resolved_recipe_is_in_the_reference() -> None:
    """What `config.yaml` of a run holds, defaults included."""
    resolved = check_recipe(read_recipe(Path("demo")), "demo").model_dump(mode="json")
    assert set(dotted(resolved)) <= KEYS.keys()


def test_every_key_has_a_type_a_default_and_a_description() -> None:
    """No empty cell, except the unit of what has none."""
    empty = [key.path for key in KEYS.values() if not (key.type and key.default and len(key.description.split()) > 1)]
    assert not empty


@pytest.mark.parametrize(
    ("key", "kind", "default", "unit"),
    [
        ("learners", "integer ≥ 1, ≤ 4096", "`1`", ""),
        ("name", "text", "required", ""),
        ("on_loss", "`continue` or `replace` or `stop`", "`continue`", ""),
        ("data.sampling_rate", "integer ≥ 1000, ≤ 192000", "`16000`", "Hz"),
        ("data.test", "list of text", "`[test]`", ""),
        ("data.filter.min_seconds", "number ≥ 0", "`0.1`", "s"),
        ("data.check.silence_db", "number < 0", "`-60.0`", "dB"),
        ("checkpoints.minutes", "number > 0 or null", "`5.0`", "min"),
        ("features.frame_shift", "number > 0", "`0.01`", "s"),
        ("cluster.link.bandwidth", "number > 0", "`1250000000.0`", "bytes/s"),
        ("cluster.watch.silence", "number > 0", "`600.0`", "s"),
        ("strategy.piece_megabytes", "number > 0", "`16.0`", "MB"),
        ("optimizer.schedule", "mapping", "`{warmup: 0.05}`", ""),
        ("compare.rates", "list of number ≥ 0 or text", "`[]`", ""),
    ],
)
def test_a_key_is_described_as_the_recipe_checks_it(key: str, kind: str, default: str, unit: str) -> None:
    """Read from the source by hand."""
    assert (KEYS[key].type, KEYS[key].default, KEYS[key].unit) == (kind, default, unit)


def functions() -> dict[str, Any]:
    """The functions behind the commands, by name, as they are registered with Typer."""
    found = {}
    for prefix, group in (("", cli.app), ("study ", cli.studies), ("recipes ", cli.shipped)):
        for command in group.registered_commands:
            assert command.callback is not None
            found[prefix + (command.name or command.callback.__name__)] = command.callback
    return found


@pytest.mark.parametrize("name", functions())
def test_every_command_argument_and_option_is_in_the_reference(name: str) -> None:
    """By the signature of the function that runs it."""
    page = commands.page()
    (part,) = re.findall(rf"^## starling {name}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert f"[`starling {name}`](#{links.slug(f'starling {name}')})" in page
    hints = get_type_hints(functions()[name], include_extras=True, localns=vars(cli))
    for parameter, hint in hints.items():
        for info in getattr(hint, "__metadata__", ()):
            if isinstance(info, OptionInfo):
                names = [each for each in (info.default, *(info.param_decls or ())) if str(each).startswith("--")]
                names = names or [f"--{parameter.replace('_', '-')}"]  # as Typer derives it
                assert all(f"| `{each}" in part for each in names)
            elif isinstance(info, ParameterInfo):
                assert re.search(rf"^\| `\[?{re.escape((info.metavar or '').rstrip('.'))}", part, re.MULTILINE)
            assert not isinstance(info, ParameterInfo) or (info.help or "") in part


def test_every_exit_code_is_in_the_reference_and_in_running() -> None:
    """Those of all errors, of success, and of the two signals."""
    known = {0, 130, 143, *(kind.exit_code for kind in (StarlingError, *StarlingError.__subclasses__()))}
    running = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    for text in (commands.page(), running):
        rows = re.findall(r"^\| ([\d, ]+) \| .+ \|$", text.split("## Exit codes")[1], re.MULTILINE)
        assert {int(code) for row in rows for code in row.split(", ")} == known


def test_every_public_name_is_in_the_reference_once() -> None:
    """mkdocstrings replaces each line by the name's documentation."""
    assert sorted(re.findall(r"^::: starling\.(\w+)$", public_names.page(), re.MULTILINE)) == sorted(starling.__all__)


def test_every_public_name_and_member_has_a_docstring() -> None:
    """Or the site is not built."""
    assert public_names.undocumented() == []


def test_a_public_member_without_a_docstring_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields and methods; what begins with an underscore is private."""

    class Open(Config):
        """A class with a docstring."""

        silent: int = 1
        named: int = Field(default=1, description="a field")
        told: int = 1
        """A field."""

        def quiet(self) -> None: ...

        def _private(self) -> None: ...

    Open.__module__ = "starling.open"
    monkeypatch.setattr("tools.documentation.public_names.beneath_fields", lambda kind: {"told": "A field."})
    monkeypatch.setattr("tools.documentation.public_names._public", lambda name: Open)
    monkeypatch.setattr(starling, "__all__", ["Open"])
    assert sorted(public_names.undocumented()) == ["starling.Open.quiet", "starling.Open.silent"]


@pytest.mark.parametrize("page", links.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_anchor_leads_somewhere_on_the_forge(page: Path) -> None:
    """Files exist, and headings have the anchors that links name."""
    assert [problem for link in links.links(page) if (problem := links.problem(link))] == []


def test_a_broken_link_and_a_broken_anchor_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In text, not in code; a heading twice has two anchors."""
    monkeypatch.setattr(links, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# A `first` heading: *well*\n## Twice\n## Twice\n```sh\n# no heading\n[in](code.md)\n```\n"
        "[1](page.md#a-first-heading-well) [2](#twice-1) [3](other.md) [4](#no-heading) [5](https://x.org/y) "
        "`[6](no.md)`"
    )
    assert [(link.text, bool(links.problem(link))) for link in links.links(page)] == [
        ("page.md#a-first-heading-well", False),
        ("#twice-1", False),
        ("other.md", True),
        ("#no-heading", True),
    ]


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("README.md", "docs/running.md#exit-codes", "running.md#exit-codes"),
        ("README.md", "docs/pictures/report.png", "pictures/report.png"),
        ("README.md", "CONTRIBUTING.md", "project/contributing.md"),
        ("docs/running.md", "../README.md#a-60-second-tour", "index.md#a-60-second-tour"),
        ("docs/running.md", "../recipes/demo.yaml", "source/src/starling/recipes/demo.yaml.md"),
        ("docs/strategies/adpsgd.md", "../../src/starling/learner.py", "../source/src/starling/learner.py.md"),
        ("docs/architecture.md", "../src/starling/engines/loop", "source/src/starling/engines/loop.md"),
        ("docs/strategies/adpsgd.md", "../glossary.md", "../glossary.md"),
        ("CONTRIBUTING.md", "docs/glossary.md", "../glossary.md"),
        ("docs/data.md", "https://arxiv.org/abs/1909.06335", "https://arxiv.org/abs/1909.06335"),
        ("docs/data.md", "#reading", "#reading"),
    ],
)
def test_a_link_of_the_forge_becomes_a_link_of_the_site(page: str, link: str, expected: str) -> None:
    """Code is left alone."""
    text = "[text\nand more]({}) and `[code]({})`"
    assert links.for_site(text.format(link, link), ROOT / page) == text.format(expected, link)


def test_every_page_has_its_place_in_the_navigation() -> None:
    """Once; or it is one of those that another page lists: decisions, sources, and tables of results."""
    plain = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = re.findall(r"([\w/-]+\.md)$", plain.split("\nnav:\n")[1], re.MULTILINE)
    wanted = [links.site_page(page) for page in links.pages()]
    unlisted = [page for page in wanted if re.match(r"decisions/\d|results/[\w-]+/", page)]
    assert sorted(listed) == sorted(set(wanted) - set(unlisted))
    assert set(yaml.safe_load(plain)["not_in_nav"].split()) == {"/source/", "/decisions/0*", "/results/*/"}


def test_every_command_that_the_documents_name_exists() -> None:
    """In code, and with the options that it is given there."""
    options = {each.name: [name for one in each.parameters for name in one.opts] for each in commands.commands()}
    wrong = []
    for page in links.pages():
        text = page.read_text(encoding="utf-8")
        for line in re.findall(r"(?:`|^(?:\$ | +)?)(starling [a-z][^`\n]*)", text, re.MULTILINE):
            words = line.replace("`", " ").split("#")[0].split()[1:]
            name = next((each for each in (" ".join(words[:2]), words[0]) if each in options), None)
            given = [word.partition("=")[0] for word in words if word.startswith("--")]
            known = {*options.get(name or "", ()), "--help"}
            wrong += [f"{page.name}: {line}"] * (name is None or not known.issuperset(given))
    assert wrong == []


_BUILD = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", "mkdocs.yml"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the site in `site/` and its sources in `docs/`, as `make docs` makes them."""
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    site.write_site(folder / "docs")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").replace("docs_dir: build/docs", "docs_dir: docs")
    (folder / "mkdocs.yml").write_text(settings.replace("paths: [src]", f"paths: [{ROOT / 'src'}]"), encoding="utf-8")
    code, said, _ = run_to_end(_BUILD, folder)
    assert code == 0, said
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("width", [400, 800, 1400])
def test_the_main_pages_fit_the_screen(width: int, built: Path) -> None:
    """Nothing reaches beyond the screen or covers anything else, and no table is taller than eight screens."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    from tests.chromium import CHROMIUM, layout_problems, started

    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on the PATH")
    names = ("index", "guarantees", "running", "reports", "strategies/index", "tutorials/index", "reference/python")
    with started() as browser:
        page = browser.new_page(viewport={"width": width, "height": 900})
        for name in names:
            page.goto((built / "site" / f"{name}.html").as_uri())
            assert layout_problems(page) == [], name
            heights = page.eval_on_selector_all("table", "all => all.map(each => each.getBoundingClientRect().height)")
            assert max(heights, default=0) <= 8 * 900, name


@pytest.mark.soak
def test_the_site_is_complete_and_a_broken_link_is_refused(built: Path) -> None:
    """By mkdocs in strict mode, from what `python -m tools.documentation` writes; `make docs` does the same."""
    shown = (built / "site" / "reference" / "python.html").read_text(encoding="utf-8")
    assert all(f'id="starling.{name}"' in shown for name in starling.__all__)
    strategies = built / "site" / "strategies"
    linked = re.findall(r'(?:"page": |href=)"([^":]+)"', (strategies / "interactive.html").read_text(encoding="utf-8"))
    assert "index.html" in linked and len(set(linked)) == 1 + len(
        list((ROOT / "docs" / "strategies").glob("[a-z]*.md"))
    )
    assert all((strategies / each).exists() for each in linked)
    with (built / "docs" / "glossary.md").open("a", encoding="utf-8") as page:
        page.write("\n[nowhere](running.md#nowhere)\n")
    code, said, _ = run_to_end(_BUILD, built)
    assert code != 0
    assert "running.md#nowhere" in said
