"""The program of a worker that trains under columns of the table of peers and saves each model: `torchft_process
COLUMNS FOLDER`."""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.utils import parameters_to_vector

from benchmarks.peer_worker import draw_batches, end_with_launcher, meet
from benchmarks.perceptron import perceptron
from benchmarks.rivals import COLUMNS, LOCAL_STEPS, Worker, case_store

WIDTHS = (8, 16, 4)
NUM_OUTER_STEPS = 3


def main(columns: list[str], folder: Path) -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for number, column in enumerate(columns):
        model = perceptron(WIDTHS)
        batches = draw_batches(WIDTHS, rank)
        with COLUMNS[column].open(Worker(rank, world, case_store(store, number), model, {})) as loop:
            for _ in range(NUM_OUTER_STEPS * LOCAL_STEPS):
                inputs, targets = next(batches)
                loop.zero_grad()
                nn.functional.mse_loss(loop.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                loop.step()
            parameters_to_vector(model.parameters()).detach().numpy().tofile(folder / f"{column}-{rank}.bin")
    meet(store, world, "the end")


if __name__ == "__main__":
    end_with_launcher()
    main(sys.argv[1].split(","), Path(sys.argv[2]))
