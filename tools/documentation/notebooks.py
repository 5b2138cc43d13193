"""The tutorials as notebooks, which the site offers for download: `python -m tools.documentation.notebooks FOLDER`.

A block that the page says to save becomes a cell that writes the file; commands become a cell for bash, which ends with
an error if one fails; and output, and commands that are not run, remain text.
"""

import re
import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tests.code_blocks import Block, code_blocks
from tools.documentation import links

TUTORIALS = ("first-recogniser", "your-own-corpus", "your-own-loop", "choose-a-strategy")
_FENCED = re.compile(r"(?:<!-- not run: .+ -->\n)?```(\w+)\n(.*?)```\n", re.DOTALL)


def notebook(page: Path) -> nbformat.NotebookNode:
    """A tutorial as a notebook, in whose cells its blocks stand in their order."""
    texts = _FENCED.sub("\0", without_links(page.read_text(encoding="utf-8"))).split("\0")
    cells, text = [], texts[0]
    for block, following in zip(code_blocks(page), texts[1:], strict=True):
        if (source := cell_of(block)) is None:
            text += f"```{block.language}\n{block.text}```\n{following}"
            continue
        cells += [new_markdown_cell(text.strip()), new_code_cell(source)]
        text = following
    cells = [cell for cell in [*cells, new_markdown_cell(text.strip())] if cell.source]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"  # random otherwise
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})
    nbformat.validate(made)
    return made


def cell_of(block: Block) -> str | None:
    """The source of the cell of a block; None if the block is only shown."""
    if block.reason or block.language in ("text", "console"):
        return None
    if block.language == "sh":
        return f"%%script bash -e\n{block.text}".rstrip("\n")
    return f"%%writefile {block.saved_as}\n{block.text}".rstrip("\n") if block.saved_as else block.text.rstrip("\n")


def without_links(text: str) -> str:
    """The text of a page without its links to other pages, which would lead nowhere from a notebook."""
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text)


def write(folder: Path) -> None:
    """Write the notebooks of all tutorials."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TUTORIALS:
        nbformat.write(notebook(links.DOCS / "tutorials" / f"{name}.md"), folder / f"{name}.ipynb")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
