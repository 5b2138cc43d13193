"""A loop that survives the loss of learners, and that restarted processes join.

Start every process with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, end any of them with kill -9, and start it again
with the same variables. The lines that handle leaving and joining learners are marked.
"""

import argparse

import torch
from classifier import accuracy, draw, make_model
from torch import nn

import starling


def main(strategy: str, steps: int) -> str:
    """Train, and return a description of the result."""
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    with starling.join(model, optimizer, strategy, on_loss="continue") as learner:
        for _ in range(learner.num_steps):  # changed: a process that joins later brings its schedule up to date
            scheduler.step()
        membership = learner.membership
        while learner.num_steps < steps:  # changed: these are the run's steps, in place of a count of its own
            # changed: data that depend on the step and on the learner, not on how often this process was started
            seed = learner.num_steps * 1000 + learner.learner_id
            pictures, classes = draw(32, torch.Generator().manual_seed(seed))
            loss = nn.functional.cross_entropy(model(pictures), classes)
            optimizer.zero_grad()
            loss.backward()
            learner.step()
            scheduler.step()
            if learner.rank == 0 and learner.num_steps % 100 == 0:
                print(f"step {learner.num_steps}, loss {loss.item():.3f}", flush=True)
            if learner.membership != membership:  # changed: the moment to divide data again, if they are divided
                membership = learner.membership
                print(f"step {learner.num_steps}: {learner.world} learners", flush=True)
        with learner.consensus(final=True):
            reached = accuracy(model)
        said = f"accuracy {reached:.3f} with {learner.world} learners under {strategy}"
        if learner.rank == 0:  # the lowest of those that are left
            print(said, flush=True)
    return said


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="adpsgd", help="a name that `starling strategies` lists")
    parser.add_argument("--steps", type=int, default=200, help="number of steps of the run")
    given = parser.parse_args()
    main(given.strategy, given.steps)
