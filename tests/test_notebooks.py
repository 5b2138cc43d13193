"""The tutorials work as notebooks, and so do `starling.train` and `starling.simulate`, in an ordinary kernel."""

import re
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from tests.code_blocks import code_blocks
from tests.test_code_blocks import smaller
from tests.test_documents import ROOT, environment
from tools.documentation import notebooks

IN_A_CELL = """
from dataclasses import replace

def make_model():
    return torch.nn.Linear(2, 2)

try:
    workload = starling.DataWorkload(make_model, quadrants.loss, quadrants.data, batch_size=32)
    starling.train(replace(quadrants.job, workload=workload), learners=2, name="cells")
except starling.StarlingError as error:
    print("refused:", error)
"""
LEAVES = {
    "first-recogniser": "exp/further/checkpoints",
    "choose-a-strategy": "exp/which",
    "your-own-corpus": "exp/mine/checkpoints",
}
"""A folder that exists at the end of a notebook."""


def executed(notebook: nbformat.NotebookNode, folder: Path, scratch: Path) -> list[str]:
    """What each code cell showed, in a kernel without anyone's settings, which has ended when this returns."""
    private = {name: str(scratch) for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**private, "JUPYTER_RUNTIME_DIR": str(scratch), "JUPYTER_NO_CONFIG": "1"}.items():
            patch.setenv(name, value)
        client = NotebookClient(
            notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        )
        client.execute(env=environment())
    children = psutil.Process().children(recursive=True)
    assert not [child for child in children if "ipykernel_launcher" in child.cmdline()]
    return ["".join(map(_text, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"]


def _text(output: Any) -> str:
    return str(output["text"] if "text" in output else output["data"]["text/plain"])


def test_every_tutorial_is_a_notebook_with_all_that_a_reader_would_run() -> None:
    """In its order; and a generated notebook is the same each time."""
    folder = ROOT / "docs" / "tutorials"
    assert set(notebooks.TUTORIALS) == {page.stem for page in folder.glob("[a-z]*.md")}
    for name in notebooks.TUTORIALS:
        page = folder / f"{name}.md"
        made = notebooks.notebook(page)
        cells = [cell.source.split("\n", 1) for cell in made.cells if cell.cell_type == "code"]
        ours = [block for block in code_blocks(page) if not block.reason and block.language not in ("text", "console")]
        assert [rest for _, rest in cells] == [block.text.rstrip("\n") for block in ours]
        for (magic, _), block in zip(cells, ours, strict=True):
            assert magic == ("%%script bash -e" if block.language == "sh" else f"%%writefile {block.saved_as}")
        text = "\n".join(cell.source for cell in made.cells if cell.cell_type == "markdown")
        assert not re.search(r"\]\((?!https?:)", text)
        assert nbformat.writes(made) == nbformat.writes(notebooks.notebook(page))


@pytest.mark.wide
def test_a_job_of_a_module_trains_and_is_simulated_in_a_notebook(tmp_path: Path) -> None:
    """The README's, which kills a learner. Progress is shown, each line once; a job of a cell is one clear error."""
    (script,) = [block.text for block in code_blocks(ROOT / "README.md") if "starling.train(" in block.text]
    definitions = script.split("if __name__")[0]
    cells = [
        f"%%writefile quadrants.py\n{definitions}",
        "import torch, starling, quadrants\ntrained = starling.train(quadrants.job, learners=3, name='quadrants')",
        "inputs, labels = quadrants.data.tensors\n"
        "print((trained.model()(inputs).argmax(1) == labels).float().mean().item())",
        "simulated = starling.simulate(quadrants.job, learners=16)\nprint(simulated.seconds > 0)",
        IN_A_CELL,
    ]
    (tmp_path / "work").mkdir()
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    _, trained, accuracy, simulated, refused = executed(notebook, tmp_path / "work", tmp_path)
    assert "learner 1 was killed by SIGKILL" in trained
    assert re.findall(r"epoch (\d) ended", trained) == list("12345")
    assert trained.count("ended well") == 1
    assert float(accuracy) > 0.9
    assert simulated.endswith("True\n")
    assert "refused: job: make_model is defined in a notebook or an interactive session" in refused
    assert "%%writefile" in refused and not (tmp_path / "work" / "exp" / "cells" / "checkpoints").exists()


@pytest.mark.soak
def test_the_tutorial_on_loops_works_as_a_notebook(tmp_path: Path) -> None:
    """One learner has the plain loop's result, and two have the same model."""
    made = notebooks.notebook(ROOT / "docs" / "tutorials" / "your-own-loop.md")
    (tmp_path / "work").mkdir()
    said = executed(made, tmp_path / "work", tmp_path)
    results = [re.findall(r"accuracy ([\d.]+), first weight (\S+)", each) for each in said]
    plain, one, two, apart = filter(None, results)
    assert plain == one and len(plain) == 1
    assert len(two) == 2 == len(apart) and two[0] == two[1]
    assert all(float(accuracy) > 0.9 for accuracy, _ in [*one, *two, *apart])


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "names", [("first-recogniser", "choose-a-strategy"), ("your-own-corpus",)], ids=lambda names: names[0]
)
def test_a_tutorial_on_speech_works_as_a_notebook(names: tuple[str, ...], tmp_path: Path) -> None:
    """With a tenth of the demo's corpus. The second starts in the first one's folder, as it says."""
    (tmp_path / "work").mkdir()
    for name in names:
        made = notebooks.notebook(ROOT / "docs" / "tutorials" / f"{name}.md")
        for cell in made.cells:
            if cell.cell_type == "code":
                cell.source = smaller(cell.source)
            if "starling recipes copy demo" in cell.source and cell.cell_type == "code":
                shipped = (ROOT / "recipes" / "demo.yaml").read_text(encoding="utf-8")
                cell.source = f"%%writefile demo.yaml\n{smaller(shipped)}"
        executed(made, tmp_path / "work", tmp_path)  # a command that fails is an error
        assert (tmp_path / "work" / LEAVES[name]).is_dir()
