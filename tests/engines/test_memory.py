"""How many copies of the weights an asynchronous learner keeps."""

import sys
from pathlib import Path
from typing import Any

import pytest

from starling.launch.launcher import launch
from starling.launch.messages import LearnerMessage, values_of


@pytest.mark.wide
def test_averaging_keeps_at_most_three_copies_of_the_weights(tmp_path: Path) -> None:
    """Beyond the weights and their gradients: a snapshot, the rounding error if there is one, and some pieces."""
    copies: dict[tuple[str, int], float] = {}

    def on_message(rank: int, message: LearnerMessage) -> None:
        told: dict[str, Any] = dict(values_of(message))
        if "copies" in told:
            copies[told["compression"], rank] = told["copies"]

    compressions = ["none", "bfloat16"]
    launch([sys.executable, "-m", "tests.engines.memory_process", *compressions], 2, tmp_path, on_message)
    assert copies.keys() == {(compression, rank) for compression in compressions for rank in range(2)}
    assert all(2.0 < each < 2.0 + 3.0 for each in copies.values()), copies
