"""The examples do what they say, started as a user starts them."""

import re
import sys
from pathlib import Path

import pytest

from tests.sessions import run_to_end

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
@pytest.mark.parametrize(("learners", "strategy"), [(2, "adpsgd"), (3, "delay-by-one")])
def test_the_classifier_learns_under_torchrun(learners: int, strategy: str, tmp_path: Path) -> None:
    """Far above the 25 % of chance, soon, with exit code 0, and no process is left.

    `make test` runs the first of these as a command of the README, and asks of it the same.
    """
    torchrun = Path(sys.executable).parent / "torchrun"
    command = [torchrun, "--nproc-per-node", str(learners), ROOT / "examples" / "classifier.py", "--strategy", strategy]
    code, said, left = run_to_end(command, tmp_path)
    assert code == 0, said
    assert not left
    reached = re.search(rf"accuracy (\S+) with {learners} learners under {strategy}", said)
    assert reached, said
    assert float(reached[1]) > 0.9
