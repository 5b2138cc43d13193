"""How many copies of the weights an asynchronous learner keeps."""

import json
import sys
from pathlib import Path

import pytest

from starling.launch.launcher import launch


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_averaging_keeps_at_most_three_copies_of_the_weights(wire: str, tmp_path: Path) -> None:
    """Beyond the weights and their gradients: a snapshot, the rounding error if there is one, and some pieces."""
    copies: dict[int, float] = {}
    command = [sys.executable, "-m", "tests.engines.memory_process", json.dumps({"wire": wire})]
    launch(command, 2, tmp_path, lambda rank, message: copies.update({rank: message["copies"]} if message else {}))
    assert len(copies) == 2
    assert all(2.0 < each < 2.0 + 3.0 for each in copies.values()), copies
