"""The code blocks of a page: their language, the file in which the page says to save them, and why one is not run."""

import re
import runpy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SAVED = re.compile(r"Save (?:this|it|the following)(?: \w+)? as `([^`]+)`")
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: str
    number: int
    """Number of the block among those of its page, from 1."""
    language: str
    text: str
    saved_as: str
    """The file in which the page's paragraph before the block says to save it; empty if it says nothing."""
    reason: str
    """Why no test runs it; empty if one does."""


def code_blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    paragraph, reason, inside = "", "", None
    for line in page.read_text(encoding="utf-8").splitlines():
        if inside is None and line.startswith("```"):
            inside, text = line.removeprefix("```"), ""
        elif inside is None and (marked := _NOT_RUN.fullmatch(line)):
            reason = marked[1]
        elif inside is None:  # a block belongs to the paragraph before it, with or without an empty line between them
            is_new = bool(line.strip()) and paragraph.endswith("\n\n")
            paragraph = line + "\n" if is_new else paragraph + line + "\n"
        elif line == "```":
            saved = _SAVED.findall(" ".join(paragraph.split()))
            found.append(Block(page.name, len(found) + 1, inside, text, saved[-1] if saved else "", reason))
            paragraph, reason, inside = "", "", None
        else:
            text += line + "\n"
    return found


def run_python(text: str, **names: Any) -> dict[str, Any]:
    """Run a program that knows `names`; returns all names that exist at its end."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(text, encoding="utf-8")
        return runpy.run_path(str(program), init_globals=names)
