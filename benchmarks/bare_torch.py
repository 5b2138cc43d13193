"""The start of a training without Starling: `bare_torch FILE` notes in FILE when its first gradient is ready."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.perceptron import SMALL, perceptron


def main(noted: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(perceptron(SMALL))
    model(torch.zeros(1, SMALL[0])).square().mean().backward()
    noted.write_text(json.dumps(time.monotonic()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
