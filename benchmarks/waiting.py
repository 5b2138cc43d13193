"""The time that the learners of a whole training run wait for data: the recipe of the digits, from its first step to
its last.

The loading processes start with the run, and the first mini-batch's wait for them is counted.
"""

import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

from benchmarks.measuring import Bar
from starling.errors import DataError
from starling.speech.prepare import prepare
from starling.speech.recipe import load_recipe

RECIPE = Path(__file__).parents[1] / "recipes" / "fsdd.yaml"
MOST = 0.02
"""Largest share of both learners' time."""


def measure(folder: Path) -> list[Bar]:
    """The share of a training run of `recipes/fsdd.yaml` with two learners that they wait for data; no bar if the
    recordings, which are not part of the project, are missing."""
    try:
        prepare(load_recipe(RECIPE, [f"data.folder={folder / 'waiting-data'}"]).data)
    except DataError:
        return []
    command = [
        *(sys.executable, "-m", "starling", "train", str(RECIPE), "learners=2", "name=waiting"),
        *(f"exp={folder / 'exp'}", f"data.folder={folder / 'waiting-data'}"),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    shares = [share for log in sorted((folder / "exp" / "waiting" / "log").iterdir()) for share in shares_in(log)]
    detail = f"mean of {len(shares)} epochs of both learners, the longest wait {max(shares):.1%} of an epoch"
    return [
        Bar.at_most("waiting for data in a training run of fsdd, two learners / their time", mean(shares), MOST, detail)
    ]


def shares_in(log: Path) -> list[float]:
    """The share of each epoch, all about equally long, that a learner waited for data, according to its log."""
    return [float(each) / 100.0 for each in re.findall(r" ended: .*? ([0-9.]+) % waiting for data", log.read_text())]
