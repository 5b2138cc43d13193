"""`starling.attach`: the optimizer's own `step` as the learner's."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import starling
from starling.errors import ConfigError
from tests.engines.attached_process import CASES
from tests.warm_start import run_learners


def test_an_attached_loop_computes_the_bits_of_a_joined_one(tmp_path: Path) -> None:
    """With and without a scaler, one of whose steps is skipped; at its end, a process closes its learner."""
    run_learners([sys.executable, "-m", "tests.engines.attached_process", str(tmp_path)], 2, tmp_path)
    for rank in range(2):
        found = load_file(tmp_path / f"{rank}.safetensors")
        for strategy, is_scaled in CASES:
            assert torch.equal(found[f"{strategy}-{is_scaled}-True"], found[f"{strategy}-{is_scaled}-False"])


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adafactor", "RMSprop", "Adagrad"])
def test_one_learner_computes_the_bits_of_the_plain_loop(kind: str) -> None:
    """With a closure in every other step, a hook that changes the gradient, and a state that counts steps."""

    def train(is_attached: bool) -> torch.Tensor:
        torch.manual_seed(3)
        model = nn.Linear(3, 2)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05)
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(model.parameters(), 0.5))
        learner = starling.attach(optimizer, model, "adpsgd") if is_attached else None
        counted = []
        optimizer.register_step_post_hook(lambda *_: counted.append(1))
        for step in range(6):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(torch.full((1, 3), step - 2.0)).square().sum()
                loss.backward()
                return loss

            if step % 2:
                assert float(optimizer.step(closure).detach()) > 0.0
            else:
                closure()
                optimizer.step()
        assert len(counted) == 6
        if learner is not None:
            learner.close()
            optimizer.step()  # is the loop's own again
        else:
            optimizer.step()
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])

    assert torch.equal(train(True), train(False))


def test_what_join_refuses_attach_refuses() -> None:
    """Unknown options, for one."""
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="patern: unknown key; did you mean pattern"):
        starling.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, "adpsgd", patern="pairs")
