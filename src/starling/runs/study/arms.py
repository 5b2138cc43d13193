"""The arms of the study of staleness: what N workers do that one learner does not, one thing at a time.

Each arm spends the same budget of mini-batches. With N workers and gradients g, the step of an arm is

    one            w <- w - a g(w)                        a small batch and nothing late
    batch          w <- w - a sum of N g(w)               N times the batch, nothing late
    delay          w <- w - a g(w as it was N - 1 steps ago)   a small batch, and staleness alone
    asynchronous   w <- w - a g(w that the worker read)   a small batch; staleness N - 1 on average
    summed         w <- w - a sum of N such g             N times the batch, and about one step of staleness

with a the step of the optimizer. Source: Aji & Heafield 2019, "Making Asynchronous Stochastic Gradient Descent Work for
Transformers" (arXiv 1906.03496), which separates the two effects in this way.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Arm:
    """One way to spend the budget."""

    name: str
    summary: str
    """What it is, for the legend of a table."""
    strategy: str
    options: dict[str, Any]
    """Of the strategy; "N" stands for the number of workers, "N-1" for one less."""
    many: bool
    """Whether N learners compute, or one."""
    depends: bool = True
    """Whether the number of workers changes anything."""

    def choice(self, workers: int) -> dict[str, Any]:
        """The `strategy:` section of a recipe for N `workers`."""
        numbers = {"N": workers, "N-1": workers - 1}
        return {"name": self.strategy} | {key: numbers.get(value, value) for key, value in self.options.items()}


ARMS = {
    arm.name: arm
    for arm in (
        Arm("one", "one learner: a small batch, nothing late", "delayed", {"delay": 0}, many=False, depends=False),
        Arm(
            "batch",
            "N workers in step: N times the batch, nothing late",
            "parameter-server",
            {"update": "hybrid", "combine": "sum"},
            many=True,
        ),
        Arm("delay", "one learner, gradients N - 1 steps late: staleness alone", "delayed", {"delay": "N-1"}, False),
        Arm(
            "asynchronous",
            "N workers, each gradient applied as it arrives",
            "parameter-server",
            {"update": "asynchronous"},
            many=True,
        ),
        Arm(
            "summed",
            "N workers, N arriving gradients summed into one step",
            "parameter-server",
            {"update": "summed", "sum": "N"},
            many=True,
        ),
    )
}
