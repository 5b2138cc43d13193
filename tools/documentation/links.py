"""Links between pages, as the forge resolves them and as the site needs them.

On the forge, pages link to any file of the repository. The site has the pages of `docs/`, the pages of the repository's
root under other names, and a page for each source file or folder that a page links to.
"""

import os
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
HOME = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "RELEASING.md": "project/releasing.md",
}
"""The site's page for each page in the repository's root."""
_FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"(`+)[^`].*?\1", re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^()\s]+)(?=\))")
_EXTERNAL = re.compile(r"[a-z]+:")


@dataclass(frozen=True)
class Link:
    """A link of a page to a file of the repository, or to a place in it."""

    text: str
    """The target as written in the page."""
    file: Path
    """The file or folder, as an absolute path."""
    anchor: str
    """The anchor without `#`; empty for the whole file."""


def links(page: Path) -> Iterator[Link]:
    """The links of a page that stay in the repository."""
    for match in _LINK.finditer(without_code(page.read_text(encoding="utf-8"))):
        if not _EXTERNAL.match(match[0]):
            yield _link(page, match[0])


def _link(page: Path, text: str) -> Link:
    target, _, anchor = text.partition("#")
    return Link(text, (page.parent / target).resolve() if target else page, anchor)


def without_code(markdown: str) -> str:
    """The text with blanks in place of code, at the same length."""
    blank = _FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), markdown)
    return _CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), blank)


def slug(heading: str, separator: str = "-") -> str:
    """The anchor of a heading, as forges and the site generate it."""
    plain = re.sub(r"<[^>]+>", "", heading)
    kept = [each for each in unicodedata.normalize("NFC", plain).lower() if each.isalnum() or each in " -_"]
    return "".join(kept).strip().replace(" ", separator)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings."""
    found: list[str] = []
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for heading in re.findall(r"^#{1,6} +(.+?) *#* *$", text, re.MULTILINE):
        own = slug(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", ""))
        before = sum(each == own for each in found)
        found += [own] if not before else [own, f"{own}-{before}"]
    return frozenset(found)


def problem(link: Link) -> str | None:
    """The problem with a link on the forge; None if it leads to its target."""
    if not link.file.is_relative_to(ROOT) or not link.file.exists():
        return f"links to {link.text}, which does not exist"
    if link.anchor and link.file.suffix == ".md" and link.anchor not in anchors(link.file):
        return f"links to {link.text}, but that page has no such heading"
    return None


def site_page(file: Path) -> str:
    """The site's path of a page, picture or source file, relative to the root of the site's sources."""
    if file.is_relative_to(DOCS) and (file.suffix in (".md", ".svg", ".png", ".html")):
        return file.relative_to(DOCS).as_posix()
    inside = file.relative_to(ROOT).as_posix()
    return HOME.get(inside, f"source/{inside}.md")


def for_site(markdown: str, page: Path) -> str:
    """The text of a page with links as the site needs them."""
    here = str(Path(site_page(page)).parent)
    parts, end = [], 0
    for match in _LINK.finditer(without_code(markdown)):
        if _EXTERNAL.match(match[0]) or match[0].startswith("#"):
            continue
        link = _link(page, match[0])
        target = os.path.relpath(site_page(link.file), here)
        parts += [markdown[end : match.start()], target, f"#{link.anchor}" if link.anchor else ""]
        end = match.end()
    return "".join([*parts, markdown[end:]])


def pages() -> list[Path]:
    """All pages that the site shows: those in the repository's root, and those in `docs/`."""
    return [*(ROOT / name for name in HOME if (ROOT / name).exists()), *sorted(DOCS.rglob("*.md"))]


def linked_sources() -> list[Path]:
    """The files and folders outside the pages that pages link to, each once."""
    found = {link.file for page in pages() for link in links(page) if link.file.exists()}
    return sorted(file for file in found if site_page(file).startswith("source/"))


def source_page(file: Path) -> str:
    """A page that shows a source file, or lists the files of a folder with their summaries."""
    title = f"# {file.relative_to(ROOT).as_posix()}\n\n"
    if not file.is_dir():
        text = file.read_text(encoding="utf-8")
        language = {".py": "python", ".yaml": "yaml", ".sh": "sh", ".toml": "toml"}.get(file.suffix, "text")
        fence = "`" * 5
        return f"{title}{fence}{language}\n{text.rstrip()}\n{fence}\n"
    rows = [f"| {_named(each, file)} | {_summary(each)} |" for each in sorted(file.iterdir()) if _is_source(each)]
    return title + "| file | what |\n|---|---|\n" + "\n".join(rows) + "\n"


def _is_source(file: Path) -> bool:
    return (file.is_dir() or file.suffix in (".py", ".yaml", ".sh")) and file.name != "__pycache__"


def _named(file: Path, folder: Path) -> str:
    if file not in _linked():
        return f"`{file.name}`"
    target = os.path.relpath(site_page(file), Path(site_page(folder)).parent)
    return f"[`{file.name}`]({target})"


@cache
def _linked() -> frozenset[Path]:
    return frozenset(linked_sources())


def _summary(file: Path) -> str:
    """The first sentence of a module's docstring, or the first comment of a recipe."""
    module = file / "__init__.py" if file.is_dir() else file
    if not module.exists():
        return ""
    text = module.read_text(encoding="utf-8")
    found = re.match(r'"""(.+?)(?:\n\n|""")', text, re.DOTALL) or re.match(r"(?:#!.*\n)?# (.+)", text)
    return " ".join(found[1].split()) if found else ""
