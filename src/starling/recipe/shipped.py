"""The recipes in the package, which can be used by name or copied."""

import shutil
from pathlib import Path

from starling.errors import ConfigError, did_you_mean
from starling.recipe.file import SHIPPED, read_base


def summaries() -> dict[str, str]:
    """A summary of each recipe by its name: the first comment of its file."""
    return {path.stem: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for path in _files()}


def copy_recipe(name: str, to: Path) -> list[Path]:
    """Copy a recipe and its bases into the folder `to`; return the new files.

    Raises:
        ConfigError: There is no recipe of that name, a file exists already, or the folder cannot be written.
    """
    known = {path.stem: path for path in _files()}
    if name not in known:
        raise ConfigError(f"recipe {name!r} is unknown; {did_you_mean(name, known)}known are {', '.join(known)}")
    sources = [known[name]]
    while (base := read_base(sources[-1])) is not None:
        sources.append(base)
    copies = [to / path.name for path in sources]
    if existing := [str(copy) for copy in copies if copy.exists()]:
        raise ConfigError(f"{', '.join(existing)}: exists already; remove it, or copy to another folder")
    try:
        to.mkdir(parents=True, exist_ok=True)
        for source, copy in zip(sources, copies, strict=True):
            shutil.copyfile(source, copy)
    except OSError as error:
        raise ConfigError(f"{to}: cannot be written ({error}); copy to another folder") from error
    return copies


def _files() -> list[Path]:
    return sorted(SHIPPED.glob("*.yaml"))
