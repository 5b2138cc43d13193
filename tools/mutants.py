"""Shows that tests notice if a fix is undone: `python -m tools.mutants [NAME...]`.

Each file `tools/mutants/NAME.patch` undoes one fix. Its first line names the test that must then fail::

    Test: tests/engines/test_hostile_loops.py::test_a_clamp_after_each_step_holds_or_is_refused[adpsgd]

The patch is applied to a copy of the committed and changed files, in which the test runs. A test that passes there, a
patch that no longer applies, and a test that does not run at all are failures.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATCHES = ROOT / "tools" / "mutants"
FAILED = 1
"""The exit code of pytest if tests have run and one has failed."""
LONGEST_SECONDS = 300.0


@dataclass(frozen=True)
class Mutant:
    """A patch that undoes a fix, and the test that must notice."""

    name: str
    patch: Path
    test: str

    @staticmethod
    def read(patch: Path) -> "Mutant":
        """The mutant of a patch. Raises ValueError if its first line names no test."""
        first = patch.read_text(encoding="utf-8").partition("\n")[0]
        if not first.startswith("Test: tests/"):
            raise ValueError(f"{patch}: its first line is {first!r}, and must be `Test: tests/FILE.py::NAME`")
        return Mutant(patch.stem, patch, first.removeprefix("Test: "))


def mutants(names: Sequence[str] = ()) -> list[Mutant]:
    """All mutants, or the mutants of these names, in order. Raises ValueError for an unknown name."""
    known = {patch.stem: patch for patch in sorted(PATCHES.glob("*.patch"))}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no mutant {', '.join(unknown)}; there are {', '.join(known)}")
    return [Mutant.read(known[name]) for name in names or known]


def copy_tree(to: Path) -> None:
    """Copy all files that git tracks or would add, as they are now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        source, target = ROOT / name, to / name
        if source.exists() or source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def outcome(mutant: Mutant, folder: Path) -> tuple[str, str]:
    """The outcome of a mutant in its own folder (empty if its test failed, otherwise the problem), and the output of
    the test."""
    copy_tree(folder)
    applied = subprocess.run(["git", "apply", str(mutant.patch)], cwd=folder, capture_output=True, text=True)
    if applied.returncode:
        return "the patch does not apply; make it anew from the present source", applied.stderr
    # the first place that Python looks for modules, also in the learners that the test starts
    environment = os.environ | {"PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", mutant.test]
    try:
        run = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LONGEST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"the test has not ended for {LONGEST_SECONDS:g} s", ""
    if run.returncode == FAILED:
        return "", run.stdout
    what = "the test passes" if run.returncode == 0 else f"the test did not run (exit code {run.returncode})"
    return what, run.stdout + run.stderr


def main(names: Sequence[str]) -> int:
    """Try mutants, and print a line for each; returns 1 if one is not noticed."""
    survivors = 0
    for mutant in mutants(names):
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="starling-mutant-") as folder:
            problem, said = outcome(mutant, Path(folder))
        survivors += bool(problem)
        print(f"{mutant.name}: {problem or 'noticed'} ({time.monotonic() - begin:.1f} s, {mutant.test})", flush=True)
        if problem:
            print(said[-3000:], flush=True)
    return min(1, survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
