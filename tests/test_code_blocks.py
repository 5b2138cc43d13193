"""Every code block of tutorials and how-to pages is run, or says why not; each tutorial works in an empty folder."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import soundfile
import yaml

from starling.recipe import merge, read_recipe
from starling.speech.comparison import check_comparison
from starling.speech.corpora import CorpusConfig, Utterance
from starling.speech.recipe import check_recipe
from tests.code_blocks import Block, code_blocks
from tests.sessions import run_to_end
from tests.test_documents import PAGES, ROOT, environment

TUTORIALS = [f"docs/tutorials/{name}.md" for name in ("first-recogniser", "choose-a-strategy")]
"""In this order in one folder, as the second says."""
ALONE = [
    *("docs/tutorials/your-own-corpus.md", "docs/tutorials/your-own-loop.md"),
    *("docs/write-your-own-strategy.md", "docs/write-your-own-task.md", "docs/diverging.md"),
]
"""Each in a folder of its own."""
TOPICS = [
    f"docs/{name}.md"
    for name in (
        *(
            "adapting",
            "compression",
            "corpora",
            "exporting",
            "gpu",
            "islands",
            "models",
            "one-to-many",
            "other-toolkits",
            "replay",
            "serving",
            "small-corpora",
            "streaming",
        ),
        "transcribing",
    )
]
"""How-to pages whose commands take data or devices that tests do not have."""
HOSTS = [f"docs/{name}.md" for name in ("huggingface", "icefall", "lightning", "migrating")]
"""Pages on other libraries' training loops; tests/integrations runs them, too."""
HOW_TO = [page for page in PAGES if page != "README.md"] + TOPICS + HOSTS
BLOCKS = [
    (page, block)
    for page in [*TUTORIALS, *ALONE, *HOW_TO, "docs/tutorials/README.md"]
    for block in code_blocks(ROOT / page)
]
SMALLER = {
    "{train: 1600, dev: 100, test: 200}": "{train: 160, dev: 10, test: 20}",
    "budget: {epochs: 15}": "budget: {epochs: 3}",
    "budget.epochs=16": "budget.epochs=4",
}
"""What a test changes in a recipe that a tutorial copies, and in commands that refer to it, to spare minutes."""


def named(block: tuple[str, Block]) -> str:
    return f"{block[0]}:{block[1].number}"


def test_the_navigation_knows_each_page_as_what_it_is() -> None:
    """So that no tutorial or how-to page escapes these tests."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    for title, pages in (("Tutorials", [*TUTORIALS, *ALONE, "docs/tutorials/README.md"]), ("How to", HOW_TO)):
        (part,) = re.findall(rf"^  - {title}:\n((?: {{6}}.*\n)+)", navigation, re.MULTILINE)
        assert {f"docs/{name}" for name in re.findall(r"[\w/-]+\.md", part)} == set(pages)


@pytest.mark.parametrize("page", sorted({page for page, _ in BLOCKS}))
def test_every_block_is_fenced_and_names_its_language(page: str) -> None:
    """A block that is indented would be run by no test."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"^(?: {4}|\t).*\S.*$", text, re.MULTILINE) == []
    assert {block.language for each, block in BLOCKS if each == page} <= {
        "sh",
        "python",
        "yaml",
        "toml",
        "console",
        "diff",
        "text",
    }


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=map(named, BLOCKS))
def test_every_block_is_run_or_says_why_not(page: str, block: Block) -> None:
    """`text` is output, or a formula. A test that a reason names exists."""
    if block.reason:
        assert len(block.reason.split()) > 3
        assert all((ROOT / test).exists() for test in re.findall(r"tests/[\w/]+\.py", block.reason))
    elif block.language in ("toml", "console"):
        pytest.fail(f"{page}, block {block.number}: {block.language} is not run; say why, before the block")


@pytest.mark.parametrize(
    ("page", "block"),
    [each for each in BLOCKS if each[1].language == "yaml" and not each[1].reason and not each[1].saved_as],
    ids=lambda value: value.page if isinstance(value, Block) else "",
)
def test_a_part_of_a_recipe_fits_the_demo(page: str, block: Block) -> None:
    """A whole one stands on its own."""
    tree = yaml.safe_load(block.text)
    whole = tree if "name" in tree else merge(read_recipe(Path("demo")), tree)
    if "compare" in whole:
        check_comparison(whole, page)
    else:
        check_recipe(whole, page)


def corpus_in(folder: Path) -> dict[str, Any]:
    """The corpus of the tutorial, written by its own script, and its recipes by name."""
    blocks = code_blocks(ROOT / ALONE[0])
    for block in blocks:
        if block.saved_as:
            (folder / block.saved_as).write_text(block.text, encoding="utf-8")
    code, said, _ = run_to_end([sys.executable, "make_corpus.py"], folder)
    assert code == 0, said
    recipes = [block.saved_as for block in blocks if block.saved_as.endswith(".yaml")]
    return {name: check_recipe(read_recipe(folder / name), name) for name in recipes}


def test_the_five_formats_of_the_tutorial_hold_the_same_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts, speakers and audio, in the same order, of both sets; the fragment for tables of their own does so, too."""
    monkeypatch.chdir(tmp_path)
    recipes = corpus_in(tmp_path)
    assert [recipe.data.corpus.kind for recipe in recipes.values()] == ["tsv", "kaldi", "nemo", "wenet", "coqui"]
    rows = (tmp_path / "corpus" / "all.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
    for name in ("train", "test"):
        table = tmp_path / "corpus" / f"{name}.tsv"
        table.write_text("".join([rows[0], *(row for row in rows if row.endswith(f"{name}\n"))]), encoding="utf-8")
    (fragment,) = [block for block in code_blocks(ROOT / ALONE[0]) if block.reason and block.language == "yaml"]
    corpora: list[CorpusConfig] = [recipe.data.corpus for recipe in recipes.values()]
    tables = {
        "data": {"folder": "x", "valid": None, **yaml.safe_load(fragment.text)},
        "name": "x",
        "budget": {"steps": 1},
    }
    corpora.append(check_recipe(tables, "fragment").data.corpus)
    for name, count in (("train", 75), ("test", 15)):
        held = [[_content(each) for each in corpus.utterances(name)] for corpus in corpora]
        assert len(held[0]) == count
        assert all(each == held[0] for each in held)


def _content(utterance: Utterance) -> tuple[str, str, float]:
    samples, rate = utterance.read()
    return utterance.text, utterance.speaker, len(samples) / rate


@pytest.mark.wide
def test_one_learner_of_the_tutorials_loop_computes_the_bits_of_the_plain_one(tmp_path: Path) -> None:
    """As the page says."""
    said = []
    for block in code_blocks(ROOT / ALONE[1]):
        if block.language == "python":
            (tmp_path / block.saved_as).write_text(block.text, encoding="utf-8")
            one_thread = {**environment(), "OMP_NUM_THREADS": "1"}
            said.append(run_to_end([sys.executable, block.saved_as], tmp_path, one_thread)[:2])
    assert said[0] == said[1]
    assert said[0][0] == 0, said
    assert float(re.findall(r"accuracy ([\d.]+)", said[0][1])[0]) > 0.9


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("pages", [TUTORIALS, *([page] for page in ALONE)], ids=lambda pages: Path(pages[0]).stem)
def test_a_tutorial_works_in_an_empty_folder(pages: list[str], tmp_path: Path) -> None:
    """Every block in its order, with the commands as they stand, but for the size of the demo."""
    shipped = (ROOT / "recipes" / "demo.yaml").read_text(encoding="utf-8")
    if pages == [ALONE[2]]:  # it names the shipped recipe, before which a file of that name is taken
        (tmp_path / "demo").write_text(smaller(shipped), encoding="utf-8")
    for page in pages:
        for block in code_blocks(ROOT / page):
            if block.reason or block.language == "text":
                continue
            if block.saved_as and block.language != "sh":
                (tmp_path / block.saved_as).write_text(block.text, encoding="utf-8")
                continue
            assert block.language == "sh", f"{page}, block {block.number}: neither saved nor run"
            for line in block.text.splitlines():
                code, said, left = run_to_end(["bash", "-c", smaller(line)], tmp_path, environment())
                assert code == 0, f"{page}: {line}\n{said}"
                assert not left
                if line == "starling recipes copy demo":
                    (tmp_path / "demo.yaml").write_text(smaller(shipped), encoding="utf-8")
    if pages == TUTORIALS:
        assert soundfile.info(tmp_path / "hello.wav").duration > 0.5


def smaller(text: str) -> str:
    """The demo's recipe, or a command, for a tenth of the corpus and a fifth of the epochs."""
    for before, after in SMALLER.items():
        text = text.replace(before, after)
    return text


def test_the_simulated_cluster_of_python_prints_what_its_page_says(tmp_path: Path) -> None:
    blocks = code_blocks(ROOT / "docs" / "running.md")
    (place,) = [place for place, block in enumerate(blocks) if "starling.Cluster(" in block.text]
    (tmp_path / "script.py").write_text(blocks[place].text, encoding="utf-8")
    code, said, _ = run_to_end([sys.executable, "script.py"], tmp_path, environment())
    assert (code, said) == (0, blocks[place + 1].text)
    assert not (tmp_path / "exp").exists()


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("page", "block"),
    [each for each in BLOCKS if each[0] in HOW_TO and each[1].language == "python" and not each[1].reason],
    ids=lambda value: value.page if isinstance(value, Block) else "",
)
def test_a_script_of_a_how_to_page_runs(page: str, block: Block, tmp_path: Path) -> None:
    """In a folder that has two small experiments."""
    (tmp_path / "demo").write_text(
        smaller((ROOT / "recipes" / "demo.yaml").read_text(encoding="utf-8")), encoding="utf-8"
    )
    for name in ("demo", "short") if "exp/" in block.text else ():
        code, said, _ = run_to_end(
            ["starling", "train", "demo", f"name={name}", "learners=1", "budget.steps=8"], tmp_path, environment()
        )
        assert code == 0, said
    (tmp_path / "script.py").write_text(block.text, encoding="utf-8")
    code, said, left = run_to_end([sys.executable, "script.py"], tmp_path, environment())
    assert code == 0, f"{page}: {said}"
    assert not left
