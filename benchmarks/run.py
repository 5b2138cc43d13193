"""All benchmarks: a table on the screen and `bench.json`, a list of {name, ratio, bar, holds}.

Run as `make bench`. Each figure is a ratio of two things measured alternately in one run.
"""

import argparse
import json
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import (
    adapters,
    auto,
    averaging_cost,
    batch_shares,
    calibration,
    checkpointing,
    control_plane,
    fairness,
    loading,
    on_ray,
    one_learner,
    preparing,
    rare_means,
    recording,
    scale,
    servers,
    start_up,
    stragglers,
    surviving,
    throttled_link,
    training,
    transcribing,
    two_learners,
    virtual_cluster,
    virtual_scale,
    waiting,
)
from benchmarks.measuring import Bar

Measure = Callable[[Path, torch.device], list[Bar]]

BENCHMARKS: dict[str, Measure] = {
    "one_learner": lambda folder, device: [one_learner.measure(folder, device)],
    "two_learners": lambda folder, device: [two_learners.measure(folder)],
    "virtual_cluster": virtual_cluster.measure,
    "virtual_scale": lambda folder, device: virtual_scale.measure(folder),
    "stragglers": lambda folder, device: stragglers.measure(folder),
    "batch_shares": lambda folder, device: batch_shares.measure(folder),
    "servers": lambda folder, device: servers.measure(folder),
    "throttled_link": lambda folder, device: throttled_link.measure(folder),
    "rare_means": lambda folder, device: rare_means.measure(folder),
    "fairness": lambda folder, device: fairness.measure(folder),
    "recording": lambda folder, device: recording.measure(folder),
    "averaging_cost": lambda folder, device: averaging_cost.measure(folder),
    "loading": lambda folder, device: loading.measure(folder),
    "preparing": lambda folder, device: preparing.measure(folder),
    "start_up": lambda folder, device: start_up.measure(folder),
    "surviving": lambda folder, device: surviving.measure(folder),
    "checkpointing": lambda folder, device: checkpointing.measure(folder),
    "scale": lambda folder, device: scale.measure(folder),
    "waiting": lambda folder, device: waiting.measure(folder),
    "calibration": lambda folder, device: calibration.measure(folder),
    "auto": lambda folder, device: auto.measure(folder),
    "control_plane": lambda folder, device: control_plane.measure(folder),
    "on_ray": lambda folder, device: on_ray.measure(folder),
    "transcribing": lambda folder, device: transcribing.measure(folder),
    "adapters": lambda folder, device: adapters.measure(folder),
}
"""The benchmarks, by their names for `--only`."""
ON_SPEECH = {"one_learner", "two_learners", "virtual_cluster", "surviving", "checkpointing"}
"""The benchmarks that train on the demo's corpus."""


def main() -> int:
    chosen, output = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all is cleaned up
    torch.set_num_threads(1)  # one thread for each learner, as on a machine that several share
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory(prefix="starling-bench-") as name:
        folder = Path(name)
        if ON_SPEECH & set(chosen):
            training.prepare(folder)
        for benchmark in chosen:
            begin = time.monotonic()
            found = BENCHMARKS[benchmark](folder, device)
            bars += found
            sys.stderr.write(f"{benchmark}: {time.monotonic() - begin:.0f} s\n")
            for bar in found:  # at once, and into the file: who stops a long run keeps what was measured
                sys.stderr.write(f"  {bar.name}: {bar.ratio:.3g}, bar {bar.bar:g}; {bar.detail}\n")
            output.write_text(json.dumps([bar.as_json() for bar in bars], indent=1) + "\n")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    Console().print(table(bars, f"torch {torch.__version__} on {where}"))
    return 0


def parse(arguments: Sequence[str]) -> tuple[list[str], Path]:
    """The benchmarks that were asked for, in their usual order, and the file for the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("bench.json"))
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), metavar="BENCHMARK")
    found = parser.parse_args(arguments)
    return [name for name in BENCHMARKS if name in found.only], found.output


def table(bars: Sequence[Bar], title: str) -> Table:
    """A table with a row for each bar."""
    made = Table("measured", "ratio", "bar", "holds", "absolute", title=title)
    for bar in bars:
        ratio = f"{bar.ratio:.3f}" if bar.ratio >= 0.1 else f"{bar.ratio:.2g}"
        made.add_row(bar.name, ratio, f"{bar.bar:g}", "yes" if bar.holds else "NO", bar.detail)
    return made


if __name__ == "__main__":
    sys.exit(main())
