"""Follows images/Dockerfile without Docker: `python -m tools.image FOLDER [NAME=VALUE...]`.

An empty virtual environment takes the place of the base image, and the paths of the image are folders below FOLDER.
NAME=VALUE is a build argument, such as `TORCH_INDEX=https://pypi.org/simple`. At the end, commands run as they do in a
container. Only what installs Debian's packages or adds users is skipped.

This module needs only the standard library, because `.ci/smoke` runs it outside of any environment.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "images" / "Dockerfile"
COMMANDS = (
    ("--help",),
    ("starling", "--help"),
    ("starling", "recipes"),
    ("python", "-c", "import starling; print(starling.__file__)"),
    ("torchrun", "--help"),
)
"""Arguments of `docker run IMAGE` that must work."""
FOR_DEBIAN = ("apt-get", "useradd")
"""A RUN instruction that begins with one of these programs is skipped."""
_PATH = re.compile(r"(?<![\w.:/}])/(?=(?:build|opt|work|usr/local/bin)\b)")
"""The beginning of an absolute path in the image."""


@dataclass(frozen=True)
class Instruction:
    """An instruction of a Dockerfile, such as `RUN`, with the rest of its line. Continuation lines are joined."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        return self.text.split()


def instructions(dockerfile: str) -> list[Instruction]:
    """The instructions of a Dockerfile, without comments."""
    lines = [line for line in dockerfile.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        Instruction(name.upper(), text.strip())
        for name, _, text in (line.partition(" ") for line in joined.splitlines())
    ]


def filled(text: str, variables: Mapping[str, str]) -> str:
    """`text` with the values of its variables. Raises KeyError for a variable that is not defined."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda match: variables[match[1] or match[2]], text)


@dataclass
class Image:
    """An image that is built in a folder."""

    folder: Path
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Build arguments."""
    has_pip: bool = True
    """Whether the base image has pip, which takes seconds to install."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment of the last stage."""
    workdir: Path = Path()
    entrypoint: Sequence[str] = ()
    ran: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def mapped(self, text: str) -> str:
        """`text` with paths of this machine in place of the image's."""
        return _PATH.sub(lambda _: f"{self.folder}/", text)

    def build(self, dockerfile: str) -> None:
        """Follow a Dockerfile. Raises CalledProcessError if a command fails."""
        base = self.folder / "base"
        venv.create(base, clear=True, with_pip=self.has_pip)
        unset = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
        outside = {name: value for name, value in os.environ.items() if name not in unset}
        outside["PATH"] = os.pathsep.join([str(base / "bin"), os.environ["PATH"]])
        in_all_stages: dict[str, str] = {}
        num_stages = 0
        for each in instructions(dockerfile):
            if each.name == "FROM":
                num_stages += 1
                self.variables, self.workdir = dict(outside), self.folder
            elif each.name == "ARG":
                name, _, default = each.text.partition("=")
                known = self.variables if num_stages else in_all_stages
                known[name] = self.arguments.get(name, filled(default.strip('"'), known))
            elif each.name == "ENV":
                name, _, value = each.text.partition("=")
                self.variables[name] = filled(self.mapped(value), self.variables)
            elif each.name == "WORKDIR":
                self.workdir = Path(self.mapped(each.text))
                self.workdir.mkdir(parents=True, exist_ok=True)
            elif each.name == "COPY":
                self._copy(each.words)
            elif each.name == "RUN":
                self._run(each)
            elif each.name == "ENTRYPOINT":
                self.entrypoint = json.loads(each.text)

    def _copy(self, words: Sequence[str]) -> None:
        if words[0].startswith("--from="):  # stages share the folder
            assert words[1] == words[2] and Path(self.mapped(words[1])).exists(), words
            return
        *sources, place = words
        target = self.workdir / self.mapped(place)
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, target)

    def _run(self, each: Instruction) -> None:
        if each.words[0] in FOR_DEBIAN:
            self.skipped.append(each.text)
            return
        self.ran.append(each.text)
        print(f"RUN {each.text}", flush=True)
        subprocess.run(["sh", "-c", self.mapped(each.text)], cwd=self.workdir, env=self.variables, check=True)

    def outputs(self, commands: Sequence[Sequence[str]]) -> Iterator[str]:
        """What each command prints in a container. Raises CalledProcessError if one fails."""
        tini, end_of_options, program = self.entrypoint
        assert (tini, end_of_options) == ("tini", "--"), self.entrypoint
        entrypoint = self.folder / "usr" / "local" / "bin" / program
        for command in commands:
            print("docker run IMAGE", *command, flush=True)
            done = subprocess.run(
                [entrypoint, *command],
                cwd=self.workdir,
                env=self.variables,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            yield done.stdout


def main(folder: Path, *arguments: str) -> None:
    """Build the image in a folder, and run commands in it."""
    image = Image(folder.resolve(), dict(each.split("=", 1) for each in arguments))
    image.build(DOCKERFILE.read_text(encoding="utf-8"))
    said = dict(zip(COMMANDS, image.outputs(COMMANDS), strict=True))
    assert said["--help",] == said["starling", "--help"] and "Usage: starling" in said["--help",], said
    assert "demo" in said["starling", "recipes"], said
    assert said[COMMANDS[3]].startswith(str(image.folder / "opt" / "starling")), said
    print(f"the image works; skipped: {'; '.join(image.skipped)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
