"""Your own loop under any strategy: `torchrun --nproc-per-node 2 examples/classifier.py --strategy adpsgd`.

Learns to tell four shapes apart in noisy pictures that it draws itself. The lines that Starling changes in the loop are
marked.
"""

import argparse

import torch
from torch import Tensor, nn

import starling

SIZE = 12
NUM_CLASSES = 4


def draw(num: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy pictures `[N, 1, SIZE, SIZE]` of a cross, a bar, a frame or a disc, anywhere, and their classes `[N]`."""
    classes = torch.randint(NUM_CLASSES, (num,), generator=generator)
    centres = torch.randint(4, SIZE - 4, (num, 2, 1, 1), generator=generator)
    rows = (torch.arange(SIZE)[:, None] - centres[:, 0]).abs()
    columns = (torch.arange(SIZE)[None, :] - centres[:, 1]).abs()
    farther = torch.maximum(rows, columns)
    shapes = torch.stack(
        [(rows * columns == 0) & (farther <= 3), (rows <= 1) & (columns <= 3), farther == 3, rows**2 + columns**2 <= 8]
    )
    clean = shapes[classes, torch.arange(num)].float()
    return (clean + 0.5 * torch.randn(num, SIZE, SIZE, generator=generator)).unsqueeze(1), classes


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, NUM_CLASSES),
    )


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    model.eval()
    pictures, classes = draw(1000, torch.Generator().manual_seed(999))
    correct = (model(pictures).argmax(dim=1) == classes).float().mean()
    model.train()
    return float(correct)


def main(strategy: str, steps: int, autocast: bool) -> None:
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    with starling.join(model, optimizer, strategy) as learner:  # changed: the other learners are there
        generator = torch.Generator().manual_seed(learner.rank)  # each learner has data of its own
        for step in range(steps):
            pictures, classes = draw(32, generator)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = nn.functional.cross_entropy(model(pictures), classes)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            learner.step()  # changed: in place of optimizer.step()
            scheduler.step()
            if learner.rank == 0 and (step + 1) % 100 == 0:
                print(f"step {step + 1}, loss {loss.item():.3f}", flush=True)
        with learner.consensus(final=True):  # changed: evaluate, or save, the finished model, the same on all learners
            reached = accuracy(model)
        if learner.rank == 0:
            print(learner.stats())
            print(f"accuracy {reached:.3f} with {learner.world} learners under {strategy}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="adpsgd", help="a name that `starling strategies` lists")
    parser.add_argument("--steps", type=int, default=200, help="number of steps of each learner")
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16 where torch considers it safe")
    given = parser.parse_args()
    main(given.strategy, given.steps, given.autocast)
