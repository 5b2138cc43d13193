"""One of two learners with a loop of their own: `starling.join` and twelve steps."""

import torch

import starling

torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
learner = starling.join(model, optimizer, strategy="allreduce")
for _ in range(12):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    learner.step()
learner.close()
