"""The program of a learner process that never calls `close`, in the tests of joined loops."""

import atexit
import sys
from pathlib import Path

import torch
from torch import nn

import starling

folder, ends = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
model = nn.Linear(2, 1)
learner = starling.join(model, torch.optim.SGD(model.parameters(), lr=0.1), "adpsgd", timeout_seconds=60.0)
atexit.register((folder / f"later-{learner.rank}").touch)
with learner.consensus():  # neither ends before the other has come so far
    pass
for _ in range(3):
    model(torch.ones(4, 2)).sum().backward()
    learner.step()
if ends == "finished":
    with learner.consensus(final=True):
        pass
