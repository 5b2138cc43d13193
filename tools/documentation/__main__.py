"""`python -m tools.documentation FOLDER` writes the sources of the documentation site, for `make docs`. `python -m
tools.documentation --reference` writes the generated parts of the reference pages in the repository."""

import re
import shutil
import sys
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path

from tools.documentation import commands, links, notebooks, public_names, recipe_keys

GENERATED: Mapping[str, Callable[[], str]] = {
    "reference/recipe.md": recipe_keys.page,
    "reference/commands.md": commands.page,
    "reference/python.md": public_names.page,
}
"""The functions that make the generated part of each page."""
PLACE = "> The rest of this page is made from the source."
"""The first line of the quotation before the generated part of a page."""
IN_REPOSITORY: Mapping[str, Callable[[], str]] = {
    "reference/recipe.md": recipe_keys.page,
    "reference/commands.md": commands.page,
    "reference/python.md": public_names.overview,
}
"""The functions that make the generated part of each page in the repository."""
_ASSETS = (".svg", ".png", ".css", ".html")


def write_site(folder: Path) -> None:
    """Write every page, picture and notebook of the site.

    Raises:
        ValueError: Some links lead nowhere, or some public names have no docstring.
    """
    if found := problems():
        raise ValueError("\n".join(found))
    for page in links.pages():
        _write(folder / links.site_page(page), text_of(page))
    for source in links.linked_sources():
        _write(folder / links.site_page(source), links.source_page(source))
    notebooks.write(folder / "tutorials")
    for asset in links.DOCS.rglob("*"):
        if asset.suffix in _ASSETS:
            target = folder / asset.relative_to(links.DOCS)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(asset, target)
            if asset.suffix == ".html":  # its links are to pages, as on the forge
                text = target.read_text(encoding="utf-8").replace('"README.md"', '"index.html"')
                target.write_text(re.sub(r'"([\w-]+)\.md"', r'"\1.html"', text), encoding="utf-8")


def problems() -> list[str]:
    """Broken links, pages whose generated part is missing or old, and public names without a docstring."""
    found = [f"{name}: a public name without a docstring" for name in public_names.undocumented()]
    for page in links.pages():
        name = page.relative_to(links.ROOT)
        found += [f"{name}: {problem}" for link in links.links(page) if (problem := links.problem(link))]
        if links.site_page(page) not in GENERATED:
            continue
        if page.read_text(encoding="utf-8").count(PLACE) != 1:
            found.append(f"{name}: needs one line that reads {PLACE!r}")
        elif page.read_text(encoding="utf-8") != in_repository(page):
            found.append(f"{name}: its generated part is old; run python -m tools.documentation --reference")
    return found


def in_repository(page: Path) -> str:
    """The text of a page in the repository, with its present generated part."""
    before, place, after = page.read_text(encoding="utf-8").partition(PLACE)
    quotation = "".join(takewhile(lambda line: line.startswith(">"), after[1:].splitlines(keepends=True)))
    return f"{before}{place}\n{quotation}\n{IN_REPOSITORY[links.site_page(page)]().rstrip()}\n"


def text_of(page: Path) -> str:
    """The text of a page on the site."""
    text = page.read_text(encoding="utf-8")
    if (make := GENERATED.get(links.site_page(page))) is not None:
        text = text.partition(PLACE)[0] + make()
    text = links.for_site(text, page)
    if page.parent.name == "tutorials" and page.stem in notebooks.TUTORIALS:
        title, rest = text.split("\n", 1)
        text = f"{title}\n\n[Download this tutorial as a notebook]({page.stem}.ipynb)\n{rest}"
    return text


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--reference":
        for each in (each for each in links.pages() if links.site_page(each) in IN_REPOSITORY):
            each.write_text(in_repository(each), encoding="utf-8")
        sys.exit()
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    try:
        write_site(target)
    except ValueError as error:
        sys.exit(f"error: the documentation has problems:\n{error}")
