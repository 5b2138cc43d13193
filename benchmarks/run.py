"""All benchmarks: a table on the screen and `bench.json`, a list of {name, ratio, bar, holds}.

Run as `make bench`. Each figure is a ratio of two things measured alternately in one run.
"""

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import one_learner, training, two_learners, virtual_cluster
from benchmarks.measuring import Bar


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("bench.json"))
    output: Path = parser.parse_args().output
    torch.set_num_threads(1)  # one thread for each learner, as on a machine that several share
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory(prefix="starling-bench-") as name:
        folder = Path(name)
        training.prepare(folder)
        bars = [
            one_learner.measure(folder, device),
            two_learners.measure(folder),
            *virtual_cluster.measure(folder, device),
        ]
    output.write_text(json.dumps([bar.as_json() for bar in bars], indent=1) + "\n")
    show(bars, device)
    return 0


def show(bars: list[Bar], device: torch.device) -> None:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    table = Table("measured", "ratio", "bar", "holds", title=f"torch {torch.__version__} on {where}")
    for bar in bars:
        table.add_row(bar.name, f"{bar.ratio:.3f}", f"{bar.bar:g}", "yes" if bar.holds else "NO")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
