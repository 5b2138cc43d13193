"""Runs cases of other libraries' trainers, each in forked processes, so that the libraries are loaded once for all.

`python -m tests.integrations.host_process FOLDER HOST:CASE:WORLD...` leaves the exit codes in FOLDER/codes.json.
"""

import importlib
import json
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import torch._dynamo

from tests.integrations.forked import in_processes
from tests.warm_start import start_learners

ROOT = Path(__file__).parents[2]


def run(folder: Path, *cases: str, is_warm: bool = True) -> dict[str, list[int]]:
    """Run cases: the exit codes of each. A warm process has loaded torch."""
    command = [sys.executable, "-m", "tests.integrations.host_process", str(folder), *cases]
    if is_warm:
        with start_learners(command, 1, folder) as started:
            code, said = started.end(0, within=800.0)
        assert code == 0, said
    else:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        (folder / "learner-0.log").write_text(done.stdout + done.stderr, encoding="utf-8")
        assert done.returncode == 0, done.stdout + done.stderr
    codes: dict[str, list[int]] = json.loads((folder / "codes.json").read_text(encoding="utf-8"))
    return codes


def main(folder: Path, cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    codes: dict[str, list[int]] = {}
    for each in cases:
        host, case, world = each.split(":")
        module = importlib.import_module(f"tests.integrations.{host}_process")
        if host == "huggingface":
            importlib.import_module("transformers").logging.set_verbosity_error()
        elif not (folder / "nemo.json").exists():
            module.prepare(folder)
        has_agent = "survive" not in case  # runs that survive losses are started by hand
        within = 3000.0 if "accuracies" in case or case == "rates" else 200.0
        codes[f"{host}:{case}"] = in_processes(
            int(world), partial(module.CASES[case], folder=folder), has_agent, within
        )
    (folder / "codes.json").write_text(json.dumps(codes), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
