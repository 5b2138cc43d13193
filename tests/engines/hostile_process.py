"""The program of a learner process in the tests of hostile loops: each does something to its model that its learner did
not do."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import schedulefree
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import starling
from starling.launch.link import Link, reported_errors
from starling.workload import Ticket
from tests.contract.problems import TinyRegression
from tests.engines.drop_in_process import flat as flat_of
from tests.engines.drop_in_process import take_gradient

STEPS = 8
LOADED = 7.0
BOUND = 0.05
RATE = 0.1
TIMEOUT = 20.0


def flat(model: nn.Module) -> Tensor:
    """All parameters, frozen ones included."""
    return flat_of(model, every=True)


class PlainLearner:
    """In place of a joined learner: a step of the loop's own optimizers, for the oracle."""

    world = 2

    def __init__(self, loop: "Loop") -> None:
        self._loop = loop

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        for each in self._loop.optimizers:
            if optimizer is None or optimizer is each:
                each.step()


class Loop:
    """A joined loop of the contract's problem; `before` is called before each gradient, `after` after each step."""

    def __init__(self, rank: int, case: dict[str, Any]) -> None:
        self.rank, self.case = rank, case
        self.model: nn.Module = TinyRegression().make_model()
        self.rate = float(case.get("rate", RATE))
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(self.model.parameters(), lr=self.rate)]
        self.steps = int(case.get("steps", STEPS))
        self.seen: dict[str, Tensor] = {}
        self.before: Callable[[int], None] = lambda step: None
        self.after: Callable[[int], None] = lambda step: None
        self.at_end: Callable[[], None] = lambda: None
        self.joined: Callable[[], None] = lambda: None
        self.gradient: Callable[[int], None] = lambda number: take_gradient(self.model, number)
        self.step: Callable[[], None] = lambda: self.learner.step()

    def in_one_process(self) -> Tensor:
        """The last weights of the plain loop that steps with the mean gradient of both learners: what they should be
        under `allreduce`."""
        self.learner: Any = PlainLearner(self)
        self.joined()
        for step in range(self.steps):
            self.before(step)
            found = []
            for rank in range(2):
                self.gradient(step * 2 + rank)
                found.append([each.grad.clone() for each in self.model.parameters() if each.grad is not None])
            for parameter, first, second in zip(self.model.parameters(), *found, strict=True):
                parameter.grad = (first + second) / 2
            self.step()
            self.after(step)
        self.at_end()
        return flat(self.model)

    def run(self) -> dict[str, Tensor]:
        """Join, train, and end with the final consensus."""
        self.seen["start"] = flat(self.model).clone()
        options = self.case.get("options", {})
        strategy, several = self.case["strategy"], self.optimizers
        optimizer = several[0] if len(several) == 1 else several
        with starling.join(
            self.model, optimizer, strategy, seed=11, timeout_seconds=TIMEOUT, **options
        ) as self.learner:
            self.joined()
            for step in range(self.steps):
                self.before(step)
                self.gradient(step * self.learner.world + self.rank)
                self.step()
                self.after(step)
            self.at_end()
            self.seen["last"] = flat(self.model).clone()
            with self.learner.consensus(final=True):
                self.seen["final"] = flat(self.model).clone()
        self.seen["closed"] = flat(self.model).clone()
        return self.seen


def load(loop: Loop) -> None:
    """All load weights after joining."""
    loop.joined = lambda: fill(loop.model, LOADED)


def load_on_one(loop: Loop) -> None:
    """Learner 0 alone loads weights."""
    loop.joined = lambda: fill(loop.model, LOADED) if loop.rank == 0 else None


def clamp(loop: Loop) -> None:
    """Weights are clamped after each step, as a WGAN's critic's are: through `data`, which no version counter sees."""

    def clamp_all(step: int) -> None:
        for parameter in loop.model.parameters():
            parameter.data.clamp_(-BOUND, BOUND)

    def after(step: int) -> None:
        moved = max(
            float(loop.rate * each.grad.abs().max()) for each in loop.model.parameters() if each.grad is not None
        )
        loop.seen["largest_step"] = torch.tensor(max(moved, float(loop.seen.get("largest_step", 0.0))))
        clamp_all(step)

    loop.joined = lambda: clamp_all(0)
    loop.after = after


def clamp_in_hook(loop: Loop) -> None:
    """The same within the optimizer's step, as the error of those that cannot adopt it recommends."""

    def clamp_all(*_: object) -> None:
        for parameter in loop.model.parameters():
            parameter.data.clamp_(-BOUND, BOUND)

    clamp_all()
    loop.seen["start"] = flat(loop.model).clone()
    loop.optimizers[0].register_step_post_hook(clamp_all)


def freeze_and_thaw(loop: Loop) -> None:
    """The first layer is frozen for the first half, or for good."""
    thaws_at = STEPS // 2 if loop.case.get("thaws", True) else loop.steps

    def before(step: int) -> None:
        if step == STEPS // 2:
            loop.seen["middle"] = flat(loop.model).clone()
        for parameter in halves(loop.model)[0]:
            parameter.requires_grad_(step >= thaws_at)

    loop.before = before
    loop.seen["frozen"] = torch.tensor(sum(each.numel() for each in halves(loop.model)[0]))


def foreign_optimizer(loop: Loop) -> None:
    """A second optimizer of the second half of the model, which was not given to join, makes plain steps."""
    first, last = halves(loop.model)
    loop.optimizers = [torch.optim.SGD(first, lr=loop.rate)]
    second = torch.optim.Adam(last, lr=loop.rate)
    loop.after = lambda step: second.step()


def gan(loop: Loop) -> None:
    """Two optimizers of the halves of one model step in turn, each after a backward that reaches both."""
    first, last = halves(loop.model)
    loop.optimizers = [torch.optim.SGD(first, lr=loop.rate, momentum=0.5), torch.optim.AdamW(last, lr=0.02)]
    loop.step = lambda: None

    def before(step: int) -> None:
        loop.turn = step % 2  # type: ignore[attr-defined]

    def after(step: int) -> None:
        loop.learner.step(optimizer=loop.optimizers[step % 2])

    loop.before, loop.after = before, after


def muon(loop: Loop) -> None:
    """Muon for matrices and AdamW for the rest, in one step."""
    matrices = [each for each in loop.model.parameters() if each.ndim == 2]
    others = [each for each in loop.model.parameters() if each.ndim != 2]
    loop.optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.02)]


def ema_swap(loop: Loop) -> None:
    """An average of the weights takes their place for an evaluation after each step, and then they return."""
    average = [parameter.detach().clone() for parameter in loop.model.parameters()]

    def after(step: int) -> None:
        parameters = list(loop.model.parameters())
        with torch.no_grad():
            for mean, parameter in zip(average, parameters, strict=True):
                mean.lerp_(parameter, 0.1)
            own = [parameter.clone() for parameter in parameters]
            for mean, parameter in zip(average, parameters, strict=True):
                parameter.copy_(mean)
            loop.model(torch.ones(2, 5))
            for mine, parameter in zip(own, parameters, strict=True):
                parameter.copy_(mine)

    loop.after = after


def schedule_free(loop: Loop) -> None:
    """A schedule-free optimizer, whose `eval` changes the weights before the consensus."""
    optimizer = schedulefree.SGDScheduleFree(loop.model.parameters(), lr=loop.rate)
    loop.optimizers = [optimizer]
    loop.joined = optimizer.train

    def at_end() -> None:
        loop.seen["trained"] = flat(loop.model).clone()
        optimizer.eval()

    loop.at_end = at_end


def compiled(loop: Loop) -> None:
    """The loop computes with a compiled model."""
    own = loop.model
    fast = torch.compile(own, backend="eager")

    def gradient(number: int) -> None:
        (points,) = TinyRegression().load(Ticket(number // 12, number % 12, number))
        own.zero_grad()
        TinyRegression().loss(fast, points).backward()  # type: ignore[arg-type, no-untyped-call]

    loop.gradient = gradient


def activation_checkpoints(loop: Loop) -> None:
    """Activations are computed again in backward."""
    own = loop.model

    def gradient(number: int) -> None:
        (points,) = TinyRegression().load(Ticket(number // 12, number % 12, number))
        own.zero_grad()
        found = checkpoint(own, points.inputs, use_reentrant=False)
        ((found.squeeze(1) - points.targets) ** 2).mean().backward()

    loop.gradient = gradient


def rewind(loop: Loop) -> None:
    """The loop returns to a checkpoint of its own after half of its steps."""
    saved: dict[str, Tensor] = {}

    def before(step: int) -> None:
        if step == 2:
            saved.update({name: each.clone() for name, each in loop.model.state_dict().items()})
        if step == STEPS // 2:
            loop.model.load_state_dict(saved)

    loop.before = before


def forked_loaders(loop: Loop) -> None:
    """Forked processes load data until the loop has closed."""
    numbers = list(range(100))
    loader = DataLoader(
        numbers,  # type: ignore[arg-type]
        batch_size=1,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    loop.joined = lambda: setattr(loop, "loading", iter(loader))
    loop.before = lambda step: next(loop.loading)  # type: ignore[attr-defined]


def fork_and_exit(loop: Loop) -> None:
    """A child ends as a program does, with its exit handlers, in the middle of the run."""

    def before(step: int) -> None:
        if step == 3 and os.fork() == 0:
            sys.exit(0)
        if step == 5:
            os.wait()

    loop.before = before


def evaluate_on_one(loop: Loop) -> None:
    """Learner 0 alone asks for a consensus in the middle."""

    def after(step: int) -> None:
        if step == 3 and loop.rank == 0:
            with loop.learner.consensus():
                loop.seen["between"] = flat(loop.model).clone()

    loop.after = after


def sparse(loop: Loop) -> None:
    """An embedding with sparse gradients."""
    loop.model = nn.EmbeddingBag(9, 3, sparse=True, mode="sum")
    with torch.no_grad():
        loop.model.weight.copy_(torch.linspace(-1.0, 1.0, 27).view(9, 3))
    loop.optimizers = [torch.optim.SparseAdam(loop.model.parameters(), lr=loop.rate)]

    def gradient(number: int) -> None:
        loop.model.zero_grad()
        loop.model(torch.tensor([[number % 5, (3 * number) % 7]])).square().sum().backward()

    loop.gradient = gradient


def complex_buffer(loop: Loop) -> None:
    """A buffer of complex numbers that differs between learners."""
    loop.model.register_buffer("phases", torch.zeros(1, dtype=torch.complex64))

    def at_end() -> None:
        dict(loop.model.named_buffers())["phases"].fill_(complex(loop.rank, 2.0))
        with loop.learner.consensus(final=True):
            loop.seen["buffer"] = torch.view_as_real(dict(loop.model.named_buffers())["phases"])[0].clone()

    loop.at_end = at_end


def other_optimizer(loop: Loop) -> None:
    """Learner 1 has another optimizer."""
    if loop.rank == 1:
        loop.optimizers = [torch.optim.Adam(loop.model.parameters(), lr=loop.rate)]


def unequal_ends(loop: Loop) -> None:
    """Learner 1 makes more steps."""
    loop.steps = STEPS + int(loop.case["more"]) * loop.rank


TROUBLES: dict[str, Callable[[Loop], None]] = {
    each.__name__: each
    for each in (
        load,
        load_on_one,
        clamp,
        clamp_in_hook,
        freeze_and_thaw,
        foreign_optimizer,
        gan,
        muon,
        ema_swap,
        schedule_free,
        compiled,
        activation_checkpoints,
        rewind,
        forked_loaders,
        fork_and_exit,
        evaluate_on_one,
        unequal_ends,
        sparse,
        complex_buffer,
        other_optimizer,
    )
}


def fill(model: nn.Module, value: float) -> None:
    model.load_state_dict({name: torch.full_like(each, value) for name, each in model.state_dict().items()})


def halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = list(model.parameters())
    return parameters[:2], parameters[2:]


def main(cases: dict[str, Any], folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    for name, case in cases.items():
        loop = Loop(rank, case)
        TROUBLES[case["trouble"]](loop)
        save_file(loop.run(), folder / f"{name}-{rank}.safetensors")


if __name__ == "__main__":
    with reported_errors(Link.from_environment()):
        main(json.loads(sys.argv[1]), Path(sys.argv[2]))
