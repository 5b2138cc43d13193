"""Size figures of the source: how large it is, how finely it is divided, and how many files a mini-batch passes
through.

    python -m tools.house [--code | --runs] [--update]

Prints each figure and its ceiling from `tools/house.toml`, and exits with 1 if a figure exceeds its ceiling. `--code`
prints the figures that are read from the source, `--runs` those of two traced runs. `--update` lowers ceilings to the
current figures; it raises none.
"""

import argparse
import ast
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median_high
from typing import TypeVar

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
CEILINGS = ROOT / "tools" / "house.toml"
SMALL = 120
"""Number of lines below which a file may as well be part of the only file that imports it."""
PLUG_IN = re.compile(r"Strategy\(|register\(|_strategy\(|Topology\(|registry")
"""Marks of a file that is one of many of its kind."""
JOIN = """
import sys
import starling
starling.join
print(sum(name.partition(".")[0] == "starling" for name in sys.modules))
"""
TOY_JOB = """
import sys, torch, starling, starling.experiment.train
starling.train, starling.join
print(sum(name.startswith("starling.speech") for name in sys.modules))
"""
DEMO = (
    *("name=house", "learners=2", "budget.steps=32", "data.test=[]", "data.valid=null"),
    "data.corpus.sets={train: 200, dev: 10, test: 10}",
)
Node = TypeVar("Node", bound=ast.AST)
WITHIN = 240.0
"""Seconds that a traced run may take."""


@dataclass(frozen=True)
class Figure:
    """One line of the table; `key` is its name in `tools/house.toml`."""

    key: str
    title: str
    value: int
    where: str = ""


class Source:
    """The Python files of the package in `folder`, which has the package's name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        texts = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
        self._texts = {path.relative_to(folder).as_posix(): text for path, text in texts.items()}
        self._trees = {path: ast.parse(text) for path, text in self._texts.items()}

    def figures(self) -> Iterator[Figure]:
        """The figures that are read from the files."""
        rooms = self._code_lines_by_room
        yield Figure("code_lines", "code lines", rooms.total(), ", ".join(f"{n} {c}" for n, c in rooms.most_common()))
        yield Figure("code_lines_outside_speech", "code lines outside speech/", rooms.total() - rooms["speech"])
        yield Figure("files", "files", len(self._texts))
        small = self._small_with_one_importer()
        title = f"files of at most {SMALL} lines with one importer, plug-ins apart"
        yield Figure("small_files", title, len(small), ", ".join(small))
        yield Figure("constructor_arguments", "most arguments of a constructor", *max(self._constructors()))
        yield Figure("dataclass_fields", "most fields of a dataclass with methods", *max(self._dataclasses()))
        yield Figure("learner_abstract", "abstract methods of Learner", self._abstract_methods_of_learner())

    @cached_property
    def _code_lines_by_room(self) -> Counter[str]:
        found = Counter[str]()
        for path, text in self._texts.items():
            found[path.partition("/")[0] if "/" in path else "."] += code_lines(text, self._trees[path])
        return found

    def _small_with_one_importer(self) -> list[str]:
        package = self._folder.name
        names = {path: f"{package}/{path}".removesuffix(".py").removesuffix("/__init__") for path in self._texts}
        path_of = {name.replace("/", "."): path for path, name in names.items()}
        importers: dict[str, set[str]] = {path: set() for path in self._texts}
        for path, node in self._nodes(ast.ImportFrom):
            for alias in node.names:
                target = path_of.get(f"{node.module}.{alias.name}") or path_of.get(node.module or "")
                if not node.level and target and target != path:
                    importers[target].add(path)
        return [
            path
            for path, text in self._texts.items()
            if len(importers[path]) == 1 and len(text.splitlines()) <= SMALL
            if not path.endswith("__init__.py") and not PLUG_IN.search(text)
        ]

    def _constructors(self) -> Iterator[tuple[int, str]]:
        """The number of arguments of each written constructor, apart from `self`."""
        for path, kind in self._nodes(ast.ClassDef):
            for item in kind.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    yield len(item.args.args) + len(item.args.kwonlyargs) - 1, f"{path}: {kind.name}"

    def _dataclasses(self) -> Iterator[tuple[int, str]]:
        """The number of fields of each dataclass with methods."""
        for path, kind in self._nodes(ast.ClassDef):
            methods = [each for each in kind.body if isinstance(each, ast.FunctionDef)]
            if _is_decorated(kind, "dataclass") and any(not method.name.startswith("__") for method in methods):
                yield sum(isinstance(each, ast.AnnAssign) for each in kind.body), f"{path}: {kind.name}"

    def _abstract_methods_of_learner(self) -> int:
        return sum(
            isinstance(method, ast.FunctionDef) and _is_decorated(method, "abstractmethod")
            for path, kind in self._nodes(ast.ClassDef)
            if path == "learner.py" and kind.name == "Learner"
            for method in kind.body
        )

    def _nodes(self, kind: type[Node]) -> Iterator[tuple[str, Node]]:
        for path, tree in self._trees.items():
            yield from ((path, node) for node in ast.walk(tree) if isinstance(node, kind))


def code_lines(text: str, tree: ast.Module) -> int:
    """The number of lines that are not blank, a comment, a docstring or a string below an attribute."""
    prose: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(number not in prose and line != "" and not line.startswith("#") for number, line in lines)


def _is_decorated(node: ast.ClassDef | ast.FunctionDef, name: str) -> bool:
    return any(name in ast.dump(each) for each in node.decorator_list)


def loaded() -> Iterator[Figure]:
    """The numbers of speech modules that a job unrelated to speech loads, and of modules that `starling.join` loads."""
    programs = {
        TOY_JOB: ("speech_of_a_toy_job", "modules of speech that a toy job loads"),
        JOIN: ("join_modules", "modules that starling.join loads"),
    }
    said = _said_by([([sys.executable, "-c", program], {}) for program in programs], ROOT)
    for (key, title), number in zip(programs.values(), said, strict=True):
        yield Figure(key, title, int(number))


def runs() -> Iterator[Figure]:
    """The files that learners pass through from one optimizer step to the next, in their main threads."""
    train = [sys.executable, "-m", "starling", "train", "demo", *DEMO]
    yield from _traced("demo", "a mini-batch of recipes/demo.yaml", [(train, {})])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    loop = [sys.executable, str(ROOT / "tools" / "trace" / "loop.py")]
    learners = [(loop, {**place, "RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "1")]
    yield from _traced("join", "one join(...).step()", learners)


def _traced(key: str, title: str, programs: Sequence[tuple[list[str], dict[str, str]]]) -> Iterator[Figure]:
    """The smallest figure among several mini-batches of all learners, which is what each mini-batch costs, and beside
    it the usual one and the largest: how often a learner waits and reports its progress depends on the load."""
    with tempfile.TemporaryDirectory() as name:
        folder, records = Path(name) / "work", Path(name) / "records"
        folder.mkdir()
        records.mkdir()
        tracing = {"STARLING_TRACE": str(records), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        _said_by([(command, environment | tracing) for command, environment in programs], folder)
        found = [each for path in records.iterdir() for each in json.loads(path.read_text(encoding="utf-8"))]
    if not any(each["files"] for each in found):
        raise SystemExit(f"{title}: no learner has made enough optimizer steps")
    files, changes = [each["files"] for each in found], [len(each["changes"]) for each in found]
    everywhere = max(each["files of all threads"] for each in found)
    yield Figure(
        f"{key}_files",
        f"files that {title} passes",
        min(files),
        f"usually {median_high(files)}, at most {max(files)}; all threads: {everywhere}",
    )
    yield Figure(
        f"{key}_changes",
        f"calls from file to file in {title}",
        min(changes),
        f"usually {median_high(changes)}, at most {max(changes)}",
    )


def _said_by(programs: Sequence[tuple[list[str], dict[str, str]]], folder: Path) -> list[str]:
    """The output of programs that run together, each a command and environment variables; all of them must succeed."""
    path = os.pathsep.join([str(ROOT / "tools" / "trace"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    running = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path, **environment},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, environment in programs
    ]
    said = []
    try:
        for program in running:
            output, errors = program.communicate(timeout=WITHIN)
            if program.returncode:
                raise SystemExit(f"{' '.join(map(str, program.args))} failed:\n{output[-1000:]}{errors[-3000:]}")
            said.append(output)
    finally:
        for program in running:
            program.kill()
    return said


class Ceilings:
    """The ceilings in a file, by the keys of their figures."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, int] = tomllib.loads(path.read_text(encoding="utf-8"))

    def exceeded(self, figures: Sequence[Figure]) -> list[Figure]:
        return [each for each in figures if each.value > self._values[each.key]]

    def lower(self, figures: Sequence[Figure]) -> None:
        """Lower the ceilings to these figures, where the figures are lower; comments in the file stay."""
        text = self._path.read_text(encoding="utf-8")
        for figure in figures:
            self._values[figure.key] = min(figure.value, self._values[figure.key])
            text = re.sub(rf"(?m)^{figure.key} = \d+", f"{figure.key} = {self._values[figure.key]}", text)
        self._path.write_text(text, encoding="utf-8")

    def table(self, figures: Sequence[Figure]) -> Table:
        table = Table("", "value", "ceiling", "where", box=None)
        for each in figures:
            style = "bold red" if self.exceeded([each]) else ""
            table.add_row(each.title, str(each.value), str(self._values[each.key]), each.where, style=style)
        return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the figures; returns 1 if one exceeds its ceiling."""
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=(__doc__ or "").partition("\n")[0])
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--code", action="store_true", help="only the figures that are read from the source")
    part.add_argument("--runs", action="store_true", help="only the two traced runs")
    parser.add_argument("--update", action="store_true", help="lower ceilings to the current figures")
    asked = parser.parse_args(arguments)
    figures = [] if asked.runs else [*Source(ROOT / "src" / "starling").figures(), *loaded()]
    figures += [] if asked.code else runs()
    ceilings = Ceilings(CEILINGS)
    if asked.update:
        ceilings.lower(figures)
    Console().print(ceilings.table(figures))
    return 1 if ceilings.exceeded(figures) else 0


if __name__ == "__main__":
    sys.exit(main())
