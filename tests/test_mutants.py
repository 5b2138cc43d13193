"""Tests notice if a fix is undone."""

import subprocess
from pathlib import Path

import pytest

from tools.mutants import Mutant, mutants, outcome


@pytest.mark.soak
@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_a_fix_that_is_undone_fails_its_test(mutant: Mutant, tmp_path: Path) -> None:
    problem, said = outcome(mutant, tmp_path)
    assert not problem, f"{problem}\n{said}"


def test_every_patch_applies_and_names_a_test_that_exists() -> None:
    """A change of the source therefore cannot leave patches behind; the soak tests show whether tests notice the
    mutants."""
    root = Path(__file__).parents[1]
    assert mutants()
    for mutant in mutants():
        file, _, name = mutant.test.partition("::")
        subprocess.run(["git", "apply", "--check", str(mutant.patch)], cwd=root, check=True)
        assert f"def {name.partition('[')[0]}(" in (root / file).read_text(encoding="utf-8"), mutant.test


@pytest.mark.wide
def test_a_mutant_that_changes_nothing_is_not_noticed(tmp_path: Path) -> None:
    """The tool itself can fail: a test that passes is a problem, and so is a patch that does not apply."""
    first, second = (Path(__file__).parents[1] / "CITATION.cff").read_text(encoding="utf-8").splitlines()[:2]
    patch = tmp_path / "harmless.patch"
    change = f"@@ -1,2 +1,2 @@\n-{first}\n+{first}0\n {second}\n"
    patch.write_text(f"Test: tests/test_chance.py\n\n--- a/CITATION.cff\n+++ b/CITATION.cff\n{change}")
    (tmp_path / "applied").mkdir()
    assert outcome(Mutant.read(patch), tmp_path / "applied")[0] == "the test passes"
    patch.write_text(patch.read_text().replace(f"-{first}", "-another line"))
    (tmp_path / "refused").mkdir()
    assert "does not apply" in outcome(Mutant.read(patch), tmp_path / "refused")[0]
