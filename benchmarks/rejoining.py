"""The return of a killed learner, by the size of the model: a table. `python -m benchmarks.rejoining`.

Three learners train the task of `storm.yaml`; one is killed and started again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

RECIPE = Path(__file__).with_name("storm.yaml")
STRATEGIES = (
    "allreduce",
    "adpsgd",
    "{name: diloco, every: 20}",
    "{name: decoupled-diloco, every: 16, fragments: 2, overlap: 6}",
)
WIDTHS = (850, 3_100, 5_500)
"""Of both hidden layers, for about 1, 10 and 30 million weights."""
KILL, JOIN, VICTIM = 15.0, 17.0, 2
Seconds = float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    given = parser.parse_args()
    table = Table("strategy", "weights", "gradient", "back after", "pause of the others: loss", "return")
    for strategy in given.strategies:
        for width in given.widths:
            with tempfile.TemporaryDirectory(prefix="starling-bench-") as name:
                table.add_row(strategy, f"{width * (width + 74) / 1e6:.1f} M", *cells(strategy, width, Path(name)))
    Console(width=140).print(table)
    return 0


def cells(strategy: str, width: int, folder: Path) -> list[str]:
    """Train, and return the time of a gradient, the time from the request to the first gradient of the learner's new
    process, and the longest pause of the others after its loss and after its return."""
    faults = f"[{{kill: {VICTIM}, at_seconds: {KILL}}}, {{join: {VICTIM}, at_seconds: {JOIN}}}]"
    settings = [f"strategy={strategy}", f"hidden=[{width}, {width}]", f"faults={faults}", f"exp={folder}"]
    more = ["learners=3", "budget={minutes: 0.75}", "seconds=0.2", "checkpoints.every=null"]
    command = [sys.executable, "-m", "starling", "train", str(RECIPE), *settings, *more]
    subprocess.run(command, check=True, capture_output=True)
    events = [json.loads(line) for line in (folder / "storm/log/events.jsonl").read_text().splitlines()]
    moments = {learner: gradients(folder, learner) for learner in range(3)}
    lost = next(each["time"] for each in events if each["kind"] == "loss")
    joined = next(each["time"] for each in events if each["kind"] == "join")
    usual = median(after - before for before, after in pairwise(moments[0]) if after < lost)
    back = next(each for each in moments[VICTIM] if each > lost) - (lost + JOIN - KILL)
    pauses = [
        max(longest(moments[learner], begin, end) for learner in range(3) if learner != VICTIM) - usual
        for begin, end in ((lost, joined - 2.0), (joined - 2.0, joined + 5.0))
    ]
    return [f"{each:.2f} s" for each in (usual, back - usual, *(max(0.0, pause) for pause in pauses))]


def gradients(folder: Path, learner: int) -> list[Seconds]:
    """The times at which a learner made its gradients."""
    lines = (line for path in folder.glob(f"storm/seen/*/learner-{learner}.jsonl") for line in path.open())
    return sorted(each["time"] for each in map(json.loads, lines) if each["kind"] == "stretch")


def longest(moments: list[Seconds], begin: Seconds, end: Seconds) -> Seconds:
    """The longest time between two gradients of which the second is in this interval."""
    return max(after - before for before, after in pairwise(moments) if begin < after < end)


if __name__ == "__main__":
    sys.exit(main())
